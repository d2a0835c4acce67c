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
from PIL import Image

from monai_god.data import load_section
from monai_god.data.protocol import RetrievalMetadata
from monai_god.metrics import ranked_lists, retrieval_metrics
from monai_god.visualize import choose_queries, plot_ranked_lists
from monai_god.visualize import ranked_lists as module


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    ids = np.array([f"patient-{i}" for i in np.repeat(np.arange(12), 4)])
    embeddings = rng.standard_normal((12, 6))[np.repeat(np.arange(12), 4)] + rng.standard_normal((48, 6))
    return embeddings, ids, rng.random((48, 3, 20, 16)).astype(np.float32)


def test_best_median_and_worst(data):
    embeddings, ids, _ = data
    per_query = retrieval_metrics(embeddings, ids, per_query=True, bootstrap=0)["per_query"]
    chosen = choose_queries(per_query, 3)
    precision = per_query["map"]
    assert precision[chosen["best"][0]] == precision.max() and precision[chosen["worst"][0]] == precision.min()
    assert abs(precision[chosen["median"][0]] - np.median(precision)) < 0.05
    shown = np.concatenate(list(chosen.values()))
    assert len(set(shown.tolist())) == 9
    for rows in chosen.values():
        assert len(set(per_query["patient"][rows])) == 3, "a patient once in each kind"
    with pytest.raises(ValueError, match="count"):
        choose_queries(per_query, 0)


def test_few_queries_are_shown_once(data):
    embeddings, ids, _ = data
    per_query = retrieval_metrics(embeddings[2:6], ids[2:6], per_query=True, bootstrap=0)["per_query"]
    chosen = choose_queries(per_query, 5)
    shown = np.concatenate(list(chosen.values()))
    assert sorted(shown) == sorted(set(shown.tolist())) and len(shown) == 4


def test_frames_and_titles_say_who_is_who(data, tmp_path, monkeypatch):
    embeddings, ids, images = data
    figures = []
    monkeypatch.setattr(module, "save_figure", lambda figure, path: figures.append(figure) or path)
    plot_ranked_lists(tmp_path / "a.png", embeddings, ids, torch.from_numpy(images), count=2, top=4)
    result = retrieval_metrics(embeddings, ids, per_query=True, bootstrap=0)
    rows = np.concatenate(list(choose_queries(result["per_query"], 2).values()))
    lists = ranked_lists(embeddings, ids, result["per_query"]["query"][rows], 4)
    axes = np.array(figures[0].axes).reshape(6, 6)
    text = []
    for i, row in enumerate(rows):
        text.append(axes[i, 0].get_title())
        for place in range(4):
            title = axes[i, place + 1].get_title()
            same = ids[lists.image[i, place]] == ids[lists.query[i]]
            assert title == f"{place + 1}: {lists.similarity[i, place]:.3f}, {'same' if same else 'other'}"
            colour = axes[i, place + 1].spines["top"].get_edgecolor()
            assert (colour[1] > colour[0]) == same, "green for the same patient, red for another"
            shown = axes[i, place + 1].images[0].get_array()
            np.testing.assert_allclose(shown, np.moveaxis(images[lists.image[i, place]], 0, 2))
        assert axes[i, 5].get_title() == f"first same: rank {result['per_query']['first_rank'][row]}"
    everything = " ".join(text + [a.get_xlabel() + a.get_ylabel() for a in axes.flat]) + figures[0].get_suptitle()
    assert "patient-" not in everything
    assert f"R1 {result['rank1']:.3f}" in everything


def test_captions_and_short_galleries(data, tmp_path, monkeypatch):
    embeddings, ids, images = data
    figures = []
    monkeypatch.setattr(module, "save_figure", lambda figure, path: figures.append(figure) or path)
    names = [f"file{i}" for i in range(4)]
    plot_ranked_lists(tmp_path / "a.png", embeddings[2:6], ids[2:6], lambda i: images[i], captions=names)
    axes = np.array(figures[0].axes).reshape(-1, 7)
    assert axes[0, 0].get_xlabel().startswith("file") and axes[0, 4].get_title() == "", "three others, not five"


@pytest.mark.parametrize("shape", [(20, 16), (1, 20, 16), (3, 20, 16)])
def test_kinds_of_images(data, tmp_path, shape):
    embeddings, ids, _ = data
    picture = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    path = plot_ranked_lists(tmp_path / "new" / "a.png", embeddings, ids, lambda i: picture, count=1, top=2)
    assert Image.open(path).size[0] > 300
    assert [file.name for file in path.parent.iterdir()] == ["a.png"]
    with pytest.raises(ValueError, match=r"got shape \(2, 20, 16\)"):
        plot_ranked_lists(tmp_path / "b.png", embeddings, ids, lambda i: np.zeros((2, 20, 16)), count=1)
    with pytest.raises(ValueError, match="per_query=True"):
        plot_ranked_lists(tmp_path / "b.png", embeddings, ids, lambda i: picture, result={})
    with pytest.raises(ValueError, match="known formats"):
        plot_ranked_lists(tmp_path / "b.bmpx", embeddings, ids, lambda i: picture, count=1)
    assert not (tmp_path / "b.png").exists()


def test_real_films(shared_data, tmp_path):
    items = load_section(shared_data / "cxr", "validation")[:40]

    def picture(i):
        return np.asarray(Image.open(items[i]["image"]).convert("L"))

    small = [np.asarray(Image.fromarray(picture(i)).resize((8, 8)), dtype=float).ravel() for i in range(40)]
    path = plot_ranked_lists(
        tmp_path / "ranked.png",
        np.stack(small) - np.mean(small, axis=0),
        [item["patient_id"] for item in items],
        picture,
        metadata=RetrievalMetadata.from_items(items),
        count=1,
    )
    assert np.asarray(Image.open(path)).std() > 20
