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

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monai_god.networks.utils import safe_normalize

__all__ = ["CosineIdentityLoss"]


class CosineIdentityLoss(nn.Module):
    """
    Identity classifier with cosine logits: cross-entropy of scale * cos(z, w_y) (L_CE of Graph-of-Differences, Eq. 8).

    The paper names a scale of 30 and label smoothing 0.1; it gives no angular margin. CosFace (subtract the margin
    from the true class's cosine) and ArcFace (add it to its angle) are options.

    Args:
        embed_dim: length of the embedding.
        num_identities: number of training patients.
        scale: scale of the logits.
        label_smoothing: in [0, 1).
        margin: cosine (CosFace) or radians (ArcFace); read when ``margin_type`` is not 'none'.
        margin_type: 'none', 'cosface' or 'arcface'.

    Raises:
        ValueError: for an unknown ``margin_type``.
    """

    def __init__(
        self,
        embed_dim: int,
        num_identities: int,
        scale: float = 30.0,
        label_smoothing: float = 0.1,
        margin: float = 0.0,
        margin_type: str = "none",
    ) -> None:
        super().__init__()
        if margin_type not in ("none", "cosface", "arcface"):
            raise ValueError(f"margin_type must be 'none', 'cosface' or 'arcface', got {margin_type!r}.")
        self.scale, self.label_smoothing, self.margin, self.margin_type = scale, label_smoothing, margin, margin_type
        self.weight = nn.Parameter(torch.empty(num_identities, embed_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_normal_(self.weight)

    @torch.no_grad()
    def initialise_from_embeddings(self, z: Tensor, labels: Tensor) -> None:
        """
        Start every class at the mean direction of its images, so that the first steps do not undo a closed-form head.

        Args:
            z: [n, embed_dim] embeddings of the training images; ``labels``: [n] long.
        """
        sums = torch.zeros_like(self.weight).index_add_(0, labels.to(self.weight.device), z.to(self.weight))
        seen = sums.norm(dim=1) > 1e-6
        self.weight[seen] = safe_normalize(sums)[seen]

    def logits(self, z: Tensor) -> Tensor:
        """[B, embed_dim] -> cosines [B, identities] without scale and margin."""
        return F.linear(safe_normalize(z), safe_normalize(self.weight))

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        """
        Args:
            z: [B, embed_dim]; ``labels``: [B] long, index of the patient.

        Returns:
            scalar.
        """
        cosine = self.logits(z)
        if self.margin_type != "none":
            true = cosine.gather(1, labels.unsqueeze(1))
            if self.margin_type == "cosface":
                moved = true - self.margin
            else:
                sine = (1 - true.square()).clamp(min=1e-7).sqrt()
                moved = true * math.cos(self.margin) - sine * math.sin(self.margin)
                # past pi - margin the angle would turn back: go on in a straight line, as ArcFace does
                moved = torch.where(true > -math.cos(self.margin), moved, true - self.margin * math.sin(self.margin))
            cosine = cosine.scatter(1, labels.unsqueeze(1), moved)
        return F.cross_entropy(self.scale * cosine, labels, label_smoothing=self.label_smoothing)

    def extra_repr(self) -> str:
        identities, dim = self.weight.shape
        margin = f", {self.margin_type} margin={self.margin}" if self.margin_type != "none" else ""
        return f"{dim} -> {identities}, scale={self.scale}, label_smoothing={self.label_smoothing}{margin}"
