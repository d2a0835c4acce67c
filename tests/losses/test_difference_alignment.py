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

import pytest
import torch

from monai_god.losses import DifferenceAlignmentLoss


def test_equals_a_loop():
    ab, ba, g_a, g_b = torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 5), torch.randn(4, 5)
    loss = DifferenceAlignmentLoss(3, 5)
    w = loss.projection.weight
    total = 0.0
    for k in range(4):
        for delta, target in ((ab[k], g_a[k] - g_b[k]), (ba[k], g_b[k] - g_a[k])):
            total += (1 - torch.cosine_similarity(w @ delta, target, dim=0).item()) / 8
    assert loss(ab, ba, g_a, g_b).item() == pytest.approx(total, rel=1e-4)


def test_near_identical_pairs_carry_no_weight():
    ab, g_a, g_b = torch.randn(3, 5), torch.randn(3, 5), torch.randn(3, 5)
    g_b[1] = g_a[1] * (1 + 1e-5)
    g_b[2] = g_a[2]
    loss = DifferenceAlignmentLoss(5, 5)
    torch.testing.assert_close(loss(ab, -ab, g_a, g_b), loss(ab[:1], -ab[:1], g_a[:1], g_b[:1]))
    zero = torch.zeros(2, 5, requires_grad=True)
    value = loss(zero, zero, g_a[1:], g_a[1:])
    value.backward()
    assert value.item() == 0 and zero.grad.isfinite().all() and loss.projection.weight.grad.isfinite().all()


def test_explained_differences_cost_nothing():
    g_a, g_b = torch.randn(4, 5), torch.randn(4, 5)
    loss = DifferenceAlignmentLoss(5, 5)  # a square W starts as the identity
    assert loss(g_a - g_b, g_b - g_a, g_a, g_b).item() == pytest.approx(0, abs=1e-6)
    assert loss(g_b - g_a, g_a - g_b, g_a, g_b).item() == pytest.approx(2, abs=1e-6)
