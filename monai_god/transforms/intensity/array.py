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

from monai.transforms import Transform
from monai.utils import TransformBackends
from torch import Tensor

from .functional import local_contrast_normalize

__all__ = ["LocalContrastNormalize"]


class LocalContrastNormalize(Transform):
    """
    Remove exposure and slow density changes from an image; see :func:`local_contrast_normalize`.

    Args:
        window: standard deviation of the neighbourhood, as a fraction of the longer image side.
    """

    backend = [TransformBackends.NUMPY]

    def __init__(self, window: float = 1 / 16) -> None:
        if not 0 < window < 1:
            raise ValueError(f"window must lie between 0 and 1, got {window}")
        self.window = window

    def __call__(self, img: Tensor) -> Tensor:
        return local_contrast_normalize(img, self.window)
