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

import torch
from monai.config import KeysCollection
from monai.transforms import MapTransform

from .array import SegmentCXRAnatomy

__all__ = ["SegmentCXRAnatomyD", "SegmentCXRAnatomyDict", "SegmentCXRAnatomyd"]


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
