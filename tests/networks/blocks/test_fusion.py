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

from monai_god.networks.blocks import BranchFusion


def test_is_a_linear_layer_on_normalised_branches():
    g, graph = torch.randn(4, 6) * 9 + 3, torch.randn(4, 5)
    fusion = BranchFusion((6, 5), 3)
    out = fusion([g, graph])
    for b in range(4):
        parts = [(x[b] - x[b].mean()) / (x[b].var(unbiased=False) + 1e-5).sqrt() for x in (g, graph)]
        expected = fusion.linear.weight @ torch.cat(parts) + fusion.linear.bias
        torch.testing.assert_close(out[b], expected, atol=1e-5, rtol=1e-5)


def test_hidden_layer_starts_without_effect_and_learns():
    torch.manual_seed(1)
    branches = [torch.randn(4, 6), torch.randn(4, 5)]
    fusion = BranchFusion((6, 5), 3, mlp_hidden=8)
    assert torch.equal(fusion(branches), fusion.linear(fusion.normalise(branches)))
    fusion(branches).square().sum().backward()
    assert fusion.hidden_out is not None and fusion.hidden_out.weight.grad.abs().max() > 0
