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
from torch import Tensor

__all__ = ["masked_softmax", "safe_normalize", "to_slots"]


def masked_softmax(score: Tensor, mask: Tensor) -> Tensor:
    """
    Softmax over the last dimension among the entries where ``mask`` is True; a row without any is zero, not NaN.

    Args:
        score: [..., N]; ``mask``: bool, broadcastable to it.
    """
    # -3e4 fits in half precision, and its exponential is exactly 0 beside any sensible score
    return torch.softmax(score.masked_fill(~mask, -3e4), dim=-1) * mask.to(score.dtype)


def safe_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """
    Scale the last dimension to unit length; a vector shorter than ``eps`` becomes zero and passes no gradient.

    ``torch.nn.functional.normalize`` divides a zero vector by its ``eps``, so its gradient explodes where a padded or
    missing node is exactly zero.

    Args:
        x: [..., D].
        eps: length below which a direction is undefined.

    Returns:
        [..., D].
    """
    length = torch.linalg.vector_norm(x.detach(), dim=-1, keepdim=True)
    defined = length > eps
    # an undefined row is replaced before the division: a `where` after it would still give 0 * inf in the backward pass
    safe = torch.where(defined, x, torch.ones_like(x))
    return torch.where(defined, safe / torch.linalg.vector_norm(safe, dim=-1, keepdim=True), torch.zeros_like(x))


def to_slots(x: Tensor, mask: Tensor, slot: Tensor, num_slots: int) -> Tensor:
    """
    Move every valid row to its named place; places that no row fills are zero.

    Args:
        x: [B, N, D] rows.
        mask: [B, N] bool, valid rows.
        slot: [B, N] long, place of each row, in [0, num_slots) where valid; two valid rows never share a place.
        num_slots: number of places S.

    Returns:
        [B, S, D].
    """
    place = slot.masked_fill(~mask, 0).unsqueeze(-1).expand(-1, -1, x.shape[-1])
    rows = x * mask.unsqueeze(-1).to(x.dtype)
    # adding, because padded rows (zero by now) share place 0 with a real one
    return torch.zeros(x.shape[0], num_slots, x.shape[-1], dtype=x.dtype, device=x.device).scatter_add(1, place, rows)
