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
"""One pair of images, node by node: what each adds, which matches which, and how much the two differ there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch_geometric.data import Batch

from monai_god.engines.cached_graphs import graph_tensors
from monai_god.networks.blocks.correspondence import SoftCorrespondence, node_differences
from monai_god.networks.nets.god_net import GoDNet
from monai_god.transforms.graph import AnatomyGraph, Modality

from .attributions import GraphBatch, attribute_nodes, shares

__all__ = ["NodeView", "PairView", "view_pair"]


class NodeView(NamedTuple):
    """
    One node of image a, compared with image b.

    Attributes:
        name: of its place, for example ``"left lung boundary 07"``.
        group: the structure it belongs to.
        pos: (x, y) in [0, 1].
        effect: what it adds to the similarity (negative: speaks against the match).
        share: of what all nodes together add that speak for the match, in [0, 1].
        match: index of the node of b it matches best, or None where b has none of its type.
        confidence: P of that match (Eq. 5), in [0, 1].
        difference: length of delta_i (Eq. 6).
    """

    name: str
    group: str
    pos: tuple[float, float]
    effect: float
    share: float
    match: int | None
    confidence: float
    difference: float


class PairView(NamedTuple):
    """
    Attributes:
        similarity: cosine of z.
        method: of the effects, see :func:`attribute_nodes`.
        nodes: of image a against b, and of b against a.
        shares: by structure, of image a.
        differences: mean |delta_i| by structure, of image a.
    """

    similarity: float
    method: str
    nodes: tuple[list[NodeView], list[NodeView]]
    shares: Mapping[str, float]
    differences: Mapping[str, float]


@torch.no_grad()
def view_pair(
    net: GoDNet, first: AnatomyGraph, second: AnatomyGraph, modality: Modality, scale: float = 1.0
) -> PairView:
    """
    Explain the similarity of two images. The effects are the exact terms of level (E) where the network has them, and
    otherwise those of leaving each node out.

    Args:
        net: the network, not of level (A).
        first: graph of image a, with ``x`` and ``g``; ``second``: of image b.
        modality: of both.
        scale: granularity of the graphs.

    Raises:
        ValueError: when a graph has no node.
    """
    if not first.num_nodes or not second.num_nodes:
        raise ValueError("a graph of the pair has no node: nothing to compare")
    net.eval()
    device = next(net.parameters()).device
    batches = [GraphBatch(*graph_tensors(Batch.from_data_list([graph]), device)) for graph in (first, second)]
    outputs = [net(*batch) for batch in batches]
    method = "contribution" if net.matched else "leave_one_out"
    correspondence = SoftCorrespondence(net.correspondence.tau, same_type=True)
    names = modality.node_names(scale)
    group_of = [group.name for group, _, count in modality.spans(scale) for _ in range(count)]
    views: list[list[NodeView]] = []
    for a, b in ((0, 1), (1, 0)):
        one, other, batch = outputs[a], outputs[b], batches[a]
        effect = attribute_nodes(net, batch, other, method)[0]
        # Eq. 5 among what the level compares: projected nodes at (E), encoded ones below
        h_a, h_b = (o.node_vectors if net.matched else o.node_embeddings for o in (one, other))
        p = correspondence(h_a, h_b, one.mask, other.mask, one.node_type, other.node_type)
        delta, matched = node_differences(h_a, h_b, p)
        confidence, best = p[0].max(1)
        speaks_for = float(effect.clamp_min(0).sum())
        views.append(
            [
                NodeView(
                    names[slot],
                    group_of[slot],
                    (float(batch.dense.pos[0, i, 0]), float(batch.dense.pos[0, i, 1])),
                    float(effect[i]),
                    max(float(effect[i]), 0.0) / speaks_for if speaks_for > 0 else 0.0,
                    int(best[i]) if matched[0, i] else None,
                    float(confidence[i]),
                    float(delta[0, i].norm()),
                )
                for i, slot in enumerate(one.slot[0].tolist())
                if batch.dense.mask[0, i]
            ]
        )
    by_group: dict[str, list[float]] = {}
    for node in views[0]:
        if node.match is not None:
            by_group.setdefault(node.group, []).append(node.difference)
    attribution = attribute_nodes(net, batches[0], outputs[1], method)
    return PairView(
        float((outputs[0].z * outputs[1].z).sum()),
        method,
        (views[0], views[1]),
        shares(attribution, outputs[0].slot, outputs[0].mask, modality)[0],
        {name: sum(values) / len(values) for name, values in by_group.items()},
    )
