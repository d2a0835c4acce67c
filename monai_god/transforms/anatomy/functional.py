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
"""Maps into the canonical anatomical frame, and their application to images, masks and points."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from monai.networks.layers import GaussianFilter
from numpy.typing import NDArray
from scipy import ndimage
from torch import Tensor

from monai_god.transforms.graph.modality import AnatomyError

__all__ = [
    "axis_frame",
    "dilate_mask",
    "index_affine",
    "organ_frame",
    "padded_square_frame",
    "resample",
    "scale_frame",
    "transform_points",
]

Array = NDArray[Any]

MODES = ("box", "affine", "similarity", "none")
# Half extent of the pair of lungs over the standard deviation of their pixels, across and along the body: medians over
# 462 films.
LUNG_EXTENT = (1.8, 2.1)
# A film tilted further is not upright, and the lungs' axes cannot be trusted.
LARGEST_TILT = 25.0
# Smallest share of the image that each organ of a pair must cover: less is a remnant, not an organ.
SMALLEST_SHARE = 0.005


def _linear(matrix: Array, source: Array, target: Array) -> Array:
    """[3, 3] map of pixel indices that applies ``matrix`` [2, 2] about ``source`` and puts that at ``target``."""
    out = np.eye(3)
    out[:2, :2] = matrix
    out[:2, 2] = target - matrix @ source
    return out


def _points(mask: Array) -> Array:
    """[M, 2] (x, y) of the pixels of the largest connected part of a mask."""
    labels, number = ndimage.label(mask)
    if number > 1:
        mask = labels == np.bincount(labels.ravel())[1:].argmax() + 1
    ys, xs = mask.nonzero()
    return np.stack([xs, ys], axis=1).astype(np.float64)


def _tilt(points: Array) -> float:
    """Angle of an organ's long axis against the vertical, in (-pi/2, pi/2]; positive: its lower end to the right."""
    (xx, xy), (_, yy) = np.cov(points.T)
    return 0.5 * float(np.arctan2(2 * xy, yy - xx))


def organ_frame(
    left: Array,
    right: Array,
    output_size: int,
    mode: str = "affine",
    margin: float = 0.1,
    names: tuple[str, str] = ("", ""),
) -> Array:
    """
    Map that puts a pair of organs, such as the lungs, at fixed places.

    - ``"box"``: the bounding box of both goes to the square left by the margin; no rotation.
    - ``"affine"``: rotation by the mean tilt of the two organs' long axes; then centre and spread of their pixels,
      across and along, go to fixed values, such that the pair about fills the square left by the margin. Spread,
      unlike the box, hardly feels a blip of a mask.
    - ``"similarity"``: as affine with one scale for both directions, the geometric mean.

    Args:
        left: bool [H, W].
        right: bool [H, W].
        output_size: side of the output in pixels.
        mode: see above.
        margin: share of the output's side left free on each side.
        names: of the two organs, for messages.

    Returns:
        [3, 3] float64, (x, y, 1) of the image to that of the output, in pixel indices.

    Raises:
        AnatomyError: when a mask is empty or a remnant, the two lie above each other, or the pair is
            tilted by more than 25 degrees.
    """
    parts = []
    for mask, name in ((left, names[0]), (right, names[1])):
        points = _points(mask)
        if len(points) < max(SMALLEST_SHARE * mask.size, 16):
            raise AnatomyError(f"{name} mask {'empty' if not len(points) else 'too small'}")
        parts.append(points)
    target = np.full(2, (output_size - 1) / 2)
    free = (1 - 2 * margin) * output_size
    both = np.concatenate(parts)
    if mode == "box":
        low, high = both.min(0) - 0.5, both.max(0) + 0.5
        return _linear(np.diag(free / (high - low)), (low + high) / 2, target)
    across, along = np.abs(parts[0].mean(0) - parts[1].mean(0))
    if along > across:
        raise AnatomyError(f"{names[0]} and {names[1]} do not lie side by side")
    tilt = sum(_tilt(points) for points in parts) / 2
    if abs(np.degrees(tilt)) > LARGEST_TILT:
        raise AnatomyError(f"tilted by {np.degrees(tilt):.0f} degrees")
    # (sin, cos) is the body's downward direction; it becomes (0, 1)
    upright = np.array([[np.cos(tilt), -np.sin(tilt)], [np.sin(tilt), np.cos(tilt)]])
    centre = both.mean(0)
    spread = ((both - centre) @ upright.T).std(0)
    scale = free / (2 * np.array(LUNG_EXTENT) * spread)
    if mode == "similarity":
        scale = np.full(2, np.sqrt(scale.prod()))
    return _linear(np.diag(scale) @ upright, centre, target)


def axis_frame(first: Array, second: Array, output_size: int, margin: float = 0.1) -> Array:
    """
    Similarity map that puts two landmarks at fixed places, ``first`` to the right of ``second`` on the middle row.

    Their distance becomes 0.4 of the side left by the margin: a field of 45 degrees then about fills the output.
    Where ``first`` lies to the left (a left eye that was not mirrored) the map mirrors.

    Args:
        first: (x, y), for example the optic disc's centre.
        second: (x, y), for example the fovea.
        output_size: side of the output in pixels.
        margin: share of the output's side left free on each side.

    Returns:
        [3, 3] float64, as for :func:`organ_frame`.

    Raises:
        AnatomyError: when the landmarks are closer than 2 pixels.
    """
    middle = (np.asarray(first, dtype=np.float64) + second) / 2
    along = np.asarray(first, dtype=np.float64) - second
    length = float(np.hypot(*along))
    if length < 2:
        raise AnatomyError("the two landmarks coincide")
    mirror = np.diag([-1.0 if along[0] < 0 else 1.0, 1.0])
    x, y = mirror @ along / length
    scale = 0.4 * (1 - 2 * margin) * output_size / length
    turn = np.array([[x, y], [-y, x]])
    return _linear(scale * turn @ mirror, middle, np.full(2, (output_size - 1) / 2))


def padded_square_frame(size: tuple[int, int], output_size: int) -> Array:
    """The map of the whole image, padded to a centred square, to the output."""
    height, width = size
    scale = output_size / max(height, width)
    return _linear(np.eye(2) * scale, np.array([(width - 1) / 2, (height - 1) / 2]), np.full(2, (output_size - 1) / 2))


def scale_frame(matrix: Array, size: int, new_size: int) -> Array:
    """The same map for an output of another resolution."""
    factor = new_size / size
    return _linear(np.eye(2) * factor, np.full(2, (size - 1) / 2), np.full(2, (new_size - 1) / 2)) @ matrix


def index_affine(matrix: Tensor, rank: int) -> Tensor:
    """What to multiply the affine of a ``MetaTensor`` by, [rank, rank]: rows come first there, and it maps back."""
    out = torch.eye(rank, dtype=torch.float64)
    back = torch.linalg.inv(matrix.to(torch.float64))
    out[:2, :2] = back[:2, :2].flip(0, 1)
    out[:2, -1] = back[:2, 2].flip(0)
    return out


def transform_points(points: Array, matrix: Array) -> Array:
    """Apply a [3, 3] map to [K, 2] points."""
    return points @ matrix[:2, :2].T + matrix[:2, 2]


def _normalised(height: int, width: int) -> Array:
    """Pixel indices to the [-1, 1] of ``grid_sample(align_corners=False)``."""
    return np.array([[2 / width, 0, 1 / width - 1], [0, 2 / height, 1 / height - 1], [0, 0, 1.0]])


def resample(image: Tensor, matrix: Array, size: tuple[int, int], mode: str = "bilinear") -> Tensor:
    """
    Move an image by a map of pixel indices, with one interpolation; what lies outside is 0.

    A bilinear image that shrinks is smoothed first, as in ``skimage.transform.resize``, lest it alias.

    Args:
        image: [C, H, W].
        matrix: [3, 3], (x, y, 1) of the input to that of the output.
        size: (height, width) of the output.
        mode: ``"bilinear"`` or ``"nearest"``.

    Returns:
        [C, *size], of the image's type.
    """
    back = np.linalg.inv(matrix)
    values = image.to(torch.float32)[None]
    shrink = float(np.sqrt(abs(np.linalg.det(back[:2, :2]))))
    if mode == "bilinear" and shrink > 1.2:
        smooth = GaussianFilter(2, (shrink - 1) / 2)
        # the filter takes what lies outside as 0, which would darken the rim
        values = smooth(values) / smooth(torch.ones_like(values[:, :1]))
    theta = _normalised(*image.shape[-2:]) @ back @ np.linalg.inv(_normalised(*size))
    grid = F.affine_grid(torch.from_numpy(theta[None, :2]), [1, 1, *size], align_corners=False)
    inside = (grid.abs() <= 1).all(-1)
    # padding with zeros would fade the rim of an image that grows
    out = F.grid_sample(values, grid.to(values), mode=mode, padding_mode="border", align_corners=False)[0]
    return (out * inside).to(image.dtype)


def dilate_mask(mask: Array, radius: float) -> Array:
    """All pixels within ``radius`` (Euclidean, in pixels) of a bool mask [H, W]; an empty one stays empty."""
    if radius <= 0 or not mask.any():
        return mask
    return ndimage.distance_transform_edt(~mask) <= radius
