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
"""Which nodes decided that two images look alike: attributions over the named nodes of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monai_god.networks.nets.god_net import GoDNet, GoDOutput
from monai_god.networks.utils import safe_normalize
from monai_god.transforms.graph.modality import Modality, get_modality

__all__ = [
    "BY_MAGNITUDE",
    "METHODS",
    "SCOPES",
    "GraphBatch",
    "attribute_nodes",
    "integrated_gradients",
    "node_ranks",
    "scope_embedding",
    "shares",
]

#: "graph": cosine of g_G, the paper's scope; "embedding": cosine of z, through the fusion
SCOPES = ("graph", "embedding")
METHODS = ("contribution", "attention", "grad_x_input", "integrated_gradients", "leave_one_out")
#: ordered by magnitude: a cosine does not change when all features are scaled, so that the signed terms of all nodes
#: sum to about zero, and half of the nodes that carry a match are negative
BY_MAGNITUDE = ("grad_x_input", "integrated_gradients")


class GraphBatch(NamedTuple):
    """
    What :class:`GoDNet` takes: ``dense`` (see :func:`densify`), ``nodes`` [B, N, C] and ``g`` [B, C].
    """

    dense: Any
    nodes: Tensor
    g: Tensor

    def keep(self, mask: Tensor) -> GraphBatch:
        """The same with only some of the nodes, ``mask`` [B, N] bool."""
        return self._replace(dense=self.dense._replace(mask=self.dense.mask & mask))

    def rows(self, index: Tensor) -> GraphBatch:
        """Some of the graphs (repeats allowed), ``index`` [M] long."""
        picked = {name: None if value is None else value[index] for name, value in self.dense._asdict().items()}
        return GraphBatch(self.dense._replace(**picked), self.nodes[index], self.g[index])


def scope_embedding(output: GoDOutput, scope: str) -> Tensor:
    """
    The unit vectors [B, E] whose cosine is attributed.

    Raises:
        ValueError: for an unknown scope.
    """
    if scope not in SCOPES:
        raise ValueError(f"scope must be one of {SCOPES}, got {scope!r}")
    return safe_normalize(output.graph_embedding) if scope == "graph" else output.z


def integrated_gradients(
    net: GoDNet,
    batch: GraphBatch,
    target: Tensor,
    scope: str = "embedding",
    steps: int = 32,
    baseline: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """
    Integrated gradients of the pair's cosine along the straight path from a baseline to the node features (Sundararajan
    et al. 2017), by the midpoint rule.

    Args:
        net: the network, in evaluation mode.
        batch: B graphs.
        target: [B, E], the embedding that each is compared with.
        scope: see :data:`SCOPES`.
        steps: points on the path.
        baseline: [C] features of a node that says nothing; zeros by default.

    Returns:
        attributions [B, N], and [B] by how much their sum misses s(features) - s(baseline): completeness.
    """
    start = torch.zeros_like(batch.nodes) if baseline is None else baseline.expand_as(batch.nodes)
    step = batch.nodes - start
    total = torch.zeros_like(batch.nodes)
    for k in range(steps):
        total += _gradient(net, batch._replace(nodes=start + step * ((k + 0.5) / steps)), target, scope)
    terms = (total / steps * step).sum(-1) * batch.dense.mask
    with torch.no_grad():
        ends = [_similarity(net, batch._replace(nodes=nodes), target, scope) for nodes in (batch.nodes, start)]
    return terms, (terms.sum(1) - (ends[0] - ends[1])).abs()


def _similarity(net: GoDNet, batch: GraphBatch, target: Tensor, scope: str) -> Tensor:
    return (scope_embedding(net(*batch), scope) * target).sum(-1)


def _gradient(net: GoDNet, batch: GraphBatch, target: Tensor, scope: str) -> Tensor:
    nodes = batch.nodes.detach().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(_similarity(net, batch._replace(nodes=nodes), target, scope).sum(), nodes)
    return gradient


@torch.no_grad()
def _leave_one_out(net: GoDNet, batch: GraphBatch, target: Tensor, scope: str, graphs_per_pass: int) -> Tensor:
    graph, node = batch.dense.mask.nonzero(as_tuple=True)
    whole = _similarity(net, batch, target, scope)
    effect = torch.zeros_like(batch.dense.mask, dtype=whole.dtype)
    for start in range(0, len(graph), graphs_per_pass):
        index, left = graph[start : start + graphs_per_pass], node[start : start + graphs_per_pass]
        keep = torch.ones(len(index), batch.dense.mask.shape[1], dtype=torch.bool, device=left.device)
        keep[torch.arange(len(index), device=left.device), left] = False
        without = _similarity(net, batch.rows(index).keep(keep), target[index], scope)
        effect[index, left] = whole[index] - without
    return effect


def attribute_nodes(
    net: GoDNet,
    batch: GraphBatch,
    partner: GoDOutput,
    method: str = "contribution",
    scope: str = "embedding",
    steps: int = 32,
    graphs_per_pass: int = 256,
    baseline: Tensor | None = None,
) -> Tensor:
    """
    How much each node of image a adds to its similarity with image b, whose embedding stays as it is.

    - ``"contribution"``: the exact terms of level (E), scope ``"embedding"`` only;
    - ``"attention"``: the weights of the graph's pooling (Eq. 3), the same whatever the partner;
    - ``"grad_x_input"``: sum over features of h_i ds/dh_i, h the encoder's input (the paper's Sec. 4.2);
    - ``"integrated_gradients"``: see :func:`integrated_gradients`;
    - ``"leave_one_out"``: s minus s without the node and its edges: what the cheap ones are measured against.

    Args:
        net: the network, in evaluation mode.
        batch: B images a.
        partner: output of the network for the B images b.
        method: see above.
        scope: see :data:`SCOPES`.
        steps: of integrated gradients.
        graphs_per_pass: of leave-one-out.
        baseline: of integrated gradients.

    Returns:
        [B, N], zero for padded nodes.

    Raises:
        ValueError: for an unknown method or scope, or one that the network does not have.
    """
    mask = batch.dense.mask
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}")
    if net.encoder is None:
        raise ValueError("Level (A) has no graph, so no nodes to attribute to.")
    target = scope_embedding(partner, scope).detach()
    if method == "contribution":
        if scope != "embedding" or not net.matched:
            raise ValueError("Exact contributions are terms of z at level (E): scope 'embedding', matched not False.")
        with torch.no_grad():
            output = net(*batch)
            places = net.node_contributions(output, partner).nodes
        return places.gather(1, output.slot.masked_fill(~mask, 0)) * mask
    if method == "attention":
        with torch.no_grad():
            return net(*batch).attention
    if method == "grad_x_input":
        return (_gradient(net, batch, target, scope) * batch.nodes).sum(-1) * mask
    if method == "integrated_gradients":
        return integrated_gradients(net, batch, target, scope, steps, baseline)[0]
    return _leave_one_out(net, batch, target, scope, graphs_per_pass)


def node_ranks(attribution: Tensor, mask: Tensor, method: str, signed: bool | None = None) -> Tensor:
    """
    Rank of each node, 0 the most important; of equals the first; padded nodes last.

    Args:
        attribution: [B, N].
        mask: [B, N] nodes that exist.
        method: that gave it.
        signed: True to order by value, False by magnitude, None for what suits the method (:data:`BY_MAGNITUDE`).

    Returns:
        [B, N] long.
    """
    by_value = method not in BY_MAGNITUDE if signed is None else signed
    key = (attribution if by_value else attribution.abs()).masked_fill(~mask, -torch.inf)
    order = key.argsort(dim=1, descending=True, stable=True)
    return torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )


def shares(attribution: Tensor, slot: Tensor, mask: Tensor, modality: str | Modality) -> list[Mapping[str, float]]:
    """
    Share of each node group in what speaks for the match, for each image, for example
    ``{"right lung boundary": 0.41, "heart boundary": 0.22, ...}``.

    Args:
        attribution: [B, N]; negative ones speak against the match and are left out.
        slot: [B, N] named places.
        mask: [B, N] nodes that exist.
        modality: whose groups.

    Returns:
        shares by group, the largest first, with sum 1; all zero where nothing speaks for the match.
    """
    spans = [(group.name, start, start + count) for group, start, count in get_modality(modality).spans()]
    speaks_for = attribution.clamp_min(0) * mask
    total = speaks_for.sum(1).clamp_min(1e-12)
    parts = {
        name: ((speaks_for * ((slot >= start) & (slot < end))).sum(1) / total).tolist() for name, start, end in spans
    }
    rows = [{name: values[i] for name, values in parts.items()} for i in range(len(attribution))]
    return [dict(sorted(row.items(), key=lambda pair: -pair[1])) for row in rows]
