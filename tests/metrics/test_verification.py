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
from hypothesis import given, settings
from hypothesis import strategies as st

from monai_god.data.protocol import RetrievalMetadata, RetrievalProtocol
from monai_god.metrics import PairHistogram, far_name, pair_histogram, verification_metrics


def all_pairs(embeddings, patients, protocol=None, meta=None):
    """Similarities and labels of all ordered valid pairs, in float64."""
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    n = len(unit)
    patients = np.asarray(patients)
    protocol = protocol or RetrievalProtocol()
    meta = meta or RetrievalMetadata(np.unique(patients, return_inverse=True)[1])
    valid = protocol.valid_pairs(np.arange(n), np.arange(n), meta)
    valid &= meta.is_query[:, None] & meta.is_gallery[None]
    return (unit @ unit.T)[valid], (patients[:, None] == patients[None])[valid]


def naive_auc(similarity, same):
    differences = similarity[same][:, None] - similarity[~same][None]
    return np.mean((differences > 0) + 0.5 * (differences == 0))


def naive_tar(similarity, same, far):
    """The best over all thresholds at a similarity."""
    best = 0.0
    for threshold in np.unique(similarity):
        if np.mean(similarity[~same] >= threshold) <= far:
            best = max(best, np.mean(similarity[same] >= threshold))
    return best


def naive_eer(similarity, same):
    """Lower and upper end of what any reading of the step curve can call the equal error rate."""
    low, high = 0.0, 1.0
    for threshold in [*np.unique(similarity), 2.0]:
        far, frr = np.mean(similarity[~same] >= threshold), np.mean(similarity[same] < threshold)
        low, high = max(low, min(far, frr)), min(high, max(far, frr))
    return low, high


def sample(seed, n=70, patients=15, d=6, noise=1.0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, patients, n)
    return rng.standard_normal((patients, d))[ids] + noise * rng.standard_normal((n, d)), ids


# the same examples each time: a pair within float32 rounding of a bin's border may count on either side
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([64, 1000, 2**16]), st.sampled_from([0.3, 1.0, 3.0]))
def test_every_figure_is_within_its_bound_of_the_naive_one(seed, bins, noise):
    embeddings, ids = sample(seed, noise=noise)
    similarity, same = all_pairs(embeddings, ids)
    got = verification_metrics(embeddings, ids, bins=bins, fars=(0.1, 0.01), bootstrap=0, chunk=17)
    assert got["genuine_pairs"] == same.sum() and got["impostor_pairs"] == (~same).sum()
    assert abs(got["roc_auc"] - naive_auc(similarity, same)) <= got["error_bound"]["roc_auc"] + 1e-6
    for far in (0.1, 0.01):
        name = f"tar_at_far_{far_name(far)}"
        want = naive_tar(similarity, same, far)
        assert got[name] - 1e-9 <= want <= got[name] + got["error_bound"][name] + 1e-9
        threshold = got["thresholds"][f"far_{far_name(far)}"]
        assert np.mean(similarity[~same] >= threshold) <= far
        assert np.mean(similarity[~same] >= threshold) == pytest.approx(
            got["far_reached"][f"far_{far_name(far)}"], abs=1e-3
        )
    low, high = naive_eer(similarity, same)
    bound = got["error_bound"]["eer"] + 1e-6
    assert min(low, high) - bound <= got["eer"] <= max(low, high) + bound
    if bins == 2**16:
        assert got["error_bound"]["roc_auc"] < 1e-4


def test_separated_and_constant_embeddings():
    embeddings = np.repeat(np.eye(8), 2, axis=0)
    got = verification_metrics(embeddings, np.repeat(np.arange(8), 2))
    assert got["roc_auc"] == 1 and got["eer"] == 0 and got["tar_at_far_1e-4"] == 1
    assert got["ci95"]["roc_auc"] == [1, 1]
    got = verification_metrics(np.ones((16, 4)), np.repeat(np.arange(8), 2))
    assert got["roc_auc"] == 0.5 and got["eer"] == 0.5 and got["tar_at_far_1e-2"] == 0
    assert got["error_bound"]["roc_auc"] == 0.5, "nothing is decided, and it says so"


def test_rules_of_the_protocol_hold():
    embeddings, ids = sample(5)
    items = [
        {"patient_id": str(p), "image": f"{i}", "visit": i % 2, "laterality": "LR"[i % 3 == 0], "is_query": i % 5 > 0}
        for i, p in enumerate(ids)
    ]
    items[3]["near_duplicate_of"] = "10"
    meta = RetrievalMetadata.from_items(items)
    for protocol in (
        RetrievalProtocol(),
        RetrievalProtocol(exclude_same_visit=True),
        RetrievalProtocol(laterality="contralateral_eye"),
    ):
        similarity, same = all_pairs(embeddings, ids, protocol, meta)
        got = verification_metrics(embeddings, ids, protocol=protocol, metadata=meta, bootstrap=0)
        assert got["genuine_pairs"] == same.sum() and got["impostor_pairs"] == (~same).sum()
        assert got["roc_auc"] == pytest.approx(naive_auc(similarity, same), abs=got["error_bound"]["roc_auc"] + 1e-6)


def test_intervals_come_from_patients():
    embeddings, ids = sample(2, n=300, patients=60)
    got = verification_metrics(embeddings, ids, fars=(0.1,))
    for name in ("roc_auc", "tar_at_far_1e-1"):
        low, high = got["ci95"][name]
        assert low < got[name] < high
    assert "eer" not in got["ci95"]


def test_a_list_of_pairs():
    rng = np.random.default_rng(0)
    same = rng.random(400) < 0.3
    similarity = np.clip(0.3 * same + 0.3 * rng.standard_normal(400), -1, 1)
    histogram = PairHistogram()
    histogram.add(similarity[:150], same[:150])
    histogram.add(similarity[150:], same[150:])
    auc, bound = histogram.roc_auc()
    assert auc == pytest.approx(naive_auc(similarity, same), abs=bound + 1e-6)
    with pytest.raises(ValueError, match="cosines"):
        histogram.add([np.nan], [True])
    with pytest.raises(ValueError, match="1 similarities, but 2 labels"):
        histogram.add([0.1], [True, False])
    with pytest.raises(ValueError, match="far must lie"):
        histogram.at_far(0)


def test_chunks_do_not_matter():
    embeddings, ids = sample(9)
    first = pair_histogram(embeddings, ids, bins=1000, chunk=1)
    for chunk in (13, None):
        again = pair_histogram(embeddings, ids, bins=1000, chunk=chunk)
        np.testing.assert_array_equal(again.impostor, first.impostor)
        np.testing.assert_array_equal(again.genuine, first.genuine)
    with pytest.raises(ValueError, match="bins"):
        PairHistogram(1)


def test_one_kind_of_pairs_is_an_error():
    with pytest.raises(ValueError, match="there are 0 and 6"):
        verification_metrics(np.eye(3), ["a", "b", "c"])


@pytest.mark.parametrize(
    "far, name", [(1e-2, "1e-2"), (0.001, "1e-3"), (2.5e-5, "2.5e-5"), (0.1, "1e-1"), (1.0, "1e0")]
)
def test_names_of_rates(far, name):
    assert far_name(far) == name
