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
"""Anatomy of a colour fundus photograph: field of view, optic disc, fovea, vessel tree and its junctions."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import Transform
from monai.utils import TransformBackends
from numpy.typing import NDArray
from scipy import ndimage
from torch import Tensor

from monai_god.networks.nets.backbones import keep_memory
from monai_god.networks.nets.segmenter import WEIGHTS_FOLDER, AnatomySegmenter

from .functional import resample, transform_points
from .fundus import FieldOfView, find_field_of_view, vessel_junctions
from .parse import ParseAnatomyd, ParsedAnatomy

__all__ = [
    "ParseFundusAnatomy",
    "ParseFundusAnatomyD",
    "ParseFundusAnatomyDict",
    "ParseFundusAnatomyd",
    "field_frame",
]

WEIGHTS = WEIGHTS_FOLDER / "fundus_segmenter.pt"
#: plausible radius of the disc, as a share of the field's side: fields of 60 and of 20 degrees
DISC_RADIUS = (0.03, 0.2)
#: plausible distance of disc and fovea, in radii of the disc
FOVEA_DISTANCE = (3.0, 9.0)
#: a photograph whose values differ by less shows nothing: two grey levels of 255
BLANK = 2 / 255
#: least mean probability of a structure that is taken as found
SURE = 0.6


def field_frame(field: FieldOfView, shape: tuple[int, int], size: int) -> NDArray[np.float64]:
    """
    Map that puts the round field of view into a square of ``size`` pixels; without one, the whole padded image.

    Args:
        field: of the image.
        shape: (height, width) of the image.
        size: side of the square.

    Returns:
        [3, 3], (x, y, 1) of the image to that of the square, in pixel indices.
    """
    x, y, radius = field.circle
    if not np.isfinite(radius):
        x, y, radius = (shape[1] - 1) / 2, (shape[0] - 1) / 2, max(shape) / 2
    scale = size / (2.04 * radius)
    return np.array([[scale, 0, (size - 1) / 2 - scale * x], [0, scale, (size - 1) / 2 - scale * y], [0, 0, 1]])


@lru_cache(maxsize=1)
def load_fundus_segmenter() -> AnatomySegmenter:
    """The shipped network for optic disc, vessels and fovea; its card is ``networks/weights/fundus_segmenter.md``."""
    keep_memory()
    return AnatomySegmenter.load(WEIGHTS).to(memory_format=torch.channels_last)


class ParseFundusAnatomy(Transform):
    """
    Field of view, optic disc, fovea, vessels and their junctions, by the shipped network and geometry.

    What is not seen is not guessed: a disc that is not sure, a fovea at an impossible distance from the disc, are left
    out with a reason. How good it is: ``networks/weights/fundus_segmenter.md``.

    Args:
        segmenter: another network with the outputs optic_disc, vessels and fovea; the shipped one by default.
    """

    backend = [TransformBackends.TORCH, TransformBackends.NUMPY]

    def __init__(self, segmenter: AnatomySegmenter | None = None) -> None:
        self._segmenter = segmenter

    @staticmethod
    def fingerprint() -> str:
        """SHA-256 of the shipped weights, for the keys of stored features."""
        return hashlib.sha256(WEIGHTS.read_bytes()).hexdigest()

    def __call__(self, image: Tensor) -> ParsedAnatomy:
        """
        Args:
            image: [3, H, W] (or one channel), values in [0, 1].

        Returns:
            masks (optic disc, vessels, field of view), landmarks (``optic_disc``, ``fovea``, ``junctions``) and
            problems.

        Raises:
            ValueError: when the image is not [channels, H, W] or holds values that are not finite.
        """
        plain = image.as_tensor() if isinstance(image, MetaTensor) else torch.as_tensor(image)
        if plain.ndim != 3 or 0 in plain.shape:
            raise ValueError(f"expected an image [channels, H, W], got shape {tuple(plain.shape)}")
        if not torch.isfinite(plain).all():
            raise ValueError("the image holds NaN or infinite values: replace them before parsing")
        plain = plain.float().cpu()
        plain = plain[:3] if len(plain) >= 3 else plain[:1].expand(3, -1, -1)
        height, width = plain.shape[1:]
        if float(plain.max() - plain.min()) < BLANK:
            shade = "black" if float(plain.max()) < 0.5 else "of one colour"
            problems = [f"the image is {shade}", "optic disc not found", "fovea not found", "no vessel junction found"]
            nothing = {name: torch.zeros(0, 2) for name in ("optic_disc", "fovea", "junctions")}
            return ParsedAnatomy(torch.zeros(3, height, width, dtype=torch.uint8), nothing, problems)
        field = find_field_of_view(plain)
        segmenter = self._segmenter or load_fundus_segmenter()
        side = segmenter.size
        frame = field_frame(field, (height, width), side)
        square = resample(plain, frame, (side, side))
        with torch.no_grad():
            logits = segmenter.logits(square[None].contiguous(memory_format=torch.channels_last))[0]
        probability = torch.sigmoid(logits).contiguous().numpy()
        seen = resample(torch.from_numpy(field.mask[None].astype(np.float32)), frame, (side, side))[0].numpy() > 0.5
        probability *= seen
        problems = list(field.problems)
        disc, disc_at = self._disc(probability[segmenter.organs.index("optic_disc")], problems)
        vessels = probability[segmenter.organs.index("vessels")]
        fovea_at = self._fovea(probability[segmenter.organs.index("fovea")], disc, disc_at, problems)
        junctions = vessel_junctions(vessels)
        if not len(junctions):
            problems.append("no vessel junction found")
        back = np.linalg.inv(frame)
        maps = resample(torch.from_numpy(np.stack([disc.astype(np.float32), vessels])), back, (height, width)).numpy()
        masks = np.stack([maps[0] > 0.5, (maps[1] > 0.5) & field.mask, field.mask])
        landmarks = {
            name: torch.from_numpy(transform_points(points, back).astype(np.float32))
            for name, points in (
                ("optic_disc", disc_at),
                ("fovea", fovea_at),
                ("junctions", junctions.astype(np.float64)),
            )
        }
        return ParsedAnatomy(torch.from_numpy(masks.astype(np.uint8)), landmarks, problems)

    @staticmethod
    def _spots(probability: NDArray[np.floating], threshold: float) -> tuple[NDArray[Any], list[tuple[float, int]]]:
        """Labelled parts, and (sum of probability, label) of each, the largest first."""
        labels, count = ndimage.label(probability > threshold)
        total = ndimage.sum_labels(probability, labels, range(1, count + 1))
        return labels, sorted(((float(t), i + 1) for i, t in enumerate(np.atleast_1d(total))), reverse=True)

    def _disc(
        self, probability: NDArray[np.floating], problems: list[str]
    ) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        side = len(probability)
        labels, parts = self._spots(probability, 0.5)
        for total, label in parts[:1]:
            mask = ndimage.binary_fill_holes(labels == label)
            ys, xs = np.nonzero(mask)
            radius = float(np.sqrt(mask.sum() / np.pi))
            if not DISC_RADIUS[0] * side < radius < DISC_RADIUS[1] * side:
                problems.append("optic disc not found: what looks like it has an implausible size")
            elif total / mask.sum() < SURE:
                problems.append("optic disc not found: nothing sure enough")
            else:
                return mask, np.array([[xs.mean(), ys.mean()]])
        if not parts:
            problems.append("optic disc not found: not in the field, or not visible")
        return np.zeros_like(probability, dtype=bool), np.zeros((0, 2))

    def _fovea(
        self,
        probability: NDArray[np.floating],
        disc: NDArray[np.bool_],
        disc_at: NDArray[np.float64],
        problems: list[str],
    ) -> NDArray[np.float64]:
        labels, parts = self._spots(probability, 0.35)
        radius = float(np.sqrt(disc.sum() / np.pi))
        reason = "fovea not found: not in the field, or not visible"
        for _, label in parts[:3]:
            part = labels == label
            if probability[part].max() < SURE:
                reason = "fovea not found: nothing sure enough"
                continue
            y, x = ndimage.center_of_mass(probability * part)
            distance = float(np.hypot(*(disc_at[0] - (x, y)))) if len(disc_at) else np.nan
            if len(disc_at) and not FOVEA_DISTANCE[0] * radius < distance < FOVEA_DISTANCE[1] * radius:
                reason = "fovea not found: what looks like it lies at an implausible distance from the optic disc"
                continue
            return np.array([[x, y]])
        problems.append(reason)
        return np.zeros((0, 2))


class ParseFundusAnatomyd(ParseAnatomyd):
    """Dictionary twin of :class:`ParseFundusAnatomy`; see :class:`ParseAnatomyd` for what an item may bring itself."""

    modality = "fundus"
    backend = ParseFundusAnatomy.backend

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parse = ParseFundusAnatomy()

    def find(self, image: Tensor) -> ParsedAnatomy:
        return self.parse(image)

    def check(self, parsed: ParsedAnatomy) -> tuple[list[str], bool]:
        return parsed.problems, any(len(points) for points in parsed.landmarks.values())


ParseFundusAnatomyD = ParseFundusAnatomyDict = ParseFundusAnatomyd
