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

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from monai_god.networks.blocks.attention_pooling import GraphAttentionPooling
from monai_god.networks.blocks.correspondence import SoftCorrespondence
from monai_god.networks.blocks.fusion import BranchFusion
from monai_god.networks.blocks.graph_transformer import GraphTransformer
from monai_god.networks.closed_form import combined_retrieval_score, fit_closed_form, principal_components
from monai_god.networks.utils import safe_normalize, to_slots

__all__ = ["COMPONENTS", "GoDEmbedder", "GoDNet", "GoDOutput", "NodeContributions", "select_rows"]

COMPONENTS = ("A", "B", "C", "D", "E")


class GraphTensors(Protocol):
    """What the network reads of a densified batch of anatomy graphs."""

    @property
    def node_type(self) -> Tensor: ...
    @property
    def pos(self) -> Tensor: ...
    @property
    def adjacency(self) -> Tensor: ...
    @property
    def mask(self) -> Tensor: ...


class GoDOutput(NamedTuple):
    """
    Output of :class:`GoDNet`; B images, N nodes, S named places, D features per node.

    Attributes:
        z: [B, E] retrieval embedding, unit length. E is ``GoDNet.embedding_size``.
        graph_embedding: g_G [B, D] of Eq. 3; D = 0 for level (A).
        node_embeddings: h' [B, N, D], zero for padded nodes.
        attention: alpha [B, N] of Eq. 3, zero for padded nodes.
        global_embedding: [B, embed_dim] z of Eq. 4, unit length; the same as ``z`` unless the matched part is on.
        node_vectors: [B, N, node_dim] unit node projections of the matched part, zero for padded nodes; node_dim = 0
            where the matched part is off.
        node_type: [B, N] long.
        slot: [B, N] long, named place of each node.
        mask: [B, N] bool.
    """

    z: Tensor
    graph_embedding: Tensor
    node_embeddings: Tensor
    attention: Tensor
    global_embedding: Tensor
    node_vectors: Tensor
    place_vectors: Tensor
    node_type: Tensor
    slot: Tensor
    mask: Tensor


class NodeContributions(NamedTuple):
    """
    Exact terms of a similarity: ``similarity = whole + nodes.sum(1)``.

    Attributes:
        similarity: [B].
        whole: [B] term of the whole-image embedding.
        nodes: [B, S] term of each named place of image a; zero where it has no counterpart.
    """

    similarity: Tensor
    whole: Tensor
    nodes: Tensor


def select_rows(output: GoDOutput, rows: Tensor) -> GoDOutput:
    """The given rows (long [M] or bool [B]) of every tensor, for example to line up the pairs of a ranked list."""
    return GoDOutput(*(t[rows] for t in output))


class GoDNet(nn.Module):
    """
    Graph-of-Differences network (paper Sec. 2.2): backbone features and anatomy graph to a retrieval embedding.

    Levels (Table 3 of the paper, and one beyond it):

    - (A) z = normalise(phi(g)).
    - (B), (C), (D) z = normalise(phi([g || g_G])), Eqs. 2 to 4. They differ in their loss only.
    - (E) adds the matched part: a metric that all nodes share turns every node into a vector n_i of unit length; each
      named place i has its own projection R_i to ``node_dim`` numbers, again of unit length, m_i; and z is the
      concatenation of sqrt(w) z_Eq4 and sqrt((1 - w) v_i) m_i in the fixed order of named places, so that plain cosine
      gives s(a, b) = w cos(z_a, z_b) + (1 - w) sum_i v_i cos(m_i(a), m_i(b)), with w in (0, 1) and v >= 0, sum v = 1,
      learned. R_i starts as a random projection drawn for the place: the errors of many independent small projections
      average out, while one projection to ``node_dim`` numbers for all places loses the same directions everywhere
      (on real chest X-rays R1 0.81 against 0.76 at 64 numbers). Places missing from an image are zero and the vector is
      scaled to unit length. :meth:`matched_similarity` is the re-ranker with soft correspondence between nodes n of the
      same type.

    Args:
        in_channels: number of channels C of the backbone.
        components: 'A', 'B', 'C', 'D' or 'E'.
        num_node_types: number of node types.
        num_nodes: number of named places S; the largest graph has as many nodes.
        width: features per node D inside the encoder; None for C as in the paper. A smaller one adds a linear
            projection of the node features, which makes training on a CPU feasible.
        embed_dim: length of z of Eq. 4.
        node_dim: numbers per place in the matched part; of the encoder's width or more, n_i itself is taken.
        matched: whether the matched part is on; None for: at level (E) only. (E) without it has the network of (D).
        layers: transformer layers.
        heads: attention heads.
        mlp_ratio: hidden width of the transformer's feed-forward part over D.
        dropout: probability inside the transformer.
        tau: temperature of the soft correspondence of the re-ranker.
        typed_pooling: pool the nodes of each type apart, g_G is [num_node_types * D] then; False for the paper's form.
        fusion_hidden: width of an optional hidden layer of phi.
        global_weight: w at the start.
        head_init: 'closed_form': the encoder starts as the identity, the pooling as the plain mean, and
            :meth:`initialise_closed_form` has to set phi and the node projection before training. 'random': the
            paper's form.

    Raises:
        ValueError: for unknown or inconsistent settings.

    Example::

        net = GoDNet(in_channels=1280, components="E", width=256)
        net.initialise_closed_form(dense, nodes, g, patient_ids)
        output = net(dense, nodes, g)
    """

    def __init__(
        self,
        in_channels: int,
        components: str = "D",
        num_node_types: int = 6,
        num_nodes: int = 128,
        width: int | None = None,
        embed_dim: int = 512,
        node_dim: int = 32,
        matched: bool | None = None,
        layers: int = 2,
        heads: int = 4,
        mlp_ratio: float = 2.0,
        dropout: float = 0.0,
        tau: float = 0.1,
        typed_pooling: bool = False,
        fusion_hidden: int | None = None,
        global_weight: float = 0.5,
        head_init: str = "closed_form",
    ) -> None:
        super().__init__()
        if components not in COMPONENTS:
            raise ValueError(f"components must be one of {', '.join(COMPONENTS)}, got {components!r}.")
        if head_init not in ("closed_form", "random"):
            raise ValueError(f"head_init must be 'closed_form' or 'random', got {head_init!r}.")
        if matched and components != "E":
            raise ValueError(f"The matched part belongs to level (E), but components is {components!r}.")
        if not 0 < global_weight < 1:
            raise ValueError(f"global_weight must lie between 0 and 1, got {global_weight}.")
        self.in_channels, self.components, self.head_init = in_channels, components, head_init
        self.num_nodes, self.embed_dim = num_nodes, embed_dim
        self.matched = components == "E" if matched is None else matched
        self.width = 0 if components == "A" else (in_channels if width is None else width)
        if node_dim < 1:
            raise ValueError(f"node_dim must be positive, got {node_dim}.")
        self.node_dim = min(node_dim, self.width) if self.matched else 0
        self.global_weight_start = global_weight
        zero = head_init == "closed_form"
        graph = components != "A"
        project = graph and self.width != in_channels
        self.input_projection = nn.Linear(in_channels, self.width) if project else None
        self.encoder = (
            GraphTransformer(self.width, num_node_types, layers, heads, mlp_ratio, dropout, zero) if graph else None
        )
        self.pooling = (
            GraphAttentionPooling(self.width, zero, num_node_types if typed_pooling else None) if graph else None
        )
        pools = num_node_types if typed_pooling else 1
        branches = (in_channels, pools * self.width) if graph else (in_channels,)
        self.fusion = BranchFusion(branches, embed_dim, fusion_hidden)
        self.correspondence = SoftCorrespondence(tau, same_type=True)
        self.node_metric = nn.Linear(self.width, self.width, bias=False) if self.matched else None
        # one bias for each place: centring every place on its own mean is what makes the cosines tell patients apart
        self.node_bias = nn.Embedding(num_nodes, self.width) if self.matched else None
        small = self.matched and self.node_dim < self.width
        self.place_projection = nn.Parameter(torch.empty(num_nodes, self.width, self.node_dim)) if small else None
        self.global_logit = nn.Parameter(torch.zeros(()), requires_grad=self.matched)
        self.node_logits = nn.Parameter(torch.zeros(num_nodes if self.matched else 0), requires_grad=self.matched)
        self.closed_form_ready: Tensor
        self.register_buffer("closed_form_ready", torch.zeros((), dtype=torch.bool))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.closed_form_ready.fill_(False)
        if self.input_projection is not None:
            nn.init.xavier_uniform_(self.input_projection.weight)
            nn.init.zeros_(self.input_projection.bias)
        if self.encoder is not None and self.pooling is not None:
            self.encoder.reset_parameters()
            self.pooling.reset_parameters()
        self.fusion.reset_parameters()
        if self.node_metric is not None and self.node_bias is not None:
            nn.init.xavier_uniform_(self.node_metric.weight)
            nn.init.zeros_(self.node_bias.weight)
        if self.place_projection is not None:
            nn.init.normal_(self.place_projection, std=self.node_dim**-0.5)
        nn.init.constant_(self.global_logit, float(np.log(self.global_weight_start / (1 - self.global_weight_start))))
        nn.init.zeros_(self.node_logits)

    @property
    def embedding_size(self) -> int:
        """Length E of z."""
        return self.embed_dim + self.num_nodes * self.node_dim

    def part_weights(self) -> tuple[Tensor, Tensor]:
        """w (scalar) and (1 - w) v [S]; together they sum to 1. Without the matched part w is 1 and v is empty."""
        if self.node_metric is None:
            return torch.ones_like(self.global_logit), self.node_logits
        w = torch.sigmoid(self.global_logit)
        return w, torch.sigmoid(-self.global_logit) * torch.softmax(self.node_logits, dim=0)

    def _encode(
        self, nodes: Tensor, g: Tensor, node_type: Tensor, pos: Tensor, adjacency: Tensor, mask: Tensor, slot: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        branches = [g]
        h = nodes[:, :, :0]
        graph_embedding = g[:, :0]
        attention = torch.zeros_like(mask, dtype=g.dtype)
        if self.encoder is not None and self.pooling is not None:
            h = nodes.masked_fill((~mask).unsqueeze(-1), 0.0)
            if self.input_projection is not None:
                h = self.input_projection(h)
            h = self.encoder(h, node_type, pos, adjacency, mask)
            graph_embedding, attention = self.pooling(h, mask, node_type)
            branches.append(graph_embedding)
        whole = safe_normalize(self.fusion(branches))
        z = whole
        vectors = placed = nodes[:, :, :0]
        if self.node_metric is not None and self.node_bias is not None:
            vectors = self.node_metric(h) + self.node_bias(slot.masked_fill(~mask, 0))
            vectors = safe_normalize(vectors.masked_fill((~mask).unsqueeze(-1), 0.0))
            placed = to_slots(vectors, mask, slot, self.num_nodes)
            if self.place_projection is not None:
                placed = safe_normalize(torch.einsum("bsd,sdk->bsk", placed, self.place_projection))
            w, v = self.part_weights()
            parts = [w.sqrt() * whole, (placed * v.sqrt().unsqueeze(-1)).flatten(1)]
            z = safe_normalize(torch.cat(parts, dim=1))
        return z, graph_embedding, h, attention, whole, vectors, placed

    @torch.jit.export
    def embed(
        self,
        nodes: Tensor,
        g: Tensor,
        node_type: Tensor,
        pos: Tensor,
        adjacency: Tensor,
        mask: Tensor,
        slot: Tensor | None = None,
    ) -> Tensor:
        """
        Retrieval embedding from tensors to a tensor; scripts, traces and exports.

        Args:
            nodes: [B, N, C] node features; ``g``: [B, C] global descriptors.
            node_type: [B, N] long; ``pos``: [B, N, 2] in [0, 1].
            adjacency: [B, N, N] bool; ``mask``: [B, N] bool.
            slot: [B, N] long, named place of each node; None where row i is place i.

        Returns:
            z [B, E], unit length.
        """
        if slot is None:
            slot = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
        return self._encode(nodes, g, node_type, pos, adjacency, mask, slot)[0]

    @torch.jit.unused
    def forward(self, dense: GraphTensors, nodes: Tensor, g: Tensor) -> GoDOutput:
        """
        Args:
            dense: densified graphs: node_type [B, N], pos [B, N, 2], adjacency [B, N, N], mask [B, N] and, where nodes
                can be missing in the middle of their order, slot [B, N] (long, named place of each node). Without
                ``slot``, row i is place i.
            nodes: [B, N, C] node features of Eq. 1.
            g: [B, C] global descriptors.

        Raises:
            RuntimeError: in training mode, when ``head_init`` is 'closed_form' and nothing has been fitted.
            ValueError: for shapes that do not fit.
        """
        if self.training and self.head_init == "closed_form" and not bool(self.closed_form_ready):
            raise RuntimeError(
                "head_init is 'closed_form', but phi has not been fitted: call initialise_closed_form with the "
                "training patients' features before training, or build the network with head_init='random'."
            )
        slot = self._check(dense, nodes, g)
        encoded = self._encode(nodes, g, dense.node_type, dense.pos, dense.adjacency, dense.mask, slot)
        return GoDOutput(*encoded, dense.node_type, slot, dense.mask)

    @torch.jit.unused
    def _check(self, dense: GraphTensors, nodes: Tensor, g: Tensor) -> Tensor:
        shape = tuple(dense.mask.shape)
        if tuple(nodes.shape) != (*shape, self.in_channels) or tuple(g.shape) != (shape[0], self.in_channels):
            raise ValueError(
                f"Expected nodes {[*shape, self.in_channels]} and g {[shape[0], self.in_channels]}, got "
                f"{list(nodes.shape)} and {list(g.shape)}."
            )
        slot = getattr(dense, "slot", None)
        if slot is None:
            slot = torch.arange(shape[1], device=nodes.device).expand(shape)
        if self.matched and bool((slot.masked_fill(~dense.mask, 0) >= self.num_nodes).any()):
            raise ValueError(
                f"A graph has more nodes than the network's {self.num_nodes} named places: set num_nodes to the "
                "modality's number of nodes at this scale."
            )
        return slot

    @torch.jit.unused
    def similarity(self, a: GoDOutput, b: GoDOutput) -> Tensor:
        """Cosine of z: every image of a with every image of b, [Ba, Bb]; equals s(a, b) at level (E)."""
        return a.z @ b.z.T

    @torch.jit.unused
    def matched_similarity(self, a: GoDOutput, b: GoDOutput) -> Tensor:
        """
        Re-ranking score of the pairs (a[k], b[k]) at level (E), [B]:
        w cos(z_a, z_b) + (1 - w) sum_i v_i cos(n_i(a), P_i N(b)), over nodes of a with a counterpart in b, divided by
        the weight of what could be compared. P is the soft correspondence of Eq. 5 among nodes of the same type. Nodes
        are compared as their projections n rather than as h', because the closed-form metric lives in n.
        """
        return self.node_contributions(a, b, rerank=True).similarity

    @torch.jit.unused
    def node_contributions(self, a: GoDOutput, b: GoDOutput, rerank: bool = False) -> NodeContributions:
        """
        What each node adds to the similarity of the pairs (a[k], b[k]) at level (E); exact.

        Args:
            a: images a; ``b``: images b, as many.
            rerank: False for the terms of cos(z_a, z_b), True for those of :meth:`matched_similarity`.

        Raises:
            ValueError: when the matched part is off.
        """
        if not self.matched:
            raise ValueError("Node contributions need the matched part: components='E' and matched not False.")
        w, v = self.part_weights()
        whole = w * (a.global_embedding * b.global_embedding).sum(-1)
        if rerank:
            p = self.correspondence(a.node_vectors, b.node_vectors, a.mask, b.mask, a.node_type, b.node_type)
            partner = safe_normalize(torch.bmm(p, b.node_vectors))
            found = (p.sum(-1, keepdim=True) > 0).to(p.dtype)
            cosine = (a.node_vectors * partner).sum(-1, keepdim=True)
            terms = v * to_slots(cosine, a.mask, a.slot, self.num_nodes).squeeze(-1)
            present = to_slots(found, a.mask, a.slot, self.num_nodes).squeeze(-1)
            scale = w + (v * present).sum(1)
        else:
            terms = v * (a.place_vectors * b.place_vectors).sum(-1)
            lengths = [w + (v * x.place_vectors.square().sum(-1)).sum(1) for x in (a, b)]
            scale = (lengths[0] * lengths[1]).sqrt()
        whole, terms = whole / scale, terms / scale.unsqueeze(1)
        return NodeContributions(whole + terms.sum(1), whole, terms)

    @torch.jit.unused
    @torch.no_grad()
    def initialise_closed_form(
        self,
        dense: GraphTensors | None,
        nodes: Tensor | None,
        g: Tensor,
        patient_ids: Sequence[object] | np.ndarray | Tensor,
        method: str = "whitening",
        shrinkage: float | str = "cv",
        seed: int = 0,
        batch_size: int = 64,
    ) -> dict[str, float]:
        """
        Set phi and the node metric from the training patients, so that the untrained network is the closed form.

        The input projection, where there is one, becomes the principal components of the nodes (without patient ids, so
        that the cross-validation behind it is honest); the type embedding starts at minus the mean of its type, so that
        correspondence sees centred features. phi is block-diagonal: g, reduced by the principal components of the nodes
        where there are any, since few images do not span the features, and g_G, whose pools share one map, are each
        fitted and given their share of the ``embed_dim`` outputs. The node metric of (E) is one map for all places with
        a mean for each. With cross-validation, w of (E) is the weight that retrieves the held-out patients best.

        Args:
            dense: densified graphs of all n training images; for (A) None will do.
            nodes: [n, N, C]; likewise.
            g: [n, C].
            patient_ids: n ids.
            method: 'whitening', 'lda' or 'plda', see :func:`fit_closed_form`.
            shrinkage: a number, or 'cv'.
            seed: of the cross-validation's folds.
            batch_size: images per forward pass.

        Returns:
            the shrinkages and, with cross-validation, the held-out patients' rank1 and map of each part.

        Raises:
            ValueError: with head_init='random', or for inputs that do not fit.
        """
        if self.head_init != "closed_form":
            raise ValueError("The network was built with head_init='random'; build it with head_init='closed_form'.")
        self.reset_parameters()
        training = self.training
        self.eval()
        report: dict[str, float] = {}
        graph_embedding = g[:, :0]
        node_fit = components = None
        if dense is not None and nodes is not None:
            slot, mask = self._check(dense, nodes, g), dense.mask
            places = max(self.num_nodes, int(slot.masked_fill(~mask, 0).max()) + 1)
            placed = to_slots(nodes, mask, slot, places)
            present = to_slots(mask.unsqueeze(-1).to(nodes.dtype), mask, slot, places).squeeze(-1) > 0
            components = principal_components(placed, min(self.in_channels, self.embed_dim), present)
        elif self.encoder is not None:
            raise ValueError(f"Level ({self.components}) needs the graphs and the node features.")
        if self.encoder is not None and dense is not None and nodes is not None and components is not None:
            if self.input_projection is not None:
                self.input_projection.weight.copy_(
                    components[: self.width]
                    if self.width <= len(components)
                    else principal_components(placed, self.width, present)
                )
            for t in range(self.encoder.type_embedding.num_embeddings):
                rows = mask & (dense.node_type == t)
                if rows.any():
                    mean = nodes[rows].mean(0)
                    if self.input_projection is not None:
                        mean = self.input_projection(mean)
                    self.encoder.type_embedding.weight[t] = -mean
            outputs = []
            for start in range(0, len(g), batch_size):
                part = slice(start, start + batch_size)
                encoded = self._encode(
                    nodes[part],
                    g[part],
                    dense.node_type[part],
                    dense.pos[part],
                    dense.adjacency[part],
                    mask[part],
                    slot[part],
                )
                outputs.append(encoded[1:3])
            graph_embedding = torch.cat([o[0] for o in outputs])
            if self.node_metric is not None and self.node_bias is not None:
                h = to_slots(torch.cat([o[1] for o in outputs]), mask, slot, places)
                node_fit = fit_closed_form(h, patient_ids, method, shrinkage, self.width, present, seed=seed)
                self.node_metric.weight.copy_(node_fit.weight)
                self.node_bias.weight.copy_(node_fit.bias[: self.num_nodes])
                report["node_shrinkage"] = node_fit.shrinkage
                if node_fit.rank1 is not None and node_fit.mean_ap is not None:
                    report.update(node_rank1=node_fit.rank1, node_map=node_fit.mean_ap)
        pools = 0 if self.pooling is None else self.pooling.pools
        share = 0 if not pools else min(self.width, self.embed_dim // (pools + 1))
        whole_dim = self.embed_dim - pools * share
        x = self.fusion.normalise([g] if self.encoder is None else [g, graph_embedding])
        self.fusion.linear.weight.zero_()
        self.fusion.linear.bias.zero_()
        reduced = x[:, : self.in_channels] if components is None else x[:, : self.in_channels] @ components.T
        fit = fit_closed_form(reduced, patient_ids, method, shrinkage, whole_dim, seed=seed)
        whole = fit.weight if components is None else fit.weight @ components
        self.fusion.linear.weight[:whole_dim, : self.in_channels] = whole
        self.fusion.linear.bias[:whole_dim] = fit.bias
        report["phi_shrinkage"] = fit.shrinkage
        folds = [(s, p) for s, p in fit.held_out]
        if pools:
            regions = x[:, self.in_channels :].reshape(len(g), pools, self.width)
            pool_fit = fit_closed_form(regions, patient_ids, method, shrinkage, share, seed=seed)
            report["pool_shrinkage"] = pool_fit.shrinkage
            for k in range(pools):
                outputs_k = slice(whole_dim + k * share, whole_dim + (k + 1) * share)
                inputs_k = slice(self.in_channels + k * self.width, self.in_channels + (k + 1) * self.width)
                self.fusion.linear.weight[outputs_k, inputs_k] = pool_fit.weight
                self.fusion.linear.bias[outputs_k] = pool_fit.bias[k]
            folds = [
                ((s + pools * t) / (1 + pools), p) for (s, p), (t, _) in zip(folds, pool_fit.held_out, strict=True)
            ]
        if folds:
            report["phi_rank1"], report["phi_map"] = combined_retrieval_score(folds)
        if self.matched and node_fit is not None and node_fit.held_out:
            scores: dict[float, tuple[float, float]] = {}
            for w in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
                pairs = zip(folds, node_fit.held_out, strict=True)  # the same folds: same patients, same seed
                scores[w] = combined_retrieval_score([(w * s + (1 - w) * t, p) for (s, p), (t, _) in pairs])
            best = max(scores, key=lambda w: sum(scores[w]))
            self.global_logit.fill_(float(np.log(best / (1 - best))))
            report.update(global_weight=best, rank1=scores[best][0], map=scores[best][1])
        self.closed_form_ready.fill_(True)
        self.train(training)
        return report

    def extra_repr(self) -> str:
        return (
            f"components={self.components}, in_channels={self.in_channels}, width={self.width}, "
            f"embedding_size={self.embedding_size}, matched={self.matched}, head_init={self.head_init}"
        )


class GoDEmbedder(nn.Module):
    """
    ``GoDNet.embed`` as a module's forward, for ``torch.jit.script``, ``torch.jit.trace`` and ``torch.onnx.export``.

    Args:
        net: the network.
    """

    def __init__(self, net: GoDNet) -> None:
        super().__init__()
        self.net = net

    def forward(
        self,
        nodes: Tensor,
        g: Tensor,
        node_type: Tensor,
        pos: Tensor,
        adjacency: Tensor,
        mask: Tensor,
        slot: Tensor | None = None,
    ) -> Tensor:
        """See :meth:`GoDNet.embed`."""
        return self.net.embed(nodes, g, node_type, pos, adjacency, mask, slot)
