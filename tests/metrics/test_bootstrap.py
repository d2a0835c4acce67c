# Copyright (c) monai_god contributors
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#     http://www.apache.org/licenses/LICENSE-2.0
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
from __future__ import annotations

import numpy as np
import pytest

from monai_god.metrics import bootstrap_interval, patient_bootstrap


def test_resamples_are_means_over_drawn_patients():
    rng = np.random.default_rng(0)
    patients = rng.integers(0, 7, 50)
    values = rng.standard_normal((50, 2))
    got = patient_bootstrap(values, patients, resamples=20, seed=4)
    drawn = np.random.default_rng(4).multinomial(7, [1 / 7] * 7, size=20)
    for b in range(20):
        rows = np.concatenate([np.repeat(np.flatnonzero(patients == p), drawn[b, p]) for p in range(7)])
        np.testing.assert_allclose(got[b], values[rows].mean(axis=0))


def test_it_covers_the_truth_about_as_often_as_it_says():
    """Patients whose images agree: an interval over images would be far too narrow."""
    rng = np.random.default_rng(1)
    inside = 0
    for seed in range(200):
        patients = np.repeat(np.arange(60), 5)
        values = rng.standard_normal(60)[patients]
        low, high = bootstrap_interval(patient_bootstrap(values, patients, 300, seed))
        inside += low <= 0 <= high
    assert 0.89 <= inside / 200 <= 0.99


def test_weights_count_rows_so_many_times():
    values, patients = np.array([1.0, 2.0, 5.0]), np.array([0, 1, 1])
    repeated = patient_bootstrap(np.array([1.0, 2.0, 2.0, 2.0, 5.0]), [0, 1, 1, 1, 1], 50)
    np.testing.assert_allclose(patient_bootstrap(values, patients, 50, weights=np.array([1, 3, 1])), repeated)


def test_nothing_to_resample_is_an_error():
    with pytest.raises(ValueError, match="nothing"):
        patient_bootstrap(np.zeros(0), [])
    with pytest.raises(ValueError, match="3 values, but 2"):
        patient_bootstrap(np.zeros(3), [0, 1])
    with pytest.raises(ValueError, match="at least 1"):
        patient_bootstrap(np.zeros(2), [0, 1], resamples=0)
