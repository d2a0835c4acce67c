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

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monai_god.losses import BatchHardTripletLoss


@settings(max_examples=40, deadline=None)
@given(labels=st.lists(st.integers(0, 3), min_size=1, max_size=10), seed=st.integers(0, 1000))
def test_equals_a_loop(labels, seed):
    z = torch.randn(len(labels), 4, generator=torch.Generator().manual_seed(seed))
    loss, mined = BatchHardTripletLoss(0.3)(z, torch.tensor(labels))
    terms = []
    for i, label in enumerate(labels):
        positive = {j: (z[i] - z[j]).norm().item() for j, x in enumerate(labels) if x == label and j != i}
        negative = {j: (z[i] - z[j]).norm().item() for j, x in enumerate(labels) if x != label}
        assert bool(mined.valid[i]) == bool(positive and negative)
        if positive and negative:
            p, n = max(positive, key=positive.get), min(negative, key=negative.get)
            assert (mined.positive[i], mined.negative[i]) == (p, n)
            terms.append(max(0.0, positive[p] - negative[n] + 0.3))
    assert loss.item() == pytest.approx(sum(terms) / len(terms) if terms else 0.0, abs=1e-5)


def test_identical_embeddings_have_finite_gradients():
    z = torch.ones(6, 4, requires_grad=True)
    loss, _ = BatchHardTripletLoss(0.3)(z, torch.tensor([0, 0, 1, 1, 2, 2]))
    loss.backward()
    assert loss.item() == pytest.approx(0.3) and z.grad.isfinite().all()


def test_hinge_takes_other_distances():
    hinge = BatchHardTripletLoss(0.5).hinge
    valid = torch.tensor([True, True, False])
    positive, negative = torch.tensor([1.0, 0.2, 9.0]), torch.tensor([0.8, 2.0, 0.0])
    assert hinge(positive, negative, valid).item() == pytest.approx(0.7 / 2)
