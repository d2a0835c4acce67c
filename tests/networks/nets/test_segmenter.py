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
from PIL import Image

from monai_god.networks.nets.segmenter import WEIGHTS_FOLDER, AnatomySegmenter, load_cxr_segmenter, tidy_mask


@pytest.fixture(scope="module")
def untrained() -> AnatomySegmenter:
    torch.manual_seed(0)
    return AnatomySegmenter(size=64, channels=(4, 8, 8)).eval()


@settings(max_examples=20, deadline=None)
@given(height=st.integers(40, 160), width=st.integers(40, 160))
def test_square_and_back_keeps_the_place(height: int, width: int) -> None:
    model = AnatomySegmenter(size=64, channels=(4, 8, 8))
    image = torch.zeros(1, 1, height, width)
    image[..., height // 4 : height // 2, width // 2 : 3 * width // 4] = 1.0
    square = model.to_square(image)
    assert square.shape == (1, 1, 64, 64)
    back = model.from_square(square, height, width)
    assert back.shape == image.shape
    rows, columns = torch.arange(height) + 0.5, torch.arange(width) + 0.5
    pixel = max(height, width) / 64  # one pixel of the square
    for line, axis in ((rows, -1), (columns, -2)):
        centre = [float((m.sum(axis).flatten() * line).sum() / m.sum()) for m in (image, back)]
        assert abs(centre[0] - centre[1]) < pixel


def test_square_pads_and_does_not_squash() -> None:
    square = AnatomySegmenter(size=64, channels=(4, 8, 8)).to_square(torch.ones(1, 1, 100, 50))
    assert (
        torch.all(square[..., :16] == 0) and torch.all(square[..., 48:] == 0) and torch.all(square[..., 20:44] > 0.99)
    )


def test_exposure_hardly_changes_the_input() -> None:
    image = torch.rand(1, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    one, other = (AnatomySegmenter(size=96).normalise(x) for x in (image, 0.6 * image + 0.3))
    assert (one - other).abs().mean() < 0.1 < (one - image).abs().mean()


def test_segment_equals_forward_for_images_of_several_sizes(untrained: AnatomySegmenter) -> None:
    generator = torch.Generator().manual_seed(1)
    images = [torch.rand(3, *shape, generator=generator) for shape in ((80, 60), (64, 64), (50, 90))]
    for image, masks in zip(images, untrained.segment(images), strict=True):
        expected = (untrained(image[None])[0] >= 0.5).numpy()
        assert masks.dtype == torch.uint8 and masks.shape == (3, *image.shape[1:])
        for organ, found in zip(expected, masks.numpy(), strict=True):
            assert np.array_equal(tidy_mask(organ), found)


def test_tidy_mask_keeps_the_largest_piece_and_fills_it() -> None:
    mask = np.zeros((20, 20), bool)
    mask[2:10, 2:10] = True
    mask[5, 5] = False
    mask[15:17, 15:17] = True
    expected = np.zeros((20, 20), bool)
    expected[2:10, 2:10] = True
    assert np.array_equal(tidy_mask(mask), expected)
    assert not tidy_mask(np.zeros((5, 5), bool)).any()


def test_save_and_load(tmp_path, untrained: AnatomySegmenter) -> None:
    path = tmp_path / "weights.pt"
    untrained.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["weights.pt"]
    again = AnatomySegmenter.load(path)
    assert again.settings() == untrained.settings() and not again.training
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(again(image), untrained(image), atol=0.01)


def test_shipped_weights_are_small_and_have_a_card() -> None:
    path = WEIGHTS_FOLDER / "cxr_segmenter.pt"
    assert path.stat().st_size < 5_000_000
    content = torch.load(path, weights_only=True)
    assert {v.dtype for v in content["state"].values() if v.is_floating_point()} == {torch.float16}
    assert "CC BY" in (WEIGHTS_FOLDER / "cxr_segmenter.md").read_text()
    model = load_cxr_segmenter()
    assert model.organs == ("left_lung", "right_lung", "heart") and not model.training


def grey(path) -> torch.Tensor:
    return torch.from_numpy(np.asarray(Image.open(path).convert("RGB").convert("L"), dtype=np.float32) / 255)[None]


def centre(mask: np.ndarray) -> float:
    return float(np.nonzero(mask)[1].mean())


def test_lungs_agree_with_hand_drawn_masks(shared_data) -> None:
    items = [
        item
        for item in json.loads((shared_data / "cxr" / "datalist.json").read_text())["testing"]
        if item["source"] == "hannover" and "left_lung" in item and "right_lung" in item
    ]
    dice = []
    predicted = load_cxr_segmenter().segment([grey(shared_data / "cxr" / i["image"]) for i in items])
    for item, masks in zip(items, predicted, strict=True):
        x0, y0, x1, y1 = (int(v) for v in item["mask_valid_box"].split(","))
        for found, organ in zip(masks[:2].numpy(), ("left_lung", "right_lung"), strict=True):
            truth = np.asarray(Image.open(shared_data / "cxr" / item[organ]).convert("L"))[y0:y1, x0:x1] > 0
            found = found[y0:y1, x0:x1] > 0
            dice.append(2 * (found & truth).sum() / (found.sum() + truth.sum()))
    assert len(dice) > 10
    assert np.mean(dice) > 0.92


def test_heart_side_tells_a_mirrored_film(shared_data) -> None:
    items = json.loads((shared_data / "cxr" / "datalist.json").read_text())["testing"]
    images = [grey(shared_data / "cxr" / i["image"]) for i in items if i["source"] == "nih14"][:32]
    model = load_cxr_segmenter()
    for flip, sign in ((False, 1), (True, -1)):
        seen = []
        for image, masks in zip(images, model.segment([i.flip(-1) if flip else i for i in images]), strict=True):
            left, right, heart = masks.numpy()
            assert centre(left) > centre(right)  # told by position
            seen.append(sign * (centre(heart) - (centre(left) + centre(right)) / 2) / image.shape[-1])
        # the same films lean to the other side when mirrored
        assert np.mean(np.array(seen) > 0) >= 0.8  # not all: disease shifts hearts
        assert np.median(seen) > 0.02


def test_lungs_go_on_behind_the_heart(shared_data) -> None:
    items = json.loads((shared_data / "cxr" / "datalist.json").read_text())["testing"][:8]
    masks = load_cxr_segmenter().segment([grey(shared_data / "cxr" / i["image"]) for i in items])
    overlap = [float((m[0] & m[2]).sum() / m[2].sum()) for m in masks]
    assert np.median(overlap) > 0.05
