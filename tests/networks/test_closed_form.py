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
import torch

from monai_god.networks.closed_form import (
    SHRINKAGES,
    fit_closed_form,
    linear_discriminant,
    principal_components,
    probabilistic_linear_discriminant,
    retrieval_score,
    within_patient_whitening,
)


def patients_with_signal(patients=30, images=3, dims=10, seed=0):
    """Identity lives in all directions, the nuisance is large in the first three."""
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.arange(patients), images)
    nuisance = rng.standard_normal((len(ids), dims))
    nuisance[:, :3] *= 6
    x = rng.standard_normal((patients, dims))[ids] * 1.5 + nuisance + 4
    return torch.from_numpy(x).float(), ids


def naive_within(x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """[n, N, d]: the mean over patients and regions of the unbiased covariance, image by image."""
    covariances = []
    for p in np.unique(ids):
        for j in range(x.shape[1]):
            rows = x[ids == p, j]
            if len(rows) > 1:
                c = np.zeros((x.shape[2], x.shape[2]))
                for row in rows:
                    c += np.outer(row - rows.mean(0), row - rows.mean(0))
                covariances.append(c / (len(rows) - 1))
    return np.mean(covariances, axis=0)


def inverse_root(c: np.ndarray, shrinkage: float) -> np.ndarray:
    d = len(c)
    values, vectors = np.linalg.eigh(c + shrinkage * np.trace(c) / d * np.eye(d))
    return vectors @ np.diag(values**-0.5) @ vectors.T


@pytest.mark.parametrize("shrinkage", [0.01, 0.3, 3.0])
@pytest.mark.parametrize("patients, dims", [(30, 10), (6, 40)])  # more images than features, and fewer
def test_whitening_is_the_inverse_root_of_the_within_covariance(shrinkage, patients, dims):
    x, ids = patients_with_signal(patients, 3, dims)
    fit = within_patient_whitening(x, ids, shrinkage=shrinkage)
    root = inverse_root(naive_within(x[:, None].double().numpy(), ids), shrinkage)
    np.testing.assert_allclose(fit.weight.numpy(), root, atol=1e-4 * np.abs(root).max())
    np.testing.assert_allclose(fit(x).mean(0).numpy(), 0, atol=1e-4)
    assert fit.shrinkage == shrinkage and fit.rank1 is None and fit.held_out == ()


@pytest.mark.parametrize("regions, dims", [(4, 6), (2, 60)])
def test_regions_share_one_covariance_and_have_their_own_mean(regions, dims):
    rng = np.random.default_rng(1)
    ids = np.repeat(np.arange(9), 3)
    x = rng.standard_normal((27, regions, dims)) + 5 * rng.standard_normal((regions, dims))
    fit = within_patient_whitening(torch.from_numpy(x), ids, shrinkage=0.2)
    root = inverse_root(naive_within(x, ids), 0.2)
    expected = (x - x.mean(0)) @ root
    np.testing.assert_allclose(fit(torch.from_numpy(x)).numpy(), expected, atol=1e-3)


def test_absent_regions_are_not_read():
    rng = np.random.default_rng(2)
    ids = np.repeat(np.arange(8), 3)
    x = torch.from_numpy(rng.standard_normal((24, 3, 5)))
    mask = torch.ones(24, 3, dtype=torch.bool)
    mask[rng.random((24, 3)) < 0.3] = False
    spoiled = x.clone()
    spoiled[~mask] = float("nan")
    fit, again = (fit_closed_form(y, ids, shrinkage=0.3, mask=mask) for y in (x, spoiled))
    assert torch.equal(fit.weight, again.weight) and torch.equal(fit.bias, again.bias)
    means = torch.stack([x[mask[:, j], j].mean(0) for j in range(3)])
    np.testing.assert_allclose((means @ fit.weight.double().T + fit.bias.double()).numpy(), 0, atol=1e-5)


def test_truncated_whitening_keeps_the_directions_of_largest_variance():
    x, ids = patients_with_signal()
    full, cut = (within_patient_whitening(x, ids, shrinkage=0.1, out_dim=k) for k in (None, 4))
    y = full(x).double().numpy()
    values = np.linalg.eigvalsh(np.cov(y.T, bias=True))[::-1]
    z = cut(x).double().numpy()
    np.testing.assert_allclose(np.cov(z.T, bias=True), np.diag(values[:4]), atol=1e-3)


def test_lda_maximises_between_over_within():
    x, ids = patients_with_signal()
    fit = linear_discriminant(x, ids, shrinkage=0.1, out_dim=3)
    values = x.double().numpy()
    within = naive_within(values[:, None], ids)
    within = within + 0.1 * np.trace(within) / 10 * np.eye(10)
    means = np.stack([values[ids == p].mean(0) for p in np.unique(ids)])
    between = np.cov(means.T, bias=True)
    ratios = np.sort(np.linalg.eigvals(np.linalg.solve(within, between)).real)[::-1]
    w = fit.weight.double().numpy()
    np.testing.assert_allclose(w @ within @ w.T, np.eye(3), atol=1e-4)
    np.testing.assert_allclose(w @ between @ w.T, np.diag(ratios[:3]), atol=1e-4)


def test_plda_scales_lda_by_the_two_covariance_model():
    x, ids = patients_with_signal()
    lda, plda = (f(x, ids, shrinkage=0.1, out_dim=5) for f in (linear_discriminant, probabilistic_linear_discriminant))
    means = torch.stack([lda(x)[ids == p].mean(0) for p in np.unique(ids)])
    within = torch.from_numpy(naive_within(lda(x)[:, None].double().numpy(), ids).diagonal().copy()).float()
    b = (means.var(0, unbiased=False) - within / 3).clamp(min=0)
    torch.testing.assert_close(plda.weight, lda.weight * (b / (1 + 2 * b)).sqrt()[:, None], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("method", ["whitening", "lda", "plda"])
def test_cross_validation_finds_the_signal(method):
    x, ids = patients_with_signal(60)
    fit = fit_closed_form(x, ids, method=method)
    raw = retrieval_score(torch.corrcoef(x).numpy(), ids)
    other, other_ids = patients_with_signal(60, seed=7)
    z = torch.nn.functional.normalize(fit(other), dim=1)
    hits, precisions = retrieval_score((z @ z.T).numpy(), other_ids)
    assert fit.shrinkage in SHRINKAGES and len(fit.held_out) == 5
    assert sum(len(p) for _, p in fit.held_out) == len(ids)
    # smaller galleries in the folds: only a rough agreement can be asked for
    assert hits.mean() > raw[0].mean() + 0.1
    assert fit.rank1 is not None and fit.mean_ap is not None and fit.rank1 > hits.mean() - 0.1


def test_cross_validation_chooses_what_a_naive_one_chooses():
    x, ids = patients_with_signal(24, 2, 8, seed=3)
    ids += 10  # codes follow the ids' order as text
    fit = fit_closed_form(x, ids, folds=4, seed=5)
    folds = [np.unique(p) for _, p in fit.held_out]
    assert sorted(np.concatenate(folds)) == list(range(24))
    folds = [f + 10 for f in folds]
    best = (-1.0, 0.0)
    for s in SHRINKAGES:
        hits, precisions = [], []
        for test in folds:
            held = np.isin(ids, test)
            z = within_patient_whitening(x[~held], ids[~held], shrinkage=s)(x[held])
            z = torch.nn.functional.normalize(z, dim=1)
            h, p = retrieval_score((z @ z.T).numpy(), ids[held])
            hits, precisions = [*hits, *h], [*precisions, *p]
        best = max(best, (float(np.mean(hits) + np.mean(precisions)), -s))
    assert fit.rank1 + fit.mean_ap == pytest.approx(best[0], abs=1e-6)
    assert fit.shrinkage == -best[1]


@pytest.mark.parametrize("method, out_dim", [("whitening", 30), ("whitening", 60), ("lda", 60), ("plda", 60)])
def test_more_outputs_than_directions(method, out_dim):
    x, ids = patients_with_signal(6, 3, 40)
    fit = fit_closed_form(x, ids, method=method, shrinkage=0.3, out_dim=out_dim)
    again = fit_closed_form(x, ids, method=method, shrinkage=0.3, out_dim=out_dim)
    assert fit.weight.shape == (out_dim, 40) and fit.weight.isfinite().all() and torch.equal(fit.weight, again.weight)
    if method == "whitening":
        exact = within_patient_whitening(x, ids, shrinkage=0.3)(x)
        torch.testing.assert_close(fit(x) @ fit(x).T, exact @ exact.T, atol=1e-2, rtol=1e-3)


def test_principal_components_are_those_of_the_centred_regions():
    rng = np.random.default_rng(4)
    x = rng.standard_normal((40, 3, 6)) * np.arange(1, 7) + 9 * rng.standard_normal((3, 6))
    mask = rng.random((40, 3)) < 0.8
    rows = np.concatenate([x[mask[:, j], j] - x[mask[:, j], j].mean(0) for j in range(3)])
    _, _, expected = np.linalg.svd(rows, full_matrices=False)
    found = principal_components(torch.from_numpy(x), 4, torch.from_numpy(mask)).double().numpy()
    np.testing.assert_allclose(np.abs(found @ expected[:4].T), np.eye(4), atol=1e-5)
    assert (principal_components(torch.from_numpy(x), 8)[6:] == 0).all()


def test_retrieval_score_is_pessimistic_about_ties():
    hits, precisions = retrieval_score(np.ones((4, 4)), np.array([0, 0, 1, 2]))
    assert hits.tolist() == [0.0, 0.0] and precisions.tolist() == pytest.approx([1 / 3, 1 / 3])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"method": "pca"}, "method must be one of"),
        ({"shrinkage": "auto"}, "'cv' or a positive number"),
        ({"shrinkage": 0.0}, "must be positive"),
        ({"patient_ids": list(range(90))}, "two images"),
        ({"patient_ids": [0, 0, 1]}, r"\[n, d\]"),
        ({"patient_ids": [0, 0, 1, 1, *range(2, 88)], "shrinkage": "cv"}, "give the shrinkage as a number"),
        ({"x": torch.full((90, 10), float("nan"))}, "not finite"),
        ({"x": torch.ones(90, 10)}, "duplicated images"),
    ],
)
def test_bad_input(change, message):
    x, ids = patients_with_signal()
    with pytest.raises(ValueError, match=message):
        fit_closed_form(**({"x": x, "patient_ids": ids, "shrinkage": 0.3} | change))
