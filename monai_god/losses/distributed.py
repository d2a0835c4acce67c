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
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from monai_god.networks.nets.god_net import GoDOutput

__all__ = ["gather_batch", "gather_output"]


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.rows = len(x)
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad)
        return grad[dist.get_rank() * ctx.rows : (dist.get_rank() + 1) * ctx.rows]


def gather_batch(x: Tensor) -> Tensor:
    """
    Concatenate a batch over all processes, with gradient; the input itself when there is one process.

    Every process then computes the loss of the global batch. The backward pass sums over processes, and
    DistributedDataParallel divides by their number, so the gradient is that of one process with the global batch.

    Args:
        x: [B, ...], of the same shape in every process.

    Returns:
        [processes * B, ...].
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return x
    if x.dtype == torch.bool:
        return _AllGather.apply(x.to(torch.uint8)).bool()
    return _AllGather.apply(x)


def gather_output(output: GoDOutput) -> GoDOutput:
    """:func:`gather_batch` for every tensor of a network output; graphs are padded to the largest of all processes."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return output
    largest = torch.tensor(output.mask.shape[1], device=output.mask.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    more = int(largest) - output.mask.shape[1]
    padded = output._replace(
        node_embeddings=F.pad(output.node_embeddings, (0, 0, 0, more)),
        node_vectors=F.pad(output.node_vectors, (0, 0, 0, more)),
        attention=F.pad(output.attention, (0, more)),
        node_type=F.pad(output.node_type, (0, more)),
        slot=F.pad(output.slot, (0, more)),
        mask=F.pad(output.mask, (0, more)),
    )
    return GoDOutput(*(gather_batch(t) for t in padded))
