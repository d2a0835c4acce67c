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
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import Transform
from monai.utils import TransformBackends
from torch import Tensor

from monai_god.networks.nets.segmenter import WEIGHTS_FOLDER, AnatomySegmenter, load_cxr_segmenter
from monai_god.transforms.graph.modality import AnatomyError, Modality, get_modality

from .functional import (
    MODES,
    axis_frame,
    dilate_mask,
    organ_frame,
    padded_square_frame,
    resample,
    scale_frame,
    transform_points,
)

__all__ = ["AlignToAnatomy", "DilateAnatomy", "SegmentCXRAnatomy"]


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

    @staticmethod
    def fingerprint() -> str:
        """SHA-256 of the shipped weights, for the keys of stored features."""
        return hashlib.sha256((WEIGHTS_FOLDER / "cxr_segmenter.pt").read_bytes()).hexdigest()

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


class AlignToAnatomy(Transform):
    """
    Map an image with its masks and landmarks into the canonical frame of its modality, with one interpolation.

    Chest X-rays: the lungs go to fixed places, see :func:`organ_frame` for the modes; on 462 films of 189 patients the
    lungs of two films of one patient then overlap by a Dice of 0.92 (``"affine"``), 0.90 (``"similarity"``) or 0.89
    (``"box"``) in the median, 0.71 without alignment. Fundus: the optic disc and the fovea go to fixed places, the disc
    to the right, by a similarity map whatever the mode; a left eye that was not mirrored is mirrored by it.

    The map depends on masks and landmarks only. It is returned, and :meth:`inverse` takes an image back.

    Args:
        modality: a registered name or a :class:`Modality`.
        output_size: side of the square output in pixels.
        mode: ``"affine"``, ``"similarity"`` or ``"box"``; ``"none"`` for the whole image, padded to a centred square.
        margin: share of the output's side left free on each side of the anatomy.
        anatomy_size: side of the masks' output; None for the image's.

    Raises:
        ValueError: for settings out of range.
    """

    backend = [TransformBackends.TORCH]

    def __init__(
        self,
        modality: str | Modality,
        output_size: int,
        mode: str = "affine",
        margin: float = 0.1,
        anatomy_size: int | None = None,
    ) -> None:
        if mode not in MODES or not 0 <= margin < 0.5 or output_size < 1 or anatomy_size == 0:
            raise ValueError(
                f"mode must be one of {MODES} and margin in [0, 0.5), got {mode=}, {margin=}, {output_size=}"
            )
        self.modality = get_modality(modality)
        self.output_size, self.mode, self.margin = output_size, mode, margin
        self.anatomy_size = output_size if anatomy_size is None else anatomy_size

    def matrix(self, anatomy: Any, landmarks: Mapping[str, Any] | None = None) -> np.ndarray:
        """
        [3, 3] float64 map of pixel indices (x, y, 1) of the image to those of the output.

        Raises:
            AnatomyError: when the anatomy that fixes the frame is missing or unusable.
        """
        if self.mode == "none":
            raise ValueError("mode 'none' has no anatomical frame: padded_square is its map")
        kind, first, second = self.modality.frame
        channel = {organ: i for i, organ in enumerate(self.modality.organs)}
        masks = None if anatomy is None else np.asarray(anatomy) > 0
        if kind == "organs":
            if masks is None:
                raise AnatomyError(f"no masks of {first} and {second}".replace("_", " "))
            names = (first.replace("_", " "), second.replace("_", " "))
            left, right = masks[channel[first]], masks[channel[second]]
            return organ_frame(left, right, self.output_size, self.mode, self.margin, names)
        ends = []
        for name in (first, second):
            points = np.asarray((landmarks or {}).get(name, ()), dtype=np.float64).reshape(-1, 2)[:1]
            if not len(points) and masks is not None and name in channel and masks[channel[name]].any():
                ys, xs = masks[channel[name]].nonzero()
                points = np.array([[xs.mean(), ys.mean()]])
            if not len(points) or not np.isfinite(points).all():
                raise AnatomyError(f"{name.replace('_', ' ')} not found")
            ends.append(points[0])
        return axis_frame(ends[0], ends[1], self.output_size, self.margin)

    def __call__(
        self, image: Tensor, anatomy: Tensor | None = None, landmarks: Mapping[str, Any] | None = None
    ) -> tuple[Tensor, Tensor | None, dict[str, Tensor], Tensor]:
        """
        Args:
            image: [C, H, W].
            anatomy: {0, 1} [organs, H, W] of the image, or None.
            landmarks: name to [K, 2] (x, y) pixels of the image.

        Returns:
            Image [C, S, S], masks [organs, A, A] (None for None), landmarks in pixels of the new image, and the map
            [3, 3] float64 from the old pixels to the new.

        Raises:
            AnatomyError: when the anatomy that fixes the frame is missing or unusable; :meth:`padded_square` is the
                explicit way out.
        """
        if self.mode == "none":
            return self.padded_square(image, anatomy, landmarks)
        self._check(image, anatomy)
        return self._apply(image, anatomy, landmarks, self.matrix(anatomy, landmarks))

    def padded_square(
        self, image: Tensor, anatomy: Tensor | None, landmarks: Mapping[str, Any] | None = None
    ) -> tuple[Tensor, Tensor | None, dict[str, Tensor], Tensor]:
        """The same for the whole image, padded to a centred square: for images that cannot be aligned."""
        self._check(image, anatomy)
        frame = padded_square_frame((image.shape[-2], image.shape[-1]), self.output_size)
        return self._apply(image, anatomy, landmarks, frame)

    @staticmethod
    def inverse(image: Tensor, matrix: Tensor | np.ndarray, size: tuple[int, int], mode: str = "bilinear") -> Tensor:
        """
        Take an aligned image back.

        Args:
            image: [C, S, S].
            matrix: the map that :meth:`__call__` returned.
            size: (height, width) of the original image.
            mode: ``"bilinear"``, or ``"nearest"`` for masks.
        """
        return resample(image, np.linalg.inv(np.asarray(matrix, dtype=np.float64)), size, mode)

    @staticmethod
    def _check(image: Tensor, anatomy: Tensor | None) -> None:
        if image.ndim != 3 or 0 in image.shape:
            raise ValueError(f"expected an image [channels, H, W], got shape {tuple(image.shape)}")
        if anatomy is not None and tuple(anatomy.shape[-2:]) != tuple(image.shape[-2:]):
            raise ValueError(f"masks of {tuple(anatomy.shape[-2:])} do not fit the image of {tuple(image.shape[-2:])}")

    def _apply(
        self, image: Tensor, anatomy: Tensor | None, landmarks: Mapping[str, Any] | None, matrix: np.ndarray
    ) -> tuple[Tensor, Tensor | None, dict[str, Tensor], Tensor]:
        plain = image.as_tensor() if isinstance(image, MetaTensor) else image
        out = resample(plain, matrix, (self.output_size, self.output_size))
        if anatomy is not None:
            masks = anatomy.as_tensor() if isinstance(anatomy, MetaTensor) else torch.as_tensor(anatomy)
            side = self.anatomy_size
            anatomy = resample(masks, scale_frame(matrix, self.output_size, side), (side, side), "nearest")
        points = {
            name: torch.from_numpy(
                transform_points(np.asarray(value, dtype=np.float64).reshape(-1, 2), matrix).astype(np.float32)
            )
            for name, value in (landmarks or {}).items()
        }
        return out, anatomy, points, torch.from_numpy(matrix)


class DilateAnatomy(Transform):
    """
    Grow every organ's mask (robustness test, paper Table 5); the field of view stays.

    Args:
        pixels: in the frame of a 224 x 224 image, whatever the masks' size.
        modality: a registered name or a :class:`Modality`.

    Raises:
        ValueError: for negative ``pixels``.
    """

    backend = [TransformBackends.NUMPY]

    def __init__(self, pixels: float, modality: str | Modality = "cxr") -> None:
        if pixels < 0:
            raise ValueError(f"pixels must not be negative, got {pixels}")
        self.pixels, self.modality = pixels, get_modality(modality)

    def __call__(self, anatomy: Tensor) -> Tensor:
        """
        Args:
            anatomy: {0, 1} [organs, H, W].
        """
        masks = np.asarray(anatomy)
        radius = self.pixels * max(masks.shape[-2:]) / 224
        grown = [
            mask > 0 if organ == self.modality.field_of_view else dilate_mask(mask > 0, radius)
            for organ, mask in zip(self.modality.organs, masks, strict=True)
        ]
        return torch.from_numpy(np.stack(grown).astype(masks.dtype))
