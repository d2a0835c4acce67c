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

import numpy as np
import torch
from monai.data import MetaTensor
from scipy import ndimage
from torch import Tensor

__all__ = ["local_contrast_normalize"]


def local_contrast_normalize(image: Tensor, window: float = 1 / 16, gain: float = 0.2, floor: float = 0.02) -> Tensor:
    """
    Subtract the local mean and divide by the local standard deviation, both Gaussian-weighted, and centre at 0.5.

    Exposure, scatter and lung density change between two visits; ribs, clavicles and vessels stay. Of the steps tried
    before a frozen natural-image backbone, removing the slow part of the image raised retrieval on real chest X-rays
    most.

    Args:
        image: [C, H, W], values in [0, 1]. Equal channels (a grey image) are filtered once.
        window: standard deviation of the Gaussian, as a fraction of the longer image side.
        gain: grey level of one local standard deviation.
        floor: added to the local standard deviation, so that flat regions (collimator, black border) stay flat.

    Returns:
        Same shape and type as ``image``, values in [0, 1].
    """
    array = image.detach().cpu().numpy().astype(np.float32)
    grey = all(np.array_equal(array[0], channel) for channel in array[1:])
    sigma = window * max(array.shape[1:])
    out = np.empty_like(array)
    for index, channel in enumerate(array[:1] if grey else array):
        mean = ndimage.gaussian_filter(channel, sigma, truncate=3.0)
        spread = np.sqrt(ndimage.gaussian_filter(np.square(channel - mean), sigma, truncate=3.0))
        out[index] = np.clip(0.5 + gain * (channel - mean) / (spread + floor), 0.0, 1.0)
    if grey:
        out[1:] = out[0]
    result = torch.as_tensor(out, device=image.device)
    return MetaTensor(result, meta=image.meta) if isinstance(image, MetaTensor) else result
