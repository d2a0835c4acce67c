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

import random

import numpy as np
import pandas as pd
import pytest
import torch

from monai_god.apps.segmenter_training import fit
from monai_god.apps.train_cxr_segmenter import (
    HEART,
    LEFT_LUNG,
    RIGHT_LUNG,
    HeartShape,
    augment,
    draw_film,
    fill_contour,
    read_box,
    read_shapes,
)
from monai_god.networks.nets.segmenter import AnatomySegmenter

SIZE = 96


@pytest.fixture(scope="module")
def shapes(shared_data) -> list[np.ndarray]:
    return read_shapes(shared_data / "chexmask_sample")


def masks_of(points: np.ndarray) -> np.ndarray:
    return np.stack([fill_contour(points[part], SIZE) for part in (LEFT_LUNG, RIGHT_LUNG, HEART)])


def test_fill_contour_is_where_the_points_are() -> None:
    mask = fill_contour(np.array([[0.25, 0.5], [0.75, 0.5], [0.75, 1.0], [0.25, 1.0]]), 40)
    expected = np.zeros((40, 40), bool)
    expected[20:, 10:30] = True
    assert (mask ^ expected).sum() <= 50  # at most the outline


def test_shapes_of_held_out_patients_are_left_out(shared_data, shapes) -> None:
    # the one heart of the testing section is also a row of the CheXmask sample
    table = pd.read_csv(shared_data / "chexmask_sample" / "ChestX-Ray8.csv", dtype=str)
    rows = table["Image Index"].str.startswith("00001437_").sum()
    assert rows > 0
    kept = read_shapes(shared_data / "chexmask_sample", {"nih14:00001437", "hannover:00001437"})
    assert len(kept) == len(shapes) - rows


def test_read_box() -> None:
    box = read_box({"mask_valid_box": "2,1,5,4"}, (6, 8))
    assert box.sum() == 9 and box[1:4, 2:5].all()
    assert read_box({}, (6, 8)).all()


def test_heart_expected_from_unseen_lungs_and_moved_to_the_edges(shapes) -> None:
    learnt = HeartShape(shapes[::2], SIZE)
    rng = np.random.default_rng(0)
    fitted, blind = [], []
    for points in shapes[1::16]:
        masks = masks_of(points)
        left, right, heart = masks
        film = draw_film(masks, rng)[0].numpy()
        for found, image in ((fitted, film), (blind, np.zeros_like(film))):
            mask = learnt.fit(image, left, right)
            found.append(2 * (mask & heart).sum() / (mask.sum() + heart.sum()))
    assert np.mean(blind) > 0.75
    assert np.mean(fitted) > np.mean(blind)


def test_drawn_film_is_a_film(shapes) -> None:
    film = draw_film(masks_of(shapes[0]), np.random.default_rng(1))
    image, masks, known = film[0], film[1:4], film[4:]
    assert film.shape == (7, SIZE, SIZE) and image.min() >= 0 and image.max() <= 1
    assert set(masks.unique().tolist()) == {0.0, 1.0} and known[2].all()
    # the CheXmask lungs end at the heart, so nothing is told of them there
    assert not known[:2, masks[2] > 0].any()
    lung = (masks[0] > 0) & (known[0] > 0)
    assert image[lung].mean() < image[masks[2] > 0].mean()


def test_augment_keeps_the_left_lung_at_the_images_right(shapes) -> None:
    torch.manual_seed(0)
    item = draw_film(masks_of(shapes[0]), np.random.default_rng(2))
    batch = augment(torch.stack([item] * 40))
    assert batch.shape == (40, 7, SIZE, SIZE) and torch.isfinite(batch).all()
    columns = torch.arange(SIZE, dtype=torch.float32)
    left, right, heart = ((batch[:, k].sum(1) * columns).sum(1) / batch[:, k].sum((1, 2)) for k in (1, 2, 3))
    assert (left > right).all()
    leans_right = (heart > (left + right) / 2).float().mean()
    assert 0.6 < leans_right < 1.0


def test_training_learns_and_is_deterministic(shapes) -> None:
    items = [draw_film(masks_of(p), np.random.default_rng(3)).half() for p in shapes[:8]]

    def train() -> AnatomySegmenter:
        random.seed(0)
        torch.manual_seed(0)
        model = AnatomySegmenter(size=SIZE, channels=(8, 16, 24))
        fit(model, [(1.0, items)], augment, 25, 1e-2, 10, "test")
        return model

    @torch.no_grad()
    def cross_entropy(model: AnatomySegmenter) -> float:
        batch = torch.stack(items).float()
        return float(torch.nn.functional.binary_cross_entropy_with_logits(model.logits(batch[:, :1]), batch[:, 1:4]))

    torch.manual_seed(0)
    start = cross_entropy(AnatomySegmenter(size=SIZE, channels=(8, 16, 24)).eval())
    first, second = train(), train()
    assert cross_entropy(first) < 0.8 * start
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)
