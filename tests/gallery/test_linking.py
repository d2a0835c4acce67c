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

from monai_god.gallery import label_disagreement, nearest_neighbours, pairs_above


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.array([[x @ y / (np.linalg.norm(x) * np.linalg.norm(y)) for y in b] for x in a])


@settings(max_examples=25, deadline=None)
@given(m=st.integers(1, 9), n=st.integers(1, 9), k=st.integers(1, 6), chunk=st.integers(1, 5), seed=st.integers(0, 99))
def test_neighbours_equal_a_loop(m, n, k, chunk, seed):
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((m, 4)), rng.standard_normal((n, 4))
    values, places = nearest_neighbours(a, b, k, chunk)
    for row, expected in enumerate(cosines(a, b)):
        order = sorted(range(n), key=lambda j: -expected[j])[:k]
        assert places[row].tolist() == order
        np.testing.assert_allclose(values[row], expected[order], atol=1e-5)
    values, places = nearest_neighbours(a, None, k, chunk)
    assert values.shape == (m, min(k, m - 1)) and all(row not in places[row] for row in range(m))


@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 12), chunk=st.integers(1, 5), seed=st.integers(0, 99))
def test_disagreement_equals_a_loop(n, chunk, seed):
    rng = np.random.default_rng(seed)
    z, patients = rng.standard_normal((n, 4)), ["p0", "p1", *(f"p{k}" for k in rng.integers(0, 4, n - 2))]
    found, s = label_disagreement(z, patients, chunk), cosines(z, z)
    for i in range(n):
        kin = [j for j in range(n) if j != i and patients[j] == patients[i]]
        foreign = [j for j in range(n) if patients[j] != patients[i]]
        other = max(foreign, key=lambda j: s[i, j])
        assert found.other[i] == other
        if kin:
            own = max(kin, key=lambda j: s[i, j])
            assert found.own[i] == own and found.score[i] == pytest.approx(s[i, other] - s[i, own], abs=1e-5)
        else:
            assert found.own[i] == -1 and np.isnan(found.score[i])


def test_pairs_above_equal_a_loop():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((7, 3)), rng.standard_normal((5, 3))
    i, j, values = pairs_above(a, b, 0.3, chunk=2)
    s = cosines(a, b)
    assert set(zip(i.tolist(), j.tolist(), strict=True)) == {
        (x, y) for x in range(7) for y in range(5) if s[x, y] >= 0.3
    }
    assert (np.diff(values) <= 0).all()
    np.testing.assert_allclose(values, s[i, j], atol=1e-5)
    assert len(pairs_above(a, b, 2.0)[0]) == 0


def test_bad_input():
    with pytest.raises(ValueError, match="NaN"):
        nearest_neighbours(np.array([[1.0, np.nan]]))
    with pytest.raises(ValueError, match="different models"):
        nearest_neighbours(np.ones((2, 3)), np.ones((2, 4)))
    with pytest.raises(ValueError, match="two patients"):
        label_disagreement(np.ones((2, 3)), ["a", "a"])
