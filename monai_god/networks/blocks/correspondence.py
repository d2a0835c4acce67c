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

import torch
from torch import Tensor, nn

from monai_god.networks.utils import masked_softmax, safe_normalize

__all__ = ["SoftCorrespondence", "mean_difference", "node_differences"]


class SoftCorrespondence(nn.Module):
    """
    Soft matching of the nodes of two graphs (Graph-of-Differences, Eq. 5):
    S = norm(H_a) norm(H_b)^T / tau and P = row softmax of S over the valid nodes of b.

    Args:
        tau: temperature.
        same_type: match a node only with nodes of its own type.
    """

    def __init__(self, tau: float = 0.1, same_type: bool = False) -> None:
        super().__init__()
        if tau <= 0:
            raise ValueError(f"tau must be positive, got {tau}.")
        self.tau, self.same_type = tau, same_type

    def forward(
        self, h_a: Tensor, h_b: Tensor, mask_a: Tensor, mask_b: Tensor, type_a: Tensor, type_b: Tensor
    ) -> Tensor:
        """
        Args:
            h_a: [B, Na, D]; ``h_b``: [B, Nb, D]; row k of a is compared with row k of b.
            mask_a: [B, Na] bool; ``mask_b``: [B, Nb] bool.
            type_a: [B, Na] long; ``type_b``: [B, Nb] long; read when ``same_type``.

        Returns:
            P [B, Na, Nb]. Rows sum to 1; the row of a padded node, and of a node with no candidate in b, is zero.
        """
        allowed = mask_a.unsqueeze(2) & mask_b.unsqueeze(1)
        if self.same_type:
            allowed = allowed & (type_a.unsqueeze(2) == type_b.unsqueeze(1))
        score = torch.bmm(safe_normalize(h_a), safe_normalize(h_b).transpose(1, 2)) / self.tau
        return masked_softmax(score, allowed)

    def extra_repr(self) -> str:
        return f"tau={self.tau}, same_type={self.same_type}"


def node_differences(h_a: Tensor, h_b: Tensor, correspondence: Tensor) -> tuple[Tensor, Tensor]:
    """
    Differences over matched anatomy (Graph-of-Differences, Eq. 6): delta_i = h_i(a) - sum_j P_ij h_j(b).

    Args:
        h_a: [B, Na, D].
        h_b: [B, Nb, D].
        correspondence: P [B, Na, Nb].

    Returns:
        delta [B, Na, D] and matched [B, Na] bool. A node that matches nothing has delta 0 and matched False.
    """
    matched = correspondence.detach().sum(dim=-1) > 0
    delta = h_a - torch.bmm(correspondence, h_b)
    return delta.masked_fill(~matched.unsqueeze(-1), 0.0), matched


def mean_difference(delta: Tensor, matched: Tensor) -> Tensor:
    """
    Delta_G of Eq. 6, the mean of delta over matched nodes; zero for a pair in which nothing matches.

    Args:
        delta: [B, N, D], zero where not matched.
        matched: [B, N] bool.

    Returns:
        [B, D].
    """
    return delta.sum(dim=1) / matched.sum(dim=1, keepdim=True).clamp(min=1).to(delta.dtype)
