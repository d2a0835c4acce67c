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

from typing import NamedTuple

import torch
from torch import Tensor, nn

from monai_god.losses.difference_alignment import DifferenceAlignmentLoss
from monai_god.losses.distributed import gather_batch, gather_output
from monai_god.losses.identity import CosineIdentityLoss
from monai_god.losses.triplet import BatchHardTripletLoss, safe_length
from monai_god.networks.blocks.correspondence import SoftCorrespondence, mean_difference, node_differences
from monai_god.networks.nets.god_net import COMPONENTS, GoDOutput

__all__ = ["GoDLoss", "GoDLossTerms"]


class GoDLossTerms(NamedTuple):
    """
    Terms of :class:`GoDLoss`, all scalars; ``total`` is their weighted sum. Terms that a level lacks are zero.
    """

    total: Tensor
    identity: Tensor
    triplet: Tensor
    correspondence_triplet: Tensor
    difference: Tensor


class GoDLoss(nn.Module):
    """
    Total loss (Graph-of-Differences, Eq. 8): L = L_CE + lambda_triplet L_triplet + lambda_diff L_diff.

    Levels: (A) and (B) have the identity and the triplet term on z. (C) adds the triplet term on the anatomy-matched
    distance ||Delta_G||, since otherwise nothing would train through the correspondence. (D) adds L_diff. (E) has the
    terms of (D), on its own z.

    Pairs for the matched terms are every anchor with its batch-hard positive and its batch-hard negative, the triplet
    term's own; correspondence is computed for these 2 B pairs only. In a distributed run the batch is gathered over
    all processes first.

    Args:
        components: 'A' to 'E', as the network's.
        num_identities: number of training patients.
        embed_dim: length of z, ``GoDNet.embedding_size``.
        graph_dim: features per node, ``GoDNet.width``; not read for (A) and (B).
        backbone_dim: length of g, ``GoDNet.in_channels``; not read for (A) to (C).
        lambda_triplet: weight of both triplet terms.
        lambda_diff: weight of L_diff.
        correspondence_triplet: whether (C), (D) and (E) have the anatomy-matched triplet term.
        margin: margin of the triplet terms.
        scale: scale of the identity logits.
        label_smoothing: of the identity term.
        identity_margin: margin of the identity term.
        identity_margin_type: 'none', 'cosface' or 'arcface'.
        tau: temperature of the correspondence.
        same_type: match nodes of the same type only.

    Raises:
        ValueError: for unknown components.
    """

    def __init__(
        self,
        components: str,
        num_identities: int,
        embed_dim: int = 512,
        graph_dim: int = 768,
        backbone_dim: int = 768,
        lambda_triplet: float = 1.0,
        lambda_diff: float = 0.1,
        correspondence_triplet: bool = True,
        margin: float = 0.3,
        scale: float = 30.0,
        label_smoothing: float = 0.1,
        identity_margin: float = 0.0,
        identity_margin_type: str = "none",
        tau: float = 0.1,
        same_type: bool = False,
    ) -> None:
        super().__init__()
        if components not in COMPONENTS:
            raise ValueError(f"components must be one of {', '.join(COMPONENTS)}, got {components!r}.")
        self.components, self.lambda_triplet = components, lambda_triplet
        self.lambda_diff = lambda_diff if components in "DE" else 0.0
        self.correspondence_triplet = correspondence_triplet and components in "CDE"
        self.identity = CosineIdentityLoss(
            embed_dim, num_identities, scale, label_smoothing, identity_margin, identity_margin_type
        )
        self.triplet = BatchHardTripletLoss(margin)
        self.correspondence = SoftCorrespondence(tau, same_type)
        self.difference = DifferenceAlignmentLoss(graph_dim, backbone_dim) if self.lambda_diff else None

    def reset_parameters(self) -> None:
        self.identity.reset_parameters()
        if self.difference is not None:
            self.difference.reset_parameters()

    def pair_differences(self, output: GoDOutput, a: Tensor, b: Tensor) -> Tensor:
        """Delta_G of Eq. 6 from images ``a`` to images ``b`` (long [M]) of a batch, [M, D]."""
        h, mask, kind = output.node_embeddings, output.mask, output.node_type
        p = self.correspondence(h[a], h[b], mask[a], mask[b], kind[a], kind[b])
        return mean_difference(*node_differences(h[a], h[b], p))

    def forward(self, output: GoDOutput, labels: Tensor, g: Tensor) -> GoDLossTerms:
        """
        Args:
            output: the network's output for a batch.
            labels: [B] long, index of the patient in [0, num_identities).
            g: [B, backbone_dim] the backbone's global descriptors.
        """
        output, labels, g = gather_output(output), gather_batch(labels), gather_batch(g)
        identity = self.identity(output.z, labels)
        triplet, mined = self.triplet(output.z, labels)
        matched = difference = torch.zeros_like(identity)
        anchor = mined.valid.nonzero().squeeze(1)
        if (self.correspondence_triplet or self.difference is not None) and len(anchor):
            a = torch.cat([anchor, anchor])
            b = torch.cat([mined.positive[anchor], mined.negative[anchor]])
            forth = self.pair_differences(output, a, b)
            if self.correspondence_triplet:
                positive, negative = safe_length(forth).chunk(2)
                matched = self.triplet.hinge(positive, negative, torch.ones_like(anchor, dtype=torch.bool))
            if self.difference is not None:
                difference = self.difference(forth, self.pair_differences(output, b, a), g[a], g[b])
        total = identity + self.lambda_triplet * (triplet + matched) + self.lambda_diff * difference
        return GoDLossTerms(total, identity, triplet, matched, difference)

    def extra_repr(self) -> str:
        return (
            f"components={self.components}, lambda_triplet={self.lambda_triplet}, lambda_diff={self.lambda_diff}, "
            f"correspondence_triplet={self.correspondence_triplet}"
        )
