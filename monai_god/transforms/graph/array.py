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

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from monai.transforms import Transform
from monai.utils import TransformBackends
from torch import Tensor

from .anatomy_graph import AnatomyGraph
from .functional import build_anatomy_graph, require_nodes
from .modality import Modality, get_modality

__all__ = ["BuildAnatomyGraph", "DropNodes"]


class BuildAnatomyGraph(Transform):
    """
    Anatomy graph from masks and landmarks (paper Sec. 2.1).

    Organ nodes: farthest-point sampling on the outline and inside, deterministic; a mask that is moved gives the same
    nodes moved. Edges: k nearest neighbours made symmetric, self-loops, and symmetry edges between paired organs.
    Pooling weights (Eq. 1): a disc at the node within the organ's mask, area-averaged to the feature grid.

    Missing anatomy gives fewer nodes and a reason in ``graph.problems``. Polar anchors outside the field of view are
    left out without one, as the method has it; ``graph.slot`` tells which nodes there are.

    Args:
        modality: a registered name (``"cxr"``, ``"fundus"``) or a :class:`Modality`.
        scale: multiplies the number of nodes of every group, 0.5 to 2 (granularity, paper Table 6).
        k: nearest neighbours of each node.
        radius: of the pooling disc, as a share of the image's side.
        grid: (height, width) of the backbone's feature map.
        interior_order: order, and so names, of the interior nodes of an organ, and of landmarks that are many (vessel
            junctions). ``"rank"``: by rank of sampling, as in the method's first form; of junctions the widest first.
            ``"place"``: the same nodes by their place in the organ, or in the disc-fovea frame. Of two films of one
            patient, in the aligned frame, the interior nodes of one name lie 40 of 224 pixels apart by rank and 11 by
            place (medians over 150 pairs, lungs). Only level (E) reads names; to (A) to (D) it makes no difference.
        allow_empty: give a graph of no nodes, instead of an error, where nothing is found.

    Raises:
        ValueError: for settings out of range.
    """

    backend = [TransformBackends.NUMPY]

    def __init__(
        self,
        modality: str | Modality,
        scale: float = 1.0,
        k: int = 6,
        radius: float = 0.04,
        grid: tuple[int, int] = (14, 14),
        interior_order: str = "place",
        allow_empty: bool = False,
    ) -> None:
        if interior_order not in ("place", "rank"):
            raise ValueError(f"interior_order must be 'place' or 'rank', got {interior_order!r}")
        if not 0 < scale <= 4 or k < 1 or not 0 < radius < 0.5 or len(grid) != 2 or min(grid) < 1:
            raise ValueError(f"out of range: scale={scale} (0 to 4), k={k} (>= 1), radius={radius} (0 to 0.5), {grid=}")
        self.modality = get_modality(modality)
        self.scale, self.k, self.radius, self.allow_empty = scale, k, radius, allow_empty
        self.grid = (int(grid[0]), int(grid[1]))
        self.interior_order = interior_order

    def __call__(
        self,
        anatomy: Tensor | np.ndarray,
        landmarks: Mapping[str, Any] | None = None,
        image_size: tuple[int, int] | None = None,
    ) -> AnatomyGraph:
        """
        Args:
            anatomy: {0, 1} or bool [C, S, S], channels as ``modality.organs``, of the square image.
            landmarks: name to [K, 2] (x, y) pixels; integers are pixel centres.
            image_size: (height, width) of the image whose pixels the landmarks count, where it is not the masks'.

        Raises:
            AnatomyError: when there is no node at all.
            ValueError: for masks or landmarks of a wrong shape or with wrong values.
        """
        organs = self.modality.organs
        masks = np.asarray(anatomy)
        if masks.ndim != 3 or masks.shape[0] != len(organs) or masks.shape[1] != masks.shape[2] or not masks.size:
            raise ValueError(
                f"anatomy of {self.modality.name} must be [{len(organs)}, S, S] ({', '.join(organs)}), got shape "
                f"{masks.shape}: pad the image and its masks to a square first"
            )
        flags = masks != 0
        if masks.dtype != np.bool_ and not np.array_equal(flags, masks):
            raise ValueError("masks must hold 0 and 1 only")
        size = masks.shape[1]
        height, width = image_size or (size, size)
        factor = np.array([size / width, size / height])
        points = {}
        for name, value in (landmarks or {}).items():
            at = np.asarray(value, dtype=np.float64).reshape(-1, 2)
            if not np.isfinite(at).all():
                raise ValueError(f"landmark {name!r} holds NaN or infinite values: leave out what was not found")
            points[name] = (at + 0.5) * factor - 0.5
        graph = build_anatomy_graph(
            flags, points, self.modality, self.scale, self.k, self.radius, self.grid, self.interior_order
        )
        return graph if self.allow_empty else require_nodes(graph)


class DropNodes(Transform):
    """
    Remove a share of a graph's nodes with their edges (robustness test, paper Table 5).

    Which ones is fixed by the seed and the graph itself, so that neither the order of images nor the number of workers
    matters. At least one node stays.

    Args:
        fraction: share of the nodes to remove, in [0, 1).
        seed: another seed removes others.

    Raises:
        ValueError: for a fraction out of range.
    """

    backend = [TransformBackends.TORCH]

    def __init__(self, fraction: float, seed: int = 0) -> None:
        if not 0 <= fraction < 1:
            raise ValueError(f"fraction must be in [0, 1), got {fraction}")
        self.fraction, self.seed = fraction, seed

    def __call__(self, graph: AnatomyGraph) -> AnatomyGraph:
        number = int(graph.num_nodes or 0)
        remove = min(int(self.fraction * number + 0.5), number - 1)
        if remove <= 0:
            return graph
        content = zlib.crc32(graph.pos.contiguous().numpy().tobytes())
        keep = torch.ones(number, dtype=torch.bool)
        keep[np.random.default_rng([self.seed, content]).permutation(number)[:remove]] = False
        return graph.keep_nodes(keep)
