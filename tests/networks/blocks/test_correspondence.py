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

import math

import pytest
import torch

from monai_god.networks.blocks import SoftCorrespondence, mean_difference, node_differences
from tests.graph_batch import make_batch


@pytest.mark.parametrize("same_type", [False, True])
@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_equals_a_loop(same_type, tau):
    a, b = make_batch(nodes=5, seed=1), make_batch(nodes=7, seed=2)
    mask_a, mask_b, type_a, type_b = a.graphs.mask, b.graphs.mask, a.graphs.node_type, b.graphs.node_type
    p = SoftCorrespondence(tau, same_type)(a.nodes, b.nodes, mask_a, mask_b, type_a, type_b)
    delta, matched = node_differences(a.nodes, b.nodes, p)
    mean = mean_difference(delta, matched)
    for k in range(len(p)):
        deltas = []
        for i in range(5):
            row = torch.zeros(7)
            partners = [
                j for j in range(7) if mask_a[k, i] and mask_b[k, j] and (not same_type or type_a[k, i] == type_b[k, j])
            ]
            cosines = [float(torch.cosine_similarity(a.nodes[k, i], b.nodes[k, j], dim=0)) for j in partners]
            for j, c in zip(partners, cosines, strict=True):
                row[j] = math.exp(c / tau) / sum(math.exp(x / tau) for x in cosines)
            torch.testing.assert_close(p[k, i], row, atol=1e-5, rtol=1e-4)
            assert bool(matched[k, i]) == bool(partners)
            if partners:
                deltas.append(a.nodes[k, i] - sum(row[j] * b.nodes[k, j] for j in partners))
                torch.testing.assert_close(delta[k, i], deltas[-1], atol=1e-4, rtol=1e-4)
            else:
                assert (delta[k, i] == 0).all()
        expected = sum(deltas) / len(deltas) if deltas else torch.zeros(12)
        torch.testing.assert_close(mean[k], expected, atol=1e-4, rtol=1e-4)


def test_permuting_the_nodes_of_b_leaves_the_differences(batch):
    order = torch.randperm(7)
    h, mask, kind = batch.nodes, batch.graphs.mask, batch.graphs.node_type
    match = SoftCorrespondence(0.1)
    other = h.flip(0), mask.flip(0), kind.flip(0)
    delta, _ = node_differences(h, other[0], match(h, other[0], mask, other[1], kind, other[2]))
    moved = [t[:, order] for t in other]
    again, _ = node_differences(h, moved[0], match(h, moved[0], mask, moved[1], kind, moved[2]))
    torch.testing.assert_close(delta[mask], again[mask], atol=1e-5, rtol=1e-5)


def test_empty_graphs_and_zero_features_have_finite_gradients(batch):
    h = torch.zeros_like(batch.nodes).requires_grad_()
    mask = batch.graphs.mask.clone()
    mask[0] = False
    kind = batch.graphs.node_type
    delta, matched = node_differences(h, h.flip(0), SoftCorrespondence()(h, h.flip(0), mask, mask.flip(0), kind, kind))
    mean_difference(delta, matched).sum().backward()
    assert h.grad.isfinite().all()
    assert not matched[0].any() and not matched[-1].any()


def test_rejects_tau():
    with pytest.raises(ValueError, match="tau"):
        SoftCorrespondence(tau=0)
