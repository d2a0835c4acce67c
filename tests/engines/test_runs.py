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

import logging

import pytest
import torch
from PIL import Image

from monai_god.engines import GraphInferer, build_god_net, find_images, load_run, log_to
from tests.graph_batch import make_batch

SETTINGS = {"in_channels": 12, "components": "D", "num_node_types": 3, "num_nodes": 7, "width": 8, "embed_dim": 9}


def test_network_from_settings_and_weights():
    net = build_god_net({**SETTINGS, "head_init": "random"})
    twin = build_god_net({**SETTINGS, "head_init": "random"}, net.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))


def test_inferer_gives_the_embedding():
    batch = make_batch()
    net = build_god_net({**SETTINGS, "head_init": "random"}).eval()
    whole = GraphInferer()(batch.graphs, net, batch.nodes, batch.g)
    assert torch.equal(whole.z, GraphInferer(embedding_only=True)(batch.graphs, net, batch.nodes, batch.g))


def test_load_run_refuses_other_files(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint.*--ckpt_path"):
        load_run(tmp_path / "none.pt")
    torch.save({"state_dict": {}}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="not the model.pt"):
        load_run(tmp_path / "other.pt")
    torch.save({"network": {}, "settings": {"seed": 1}}, tmp_path / "model.pt")
    assert load_run(tmp_path / "model.pt")["settings"] == {"seed": 1}


def test_find_images(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("a/1.png", "a/b/2.JPG"):
        Image.new("L", (20, 20)).save(tmp_path / name)
    (tmp_path / "a" / "notes.txt").write_text("no image")
    assert [item["image"] for item in find_images(tmp_path)] == [str(tmp_path / "a/1.png"), str(tmp_path / "a/b/2.JPG")]
    with pytest.raises(ValueError, match="no image.*--dataset_dir"):
        find_images(tmp_path / "empty")


def test_log_to_appends(tmp_path):
    root = logging.getLogger()
    before = list(root.handlers)
    log_to(tmp_path / "run" / "log.txt")
    (handler,) = [h for h in root.handlers if h not in before]
    logging.getLogger("monai_god.test").warning("seen")
    handler.close()
    root.removeHandler(handler)
    assert "WARNING monai_god.test: seen" in (tmp_path / "run" / "log.txt").read_text()
