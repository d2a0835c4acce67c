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
from monai.data import DataLoader, Dataset
from monai.engines import SupervisedEvaluator
from monai.handlers import from_engine

from monai_god.data.protocol import RetrievalProtocol
from monai_god.handlers import RetrievalHandler, VerificationHandler
from monai_god.metrics import retrieval_metrics, verification_metrics


class Flatten(torch.nn.Module):
    def forward(self, x):
        return x.flatten(1)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 12, 50)
    images = (rng.standard_normal((12, 1, 3, 3))[ids] + rng.standard_normal((50, 1, 3, 3))).astype(np.float32)
    items = [
        {"image": torch.from_numpy(image), "label": 0, "patient_id": f"p{p}", "index": i}
        for i, (image, p) in enumerate(zip(images, ids, strict=True))
    ]
    return items, images.reshape(50, -1), [f"p{p}" for p in ids]


def run(items, handlers, **arguments):
    evaluator = SupervisedEvaluator(
        device=torch.device("cpu"),
        val_data_loader=DataLoader(Dataset(items), batch_size=16),
        network=Flatten(),
        **handlers,
        **arguments,
    )
    evaluator.run()
    return evaluator


@pytest.mark.parametrize("decollate", [True, False])
def test_figures_of_an_evaluator(data, decollate):
    items, embeddings, ids = data
    handlers = {
        "key_val_metric": {"val_map": RetrievalHandler(prefix="val_", per_query=True)},
        "additional_metrics": {"val_auc": VerificationHandler(fars=[0.1], prefix="val_")},
    }
    state = run(items, handlers, decollate=decollate).state
    want = retrieval_metrics(embeddings, ids, per_query=True)
    assert state.metrics["val_map"] == want["map"]
    assert all(state.metrics[f"val_{name}"] == want[name] for name in ("rank1", "rank5", "rank10", "map_at_r"))
    np.testing.assert_equal(state.metric_details["val_map"], want)
    pairs = verification_metrics(embeddings, ids, fars=[0.1])
    assert state.metrics["val_auc"] == state.metrics["val_roc_auc"] == pairs["roc_auc"]
    assert state.metrics["val_tar_at_far_1e-1"] == pairs["tar_at_far_1e-1"]
    # a key metric must be a number: MONAI compares it with the best so far
    assert state.best_metric == want["map"]


def test_output_transform_and_second_run(data):
    items, embeddings, ids = data
    labelled = [{**item, "label": int(item["patient_id"][1:])} for item in items]
    handler = RetrievalHandler(
        key="rank1", bootstrap=0, publish_all=False, output_transform=from_engine(["pred", "label"])
    )
    evaluator = run(labelled, {"key_val_metric": {"rank": handler}})
    want = retrieval_metrics(embeddings, ids, bootstrap=0)
    assert evaluator.state.metrics == {"rank": want["rank1"]}
    evaluator.run()
    assert evaluator.state.metrics == {"rank": want["rank1"]}
    assert evaluator.state.metric_details["rank"]["queries"] == want["queries"], "the second run starts afresh"


def test_protocol_reaches_the_metric(data):
    items, embeddings, ids = data
    with_visits = [{**item, "visit": i % 2} for i, item in enumerate(items)]
    handler = RetrievalHandler(RetrievalProtocol(exclude_same_visit=True), bootstrap=0)
    state = run(with_visits, {"key_val_metric": {"map": handler}}).state
    assert state.metric_details["map"]["protocol"]["exclude_same_visit"] is True
    assert state.metrics["map"] != retrieval_metrics(embeddings, ids, bootstrap=0)["map"]


def test_unknown_key_is_refused():
    with pytest.raises(ValueError, match="key must be one of"):
        RetrievalHandler(key="accuracy")
