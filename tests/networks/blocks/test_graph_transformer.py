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

from monai_god.networks.blocks import GraphTransformer, GraphTransformerLayer
from tests.graph_batch import make_batch


def naive_layer(layer: GraphTransformerLayer, h: torch.Tensor, neighbours: list[list[int]]) -> torch.Tensor:
    """One graph [N, D], node by node and head by head."""
    nodes, width = h.shape
    size = width // layer.heads
    qkv = layer.query_key_value(layer.attention_norm(h))
    q, k, v = qkv[:, :width], qkv[:, width : 2 * width], qkv[:, 2 * width :]
    out = []
    for i in range(nodes):
        heads = []
        for head in range(layer.heads):
            part = slice(head * size, (head + 1) * size)
            scores = [float(q[i, part] @ k[j, part]) / math.sqrt(size) for j in neighbours[i]]
            total = sum(math.exp(s) for s in scores)
            heads.append(sum(math.exp(s) / total * v[j, part] for s, j in zip(scores, neighbours[i], strict=True)))
        x = h[i] + layer.attention_out(torch.cat(heads))
        out.append(x + layer.mlp_out(torch.nn.functional.gelu(layer.mlp_in(layer.mlp_norm(x)))))
    return torch.stack(out)


@torch.no_grad()
def test_equals_a_loop_over_nodes(batch):
    net = GraphTransformer(12, num_node_types=3, layers=2, heads=4)
    kind, pos, adjacency, mask = batch.graphs
    out = net(batch.nodes, kind, pos, adjacency, mask)
    for b in range(len(mask)):
        n = int(mask[b].sum())
        h = []
        for i in range(n):
            position = net.position_out(torch.nn.functional.gelu(net.position_in(pos[b, i])))
            h.append(batch.nodes[b, i] + net.type_embedding.weight[kind[b, i]] + position)
        h = torch.stack(h)
        neighbours = [[j for j in range(n) if adjacency[b, i, j] or i == j] for i in range(n)]
        for layer in net.layers:
            h = naive_layer(layer, h, neighbours)
        torch.testing.assert_close(out[b, :n], h, atol=1e-5, rtol=1e-5)
        assert (out[b, n:] == 0).all()


def test_starts_as_the_identity(batch):
    net = GraphTransformer(12, 3, zero_init=True)
    kind, pos, adjacency, mask = batch.graphs
    out = net(batch.nodes, kind, pos, adjacency, mask)
    assert torch.equal(out[mask], batch.nodes[mask])


@pytest.mark.parametrize("valid", [[], [0]])
def test_empty_and_single_node_graphs(valid):
    batch = make_batch(images=2, nodes=4)
    mask = torch.zeros(2, 4, dtype=torch.bool)
    mask[:, valid] = True
    net = GraphTransformer(12, 3)
    h = batch.nodes.clone().requires_grad_()
    # no edges at all: a node still attends to itself
    out = net(h, batch.graphs.node_type, batch.graphs.pos, torch.zeros(2, 4, 4, dtype=torch.bool), mask)
    out.square().sum().backward()
    assert out.isfinite().all() and h.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())
    assert (out[~mask] == 0).all() and (h.grad[~mask] == 0).all()


def test_a_node_does_not_see_beyond_its_neighbours(batch):
    """Two layers: a chain 0-1-2-3 carries node 3 to node 1, not to node 0."""
    chain = torch.eye(7, dtype=torch.bool)
    for i in range(6):
        chain[i, i + 1] = chain[i + 1, i] = True
    kind, pos, _, _ = (t[:1] for t in batch.graphs)
    net = GraphTransformer(12, 3, layers=2)
    h = batch.nodes[:1].clone().requires_grad_()
    out = net(h, kind, pos, chain[None], torch.ones(1, 7, dtype=torch.bool))
    assert torch.autograd.grad(out[0, 0].sum(), h, retain_graph=True)[0][0, 3].abs().max() == 0
    assert torch.autograd.grad(out[0, 1].sum(), h)[0][0, 3].abs().max() > 0


def test_reset_parameters_gives_fresh_weights():
    torch.manual_seed(3)
    net = GraphTransformer(8, 2)
    first = {k: v.clone() for k, v in net.state_dict().items()}
    torch.manual_seed(3)
    for p in net.parameters():
        p.data.fill_(7.0)
    net.reset_parameters()
    assert not any((v == 7).any() for v in net.state_dict().values())
    assert {k: v.shape for k, v in first.items()} == {k: v.shape for k, v in net.state_dict().items()}


def test_rejects_indivisible_width():
    with pytest.raises(ValueError, match="multiple of heads"):
        GraphTransformer(10, 3, heads=4)
