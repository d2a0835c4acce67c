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
import torch
from scipy import ndimage

from monai_god.data.phantoms import CXRPhantom
from monai_god.transforms import check_cxr_anatomy

SIZE = 128


@pytest.fixture(scope="module")
def films():
    return [[CXRPhantom(0, patient).radiograph(visit, SIZE) for visit in range(3)] for patient in range(8)]


def test_seed_patient_and_visit_determine_every_pixel(films):
    again = CXRPhantom(0, 3)
    again.radiograph(0, SIZE)  # the order of the visits does not matter
    assert np.array_equal(again.radiograph(2, SIZE).image, films[3][2].image)
    assert not np.array_equal(CXRPhantom(1, 3).radiograph(2, SIZE).image, films[3][2].image)


def test_masks_are_plausible_and_where_a_frontal_film_has_them(films):
    for patient in films:
        for film in patient:
            left, right, heart = (film.masks[name] for name in ("left_lung", "right_lung", "heart"))
            assert not check_cxr_anatomy(torch.from_numpy(np.stack([left, right, heart])))
            centre = [np.argwhere(m).mean(0)[1] for m in (left, heart, right)]
            assert centre[0] > centre[1] > centre[2]  # the patient's left is on the image's right
            for mask in (left, right):
                parts, count = ndimage.label(mask)
                assert np.bincount(parts[parts > 0]).max() / mask.sum() > 0.97, count


def test_it_looks_like_a_chest_radiograph(films):
    """Lungs darker than heart and abdomen, and not flat: ribs and vessels leave edges in them."""
    for patient in films:
        for film in patient:
            image = film.image.astype(float) / 255
            lungs = (film.masks["left_lung"] | film.masks["right_lung"]) & ~film.masks["heart"]
            assert image[film.masks["heart"]].mean() - image[lungs].mean() > 0.05
            core = ndimage.binary_erosion(lungs, iterations=4)
            fine = image - ndimage.gaussian_filter(image, 3)
            assert fine[core].std() > 0.008


def test_visits_differ_and_days_grow(films):
    for patient in films:
        assert patient[0].day == 0 and patient[0].day <= patient[1].day <= patient[2].day
        for a, b in ((0, 1), (1, 2)):
            assert np.abs(patient[a].image.astype(float) - patient[b].image).mean() > 3


@pytest.mark.parametrize("artefact", ["follows_patient", "shuffled"])
def test_artefact_changes_the_film_but_not_the_patient(artefact):
    plain = CXRPhantom(0, 1).radiograph(1, SIZE)
    marked = CXRPhantom(0, 1).radiograph(1, SIZE, artefact)
    for name, mask in plain.masks.items():
        assert np.array_equal(mask, marked.masks[name])
    assert (plain.day, plain.view) == (marked.day, marked.view)
    assert not np.array_equal(plain.image, marked.image)


def test_settings_out_of_range():
    with pytest.raises(ValueError, match="0 or more"):
        CXRPhantom(-1, 0)
    with pytest.raises(ValueError):
        CXRPhantom(0, 0).radiograph(0, 16)
    with pytest.raises(ValueError, match="artefact"):
        CXRPhantom(0, 0).radiograph(0, 64, "stripes")
