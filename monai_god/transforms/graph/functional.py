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
"""Sampling of nodes, pooling weights and edges of anatomy graphs, on NumPy arrays. Points are (x, y) in pixels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from .anatomy_graph import AnatomyGraph
from .modality import AnatomyError, Modality

__all__ = [
    "OrganShape",
    "build_anatomy_graph",
    "farthest_point_sampling",
    "nearest_neighbour_adjacency",
    "nearest_places",
    "organ_shape",
    "polar_points",
    "pooling_weights",
    "sample_organ",
    "symmetry_pairs",
]

Array = NDArray[Any]

#: where landmarks that are many get their names from: rings about the first end of the frame's axis, in units of half
#: its length
PLACE_RINGS = (1.0, 2.0)


@dataclass(frozen=True)
class OrganShape:
    """
    The largest connected part of a mask, in coordinates of its own box, so that nothing depends on where it lies.

    Attributes:
        offset: (x, y) of the box's corner in the image, int.
        component: bool [h, w], the part inside its box.
        outline: [M, 2] int (x, y), boundary pixels clockwise (as seen on screen) from the one closest to the organ's
            top, which is the middle of its topmost row; each pixel once.
        centroid: (x, y) float.
    """

    offset: Array
    component: Array
    outline: Array
    centroid: Array


def organ_shape(mask: Array) -> OrganShape | None:
    """
    Outline and position of the organ in a mask.

    Args:
        mask: bool [H, W].

    Returns:
        None for an empty mask.
    """
    rows, columns = mask.any(1).nonzero()[0], mask.any(0).nonzero()[0]
    if not rows.size:
        return None
    y, x = rows[0], columns[0]
    part = mask[y : rows[-1] + 1, x : columns[-1] + 1]
    labels, number = ndimage.label(part)
    if number > 1:
        part = labels == np.bincount(labels.ravel())[1:].argmax() + 1
        rows, columns = part.any(1).nonzero()[0], part.any(0).nonzero()[0]
        y, x = y + rows[0], x + columns[0]
        part = part[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    outline = _trace_outline(part)
    top = part[0].nonzero()[0].mean()
    start = ((outline[:, 0] - top) ** 2 + outline[:, 1] ** 2).argmin()
    ys, xs = part.nonzero()
    return OrganShape(np.array([x, y]), part, np.roll(outline, -start, axis=0), np.array([xs.mean(), ys.mean()]))


def _trace_outline(part: Array) -> Array:
    """
    Pixels along the outer border of a 4-connected mask whose first row holds a pixel: clockwise, each once.

    It walks along pixel edges with the mask on its right. scikit-image's ``find_contours`` gives the same border, but
    takes several times as long, which was half of the time of building a graph.

    Returns:
        [M, 2] int (x, y).
    """
    height, width = part.shape
    row = width + 1
    # edge[direction, vertex]: is there a border edge that leaves this corner of pixels to the right, down, left, up?
    padded = np.pad(part, 1)
    up_left, up_right = padded[:-1, :-1], padded[:-1, 1:]
    down_left, down_right = padded[1:, :-1], padded[1:, 1:]
    edge = np.stack(
        [down_right & ~up_right, down_left & ~down_right, up_left & ~down_left, up_right & ~up_left]
    ).reshape(4, -1)
    flat, number = edge.tobytes(), edge.shape[1]
    step = (1, row, -1, -row)
    pixel = (0, -1, -row - 1, -row)
    # turning right first keeps to the same pixel where two touch at a corner only
    turns = tuple(((d + 1) & 3, d, (d - 1) & 3) for d in range(4))
    start = vertex = int(part[0].argmax())
    direction = 0
    border = []
    while True:
        border.append(vertex + pixel[direction])
        vertex += step[direction]
        for turn in turns[direction]:
            if flat[turn * number + vertex]:
                direction = turn
                break
        if vertex == start and direction == 0:
            break
    ordered = np.array(list(dict.fromkeys(border)))
    return np.stack([ordered % row, ordered // row], axis=1)


def farthest_point_sampling(candidates: Array, count: int, chosen: Array) -> Array:
    """
    Deterministic farthest-point sampling: again and again the pixel farthest from those chosen; of equals the first.

    Args:
        candidates: bool [H, W], pixels to choose from.
        count: how many to take; all of them where there are fewer.
        chosen: [S, 2] int (x, y), S >= 1, pixels taken as chosen before the first.

    Returns:
        [<= count, 2] int (x, y), in the order of choice. "First" is by rows, then columns.
    """
    height, width = candidates.shape
    # exact in either type; the smaller one takes half the time
    kind = np.int16 if height**2 + width**2 < np.iinfo(np.int16).max else np.int32
    x, y = np.arange(width, dtype=kind), np.arange(height, dtype=kind)[:, None]
    # pixels that are no candidates, or no longer, stay at -1; a candidate among `chosen` is at 0 and comes last
    nearest = np.where(candidates, np.iinfo(kind).max, -1).astype(kind)
    distance = np.empty_like(nearest)
    for px, py in chosen.tolist():
        np.add(np.square(x - px), np.square(y - py), out=distance)
        np.minimum(nearest, distance, out=nearest)
    points = np.empty((min(count, int(candidates.sum())), 2), dtype=np.int64)
    for i in range(len(points)):
        py, px = divmod(int(nearest.argmax()), width)
        points[i] = px, py
        np.add(np.square(x - px), np.square(y - py), out=distance)
        np.minimum(nearest, distance, out=nearest)
        nearest[py, px] = -1
    return points


@lru_cache(maxsize=64)
def _round_template(boundary: int, interior: int) -> Array:
    """[interior, 2] places of interior nodes in the unit box: those of a disc that fills it."""
    side = 100
    rows, columns = np.mgrid[:side, :side] + (0.5 - side / 2)
    shape = organ_shape(rows**2 + columns**2 < (side / 2) ** 2)
    assert shape is not None
    return (sample_organ(shape, boundary, interior, "rank")[1] + 0.5) / side


def sample_organ(shape: OrganShape, boundary: int, interior: int, interior_order: str = "place") -> tuple[Array, Array]:
    """
    Nodes of one organ: boundary nodes in the order of the outline, from the organ's top, and interior nodes.

    Boundary nodes are sampled among the outline's pixels. Interior nodes are sampled among the other pixels and start
    from the boundary nodes, so that they fill the inside instead of doubling the outline.

    Args:
        shape: the organ.
        boundary: number of boundary nodes.
        interior: number of interior nodes.
        interior_order: ``"rank"``: in the order of choice; or ``"place"``: the same nodes, in the order of the places
            of a template that they lie nearest to in the organ's box (optimal assignment), so that the node of one name
            lies at about the same place in every image.

    Returns:
        (x, y) in the image, int: [<= boundary, 2] and [<= interior, 2].
    """
    outline = shape.outline
    place = np.full(shape.component.shape, -1)
    place[outline[:, 1], outline[:, 0]] = np.arange(len(outline))
    points = farthest_point_sampling(place > 0, boundary - 1, outline[:1])
    nodes = outline[np.sort(np.concatenate([[0], place[points[:, 1], points[:, 0]]]))]
    inner = farthest_point_sampling(shape.component & (place < 0), interior, nodes)
    if interior_order == "place" and len(inner) > 1:
        where = (inner + 0.5) / shape.component.shape[::-1]
        cost = cdist(_round_template(max(boundary, 1), len(inner)), where, "sqeuclidean")
        inner = inner[linear_sum_assignment(cost)[1]]
    return nodes + shape.offset, inner + shape.offset


def polar_points(origin: Array, target: Array, rings: tuple[float, ...], angles: int) -> Array:
    """
    Anchors on rings about ``origin``: ring by ring, from the direction of ``target`` on, clockwise on the screen.

    Args:
        origin: (x, y).
        target: (x, y).
        rings: radii in units of half the distance from origin to target.
        angles: points on each ring.

    Returns:
        [len(rings) * angles, 2] float.
    """
    along = (np.asarray(target, dtype=np.float64) - origin) / 2
    across = np.array([-along[1], along[0]])
    theta = np.arange(angles) * (2 * np.pi / angles)
    circle = np.cos(theta)[:, None] * along + np.sin(theta)[:, None] * across
    return np.concatenate([origin + radius * circle for radius in rings])


def nearest_places(points: Array, places: Array) -> Array:
    """
    Which place each point takes: no two the same one, and the sum of squared distances as small as can be.

    Args:
        points: [N, 2].
        places: [M, 2], M >= N.

    Returns:
        [N] int indices into ``places``.
    """
    return linear_sum_assignment(cdist(points, places, "sqeuclidean"))[1]


@lru_cache(maxsize=32)
def _area_weights(size: int, cells: int, pad: int) -> Array:
    """[cells, size + 2 pad] share of each cell that each pixel covers; padding pixels lie outside."""
    edges = np.arange(cells + 1) * (size / cells)
    pixel = np.arange(-pad, size + pad)
    overlap = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
    overlap = overlap.clip(0) * ((pixel >= 0) & (pixel < size))
    return (overlap * (cells / size)).astype(np.float32)


def _bilinear_weights(points: Array, size: tuple[int, int], grid: tuple[int, int]) -> Array:
    """[N, grid cells] weights of bilinear interpolation between the centres of the cells."""
    axes = []
    for coordinate, length, cells in ((points[:, 1], size[0], grid[0]), (points[:, 0], size[1], grid[1])):
        u = ((coordinate + 0.5) * (cells / length) - 0.5).clip(0, cells - 1)
        axes.append((1 - np.abs(u[:, None] - np.arange(cells))).clip(0))
    return np.einsum("nr,nc->nrc", *axes).reshape(len(points), -1).astype(np.float32)


def pooling_weights(
    points: Array, organ: Array, masks: Array, radius: float, grid: tuple[int, int], whole: Array | None = None
) -> Array:
    """
    Pooling weights M_i of Eq. 1: a disc at each node, within its organ's mask, area-averaged to the feature grid.

    Args:
        points: [N, 2] (x, y) pixels.
        organ: [N] int, the node's channel of ``masks``, or -1 for none, whose disc is cut by the image's edge only.
        masks: bool [C, H, W].
        radius: of the disc, in pixels: pixels whose centre lies within it belong to it.
        grid: (height, width) of the feature map.
        whole: [N] bool, nodes whose mask M_i is their organ's whole mask instead.

    Returns:
        float32 [N, height * width], row-major; rows sum to 1. A node with an empty mask gets the weights of bilinear
        interpolation at its position.
    """
    height, width = masks.shape[1:]
    reach = int(np.ceil(radius))
    pad = reach + 1
    base = np.floor(points).astype(np.int64)
    steps = np.arange(-reach, reach + 2)
    columns, rows = base[:, :1] + steps, base[:, 1:] + steps
    disc = ((columns - points[:, :1]) ** 2)[:, None, :] + ((rows - points[:, 1:]) ** 2)[:, :, None] <= radius**2
    # nodes lie in the image, so that the padding takes all of every window
    columns, rows = columns + pad, rows + pad
    ground = np.zeros((len(masks) + 1, height + 2 * pad, width + 2 * pad), dtype=bool)
    ground[:-1, pad:-pad, pad:-pad] = masks
    ground[-1, pad:-pad, pad:-pad] = True
    line = (organ % len(ground))[:, None] * ground.shape[1] + rows
    disc &= ground.reshape(-1).take((line * ground.shape[2])[:, :, None] + columns[:, None, :])
    down = _area_weights(height, grid[0], pad).T[rows].transpose(0, 2, 1)
    across = _area_weights(width, grid[1], pad).T[columns]
    weights = (down @ disc.astype(np.float32) @ across).reshape(len(points), grid[0] * grid[1])
    if whole is not None and whole.any():
        regions = masks[organ[whole]].astype(np.float32)
        regions = _area_weights(height, grid[0], 0) @ regions @ _area_weights(width, grid[1], 0).T
        weights[whole] = regions.reshape(len(regions), -1)
    total = weights.sum(1, keepdims=True)
    empty = total[:, 0] <= 0
    if empty.any():
        weights[empty] = _bilinear_weights(points[empty], (height, width), grid)
        total[empty] = 1
    return weights / total


def nearest_neighbour_adjacency(points: Array, k: int) -> Array:
    """
    Symmetrised k nearest neighbours with self-loops; of equally near nodes the first.

    Args:
        points: [N, 2].
        k: neighbours of each node, itself not counted; all others where there are fewer.

    Returns:
        bool [N, N], symmetric.
    """
    number = len(points)
    distance = cdist(points, points, "sqeuclidean")
    np.fill_diagonal(distance, np.inf)
    nearest = distance.argsort(axis=1, kind="stable")[:, : max(min(k, number - 1), 0)]
    adjacency = np.eye(number, dtype=bool)
    adjacency[np.arange(number)[:, None], nearest] = True
    return adjacency | adjacency.T


def symmetry_pairs(left: Array, right: Array, left_shape: OrganShape, right_shape: OrganShape) -> Array:
    """
    For each node of the left organ the node of the right one nearest to its mirror image.

    The mirror is the vertical line halfway between the two centroids; the line between them is not used for its tilt,
    since one diaphragm stands higher in most people.

    Args:
        left: [N, 2] int (x, y).
        right: [M, 2] int, M >= 1.

    Returns:
        [N] indices into ``right``; of equally near ones the first.
    """
    # relative to the left organ's box, so that a shift of the image changes no rounding
    middle = left_shape.centroid[0] + (right_shape.centroid[0] + (right_shape.offset[0] - left_shape.offset[0]))
    mirrored = np.stack([middle - (left[:, 0] - left_shape.offset[0]), left[:, 1] - left_shape.offset[1]], axis=1)
    return cdist(mirrored, right - left_shape.offset, "sqeuclidean").argmin(1)


def _words(name: str) -> str:
    return name.replace("_", " ")


def build_anatomy_graph(
    masks: Array,
    landmarks: Mapping[str, Array],
    modality: Modality,
    scale: float = 1.0,
    k: int = 6,
    radius: float = 0.04,
    grid: tuple[int, int] = (14, 14),
    interior_order: str = "place",
) -> AnatomyGraph:
    """
    Anatomy graph of one image (paper Sec. 2.1); see :class:`BuildAnatomyGraph`.

    Args:
        masks: bool [C, S, S], channels as ``modality.organs``.
        landmarks: name to [K, 2] float (x, y) in pixels of ``masks``.

    Returns:
        A graph, of no nodes if the anatomy gives none; ``problems`` says what is missing.
    """
    size = masks.shape[1]
    channel = {organ: i for i, organ in enumerate(modality.organs)}
    problems: list[str] = []
    view = None
    if modality.field_of_view is not None:
        view = masks[channel[modality.field_of_view]]
        if not view.any():
            view = None
            problems.append(f"{_words(modality.field_of_view)} mask empty")
    wanted: dict[str, dict[str, int]] = {}
    for group, _, count in modality.spans(scale):
        if group.source[0] in ("boundary", "interior"):
            wanted.setdefault(group.source[1], {})[group.source[0]] = count
    shapes: dict[str, OrganShape] = {}
    samples: dict[tuple[str, str], Array] = {}
    for organ, counts in wanted.items():
        shape = organ_shape(masks[channel[organ]])
        if shape is None:
            problems.append(f"{_words(organ)} mask empty")
            continue
        shapes[organ] = shape
        boundary, interior = sample_organ(shape, counts.get("boundary", 1), counts.get("interior", 0), interior_order)
        samples["boundary", organ], samples["interior", organ] = boundary, interior

    def landmark(name: str) -> Array:
        return landmarks.get(name, np.zeros((0, 2)))

    def centre(name: str) -> Array:
        """[0 or 1, 2]: the landmark, or else the centroid of the mask of that name."""
        points = landmark(name)[:1]
        if not len(points) and name in channel:
            shape = organ_shape(masks[channel[name]])
            if shape is not None:
                points = (shape.centroid + shape.offset)[None]
        return points

    points: list[Array] = []
    slots: list[Array] = []
    organs: list[Array] = []
    types: list[Array] = []
    whole: list[Array] = []
    for group, start, count in modality.spans(scale):
        kind, name = group.source[:2]
        own, entire, offsets = -1, False, None
        if kind in ("boundary", "interior"):
            own = channel[name]
            if name not in shapes:
                continue
            found = samples[kind, name]
            if len(found) < count:
                problems.append(f"{_words(name)} mask too small: {len(found)} of {count} {kind} nodes")
        elif kind == "region":
            found = landmark(group.source[2])[:1]
            found = found if len(found) else centre(name)
            entire = bool(masks[channel[name]].any())
            own = channel[name] if entire else -1
            if not len(found):
                problems.append(f"{_words(name)} not found")
            elif not entire:
                problems.append(f"{_words(name)} mask empty: pooled from a disc at its landmark")
        elif kind == "landmark":
            found = landmark(name)[:count]
            if not len(found):
                problems.append(f"{_words(name)} not found")
            elif count > 1 and interior_order == "place" and modality.frame[0] == "axis":
                ends = [centre(end) for end in modality.frame[1:]]
                if all(len(end) for end in ends):
                    template = polar_points(ends[0][0], ends[1][0], PLACE_RINGS, -(-count // len(PLACE_RINGS)))
                    taken = nearest_places(found, template[:count])
                    found, offsets = found[taken.argsort()], np.sort(taken)
        else:
            origin, target = centre(name), centre(group.source[2])
            missing = [_words(n) for n, p in ((name, origin), (group.source[2], target)) if not len(p)]
            if not missing and np.hypot(*(origin - target)[0]) < 1:
                missing = [f"distance between {_words(name)} and {_words(group.source[2])}"]
            if missing:
                problems.append(f"no {group.name}s without {' and '.join(missing)}")
                continue
            found = polar_points(origin[0], target[0], group.rings, count // len(group.rings))
        place = start + (np.arange(len(found)) if offsets is None else offsets)
        if own < 0 or entire:
            pixel = np.floor(found + 0.5).astype(np.int64)
            seen = ((pixel >= 0) & (pixel < size)).all(1)
            if view is not None:
                seen[seen] = view[pixel[seen, 1], pixel[seen, 0]]
            if kind != "polar" and not seen.all():
                problems.append(f"{group.name} outside the field of view: {int((~seen).sum())} of {len(found)}")
            found, place = found[seen], place[seen]
        points.append(np.asarray(found, dtype=np.float64))
        slots.append(place)
        organs.append(np.full(len(found), own))
        types.append(np.full(len(found), group.type))
        whole.append(np.full(len(found), entire))

    names = modality.node_names(scale)
    at = np.concatenate(points) if points else np.zeros((0, 2))
    slot = np.concatenate(slots) if slots else np.zeros(0, dtype=np.int64)
    owner = np.concatenate(organs) if organs else np.zeros(0, dtype=np.int64)
    node_type = np.concatenate(types) if types else np.zeros(0, dtype=np.int64)
    entirely = np.concatenate(whole) if whole else np.zeros(0, dtype=bool)
    adjacency = nearest_neighbour_adjacency(at, k)
    for left, right in modality.symmetry:
        a, b = (owner == channel[left]).nonzero()[0], (owner == channel[right]).nonzero()[0]
        if len(a) and len(b):
            partner = b[symmetry_pairs(at[a], at[b], shapes[left], shapes[right])]
            adjacency[a, partner] = adjacency[partner, a] = True
    return AnatomyGraph(
        node_type=torch.from_numpy(node_type),
        pos=torch.from_numpy(((at + 0.5) / size).astype(np.float32)),
        pool=torch.from_numpy(pooling_weights(at, owner, masks, radius * size, grid, entirely)),
        edge_index=torch.from_numpy(np.stack(adjacency.nonzero())),
        slot=torch.from_numpy(slot),
        node_name=[names[i] for i in slot],
        problems=problems,
    )


def require_nodes(graph: AnatomyGraph, context: str = "") -> AnatomyGraph:
    """
    The graph itself.

    Raises:
        AnatomyError: when it has no nodes.
    """
    if graph.num_nodes == 0:
        raise AnatomyError(
            f"no anatomy to build a graph from{context}: {'; '.join(graph.problems)}. Check the masks and landmarks of "
            "this image, or leave it out."
        )
    return graph
