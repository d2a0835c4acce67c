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
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monai_god.data.datalist import check_patient_disjoint, load_section
from monai_god.data.protocol import RetrievalMetadata, RetrievalProtocol, split_by_patient

PROTOCOLS = [
    RetrievalProtocol(singletons, visit, duplicates, laterality, camera)
    for singletons, visit, duplicates, laterality, camera in product(
        ("distractors", "leave_out"),
        (False, True),
        (False, True),
        ("any", "same_eye", "contralateral_eye"),
        ("any", "different_camera"),
    )
]


def naive_valid(protocol: RetrievalProtocol, meta: RetrievalMetadata, i: int, j: int) -> bool:
    """The rules of the docstring, one pair at a time."""
    if i == j:
        return False
    same_patient = meta.patient[i] == meta.patient[j]
    groups = (meta.duplicate_group[i], meta.duplicate_group[j])
    if protocol.exclude_near_duplicates and groups[0] >= 0 and groups[0] == groups[1]:
        return False
    if protocol.exclude_same_visit and same_patient and meta.visit[i] >= 0 and meta.visit[i] == meta.visit[j]:
        return False
    sides = {meta.laterality[i], meta.laterality[j]}
    if protocol.laterality == "same_eye" and (len(sides) != 1 or -1 in sides):
        return False
    if protocol.laterality == "contralateral_eye" and (len(sides) != 2 or -1 in sides):
        return False
    if protocol.camera == "different_camera" and same_patient:
        cameras = {meta.camera[i], meta.camera[j]}
        if len(cameras) != 2 or -1 in cameras:
            return False
    return True


@st.composite
def metadata(draw):
    n = draw(st.integers(1, 12))

    def column(low, high):
        return draw(st.lists(st.integers(low, high), min_size=n, max_size=n))

    flags = st.lists(st.booleans(), min_size=n, max_size=n)
    return RetrievalMetadata(
        column(0, 3), column(-1, 2), column(-1, 1), column(-1, 2), column(-1, 2), draw(flags), draw(flags)
    )


@settings(max_examples=150, deadline=None)
@given(metadata(), st.sampled_from(PROTOCOLS), st.data())
def test_valid_pairs_equals_the_rules_one_by_one(meta, protocol, data):
    n = len(meta)
    query = data.draw(st.lists(st.integers(0, n - 1), max_size=n))
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    valid = protocol.valid_pairs(np.asarray(query, dtype=int), np.arange(start, stop), meta)
    assert valid.shape == (len(query), stop - start) and valid.dtype == bool
    for row, i in enumerate(query):
        for column, j in enumerate(range(start, stop)):
            assert valid[row, column] == naive_valid(protocol, meta, i, j)


@settings(max_examples=150, deadline=None)
@given(metadata(), st.sampled_from(PROTOCOLS))
def test_query_gallery_equals_the_rules_one_by_one(meta, protocol):
    n = len(meta)
    images = np.bincount(meta.patient)
    gallery = [
        j
        for j in range(n)
        if meta.is_gallery[j] and not (protocol.singletons == "leave_out" and images[meta.patient[j]] == 1)
    ]
    query = [
        i
        for i in range(n)
        if meta.is_query[i]
        and any(meta.patient[i] == meta.patient[j] and naive_valid(protocol, meta, i, j) for j in gallery)
    ]
    result = protocol.query_gallery(meta)
    assert result.query.tolist() == query
    assert result.gallery.tolist() == gallery
    assert result.left_out == int(meta.is_query.sum()) - len(query)
    assert result.singletons == int((images == 1).sum())


def test_from_items():
    items = [
        {"image": "a", "patient_id": "p", "visit": 0, "laterality": "L", "camera": "X"},
        {"image": "b", "patient_id": "p", "visit": "0", "laterality": "R"},
        {"image": "c", "patient_id": "q", "visit": 0, "near_duplicate_of": "z"},
        {"image": "d", "patient_id": "q", "near_duplicate_of": "z", "is_query": False},
        {"image": "e", "patient_id": 3, "near_duplicate_of": "elsewhere"},
        {"image": "f", "patient_id": "r"},
        {"image": "g", "patient_id": "r", "near_duplicate_of": "f"},
    ]
    meta = RetrievalMetadata.from_items(items)
    assert meta.patient.tolist() == [0, 0, 1, 1, 2, 3, 3]
    assert meta.visit[0] == meta.visit[1] >= 0 and meta.visit[2] not in (-1, meta.visit[0]) and meta.visit[3] == -1
    assert meta.laterality.tolist() == [0, 1, -1, -1, -1, -1, -1]
    assert meta.camera.tolist() == [0, -1, -1, -1, -1, -1, -1]
    groups = meta.duplicate_group
    assert groups[2] == groups[3] >= 0 and groups[5] == groups[6] >= 0 and groups[2] != groups[5]
    assert (groups[[0, 1, 4]] == -1).all()
    assert meta.is_query.tolist() == [True, True, True, False, True, True, True]
    assert "q" not in repr(meta).replace("RetrievalMetadata", "")


def test_bad_metadata_and_protocols():
    with pytest.raises(ValueError, match="1 images have no patient"):
        RetrievalMetadata([0, -1])
    with pytest.raises(ValueError, match="visit has shape"):
        RetrievalMetadata([0, 1], visit=[0])
    with pytest.raises(ValueError, match="1 of 1 items have no 'patient_id'"):
        RetrievalMetadata.from_items([{"image": "a"}])
    with pytest.raises(ValueError, match="laterality must be"):
        RetrievalMetadata.from_items([{"patient_id": "1", "laterality": "OD"}])
    for wrong in ({"singletons": "drop"}, {"laterality": "left"}, {"camera": "same"}, {"exclude_same_visit": "true"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            RetrievalProtocol(**wrong)


def test_text_patients_are_coded():
    assert RetrievalMetadata(["b", "a", "b"]).patient.tolist() == [0, 1, 0]


def test_to_dict_is_json():
    protocol = RetrievalProtocol(exclude_same_visit=True)
    assert RetrievalProtocol(**json.loads(json.dumps(protocol.to_dict()))) == protocol


def test_real_testing_section_has_the_documented_queries(shared_data):
    meta = RetrievalMetadata.from_items(load_section(shared_data / "cxr", "testing"))
    result = RetrievalProtocol().query_gallery(meta)
    assert (len(result.query), len(result.gallery), result.singletons) == (134, 180, 46)
    assert len(RetrievalProtocol(singletons="leave_out").query_gallery(meta).gallery) == 134


def patients_items(counts, source=lambda p: "s"):
    return [
        {"image": f"{p}-{i}", "patient_id": f"p{p}", "source": source(p)}
        for p, n in enumerate(counts)
        for i in range(n)
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=0, max_size=40), st.integers(0, 5), st.randoms())
def test_split_is_a_partition_by_patient_whatever_the_order(counts, seed, random):
    items = patients_items(counts, lambda p: "ab"[p % 2])
    sections = split_by_patient(items, seed=seed)
    check_patient_disjoint(sections)
    assert sorted(i["image"] for s in sections.values() for i in s) == sorted(i["image"] for i in items)
    shuffled = list(items)
    random.shuffle(shuffled)
    again = split_by_patient(shuffled, seed=seed)
    assert {n: {i["image"] for i in s} for n, s in again.items()} == {
        n: {i["image"] for i in s} for n, s in sections.items()
    }


def test_split_shares_within_every_stratum():
    items = patients_items([1 + (p % 4) for p in range(400)], lambda p: ("x", "y", "z", "z")[p // 100])
    sections = split_by_patient(items, {"training": 0.7, "validation": 0.1, "testing": 0.2}, seed=1)
    for source, total in (("x", 100), ("y", 100), ("z", 200)):
        for name, share in (("training", 0.7), ("validation", 0.1), ("testing", 0.2)):
            got = len({i["patient_id"] for i in sections[name] if i["source"] == source})
            assert abs(got - share * total) <= 3, (source, name)
    single = [
        len([i for i in s if i["image"].endswith("-0") and int(i["patient_id"][1:]) % 4 == 0])
        for s in sections.values()
    ]
    assert np.abs(np.asarray(single) - [70, 10, 20]).max() <= 4


def test_split_depends_on_the_seed():
    items = patients_items([2] * 30)
    first, second = (split_by_patient(items, seed=s)["testing"] for s in (0, 1))
    assert first == split_by_patient(items, seed=0)["testing"] and first != second


def test_split_keeps_near_duplicates_together():
    items = patients_items([2] * 40)
    for p in range(20):
        items[2 * p]["near_duplicate_of"] = items[2 * (p + 20)]["image"]
    sections = split_by_patient(items)
    where = {i["patient_id"]: name for name, s in sections.items() for i in s}
    assert all(where[f"p{p}"] == where[f"p{p + 20}"] for p in range(20))
    assert len(set(where.values())) == 3


def test_split_to_one_section_and_bad_fractions():
    items = patients_items([2, 3])
    assert split_by_patient(items, {"training": 0.0, "testing": 1.0}) == {"training": [], "testing": items}
    for wrong in ({}, {"training": 0.5}, {"training": 1.5, "testing": -0.5}):
        with pytest.raises(ValueError, match="fractions"):
            split_by_patient(items, wrong)
    with pytest.raises(ValueError, match="have no 'patient_id'"):
        split_by_patient([{"image": "a"}])
