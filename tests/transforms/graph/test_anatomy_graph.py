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
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Batch
from torch_geometric.loader import DataLoader

from monai_god.transforms.graph import AnatomyGraph, BuildAnatomyGraph, dense_nodes, densify
from tests.anatomy_masks import chest, fundus


def make_graph(nodes: int, seed: int, features: bool = False) -> AnatomyGraph:
    random = np.random.default_rng(seed)
    adjacency = random.random((nodes, nodes)) < 0.4
    adjacency |= adjacency.T | np.eye(nodes, dtype=bool)
    graph = AnatomyGraph(
        node_type=torch.from_numpy(random.integers(0, 4, nodes)),
        pos=torch.from_numpy(random.random((nodes, 2), dtype=np.float32)),
        edge_index=torch.from_numpy(np.stack(adjacency.nonzero())),
        slot=torch.from_numpy(np.sort(random.permutation(20)[:nodes])),
        node_name=[f"node {i:02d}" for i in range(nodes)],
        problems=[],
    )
    if features:
        graph.x = torch.from_numpy(random.random((nodes, 5), dtype=np.float32))
        graph.g = torch.from_numpy(random.random((1, 5), dtype=np.float32))
    else:
        graph.pool = torch.from_numpy(random.random((nodes, 9), dtype=np.float32))
    return graph


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 3), st.booleans())
def test_densify_equals_naive_loop(sizes: list[int], extra: int, features: bool) -> None:
    graphs = [make_graph(n, i, features) for i, n in enumerate(sizes)]
    batch = Batch.from_data_list(graphs)
    rows = max(sizes) + extra
    dense = densify(batch, rows if extra else None)
    assert dense.mask.shape == (len(sizes), rows)
    assert (dense.pool is None) == features
    nodes = dense_nodes(batch.x, batch, rows) if features else None
    for b, graph in enumerate(graphs):
        n = sizes[b]
        assert dense.mask[b].tolist() == [True] * n + [False] * (rows - n)
        for name in ("node_type", "pos", "slot") + (() if features else ("pool",)):
            value = getattr(dense, name)[b]
            assert torch.equal(value[:n], graph[name]) and not value[n:].any()
        if nodes is not None:
            assert torch.equal(nodes[b, :n], graph.x) and not nodes[b, n:].any()
        expected = torch.zeros(rows, rows, dtype=torch.bool)
        for i, j in graph.edge_index.T.tolist():
            expected[i, j] = True
        assert torch.equal(dense.adjacency[b], expected)
    if features:
        assert batch.g.shape == (len(sizes), 5)


def test_order_of_edges_does_not_matter() -> None:
    graph = make_graph(8, 0)
    other = graph.clone()
    other.edge_index = graph.edge_index[:, torch.randperm(graph.edge_index.shape[1])]
    assert torch.equal(densify(graph).adjacency, densify(other).adjacency)


def test_batch_gives_the_graphs_back() -> None:
    graphs = [make_graph(4, 0), make_graph(1, 1), make_graph(7, 2)]
    batch = Batch.from_data_list(graphs)
    assert batch.node_name == [graph.node_name for graph in graphs]
    for graph, back in zip(graphs, batch.to_data_list(), strict=True):
        assert isinstance(back, AnatomyGraph)
        assert back.node_name == graph.node_name
        for key in ("node_type", "pos", "pool", "edge_index", "slot"):
            assert torch.equal(back[key], graph[key])


def test_loader_and_graphs_of_different_size() -> None:
    complete = BuildAnatomyGraph("cxr")(chest())
    masks = chest()
    masks[0] = 0
    fewer = BuildAnatomyGraph("cxr")(masks)
    batch = next(iter(DataLoader([complete, fewer], batch_size=2)))
    dense = densify(batch)
    assert dense.mask.sum(1).tolist() == [128, 80]
    assert torch.equal(dense.slot[1, :80], torch.arange(48, 128))
    assert batch.problems == [[], ["left lung mask empty"]]


def test_a_graph_without_nodes_can_be_batched() -> None:
    empty = BuildAnatomyGraph("cxr", allow_empty=True)(np.zeros((3, 64, 64), dtype=np.uint8))
    dense = densify(Batch.from_data_list([empty, BuildAnatomyGraph("cxr")(chest()), empty]))
    assert dense.mask.sum(1).tolist() == [0, 128, 0]
    alone = densify(Batch.from_data_list([empty]))
    assert alone.mask.shape == (1, 0)


def test_too_small_a_padding_is_an_error() -> None:
    with pytest.raises(ValueError, match="8 nodes"):
        densify(make_graph(8, 0), 7)


def test_keep_nodes_of_a_graph_of_one_node_keeps_the_global_features() -> None:
    graph = make_graph(1, 0, features=True)
    none = graph.keep_nodes(torch.tensor([False]))
    assert none.x.shape == (0, 5) and none.g.shape == (1, 5) and none.node_name == []
    with pytest.raises(ValueError, match="bool"):
        graph.keep_nodes(torch.tensor([1]))


def test_fundus_batch() -> None:
    masks, landmarks = fundus()
    graph = BuildAnatomyGraph("fundus")(masks, landmarks)
    dense = densify(Batch.from_data_list([graph, graph]), 34)
    assert dense.node_type.shape == (2, 34)
    assert torch.equal(dense.adjacency[0], dense.adjacency[1])
