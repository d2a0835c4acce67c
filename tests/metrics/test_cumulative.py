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
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from monai.data import MetaTensor

from monai_god.data.protocol import RetrievalMetadata, RetrievalProtocol
from monai_god.metrics import RetrievalMetric, VerificationMetric, retrieval_metrics, verification_metrics

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 15, 61)
    embeddings = torch.from_numpy(rng.standard_normal((15, 8))[ids] + rng.standard_normal((61, 8))).float()
    items = [
        {
            "patient_id": f"p{p}",
            "image": f"{i:03}.png",
            "visit": i % 2,
            "laterality": "LR"[i % 3 > 0],
            "other": object(),
        }
        for i, p in enumerate(ids)
    ]
    items[7]["near_duplicate_of"] = "005.png"
    return embeddings, items


def test_batches_give_what_one_call_gives(data):
    embeddings, items = data
    protocol = RetrievalProtocol(exclude_same_visit=True, laterality="same_eye")
    arguments = {
        "embeddings": embeddings,
        "patient_ids": [item["patient_id"] for item in items],
        "protocol": protocol,
        "metadata": RetrievalMetadata.from_items(items),
    }
    retrieval, verification = RetrievalMetric(protocol, per_query=True), VerificationMetric(protocol, fars=[0.1])
    for start in range(0, 61, 16):
        part = slice(start, start + 16)
        retrieval(embeddings[part], items[part])
        verification(list(embeddings[part]), items[part])
    got, want = retrieval.aggregate(), retrieval_metrics(**arguments, per_query=True)
    np.testing.assert_equal(got, want)
    np.testing.assert_equal(verification.aggregate(), verification_metrics(**arguments, fars=[0.1]))
    retrieval.reset()
    with pytest.raises(ValueError, match="collected nothing"):
        retrieval.aggregate()


@pytest.mark.parametrize("ids", [torch.tensor([0, 0, 1, 1]), ["a", "a", "b", "b"], np.array([3, 3, 5, 5])])
def test_patient_ids_alone_are_enough(ids):
    metric = RetrievalMetric(bootstrap=0)
    metric(torch.eye(4)[[0, 0, 1, 1]], ids)
    assert metric.aggregate()["rank1"] == 1.0


def test_items_dealt_twice_count_once(data):
    embeddings, items = data
    metric = RetrievalMetric(bootstrap=0)
    metric(embeddings, items)
    want = metric.aggregate()
    metric(embeddings[:5], items[:5])
    assert metric.aggregate() == want
    loaded = [{**item, "image": MetaTensor(torch.zeros(1), meta={"filename_or_obj": item["image"]})} for item in items]
    metric(embeddings[5:9], loaded[5:9])
    assert metric.aggregate() == want, "an image that was read is known by its file"


def test_wrong_calls_are_refused(data):
    embeddings, items = data
    metric = RetrievalMetric()
    with pytest.raises(ValueError, match="needs the items"):
        metric(embeddings)
    with pytest.raises(ValueError, match="61 embeddings, but 60 items"):
        metric(embeddings, items[:60])
    with pytest.raises(ValueError, match="1 of 61 items have no 'patient_id'"):
        metric(embeddings, [*items[:60], {"image": "x.png"}])
    with pytest.raises(ValueError, match="batch, dimensions"):
        metric(embeddings[None], items)


WORKER = """
import json, sys
import torch, torch.distributed as dist
from monai_god.data.protocol import RetrievalProtocol
from monai_god.metrics import RetrievalMetric, VerificationMetric
folder, rank = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", world_size=2, rank=rank)
embeddings = torch.load(f"{folder}/embeddings.pt", weights_only=True)
items = json.load(open(f"{folder}/items.json"))
results = {}
for kind, shares in json.load(open(f"{folder}/shares.json")).items():
    results[kind] = []
    for metric in (RetrievalMetric(RetrievalProtocol(exclude_same_visit=True)), VerificationMetric()):
        for start in range(0, len(shares[rank]), 7):
            rows = shares[rank][start : start + 7]
            metric(embeddings[rows], [items[row] for row in rows])
        results[kind].append(metric.aggregate())
json.dump(results, open(f"{folder}/result{rank}.json", "w"))
dist.destroy_process_group()
"""


def test_two_processes_equal_one(data, tmp_path):
    embeddings, items = data
    items = [{key: value for key, value in item.items() if key != "other"} for item in items]
    n = len(items)
    shares = {
        "uneven": [list(range(0, n, 2)), list(range(1, n, 2))],
        # as a distributed sampler does: the first item once more
        "padded": [list(range(0, n, 2)), [*range(1, n, 2), 0]],
        "one empty": [list(range(n)), []],
    }
    torch.save(embeddings, tmp_path / "embeddings.pt")
    (tmp_path / "items.json").write_text(json.dumps(items))
    (tmp_path / "shares.json").write_text(json.dumps(shares))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path), str(rank)], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    want = []
    for metric in (RetrievalMetric(RetrievalProtocol(exclude_same_visit=True)), VerificationMetric()):
        metric(embeddings, items)
        want.append(json.loads(json.dumps(metric.aggregate())))
    for rank in range(2):
        got = json.loads((tmp_path / f"result{rank}.json").read_text())
        assert got == dict.fromkeys(shares, want)
