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
"""Anatomy from what an item offers: mask files and points, a CheXmask row, or the segmentation network."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from monai.config import KeysCollection
from monai.transforms import MapTransform, Transform
from monai.utils import TransformBackends
from PIL import Image
from torch import Tensor

from monai_god.transforms.graph.modality import AnatomyError, get_modality

from .array import SegmentCXRAnatomy

__all__ = [
    "DecodeCheXmask",
    "ParseAnatomyd",
    "ParseCXRAnatomyD",
    "ParseCXRAnatomyDict",
    "ParseCXRAnatomyd",
    "ParsedAnatomy",
    "check_cxr_anatomy",
    "decode_rle",
    "read_mask",
]

ORGANS = ("left_lung", "right_lung", "heart")
CHEXMASK_COLUMNS = ("Left Lung", "Right Lung", "Heart")


def decode_rle(text: object, height: int, width: int, name: str = "row") -> np.ndarray:
    """
    Decode CheXmask's run lengths: blank-separated pairs of start (from 1) and length over the row-major image.

    Args:
        text: the column; empty or NaN for an empty mask.
        height: rows; ``width``: columns.
        name: what an error calls the row.

    Returns:
        bool [height, width].

    Raises:
        AnatomyError: for text that is no list of pairs, or runs outside the image.
    """
    mask = np.zeros(height * width, dtype=bool)
    if text is None or (isinstance(text, float) and math.isnan(text)) or not str(text).strip():
        return mask.reshape(height, width)
    try:
        numbers = np.array(str(text).split(), dtype=np.int64)
    except ValueError as error:
        raise AnatomyError(f"{name}: the run lengths hold text that is no number; take the row again") from error
    if len(numbers) % 2:
        raise AnatomyError(f"{name}: the run lengths are not pairs of start and length; take the row again")
    starts, lengths = numbers[::2] - 1, numbers[1::2]
    if (starts < 0).any() or (lengths < 1).any() or (starts + lengths > mask.size).any():
        raise AnatomyError(f"{name}: a run leaves the image of {height} x {width} pixels; check Height and Width")
    steps = np.zeros(mask.size + 1, dtype=np.int32)
    np.add.at(steps, starts, 1)
    np.add.at(steps, starts + lengths, -1)
    return (np.cumsum(steps[:-1]) > 0).reshape(height, width)


class DecodeCheXmask(Transform):
    """
    A CheXmask row (by column name) -> uint8 [3, H, W] in the order left lung, right lung, heart.

    ``Height`` and ``Width`` may be empty: 1024 then, as in the preprocessed files. With ``image_size`` the padding to a
    centred square and the resize to 1024 are undone, so that the masks lie on the original image.
    """

    backend = [TransformBackends.NUMPY]

    def __call__(self, row: Mapping[str, Any], image_size: tuple[int, int] | None = None) -> Tensor:
        missing = [c for c in CHEXMASK_COLUMNS if c not in row]
        if missing:
            raise AnatomyError(f"the CheXmask row lacks the columns {', '.join(missing)}")

        def side(column: str) -> int:
            value = row.get(column)
            empty = value is None or str(value).strip() in ("", "nan")
            return 1024 if empty else int(float(str(value)))

        height, width = side("Height"), side("Width")
        masks = np.stack([decode_rle(row[c], height, width, c) for c in CHEXMASK_COLUMNS]).astype(np.uint8)
        out = torch.from_numpy(masks)
        if image_size is None or image_size == (height, width):
            return out
        rows, columns = image_size
        if height != width:
            raise AnatomyError(
                f"the CheXmask row is {width} x {height}, its image {columns} x {rows}: neither the image's own "
                "size nor the padded square; it belongs to another image"
            )
        longest = max(rows, columns)
        square = torch.nn.functional.interpolate(out[None].float(), size=(longest, longest), mode="area")[0] > 0.5
        top, left = (longest - rows) // 2, (longest - columns) // 2
        return square[:, top : top + rows, left : left + columns].to(torch.uint8)


def read_mask(path: str, size: tuple[int, int], image_name: str) -> np.ndarray:
    """
    Read a mask file in an image's geometry.

    Raises:
        AnatomyError: when the file cannot be read, or its sides are not in the image's proportion.
    """
    try:
        with Image.open(path) as opened:
            picture = opened.convert("L")
    except OSError as error:
        raise AnatomyError(f"Cannot read the mask {path}: copy or export it again") from error
    rows, columns = size
    if abs(picture.width * rows - picture.height * columns) > 0.01 * picture.width * rows:
        raise AnatomyError(
            f"The mask {path} is {picture.width} x {picture.height}, but its image {image_name} is {columns} x {rows}: "
            "masks must have their image's geometry"
        )
    if picture.size != (columns, rows):
        picture = picture.resize((columns, rows), Image.Resampling.NEAREST)
    return np.asarray(picture) > 0


def check_cxr_anatomy(anatomy: Tensor) -> list[str]:
    """
    What is implausible about the masks of a frontal chest X-ray; an empty list when nothing is.

    Args:
        anatomy: {0, 1} [3, H, W]: left lung, right lung, heart.
    """
    masks = anatomy.detach().cpu().numpy() > 0
    problems = [f"{o.replace('_', ' ')} mask empty" for o, m in zip(ORGANS, masks, strict=True) if not m.any()]
    height, width = masks.shape[1:]
    area = masks.reshape(3, -1).sum(1) / (height * width)
    middle = [np.nonzero(m)[1].mean() / width if m.any() else None for m in masks]
    left, right, heart = middle
    if left is not None and right is not None:
        if left < right:
            problems.append("film looks mirrored: the left lung lies at the image's left")
        if not 0.35 < area[0] / area[1] < 2.5:
            problems.append("one lung is more than 2.5 times as large as the other")
        if not 0.03 < area[0] + area[1] < 0.8:
            problems.append("the lungs' area is implausible")
        if heart is not None:
            if heart < (left + right) / 2 - 0.02:
                problems.append("film looks mirrored: the heart's mass lies at the image's left")
            lungs = np.flatnonzero(masks[:2].any((0, 1)))
            ratio = float(np.ptp(np.flatnonzero(masks[2].any(0)))) / max(float(np.ptp(lungs)), 1.0)
            if not 0.25 < ratio < 0.9:
                problems.append(f"cardiothoracic ratio {ratio:.2f} is implausible")
    return problems


class ParsedAnatomy(NamedTuple):
    """
    Anatomy of one image as a parser finds it.

    Attributes:
        anatomy: uint8 {0, 1} [organs, H, W], channels as the modality's organs; an organ that is not found is empty.
        landmarks: name to float32 [K, 2] (x, y) pixels; [0, 2] for one that is not found.
        problems: what is missing or doubtful, in words.
    """

    anatomy: Tensor
    landmarks: dict[str, Tensor]
    problems: list[str]


class ParseAnatomyd(MapTransform):
    """
    What all parsers do: masks under ``anatomy`` (uint8 [organs, H, W]), landmarks where the modality has any, and
    ``anatomy_quality`` (``source``, ``usable``, ``problems``).

    Each organ comes from the item's own mask file where there is one (under the organ's name), each landmark from the
    item's own point (``{name}_center``: [x, y] pixels), the rest from :meth:`find`. A parser of another modality
    defines ``modality`` and :meth:`find`, and where it needs to :meth:`given` and :meth:`check`.

    Args:
        keys: key of the image.
        anatomy_key: where the masks go.
        landmarks_key: where the landmarks go.
        quality_key: where the quality goes.
        use_network: False to take given anatomy only; an image without any then gets empty masks and a reason.
        allow_missing_keys: whether a missing image is passed over.

    Raises:
        AnatomyError: for a mask that cannot be read or does not fit its image; the message names both files.
    """

    modality: str

    def __init__(
        self,
        keys: KeysCollection = "image",
        anatomy_key: str = "anatomy",
        landmarks_key: str = "landmarks",
        quality_key: str = "anatomy_quality",
        use_network: bool = True,
        allow_missing_keys: bool = False,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.anatomy_key, self.landmarks_key, self.quality_key = anatomy_key, landmarks_key, quality_key
        self.use_network = use_network

    def find(self, image: Tensor) -> ParsedAnatomy:
        """Parse an image [C, H, W] of values in [0, 1]."""
        raise NotImplementedError

    def given(self, item: Mapping[Hashable, Any], size: tuple[int, int], name: str) -> Iterator[tuple[str, str, Any]]:
        """
        (source, organ, bool [H, W]) of every mask that the item brings itself, the most trusted first.

        Args:
            item: the item.
            size: (height, width) of the image.
            name: of the image, for messages.
        """
        for organ in get_modality(self.modality).organs:
            if isinstance(item.get(organ), str):
                yield "masks", organ, read_mask(item[organ], size, name)

    def check(self, parsed: ParsedAnatomy) -> tuple[list[str], bool]:
        """Problems of the anatomy put together, and whether it is usable."""
        return parsed.problems, bool(parsed.anatomy.any())

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        d = dict(data)
        modality = get_modality(self.modality)
        for key in self.key_iterator(d):
            image = d[key]
            size = (int(image.shape[-2]), int(image.shape[-1]))
            name = str(getattr(image, "meta", {}).get("filename_or_obj", "the image"))
            masks: dict[str, Tensor] = {}
            sources: list[str] = []
            for source, organ, mask in self.given(d, size, name):
                if organ not in masks:
                    masks[organ] = torch.as_tensor(mask).to(torch.uint8)
                    sources += [source] if source not in sources else []
            points = {
                mark: torch.as_tensor(np.asarray(d[f"{mark}_center"], dtype=np.float32)).reshape(1, 2)
                for mark in modality.landmarks
                if d.get(f"{mark}_center") is not None
            }
            found = None
            if self.use_network and not (set(modality.organs) <= set(masks) and set(modality.landmarks) <= set(points)):
                found = self.find(image)
                sources.append("network")
                for channel, organ in enumerate(modality.organs):
                    masks.setdefault(organ, found.anatomy[channel].cpu())
                points = {**found.landmarks, **points}
            empty = torch.zeros(size, dtype=torch.uint8)
            parsed = ParsedAnatomy(
                torch.stack([masks.get(organ, empty) for organ in modality.organs]),
                {mark: points.get(mark, torch.zeros(0, 2)) for mark in modality.landmarks},
                [] if found is None else found.problems,
            )
            problems, usable = self.check(parsed)
            d[self.anatomy_key] = parsed.anatomy
            if modality.landmarks:
                d[self.landmarks_key] = parsed.landmarks
            d[self.quality_key] = {"source": "+".join(sources) or "none", "usable": usable, "problems": problems}
        return d


class ParseCXRAnatomyd(ParseAnatomyd):
    """
    Masks of left lung, right lung and heart; see :class:`ParseAnatomyd`.

    An item may also bring its CheXmask row (key ``chexmask``: a mapping with the columns of the table), used for organs
    without a mask file. A mirrored film is flagged in ``anatomy_quality["problems"]`` and its anatomy is marked as not
    usable.
    """

    modality = "cxr"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.segment, self.decode = SegmentCXRAnatomy(), DecodeCheXmask()

    def find(self, image: Tensor) -> ParsedAnatomy:
        return ParsedAnatomy(torch.as_tensor(self.segment(image)), {}, [])

    def given(self, item: Mapping[Hashable, Any], size: tuple[int, int], name: str) -> Iterator[tuple[str, str, Any]]:
        yield from super().given(item, size, name)
        if isinstance(item.get("chexmask"), Mapping) and not all(isinstance(item.get(organ), str) for organ in ORGANS):
            try:
                decoded = self.decode(item["chexmask"], size)
            except AnatomyError as error:
                raise AnatomyError(f"CheXmask row of {name}: {error}") from error
            for organ, mask in zip(ORGANS, decoded, strict=True):
                yield "chexmask", organ, mask

    def check(self, parsed: ParsedAnatomy) -> tuple[list[str], bool]:
        problems = check_cxr_anatomy(parsed.anatomy)
        return problems, not any("mirrored" in p or "lung mask empty" in p for p in problems)


ParseCXRAnatomyD = ParseCXRAnatomyDict = ParseCXRAnatomyd
