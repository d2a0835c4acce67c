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

import torch

from monai_god.networks.blocks import GraphAttentionPooling


def test_equals_a_loop(batch):
    pooling = GraphAttentionPooling(12)
    torch.nn.init.normal_(pooling.query)
    h, mask = batch.nodes, batch.graphs.mask
    pooled, alpha = pooling(h, mask, batch.graphs.node_type)
    for b in range(len(h)):
        valid = [i for i in range(h.shape[1]) if mask[b, i]]
        score = [(pooling.query[0] @ h[b, i]).item() / math.sqrt(12) for i in valid]
        weight = [math.exp(s - max(score)) for s in score]
        expected = sum(w / sum(weight) * h[b, i] for w, i in zip(weight, valid, strict=True))
        torch.testing.assert_close(pooled[b], expected, atol=1e-5, rtol=1e-5)
        assert (alpha[b][~mask[b]] == 0).all()
        torch.testing.assert_close(alpha[b].sum(), torch.tensor(1.0))


def test_starts_as_the_mean_and_learns(batch):
    pooling = GraphAttentionPooling(12, zero_init=True)
    pooled, _ = pooling(batch.nodes, batch.graphs.mask, batch.graphs.node_type)
    expected = torch.stack([h[m].mean(0) for h, m in zip(batch.nodes, batch.graphs.mask, strict=True)])
    torch.testing.assert_close(pooled, expected)
    pooled.square().sum().backward()
    assert pooling.query.grad.abs().max() > 0


def test_graph_without_nodes_gives_zero(batch):
    h = batch.nodes.clone().requires_grad_()
    pooled, alpha = GraphAttentionPooling(12)(h, torch.zeros_like(batch.graphs.mask), batch.graphs.node_type)
    pooled.sum().backward()
    assert (pooled == 0).all() and (alpha == 0).all() and h.grad.isfinite().all()


def test_types_are_pooled_apart(batch):
    pooling = GraphAttentionPooling(12, num_types=4)  # one type more than there are: zeros
    torch.nn.init.normal_(pooling.query)
    h, mask, kind = batch.nodes, batch.graphs.mask, batch.graphs.node_type
    pooled, alpha = pooling(h, mask, kind)
    for b in range(len(h)):
        for t in range(4):
            mine = [i for i in range(h.shape[1]) if mask[b, i] and kind[b, i] == t]
            expected = torch.zeros(12)
            if mine:
                weight = torch.softmax(torch.stack([pooling.query[t] @ h[b, i] for i in mine]) / math.sqrt(12), 0)
                expected = sum(w * h[b, i] for w, i in zip(weight, mine, strict=True))
                torch.testing.assert_close(alpha[b, mine], weight)
            torch.testing.assert_close(pooled[b, 12 * t : 12 * t + 12], expected, atol=1e-5, rtol=1e-5)
