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

from .array import LocalContrastNormalize

__all__ = ["LocalContrastNormalizeD", "LocalContrastNormalizeDict", "LocalContrastNormalized"]


class LocalContrastNormalized(MapTransform):
    """
    Dictionary twin of :class:`LocalContrastNormalize`.

    Args:
        keys: keys of images.
        window: see :class:`LocalContrastNormalize`.
        allow_missing_keys: whether a missing key is passed over.
    """

    backend = LocalContrastNormalize.backend

    def __init__(
        self, keys: KeysCollection = "image", window: float = 1 / 16, allow_missing_keys: bool = False
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.normalize = LocalContrastNormalize(window)

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        d = dict(data)
        for key in self.key_iterator(d):
            d[key] = self.normalize(d[key])
        return d


LocalContrastNormalizeD = LocalContrastNormalizeDict = LocalContrastNormalized
