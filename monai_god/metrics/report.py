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
"""The figures of a run as a file that other programs read."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from monai_god.metrics.retrieval import RETRIEVAL_METRICS

__all__ = ["metrics_report", "rank_by_time_gap", "versions", "write_json", "write_metrics"]

_PACKAGES = ("monai-god", "monai", "torch", "torch-geometric", "numpy", "scipy", "scikit-image")
# days: same day, a week, a month, half a year, a year, three years
DEFAULT_GAPS = (0, 7, 30, 182, 365, 1095)


def write_json(path: str | os.PathLike[str], content: Any) -> None:
    """Write JSON so that the file is either the old or the new one, never half of it.

    Args:
        path: the file; its folder is created.
        content: JSON-ready, numpy numbers and arrays allowed.

    Raises:
        ValueError: NaN or infinity, which JSON does not know.
    """
    target = Path(path)
    try:
        text = json.dumps(content, indent=2, allow_nan=False, default=_plain) + "\n"
    except ValueError as error:
        raise ValueError(f"{target} is not written: {error}.") from error
    target.parent.mkdir(parents=True, exist_ok=True)
    # a name of its own: two writers must not share it
    descriptor, aside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o666 & ~_umask())
        os.replace(aside, target)
    except BaseException:
        os.unlink(aside)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def versions() -> dict[str, str]:
    """Versions of what a figure depends on; packages that are not installed are absent."""
    result = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return result


def metrics_report(
    retrieval: Mapping[str, Any],
    *,
    components: str,
    seed: int,
    verification: Mapping[str, Any] | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """The content of ``metrics.json``.

    Args:
        retrieval: result of :py:func:`retrieval_metrics`.
        components: level of the model, A to E.
        seed: of the run.
        verification: result of :py:func:`verification_metrics`.
        extra: further entries, for example ``rank_by_time_gap``.

    Returns:
        ``protocol``; ``queries``, ``gallery``, ``patients``, ``queries_left_out``, ``singletons``; ``metrics``: name to
        ``value`` and, where it was asked for, ``ci95``, and for verification ``error_bound``; ``components``; ``seed``;
        ``versions``; with verification also its ``thresholds`` and numbers of pairs.

    Raises:
        ValueError: an extra entry has the name of another.
    """
    figures: dict[str, dict[str, Any]] = {}
    for name in RETRIEVAL_METRICS:
        figures[name] = {"value": retrieval[name]}
        if "ci95" in retrieval:
            figures[name]["ci95"] = retrieval["ci95"][name]
    report: dict[str, Any] = {"protocol": retrieval["protocol"]}
    for name in ("queries", "gallery", "patients", "queries_left_out", "singletons"):
        report[name] = retrieval[name]
    report["metrics"] = figures
    if verification is not None:
        for name, bound in verification["error_bound"].items():
            figures[name] = {"value": verification[name], "error_bound": bound}
            if name in verification.get("ci95", {}):
                figures[name]["ci95"] = verification["ci95"][name]
        report["verification"] = {
            name: verification[name] for name in ("thresholds", "far_reached", "genuine_pairs", "impostor_pairs")
        }
    report.update(components=components, seed=seed, versions=versions())
    taken = set(report) & set(extra)
    if taken:
        raise ValueError(f"metrics.json has entries {sorted(taken)} of its own.")
    return report | extra


def write_metrics(path: str | os.PathLike[str], retrieval: Mapping[str, Any], **arguments: Any) -> dict[str, Any]:
    """Write ``metrics.json``; the arguments are those of :py:func:`metrics_report`, whose result is returned."""
    report = metrics_report(retrieval, **arguments)
    write_json(path, report)
    return report


def rank_by_time_gap(
    per_query: Mapping[str, np.ndarray],
    days: Sequence[float | None] | np.ndarray,
    gaps: Sequence[float] = DEFAULT_GAPS,
) -> list[dict[str, Any]]:
    """Rank of the first match by the time between the two images.

    Args:
        per_query: of :py:func:`retrieval_metrics` with ``per_query=True``.
        days: [n] day of each image, an offset from any start that is the same for all images of a patient; None or NaN
            where unknown.
        gaps: ascending upper ends of the intervals, in days; a last interval is open.

    Returns:
        One entry per interval that holds queries: ``days`` [low, high] (low is excluded but in the first; high is None
        in the last), ``queries``, ``rank1``, ``rank5``, ``median_rank``. Queries without both dates are in none.

    Raises:
        ValueError: ``gaps`` is not ascending.
    """
    ends = np.asarray(gaps, dtype=float)
    if not len(ends) or (np.diff(ends) <= 0).any() or ends[0] < 0:
        raise ValueError(f"gaps must be ascending numbers of days, got {list(gaps)}.")
    day = np.asarray([np.nan if value is None else value for value in days], dtype=float)
    gap = np.abs(day[per_query["query"]] - day[per_query["first_match"]])
    rank = per_query["first_rank"]
    place = np.where(np.isnan(gap), -1, np.searchsorted(ends, gap, side="left"))
    result = []
    for i in range(len(ends) + 1):
        own = rank[place == i]
        if not len(own):
            continue
        result.append(
            {
                "days": [float(ends[i - 1]) if i else 0.0, float(ends[i]) if i < len(ends) else None],
                "queries": len(own),
                "rank1": float((own <= 1).mean()),
                "rank5": float((own <= 5).mean()),
                "median_rank": float(np.median(own)),
            }
        )
    return result
