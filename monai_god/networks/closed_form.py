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
"""
Metrics in closed form: within-patient whitening, LDA and PLDA.

With few patients they beat a randomly initialised head by far; every level's head starts from one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

__all__ = [
    "METHODS",
    "SHRINKAGES",
    "ClosedForm",
    "combined_retrieval_score",
    "fit_closed_form",
    "linear_discriminant",
    "principal_components",
    "probabilistic_linear_discriminant",
    "retrieval_score",
    "within_patient_whitening",
]

METHODS = ("whitening", "lda", "plda")
SHRINKAGES = (0.03, 0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True)
class ClosedForm:
    """
    A linear map found in closed form: y = weight x + bias.

    Args:
        weight: [K, d].
        bias: [K], or [N, K] when fitted on N regions that share ``weight``.
        shrinkage: the shrinkage used, given or chosen.
        rank1: cross-validated rank-1 rate in [0, 1], None when the shrinkage was given.
        mean_ap: cross-validated mean average precision in [0, 1], None when the shrinkage was given.
        held_out: for every fold the cosine similarities [n_f, n_f] of its images under the map fitted on the other
            folds, and the images' patient codes [n_f]; empty when the shrinkage was given.
    """

    weight: Tensor
    bias: Tensor
    shrinkage: float
    rank1: float | None = None
    mean_ap: float | None = None
    held_out: tuple[tuple[np.ndarray, np.ndarray], ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """[n, d] or [n, N, d] -> [n, K] or [n, N, K], not normalised."""
        return x @ self.weight.to(x).T + self.bias.to(x)


def retrieval_score(similarity: np.ndarray, patients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    Rank-1 hit and average precision of every image that has another image of its patient; ties are pessimistic.

    Args:
        similarity: [n, n], the diagonal is not read.
        patients: [n] codes.

    Returns:
        two float arrays [queries], in [0, 1].
    """
    hits, precisions = [], []
    for i in range(len(patients)):
        others = np.arange(len(patients)) != i
        same = (patients == patients[i])[others]
        if not same.any():
            continue
        ranked = same[np.lexsort((same, -similarity[i][others]))]
        places = np.flatnonzero(ranked) + 1
        hits.append(float(ranked[0]))
        precisions.append(float(np.mean(np.arange(1, len(places) + 1) / places)))
    return np.asarray(hits), np.asarray(precisions)


def combined_retrieval_score(folds: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float]:
    """Mean rank-1 rate and mean average precision over all queries of all folds; fold: (similarity, patients)."""
    hits, precisions = zip(*(retrieval_score(s, p) for s, p in folds), strict=True)
    return float(np.concatenate(hits).mean()), float(np.concatenate(precisions).mean())


@dataclass
class _Moments:
    """Sums over images that add up over disjoint groups of patients; N regions, r coordinates."""

    count: np.ndarray  # [N] images
    total: np.ndarray  # [N, r] sum of the images' vectors
    second: np.ndarray  # [r, r] sum of outer products
    within: np.ndarray  # [r, r] sum over cells (patient, region) of their unbiased covariances
    cells: float  # cells with two images or more
    mean_count: np.ndarray  # [N] patients
    mean_total: np.ndarray  # [N, r] sum of the patients' mean vectors
    mean_second: np.ndarray  # [r, r] sum of their outer products
    inverse_size: float  # sum over cells of 1 / number of images

    @classmethod
    def of(cls, x: np.ndarray, mask: np.ndarray, patients: np.ndarray) -> _Moments:
        n, regions, r = x.shape
        _, code = np.unique(patients, return_inverse=True)
        number = int(code.max()) + 1 if n else 0
        out = cls(
            np.zeros(regions),
            np.zeros((regions, r)),
            np.zeros((r, r)),
            np.zeros((r, r)),
            0.0,
            np.zeros(regions),
            np.zeros((regions, r)),
            np.zeros((r, r)),
            0.0,
        )
        for j in range(regions):  # one region at a time: [n, N, r] in float64 need not fit in memory
            seen = mask[:, j]
            rows, group = x[seen, j].astype(np.float64), code[seen]
            size = np.bincount(group, minlength=number).astype(np.float64)
            sums = np.zeros((number, r))
            np.add.at(sums, group, rows)
            means = sums / np.maximum(size, 1)[:, None]
            residual = (rows - means[group]) / np.sqrt(np.maximum(size - 1, 1))[group][:, None]
            out.count[j], out.total[j] = len(rows), rows.sum(0)
            out.second += rows.T @ rows
            out.within += residual.T @ residual
            out.cells += float((size > 1).sum())
            out.mean_count[j], out.mean_total[j] = (size > 0).sum(), means.sum(0)
            out.mean_second += means.T @ means
            out.inverse_size += float((1 / size[size > 0]).sum())
        return out

    @classmethod
    def sum(cls, parts: Sequence[_Moments]) -> _Moments:
        return cls(**{f.name: sum(getattr(p, f.name) for p in parts) for f in fields(cls)})  # type: ignore[arg-type]

    def mean(self) -> np.ndarray:
        return self.total / np.maximum(self.count, 1)[:, None]

    def total_covariance(self) -> np.ndarray:
        mean = self.mean()
        return (self.second - (mean * self.count[:, None]).T @ mean) / max(self.count.sum(), 1)

    def between_covariance(self) -> np.ndarray:
        mean = self.mean_total / np.maximum(self.mean_count, 1)[:, None]
        return (self.mean_second - (mean * self.mean_count[:, None]).T @ mean) / max(self.mean_count.sum(), 1)


class _Whitener:
    """Eigenvalues of the within-patient covariance, once, for all shrinkages."""

    def __init__(self, moments: _Moments, dims: int) -> None:
        if moments.cells == 0:
            raise ValueError("A within-patient metric needs at least one patient with two images or more; found none.")
        self.moments = moments
        within = moments.within / moments.cells
        self.scale = float(np.trace(within)) / dims
        if not self.scale > 0:
            raise ValueError(
                "The images of each patient have identical features, so their within-patient covariance is zero: "
                "look for duplicated images."
            )
        values, self.vectors = scipy.linalg.eigh(within)
        self.values = values.clip(min=0)

    def solve(self, method: str, shrinkage: float, out_dim: int) -> np.ndarray:
        """Columns of the map, [r, min(out_dim, r)]."""
        r = len(self.values)
        whiten = self.vectors / np.sqrt(self.values + shrinkage * self.scale)
        k = min(out_dim, r)
        if method == "whitening":
            if k == r:
                return whiten @ self.vectors.T
            return whiten @ _top(whiten.T @ self.moments.total_covariance() @ whiten, k)[1]
        spread, directions = _top(whiten.T @ self.moments.between_covariance() @ whiten, k)
        if method == "plda":
            # Two-covariance model: within 1, between b per direction; the log likelihood ratio's cross term is
            # b / (1 + 2 b) x y. A patient's mean of n images varies by b + within / n, with
            # the within of the data: the shrunk one would take too much away.
            within = (self.values / (self.values + shrinkage * self.scale)) @ directions**2
            between = (spread - within * self.moments.inverse_size / max(self.moments.mean_count.sum(), 1)).clip(min=0)
            if not between.any():
                raise ValueError("PLDA found no variance between patients: use method 'lda' or 'whitening'.")
            directions = directions * np.sqrt(between / (1 + 2 * between))
        return whiten @ directions


def _top(symmetric: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k largest eigenvalues, descending, and their vectors with a fixed sign."""
    r = len(symmetric)
    values, vectors = scipy.linalg.eigh((symmetric + symmetric.T) / 2, subset_by_index=[r - k, r - 1])
    values, vectors = values[::-1], vectors[:, ::-1]
    sign = np.sign(vectors[np.abs(vectors).argmax(0), np.arange(k)])
    return values, vectors * np.where(sign == 0, 1, sign)


def _folds(patients: np.ndarray, folds: int, seed: int) -> list[np.ndarray]:
    """Boolean arrays [n], one for each fold: patient-disjoint, patients with several images dealt evenly."""
    names, size = np.unique(patients, return_counts=True)
    several, single = names[size > 1], names[size == 1]
    if len(several) < 2 * folds:
        raise ValueError(
            f"Cross-validation of the shrinkage in {folds} folds needs at least {2 * folds} patients with two images "
            f"or more, found {len(several)}: give the shrinkage as a number, for example 0.3."
        )
    rng = np.random.default_rng(seed)
    several, single = rng.permutation(several), rng.permutation(single)
    return [np.isin(patients, np.concatenate([several[f::folds], single[f::folds]])) for f in range(folds)]


def _cosine(y: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """[n, N, K] -> [n, n]: unit length per region, missing regions zero, then cosine of the concatenation."""
    y = y / np.linalg.norm(y, axis=-1, keepdims=True).clip(min=1e-12)
    flat = (y * mask[..., None]).reshape(len(y), -1)
    flat = flat / np.linalg.norm(flat, axis=1, keepdims=True).clip(min=1e-12)
    return flat @ flat.T


def fit_closed_form(
    x: Tensor,
    patient_ids: Sequence[object] | np.ndarray | Tensor,
    method: str = "whitening",
    shrinkage: float | str = "cv",
    out_dim: int | None = None,
    mask: Tensor | None = None,
    folds: int = 5,
    seed: int = 0,
) -> ClosedForm:
    """
    Fit a metric on the training patients, in float64.

    'whitening' multiplies the centred vector by the inverse square root of the within-patient covariance (every
    patient counts alike); with ``out_dim`` it is rotated so that the directions come in the order of their variance,
    and truncated. 'lda' keeps the directions in which patients differ most relative to it. 'plda' also scales these
    by the two-covariance model, so that the inner product is the likelihood ratio's cross term.

    The covariance is shrunk towards the identity: C + shrinkage * trace(C) / d * I. Where there are fewer images than
    features, the computation is done in their span; directions outside it are treated alike, since the training
    images say nothing about them.

    Args:
        x: [n, d], or [n, N, d] for N regions (nodes) that share one covariance, each centred on its own mean.
        patient_ids: n hashable ids.
        method: 'whitening', 'lda' or 'plda'.
        shrinkage: a positive number, or 'cv' to choose among :data:`SHRINKAGES` by cross-validation over patients
            (mean of R1 and mAP, images of the held-out patients as queries and gallery).
        out_dim: number of outputs K; None for d. More than d (or, for LDA and PLDA, than there are directions) is
            filled up: outputs without meaning are zero.
        mask: [n, N] bool, regions that are present; None for all.
        folds: folds of the cross-validation.
        seed: of the folds, and of the directions outside the images' span.

    Returns:
        the map, float32.

    Raises:
        ValueError: for wrong shapes, non-finite values, an unknown method, or too few patients with several images.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
    if isinstance(shrinkage, str) and shrinkage != "cv":
        raise ValueError(f"shrinkage must be 'cv' or a positive number, got {shrinkage!r}.")
    if not isinstance(shrinkage, str) and not shrinkage > 0:
        raise ValueError(f"shrinkage must be positive, got {shrinkage}.")
    ids = patient_ids.tolist() if isinstance(patient_ids, (Tensor, np.ndarray)) else list(patient_ids)
    if x.ndim not in (2, 3) or len(x) != len(ids):
        raise ValueError(f"x must be [n, d] or [n, N, d] with n = {len(ids)} patient ids, got {tuple(x.shape)}.")
    patients = np.unique(np.asarray([str(i) for i in ids]), return_inverse=True)[1]
    values = x.detach().cpu().numpy()
    values = values[:, None] if x.ndim == 2 else values
    n, regions, d = values.shape
    present = np.ones((n, regions), bool) if mask is None else mask.detach().cpu().numpy().astype(bool)
    if not np.isfinite(values[present]).all():
        raise ValueError("x holds values that are not finite.")
    out_dim = d if out_dim is None else out_dim

    # centred on the overall mean first: moments about it lose no digits
    count = np.maximum(present.sum(0), 1)[:, None]
    center = np.where(present[..., None], values, 0).sum(0, dtype=np.float64) / count
    basis: np.ndarray | None = None
    if n * regions < d:
        flat = np.where(present[..., None], values - center, 0).reshape(-1, d)
        _, singular, right = np.linalg.svd(flat, full_matrices=False)
        basis = right[singular > singular.max(initial=0) * 1e-10].T  # [d, r]
        coordinates = np.where(present[..., None], (values - center) @ basis, 0)
    else:
        coordinates = np.where(present[..., None], values - center, 0).astype(values.dtype)

    held_out: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    rank1 = mean_ap = None
    if shrinkage == "cv":
        tests = _folds(patients, folds, seed)
        parts = [_Moments.of(coordinates[t], present[t], patients[t]) for t in tests]
        moments = _Moments.sum(parts)
        results: dict[float, list[tuple[np.ndarray, np.ndarray]]] = {s: [] for s in SHRINKAGES}
        for f, test in enumerate(tests):
            fitted = _Moments.sum(parts[:f] + parts[f + 1 :])
            whitener, mean = _Whitener(fitted, d), fitted.mean()
            for s in SHRINKAGES:
                y = (coordinates[test] - mean) @ whitener.solve(method, s, out_dim)
                results[s].append((_cosine(y, present[test]), patients[test]))
        scores = {s: combined_retrieval_score(r) for s, r in results.items()}
        chosen = max(scores, key=lambda s: sum(scores[s]))
        held_out, (rank1, mean_ap) = tuple(results[chosen]), scores[chosen]
    else:
        chosen = float(shrinkage)
        moments = _Moments.of(coordinates, present, patients)

    whitener = _Whitener(moments, d)
    columns = whitener.solve(method, chosen, out_dim)  # [r, k]
    outside = 1 / np.sqrt(chosen * whitener.scale)
    if basis is None:
        weight = columns.T
    elif method == "whitening" and out_dim >= d:
        weight = basis @ columns @ basis.T + outside * (np.eye(d) - basis @ basis.T)
    else:
        weight = (basis @ columns).T
        if method == "whitening" and len(weight) < out_dim:
            more = np.random.default_rng(seed).standard_normal((d, out_dim - len(weight)))
            more = np.linalg.qr(more - basis @ (basis.T @ more))[0]
            # a random projection keeps inner products when it is scaled by the root of the dimensions it replaces
            stretch = np.sqrt(max(1.0, (d - basis.shape[1]) / more.shape[1]))
            weight = np.concatenate([weight, outside * stretch * more.T])
    weight = np.concatenate([weight, np.zeros((out_dim - len(weight), d))])
    bias = -center @ weight.T  # [N, K]
    return ClosedForm(
        torch.from_numpy(weight).float(),
        torch.from_numpy(bias if x.ndim == 3 else bias[0]).float(),
        chosen,
        rank1,
        mean_ap,
        held_out,
    )


def principal_components(x: Tensor, out_dim: int, mask: Tensor | None = None) -> Tensor:
    """
    The directions of largest variance, descending; they need no patient ids, so a cross-validation over patients that
    follows stays honest.

    Args:
        x: [n, N, d] regions, each centred on its own mean.
        out_dim: number of directions; more than d are filled up with zeros.
        mask: [n, N] bool, regions that are present; None for all.

    Returns:
        [out_dim, d], float32.
    """
    values = x.detach().cpu().numpy()
    present = np.ones(values.shape[:2], bool) if mask is None else mask.detach().cpu().numpy().astype(bool)
    d = values.shape[2]
    scatter = np.zeros((d, d))
    for j in range(values.shape[1]):
        rows = values[present[:, j], j].astype(np.float64)
        if len(rows):
            rows = rows - rows.mean(0)
            scatter += rows.T @ rows
    directions = _top(scatter, min(out_dim, d))[1].T
    return torch.from_numpy(np.concatenate([directions, np.zeros((out_dim - len(directions), d))])).float()


def within_patient_whitening(x: Tensor, patient_ids: Sequence[object] | np.ndarray | Tensor, **kwargs) -> ClosedForm:
    """:func:`fit_closed_form` with method 'whitening'."""
    return fit_closed_form(x, patient_ids, method="whitening", **kwargs)


def linear_discriminant(x: Tensor, patient_ids: Sequence[object] | np.ndarray | Tensor, **kwargs) -> ClosedForm:
    """:func:`fit_closed_form` with method 'lda'."""
    return fit_closed_form(x, patient_ids, method="lda", **kwargs)


def probabilistic_linear_discriminant(
    x: Tensor, patient_ids: Sequence[object] | np.ndarray | Tensor, **kwargs
) -> ClosedForm:
    """:func:`fit_closed_form` with method 'plda'."""
    return fit_closed_form(x, patient_ids, method="plda", **kwargs)
