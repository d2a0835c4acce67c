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
"""Is the second setting better than the first, or is it the choice of patients?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from monai_god.metrics.bootstrap import bootstrap_interval, patient_bootstrap
from monai_god.metrics.retrieval import RETRIEVAL_METRICS, metric_values

__all__ = ["compare_retrieval", "paired_patient_bootstrap"]


def paired_patient_bootstrap(
    baseline: np.ndarray,
    candidate: np.ndarray,
    patient_ids: Any,
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Difference of two means over the same queries, with patients resampled for both at once.

    Args:
        baseline: [n] figure of each query under the first setting.
        candidate: [n] under the second.
        patient_ids: [n] patient of each query.
        resamples: number of resamples.
        seed: of the draw.

    Returns:
        ``baseline``, ``candidate``: means; ``difference``: candidate - baseline; ``ci95``: [low, high] of it; ``p``:
        two-sided, twice the smaller share of resamples on one side of 0, never below 2 / (resamples + 1).

    Raises:
        ValueError: lengths differ, or there are no queries.
    """
    first, second = np.asarray(baseline, dtype=float), np.asarray(candidate, dtype=float)
    if first.shape != second.shape or first.ndim != 1:
        raise ValueError(f"the two settings must have one figure per query: shapes {first.shape} and {second.shape}.")
    samples = patient_bootstrap(second - first, patient_ids, resamples, seed)
    side = min(np.count_nonzero(samples <= 0), np.count_nonzero(samples >= 0))
    return {
        "baseline": float(first.mean()),
        "candidate": float(second.mean()),
        "difference": float((second - first).mean()),
        "ci95": bootstrap_interval(samples).tolist(),
        "p": min(1.0, 2 * (side + 1) / (resamples + 1)),
    }


def compare_retrieval(
    baseline: Mapping[str, Any],
    candidate: Mapping[str, Any],
    *,
    metrics: Sequence[str] = ("rank1", "map"),
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """Compare two results of :py:func:`retrieval_metrics` on the same queries by the paired patient bootstrap.

    Args:
        baseline: result with ``per_query=True``.
        candidate: the same for the other setting, of the same images in the same order.
        metrics: names from ``RETRIEVAL_METRICS``.
        resamples: number of resamples.
        seed: of the draw.

    Returns:
        By metric, what :py:func:`paired_patient_bootstrap` returns.

    Raises:
        ValueError: no figures per query, an unknown metric, or other queries or patients or rules.
    """
    if "per_query" not in baseline or "per_query" not in candidate:
        raise ValueError("a comparison needs the figures of each query: call retrieval_metrics(..., per_query=True).")
    unknown = set(metrics) - set(RETRIEVAL_METRICS)
    if unknown:
        raise ValueError(f"unknown metrics {sorted(unknown)}; known are {RETRIEVAL_METRICS}.")
    first, second = baseline["per_query"], candidate["per_query"]
    for name in ("query", "patient", "matches"):
        if not np.array_equal(first[name], second[name]):
            raise ValueError(f"the two settings were not measured on the same queries: '{name}' differs.")
    if baseline["protocol"] != candidate["protocol"] or baseline["gallery"] != candidate["gallery"]:
        raise ValueError("the two settings were not measured by the same protocol on the same gallery.")
    values = metric_values(first), metric_values(second)
    columns = {name: RETRIEVAL_METRICS.index(name) for name in metrics}
    return {
        name: paired_patient_bootstrap(
            values[0][:, column], values[1][:, column], first["patient"], resamples=resamples, seed=seed
        )
        for name, column in columns.items()
    }
