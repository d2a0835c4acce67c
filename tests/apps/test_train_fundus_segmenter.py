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
import random

import numpy as np
import pytest
import torch
from PIL import Image

from monai_god.apps.segmenter_training import overlap_of
from monai_god.apps.train_fundus_segmenter import CROP, SIZE, augment, disc_around, read_item, read_phantom, split


@pytest.mark.parametrize(("expected", "vessel"), [(30, False), (24, True), (36, True)])
def test_the_discs_rim_is_found_around_its_centre(expected, vessel):
    yy, xx = np.mgrid[:200, :200]
    truth = ((xx - 104) / 28) ** 2 + ((yy - 95) / 32) ** 2 <= 1
    rng = np.random.default_rng(0)
    image = np.stack([0.5 + 0.3 * truth, 0.3 + 0.3 * truth, 0.1 + 0.1 * truth]) + 0.02 * rng.normal(size=(3, 200, 200))
    if vessel:
        image[:, :, 98:104] *= 0.6
    assert overlap_of(disc_around(image.astype(np.float32), (101.0, 98.0), expected), truth) > 0.93


def test_phantom_items_tell_everything():
    item = read_phantom(3)
    assert item.shape == (9, SIZE, SIZE) and item[6:].eq(1).all()
    assert 0 < item[4].mean() < 0.2 and set(item[3:6].unique().tolist()) <= {0.0, 1.0}


def test_a_point_becomes_a_spot_in_the_fields_frame(tmp_path):
    yy, xx = np.mgrid[:300, :400]
    field = (xx - 200) ** 2 + (yy - 150) ** 2 < 140**2
    disc = (xx - 270) ** 2 + (yy - 150) ** 2 < 18**2
    grey = (120 * field + 100 * disc).astype(np.uint8)
    Image.fromarray(np.stack([grey, grey // 2, grey // 4], -1)).save(tmp_path / "a.png")
    item = read_item(tmp_path, {"image": "a.png", "optic_disc_center": [270, 150], "fovea_center": [170, 155]})
    fovea = item[5].nonzero().float().mean(0)
    assert fovea[1] == pytest.approx(SIZE / 2 - 30 * SIZE / 285.6, abs=3)
    assert fovea[0] == pytest.approx(SIZE / 2 + 5 * SIZE / 285.6, abs=3)
    assert not item[7].any() and item[8].all()  # nothing known of vessels
    ys, xs = np.nonzero(item[3].numpy())
    assert np.sqrt(len(ys) / np.pi) == pytest.approx(18 * SIZE / 285.6, rel=0.15)


def test_augmentation_moves_masks_with_the_image():
    random.seed(0)
    torch.manual_seed(0)
    item = torch.zeros(9, SIZE, SIZE)
    item[6:] = 1
    item[:3] = 0.1
    item[:3, 200:330, 200:330] = 0.9
    item[3, 200:330, 200:330] = 1
    out = augment(item.repeat(6, 1, 1, 1))
    assert out.shape == (6, 9, CROP, CROP) and out[:, :3].min() >= 0 and out[:, :3].max() <= 1
    for row in out:
        inside = row[3] > 0
        if 500 < inside.sum() < 0.9 * CROP**2:
            assert row[1][inside].mean() > row[1][~inside & (row[8] > 0.99)].mean()


def test_nothing_held_out_is_trained_on(shared_data):
    train, held = split(shared_data / "fundus")
    data = json.loads((shared_data / "fundus" / "datalist.json").read_text())
    images = {item["image"] for item in train}
    assert not images & {item["image"] for item in held}
    assert not images & {item["image"] for name in ("validation", "testing") for item in data[name]}
    assert sum(item["source"] == "idrid" for item in held) == 15 and sum(item["source"] == "hrf" for item in held) == 7
