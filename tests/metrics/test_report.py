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

from monai_god.metrics import (
    RETRIEVAL_METRICS,
    metrics_report,
    rank_by_time_gap,
    retrieval_metrics,
    verification_metrics,
    write_json,
    write_metrics,
)


@pytest.fixture(scope="module")
def figures():
    rng = np.random.default_rng(0)
    ids = [f"patient-{i}" for i in np.repeat(np.arange(20), 3)]
    embeddings = rng.standard_normal((20, 8))[np.repeat(np.arange(20), 3)] + rng.standard_normal((60, 8))
    return retrieval_metrics(embeddings, ids, per_query=True), verification_metrics(embeddings, ids)


def test_metrics_json_has_the_agreed_form(figures, tmp_path):
    retrieval, verification = figures
    path = tmp_path / "new" / "metrics.json"
    returned = write_metrics(path, retrieval, components="D", seed=3, verification=verification, rank_by_time_gap=[])
    content = json.loads(path.read_text())
    assert content == json.loads(json.dumps(returned))
    assert content["queries"] == content["gallery"] == 60 and content["patients"] == 20
    assert content["components"] == "D" and content["seed"] == 3
    assert content["protocol"]["singletons"] == "distractors"
    assert {"python", "torch", "monai"} <= set(content["versions"])
    for name in RETRIEVAL_METRICS:
        low, high = content["metrics"][name]["ci95"]
        assert low <= content["metrics"][name]["value"] <= high
    assert set(content["metrics"]["roc_auc"]) == {"value", "ci95", "error_bound"}
    assert set(content["metrics"]["eer"]) == {"value", "error_bound"}
    assert "patient-" not in path.read_text(), "no patient ids"
    assert [file.name for file in path.parent.iterdir()] == ["metrics.json"]


def test_without_intervals_or_verification(figures):
    plain = {key: value for key, value in figures[0].items() if key != "ci95"}
    assert set(metrics_report(plain, components="A", seed=0)["metrics"]["map"]) == {"value"}
    with pytest.raises(ValueError, match="'queries'"):
        metrics_report(plain, components="A", seed=0, queries=5)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, {"x": np.float32(1.5), "y": np.arange(2)})
    assert json.loads(path.read_text()) == {"x": 1.5, "y": [0, 1]}
    with pytest.raises(ValueError, match="a.json is not written"):
        write_json(path, {"x": float("nan")})
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_json(path, {"x": 2})
    assert json.loads(path.read_text())["x"] == 1.5 and len(list(tmp_path.iterdir())) == 1


def test_rank_by_time_gap():
    per_query = {
        "query": np.arange(6),
        "first_match": np.array([1, 0, 3, 2, 5, 4]),
        "first_rank": np.array([1, 3, 7, 1, 2, 2]),
    }
    days = [0, 5, 100, 140, None, 3]
    got = rank_by_time_gap(per_query, days, gaps=(5, 30))
    assert got == [
        {"days": [0.0, 5.0], "queries": 2, "rank1": 0.5, "rank5": 1.0, "median_rank": 2.0},
        {"days": [30.0, None], "queries": 2, "rank1": 0.5, "rank5": 0.5, "median_rank": 4.0},
    ]
    assert rank_by_time_gap(per_query, [None] * 6) == []
    with pytest.raises(ValueError, match="ascending"):
        rank_by_time_gap(per_query, days, gaps=(30, 5))
