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

import numpy as np
import pytest

from monai_god.metrics import PairHistogram, SamePatientCalibrator


@pytest.fixture(scope="module")
def pairs():
    """Pairs whose probability is known: logit p = 12 s - 5."""
    rng = np.random.default_rng(0)
    similarity = rng.uniform(-0.2, 0.9, 20000)
    truth = 1 / (1 + np.exp(5 - 12 * similarity))
    return similarity, rng.random(20000) < truth, truth


@pytest.mark.parametrize("method", ["logistic", "isotonic"])
def test_finds_the_probability(pairs, method, tmp_path):
    similarity, same, truth = pairs
    calibrator = SamePatientCalibrator(method).fit(similarity[::2], same[::2])
    assert np.abs(calibrator(similarity) - truth).mean() < 0.02
    report = calibrator.reliability(similarity[1::2], same[1::2])
    assert report["ece"] < 0.02
    assert report["brier"] == pytest.approx(np.mean((calibrator(similarity[1::2]) - same[1::2]) ** 2))
    assert sum(report["weight"]) == 10000
    grid = np.linspace(-1, 1, 500)
    assert (np.diff(calibrator(grid)) >= 0).all()

    path = tmp_path / "calibrator.json"
    calibrator.save(path)
    assert set(json.loads(path.read_text())) >= {"method", "base_rate"}
    np.testing.assert_array_equal(SamePatientCalibrator.load(path)(grid), calibrator(grid))


def test_logistic_recovers_the_numbers(pairs):
    calibrator = SamePatientCalibrator().fit(pairs[0], pairs[1])
    assert calibrator.slope == pytest.approx(12, rel=0.05) and calibrator.intercept == pytest.approx(-5, rel=0.05)


@pytest.mark.parametrize("method", ["logistic", "isotonic"])
def test_a_histogram_fits_as_its_pairs_do(pairs, method):
    similarity, same, _ = pairs
    histogram = PairHistogram()
    histogram.add(similarity, same)
    grid = np.linspace(-0.2, 0.9, 50)
    got, want = (
        SamePatientCalibrator(method).fit_histogram(histogram),
        SamePatientCalibrator(method).fit(similarity, same),
    )
    np.testing.assert_allclose(got(grid), want(grid), atol=0.01)


def test_prior_shifts_the_odds(pairs):
    calibrator = SamePatientCalibrator().fit(pairs[0], pairs[1])
    p, rate = calibrator([0.4])[0], calibrator.base_rate
    odds = p / (1 - p) * (0.001 / 0.999) / (rate / (1 - rate))
    assert calibrator([0.4], prior=0.001)[0] == pytest.approx(odds / (1 + odds))
    np.testing.assert_allclose(calibrator([0.1, 0.4], prior=rate), calibrator([0.1, 0.4]))
    with pytest.raises(ValueError, match="prior"):
        calibrator([0.1], prior=1.0)


def test_separable_and_useless_similarities_stay_sane():
    apart = SamePatientCalibrator().fit([0.1, 0.2, 0.8, 0.9], [False, False, True, True])
    assert np.isfinite(apart.slope) and 0 < apart([0.1])[0] < 0.5 < apart([0.9])[0] < 1
    backwards = SamePatientCalibrator().fit([0.1, 0.2, 0.8, 0.9], [True, True, False, False])
    assert backwards.slope == 0
    constant = SamePatientCalibrator("isotonic").fit([0.5, 0.5, 0.5, 0.5], [True, False, False, False])
    assert constant([0.5])[0] == 0.25


def test_bad_input():
    with pytest.raises(ValueError, match="not fitted"):
        SamePatientCalibrator()([0.5])
    with pytest.raises(ValueError, match="not fitted"):
        SamePatientCalibrator().to_dict()
    with pytest.raises(ValueError, match="pairs of two"):
        SamePatientCalibrator().fit([0.1, 0.2], [True, True])
    with pytest.raises(ValueError, match="NaN"):
        SamePatientCalibrator().fit([0.1, np.nan], [True, False])
    with pytest.raises(ValueError, match="method"):
        SamePatientCalibrator("beta")


def test_a_foreign_file_is_named(tmp_path):
    path = tmp_path / "other.json"
    for content in ("{}", "[1]", "not JSON"):
        path.write_text(content)
        with pytest.raises(ValueError, match="other.json is not a saved calibrator"):
            SamePatientCalibrator.load(path)
