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
from hypothesis import given, settings
from hypothesis import strategies as st

from monai_god.data.protocol import RetrievalMetadata, RetrievalProtocol
from monai_god.metrics import RETRIEVAL_METRICS, ranked_lists, retrieval_metrics
from monai_god.metrics.retrieval import _count_at_least, _count_on_device

NAMES = RETRIEVAL_METRICS


def naive(similarity, patients, protocol=None, meta=None):
    """Ranks by sorting, one query at a time; wrong images first among equals."""
    n = len(patients)
    protocol = protocol or RetrievalProtocol()
    meta = meta or RetrievalMetadata(np.unique(patients, return_inverse=True)[1])
    valid = protocol.valid_pairs(np.arange(n), np.arange(n), meta)
    sizes = {p: list(patients).count(p) for p in patients}
    rows = {name: [] for name in (*NAMES, "first_rank", "query")}
    for q in range(n):
        if not meta.is_query[q]:
            continue
        listed = []
        for g in range(n):
            if not valid[q, g] or not meta.is_gallery[g]:
                continue
            if protocol.singletons == "leave_out" and sizes[patients[g]] == 1:
                continue
            listed.append((-float(similarity[q, g]), patients[g] == patients[q]))
        hits = [same for _, same in sorted(listed)]
        relevant = sum(hits)
        if not relevant:
            continue
        ranks = [i + 1 for i, same in enumerate(hits) if same]
        precisions = [(j + 1) / rank for j, rank in enumerate(ranks)]
        for k in (1, 5, 10):
            rows[f"rank{k}"].append(float(ranks[0] <= k))
        rows["map"].append(sum(precisions) / relevant)
        rows["map_at_r"].append(
            sum(p for p, rank in zip(precisions, ranks, strict=True) if rank <= relevant) / relevant
        )
        rows["r_precision"].append(sum(hits[:relevant]) / relevant)
        rows["first_rank"].append(ranks[0])
        rows["query"].append(q)
    return rows


def tied_embeddings(draw, n):
    """Unit vectors whose inner products are exact in float32: multiples of 1/4, so that ties abound and are exact."""
    rows = np.zeros((n, 8), dtype=np.float32)
    for row in rows:
        if draw(st.booleans()):
            row[draw(st.integers(0, 7))] = draw(st.sampled_from([-1.0, 1.0]))
        else:
            start = draw(st.sampled_from([0, 2, 4]))
            row[start : start + 4] = [draw(st.sampled_from([-0.5, 0.5])) for _ in range(4)]
    return rows


@st.composite
def cases(draw):
    n = draw(st.integers(2, 14))
    patients = [f"p{draw(st.integers(0, 5))}" for _ in range(n)]
    items = []
    for i, patient in enumerate(patients):
        item = {"patient_id": patient, "image": f"{i}.png"}
        if draw(st.booleans()):
            item["visit"] = draw(st.integers(0, 1))
        if draw(st.booleans()):
            item["laterality"] = draw(st.sampled_from("LR"))
        if draw(st.booleans()):
            item["camera"] = draw(st.sampled_from("ab"))
        if draw(st.integers(0, 3)) == 0:
            item["near_duplicate_of"] = f"{draw(st.integers(0, n - 1))}.png"
        item["is_query"] = draw(st.integers(0, 4)) > 0
        item["is_gallery"] = draw(st.integers(0, 4)) > 0
        items.append(item)
    protocol = RetrievalProtocol(
        singletons=draw(st.sampled_from(["distractors", "leave_out"])),
        exclude_same_visit=draw(st.booleans()),
        exclude_near_duplicates=draw(st.booleans()),
        laterality=draw(st.sampled_from(["any", "same_eye", "contralateral_eye"])),
        camera=draw(st.sampled_from(["any", "different_camera"])),
    )
    plain = draw(st.booleans())
    return tied_embeddings(draw, n), patients, items, None if plain else protocol, draw(st.integers(1, 5))


@settings(max_examples=300, deadline=None)
@given(cases())
def test_equals_a_naive_loop_with_ties_under_every_protocol(case):
    embeddings, patients, items, protocol, chunk = case
    meta = RetrievalMetadata.from_items(items) if protocol is not None else None
    want = naive(embeddings @ embeddings.T, patients, protocol, meta)
    arguments = {"protocol": protocol, "metadata": meta, "chunk": chunk, "bootstrap": 0, "per_query": True}
    if not want["query"]:
        with pytest.raises(ValueError, match="another valid image"):
            retrieval_metrics(embeddings, patients, **arguments)
        return
    got = retrieval_metrics(embeddings, patients, **arguments)
    assert got["queries"] == len(want["query"])
    np.testing.assert_array_equal(got["per_query"]["query"], want["query"])
    np.testing.assert_array_equal(got["per_query"]["first_rank"], want["first_rank"])
    for name in NAMES:
        np.testing.assert_allclose(got[name], np.mean(want[name]), rtol=1e-12, err_msg=name)


@pytest.fixture(scope="module")
def medium():
    """500 images with many true matches for a query, so that both ways of counting are used."""
    rng = np.random.default_rng(3)
    patients = np.sort(rng.choice(12, 500, p=np.r_[0.5, [0.5 / 11] * 11]))
    centre = rng.standard_normal((12, 16))
    return (centre[patients] + 2 * rng.standard_normal((500, 16))).astype(np.float32), patients


def test_equals_a_naive_loop_with_many_matches(medium):
    embeddings, patients = medium
    unit = embeddings.astype(np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    want = naive(unit @ unit.T, patients)
    got = retrieval_metrics(embeddings, patients, bootstrap=0)
    assert max(np.bincount(patients)) > 200
    for name in NAMES:
        assert got[name] == pytest.approx(np.mean(want[name]), abs=1e-6), name


def test_chunk_and_order_do_not_matter(medium):
    embeddings, patients = medium
    want = retrieval_metrics(embeddings, patients)
    for chunk in (1, 7, 499, 5000):
        got = retrieval_metrics(embeddings, patients, chunk=chunk)
        assert all(got[name] == pytest.approx(want[name], abs=1e-6) for name in NAMES)
    order = np.random.default_rng(0).permutation(len(patients))
    got = retrieval_metrics(torch.from_numpy(embeddings[order]), torch.from_numpy(patients[order]))
    for name in NAMES:
        assert got[name] == pytest.approx(want[name], abs=1e-6)
        np.testing.assert_allclose(got["ci95"][name], want["ci95"][name], atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 90), st.integers(1, 400))
def test_counting_is_exact(seed, m, g):
    rng = np.random.default_rng(seed)
    # few distinct values: ties; a wide range of exponents: bins that hold nearly everything
    pool = np.concatenate([rng.standard_normal(20), rng.standard_normal(5) * 1e-30, [0.0, -np.inf]]).astype(np.float32)
    values = rng.choice(pool, g)
    thresholds = -np.sort(-rng.choice(pool[np.isfinite(pool)], m))
    want = (values[None] >= thresholds[:, None]).sum(1)
    np.testing.assert_array_equal(_count_at_least(values, thresholds), want)
    block = torch.from_numpy(np.stack([values, values[::-1]]))
    row = np.repeat([0, 1], [m, 1])
    place = np.r_[np.arange(m) + 1, 1]
    got = _count_on_device(block, row, place, np.r_[thresholds, thresholds[:1]])
    np.testing.assert_array_equal(got, np.r_[want, want[0]])


@pytest.mark.parametrize("n", [4, 33, 250, 1001])
def test_constant_embeddings_find_nobody(n):
    """A dead model must not score, whatever the kernel's rounding does to equal rows."""
    row = torch.randn(513, generator=torch.Generator().manual_seed(n))
    patients = np.repeat(np.arange(n), 2)
    got = retrieval_metrics(row.expand(2 * n, -1), patients, bootstrap=0)
    assert got["rank1"] == 0
    assert got["map"] == pytest.approx(1 / (2 * n - 1))


def test_equal_true_matches_do_not_push_each_other_back():
    embeddings = np.array([[1, 0], [1, 0], [1, 0], [0, 1]], dtype=np.float32)
    got = retrieval_metrics(embeddings, ["a", "a", "a", "b"], bootstrap=0)
    assert got["rank1"] == got["map"] == got["map_at_r"] == 1.0
    assert (got["queries"], got["queries_left_out"], got["singletons"], got["gallery"]) == (3, 1, 1, 4)


def test_a_gap_wider_than_float16_could_hold_still_orders():
    """Similarities that differ in float32's last bits only are not ties."""
    angles = np.array([0.0, 0.0010, 0.0011])
    embeddings = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    embeddings = np.concatenate([embeddings, [[0, 1]]])
    got = retrieval_metrics(embeddings, ["a", "b", "a", "b"], bootstrap=0, per_query=True)
    # from image 0, the wrong image at 1.0 mrad comes before the right one at 1.1
    assert got["per_query"]["first_rank"][0] == 2


@pytest.mark.parametrize("value, words", [(np.nan, "NaN"), (np.inf, "NaN or infinity"), (0.0, "1 are all zero")])
def test_embeddings_without_direction_are_refused(value, words):
    embeddings = np.random.default_rng(0).standard_normal((6, 4))
    embeddings[4] = value
    with pytest.raises(ValueError, match=f"{words}.*row 4 of 6"):
        retrieval_metrics(embeddings, [0, 0, 1, 1, 2, 2])


def test_wrong_calls_are_refused():
    embeddings = np.eye(4)
    with pytest.raises(ValueError, match="4 embeddings, but 3 patient ids"):
        retrieval_metrics(embeddings, [0, 0, 1])
    with pytest.raises(ValueError, match="4 patients have a single image"):
        retrieval_metrics(embeddings, ["secret-1", "secret-2", "secret-3", "secret-4"])
    with pytest.raises(ValueError, match="1 of 4 images have no patient"):
        retrieval_metrics(embeddings, ["a", "a", None, "b"])
    with pytest.raises(ValueError, match="disagree"):
        retrieval_metrics(embeddings, [0, 0, 1, 1], metadata=RetrievalMetadata([0, 1, 1, 1]))
    with pytest.raises(ValueError, match="chunk"):
        retrieval_metrics(embeddings, [0, 0, 1, 1], chunk=0)
    with pytest.raises(ValueError, match="not empty"):
        retrieval_metrics(np.zeros((0, 4)), [])


def test_intervals_hold_the_value_and_depend_on_the_seed_alone(medium):
    embeddings, patients = medium
    first, again = (retrieval_metrics(embeddings, patients, seed=1) for _ in range(2))
    assert first["ci95"] == again["ci95"] != retrieval_metrics(embeddings, patients, seed=2)["ci95"]
    for name in NAMES:
        low, high = first["ci95"][name]
        assert low <= first[name] <= high
    assert "ci95" not in retrieval_metrics(embeddings, patients, bootstrap=0)


def test_ranked_lists_agree_with_the_ranks(medium):
    embeddings, patients = medium
    figures = retrieval_metrics(embeddings, patients, bootstrap=0, per_query=True)["per_query"]
    asked = figures["query"][[5, 400, 17, 5]]
    lists = ranked_lists(embeddings, patients, asked, k=499)
    assert not (lists.image == lists.query[:, None]).any()
    assert (np.diff(lists.similarity, axis=1) <= 0).all()
    np.testing.assert_array_equal(lists.correct.argmax(axis=1) + 1, figures["first_rank"][[5, 400, 17, 5]])
    np.testing.assert_array_equal(lists.correct, patients[lists.image] == patients[asked][:, None])
    longer = ranked_lists(embeddings, patients, asked, k=600)
    assert (longer.image[:, 499:] == -1).all() and np.isnan(longer.similarity[:, 499:]).all()
