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

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from monai_god.losses import GoDLoss
from monai_god.networks.nets import GoDNet
from tests.graph_batch import make_batch


def build(components: str, **kwargs) -> tuple[GoDNet, GoDLoss]:
    torch.manual_seed(0)
    net = GoDNet(12, components, num_node_types=3, num_nodes=7, width=8, embed_dim=9, node_dim=4, head_init="random")
    loss = GoDLoss(components, 4, net.embedding_size, net.width, net.in_channels, **kwargs)
    return net, loss


@pytest.mark.parametrize("correspondence_triplet", [True, False])
@pytest.mark.parametrize("components", ["A", "B", "C", "D", "E"])
def test_terms_of_each_level(components, correspondence_triplet, batch):
    net, loss = build(components, correspondence_triplet=correspondence_triplet)
    out = net(batch.graphs, batch.nodes, batch.g)
    terms = loss(out, batch.patients, batch.g)
    torch.testing.assert_close(terms.identity, loss.identity(out.z, batch.patients))
    triplet, mined = loss.triplet(out.z, batch.patients)
    torch.testing.assert_close(terms.triplet, triplet)
    h, mask = out.node_embeddings, out.mask

    def naive_difference(a: int, b: int) -> torch.Tensor:
        x, y = h[a][mask[a]], h[b][mask[b]]
        p = torch.softmax(torch.nn.functional.normalize(x, dim=1) @ torch.nn.functional.normalize(y, dim=1).T / 0.1, 1)
        return (x - p @ y).mean(0)

    matched, aligned = [], []
    for i in range(8):
        p, n = int(mined.positive[i]), int(mined.negative[i])
        gap = naive_difference(i, p).norm() - naive_difference(i, n).norm() + 0.3
        matched.append(gap.clamp(min=0))
        for j in (p, n):
            for a, b in ((i, j), (j, i)):
                if loss.difference is not None:
                    explained = loss.difference.projection(naive_difference(a, b))
                    aligned.append(1 - torch.cosine_similarity(explained, batch.g[a] - batch.g[b], dim=0))
    zero = torch.zeros(())
    expect_matched = torch.stack(matched).mean() if components in "CDE" and correspondence_triplet else zero
    expect_aligned = torch.stack(aligned).mean() if components in "DE" else zero
    torch.testing.assert_close(terms.correspondence_triplet, expect_matched, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(terms.difference, expect_aligned, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        terms.total, terms.identity + terms.triplet + terms.correspondence_triplet + 0.1 * terms.difference
    )
    assert (loss.difference is not None) == (components in "DE")


@pytest.mark.parametrize("components", ["D", "E"])
@pytest.mark.parametrize("head_init", ["random", "closed_form"])
def test_difference_alignment_reaches_the_graph_encoder(components, head_init, batch):
    net, loss = build(components)
    if head_init == "closed_form":
        net = GoDNet(12, components, num_node_types=3, num_nodes=7, width=8, embed_dim=9, node_dim=4)
        net.initialise_closed_form(batch.graphs, batch.nodes, batch.g, batch.patients, shrinkage=0.3)
    loss(net(batch.graphs, batch.nodes, batch.g), batch.patients, batch.g).difference.backward()
    gradients = {k: p.grad for k, p in net.named_parameters() if p.grad is not None}
    for name in ("input_projection.weight", "encoder.type_embedding.weight", "encoder.layers.1.attention_out.weight"):
        assert gradients[name].abs().max() > 1e-6, name
    assert all(g.isfinite().all() for g in gradients.values())
    assert loss.difference.projection.weight.grad.abs().max() > 1e-6
    # L_diff knows nothing of z
    assert "fusion.linear.weight" not in gradients


@pytest.mark.parametrize("components", ["A", "B", "C", "D", "E"])
def test_degenerate_batches_are_finite(components, batch):
    """Identical images, empty graphs, and a batch without a positive pair."""
    net, loss = build(components)
    same = batch.rows(torch.zeros(8, dtype=torch.long))
    empty = batch.graphs._replace(mask=torch.zeros_like(batch.graphs.mask))
    for graphs, nodes, g, labels in (
        (same.graphs, same.nodes, same.g, batch.patients),
        (empty, batch.nodes, batch.g, batch.patients),
        (*batch.rows(slice(0, 8, 2))[:3], torch.arange(4)),
    ):
        net.zero_grad()
        loss.zero_grad()
        terms = loss(net(graphs, nodes, g), labels, g)
        terms.total.backward()
        assert all(t.isfinite() for t in terms)
        parameters = [*net.parameters(), *loss.parameters()]
        assert all(p.grad is None or p.grad.isfinite().all() for p in parameters)


@pytest.mark.parametrize("components", ["A", "B", "C", "D", "E"])
def test_overfits_a_small_batch(components, batch):
    net, loss = build(components)
    optimiser = torch.optim.AdamW([*net.parameters(), *loss.parameters()], lr=1e-2)
    first = None
    for _ in range(60):
        terms = loss(net(batch.graphs, batch.nodes, batch.g), batch.patients, batch.g)
        optimiser.zero_grad()
        terms.total.backward()
        optimiser.step()
        first = first or terms
    similarity = net.similarity(*[net(batch.graphs, batch.nodes, batch.g)] * 2).fill_diagonal_(-2)
    assert terms.total < 0.5 * first.total
    assert (batch.patients[similarity.argmax(1)] == batch.patients).all()


def test_closed_form_start_is_not_undone_by_the_first_steps():
    batch = make_batch(images=40)
    net = GoDNet(12, "E", num_node_types=3, num_nodes=7, width=8, embed_dim=9, node_dim=4)
    net.initialise_closed_form(batch.graphs, batch.nodes, batch.g, batch.patients, shrinkage=0.3)
    before = net(batch.graphs, batch.nodes, batch.g)
    loss = GoDLoss("E", 20, net.embedding_size, net.width, 12)
    random_start = loss(before, batch.patients, batch.g).identity
    loss.identity.initialise_from_embeddings(before.z.detach(), batch.patients)
    assert loss(before, batch.patients, batch.g).identity < 0.5 * random_start


def test_learnable_parameters_are_saved():
    _, loss = build("D")
    assert set(loss.state_dict()) == {"identity.weight", "difference.projection.weight"}
    assert "components=D" in repr(loss)
    with pytest.raises(ValueError, match="components"):
        GoDLoss("Z", 3)


def _two_processes(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    batch = make_batch()
    part = batch.rows(slice(4 * rank, 4 * rank + 4))
    if rank == 1:  # this process has smaller graphs: cut the padding that its images do not need
        longest = int(part.graphs.mask.sum(1).max())
        kind, pos, adjacency, mask = part.graphs
        graphs = part.graphs._replace(
            node_type=kind[:, :longest], pos=pos[:, :longest], mask=mask[:, :longest],
            adjacency=adjacency[:, :longest, :longest],
        )  # fmt: skip
        part = part._replace(graphs=graphs, nodes=part.nodes[:, :longest])
    net, loss = build("E")
    total = loss(net(part.graphs, part.nodes, part.g), part.patients, part.g).total
    total.backward()
    for p in net.parameters():  # what DistributedDataParallel does
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= 2
    grads = {k: p.grad for m in (net, loss) for k, p in m.named_parameters() if p.grad is not None}
    torch.save({"total": total.detach(), "grads": grads}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_compute_the_loss_of_the_global_batch(tmp_path, batch):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(_two_processes, (port, str(tmp_path)), nprocs=2)
    net, loss = build("E")
    total = loss(net(batch.graphs, batch.nodes, batch.g), batch.patients, batch.g).total
    total.backward()
    grads = {k: p.grad for m in (net, loss) for k, p in m.named_parameters() if p.grad is not None}
    for rank in range(2):
        saved = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(saved["total"], total.detach())
        assert saved["grads"].keys() == grads.keys()
        for name, gradient in grads.items():
            torch.testing.assert_close(saved["grads"][name], gradient, atol=1e-6, rtol=1e-4, msg=name)
