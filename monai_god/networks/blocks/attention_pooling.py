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

    Args:
        width: number of features per node D.
        zero_init: start with p = 0, which is the plain mean over valid nodes.
    """

    def __init__(self, width: int, zero_init: bool = False) -> None:
        super().__init__()
        self.zero_init, self.root_width = zero_init, math.sqrt(width)
        self.query = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.zero_init:
            nn.init.zeros_(self.query)
        else:
            nn.init.normal_(self.query, std=0.02)

    def forward(self, h: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """
        Args:
            h: [B, N, D].
            mask: [B, N] bool.

        Returns:
            g_G [B, D] and alpha [B, N], zero for padded nodes. A graph without nodes gives zeros.
        """
        score = (h * self.query).sum(dim=-1) / self.root_width
        alpha = masked_softmax(score, mask)
        return (alpha.unsqueeze(-1) * h).sum(dim=1), alpha

    def extra_repr(self) -> str:
        return f"width={self.query.shape[0]}, zero_init={self.zero_init}"
