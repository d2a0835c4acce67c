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
"""Simple masks and naive re-computations for the tests of graphs and of alignment."""

from __future__ import annotations

import numpy as np


def ellipse(x: float, y: float, a: float, b: float, size: int = 224) -> np.ndarray:
    """Filled ellipse about (x, y)."""
    rows, columns = np.mgrid[:size, :size]
    return ((rows - y) / b) ** 2 + ((columns - x) / a) ** 2 < 1


def chest(dx: int = 0, dy: int = 0, size: int = 224) -> np.ndarray:
    """Left lung (on the right), right lung, heart; uint8 [3, size, size]. They touch no edge for small shifts."""
    s = size / 224
    parts = [(153, 100, 33, 72), (70, 96, 37, 78), (122, 130, 34, 29)]
    masks = [ellipse(x * s + dx, y * s + dy, a * s, b * s, size) for x, y, a, b in parts]
    # a notch makes the outlines less smooth and breaks the symmetry
    masks[0][int(150 * s) + dy : int(160 * s) + dy, int(130 * s) + dx : int(150 * s) + dx] = False
    return np.stack(masks).astype(np.uint8)


def fundus(size: int = 224) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Optic disc, vessels, field of view, uint8 [3, size, size], and landmarks, the disc to the right of the fovea."""
    s = size / 224
    view = ellipse(112 * s, 112 * s, 108 * s, 108 * s, size)
    disc = ellipse(150 * s, 108 * s, 13 * s, 14 * s, size)
    vessels = np.zeros_like(view)
    vessels[int(60 * s) : int(64 * s), int(30 * s) : int(180 * s)] = True
    junctions = np.array([[140.0, 62], [120, 62], [100, 62], [60, 62]]) * s
    return np.stack([disc, vessels, view]).astype(np.uint8), {
        "fovea": np.array([[70.0, 116.0]]) * s,
        "junctions": junctions,
    }
