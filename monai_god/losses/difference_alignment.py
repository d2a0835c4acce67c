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

from torch import Tensor, nn

from monai_god.networks.utils import safe_normalize

__all__ = ["DifferenceAlignmentLoss"]


class DifferenceAlignmentLoss(nn.Module):
    """
    Difference alignment (Graph-of-Differences, Eq. 7): L_diff = 1 - cos(W Delta_G, g(a) - g(b)).

    Eq. 7 is not symmetric in (a, b), so both directions are averaged. A pair of near-identical images has no direction
    to align with and carries no weight.

    Args:
        graph_dim: length of Delta_G.
        backbone_dim: length of g.
        tolerance: a pair counts when ||g(a) - g(b)|| exceeds this fraction of the mean of ||g(a)|| and ||g(b)||.
    """

    def __init__(self, graph_dim: int, backbone_dim: int, tolerance: float = 1e-3) -> None:
        super().__init__()
        self.tolerance = tolerance
        self.projection = nn.Linear(graph_dim, backbone_dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # (semi-)orthogonal; the identity where it is square, since node features live in the backbone's space
        if self.projection.in_features == self.projection.out_features:
            nn.init.eye_(self.projection.weight)
        else:
            nn.init.orthogonal_(self.projection.weight)

    def forward(self, delta_ab: Tensor, delta_ba: Tensor, g_a: Tensor, g_b: Tensor) -> Tensor:
        """
        Args:
            delta_ab: [M, graph_dim] Delta_G from a to b; ``delta_ba``: the same from b to a.
            g_a: [M, backbone_dim] global descriptors; ``g_b``: the same of b.

        Returns:
            scalar in [0, 2]; zero when no pair counts.
        """
        delta_backbone = g_a - g_b
        size = (g_a.detach().norm(dim=-1) + g_b.detach().norm(dim=-1)) / 2
        counts = delta_backbone.detach().norm(dim=-1) > self.tolerance * size
        target = safe_normalize(delta_backbone)
        forth = 1 - (safe_normalize(self.projection(delta_ab)) * target).sum(-1)
        back = 1 + (safe_normalize(self.projection(delta_ba)) * target).sum(-1)
        weight = counts.to(target.dtype)
        return ((forth + back) / 2 * weight).sum() / weight.sum().clamp(min=1)

    def extra_repr(self) -> str:
        return f"tolerance={self.tolerance}"
