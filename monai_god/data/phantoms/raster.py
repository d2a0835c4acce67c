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
"""Drawing tools for phantoms: line integrals of tubes, smooth noise, curves through control points."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy.interpolate import CubicSpline
from scipy.ndimage import gaussian_filter1d

__all__ = ["Array", "Splatter", "Vector", "blur", "curve", "resize", "smooth_noise", "stagger"]

Array = npt.NDArray[np.float32]
Vector = npt.NDArray[np.float64]

# An irrational step between neighbouring cross-sections keeps the samples of a tube from lining up with the pixels.
_GOLDEN = 0.6180339887


def resize(image: Array, size: int) -> Array:
    """Resample a square float32 image [h, h] to [size, size], bicubic."""
    if image.shape[0] == size:
        return image
    return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC))


def blur(image: Array, sigma: float) -> Array:
    """Gaussian blur of a float32 image, sigma in pixels."""
    out = gaussian_filter1d(image, sigma, axis=0, mode="nearest", truncate=3.0)
    return gaussian_filter1d(out, sigma, axis=1, mode="nearest", truncate=3.0)


def smooth_noise(rng: np.random.Generator, size: int, cells: float) -> Array:
    """Smooth Gaussian noise [size, size] of about unit variance with ``cells`` blobs across the image.

    The noise of one generator state looks the same at every ``size``, only finer or coarser sampled.
    """
    coarse = rng.standard_normal((max(4, round(cells)),) * 2, dtype=np.float32)
    return resize(coarse, size) * np.float32(1.25)


def curve(points: Sequence[Sequence[float]] | npt.NDArray[np.floating], samples: int = 50) -> Vector:
    """A smooth curve through control points [K, D], resampled to [samples, D], parameterised by chord length."""
    nodes = np.asarray(points, dtype=np.float64)
    length = np.concatenate([[0.0], np.cumsum(np.maximum(np.linalg.norm(np.diff(nodes, axis=0), axis=1), 1e-6))])
    return np.asarray(CubicSpline(length, nodes)(np.linspace(0.0, length[-1], samples)))


class Splatter:
    """Accumulates the volume of tubes into an image of path lengths.

    A tube is sampled along its axis and across its section, each sample carries the volume it stands for, and every
    pixel sums the volumes that project into it. Divided by the pixel's area this is the line integral, so that edges
    brighten where the ray runs along a wall, with no case made for them.

    Args:
        size: pixels per side.
        pixel_area: area of a pixel in the units of the tubes, squared.
    """

    def __init__(self, size: int, pixel_area: float) -> None:
        self.size = size
        self.pixel_area = pixel_area
        self._index: list[npt.NDArray[np.int32]] = []
        self._weight: list[Array] = []

    def points(self, col: npt.NDArray[np.floating], row: npt.NDArray[np.floating], volume: npt.ArrayLike) -> None:
        """
        Add samples at pixel coordinates (the first pixel spans 0 to 1), each with its volume; those outside are
        dropped.
        """
        c, r = np.floor(col).astype(np.int32), np.floor(row).astype(np.int32)
        inside = (c >= 0) & (r >= 0) & (c < self.size) & (r < self.size)
        self._index.append((r * self.size + c)[inside])
        self._weight.append(np.broadcast_to(np.asarray(volume, dtype=np.float32), inside.shape)[inside])

    def image(self) -> Array:
        """The path lengths [size, size], float32."""
        if not self._index:
            return np.zeros((self.size, self.size), np.float32)
        total = np.bincount(
            np.concatenate(self._index), weights=np.concatenate(self._weight), minlength=self.size * self.size
        )
        return (total / self.pixel_area).astype(np.float32).reshape(self.size, self.size)


def stagger(count: int, around: int) -> Array:
    """Fractions [count, around] in [0, 1), shifted from one cross-section to the next."""
    start = (np.arange(count) * _GOLDEN)[:, None] % 1.0
    return ((np.arange(around)[None, :] + start) / around).astype(np.float32)
