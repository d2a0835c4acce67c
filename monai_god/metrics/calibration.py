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
"""From a similarity to the probability that two images show one patient."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression, minimize
from scipy.special import expit

from monai_god.metrics.report import write_json
from monai_god.metrics.verification import PairHistogram

__all__ = ["SamePatientCalibrator"]


class SamePatientCalibrator:
    """Maps similarities to probabilities, fitted on validation pairs and kept as a few numbers.

    The probability holds for pairs as frequent as in the fit. Over all pairs of a test set one in hundreds is genuine;
    where a pair was picked for a reason, say so by ``prior``.

    Args:
        method: ``"logistic"`` (two numbers; Platt, 1999, with his smoothed targets) or ``"isotonic"`` (a monotone
            step function; needs more pairs).

    Raises:
        ValueError: an unknown method.

    Example::

        calibrator = SamePatientCalibrator().fit_histogram(pair_histogram(z_validation, patients_validation))
        probability = calibrator([0.81], prior=0.5)
    """

    def __init__(self, method: str = "logistic") -> None:
        if method not in ("logistic", "isotonic"):
            raise ValueError(f"method must be 'logistic' or 'isotonic', got {method!r}.")
        self.method = method
        self.base_rate: float | None = None
        self.similarity = np.zeros(0)
        self.probability = np.zeros(0)
        self.slope = 0.0
        self.intercept = 0.0

    def fit(self, similarity: Any, same: Any, weight: Any = None) -> SamePatientCalibrator:
        """Fit on pairs.

        Args:
            similarity: [n].
            same: [n] bool.
            weight: [n] how often each pair counts; 1 by default.

        Returns:
            itself.

        Raises:
            ValueError: NaN, lengths that differ, or only one kind of pairs.
        """
        x, y, w = _checked(similarity, same, weight)
        genuine, impostor = float(w[y].sum()), float(w[~y].sum())
        if genuine <= 0 or impostor <= 0:
            raise ValueError("calibration needs pairs of one patient and pairs of two.")
        self.base_rate = genuine / (genuine + impostor)
        if self.method == "logistic":
            # smoothed targets keep the slope finite where the two kinds do not overlap
            target = np.where(y, (genuine + 1) / (genuine + 2), 1 / (impostor + 2))
            centre, spread = np.average(x, weights=w), max(float(np.std(x)), 1e-6)
            u = (x - centre) / spread

            def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
                logit = parameters[0] * u + parameters[1]
                residual = w * (expit(logit) - target) / w.sum()
                value = float(np.sum(w * (np.logaddexp(0.0, logit) - target * logit)) / w.sum())
                return value, np.array([np.sum(residual * u), np.sum(residual)])

            start = np.array([1.0, np.log(genuine / impostor)])
            # a falling curve would say that less similar images are more likely of one patient
            bounds = [(0, None), (None, None)]
            options = {"ftol": 1e-15, "gtol": 1e-10, "maxiter": 1000}
            found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
            self.slope = float(found.x[0] / spread)
            self.intercept = float(found.x[1] - found.x[0] * centre / spread)
        else:
            levels, position = np.unique(x, return_inverse=True)
            weights = np.bincount(position, w)
            shares = np.bincount(position, w * y) / weights
            fitted = isotonic_regression(shares, weights=weights).x
            # the ends of each step say all
            change = np.flatnonzero(np.diff(fitted)) + 1
            keep = np.unique(np.concatenate([[0], change - 1, change, [len(levels) - 1]]).astype(int))
            self.similarity, self.probability = levels[keep], np.clip(fitted[keep], 0.0, 1.0)
        return self

    def fit_histogram(self, histogram: PairHistogram) -> SamePatientCalibrator:
        """Fit on all pairs of a histogram, each at the middle of its bin."""
        counts = np.concatenate([histogram.genuine, histogram.impostor])
        same = np.arange(len(counts)) < len(histogram.genuine)
        used = counts > 0
        return self.fit(np.tile(histogram.centers, 2)[used], same[used], counts[used])

    def __call__(self, similarity: Any, prior: float | None = None) -> np.ndarray:
        """Probability that the two images of each pair show one patient.

        Args:
            similarity: any shape.
            prior: share of pairs of one patient among the pairs asked about; that of the fit by default.

        Returns:
            float64 of the same shape, in [0, 1].

        Raises:
            ValueError: not fitted, NaN, or a prior outside (0, 1).
        """
        if self.base_rate is None:
            raise ValueError("the calibrator is not fitted: call fit() with validation pairs, or load() one.")
        x = np.asarray(similarity, dtype=np.float64)
        if np.isnan(x).any():
            raise ValueError("similarity holds NaN.")
        if self.method == "logistic":
            probability = expit(self.slope * x + self.intercept)
        else:
            probability = np.interp(x, self.similarity, self.probability)
        if prior is None:
            return probability
        if not 0 < prior < 1:
            raise ValueError(f"prior must lie in (0, 1), got {prior}.")
        same = probability * (prior / self.base_rate)
        return same / (same + (1 - probability) * ((1 - prior) / (1 - self.base_rate)))

    def reliability(self, similarity: Any, same: Any, bins: int = 10, weight: Any = None) -> dict[str, Any]:
        """How far the probabilities can be trusted, on pairs that were not fitted.

        Args:
            similarity: [n].
            same: [n] bool.
            bins: bins of equal width over [0, 1].
            weight: [n].

        Returns:
            ``predicted`` and ``observed``: mean probability and share of genuine pairs in each bin that holds any;
            ``weight``: of these bins; ``brier``: mean squared error; ``ece``: expected calibration error.
        """
        x, y, w = _checked(similarity, same, weight)
        p = self(x)
        place = np.minimum((p * bins).astype(int), bins - 1)
        total = np.bincount(place, w, minlength=bins)
        used = total > 0
        predicted = np.bincount(place, w * p, minlength=bins)[used] / total[used]
        observed = np.bincount(place, w * y, minlength=bins)[used] / total[used]
        return {
            "predicted": predicted.tolist(),
            "observed": observed.tolist(),
            "weight": total[used].tolist(),
            "brier": float(np.average((p - y) ** 2, weights=w)),
            "ece": float(np.average(np.abs(predicted - observed), weights=total[used])),
        }

    def to_dict(self) -> dict[str, Any]:
        """The fitted numbers, JSON-ready."""
        if self.base_rate is None:
            raise ValueError("the calibrator is not fitted: there is nothing to keep.")
        state: dict[str, Any] = {"method": self.method, "base_rate": self.base_rate}
        if self.method == "logistic":
            return state | {"slope": self.slope, "intercept": self.intercept}
        return state | {"similarity": self.similarity.tolist(), "probability": self.probability.tolist()}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> SamePatientCalibrator:
        """The calibrator of :py:meth:`to_dict`."""
        result = cls(state["method"])
        result.base_rate = float(state["base_rate"])
        if result.method == "logistic":
            result.slope, result.intercept = float(state["slope"]), float(state["intercept"])
        else:
            result.similarity = np.asarray(state["similarity"], dtype=np.float64)
            result.probability = np.asarray(state["probability"], dtype=np.float64)
        return result

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the numbers as JSON."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SamePatientCalibrator:
        """Read what :py:meth:`save` wrote.

        Raises:
            ValueError: the file is none of these.
        """
        try:
            with open(path, encoding="utf-8") as file:
                return cls.from_dict(json.load(file))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{os.fspath(path)} is not a saved calibrator ({error}). Fit it again.") from error

    def __repr__(self) -> str:
        return f"{type(self).__name__}(method={self.method!r}, fitted={self.base_rate is not None})"


def _checked(similarity: Any, same: Any, weight: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x = np.asarray(similarity, dtype=np.float64).reshape(-1)
    y = np.asarray(same, dtype=bool).reshape(-1)
    w = np.ones(len(x)) if weight is None else np.asarray(weight, dtype=np.float64).reshape(-1)
    if not len(x) == len(y) == len(w):
        raise ValueError(f"there are {len(x)} similarities, {len(y)} labels and {len(w)} weights.")
    if not np.isfinite(x).all():
        raise ValueError("similarity holds NaN or infinity.")
    return x, y, w
