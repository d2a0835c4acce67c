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

import copy
from collections.abc import Sequence

import torch
from monai.data import MetaTensor
from monai.transforms import Transform
from monai.utils import TransformBackends

from monai_god.networks.nets.segmenter import AnatomySegmenter, load_cxr_segmenter

__all__ = ["SegmentCXRAnatomy"]


class SegmentCXRAnatomy(Transform):
    """
    Left lung, right lung and heart of frontal chest X-rays, by the shipped network.

    The lungs go on behind the heart, so the masks overlap. "Left" is the patient's left, the image's right: the lungs
    are told by position, the heart by what is seen, so that on a mirrored film the heart leans to the other side. An
    organ that is not found gives an empty mask. What the network was trained on and how good it is:
    ``networks/weights/cxr_segmenter.md``.

    Args:
        device: where the network runs. Default: where each image is.
    """

    backend = [TransformBackends.TORCH]

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = None if device is None else torch.device(device)
        self._networks: dict[torch.device, AnatomySegmenter] = {}

    def __call__(self, img: torch.Tensor) -> torch.Tensor:
        """
        Args:
            img: [3, H, W] (or one channel), values in [0, 1], bright is dense.

        Returns:
            uint8 {0, 1} masks [3, H, W] (left lung, right lung, heart), at the image's place.

        Raises:
            ValueError: when the image is not [channels, H, W] or holds values that are not finite.
        """
        return self.batch([img])[0]

    def batch(self, images: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Like a call for each image, which may differ in size, in one pass of the network."""
        plain = []
        for image in images:
            image = image.as_tensor() if isinstance(image, MetaTensor) else torch.as_tensor(image)
            if image.ndim != 3 or 0 in image.shape:
                raise ValueError(f"expected an image [channels, H, W], got shape {tuple(image.shape)}")
            if not torch.isfinite(image).all():
                raise ValueError("the image holds NaN or infinite values: replace them before segmentation")
            plain.append(image)
        if not plain:
            return []
        device = self.device or plain[0].device
        if device not in self._networks:
            shared = load_cxr_segmenter()
            # the shared network stays on the CPU for others
            self._networks[device] = shared if device.type == "cpu" else copy.deepcopy(shared).to(device)
        masks = self._networks[device].segment([image.to(device) for image in plain])
        return [mask.to(image.device) for mask, image in zip(masks, plain, strict=True)]
