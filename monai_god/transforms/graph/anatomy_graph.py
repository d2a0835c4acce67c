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

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data

__all__ = ["AnatomyGraph", "DenseGraphs", "dense_nodes", "densify"]


class AnatomyGraph(Data):
    """
    Anatomy graph of one image; ``torch_geometric.data.Batch.from_data_list`` joins several.

    Attributes:
        node_type: [N] long.
        pos: [N, 2] float32, (x, y) in [0, 1] of the square image; pixel centres lie at (column + 0.5) / width.
        pool: [N, grid height * grid width] float32 pooling weights of Eq. 1, row-major, rows sum to 1. Graphs of cached
            items carry ``x`` [N, C] node features and ``g`` [1, C] instead.
        edge_index: [2, E] long, symmetric, with self-loops.
        slot: [N] long, named place of each node in the modality's fixed order.
        node_name: list of N str.
        problems: list of str, why nodes are missing; empty for a complete graph.
    """

    _NODE_TENSORS = ("node_type", "pos", "pool", "slot", "x")

    def __cat_dim__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        return 1 if key == "edge_index" else 0

    def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        return self.num_nodes if key == "edge_index" else 0

    def keep_nodes(self, keep: Tensor) -> AnatomyGraph:
        """
        A new graph of some of the nodes, in the same order, and the edges among them.

        PyG's ``subgraph`` tells node attributes by their length, which takes ``g`` for one in a graph of one node, and
        does not cut lists.

        Args:
            keep: [N] bool.
        """
        if keep.dtype != torch.bool or keep.shape != (self.num_nodes,):
            raise ValueError(f"keep must be bool of shape ({self.num_nodes},), got {keep.dtype} {tuple(keep.shape)}")
        out = self.clone()
        for key in self._NODE_TENSORS:
            if self.get(key) is not None:
                out[key] = self[key][keep]
        out.node_name = [name for name, kept in zip(self.node_name, keep.tolist(), strict=True) if kept]
        assert self.edge_index is not None
        edges = self.edge_index[:, keep[self.edge_index].all(0)]
        out.edge_index = (keep.cumsum(0) - 1)[edges]
        return out


class DenseGraphs(NamedTuple):
    """
    A batch of B graphs padded to N nodes; padded entries are zero or False.

    Attributes:
        node_type: [B, N] long.
        pos: [B, N, 2] float32.
        pool: [B, N, G] float32, or None where the graphs carry node features instead.
        adjacency: [B, N, N] bool.
        mask: [B, N] bool, True for nodes that exist.
        slot: [B, N] long.
    """

    node_type: Tensor
    pos: Tensor
    pool: Tensor | None
    adjacency: Tensor
    mask: Tensor
    slot: Tensor


def _places(batch: Data, num_nodes: int | None) -> tuple[Tensor, Tensor, int, int]:
    """Graph and row of each node, number of graphs, and rows per graph."""
    total = int(batch.num_nodes or 0)
    device = batch.node_type.device
    graph = batch.get("batch")
    if graph is None:
        graph = torch.zeros(total, dtype=torch.long, device=device)
    graphs = int(getattr(batch, "num_graphs", 1))
    counts = torch.bincount(graph, minlength=graphs)
    row = torch.arange(total, device=device) - (counts.cumsum(0) - counts)[graph]
    largest = int(counts.max())
    if num_nodes is not None and num_nodes < largest:
        raise ValueError(f"a graph has {largest} nodes, more than num_nodes={num_nodes}")
    return graph, row, graphs, largest if num_nodes is None else num_nodes


def dense_nodes(values: Tensor, batch: Data, num_nodes: int | None = None) -> Tensor:
    """
    Pad values of the nodes of a batch, for example ``batch.x`` [sum N, C], to [B, N, C], zero where padded.

    Args:
        values: [sum N, ...], one row per node of ``batch``.
        batch: :class:`AnatomyGraph` or PyG batch of them.
        num_nodes: rows per graph; None for the largest graph's.

    Raises:
        ValueError: when a graph has more nodes than ``num_nodes``.
    """
    graph, row, graphs, rows = _places(batch, num_nodes)
    out = values.new_zeros(graphs, rows, *values.shape[1:])
    out[graph, row] = values
    return out


def densify(batch: Data, num_nodes: int | None = None) -> DenseGraphs:
    """
    Pad a batch of graphs to tensors with a node mask.

    Args:
        batch: one :class:`AnatomyGraph`, or ``Batch.from_data_list`` of several.
        num_nodes: rows per graph; None for the largest graph's.

    Raises:
        ValueError: when a graph has more nodes than ``num_nodes``.
    """
    graph, row, graphs, rows = _places(batch, num_nodes)
    pool = batch.get("pool")
    mask = torch.zeros(graphs, rows, dtype=torch.bool, device=graph.device)
    mask[graph, row] = True
    adjacency = torch.zeros(graphs, rows, rows, dtype=torch.bool, device=graph.device)
    assert batch.edge_index is not None
    source, target = batch.edge_index
    adjacency[graph[source], row[source], row[target]] = True
    return DenseGraphs(
        dense_nodes(batch.node_type, batch, rows),
        dense_nodes(batch.pos, batch, rows),
        None if pool is None else dense_nodes(pool, batch, rows),
        adjacency,
        mask,
        dense_nodes(batch.slot, batch, rows),
    )
