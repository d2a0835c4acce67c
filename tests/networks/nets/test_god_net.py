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

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Batch as PyGBatch

from monai_god.networks.closed_form import fit_closed_form, principal_components
from monai_god.networks.nets import GoDEmbedder, GoDNet, select_rows
from monai_god.transforms.graph.anatomy_graph import AnatomyGraph, dense_nodes, densify
from tests.graph_batch import Batch, Graphs, make_batch

LEVELS = ["A", "B", "C", "D", "E"]


def build(components: str, head_init: str = "random", **kwargs) -> GoDNet:
    defaults = {"num_node_types": 3, "num_nodes": 7, "embed_dim": 9, "node_dim": 4, "width": 8}
    net = GoDNet(12, components, head_init=head_init, **(defaults | kwargs))
    if head_init == "random" and net.node_bias is not None:  # places must differ for the tests to see them
        torch.nn.init.normal_(net.node_bias.weight)
        torch.nn.init.normal_(net.node_logits)
    return net


def with_slots(graphs: Graphs, slot: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(**graphs._asdict(), slot=slot)


@pytest.mark.parametrize("width", [None, 8])
@pytest.mark.parametrize("components", LEVELS)
def test_shapes_and_unit_length(components, width, batch):
    net = build(components, width=width)
    out = net(batch.graphs, batch.nodes, batch.g)
    d = 0 if components == "A" else (width or 12)
    assert out.z.shape == (8, net.embedding_size) == (8, 9 + (7 * 4 if components == "E" else 0))
    assert out.graph_embedding.shape == (8, d) and out.node_embeddings.shape == (8, 7, d)
    assert out.attention.shape == (8, 7) and out.global_embedding.shape == (8, 9)
    torch.testing.assert_close(out.z.norm(dim=1), torch.ones(8))
    assert torch.equal(net.embed(*batch.tensors), out.z)
    torch.testing.assert_close(net.similarity(out, out).diagonal(), torch.ones(8))
    assert f"components={components}" in repr(net)


@pytest.mark.parametrize("components", LEVELS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), padding=st.integers(0, 5))
def test_order_padding_and_batch_size_do_not_matter(components, seed, padding):
    batch = make_batch(images=5, seed=seed)
    net = build(components).eval()
    with torch.no_grad():
        z = net(batch.graphs, batch.nodes, batch.g).z
        # one by one
        single = [net(b.graphs, b.nodes, b.g).z for b in (batch.rows(slice(i, i + 1)) for i in range(5))]
        assert (z - torch.cat(single)).abs().max() < 1e-5
        # nodes in another order, with more padding; each keeps its named place
        order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
        place = torch.arange(7).expand(5, 7)[:, order]
        kind, pos, adjacency, mask = batch.graphs
        moved = Graphs(kind[:, order], pos[:, order], adjacency[:, order][:, :, order], mask[:, order])
        nodes = batch.nodes[:, order]

        def pad(t: torch.Tensor, value: float) -> torch.Tensor:
            return torch.cat([t, t.new_full((5, padding, *t.shape[2:]), value)], dim=1)

        adjacency = torch.zeros(5, 7 + padding, 7 + padding, dtype=torch.bool)
        adjacency[:, :7, :7] = moved.adjacency
        padded = Graphs(pad(moved.node_type, -1), pad(moved.pos, 9.0), adjacency, pad(moved.mask, 0))
        again = net(with_slots(padded, pad(place, -1)), pad(nodes, float("nan")), batch.g).z
        assert (z - again).abs().max() < 1e-5


@pytest.mark.parametrize("components", LEVELS)
@pytest.mark.parametrize("valid", [0, 1])
def test_graphs_with_no_or_one_node_are_finite(components, valid, batch):
    net = build(components)
    mask = torch.zeros_like(batch.graphs.mask)
    mask[:, :valid] = True
    nodes = batch.nodes.clone().requires_grad_()
    out = net(batch.graphs._replace(mask=mask), nodes, batch.g)
    (out.z * torch.randn_like(out.z)).sum().backward()
    assert all(t.isfinite().all() for t in out)
    assert nodes.grad is None or nodes.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())
    torch.testing.assert_close(out.z.norm(dim=1), torch.ones(8))


@pytest.mark.parametrize("components", LEVELS)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:")
def test_scripts_and_traces(components, batch, tmp_path):
    net = build(components).eval()
    other = make_batch(images=3, seed=5)
    expected = net.embed(*other.tensors)
    scripted = torch.jit.script(GoDEmbedder(net))
    torch.jit.save(scripted, tmp_path / "net.ts")
    torch.testing.assert_close(torch.jit.load(tmp_path / "net.ts")(*other.tensors), expected)
    torch.testing.assert_close(torch.jit.script(net).embed(*other.tensors), expected)
    # traced on one batch, used on another of a different size
    torch.testing.assert_close(torch.jit.trace(GoDEmbedder(net), batch.tensors)(*other.tensors), expected)


@pytest.mark.parametrize("components", ["A", "D", "E"])
@pytest.mark.filterwarnings("ignore")
def test_exports_to_onnx(components, batch, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    net = build(components).eval()
    names = ["nodes", "g", "node_type", "pos", "adjacency", "mask"]
    torch.onnx.export(GoDEmbedder(net), batch.tensors, tmp_path / "net.onnx", input_names=names, dynamo=True)
    session = runtime.InferenceSession(tmp_path / "net.onnx")
    wanted = {i.name for i in session.get_inputs()}
    feed = {n: t.numpy() for n, t in zip(names, batch.tensors, strict=True) if n in wanted}
    torch.testing.assert_close(torch.from_numpy(session.run(None, feed)[0]), net.embed(*batch.tensors))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:")
def test_missing_organ_keeps_the_other_places(batch):
    """A graph without its first two nodes, packed to the left: ``slot`` says where the rest belongs."""
    net = build("E").eval()
    kind, pos, adjacency, _ = (t[:1] for t in batch.graphs)
    mask = torch.ones(1, 7, dtype=torch.bool)
    mask[:, :2] = False
    expected = net(Graphs(kind, pos, adjacency, mask), batch.nodes[:1], batch.g[:1]).z
    packed = [batch.nodes[:1, 2:], batch.g[:1], kind[:, 2:], pos[:, 2:], adjacency[:, 2:, 2:], mask[:, 2:]]
    slot = torch.arange(2, 7)[None]
    torch.testing.assert_close(net.embed(*packed, slot), expected)
    torch.testing.assert_close(torch.jit.script(GoDEmbedder(net))(*packed, slot), expected)
    assert (net.embed(*packed) - expected).abs().max() > 1e-3


def test_reads_densified_anatomy_graphs():
    edges = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 1, 0]])
    graphs = []
    for size, slot in ((3, [0, 1, 2]), (2, [3, 6])):
        keep = (edges < size).all(0)
        graphs.append(
            AnatomyGraph(
                node_type=torch.arange(size) % 3,
                pos=torch.rand(size, 2),
                edge_index=edges[:, keep],
                slot=torch.tensor(slot),
                x=torch.randn(size, 12),
                num_nodes=size,
            )
        )
    batch = PyGBatch.from_data_list(graphs)
    dense, nodes = densify(batch), dense_nodes(batch.x, batch)
    out = build("E").eval()(dense, nodes, torch.randn(2, 12))
    filled = out.z[:, 9:].reshape(2, 7, 4).norm(dim=2) > 0
    assert filled.nonzero().tolist() == [[0, 0], [0, 1], [0, 2], [1, 3], [1, 6]]


def test_similarity_of_level_e_is_its_formula(batch):
    net = build("E", global_weight=0.3)
    out = net(batch.graphs, batch.nodes, batch.g)
    full = out.mask.sum(1) == 7
    w, v = net.part_weights()
    torch.testing.assert_close(w + v.sum(), torch.tensor(1.0))
    torch.testing.assert_close(w, torch.tensor(0.3))
    s = net.similarity(out, out)
    for a in range(8):
        for b in range(8):
            both = [i for i in range(7) if out.mask[a, i] and out.mask[b, i]]
            expected = w * (out.global_embedding[a] @ out.global_embedding[b])
            expected = expected + sum(v[i] * (out.place_vectors[a, i] @ out.place_vectors[b, i]) for i in both)
            norms = [(w + sum(v[i] for i in range(7) if out.mask[k, i])).sqrt() for k in (a, b)]
            torch.testing.assert_close(s[a, b], expected / (norms[0] * norms[1]))
            if full[a] and full[b]:
                torch.testing.assert_close(s[a, b], expected)


@pytest.mark.parametrize("rerank", [False, True])
def test_contributions_sum_to_the_similarity(batch, rerank):
    net = build("E")
    out = net(batch.graphs, batch.nodes, batch.g)
    a, b = torch.triu_indices(8, 8)
    terms = net.node_contributions(select_rows(out, a), select_rows(out, b), rerank=rerank)
    torch.testing.assert_close(terms.whole + terms.nodes.sum(1), terms.similarity)
    expected = (
        net.matched_similarity(select_rows(out, a), select_rows(out, b)) if rerank else net.similarity(out, out)[a, b]
    )
    torch.testing.assert_close(terms.similarity, expected)
    assert (terms.nodes[~out.mask[a]] == 0).all()
    if not rerank:
        assert (terms.nodes[~out.mask[b]] == 0).all()


def test_matched_similarity_is_a_loop(batch):
    net = build("E", tau=0.2)
    out = net(batch.graphs, batch.nodes, batch.g)
    w, v = net.part_weights()
    a, b = torch.tensor([0, 1, 4, 6]), torch.tensor([3, 0, 5, 7])
    scores = net.matched_similarity(select_rows(out, a), select_rows(out, b))
    for k, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        total, weight = w * (out.global_embedding[x] @ out.global_embedding[y]), w
        for i in range(7):
            n = out.node_vectors[x, i]
            partners = [j for j in range(7) if out.mask[y, j] and out.node_type[y, j] == out.node_type[x, i]]
            if not out.mask[x, i] or not partners:
                continue
            p = torch.softmax(torch.stack([n @ out.node_vectors[y, j] for j in partners]) / 0.2, 0)
            matched = sum(p[m] * out.node_vectors[y, j] for m, j in enumerate(partners))
            total, weight = total + v[i] * torch.cosine_similarity(n, matched, dim=0), weight + v[i]
        torch.testing.assert_close(scores[k], total / weight)


@pytest.mark.parametrize("width", [None, 8])
@pytest.mark.parametrize("components", LEVELS)
@pytest.mark.parametrize("typed_pooling", [False, True])
def test_untrained_network_is_the_closed_form(components, width, typed_pooling):
    batch = make_batch(images=30)
    # node_dim of the width or more: no projection of the places, whose start is random
    net = build(components, "closed_form", width=width, global_weight=0.4, node_dim=12, typed_pooling=typed_pooling)
    report = net.initialise_closed_form(batch.graphs, batch.nodes, batch.g, batch.patients, shrinkage=0.3)
    out = net.eval()(batch.graphs, batch.nodes, batch.g)
    mask, kind = batch.graphs.mask, batch.graphs.node_type
    nodes = batch.nodes.masked_fill(~mask[..., None], 0.0)
    pools = 0 if components == "A" else 3 if typed_pooling else 1
    share = 9 // (pools + 1) if pools else 0
    # g, through the principal components of the nodes
    g = torch.nn.functional.layer_norm(batch.g, (12,)) @ principal_components(nodes, 9, mask).T
    parts = [fit_closed_form(g, batch.patients, shrinkage=0.3, out_dim=9 - pools * share)(g)]
    if components != "A":
        # the graph branch: the means of the nodes, each centred on its type
        h = nodes if width is None else nodes @ principal_components(nodes, 8, mask).T
        centred = h.clone()
        for t in range(3):
            rows = mask & (kind == t)
            if rows.any():
                centred[rows] = h[rows] - h[rows].mean(0)
        torch.testing.assert_close(out.node_embeddings[mask], centred[mask], atol=1e-4, rtol=1e-4)
        means = []
        for b in range(30):
            for t in range(pools):
                mine = mask[b] & (kind[b] == t) if typed_pooling else mask[b]
                means.append(centred[b][mine].mean(0) if mine.any() else torch.zeros(h.shape[2]))
        pooled = torch.stack(means).reshape(30, -1)
        regions = torch.nn.functional.layer_norm(pooled, pooled.shape[1:]).reshape(30, pools, -1)
        fit = fit_closed_form(regions, batch.patients, shrinkage=0.3, out_dim=share)
        parts.append(fit(regions).flatten(1))
    whole = torch.nn.functional.normalize(torch.cat(parts, 1), dim=1)
    similarity = whole @ whole.T
    if components == "E":
        fit = fit_closed_form(h, batch.patients, shrinkage=0.3, mask=mask)
        n = torch.nn.functional.normalize(fit(h), dim=2) * mask[..., None]
        z = torch.cat([0.4**0.5 * whole, (0.6 / 7) ** 0.5 * n.flatten(1)], 1)
        z = torch.nn.functional.normalize(z, dim=1)
        similarity = z @ z.T
    torch.testing.assert_close(net.similarity(out, out), similarity, atol=2e-3, rtol=1e-3)
    assert report["phi_shrinkage"] == 0.3


def test_place_projections_keep_the_cosines_on_average():
    """Random projections of 32 places to 16 numbers: the mean cosine is close to that of the full vectors."""
    batch = make_batch(images=12, nodes=32, channels=48)
    keep = torch.ones_like(batch.graphs.mask)
    graphs = batch.graphs._replace(mask=keep)
    net = GoDNet(48, "E", num_node_types=3, num_nodes=32, node_dim=16, head_init="random").eval()
    out = net(graphs, batch.nodes, batch.g)
    full = torch.einsum("aid,bid->ab", out.node_vectors, out.node_vectors) / 32
    small = torch.einsum("aid,bid->ab", out.place_vectors, out.place_vectors) / 32
    assert out.place_vectors.shape == (12, 32, 16)
    assert (full - small).abs().max() < 4 / (32 * 16) ** 0.5


def test_closed_form_with_cross_validation_chooses_the_weight_and_keeps_the_mode():
    batch = make_batch(images=60)
    net = build("E", "closed_form").train()
    report = net.initialise_closed_form(batch.graphs, batch.nodes, batch.g, batch.patients)
    assert net.training and bool(net.closed_form_ready)
    assert net.part_weights()[0].item() == pytest.approx(report["global_weight"], abs=1e-6)
    assert report["rank1"] + report["map"] >= max(
        report["phi_rank1"] + report["phi_map"] - 0.1, report["node_rank1"] + report["node_map"] - 0.1
    )
    twin = build("E", "closed_form")
    twin.load_state_dict(net.state_dict())
    twin.train()
    torch.testing.assert_close(twin(batch.graphs, batch.nodes, batch.g).z, net(batch.graphs, batch.nodes, batch.g).z)


def test_training_without_the_fit_is_refused(batch):
    net = build("D", "closed_form")
    with pytest.raises(RuntimeError, match="initialise_closed_form"):
        net(batch.graphs, batch.nodes, batch.g)
    net.eval()(batch.graphs, batch.nodes, batch.g)
    with pytest.raises(ValueError, match="head_init='random'"):
        build("D").initialise_closed_form(batch.graphs, batch.nodes, batch.g, batch.patients)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"components": "F"}, "components must be one of"),
        ({"head_init": "zero"}, "head_init"),
        ({"components": "D", "matched": True}, "level \\(E\\)"),
        ({"components": "E", "node_dim": 0}, "node_dim"),
        ({"components": "E", "global_weight": 1.0}, "global_weight"),
    ],
)
def test_bad_settings(kwargs, message):
    with pytest.raises(ValueError, match=message):
        build(**({"components": "D"} | kwargs))


def test_bad_shapes(batch: Batch):
    with pytest.raises(ValueError, match="Expected nodes"):
        build("D")(batch.graphs, batch.nodes[..., :5], batch.g)
    with pytest.raises(ValueError, match="named places"):
        build("E", num_nodes=5)(batch.graphs, batch.nodes, batch.g)
    with pytest.raises(ValueError, match="matched part"):
        net = build("E", matched=False)
        out = net(batch.graphs, batch.nodes, batch.g)
        net.node_contributions(out, out)
