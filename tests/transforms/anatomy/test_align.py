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

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.data import MetaTensor
from scipy import ndimage

from monai_god.transforms.anatomy import AlignToAnatomy, AlignToAnatomyd, DilateAnatomy, DilateAnatomyd
from monai_god.transforms.anatomy.functional import padded_square_frame, resample, transform_points
from monai_god.transforms.graph import AnatomyError
from tests.anatomy_masks import chest, ellipse, fundus

MODES = ("affine", "similarity", "box")


def moved_chest(angle: float, scale: float, dx: float, dy: float) -> tuple[torch.Tensor, np.ndarray]:
    """The chest turned, scaled and shifted, and the map that did it."""
    centre, turn = 111.5, math.radians(angle)
    linear = scale * np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    matrix = np.eye(3)
    matrix[:2, :2] = linear
    matrix[:2, 2] = np.array([centre + dx, centre + dy]) - linear @ [centre, centre]
    return resample(torch.from_numpy(chest()), matrix, (224, 224), "nearest"), matrix


@settings(max_examples=20, deadline=None)
@given(st.floats(-8, 8), st.floats(0.8, 1.1), st.floats(-10, 10), st.floats(-10, 10), st.sampled_from(MODES[:2]))
def test_pose_does_not_matter_after_alignment(angle: float, scale: float, dx: float, dy: float, mode: str) -> None:
    align = AlignToAnatomy("cxr", 448, mode)
    masks, pose = moved_chest(angle, scale, dx, dy)
    straight, turned = align.matrix(chest()), align.matrix(masks)
    corners = np.array([[60.0, 40], [160, 50], [70, 170], [150, 165], [110, 110]])
    there = transform_points(corners, straight)
    also = transform_points(transform_points(corners, pose), turned)
    # two pixels of 448: the masks were resampled
    assert np.abs(there - also).max() < 4.5


@pytest.mark.parametrize("mode", MODES)
def test_lungs_fill_the_square_left_by_the_margin(mode: str) -> None:
    _, masks, _, _ = AlignToAnatomy("cxr", 224, mode, margin=0.1)(torch.zeros(1, 224, 224), torch.from_numpy(chest()))
    assert masks is not None
    rows, columns = (masks[0] | masks[1]).nonzero(as_tuple=True)
    low, high = 0.1 * 224, 0.9 * 224
    # the box is exact; spread is a robust stand-in for it
    tolerance = 2 if mode == "box" else 18
    edges = [int(columns.min()) - low, int(columns.max()) + 1 - high]
    assert max(map(abs, edges)) < (45 if mode == "similarity" else tolerance)
    if mode != "similarity":
        assert max(abs(int(rows.min()) - low), abs(int(rows.max()) + 1 - high)) < tolerance


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [(224, 224), (300, 250), (180, 260)])
def test_inverse_returns_points_and_image(mode: str, size: tuple[int, int]) -> None:
    masks = torch.from_numpy(chest()[:, : size[0], : size[1]])
    masks = torch.nn.functional.pad(masks, (0, size[1] - masks.shape[2], 0, size[0] - masks.shape[1]))
    rows, columns = torch.meshgrid(torch.arange(size[0]), torch.arange(size[1]), indexing="ij")
    # an image whose values are its own coordinates shows by how much it was moved
    image = torch.stack([columns, rows]).float()
    align = AlignToAnatomy("cxr", 448, mode)
    out, aligned, points, matrix = align(image, masks, {"point": torch.tensor([[60.0, 80.0]])})
    assert out.shape == (2, 448, 448) and aligned is not None and aligned.shape == (3, 448, 448)
    assert aligned.dtype == torch.uint8
    x, y = points["point"][0].tolist()
    np.testing.assert_allclose(out[:, round(y), round(x)], [60, 80], atol=0.6)
    back = align.inverse(out, matrix, size)
    # what came along and does not touch the rim of the film or of the output
    ones = align(torch.ones(1, *size), masks)[0]
    inside = align.inverse(ones, matrix, size)[0] > 0.999
    assert inside.float().mean() > 0.3
    assert (back - image)[:, inside].abs().max() < 0.5


@pytest.mark.parametrize("mirrored", [False, True])
def test_fundus_puts_disc_and_fovea_at_fixed_places(mirrored: bool) -> None:
    masks, landmarks = fundus()
    anatomy = torch.from_numpy(masks)
    points = {"optic_disc": np.array([[150.0, 108.0]]), "fovea": landmarks["fovea"]}
    if mirrored:
        anatomy = anatomy.flip(2)
        points = {name: np.array([223.0, 0.0]) + at * [-1, 1] for name, at in points.items()}
    align = AlignToAnatomy("fundus", 400, margin=0.0)
    _, out, there, matrix = align(torch.zeros(3, 224, 224), anatomy, points)
    np.testing.assert_allclose(there["optic_disc"], [[199.5 + 80, 199.5]], atol=1e-3)
    np.testing.assert_allclose(there["fovea"], [[199.5 - 80, 199.5]], atol=1e-3)
    assert (torch.linalg.det(matrix) < 0) == mirrored
    # what was above the axis stays above
    assert out is not None and float(out[1].nonzero()[:, 0].float().mean()) < 199
    # without the landmark, the mask's centroid is the disc's centre
    from_mask = align.matrix(anatomy, {"fovea": points["fovea"]})
    np.testing.assert_allclose(from_mask, matrix, atol=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("empty", "left lung mask empty"),
        ("remnant", "left lung mask too small"),
        ("sideways", "left lung and right lung do not lie side by side"),
    ],
)
def test_unusable_anatomy(change: str, message: str) -> None:
    masks = torch.from_numpy(chest())
    if change == "sideways":
        masks = masks.rot90(1, (1, 2))
    else:
        masks[0] = 0
    if change == "remnant":
        masks[0, 5:9, 5:9] = 1
    with pytest.raises(AnatomyError, match=message):
        AlignToAnatomy("cxr", 224)(torch.zeros(3, 224, 224), masks)
    out = AlignToAnatomyd(modality="cxr", output_size=224)({"image": torch.zeros(3, 224, 224), "anatomy": masks})
    assert out["anatomy_quality"]["problems"][0].startswith(f"not aligned: {message}")
    torch.testing.assert_close(out["alignment"], torch.eye(3, dtype=torch.float64))


def test_no_anatomy_at_all() -> None:
    out = AlignToAnatomyd(modality="cxr", output_size=64)({"image": torch.ones(3, 32, 16)})
    assert out["anatomy_quality"]["problems"] == ["not aligned: no masks of left lung and right lung"]
    # the whole picture, in the middle of a square
    assert out["image"][:, :, 17:47].min() > 0.99 and out["image"][:, :, :15].max() == 0
    fundus_out = AlignToAnatomyd(modality="fundus", output_size=64)({"image": torch.ones(3, 32, 32), "landmarks": {}})
    assert fundus_out["anatomy_quality"]["problems"] == ["not aligned: optic disc not found"]


def test_a_blip_hardly_moves_the_frame() -> None:
    masks = chest()
    clean = AlignToAnatomy("cxr", 448).matrix(masks)
    masks[0, 215:220, 215:220] = 1
    np.testing.assert_array_equal(AlignToAnatomy("cxr", 448).matrix(masks), clean)


@pytest.mark.parametrize("meta", [False, True])
def test_dictionary_form_inverts(meta: bool) -> None:
    masks = torch.from_numpy(chest())
    picture = torch.from_numpy(ndimage.gaussian_filter(chest()[:1].astype(np.float32), (0, 4, 4))).repeat(3, 1, 1)
    image = MetaTensor(picture, affine=torch.diag(torch.tensor([0.5, 0.5, 1.0, 1.0]))) if meta else picture
    landmarks = {"carina": torch.tensor([[110.0, 70.0]])}
    data = {"image": image, "anatomy": masks, "landmarks": landmarks, "patient_id": "a"}
    align = AlignToAnatomyd(modality="cxr", output_size=448, anatomy_size=224)
    out = align(data)
    assert out["image"].shape == (3, 448, 448) and out["anatomy"].shape == (3, 224, 224)
    assert isinstance(out["image"], MetaTensor) == meta
    x, y = out["landmarks"]["carina"][0].tolist()
    if meta:
        # the affine leads from (row, column) to the same place in the world
        world = out["image"].affine.double() @ torch.tensor([y, x, 0.0, 1.0], dtype=torch.float64)
        torch.testing.assert_close(world[:2], torch.tensor([35.0, 55.0], dtype=torch.float64), atol=1e-3, rtol=0)
    back = align.inverse(out)
    assert torch.equal(data["image"], image) and data["anatomy"] is masks
    torch.testing.assert_close(back["landmarks"]["carina"], landmarks["carina"], atol=1e-3, rtol=0)
    assert (back["image"] - image).abs().mean() < 0.01
    assert (back["anatomy"] != masks).float().mean() < 0.01
    assert "alignment" not in back
    if meta:
        torch.testing.assert_close(back["image"].affine, image.affine)


def test_one_interpolation_keeps_an_identity_exact() -> None:
    image = torch.rand(3, 57, 57)
    torch.testing.assert_close(resample(image, padded_square_frame((57, 57), 57), (57, 57)), image, atol=1e-5, rtol=0)


def test_shrinking_does_not_alias() -> None:
    stripes = (torch.arange(512) % 2).float().expand(1, 512, 512)
    small = resample(stripes, padded_square_frame((512, 512), 100), (100, 100))[:, 10:-10, 10:-10]
    assert (small - 0.5).abs().max() < 0.05


@pytest.mark.parametrize("settings", [{"mode": "rigid"}, {"margin": 0.5}, {"output_size": 0}, {"anatomy_size": 0}])
def test_wrong_settings(settings: dict) -> None:
    with pytest.raises(ValueError):
        AlignToAnatomy(**{"modality": "cxr", "output_size": 224, **settings})


def test_wrong_input() -> None:
    align = AlignToAnatomy("cxr", 224)
    with pytest.raises(ValueError, match="do not fit"):
        align(torch.zeros(3, 100, 100), torch.from_numpy(chest()))
    with pytest.raises(ValueError, match="channels, H, W"):
        align(torch.zeros(100, 100), None)
    with pytest.raises(ValueError, match="one key"):
        AlignToAnatomyd(["image", "other"])


@pytest.mark.parametrize(("pixels", "size"), [(5, 224), (10, 224), (5, 448)])
def test_dilation_equals_naive_loop(pixels: int, size: int) -> None:
    masks = np.zeros((3, size, size), dtype=np.uint8)
    masks[0, 50, 60] = masks[0, 58, 61] = 1
    grown = DilateAnatomy(pixels)(torch.from_numpy(masks)).numpy()
    radius = pixels * size / 224
    rows, columns = np.mgrid[:size, :size]
    expected = ((rows - 50) ** 2 + (columns - 60) ** 2 <= radius**2) | (
        (rows - 58) ** 2 + (columns - 61) ** 2 <= radius**2
    )
    np.testing.assert_array_equal(grown[0], expected)
    assert grown.dtype == np.uint8 and not grown[1:].any()


def test_dilation_leaves_the_field_of_view() -> None:
    masks, _ = fundus()
    grown = DilateAnatomyd(pixels=5, modality="fundus")({"anatomy": torch.from_numpy(masks)})["anatomy"]
    assert torch.equal(grown[2], torch.from_numpy(masks[2]))
    assert grown[0].sum() > ellipse(150, 108, 17, 18).sum()
    with pytest.raises(ValueError, match="negative"):
        DilateAnatomy(-1)
