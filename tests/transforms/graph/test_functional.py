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
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage
from skimage.measure import find_contours

from monai_god.transforms.graph.functional import (
    farthest_point_sampling,
    nearest_neighbour_adjacency,
    organ_shape,
    polar_points,
    pooling_weights,
    sample_organ,
    symmetry_pairs,
)
from tests.anatomy_masks import chest, ellipse


def random_blob(seed: int, size: int = 40) -> np.ndarray:
    """A ragged mask, often of several parts with holes."""
    noise = ndimage.gaussian_filter(np.random.default_rng(seed).standard_normal((size, size)), 2)
    return noise > np.quantile(noise, 0.6)


def naive_sampling(candidates: np.ndarray, count: int, chosen: np.ndarray) -> list[tuple[int, int]]:
    left = [(x, y) for y, x in zip(*candidates.nonzero(), strict=True)]
    seen = [tuple(p) for p in chosen.tolist()]
    out: list[tuple[int, int]] = []
    while left and len(out) < count:
        best = max(left, key=lambda p: min((p[0] - q[0]) ** 2 + (p[1] - q[1]) ** 2 for q in seen))
        left.remove(best)
        seen.append(best)
        out.append((int(best[0]), int(best[1])))
    return out


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 4))
def test_sampling_equals_naive_loop(seed: int, count: int, starts: int) -> None:
    mask = random_blob(seed, 14)
    chosen = np.random.default_rng(seed).integers(0, 14, (starts, 2))
    found = farthest_point_sampling(mask, count, chosen)
    assert [tuple(p) for p in found.tolist()] == naive_sampling(mask, count, chosen)


def test_sampling_takes_every_pixel_once_when_asked_for_more() -> None:
    mask = np.zeros((5, 6), dtype=bool)
    mask[1:3, 2:5] = True
    found = farthest_point_sampling(mask, 20, np.array([[2, 1]]))
    assert sorted(map(tuple, found.tolist())) == sorted((x, y) for y, x in zip(*mask.nonzero(), strict=True))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_outline_is_scikit_images_contour_clockwise_from_the_top(seed: int) -> None:
    mask = random_blob(seed)
    shape = organ_shape(mask)
    assert shape is not None
    labels, number = ndimage.label(mask)
    sizes = np.bincount(labels.ravel())[1:]
    assert shape.component.sum() == sizes.max()
    padded = np.pad(shape.component, 1).astype(float)
    contour = next(c for c in find_contours(padded, 0.5) if c[:, 0].min() < 1)
    expected = set()
    for point in contour:
        for y, x in (np.floor(point), np.ceil(point)):
            if padded[int(y), int(x)]:
                expected.add((int(x) - 1, int(y) - 1))
    outline = [tuple(p) for p in shape.outline.tolist()]
    assert len(set(outline)) == len(outline)
    assert set(outline) == expected
    top = shape.component[0].nonzero()[0].mean()
    distance = (shape.outline[:, 0] - top) ** 2 + shape.outline[:, 1] ** 2
    assert distance[0] == distance.min()


def test_outline_runs_clockwise() -> None:
    shape = organ_shape(ellipse(30, 30, 15, 20, 64))
    assert shape is not None
    x, y = shape.outline.T
    following_x, following_y = np.roll(x, -1), np.roll(y, -1)
    # y points down: a positive shoelace sum is clockwise on the screen
    assert (x * following_y - following_x * y).sum() > 0
    assert np.abs(np.diff(shape.outline, axis=0)).max() == 1


@pytest.mark.parametrize("pixels", [[(3, 3)], [(3, 3), (3, 4)], [(2, 2), (3, 3)]])
def test_tiny_masks(pixels: list[tuple[int, int]]) -> None:
    mask = np.zeros((8, 8), dtype=bool)
    for y, x in pixels:
        mask[y, x] = True
    shape = organ_shape(mask)
    assert shape is not None
    boundary, interior = sample_organ(shape, 24, 24)
    # pixels that touch at a corner are two parts
    assert len(boundary) == (2 if pixels == [(3, 3), (3, 4)] else 1)
    assert len(interior) == 0
    assert mask[boundary[:, 1], boundary[:, 0]].all()


def test_empty_mask_has_no_shape() -> None:
    assert organ_shape(np.zeros((8, 8), dtype=bool)) is None


def test_samples_lie_where_they_should_and_boundary_follows_the_outline() -> None:
    shape = organ_shape(chest()[0] > 0)
    assert shape is not None
    boundary, interior = sample_organ(shape, 24, 24)
    outline = {tuple(p): i for i, p in enumerate((shape.outline + shape.offset).tolist())}
    order = [outline[tuple(p)] for p in boundary.tolist()]
    assert order[0] == 0
    assert order == sorted(order)
    assert not {tuple(p) for p in interior.tolist()} & set(outline)
    together = np.concatenate([boundary, interior])
    assert len(np.unique(together, axis=0)) == 48
    assert (chest()[0][together[:, 1], together[:, 0]] == 1).all()


def naive_pool(point: np.ndarray, mask: np.ndarray, radius: float, grid: tuple[int, int]) -> np.ndarray:
    """Pixel by pixel, each split over the cells it overlaps."""
    height, width = mask.shape
    out = np.zeros(grid)
    for r in range(height):
        for c in range(width):
            if not mask[r, c] or (c - point[0]) ** 2 + (r - point[1]) ** 2 > radius**2:
                continue
            for gr in range(grid[0]):
                for gc in range(grid[1]):
                    top, bottom = gr * height / grid[0], (gr + 1) * height / grid[0]
                    left, right = gc * width / grid[1], (gc + 1) * width / grid[1]
                    out[gr, gc] += max(min(bottom, r + 1) - max(top, r), 0) * max(min(right, c + 1) - max(left, c), 0)
    return out.ravel()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(4, 4), (3, 5), (7, 7)]), st.floats(0.6, 6))
def test_pooling_equals_naive_loop(seed: int, grid: tuple[int, int], radius: float) -> None:
    random = np.random.default_rng(seed)
    masks = np.stack([random_blob(seed, 20), random_blob(seed + 1, 20)])
    points = np.concatenate([random.integers(0, 20, (3, 2)), random.uniform(-0.5, 19.49, (3, 2))])
    organ = random.integers(-1, 2, 6)
    weights = pooling_weights(points, organ, masks, radius, grid)
    assert np.isfinite(weights).all()
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)
    for i in range(6):
        ground = masks[organ[i]] if organ[i] >= 0 else np.ones((20, 20), dtype=bool)
        expected = naive_pool(points[i], ground, radius, grid)
        if expected.sum() > 0:
            np.testing.assert_allclose(weights[i], expected / expected.sum(), atol=1e-5)


def test_an_empty_pooling_mask_gives_bilinear_weights() -> None:
    masks = np.zeros((1, 28, 28), dtype=bool)
    # the centre of cell (row 1, column 2) of a 7 x 7 grid is pixel (9.5, 5.5); halfway to the next column is 11.5
    points = np.array([[9.5, 5.5], [11.5, 5.5], [0.0, 0.0]])
    weights = pooling_weights(points, np.zeros(3, dtype=int), masks, 2.0, (7, 7)).reshape(3, 7, 7)
    assert weights[0, 1, 2] == 1
    assert weights[1, 1, 2] == weights[1, 1, 3] == 0.5
    assert weights[2, 0, 0] == 1


def test_a_whole_mask_is_area_averaged() -> None:
    mask = ellipse(10, 12, 5, 7, 28)
    weights = pooling_weights(np.array([[10.0, 12.0]]), np.array([0]), mask[None], 1.0, (7, 7), np.array([True]))
    expected = mask.reshape(7, 4, 7, 4).mean((1, 3)).ravel()
    np.testing.assert_allclose(weights[0], expected / expected.sum(), rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 15), st.integers(1, 7))
def test_neighbours_equal_naive_loop(seed: int, number: int, k: int) -> None:
    # few distinct coordinates, so that there are many ties
    points = np.random.default_rng(seed).integers(0, 5, (number, 2))
    expected = np.eye(number, dtype=bool)
    for i in range(number):
        others = sorted((j for j in range(number) if j != i), key=lambda j: (((points[i] - points[j]) ** 2).sum(), j))
        for j in others[:k]:
            expected[i, j] = expected[j, i] = True
    np.testing.assert_array_equal(nearest_neighbour_adjacency(points, k), expected)


def test_symmetry_pairs_equal_naive_loop() -> None:
    masks = chest() > 0
    left_shape, right_shape = organ_shape(masks[0]), organ_shape(masks[1])
    assert left_shape is not None and right_shape is not None
    left = np.concatenate(sample_organ(left_shape, 24, 24))
    right = np.concatenate(sample_organ(right_shape, 24, 24))
    line = (masks[0].nonzero()[1].mean() + masks[1].nonzero()[1].mean()) / 2
    expected = [
        min(range(48), key=lambda j: (2 * line - x - right[j, 0]) ** 2 + (y - right[j, 1]) ** 2)
        for x, y in left.tolist()
    ]
    assert symmetry_pairs(left, right, left_shape, right_shape).tolist() == expected


def test_polar_anchors() -> None:
    points = polar_points(np.array([100.0, 50.0]), np.array([60.0, 50.0]), (1.0, 2.0), 8)
    assert points.shape == (16, 2)
    np.testing.assert_allclose(np.hypot(*(points - [100, 50]).T), [20] * 8 + [40] * 8)
    np.testing.assert_allclose(points[0], [80, 50])
    np.testing.assert_allclose(points[8], [60, 50])
    # clockwise from the left is upwards
    np.testing.assert_allclose(points[2], [100, 30], atol=1e-9)
