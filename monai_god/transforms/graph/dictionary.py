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

from collections.abc import Hashable, Mapping
from typing import Any

from monai.config import KeysCollection
from monai.transforms import MapTransform

from .array import BuildAnatomyGraph, DropNodes
from .functional import require_nodes
from .modality import Modality

__all__ = [
    "BuildAnatomyGraphD",
    "BuildAnatomyGraphDict",
    "BuildAnatomyGraphd",
    "DropNodesD",
    "DropNodesDict",
    "DropNodesd",
]


class BuildAnatomyGraphd(MapTransform):
    """
    Dictionary twin of :class:`BuildAnatomyGraph`: reads masks and landmarks, writes the graph, and adds what is missing
    to the problems of ``anatomy_quality``.

    Args:
        keys: key of the masks.
        modality: a registered name or a :class:`Modality`.
        scale: see :class:`BuildAnatomyGraph`; so are k, radius, grid, interior_order and allow_empty.
        image_key: the image whose pixels the landmarks count; without it they count the masks'.
        landmarks_key: key of the landmarks; may be absent.
        graph_key: where the graph goes; with several keys, ``{key}_{graph_key}``.
        quality_key: key of the quality record; made when absent.
        allow_missing_keys: whether missing masks are passed over.
    """

    backend = BuildAnatomyGraph.backend

    def __init__(
        self,
        keys: KeysCollection = "anatomy",
        modality: str | Modality = "cxr",
        scale: float = 1.0,
        k: int = 6,
        radius: float = 0.04,
        grid: tuple[int, int] = (14, 14),
        interior_order: str = "place",
        allow_empty: bool = False,
        image_key: str = "image",
        landmarks_key: str = "landmarks",
        graph_key: str = "graph",
        quality_key: str = "anatomy_quality",
        allow_missing_keys: bool = False,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.build = BuildAnatomyGraph(modality, scale, k, radius, grid, interior_order, allow_empty=True)
        self.allow_empty = allow_empty
        self.image_key, self.landmarks_key = image_key, landmarks_key
        self.graph_key, self.quality_key = graph_key, quality_key

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        d = dict(data)
        image = d.get(self.image_key)
        size = None if image is None else (image.shape[-2], image.shape[-1])
        for key in self.key_iterator(d):
            graph = self.build(d[key], d.get(self.landmarks_key), size)
            if not self.allow_empty:
                file = getattr(image, "meta", {}).get("filename_or_obj")
                require_nodes(graph, f" in {file}" if file else "")
            quality = dict(d.get(self.quality_key) or {"source": "unknown", "usable": True})
            known = list(quality.get("problems", []))
            quality["problems"] = known + [problem for problem in graph.problems if problem not in known]
            quality["usable"] = bool(quality.get("usable", True)) and graph.num_nodes > 0
            d[self.quality_key] = quality
            d[self.graph_key if len(self.keys) == 1 else f"{key}_{self.graph_key}"] = graph
        return d


class DropNodesd(MapTransform):
    """
    Dictionary twin of :class:`DropNodes`.

    Args:
        keys: keys of graphs.
        fraction: share of the nodes to remove, in [0, 1).
        seed: another seed removes others.
        allow_missing_keys: whether a missing graph is passed over.
    """

    backend = DropNodes.backend

    def __init__(
        self, keys: KeysCollection = "graph", fraction: float = 0.1, seed: int = 0, allow_missing_keys: bool = False
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.drop = DropNodes(fraction, seed)

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        d = dict(data)
        for key in self.key_iterator(d):
            d[key] = self.drop(d[key])
        return d


BuildAnatomyGraphD = BuildAnatomyGraphDict = BuildAnatomyGraphd
DropNodesD = DropNodesDict = DropNodesd
