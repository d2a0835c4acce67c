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

__all__ = ["BatchHardTripletLoss", "Triplets", "safe_length"]


class Triplets(NamedTuple):
    """
    Hardest positive and negative of every anchor of a batch.

    Attributes:
        positive: [B] long, the farthest image of the same patient.
        negative: [B] long, the nearest image of another patient.
        valid: [B] bool, False for anchors that lack one of them; their indices mean nothing.
    """

    positive: Tensor
    negative: Tensor
    valid: Tensor


def safe_length(x: Tensor) -> Tensor:
    """Euclidean length over the last dimension; a zero vector has length zero and passes no gradient."""
    square = x.square().sum(-1)
    defined = square > 1e-12
    return torch.where(defined, torch.where(defined, square, torch.ones_like(square)).sqrt(), torch.zeros_like(square))


class BatchHardTripletLoss(nn.Module):
    """
    Batch-hard triplet loss with a hinge (L_triplet of Graph-of-Differences, Eq. 8; margin 0.3 in the paper).

    Args:
        margin: margin on Euclidean distances.
    """

    def __init__(self, margin: float = 0.3) -> None:
        super().__init__()
        self.margin = margin

    @torch.no_grad()
    def mine(self, z: Tensor, labels: Tensor) -> Triplets:
        """
        Args:
            z: [B, D]; ``labels``: [B] long.
        """
        distance = torch.cdist(z.detach().double(), z.detach().double(), compute_mode="donot_use_mm_for_euclid_dist")
        same = labels.unsqueeze(0) == labels.unsqueeze(1)
        positive = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        return Triplets(
            distance.masked_fill(~positive, -1.0).argmax(1),
            distance.masked_fill(same, float("inf")).argmin(1),
            positive.any(1) & (~same).any(1),
        )

    def hinge(self, positive: Tensor, negative: Tensor, valid: Tensor) -> Tensor:
        """
        Mean over valid anchors of max(0, d(anchor, positive) - d(anchor, negative) + margin), zero without any. The
        distances [B] may come from anywhere, for example from matched anatomy.
        """
        loss = (positive - negative + self.margin).clamp(min=0) * valid.to(positive.dtype)
        return loss.sum() / valid.sum().clamp(min=1)

    def forward(self, z: Tensor, labels: Tensor) -> tuple[Tensor, Triplets]:
        """
        Args:
            z: [B, D] embeddings; ``labels``: [B] long.

        Returns:
            scalar and the mined triplets.
        """
        triplets = self.mine(z, labels)
        to_positive = safe_length(z - z[triplets.positive])
        to_negative = safe_length(z - z[triplets.negative])
        return self.hinge(to_positive, to_negative, triplets.valid), triplets

    def extra_repr(self) -> str:
        return f"margin={self.margin}"
