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
from typing import Any, NamedTuple

import numpy as np
import torch
from monai.config import KeysCollection
from monai.data import MetaTensor
from monai.transforms import InvertibleTransform, MapTransform, Transform
from monai.utils import TransformBackends
from numpy.typing import NDArray
from scipy import ndimage
from skimage.filters import apply_hysteresis_threshold
from skimage.measure import CircleModel, ransac
from skimage.morphology import skeletonize
from torch import Tensor

__all__ = [
    "CanonicalizeFundus",
    "CanonicalizeFundusD",
    "CanonicalizeFundusDict",
    "CanonicalizeFundusd",
    "FieldOfView",
    "eye_side",
    "find_field_of_view",
    "vessel_junctions",
]

SIDES = ("L", "R")
#: a corner brighter than this is no black border
DARK = 0.12


class FieldOfView(NamedTuple):
    """
    Where a fundus photograph shows the retina.

    Attributes:
        mask: bool [H, W].
        circle: (x, y, radius) in pixels of the image; NaN where the field has no round edge.
        problems: what is unusual, in words.
    """

    mask: NDArray[np.bool_]
    circle: tuple[float, float, float]
    problems: list[str]


def find_field_of_view(image: Tensor | NDArray[np.floating]) -> FieldOfView:
    """
    Find the field of view: a circle, fitted robustly to the edge of what is not black, so that shadows, notches and
    flares at the rim do not matter, cut off where the photograph is.

    Args:
        image: [3, H, W] (or one channel), values in [0, 1].

    Raises:
        ValueError: when the image is not [channels, H, W].
    """
    array = np.asarray(image, dtype=np.float32)
    if array.ndim != 3 or 0 in array.shape:
        raise ValueError(f"expected an image [channels, H, W], got shape {array.shape}")
    height, width = array.shape[1:]
    side = max(height, width)
    # worked out at about 256 pixels: the edge of the field is sharp, and its place is fitted
    step = max(1, side // 256)
    light = ndimage.gaussian_filter(array.max(0), 0.5 * step)[::step, ::step]
    rows, columns = light.shape
    k = max(2, max(rows, columns) // 20)
    ends = (slice(0, k), slice(-k, None))
    darkest = min((light[y, x] for y in ends for x in ends), key=np.median)
    border = float(np.median(darkest))
    everything = np.ones((height, width), bool)
    unknown = (float("nan"), float("nan"), float("nan"))
    if border > DARK:
        return FieldOfView(everything, unknown, ["no black border: the whole image is taken as the field of view"])
    bright = float(np.quantile(light, 0.95))
    noise = float(np.quantile(np.abs(darkest - border), 0.9))
    mask = light > border + max(0.08 * (bright - border), 4 * noise, 0.008)
    labels, count = ndimage.label(mask)
    if count == 0:
        return FieldOfView(everything, unknown, ["the image is black: the whole image is taken as the field of view"])
    mask = ndimage.binary_fill_holes(labels == 1 + np.argmax(ndimage.sum_labels(mask, labels, range(1, count + 1))))
    # the ends of the mask's rows and columns are points of the round rim, where they do not lie on the image's edge or
    # on a straight cut
    filled_rows, filled_columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    points: list[tuple[int, int]] = []
    for row in filled_rows:
        places = np.flatnonzero(mask[row])[[0, -1]]
        limits = max(1, filled_columns[0]), min(columns - 2, filled_columns[-1])
        points += [(int(place), int(row)) for place in places if limits[0] < place < limits[1]]
    for column in filled_columns:
        places = np.flatnonzero(mask[:, column])[[0, -1]]
        limits = max(1, filled_rows[0]), min(rows - 2, filled_rows[-1])
        points += [(int(column), int(place)) for place in places if limits[0] < place < limits[1]]
    rim = np.asarray(points, dtype=np.float64)
    found = None
    if len(rim) >= 20:
        model, inliers = ransac(rim, CircleModel, 3, 0.008 * max(rows, columns), max_trials=300, rng=0)
        if model is not None and inliers.mean() > 0.45:
            (x, y), r = (float(v) for v in model.center), float(model.radius)
            inside = (np.arange(columns)[None] - x) ** 2 + (np.arange(rows)[:, None] - y) ** 2 <= r**2
            if 0.25 * max(rows, columns) < r < 1.2 * max(rows, columns) and (mask & inside).sum() > 0.8 * mask.sum():
                found = (x, y, r)
    if found is None:
        whole = np.kron(mask, np.ones((step, step), bool))[:height, :width]
        padded = np.pad(whole, ((0, height - whole.shape[0]), (0, width - whole.shape[1])), mode="edge")
        return FieldOfView(padded, unknown, ["the field of view is not round"])
    x, y, r = (step * v for v in found)
    filled = np.flatnonzero(mask.mean(1) > 0.1)
    top, bottom = step * filled[0], step * (filled[-1] + 1)
    yy, xx = np.mgrid[:height, :width]
    whole = (xx - x) ** 2 + (yy - y) ** 2 <= r**2
    # cut off at top and bottom inside the photograph, as some cameras do
    if top > y - 0.93 * r:
        whole &= yy >= top
    if bottom < y + 0.93 * r:
        whole &= yy < bottom
    return FieldOfView(whole, (x, y, r), [])


def vessel_junctions(vessels: Tensor | NDArray[Any], count: int = 16, distance: float = 0.03) -> NDArray[np.float32]:
    """
    Bifurcations and crossings of a vessel tree, the strongest first, non-maximum suppressed.

    A junction is as strong as its weakest branch: the square root of its third longest branch's length, times the width
    of the thinnest. That ranks them more steadily from photograph to photograph than their own width does.

    Args:
        vessels: probability in [0, 1], or a mask {0, 1}, [H, W].
        count: at most so many.
        distance: smallest distance of two junctions, as a share of the longer side.

    Returns:
        float32 [K, 2], (x, y) pixels.
    """
    probability = np.asarray(vessels, dtype=np.float32)
    if probability.ndim != 2:
        raise ValueError(f"expected a map of vessels [H, W], got shape {probability.shape}")
    side = max(probability.shape)
    mask = apply_hysteresis_threshold(ndimage.gaussian_filter(probability, side / 512), 0.35, 0.65)
    # specks, and holes between a vessel's edges, would branch the skeleton
    labels, parts = ndimage.label(mask, np.ones((3, 3)))
    size = np.bincount(labels.ravel(), minlength=parts + 1)
    size[0] = 0
    mask = size[labels] > (0.02 * side) ** 2
    mask = ndimage.binary_closing(mask, iterations=max(1, side // 256))
    width = ndimage.distance_transform_edt(mask)
    skeleton = skeletonize(mask)
    neighbours = ndimage.convolve(skeleton.astype(np.int32), np.ones((3, 3), np.int32), mode="constant") - 1
    nodes, number = ndimage.label(skeleton & (neighbours >= 3), np.ones((3, 3)))
    branches, _ = ndimage.label(skeleton & (nodes == 0), np.ones((3, 3)))
    length = np.bincount(branches.ravel())
    mean_width = np.bincount(branches.ravel(), width.ravel()) / np.maximum(length, 1)
    candidates = []
    for node, inside in zip(range(1, number + 1), ndimage.find_objects(nodes), strict=True):
        box = tuple(slice(max(0, part.start - 1), part.stop + 1) for part in inside)
        ys, xs = np.nonzero(nodes[box] == node)
        ys, xs = ys + box[0].start, xs + box[1].start
        # a spur shorter than the vessel is wide is an edge's roughness, no vessel
        shortest = max(2 * width[ys, xs].max(), 0.012 * side)
        around = [b for b in np.unique(branches[box]) if b and length[b] > shortest]
        if len(around) >= 3:
            strength = np.sqrt(sorted(length[around])[-3]) * mean_width[around].min()
            candidates.append((float(strength), float(xs.mean()), float(ys.mean())))
    kept: list[tuple[float, float]] = []
    for _, x, y in sorted(candidates, key=lambda c: (-c[0], c[2], c[1])):
        if len(kept) < count and all(np.hypot(x - a, y - b) >= distance * side for a, b in kept):
            kept.append((x, y))
    return np.asarray(kept, dtype=np.float32).reshape(-1, 2)


def eye_side(landmarks: Mapping[str, Any] | None) -> str | None:
    """
    Side of the eye from geometry: the optic disc lies on the nasal side of the fovea, the right side of a right eye's
    image.

    Returns:
        ``"L"``, ``"R"``, or None where disc or fovea is unknown or they lie above each other.
    """
    places = {}
    for name in ("optic_disc", "fovea"):
        at = np.asarray((landmarks or {}).get(name, ()), dtype=np.float64).reshape(-1, 2)
        if not len(at) or not np.isfinite(at[0]).all():
            return None
        places[name] = at[0]
    across, down = places["optic_disc"] - places["fovea"]
    if abs(across) < abs(down):
        return None
    return "R" if across > 0 else "L"


class CanonicalizeFundus(Transform):
    """
    Mirror left eyes, so that the optic disc lies to the right of the macula in every image, as in a right eye.

    The side comes from the record where there is one, else from the places of disc and fovea. An image of unknown side
    stays as it is, and says so.
    """

    backend = [TransformBackends.TORCH]

    @staticmethod
    def side(laterality: str | None, landmarks: Mapping[str, Any] | None) -> tuple[str | None, str]:
        """
        Side of the eye and where it is known from (``"record"``, ``"geometry"`` or ``"unknown"``).

        Raises:
            ValueError: for a laterality other than L, R or None.
        """
        if laterality is not None:
            if laterality not in SIDES:
                raise ValueError(f"laterality must be 'L' or 'R', got {laterality!r}: correct the datalist")
            return laterality, "record"
        found = eye_side(landmarks)
        return found, "unknown" if found is None else "geometry"

    @staticmethod
    def mirror(
        image: Tensor, anatomy: Tensor | None = None, landmarks: Mapping[str, Any] | None = None
    ) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """
        Mirror left and right; its own inverse.

        Args:
            image: [C, H, W].
            anatomy: [organs, H, W] or None.
            landmarks: name to [K, 2] (x, y) pixels.
        """
        width = image.shape[-1]
        points = {}
        for name, value in (landmarks or {}).items():
            at = torch.as_tensor(np.asarray(value, dtype=np.float32)).reshape(-1, 2).clone()
            at[:, 0] = width - 1 - at[:, 0]
            points[name] = at
        return image.flip(-1), None if anatomy is None else torch.as_tensor(anatomy).flip(-1), points

    def __call__(
        self,
        image: Tensor,
        anatomy: Tensor | None = None,
        landmarks: Mapping[str, Any] | None = None,
        laterality: str | None = None,
    ) -> tuple[Tensor, Tensor | None, dict[str, Any], bool]:
        """
        Args:
            image: [C, H, W].
            anatomy: [organs, H, W] or None.
            landmarks: name to [K, 2] (x, y) pixels of the image.
            laterality: ``"L"``, ``"R"`` or None for unknown.

        Returns:
            image, masks and landmarks, and whether they were mirrored.
        """
        side, _ = self.side(laterality, landmarks)
        if side != "L":
            return image, anatomy, dict(landmarks or {}), False
        return *self.mirror(image, anatomy, landmarks), True


class CanonicalizeFundusd(MapTransform, InvertibleTransform):
    """
    Dictionary twin of :class:`CanonicalizeFundus`, invertible.

    Written beside the image: ``mirrored`` (bool), ``eye_side`` ("L", "R" or None) and ``eye_side_source``; an image of
    unknown side gets the problem "side of the eye unknown: not mirrored" in its quality record.

    Args:
        keys: key of the image (one).
        anatomy_key: key of the masks; may be absent.
        landmarks_key: key of the landmarks; may be absent.
        laterality_key: key of the record's side; may be absent.
        quality_key: key of the quality record; made when absent.
        allow_missing_keys: whether a missing image is passed over.
    """

    backend = CanonicalizeFundus.backend

    def __init__(
        self,
        keys: KeysCollection = "image",
        anatomy_key: str = "anatomy",
        landmarks_key: str = "landmarks",
        laterality_key: str = "laterality",
        quality_key: str = "anatomy_quality",
        allow_missing_keys: bool = False,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        if len(self.keys) != 1:
            raise ValueError(f"an image has one anatomy: give one key, got {self.keys}")
        self.canonicalize = CanonicalizeFundus()
        self.anatomy_key, self.landmarks_key = anatomy_key, landmarks_key
        self.laterality_key, self.quality_key = laterality_key, quality_key

    def _mirror(self, d: dict[Hashable, Any], key: Hashable) -> None:
        image = d[key]
        anatomy, landmarks = d.get(self.anatomy_key), d.get(self.landmarks_key)
        plain = image.as_tensor() if isinstance(image, MetaTensor) else image
        out, masks, points = self.canonicalize.mirror(plain, anatomy, landmarks)
        if isinstance(image, MetaTensor):
            out = MetaTensor(out, meta=image.meta, applied_operations=image.applied_operations)
            flip = torch.eye(image.affine.shape[0], dtype=image.affine.dtype)
            flip[1, 1], flip[1, -1] = -1, image.shape[-1] - 1
            out.affine = image.affine @ flip
        d[key] = out
        if masks is not None:
            d[self.anatomy_key] = masks
        if landmarks is not None:
            d[self.landmarks_key] = points

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        d = dict(data)
        for key in self.key_iterator(d):
            side, source = self.canonicalize.side(d.get(self.laterality_key), d.get(self.landmarks_key))
            d["eye_side"], d["eye_side_source"], d["mirrored"] = side, source, side == "L"
            if side is None:
                quality = dict(d.get(self.quality_key) or {"source": "unknown", "usable": True})
                quality["problems"] = [*quality.get("problems", []), "side of the eye unknown: not mirrored"]
                d[self.quality_key] = quality
            if d["mirrored"]:
                self._mirror(d, key)
            self.push_transform(d, key, extra_info={"mirrored": d["mirrored"]})
        return d

    def inverse(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        d = dict(data)
        for key in self.key_iterator(d):
            if self.pop_transform(d, key)["extra_info"]["mirrored"]:
                self._mirror(d, key)
            d["mirrored"] = False
        return d


CanonicalizeFundusD = CanonicalizeFundusDict = CanonicalizeFundusd
