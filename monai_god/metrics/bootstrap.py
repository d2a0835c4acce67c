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
"""Confidence intervals by resampling patients: the images of a patient are not independent of each other."""

from __future__ import annotations

from typing import Any

import numpy as np

from monai_god.metrics.pairs import patient_codes

__all__ = ["bootstrap_interval", "patient_bootstrap"]


def patient_bootstrap(
    values: np.ndarray,
    patient_ids: Any,
    resamples: int = 1000,
    seed: int = 0,
    weights: np.ndarray | None = None,
) -> np.ndarray:
    """Means over resampled patients.

    Patients are drawn with replacement, each with all its values, as many as there are; a resample's figure is the
    mean over the values it holds. The draw depends on the seed and on the number of patients alone, so that two
    settings measured on the same patients are resampled in the same way.

    Args:
        values: [n] or [n, k], k figures of n queries (or pairs).
        patient_ids: [n] patient of each.
        resamples: number of resamples B.
        seed: of the draw.
        weights: [n] how often each row of values counts; 1 by default.

    Returns:
        [B] or [B, k] float64.

    Raises:
        ValueError: no values, lengths differ, or ``resamples`` < 1.
    """
    values = np.asarray(values, dtype=np.float64)
    if not values.size:
        raise ValueError("there is nothing to resample.")
    flat = values.reshape(len(values), -1)
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}.")
    patient = patient_codes(patient_ids)
    if len(patient) != len(flat):
        raise ValueError(f"there are {len(flat)} values, but {len(patient)} patient ids.")
    weight = np.ones(len(flat)) if weights is None else np.asarray(weights, dtype=np.float64)
    n_patients = int(patient.max()) + 1
    sums = np.empty((n_patients, flat.shape[1] + 1))
    sums[:, -1] = np.bincount(patient, weight, minlength=n_patients)
    for column in range(flat.shape[1]):
        sums[:, column] = np.bincount(patient, flat[:, column] * weight, minlength=n_patients)
    rng = np.random.default_rng(seed)
    share = np.full(n_patients, 1.0 / n_patients)
    result = np.empty((resamples, flat.shape[1]))
    step = max(1, 2**22 // n_patients)
    for start in range(0, resamples, step):
        drawn = rng.multinomial(n_patients, share, size=min(step, resamples - start)).astype(np.float64) @ sums
        result[start : start + step] = drawn[:, :-1] / drawn[:, -1:]
    return result.reshape(resamples, *values.shape[1:])


def bootstrap_interval(samples: np.ndarray, level: float = 0.95) -> np.ndarray:
    """Percentile interval.

    Args:
        samples: [B, ...] resampled figures.
        level: probability inside.

    Returns:
        [2, ...] lower and upper end.
    """
    return np.quantile(samples, [(1 - level) / 2, (1 + level) / 2], axis=0)
