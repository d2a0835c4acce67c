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
from torch_geometric.data import Batch

from monai_god.audit import (
    METHODS,
    GraphBatch,
    attribute_nodes,
    available_methods,
    faithfulness_audit,
    integrated_gradients,
    node_ranks,
    scope_embedding,
    shares,
)
from monai_god.engines.cached_graphs import graph_tensors
from monai_god.networks.nets import GoDNet
from monai_god.transforms import AnatomyGraph

CHANNELS, NODES = 12, 20
PLANTED = (2, 5, 11, 12, 19)


class Planted:
    """Graphs of 14 patients x 3 images; only the planted nodes (marked by channel 0) tell the patient."""

    def __init__(self, missing: bool = True, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.patient_ids, self.items, self.graphs = [], [], []
        for patient in range(14):
            of_patient = rng.normal(size=(len(PLANTED), CHANNELS - 1))
            for image in range(3):
                x = rng.normal(size=(NODES, CHANNELS))
                x[:, 0] = 0
                x[PLANTED, 0] = 3
                x[PLANTED, 1:] = of_patient + 0.35 * rng.normal(size=of_patient.shape)
                keep = np.ones(NODES, bool)
                if missing:
                    keep[rng.choice([i for i in range(NODES) if i not in PLANTED], 3, replace=False)] = False
                slot = np.flatnonzero(keep)
                n = len(slot)
                self.graphs.append(
                    AnatomyGraph(
                        x=torch.tensor(x[slot], dtype=torch.float32),
                        g=torch.tensor(rng.normal(size=(1, CHANNELS)), dtype=torch.float32),
                        node_type=torch.zeros(n, dtype=torch.long),
                        pos=torch.tensor(rng.random((n, 2)), dtype=torch.float32),
                        edge_index=torch.tensor(np.stack(np.nonzero(np.ones((n, n))))),
                        slot=torch.tensor(slot),
                        num_nodes=n,
                    )
                )
                self.patient_ids.append(f"p{patient}")
                self.items.append({"image": f"{patient}_{image}.png"})

    def __len__(self) -> int:
        return len(self.graphs)

    def graph(self, index: int) -> AnatomyGraph:
        return self.graphs[index]


def planted_net(uses_graph: bool = True) -> GoDNet:
    """A network of level (E) whose pooling, metric and place weights see the planted nodes only, or no node at all."""
    net = GoDNet(CHANNELS, "E", num_node_types=1, num_nodes=NODES, embed_dim=2 * CHANNELS, node_dim=CHANNELS, heads=2)
    with torch.no_grad():
        net.node_metric.weight.copy_(torch.eye(CHANNELS))
        net.node_metric.weight[0] = 0
        net.pooling.query.zero_()
        net.pooling.query[0, 0] = 6 * CHANNELS**0.5
        weight = torch.zeros(2 * CHANNELS, 2 * CHANNELS)
        if uses_graph:
            weight[:CHANNELS, CHANNELS:] = torch.eye(CHANNELS)
            weight[0] = 0
        else:
            weight[:CHANNELS, :CHANNELS] = torch.eye(CHANNELS)
        net.fusion.linear.weight.copy_(weight)
        net.fusion.linear.bias.zero_()
        net.node_logits.fill_(-20.0)
        net.node_logits[list(PLANTED)] = 0.0
        net.global_logit.fill_(0.0 if uses_graph else 20.0)
        net.closed_form_ready.fill_(True)
    return net.eval()


@pytest.fixture(scope="module")
def source() -> Planted:
    return Planted()


def batch_of(source: Planted, index) -> GraphBatch:
    return GraphBatch(*graph_tensors(Batch.from_data_list([source.graph(i) for i in index]), "cpu"))


@pytest.mark.parametrize("scope", ["embedding", "graph"])
def test_every_method_ranks_the_planted_nodes_first(source, scope):
    net = planted_net()
    a, b = batch_of(source, range(0, 42, 3)), batch_of(source, range(1, 42, 3))
    with torch.no_grad():
        partner = net(*b)
    assert available_methods(net, scope) == (METHODS if scope == "embedding" else METHODS[1:])
    for method in available_methods(net, scope):
        baseline = a.nodes[a.dense.mask].mean(0)
        attribution = attribute_nodes(net, a, partner, method, scope, baseline=baseline)
        first = node_ranks(attribution, a.dense.mask, method) < len(PLANTED)
        assert (first.sum(1) == len(PLANTED)).all()
        share = np.isin(a.dense.slot[first].numpy(), PLANTED).mean()
        # features are noise in part, so that single planted nodes of single pairs speak against the match
        assert share > (0.99 if method == "attention" else 0.9), (method, share)
        assert (attribution[~a.dense.mask] == 0).all()


@pytest.mark.parametrize("scope", ["embedding", "graph"])
def test_the_audit_tells_planted_truth_from_none(source, scope):
    fractions = (0, 0.1, 0.2, 0.3, 0.5, 0.75, 1)
    settings = {"scope": scope, "fractions": fractions, "random_orders": 4, "progress": False}
    report = faithfulness_audit(planted_net(), source, **settings)
    assert report["queries"] == 42 and report["patients"] == 14
    for method, delta in report["delta"].items():
        for mode in ("deletion", "insertion"):
            assert delta[mode]["ci95"][0] > 0.1, (method, mode, delta[mode])
    curve = report["curves"]["leave_one_out"]
    assert curve["deletion"][0] > 0.95 and curve["insertion"][-1] == curve["deletion"][0]
    assert curve["deletion"][-1] == curve["insertion"][0] < 0.2
    if scope == "embedding":
        ignorant = faithfulness_audit(planted_net(uses_graph=False), source, **settings)
        for delta in ignorant["delta"].values():
            for mode in ("deletion", "insertion"):
                assert delta[mode]["ci95"][0] <= 0 <= delta[mode]["ci95"][1]


def test_against_a_loop(source):
    """One method's deletion curve, image by image and node by node."""
    net = planted_net()
    fractions = (0, 0.25, 0.5, 1)
    report = faithfulness_audit(
        net, source, methods=["grad_x_input"], fractions=fractions, random_orders=1, batch_size=5, progress=False
    )
    with torch.no_grad():
        z = torch.cat([net(*batch_of(source, [i])).z for i in range(len(source))])
    hits = np.zeros((len(source), len(fractions)))
    for q in range(len(source)):
        similarity = z @ z[q]
        similarity[q] = -torch.inf
        partner = int(similarity.argmax())
        batch = batch_of(source, [q])
        with torch.no_grad():
            target = net(*batch_of(source, [partner]))
        attribution = attribute_nodes(net, batch, target, "grad_x_input")[0]
        order = attribution.abs().argsort(descending=True, stable=True)
        for k, fraction in enumerate(fractions):
            keep = torch.ones(1, len(order), dtype=torch.bool)
            keep[0, order[: int(fraction * len(order) + 0.5)]] = False
            with torch.no_grad():
                ranked = z @ net(*batch.keep(keep)).z[0]
            same = np.array([p == source.patient_ids[q] for p in source.patient_ids])
            same_other = same.copy()
            same_other[q] = False
            hits[q, k] = ranked[same_other].max() > ranked[~same].max()
    np.testing.assert_allclose(report["curves"]["grad_x_input"]["deletion"], hits.mean(0), atol=1e-9)


def test_integrated_gradients_are_complete(source):
    net = planted_net()
    with torch.no_grad():
        net.pooling.query[0, 0] = 1  # a path without cliffs
    a, b = batch_of(source, range(8)), batch_of(source, range(8, 16))
    with torch.no_grad():
        partner = net(*b)
    for scope in ("graph", "embedding"):
        target, baseline = scope_embedding(partner, scope), a.nodes[a.dense.mask].mean(0)
        _, coarse = integrated_gradients(net, a, target, scope, steps=4, baseline=baseline)
        terms, missing = integrated_gradients(net, a, target, scope, steps=100, baseline=baseline)
        assert missing.max() < 0.02 and missing.mean() <= coarse.mean() and terms.shape == a.dense.mask.shape


def test_contributions_add_up_to_the_similarity(source):
    net = planted_net()
    a, b = batch_of(source, range(6)), batch_of(source, range(1, 7))
    with torch.no_grad():
        first, second = net(*a), net(*b)
    terms = attribute_nodes(net, a, second, "contribution")
    whole = net.node_contributions(first, second).whole
    torch.testing.assert_close(terms.sum(1) + whole, (first.z * second.z).sum(1), atol=1e-5, rtol=0)


def test_a_killed_audit_goes_on(source, tmp_path, monkeypatch):
    net = planted_net()
    settings = {"fractions": (0, 0.5, 1), "random_orders": 2, "batch_size": 10, "progress": False}
    whole = faithfulness_audit(net, source, **settings)
    calls = {"left": 2}
    import monai_god.audit.faithfulness as module

    curves = module._curves

    def killed(*args):
        if not calls["left"]:
            raise KeyboardInterrupt
        calls["left"] -= 1
        return curves(*args)

    monkeypatch.setattr(module, "_curves", killed)
    with pytest.raises(KeyboardInterrupt):
        faithfulness_audit(net, source, work_dir=tmp_path, **settings)
    assert len(list(tmp_path.glob("*/*.npz"))) == 2
    calls["left"] = 3  # five parts, of which two are done
    again = faithfulness_audit(net, source, work_dir=tmp_path, **settings)
    assert again["curves"] == whole["curves"] and again["delta"] == whole["delta"] and calls["left"] == 0


def test_errors_in_words(source):
    net = planted_net()
    with pytest.raises(ValueError, match="Level .A. has no graph"):
        faithfulness_audit(GoDNet(CHANNELS, "A"), source)
    with pytest.raises(ValueError, match="ascend"):
        faithfulness_audit(net, source, fractions=(0, 0.5))
    batch = batch_of(source, [0])
    with torch.no_grad():
        partner = net(*batch)
    with pytest.raises(ValueError, match="method must be"):
        attribute_nodes(net, batch, partner, "saliency")
    with pytest.raises(ValueError, match="scope must be"):
        attribute_nodes(net, batch, partner, "attention", "pixels")
    with pytest.raises(ValueError, match="scope 'embedding'"):
        attribute_nodes(net, batch, partner, "contribution", "graph")


def test_shares_by_structure():
    slot = torch.tensor([[0, 30, 60, 127], [0, 1, 2, 3]])
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    rows = shares(torch.tensor([[1.0, 2.0, -5.0, 1.0], [0.0, 0.0, 9.0, 9.0]]), slot, mask, "cxr")
    assert rows[0]["left lung interior"] == pytest.approx(0.5) and rows[0]["heart interior"] == pytest.approx(0.25)
    assert list(rows[0])[0] == "left lung interior" and sum(rows[0].values()) == pytest.approx(1)
    assert not any(rows[1].values())
