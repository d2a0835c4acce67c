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

from monai_god.metrics import RETRIEVAL_METRICS, compare_retrieval, paired_patient_bootstrap, retrieval_metrics


@pytest.fixture(scope="module")
def settings():
    rng = np.random.default_rng(0)
    ids = np.repeat(np.arange(80), 3)
    centre = rng.standard_normal((80, 12))[ids]
    noise = rng.standard_normal((240, 12))
    return ids, [retrieval_metrics(centre + s * noise, ids, per_query=True, bootstrap=0) for s in (1.0, 1.0, 0.6)]


def test_a_real_difference_excludes_zero_and_none_does_not(settings):
    _, (worse, same, better) = settings
    got = compare_retrieval(worse, better, metrics=RETRIEVAL_METRICS)
    for name in RETRIEVAL_METRICS:
        assert got[name]["difference"] == pytest.approx(better[name] - worse[name])
        assert got[name]["baseline"] == pytest.approx(worse[name])
        assert got[name]["candidate"] == pytest.approx(better[name])
    assert got["map"]["ci95"][0] > 0 and got["map"]["p"] < 0.01
    none = compare_retrieval(worse, same)
    assert none["rank1"] == {**none["rank1"], "difference": 0.0, "ci95": [0.0, 0.0], "p": 1.0}
    back = compare_retrieval(better, worse)["map"]
    np.testing.assert_allclose(back["ci95"], [-x for x in got["map"]["ci95"][::-1]], atol=1e-12)


def test_pairing_is_tighter_than_two_single_intervals(settings):
    ids, (worse, _, better) = settings
    first, second = worse["per_query"]["map"], better["per_query"]["map"]
    low, high = paired_patient_bootstrap(first, second, ids)["ci95"]
    by_hand = []
    drawn = np.random.default_rng(0).multinomial(80, [1 / 80] * 80, size=1000)
    for weights in drawn:
        rows = np.repeat(np.arange(240), weights[ids])
        by_hand.append(second[rows].mean() - first[rows].mean())
    np.testing.assert_allclose([low, high], np.quantile(by_hand, [0.025, 0.975]))


def test_false_alarms_are_as_rare_as_promised():
    """Two settings that differ by chance alone: p < 0.05 in about one of twenty."""
    rng = np.random.default_rng(5)
    alarms = 0
    for seed in range(300):
        patients = np.repeat(np.arange(50), 4)
        difference = rng.standard_normal(50)[patients] + 0.3 * rng.standard_normal(200)
        alarms += paired_patient_bootstrap(np.zeros(200), difference, patients, resamples=400, seed=seed)["p"] < 0.05
    assert 3 <= alarms <= 30


def test_different_queries_are_refused(settings):
    ids, (worse, _, better) = settings
    fewer = retrieval_metrics(np.random.default_rng(0).standard_normal((237, 4)), ids[:-3], per_query=True, bootstrap=0)
    with pytest.raises(ValueError, match="same queries"):
        compare_retrieval(worse, fewer)
    with pytest.raises(ValueError, match="per_query=True"):
        compare_retrieval(worse, {key: value for key, value in better.items() if key != "per_query"})
    with pytest.raises(ValueError, match="unknown metrics"):
        compare_retrieval(worse, better, metrics=["rank2"])
    with pytest.raises(ValueError, match="same protocol"):
        compare_retrieval(worse, {**better, "protocol": {**better["protocol"], "exclude_same_visit": True}})
    with pytest.raises(ValueError, match="one figure per query"):
        paired_patient_bootstrap(np.zeros(3), np.zeros(4), [0, 1, 2])
