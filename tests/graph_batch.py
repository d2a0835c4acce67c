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
from torch import Tensor


class Graphs(NamedTuple):
    node_type: Tensor
    pos: Tensor
    adjacency: Tensor
    mask: Tensor


class Batch(NamedTuple):
    """A random batch of graphs; padded rows hold large rubbish, which nothing may read."""

    graphs: Graphs
    nodes: Tensor
    g: Tensor
    patients: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of ``GoDNet.embed``."""
        return (self.nodes, self.g, *self.graphs)

    def rows(self, index: Tensor | slice) -> Batch:
        return Batch(Graphs(*(t[index] for t in self.graphs)), self.nodes[index], self.g[index], self.patients[index])


def make_batch(images: int = 8, nodes: int = 7, channels: int = 12, types: int = 3, seed: int = 0) -> Batch:
    """Two images a patient; image i has between 1 and ``nodes`` valid nodes, image 0 all of them."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    patients = torch.arange(images) // 2
    number = int(patients.max()) + 1
    size = torch.randint(1, nodes + 1, (images,), generator=random)
    size[0] = nodes
    mask = torch.arange(nodes) < size[:, None]
    adjacency = torch.rand(images, nodes, nodes, generator=random) > 0.6
    adjacency = (
        (adjacency | adjacency.transpose(1, 2) | torch.eye(nodes, dtype=torch.bool)) & mask[:, None] & mask[..., None]
    )
    features = normal(number, nodes, channels)[patients] + 0.7 * normal(images, nodes, channels) + 2
    features[~mask] = 1e4
    kind = torch.randint(0, types, (nodes,), generator=random).expand(images, nodes).clone()
    pos = torch.rand(images, nodes, 2, generator=random)
    g = normal(number, channels)[patients] + 0.7 * normal(images, channels)
    return Batch(Graphs(kind, pos, adjacency, mask), features, g, patients)
