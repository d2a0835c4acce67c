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
from torch.utils.data import DataLoader

from monai_god.data.sampler import PatientBatchSampler


def ids(counts):
    return [f"p{p}" for p, n in enumerate(counts) for _ in range(n)]


@settings(max_examples=80, deadline=None)
@given(
    counts=st.lists(st.integers(1, 9), min_size=4, max_size=20),
    shape=st.tuples(st.sampled_from([2, 4]), st.integers(2, 4)),
    singletons=st.sampled_from(["leave_out", "repeat"]),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 3),
)
def test_batches(counts, shape, singletons, seed, epoch):
    p, k = shape
    patients = np.asarray(ids(counts))
    least = 1 if singletons == "repeat" else 2
    eligible = {f"p{i}" for i, n in enumerate(counts) if n >= least}
    if len(eligible) < p:
        with pytest.raises(ValueError, match=f"only {len(eligible)} of {len(counts)}"):
            PatientBatchSampler(patients, p, k, seed, singletons)
        return
    sampler = PatientBatchSampler(patients, p, k, seed, singletons)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    for batch in batches:
        groups = np.asarray(batch).reshape(p, k)
        names = patients[groups]
        assert (names == names[:, :1]).all(), "K images of one patient one after another"
        assert len(set(names[:, 0])) == p, "P different patients"
        for group, name in zip(groups, names[:, 0], strict=True):
            assert len(set(group.tolist())) == min(k, counts[int(name[1:])]), "repeats only where images are too few"
    assert {i for batch in batches for i in batch} == {i for i, name in enumerate(patients) if name in eligible}

    parts = []
    for rank in range(2):
        part = PatientBatchSampler(patients, p, k, seed, singletons, rank=rank, world_size=2)
        part.set_epoch(epoch)
        assert len(part) == len(sampler)
        parts.append(list(part))
    assert [first + second for first, second in zip(*parts, strict=True)] == batches

    fresh = PatientBatchSampler(patients, p, k, seed, singletons)
    fresh.set_epoch(epoch)
    assert list(fresh) == batches, "the order depends on (seed, epoch) alone"


def test_epochs_and_seeds_differ():
    sampler = PatientBatchSampler(ids([3] * 20), 4, 2)
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        sampler.seed = seed
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] != orders[1] and orders[0] != orders[2] and orders[1] != orders[2]
    assert list(sampler) == orders[2], "iterating does not advance the epoch"


def test_a_patient_with_many_images_comes_once_a_batch():
    sampler = PatientBatchSampler(ids([40, 2, 2, 2]), 2, 4)
    assert len(sampler) == 10 == len(list(sampler))


def test_in_a_loader():
    loader = DataLoader(list(range(12)), batch_sampler=PatientBatchSampler(ids([3] * 4), 2, 2))
    assert [len(batch) for batch in loader] == [4] * len(loader.batch_sampler)


def test_bad_arguments():
    for arguments, message in (
        ({"patients_per_batch": 1}, "at least 2 patients"),
        ({"images_per_patient": 1}, "2 images each"),
        ({"singletons": "drop"}, "singletons must be"),
        ({"rank": 2, "world_size": 2}, r"rank must be in \[0, 2\)"),
        ({"patients_per_batch": 3, "rank": 0, "world_size": 2}, "make it a multiple"),
        ({"patients_per_batch": 9}, r"\(in a bundle, --batch_size\), or use patients with one image"),
    ):
        with pytest.raises(ValueError, match=message):
            PatientBatchSampler(ids([2] * 8), **{"patients_per_batch": 4, **arguments})


def test_repr_names_no_patient():
    assert repr(PatientBatchSampler(ids([2] * 8), 4, 2, seed=5)) == (
        "PatientBatchSampler(patients=8, patients_per_batch=4, images_per_patient=2, "
        "seed=5, epoch=0, rank=0, world_size=1)"
    )
