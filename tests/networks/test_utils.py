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

import torch

from monai_god.networks.utils import masked_softmax, safe_normalize, to_slots


def test_safe_normalize_has_finite_gradients_at_zero():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-9, 0.0]], requires_grad=True)
    y = safe_normalize(x)
    torch.testing.assert_close(y[0], torch.tensor([0.6, 0.8]))
    assert (y[1:] == 0).all()
    (y * torch.tensor([1.0, 2.0])).sum().backward()
    assert x.grad.isfinite().all() and (x.grad[1:] == 0).all() and x.grad[0].abs().max() > 0


def test_masked_softmax():
    mask = torch.tensor([[True, False, True], [False, False, False]])
    out = masked_softmax(torch.tensor([[1.0, 50.0, 2.0], [1.0, 2.0, 3.0]]), mask)
    torch.testing.assert_close(out[0, [0, 2]], torch.softmax(torch.tensor([1.0, 2.0]), 0))
    assert out[0, 1] == 0 and (out[1] == 0).all()


def test_to_slots_is_a_loop():
    x = torch.randn(2, 3, 4)
    mask = torch.tensor([[True, True, False], [False, True, True]])
    slot = torch.tensor([[4, 0, 9], [-1, 2, 1]])  # places of padded rows mean nothing
    out = to_slots(x, mask, slot, 5)
    expected = torch.zeros(2, 5, 4)
    for b in range(2):
        for i in range(3):
            if mask[b, i]:
                expected[b, slot[b, i]] = x[b, i]
    assert torch.equal(out, expected)
