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

import numpy as np
import torch
from monai.config import KeysCollection
from monai.data import MetaTensor
from monai.transforms import InvertibleTransform, MapTransform

from monai_god.transforms.graph.modality import AnatomyError, Modality

from .array import AlignToAnatomy, DilateAnatomy, SegmentCXRAnatomy
from .functional import index_affine, scale_frame, transform_points

__all__ = [
    "AlignToAnatomyD",
    "AlignToAnatomyDict",
    "AlignToAnatomyd",
    "DilateAnatomyD",
    "DilateAnatomyDict",
    "DilateAnatomyd",
    "SegmentCXRAnatomyD",
    "SegmentCXRAnatomyDict",
    "SegmentCXRAnatomyd",
]


class SegmentCXRAnatomyd(MapTransform):
    """
    Dictionary twin of :class:`SegmentCXRAnatomy`: the image's masks are written beside it.

    Args:
        keys: key of the image.
        anatomy_key: where the masks go; with several keys, ``{key}_{anatomy_key}``.
        device: where the network runs. Default: where each image is.
        allow_missing_keys: whether a missing image is passed over.
    """

    backend = SegmentCXRAnatomy.backend

    def __init__(
        self,
        keys: KeysCollection = "image",
        anatomy_key: str = "anatomy",
        device: torch.device | str | None = None,
        allow_missing_keys: bool = False,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.anatomy_key = anatomy_key
        self.segmenter = SegmentCXRAnatomy(device)

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        d = dict(data)
        for key in self.key_iterator(d):
            d[self.anatomy_key if len(self.keys) == 1 else f"{key}_{self.anatomy_key}"] = self.segmenter(d[key])
        return d


SegmentCXRAnatomyD = SegmentCXRAnatomyDict = SegmentCXRAnatomyd


class AlignToAnatomyd(MapTransform, InvertibleTransform):
    """
    Dictionary twin of :class:`AlignToAnatomy`, invertible. An image whose anatomy cannot fix the frame is padded to a
    square instead, and ``anatomy_quality`` says "not aligned: ...".

    Written beside the image: the map, [3, 3] float64 from the old pixels to the new, under ``matrix_key``.

    Args:
        keys: key of the image (one).
        modality: see :class:`AlignToAnatomy`; so are output_size, mode, margin and anatomy_size.
        anatomy_key: key of the masks; may be absent.
        landmarks_key: key of the landmarks; may be absent.
        quality_key: key of the quality record; made when absent.
        matrix_key: where the map goes.
        allow_missing_keys: whether a missing image is passed over.
    """

    backend = AlignToAnatomy.backend

    def __init__(
        self,
        keys: KeysCollection = "image",
        modality: str | Modality = "cxr",
        output_size: int = 448,
        mode: str = "affine",
        margin: float = 0.1,
        anatomy_size: int | None = None,
        anatomy_key: str = "anatomy",
        landmarks_key: str = "landmarks",
        quality_key: str = "anatomy_quality",
        matrix_key: str = "alignment",
        allow_missing_keys: bool = False,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        if len(self.keys) != 1:
            raise ValueError(f"an image has one anatomy: give one key, got {self.keys}")
        self.align = AlignToAnatomy(modality, output_size, mode, margin, anatomy_size)
        self.anatomy_key, self.landmarks_key = anatomy_key, landmarks_key
        self.quality_key, self.matrix_key = quality_key, matrix_key

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        d = dict(data)
        for key in self.key_iterator(d):
            image, anatomy, landmarks = d[key], d.get(self.anatomy_key), d.get(self.landmarks_key)
            try:
                out, masks, points, matrix = self.align(image, anatomy, landmarks)
            except AnatomyError as error:
                out, masks, points, matrix = self.align.padded_square(image, anatomy, landmarks)
                quality = dict(d.get(self.quality_key) or {"source": "unknown", "usable": True})
                quality["problems"] = [*quality.get("problems", []), f"not aligned: {error}"]
                d[self.quality_key] = quality
            if isinstance(image, MetaTensor):
                out = MetaTensor(out, meta=image.meta, applied_operations=image.applied_operations)
                out.affine = image.affine @ index_affine(matrix, image.affine.shape[0]).to(image.affine)
            d[key], d[self.matrix_key] = out, matrix
            if masks is not None:
                d[self.anatomy_key] = masks
            if landmarks is not None:
                d[self.landmarks_key] = points
            extra = {
                "matrix": matrix.tolist(),
                "size": list(image.shape[-2:]),
                "affine": image.affine.tolist() if isinstance(image, MetaTensor) else None,
            }
            self.push_transform(d, key, extra_info=extra)
        return d

    def inverse(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Image (bilinear), masks (nearest) and landmarks back in the original pixels; the map is removed."""
        d = dict(data)
        for key in self.key_iterator(d):
            extra = self.pop_transform(d, key)["extra_info"]
            matrix, size = np.array(extra["matrix"]), (int(extra["size"][0]), int(extra["size"][1]))
            image = d[key]
            out = self.align.inverse(image.as_tensor() if isinstance(image, MetaTensor) else image, matrix, size)
            if isinstance(image, MetaTensor):
                out = MetaTensor(out, meta=image.meta, applied_operations=image.applied_operations)
                out.affine = torch.tensor(extra["affine"], dtype=image.affine.dtype)
            d[key] = out
            if d.get(self.anatomy_key) is not None:
                frame = scale_frame(matrix, self.align.output_size, self.align.anatomy_size)
                d[self.anatomy_key] = self.align.inverse(d[self.anatomy_key], frame, size, "nearest")
            if d.get(self.landmarks_key) is not None:
                back = np.linalg.inv(matrix)
                d[self.landmarks_key] = {
                    name: torch.from_numpy(transform_points(np.asarray(at, dtype=np.float64), back).astype(np.float32))
                    for name, at in d[self.landmarks_key].items()
                }
            d.pop(self.matrix_key, None)
        return d


class DilateAnatomyd(MapTransform):
    """
    Dictionary twin of :class:`DilateAnatomy`.

    Args:
        keys: keys of masks.
        pixels: in the frame of a 224 x 224 image, whatever the masks' size.
        modality: a registered name or a :class:`Modality`.
        allow_missing_keys: whether missing masks are passed over.
    """

    backend = DilateAnatomy.backend

    def __init__(
        self,
        keys: KeysCollection = "anatomy",
        pixels: float = 5,
        modality: str | Modality = "cxr",
        allow_missing_keys: bool = False,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.dilate = DilateAnatomy(pixels, modality)

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        d = dict(data)
        for key in self.key_iterator(d):
            d[key] = self.dilate(d[key])
        return d


AlignToAnatomyD = AlignToAnatomyDict = AlignToAnatomyd
DilateAnatomyD = DilateAnatomyDict = DilateAnatomyd
