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

import csv

import numpy as np
import pytest
import torch
from monai.transforms import Compose
from PIL import Image
from torch import nn

from monai_god.data import FeatureStore, generate_cxr_phantoms, load_section
from monai_god.engines import CachedGraphDataset, collate_graphs, describe_transform, graph_tensors, prepare_graph_batch
from monai_god.networks.nets import Backbone
from monai_god.transforms import (
    AlignToAnatomyd,
    BuildAnatomyGraphd,
    LoadMedicalImaged,
    LocalContrastNormalized,
    ParseCXRAnatomyd,
)


class Counting(nn.Module):
    """A small feature extractor that counts the images it sees."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 6, 8, stride=8)
        self.images = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.images += len(x)
        return self.conv(x)


def steps(mode: str = "affine") -> Compose:
    return Compose(
        [
            LoadMedicalImaged("image"),
            ParseCXRAnatomyd("image"),
            LocalContrastNormalized("image"),
            AlignToAnatomyd("image", mode=mode, output_size=112, anatomy_size=112),
            BuildAnatomyGraphd("anatomy", modality="cxr"),
        ]
    )


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "set"
    generate_cxr_phantoms(folder, patients=5, visits=2, size=96, num_workers=0, progress=False)
    return load_section(folder, "training")


@pytest.fixture
def backbone():
    return Backbone(Counting(), "counting", 6, 112, (14, 14))


def test_backbone_sees_each_image_once(items, backbone, tmp_path):
    store = FeatureStore(tmp_path / "features")
    first = CachedGraphDataset(items, steps(), backbone, store, batch_size=2)
    assert backbone.features.images == len(first) == len(items) == len(store)
    again = CachedGraphDataset(items, steps(), backbone, FeatureStore(tmp_path / "features"), num_workers=2)
    assert backbone.features.images == len(items)
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a["graph"].x, b["graph"].x) and a["patient_id"] == b["patient_id"]


def test_features_are_those_of_the_parts(items, backbone, tmp_path):
    dataset = CachedGraphDataset(items, steps(), backbone, FeatureStore(tmp_path / "features"))
    d = steps()(dict(items[1]))
    g, feature_map = backbone(d["image"].as_tensor()[None].float())
    graph = dataset.graph(1)
    torch.testing.assert_close(graph.g, g, atol=1e-5, rtol=1e-5)
    expected = torch.zeros(graph.num_nodes, 6)  # Eq. 1, by a loop
    for i in range(graph.num_nodes):
        for cell in range(196):
            expected[i] += d["graph"].pool[i, cell] * feature_map[0, :, cell // 14, cell % 14]
    torch.testing.assert_close(graph.x, expected, atol=2e-3, rtol=2e-3)  # kept in half precision
    assert torch.equal(graph.pos, d["graph"].pos) and torch.equal(graph.edge_index, d["graph"].edge_index)


def test_other_settings_other_features(items, backbone, tmp_path):
    store = FeatureStore(tmp_path / "features")
    CachedGraphDataset(items, steps(), backbone, store)
    CachedGraphDataset(items, steps("none"), backbone, store)
    assert len(store) == 2 * len(items)
    assert describe_transform(steps()) == describe_transform(steps())
    assert describe_transform(steps()) != describe_transform(steps("none"))


def test_the_segmenters_weights_are_part_of_the_key(monkeypatch):
    before = describe_transform(steps())
    monkeypatch.setattr("monai_god.transforms.SegmentCXRAnatomy.fingerprint", staticmethod(lambda: "other weights"))
    assert describe_transform(steps()) != before


def test_an_edited_image_is_extracted_again(items, backbone, tmp_path):
    copy = tmp_path / "film.png"
    picture = np.array(Image.open(items[0]["image"]))
    Image.fromarray(picture).save(copy)
    edited = [{**items[0], "image": str(copy)}, *items[1:]]
    store = FeatureStore(tmp_path / "features")
    CachedGraphDataset(edited, steps(), backbone, store)
    picture[:20] = 255 - picture[:20]
    Image.fromarray(picture).save(copy)
    CachedGraphDataset(edited, steps(), backbone, store)
    assert backbone.features.images == len(items) + 1


def test_bad_items_are_left_out_counted_and_listed(items, backbone, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"\x89PNG broken")
    broken = [{**items[0], "image": str(tmp_path / "broken.png")}, *items]
    dataset = CachedGraphDataset(broken, steps(), backbone, FeatureStore(tmp_path / "cache" / "features"))
    assert len(dataset) == len(items) and len(dataset.failed) == 1
    with open(tmp_path / "cache" / "unreadable.csv") as file:
        (row,) = csv.DictReader(file)
    assert row["file"].endswith("broken.png") and "broken.png" in row["reason"]
    with pytest.raises(ValueError, match="None of the 1 films is usable; the first reason: Cannot read"):
        CachedGraphDataset(broken[:1], steps(), backbone, FeatureStore(tmp_path / "b"), name="films")


RLE = {"Height": "96", "Width": "96", "Left Lung": "4000 9", "Right Lung": "3000 9", "Heart": "5000 9"}
BAD_ANATOMY = {
    "mask of another size": ({"heart": "small.png"}, "small.png"),
    "mask that is text": ({"left_lung": "text.png"}, "text.png"),
    "mask that is gone": ({"right_lung": "gone.png"}, "gone.png"),
    "RLE with a word": ({"chexmask": {**RLE, "Left Lung": "12 x"}}, "film.png"),
    "RLE beyond the image": ({"chexmask": {**RLE, "Heart": "9210 400"}}, "film.png"),
    "RLE with an odd number": ({"chexmask": {**RLE, "Heart": "1 2 3"}}, "film.png"),
    "RLE of another shape": ({"chexmask": {**RLE, "Height": "64", "Width": "96"}}, "film.png"),
    "RLE without a column": ({"chexmask": {k: v for k, v in RLE.items() if k != "Heart"}}, "film.png"),
}


@pytest.mark.parametrize("kind", BAD_ANATOMY)
def test_bad_anatomy_names_its_file_and_stops_nothing(items, backbone, tmp_path, kind):
    (tmp_path / "text.png").write_text("no picture")
    Image.fromarray(np.zeros((30, 60), np.uint8)).save(tmp_path / "small.png")
    Image.open(items[0]["image"]).save(tmp_path / "film.png")
    given, named = BAD_ANATOMY[kind]
    given = {k: str(tmp_path / v) if isinstance(v, str) else v for k, v in given.items()}
    bad = {"image": str(tmp_path / "film.png"), "patient_id": "secret-77", **given}
    dataset = CachedGraphDataset([bad, *items], steps(), backbone, FeatureStore(tmp_path / "cache" / "features"))
    ((file, reason),) = dataset.failed
    assert len(dataset) == len(items) and file.endswith("film.png")
    assert named in reason and "secret" not in reason, reason


def test_a_grid_that_does_not_fit_is_named(items, tmp_path):
    class Half(Counting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[..., ::2, ::2]

    wrong = Backbone(Half(), "half", 6, 112, (7, 7))
    with pytest.raises(ValueError, match="196 cells.* 49"):
        CachedGraphDataset(items, steps(), wrong, FeatureStore(tmp_path / "features"))


def test_batches(items, backbone, tmp_path):
    dataset = CachedGraphDataset(items, steps(), backbone, FeatureStore(tmp_path / "features"))
    batch = collate_graphs([dataset[0], dataset[2], dataset[3]])
    dense, nodes, g = graph_tensors(batch["graph"], "cpu")
    assert nodes.shape == (3, 128, 6) and g.shape == (3, 6) and bool(dense.mask.all())
    torch.testing.assert_close(nodes[1], dataset.graph(2).x)
    assert batch["label"].tolist() == [dataset.labels[i] for i in (0, 2, 3)] and "laterality" not in batch
    inputs, (labels, descriptor), more, keywords = prepare_graph_batch(batch, "cpu")
    assert torch.equal(more[0], nodes) and torch.equal(descriptor, g) and keywords == {} and len(labels) == 3
    assert inputs.adjacency.shape == (3, 128, 128)


def test_problems_of_the_anatomy_are_counted(items, backbone, tmp_path):
    empty = tmp_path / "empty.png"
    Image.fromarray(np.zeros((96, 96), np.uint8)).save(empty)
    data = [{**items[0], "heart": str(empty)}, *items[1:]]
    dataset = CachedGraphDataset(data, steps(), backbone, FeatureStore(tmp_path / "features"))
    assert sum(count for problem, count in dataset.problems().items() if "heart" in problem) >= 1
    assert dataset.graph(0).num_nodes == 96
