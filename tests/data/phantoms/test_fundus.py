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
from scipy import ndimage
from scipy.spatial import cKDTree

from monai_god.data.phantoms import FundusPhantom
from monai_god.data.phantoms.fundus import EYES

SIZE = 256
VISITS = 4


@pytest.fixture(scope="module")
def phantoms():
    return [FundusPhantom(0, patient) for patient in range(6)]


@pytest.fixture(scope="module")
def photos(phantoms):
    """The photographs of every eye, by patient and side."""
    return {
        (k, eye): [phantom.photograph(eye, visit, SIZE) for visit in range(VISITS)]
        for k, phantom in enumerate(phantoms)
        for eye in EYES
    }


def flat(photos):
    return [photo for visits in photos.values() for photo in visits]


def test_seed_patient_eye_and_visit_determine_every_pixel(photos):
    again = FundusPhantom(0, 3)
    again.photograph("R", 0, SIZE)  # the order of the photographs does not matter
    assert np.array_equal(again.photograph("L", 2, SIZE).image, photos[3, "L"][2].image)
    other = FundusPhantom(1, 3).photograph("L", 2, SIZE)
    assert not np.array_equal(other.image, photos[3, "L"][2].image)
    assert not np.array_equal(photos[3, "R"][2].image, photos[3, "L"][2].image)


def test_masks_and_landmarks_lie_in_the_field(photos):
    for photo in flat(photos):
        field = photo.masks["field_of_view"]
        assert photo.image.shape == (SIZE, SIZE, 3) and 0.5 < field.mean() < 0.8
        assert photo.image[ndimage.binary_erosion(~field, iterations=8)].mean() < 12
        assert photo.image[field].mean() > 25
        for name in ("vessels", "optic_disc"):
            assert not (photo.masks[name] & ~field).any()
        assert 0.01 < photo.masks["vessels"].sum() / field.sum() < 0.3
        for x, y in photo.landmarks["junctions"]:
            assert field[round(y), round(x)]
            # both branches are drawn, so there is vessel at the fork
            assert photo.masks["vessels"][round(y) - 1 : round(y) + 2, round(x) - 1 : round(x) + 2].any()


def test_disc_and_fovea_are_where_the_photograph_shows_them(photos, phantoms):
    for photo in flat(photos):
        disc, at = photo.masks["optic_disc"], photo.landmarks
        assert disc.any() == ("optic_disc" in at)
        if "optic_disc" in at:
            x, y = at["optic_disc"]
            assert disc[round(y), round(x)]
            # brighter than what is around it, in spite of the vessels on it
            around = ndimage.binary_dilation(disc, iterations=12) & ~disc & photo.masks["field_of_view"]
            assert photo.image[disc].mean() > photo.image[around].mean()
        if "optic_disc" in at and "fovea" in at:
            across, down = at["optic_disc"] - at["fovea"]
            assert (across > 0) == (photo.laterality == "R")
            assert abs(down) < 0.5 * abs(across)
    # not every photograph shows both
    more = [phantom.photograph("R", visit, 64).landmarks for phantom in phantoms for visit in range(4, 14)]
    assert any("fovea" not in landmarks for landmarks in more)
    assert any("optic_disc" not in landmarks for landmarks in more)


def place(photo):
    """Disc and fovea as complex numbers, None unless both are seen."""
    if not {"optic_disc", "fovea"} <= set(photo.landmarks):
        return None
    return [complex(*photo.landmarks[name]) for name in ("optic_disc", "fovea")]


def share_found(first, second, tolerance=0.01):
    """Share of the first's junctions that the second has too, under the similarity that maps disc and fovea."""
    if abs(np.subtract(*place(first))) > abs(np.subtract(*place(second))):
        first, second = second, first  # the coarser one shows fewer
    (d0, f0), (d1, f1) = place(first), place(second)
    moved = (first.landmarks["junctions"] @ [1, 1j] - f0) * (d1 - f1) / (d0 - f0) + f1
    core = ndimage.binary_erosion(second.masks["field_of_view"], iterations=2)
    cell = np.rint(np.stack([moved.real, moved.imag], 1)).astype(int)
    seen = [0 <= x < SIZE and 0 <= y < SIZE and bool(core[y, x]) for x, y in cell]
    there = cKDTree(second.landmarks["junctions"])
    distance, _ = there.query(np.stack([moved.real, moved.imag], 1)[seen])
    assert len(distance) > 1
    return float((distance < tolerance).mean())


def test_an_eye_has_the_same_tree_at_every_visit_and_no_other_eye_has_it(photos):
    pairs = 0
    for (patient, eye), visits in photos.items():
        seen = [photo for photo in visits if place(photo)]
        for other in seen[1:]:
            assert share_found(seen[0], other) == 1.0
            pairs += 1
        stranger = [photo for photo in photos[(patient + 1) % 6, eye] if place(photo)]
        if seen and stranger:
            assert share_found(seen[0], stranger[0], tolerance=1.0) < 0.5
    assert pairs > 6


def test_two_eyes_of_a_patient_are_alike_but_have_their_own_trees(phantoms):
    for phantom in phantoms:
        left, right = (phantom.eyes[eye] for eye in EYES)
        np.testing.assert_allclose(left.disc_axes, right.disc_axes, rtol=0.25)
        np.testing.assert_allclose(left.colour, right.colour, rtol=0.12)
        distance, _ = cKDTree(left.tree.junctions).query(right.tree.junctions)
        assert np.median(distance) > 0.3  # degrees


def test_disc_and_fovea_have_the_distance_and_size_of_real_eyes(phantoms):
    for eye in (eye for phantom in phantoms for eye in phantom.eyes.values()):
        assert 13 < np.hypot(*eye.disc) < 18 and 5 < 2 * eye.disc_axes[1] < 8.5
        assert eye.disc[1] < 0  # the fovea is lower than the disc


def test_radii_obey_murrays_law(phantoms):
    for eye in (eye for phantom in phantoms for eye in phantom.eyes.values()):
        stem, *branches = eye.tree.junction_radii.T
        np.testing.assert_allclose(stem**3, branches[0] ** 3 + branches[1] ** 3, rtol=1e-9)
        assert len(stem) > 100 and (np.stack(branches) > 0).all()


def test_arteries_are_thinner_than_veins_and_cross_them(phantoms):
    trees = [phantom.eyes["R"].tree for phantom in phantoms]
    arteries, veins = ([tree.radius[tree.artery == kind].max() for tree in trees] for kind in (True, False))
    assert np.mean(arteries) < 0.9 * np.mean(veins)
    for tree in trees:
        distance, _ = cKDTree(tree.start[~tree.artery]).query(tree.start[tree.artery])
        assert (distance < 0.2).any()


def test_the_fovea_has_no_vessels(phantoms):
    for eye in (eye for phantom in phantoms for eye in phantom.eyes.values()):
        assert np.hypot(*eye.tree.start.T).min() > 0.9


def test_visits_differ_and_days_grow(photos):
    for visits in photos.values():
        days = [photo.day for photo in visits]
        assert days[0] == 0 and days == sorted(days)
        for first, second in zip(visits, visits[1:], strict=False):
            assert np.abs(first.image.astype(float) - second.image).mean() > 3
    for patient in range(6):
        for left, right in zip(photos[patient, "L"], photos[patient, "R"], strict=True):
            assert (left.day, left.camera) == (right.day, right.camera)


def corners(photo):
    low, high = slice(0, 20), slice(-20, None)
    return np.stack([photo.image[r, c].astype(float).mean((0, 1)) for r in (low, high) for c in (low, high)])


def test_artefact_changes_the_photograph_but_not_the_patient(phantoms):
    taken = [(eye, visit) for eye in EYES for visit in range(2)]
    plain = [phantoms[1].photograph(*key, SIZE) for key in taken]
    marks = {}
    for artefact in ("follows_patient", "shuffled"):
        marked = [phantoms[1].photograph(*key, SIZE, artefact) for key in taken]
        for a, b in zip(plain, marked, strict=True):
            for name, mask in a.masks.items():
                assert np.array_equal(mask, b.masks[name])
            assert set(a.landmarks) == set(b.landmarks)
            for name, value in a.landmarks.items():
                assert np.array_equal(value, b.landmarks[name])
            assert (a.day, a.camera, a.field) == (b.day, b.camera, b.field)
            assert not np.array_equal(a.image, b.image)
        marks[artefact] = np.ptp(np.stack([corners(photo) for photo in marked]), axis=0).max()
    # one patch in one corner for the patient, or one here and one there
    assert marks["follows_patient"] < 8 < 16 < marks["shuffled"]


def test_settings_out_of_range(phantoms):
    with pytest.raises(ValueError, match="0 or more"):
        FundusPhantom(0, -1)
    for wrong in (("X", 0), ("L", -1), ("L", 0, 32), ("L", 0, 64, "stripes")):
        with pytest.raises(ValueError, match="must be"):
            phantoms[0].photograph(*wrong)
