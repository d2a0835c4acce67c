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

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.data import MetaTensor
from PIL import Image
from scipy import ndimage

from monai_god.transforms import (
    CanonicalizeFundus,
    CanonicalizeFundusd,
    LoadMedicalImage,
    eye_side,
    find_field_of_view,
    vessel_junctions,
)

SIZE = 256


def photograph(x=128.0, y=128.0, r=110.0, light=0.6, shape=(SIZE, SIZE), cut=(0, 0)) -> tuple[np.ndarray, np.ndarray]:
    """A made photograph [3, H, W] and its field of view; ``cut``: rows black at top and bottom."""
    height, width = shape
    yy, xx = np.mgrid[:height, :width]
    field = (xx - x) ** 2 + (yy - y) ** 2 <= r**2
    field &= (yy >= cut[0]) & (yy < height - cut[1])
    rng = np.random.default_rng(0)
    texture = ndimage.gaussian_filter(rng.standard_normal(shape), 4)
    grey = light * (1 + 0.1 * texture / texture.std()) * field + 0.004 * rng.random(shape)
    return np.clip(np.stack([grey, 0.6 * grey, 0.3 * grey]), 0, 1).astype(np.float32), field


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    return 2 * (a & b).sum() / (a.sum() + b.sum())


@settings(max_examples=20, deadline=None)
@given(
    x=st.floats(100, 156),
    y=st.floats(100, 156),
    r=st.floats(80, 140),
    light=st.floats(0.06, 0.95),
    cut=st.integers(0, 40),
)
def test_round_fields_of_all_places_and_exposures(x, y, r, light, cut):
    image, field = photograph(x, y, r, light, cut=(cut, cut))
    found = find_field_of_view(image)
    assert not found.problems
    assert overlap(found.mask, field) > 0.97
    assert np.hypot(found.circle[0] - x, found.circle[1] - y) < 5 and abs(found.circle[2] - r) < 5


def test_nearly_black_but_valid():
    image, field = photograph(light=0.03)
    assert overlap(find_field_of_view(image).mask, field) > 0.97


def test_shadow_inside_the_field():
    image, field = photograph()
    yy, xx = np.mgrid[:SIZE, :SIZE]
    image *= 1 - np.exp(-(((xx - 230) / 40) ** 2 + ((yy - 128) / 40) ** 2))
    assert overlap(find_field_of_view(image).mask, field) > 0.96


def test_flare_at_the_rim():
    image, field = photograph()
    yy, xx = np.mgrid[:SIZE, :SIZE]
    image += 0.3 * np.exp(-(((xx - 20) / 12) ** 2 + ((yy - 128) / 30) ** 2))
    assert overlap(find_field_of_view(image.clip(0, 1)).mask, field) > 0.95


@pytest.mark.parametrize("notch", ["square", "triangle", "round", "wide"])
def test_notches_do_not_move_the_circle(notch):
    image, field = photograph()
    yy, xx = np.mgrid[:SIZE, :SIZE]
    dx, dy = xx - 206, yy - 50  # on the rim, at the upper right
    shape = {
        "square": (abs(dx) < 9) & (abs(dy) < 9),
        "triangle": (abs(dx) + abs(dy)) < 12,
        "round": dx**2 + dy**2 < 100,
        "wide": (abs(dx) < 25) & (abs(dy) < 6),
    }[notch]
    found = find_field_of_view(np.where(shape, 0.6, image))
    assert overlap(found.mask, field) > 0.97 and abs(found.circle[2] - 110) < 4


def test_no_black_border():
    image = np.full((3, 100, 120), 0.5, np.float32) + 0.1 * np.random.default_rng(0).random((3, 100, 120)).astype(
        np.float32
    )
    found = find_field_of_view(image)
    assert found.mask.all() and found.mask.shape == (100, 120) and "no black border" in found.problems[0]


def test_greyscale_and_a_squeezed_image():
    image, field = photograph()
    assert overlap(find_field_of_view(image[:1]).mask, field) > 0.97
    squeezed = image[:, :, ::2]  # an ellipse: no circle, but still the mask of what is not black
    found = find_field_of_view(squeezed)
    assert overlap(found.mask, field[:, ::2]) > 0.9


@pytest.mark.parametrize("source", ["chasedb1", "grape", "hrf", "idrid", "mfiddr", "papila", "ridb"])
def test_real_cameras(shared_data, source):
    data = json.loads((shared_data / "fundus" / "datalist.json").read_text())
    items = [item for section in data.values() for item in section if item["source"] == source][:6]
    for item in items:
        found = find_field_of_view(LoadMedicalImage()(shared_data / "fundus" / item["image"]))
        assert not found.problems, item["image"]
        assert 0.45 < found.mask.mean() < 0.99


def tree(angle: float = 0.0) -> tuple[np.ndarray, list[tuple[float, float]]]:
    """Two trunks and three branches, and where they meet."""
    mask = np.zeros((SIZE, SIZE), bool)
    centre = np.array([128.0, 128.0])
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    joints = [(128.0, 90.0), (128.0, 150.0), (70.0, 90.0)]
    lines = [((128, 20), (128, 235), 4), ((128, 90), (40, 90), 3), ((128, 150), (220, 190), 3), ((70, 90), (60, 30), 2)]
    yy, xx = np.mgrid[:SIZE, :SIZE]
    for a, b, width in lines:
        a, b = (turn @ (np.array(p, float) - centre) + centre for p in (a, b))
        t = np.clip(((xx - a[0]) * (b - a)[0] + (yy - a[1]) * (b - a)[1]) / ((b - a) ** 2).sum(), 0, 1)
        mask |= np.hypot(xx - a[0] - t * (b - a)[0], yy - a[1] - t * (b - a)[1]) <= width
    return mask, [tuple(turn @ (np.array(j) - centre) + centre) for j in joints]


@pytest.mark.parametrize("degrees", [0, 5, 40])
def test_junctions_of_a_made_tree(degrees):
    mask, joints = tree(np.deg2rad(degrees))
    found = vessel_junctions(mask)
    assert len(found) == 3
    for joint in joints:
        assert np.hypot(*(found - joint).T).min() < 6
    # the widest vessels come first
    assert min(np.hypot(*(found[0] - j)) for j in joints[:2]) < 6
    assert vessel_junctions(mask, count=1).shape == (1, 2) and vessel_junctions(np.zeros((64, 64))).shape == (0, 2)


def test_junctions_survive_a_small_rotation_on_real_vessels(shared_data):
    folder = shared_data / "fundus"
    data = json.loads((folder / "datalist.json").read_text())
    items = [item for item in data["training"] if "vessels" in item][:6]
    kept, total = 0, 0
    for item in items:
        mask = Image.open(folder / item["vessels"]).convert("L")
        mask = mask.resize((512, round(512 * mask.height / mask.width)))
        one = vessel_junctions(np.asarray(mask) > 127, count=32)
        two = vessel_junctions(np.asarray(mask.rotate(-5, Image.Resampling.BILINEAR)) > 127, count=48)
        a = np.deg2rad(5)
        centre = (np.array(mask.size) - 1) / 2
        moved = (one - centre) @ np.array([[np.cos(a), np.sin(a)], [-np.sin(a), np.cos(a)]]) + centre
        near = np.hypot(*(moved[:, None] - two[None]).transpose(2, 0, 1)).min(1)
        kept, total = kept + (near < 8).sum(), total + len(one)
    assert kept / total >= 0.8


def test_side_of_the_eye():
    assert eye_side({"optic_disc": [[200, 100]], "fovea": [[100, 110]]}) == "R"
    assert eye_side({"optic_disc": [[50, 100]], "fovea": [[100, 110]]}) == "L"
    assert eye_side({"optic_disc": [[100, 20]], "fovea": [[105, 110]]}) is None
    assert eye_side({"optic_disc": [[100, 20]]}) is None and eye_side(None) is None
    assert eye_side({"optic_disc": [[np.nan, 20]], "fovea": [[105, 110]]}) is None


@settings(max_examples=20, deadline=None)
@given(width=st.integers(2, 20), x=st.integers(0, 19), laterality=st.sampled_from(["L", "R", None]))
def test_mirroring_moves_everything_together_and_back(width, x, laterality):
    x = min(x, width - 1)
    image = torch.zeros(3, 8, width)
    image[:, 4, x] = 1
    anatomy = image.to(torch.uint8)
    landmarks = {"optic_disc": np.array([[x, 4.0]], np.float32)}
    item = {"image": MetaTensor(image), "anatomy": anatomy, "landmarks": landmarks, "laterality": laterality}
    transform = CanonicalizeFundusd("image")
    out = transform(item)
    place = out["landmarks"]["optic_disc"][0]
    assert out["image"][0, int(place[1]), int(place[0])] == 1 and out["anatomy"][0, int(place[1]), int(place[0])] == 1
    assert out["mirrored"] == (laterality == "L")
    # the affine still says where the pixel is in the world
    before = item["image"].affine @ torch.tensor([4.0, x, 0, 1], dtype=torch.float64)
    after = out["image"].affine @ torch.tensor([4.0, float(place[0]), 0, 1], dtype=torch.float64)
    torch.testing.assert_close(before, after)
    back = transform.inverse(out)
    assert torch.equal(back["image"].as_tensor(), image) and torch.equal(back["anatomy"], anatomy)
    np.testing.assert_array_equal(back["landmarks"]["optic_disc"], landmarks["optic_disc"])
    torch.testing.assert_close(back["image"].affine, item["image"].affine)


def test_the_record_goes_before_geometry_and_an_unknown_side_is_said():
    image = torch.rand(3, 10, 10)
    left = {"optic_disc": [[1, 5]], "fovea": [[8, 5]]}
    assert CanonicalizeFundus()(image, None, left)[3] is True
    assert CanonicalizeFundus()(image, None, left, "R")[3] is False
    out = CanonicalizeFundusd("image")({"image": image, "landmarks": {}})
    assert out["eye_side"] is None and not out["mirrored"]
    assert out["anatomy_quality"]["problems"] == ["side of the eye unknown: not mirrored"]
    with pytest.raises(ValueError, match="'L' or 'R'"):
        CanonicalizeFundus()(image, laterality="left")
