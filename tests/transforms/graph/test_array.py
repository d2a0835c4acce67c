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

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from monai_god.transforms.graph import AnatomyError, BuildAnatomyGraph, DropNodes, get_modality
from monai_god.transforms.graph.functional import polar_points
from tests.anatomy_masks import chest, ellipse, fundus

PIXELS = 224


def pixels(graph) -> np.ndarray:
    """Nodes in pixels of the 224 frame; exact, since they lie on pixel centres."""
    return np.rint(graph.pos.double().numpy() * PIXELS - 0.5).astype(int)


def test_chest_graph_has_128_nodes_of_six_types_in_the_fixed_order() -> None:
    graph = BuildAnatomyGraph("cxr")(chest())
    assert graph.num_nodes == 128
    assert torch.bincount(graph.node_type).tolist() == [24, 24, 24, 24, 16, 16]
    assert graph.slot.tolist() == list(range(128))
    assert graph.node_name == list(get_modality("cxr").node_names())
    assert graph.node_name[7] == "left lung boundary 07"
    assert graph.problems == []
    assert graph.pos.dtype == torch.float32 and graph.pos.min() > 0 and graph.pos.max() < 1
    assert graph.pool.shape == (128, 196) and graph.pool.dtype == torch.float32
    torch.testing.assert_close(graph.pool.sum(1), torch.ones(128))
    organ = np.array([0] * 48 + [1] * 48 + [2] * 32)
    at = pixels(graph)
    assert chest()[organ, at[:, 1], at[:, 0]].all()
    # the patient's left lung is on the image's right
    assert graph.pos[:48, 0].mean() > graph.pos[48:96, 0].mean()


@pytest.mark.parametrize(
    ("scale", "lung", "heart"), [(0.5, 12, 8), (0.75, 18, 12), (1.0, 24, 16), (1.5, 36, 24), (2.0, 48, 32)]
)
def test_granularity(scale: float, lung: int, heart: int) -> None:
    graph = BuildAnatomyGraph("cxr", scale=scale)(chest())
    assert torch.bincount(graph.node_type).tolist() == [lung] * 4 + [heart] * 2
    assert graph.num_nodes == get_modality("cxr").num_nodes(scale)


def test_edges_are_symmetric_with_loops_and_mirror_partners() -> None:
    graph = BuildAnatomyGraph("cxr")(chest())
    edges = set(map(tuple, graph.edge_index.T.tolist()))
    assert len(edges) == graph.edge_index.shape[1]
    assert all((b, a) in edges for a, b in edges)
    assert all((i, i) in edges for i in range(128))
    masks = chest()
    line = sum((masks[i].nonzero()[1].mean() + 0.5) / PIXELS for i in (0, 1)) / 2
    for i in range(48):
        x, y = graph.pos[i].tolist()
        mirrored = torch.tensor([2 * line - x, y])
        distance = (graph.pos[48:96] - mirrored).square().sum(1)
        # the partner is the nearest one; two may be equally near within rounding
        near = (distance <= distance.min() + 1e-9).nonzero()[:, 0] + 48
        assert any((i, int(j)) in edges for j in near)


@pytest.mark.parametrize("modality_scale", [0.5, 1.0])
def test_moved_masks_give_the_same_nodes_moved(modality_scale: float) -> None:
    build = BuildAnatomyGraph("cxr", scale=modality_scale)
    graph, moved = build(chest()), build(np.roll(chest(), (-2, 3), axis=(1, 2)))
    np.testing.assert_array_equal(pixels(moved), pixels(graph) + [3, -2])
    assert torch.equal(moved.edge_index, graph.edge_index)
    assert moved.node_name == graph.node_name


@settings(max_examples=20, deadline=None)
@given(st.integers(-15, 15), st.integers(-15, 15), st.integers(0, 1000))
def test_translation_equivariance_of_ragged_masks(dx: int, dy: int, seed: int) -> None:
    noise = np.random.default_rng(seed).random((3, PIXELS, PIXELS)) < 0.97
    masks = chest() * noise
    build = BuildAnatomyGraph("cxr")
    graph, moved = build(masks), build(np.roll(masks, (dy, dx), axis=(1, 2)))
    np.testing.assert_array_equal(pixels(moved), pixels(graph) + [dx, dy])
    assert torch.equal(moved.edge_index, graph.edge_index)


def test_interior_nodes_of_one_name_stay_near_each_other() -> None:
    masks, other = chest(), chest()
    # another breath: lungs of other proportions
    other[0], other[1] = ellipse(153, 100, 36, 66), ellipse(70, 96, 34, 82)
    moved = {}
    for order in ("rank", "place"):
        build = BuildAnatomyGraph("cxr", interior_order=order)
        first, second = build(masks), build(other)
        inside = (first.node_type == 1) | (first.node_type == 3)
        moved[order] = float((first.pos - second.pos)[inside].norm(dim=1).mean()) * PIXELS
        # only the order differs
        assert set(map(tuple, first.pos.tolist())) == set(map(tuple, BuildAnatomyGraph("cxr")(masks).pos.tolist()))
    assert moved["place"] < 14 < 20 < moved["rank"]
    with pytest.raises(ValueError, match="interior_order"):
        BuildAnatomyGraph("cxr", interior_order="size")


def test_same_masks_give_the_same_graph() -> None:
    first, second = BuildAnatomyGraph("cxr")(chest()), BuildAnatomyGraph("cxr")(torch.from_numpy(chest()))
    for key in ("pos", "pool", "edge_index", "node_type", "slot"):
        assert torch.equal(first[key], second[key])


def test_pooling_stays_within_the_organ() -> None:
    masks = chest()
    graph = BuildAnatomyGraph("cxr")(masks)
    cells = torch.from_numpy(masks.reshape(3, 14, 16, 14, 16).any((2, 4)).reshape(3, 196))
    organ = torch.tensor([0] * 48 + [1] * 48 + [2] * 32)
    assert graph.pool[~cells[organ]].sum() == 0


@pytest.mark.parametrize(("missing", "names"), [(0, "left lung"), (1, "right lung"), (2, "heart")])
def test_a_missing_organ_gives_fewer_nodes_and_a_reason(missing: int, names: str) -> None:
    masks = chest()
    masks[missing] = 0
    graph = BuildAnatomyGraph("cxr")(masks)
    complete = BuildAnatomyGraph("cxr")(chest())
    assert graph.problems == [f"{names} mask empty"]
    kept = [i for i in range(128) if not complete.node_name[i].startswith(names)]
    assert graph.slot.tolist() == kept
    assert graph.node_name == [complete.node_name[i] for i in kept]
    assert torch.equal(graph.pos, complete.pos[kept])


def test_a_tiny_heart_gives_what_it_can() -> None:
    masks = chest()
    masks[2] = ellipse(120, 130, 2.1, 2.1)
    graph = BuildAnatomyGraph("cxr")(masks)
    assert len(graph.problems) == 2 and all("heart mask too small" in problem for problem in graph.problems)
    assert 96 < graph.num_nodes < 128
    assert graph.node_name == [get_modality("cxr").node_names()[i] for i in graph.slot]
    assert torch.isfinite(graph.pool).all()


def test_no_anatomy_is_an_error_unless_an_empty_graph_is_asked_for() -> None:
    empty = np.zeros((3, 64, 64), dtype=np.uint8)
    with pytest.raises(AnatomyError, match="left lung mask empty; right lung mask empty; heart mask empty"):
        BuildAnatomyGraph("cxr")(empty)
    graph = BuildAnatomyGraph("cxr", allow_empty=True)(empty)
    assert graph.num_nodes == 0 and graph.edge_index.shape == (2, 0) and graph.pool.shape == (0, 196)
    assert len(graph.problems) == 3


@pytest.mark.parametrize(
    ("anatomy", "message"),
    [
        (np.zeros((2, 8, 8), dtype=np.uint8), "left_lung, right_lung, heart"),
        (np.zeros((3, 8, 9), dtype=np.uint8), "square"),
        (np.full((3, 8, 8), 255, dtype=np.uint8), "0 and 1"),
        (np.full((3, 8, 8), np.nan, dtype=np.float32), "0 and 1"),
    ],
)
def test_wrong_masks(anatomy: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BuildAnatomyGraph("cxr")(anatomy)


@pytest.mark.parametrize("settings", [{"scale": 0}, {"k": 0}, {"radius": 0}, {"grid": (0, 3)}, {"modality": "mri"}])
def test_wrong_settings(settings: dict) -> None:
    with pytest.raises(ValueError):
        BuildAnatomyGraph(**{"modality": "cxr", **settings})


def test_fundus_graph() -> None:
    masks, landmarks = fundus()
    graph = BuildAnatomyGraph("fundus", interior_order="rank")(masks, landmarks)
    assert graph.problems == []
    assert graph.node_name[:6] == ["optic disc", "macula", *(f"vessel junction {i:02d}" for i in range(4))]
    assert torch.bincount(graph.node_type)[:3].tolist() == [1, 1, 4]
    names = get_modality("fundus").node_names()
    assert len(names) == 34
    assert graph.node_name == [names[i] for i in graph.slot]
    view = masks[2]
    at = pixels(graph)
    assert view[at[:, 1], at[:, 0]].all()
    # the disc's own mask, area-averaged
    expected = masks[0].reshape(14, 16, 14, 16).mean((1, 3)).ravel()
    np.testing.assert_allclose(graph.pool[0], expected / expected.sum(), atol=1e-6)
    # angle 0 of the first ring lies halfway between disc and fovea, angle 0 of the second at the fovea
    disc, fovea = graph.pos[0], graph.pos[1]
    place = {name: at for name, at in zip(graph.node_name, graph.pos, strict=True)}
    torch.testing.assert_close(place["polar anchor 00"], (disc + fovea) / 2)
    torch.testing.assert_close(place["polar anchor 08"], fovea)
    # the outer ring leaves the view on the nasal side
    assert graph.num_nodes < 22 and "polar anchor 12" not in graph.node_name


def test_junctions_are_named_by_their_place() -> None:
    """Whatever their strength: one that is found or lost does not rename the others."""
    masks, landmarks = fundus()
    masks[2] = 1
    landmarks["optic_disc"] = np.array([[150.0, 108.0]])
    origin, target = landmarks["optic_disc"][0], landmarks["fovea"][0]
    anchors = polar_points(origin, target, (1.0, 2.0), 8)
    inside = ((anchors > 5) & (anchors < masks.shape[1] - 5)).all(1).nonzero()[0][:6]
    rng = np.random.default_rng(0)
    for _ in range(5):
        chosen = rng.permutation(inside)[: rng.integers(2, len(inside) + 1)]
        landmarks["junctions"] = anchors[chosen] + rng.normal(0, 1, (len(chosen), 2))
        graph = BuildAnatomyGraph("fundus")(masks, landmarks)
        found = [name for name in graph.node_name if name.startswith("vessel")]
        assert found == [f"vessel junction {k:02d}" for k in sorted(chosen)]


@pytest.mark.parametrize(("scale", "complete"), [(0.5, 2 + 8 + 8), (1.0, 34), (2.0, 2 + 32 + 32)])
def test_fundus_granularity(scale: float, complete: int) -> None:
    assert get_modality("fundus").num_nodes(scale) == complete
    view, landmarks = fundus()
    landmarks["junctions"] = np.random.default_rng(0).uniform(60, 160, (40, 2))
    graph = BuildAnatomyGraph("fundus", scale=scale)(view, landmarks)
    assert int((graph.node_type == 2).sum()) == 16 * scale


def test_fundus_without_disc_or_fovea_says_so() -> None:
    masks, landmarks = fundus()
    without = BuildAnatomyGraph("fundus")(masks, {"junctions": landmarks["junctions"]})
    assert without.problems == ["fovea not found", "no polar anchors without fovea"]
    assert without.node_type.tolist() == [0, 2, 2, 2, 2]
    masks[0] = 0
    nothing = BuildAnatomyGraph("fundus")(masks, {"fovea": landmarks["fovea"]})
    assert nothing.node_name == ["macula"]
    assert nothing.problems == ["optic disc not found", "junctions not found", "no polar anchors without optic disc"]
    pooled = BuildAnatomyGraph("fundus")(masks, {**landmarks, "optic_disc": np.array([[150, 108]])})
    assert pooled.problems == ["optic disc mask empty: pooled from a disc at its landmark"]


def test_landmarks_in_pixels_of_a_larger_image() -> None:
    masks, landmarks = fundus()
    double = {name: (at + 0.5) * 2 - 0.5 for name, at in landmarks.items()}
    graph, other = BuildAnatomyGraph("fundus")(masks, landmarks), BuildAnatomyGraph("fundus")(masks, double, (448, 448))
    torch.testing.assert_close(graph.pos, other.pos)
    with pytest.raises(ValueError, match="fovea"):
        BuildAnatomyGraph("fundus")(masks, {"fovea": np.array([[np.nan, 3]])})


def test_fovea_outside_the_view_is_reported() -> None:
    masks, landmarks = fundus()
    landmarks["fovea"] = np.array([[2.0, 2.0]])
    graph = BuildAnatomyGraph("fundus")(masks, landmarks)
    assert "macula" not in graph.node_name
    assert "macula outside the field of view: 1 of 1" in graph.problems


@settings(max_examples=20, deadline=None)
@given(st.floats(0, 0.95), st.integers(0, 100))
def test_dropping_nodes(fraction: float, seed: int) -> None:
    graph = BuildAnatomyGraph("cxr", scale=0.5)(chest())
    number = graph.num_nodes
    dropped = DropNodes(fraction, seed)(graph)
    assert dropped.num_nodes == number - int(fraction * number + 0.5)
    assert graph.num_nodes == number
    kept = dropped.slot
    assert torch.equal(dropped.pos, graph.pos[kept]) and torch.equal(dropped.pool, graph.pool[kept])
    assert dropped.node_name == [graph.node_name[i] for i in kept]
    expected = {(a, b) for a, b in graph.edge_index.T.tolist() if a in set(kept.tolist()) and b in set(kept.tolist())}
    assert {(int(kept[a]), int(kept[b])) for a, b in dropped.edge_index.T.tolist()} == expected
    assert torch.equal(DropNodes(fraction, seed)(graph).slot, kept)


def test_dropping_depends_on_seed_and_image_and_leaves_a_node() -> None:
    build = BuildAnatomyGraph("cxr")
    graph, other = build(chest()), build(chest(3, 1))
    kept = DropNodes(0.5, 0)(graph).slot
    assert not torch.equal(kept, DropNodes(0.5, 1)(graph).slot)
    assert not torch.equal(kept, DropNodes(0.5, 0)(other).slot)
    assert DropNodes(0.999)(graph).num_nodes == 1
    with pytest.raises(ValueError, match="fraction"):
        DropNodes(1.0)


def test_real_masks(shared_data: Path) -> None:
    folder = shared_data / "cxr"
    items = json.loads((folder / "datalist.json").read_text())
    complete = [i for s in ("training", "testing") for i in items[s] if "left_lung" in i and "right_lung" in i][:12]
    assert complete
    for item in complete:
        masks = [np.array(Image.open(folder / item[organ]).convert("L")) > 0 for organ in ("left_lung", "right_lung")]
        side = max(masks[0].shape)
        square = np.zeros((3, side, side), dtype=np.uint8)
        for channel, mask in enumerate(masks):
            square[channel, : mask.shape[0], : mask.shape[1]] = mask
        graph = BuildAnatomyGraph("cxr")(square)
        assert torch.bincount(graph.node_type).tolist() == [24] * 4
        assert graph.problems == ["heart mask empty"]
        torch.testing.assert_close(graph.pool.sum(1), torch.ones(96))
