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
from torch import Tensor, nn

from monai_god.networks.utils import masked_softmax

__all__ = ["GraphAttentionPooling"]


class GraphAttentionPooling(nn.Module):
    """
    Pool node embeddings with a learned attention vector (Graph-of-Differences, Eq. 3):
    alpha = softmax_i(p . h'_i / sqrt(D)) over valid nodes, g_G = sum_i alpha_i h'_i.

    With ``num_types`` the same is done among the nodes of each type, each with its own p, and the results are
    concatenated, so that the organs are not averaged into one another (not in the paper).

    Args:
        width: number of features per node D.
        zero_init: start with p = 0, which is the plain mean over valid nodes.
        num_types: T, number of node types pooled apart; None for one pool as in the paper.
    """

    def __init__(self, width: int, zero_init: bool = False, num_types: int | None = None) -> None:
        super().__init__()
        self.zero_init, self.root_width = zero_init, math.sqrt(width)
        self.pools = 1 if num_types is None else num_types
        self.query = nn.Parameter(torch.empty(self.pools, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.zero_init:
            nn.init.zeros_(self.query)
        else:
            nn.init.normal_(self.query, std=0.02)

    def forward(self, h: Tensor, mask: Tensor, node_type: Tensor) -> tuple[Tensor, Tensor]:
        """
        Args:
            h: [B, N, D].
            mask: [B, N] bool.
            node_type: [B, N] long.

        Returns:
            g_G [B, D] (with types [B, T * D]) and alpha [B, N], zero for padded nodes, with sum 1 (with types, for each
            type). A graph without nodes, or a type without, gives zeros.
        """
        score = h @ self.query.T / self.root_width  # [B, N, pools]
        member = mask.unsqueeze(-1)
        if self.pools > 1:
            member = member & (node_type.unsqueeze(-1) == torch.arange(self.pools, device=h.device))
        alpha = masked_softmax(score.transpose(1, 2), member.transpose(1, 2))  # [B, pools, N]
        return torch.bmm(alpha, h).flatten(1), alpha.sum(1)

    def extra_repr(self) -> str:
        return f"width={self.query.shape[1]}, pools={self.pools}, zero_init={self.zero_init}"
