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
"""Does a network read the scanner instead of the patient? Phantoms whose artefact follows the patient, or does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from skimage.morphology import convex_hull_image
from torch import Tensor
from torch_geometric.data import Batch

from monai_god.engines.cached_graphs import graph_tensors
from monai_god.networks.nets.backbones import Backbone
from monai_god.networks.nets.god_net import GoDNet
from monai_god.transforms.graph import AnatomyGraph

__all__ = ["cell_attribution", "outside_anatomy", "share_outside"]


def outside_anatomy(anatomy: Tensor, grid: tuple[int, int]) -> Tensor:
    """
    How much of each cell of the backbone's map lies outside the anatomy: the convex hull of all organs together, which
    for a chest X-ray is the inside of the thorax, for a fundus photograph its field of view.

    Args:
        anatomy: {0, 1} [organs, S, S].
        grid: (height, width) of the map.

    Returns:
        [height * width] in [0, 1].
    """
    whole = np.asarray(anatomy).any(0)
    inside = convex_hull_image(whole) if whole.any() else whole
    cells = torch.nn.functional.adaptive_avg_pool2d(torch.from_numpy(inside.astype(np.float32))[None, None], grid)
    return 1 - cells.flatten()


def cell_attribution(net: GoDNet, graph: AnatomyGraph, feature_map: Tensor, target: Tensor) -> Tensor:
    """
    What each cell of the backbone's map adds to the cosine of z with a target: gradient x (features - their mean over
    the cells), through the global descriptor and through the nodes alike, so that it exists at every level.

    Args:
        net: the network, in evaluation mode.
        graph: with pooling weights [N, G].
        feature_map: [G, C], row-major; g is its mean over cells.
        target: [E], unit embedding of the other image.

    Returns:
        [G].
    """
    cells = feature_map.detach().clone().requires_grad_()
    batch = Batch.from_data_list([graph])
    batch.x, batch.g = graph.pool @ feature_map.detach().cpu(), feature_map.detach().mean(0, keepdim=True)
    dense, _, _ = graph_tensors(batch, cells.device)
    with torch.enable_grad():
        output = net(dense, (graph.pool.to(cells.device) @ cells)[None], cells.mean(0)[None])
        (gradient,) = torch.autograd.grad((output.z[0] * target).sum(), cells)
    return ((cells.detach() - cells.detach().mean(0)) * gradient).sum(1)


def share_outside(
    net: GoDNet,
    backbone: Backbone,
    transform: Callable[[Any], Any],
    items: Sequence[Mapping[str, Any]],
    pairs: Sequence[tuple[int, int]],
    embeddings: np.ndarray,
    device: torch.device | str = "cpu",
) -> np.ndarray:
    """
    Share of the attribution, by magnitude, that lies outside the anatomy, beside the share of the area that does.

    Neighbouring cells see the same pixels, so that an artefact at the edge of the anatomy counts partly as inside.

    Args:
        net: the network.
        backbone: of its features.
        transform: the bundle's preprocessing: item -> ``image``, ``anatomy`` and ``graph``.
        items: of the data set.
        pairs: (query, image found first), indices into ``items``.
        embeddings: z of every item, [n, E].
        device: where to compute.

    Returns:
        [pairs, 2]: share of the attribution, and of the area.
    """
    net.eval().to(device)
    rows = []
    for query, found in pairs:
        d = transform(dict(items[query]))
        with torch.no_grad():
            _, feature_map = backbone.to(device)(torch.as_tensor(d["image"]).float()[None].to(device))
        cells = feature_map[0].flatten(1).T
        target = torch.from_numpy(embeddings[found]).to(device)
        effect = cell_attribution(net, d["graph"], cells, target).abs().cpu()
        outside = outside_anatomy(d["anatomy"], (int(feature_map.shape[2]), int(feature_map.shape[3])))
        rows.append((float((effect * outside).sum() / effect.sum().clamp_min(1e-12)), float(outside.mean())))
    return np.array(rows, dtype=np.float64).reshape(-1, 2)
