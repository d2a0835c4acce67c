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

import csv

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from skimage.draw import polygon2mask

from monai_god.transforms import AnatomyError, LoadMedicalImage
from monai_god.transforms.anatomy.parse import DecodeCheXmask, ParseCXRAnatomyd, check_cxr_anatomy, decode_rle


def encode(mask: np.ndarray) -> str:
    out: list[str] = []
    run = 0
    for i, value in enumerate([*mask.ravel().tolist(), False]):
        if value:
            run += 1
        elif run:
            out += [str(i - run + 1), str(run)]
            run = 0
    return " ".join(out)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**31))
def test_rle_round_trip(height: int, width: int, seed: int) -> None:
    mask = np.random.default_rng(seed).random((height, width)) > 0.5
    assert np.array_equal(decode_rle(encode(mask), height, width), mask)


@pytest.mark.parametrize("text", ["1 2 3", "0 4", "8 9", "a b", "3 0"])
def test_malformed_rle_names_the_row(text: str) -> None:
    with pytest.raises(AnatomyError, match="film 7"):
        decode_rle(text, 3, 3, "film 7")


@pytest.mark.parametrize("text", ["", None, float("nan")])
def test_empty_rle(text: object) -> None:
    assert not decode_rle(text, 3, 3).any()


def test_real_rows_fit_their_landmarks(shared_data) -> None:
    csv.field_size_limit(2**30)
    with (shared_data / "chexmask_sample" / "CheXpert.csv").open() as file:
        rows = [row for row, _ in zip(csv.DictReader(file), range(8), strict=False)]
    for row in rows:
        masks = DecodeCheXmask()(row).numpy()
        points = np.array(row["Landmarks"].split(","), dtype=float).reshape(-1, 2)
        for mask, outline in zip(masks, (points[44:94], points[:44], points[94:]), strict=True):
            drawn = polygon2mask(mask.shape, outline[:, ::-1])
            assert 2 * (drawn & (mask > 0)).sum() / (drawn.sum() + mask.sum()) > 0.985


def test_missing_column_is_named() -> None:
    with pytest.raises(AnatomyError, match="Heart"):
        DecodeCheXmask()({"Left Lung": "", "Right Lung": ""})


def chest(mirrored: bool = False) -> torch.Tensor:
    masks = torch.zeros(3, 100, 100, dtype=torch.uint8)
    masks[0, 20:80, 55:85], masks[1, 20:80, 15:45], masks[2, 50:80, 40:70] = 1, 1, 1
    return masks.flip(-1)[[1, 0, 2]] if mirrored else masks


def test_plausible_chest_has_no_problem() -> None:
    assert check_cxr_anatomy(chest()) == []


def test_mirrored_film_is_flagged() -> None:
    assert any("mirrored" in p for p in check_cxr_anatomy(chest(mirrored=True)))


def test_given_masks_are_used_and_checked(tmp_path) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (100, 100), dtype=np.uint8)).save(tmp_path / "film.png")
    item = {"image": LoadMedicalImage()(tmp_path / "film.png")}
    for name, mask in zip(("left_lung", "right_lung", "heart"), chest(), strict=True):
        Image.fromarray(mask.numpy() * 255).save(tmp_path / f"{name}.png")
        item[name] = str(tmp_path / f"{name}.png")
    out = ParseCXRAnatomyd()(item)
    assert torch.equal(out["anatomy"], chest())
    assert out["anatomy_quality"] == {"source": "masks", "usable": True, "problems": []}
    Image.fromarray(np.zeros((50, 100), np.uint8)).save(tmp_path / "heart.png")
    with pytest.raises(AnatomyError, match=r"heart\.png.*film\.png"):
        ParseCXRAnatomyd()(item)
