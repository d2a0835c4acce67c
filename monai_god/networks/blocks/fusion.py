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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["BranchFusion"]


class BranchFusion(nn.Module):
    """
    The projection phi of Graph-of-Differences, Eq. 4, without the final normalisation: LayerNorm of each branch, then
    one linear layer on their concatenation.

    Args:
        in_dims: number of features of each branch, for example (C,) or (C, D).
        out_dim: number of output features.
        mlp_hidden: adds a hidden layer of this width as a residual branch that starts at zero, so that the linear
            layer may still be set in closed form; None for the linear layer alone.
    """

    def __init__(self, in_dims: Sequence[int], out_dim: int = 512, mlp_hidden: int | None = None) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for dim in in_dims)
        self.linear = nn.Linear(sum(in_dims), out_dim)
        self.hidden = None if mlp_hidden is None else nn.Linear(sum(in_dims), mlp_hidden)
        self.hidden_out = None if mlp_hidden is None else nn.Linear(mlp_hidden, out_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for norm in self.norms:
            norm.reset_parameters()  # type: ignore[operator]
        nn.init.xavier_uniform_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        if self.hidden is not None and self.hidden_out is not None:
            self.hidden.reset_parameters()
            nn.init.zeros_(self.hidden_out.weight)
            nn.init.zeros_(self.hidden_out.bias)

    def normalise(self, branches: list[Tensor]) -> Tensor:
        """Branches [B, in_dims[k]] -> the linear layer's input [B, sum(in_dims)]."""
        parts: list[Tensor] = []
        for k, norm in enumerate(self.norms):
            parts.append(norm(branches[k]))
        return torch.cat(parts, dim=-1)

    def forward(self, branches: list[Tensor]) -> Tensor:
        """
        Args:
            branches: tensors [B, in_dims[k]].

        Returns:
            [B, out_dim], not normalised.
        """
        x = self.normalise(branches)
        y = self.linear(x)
        if self.hidden is not None and self.hidden_out is not None:
            y = y + self.hidden_out(F.gelu(self.hidden(x)))
        return y
