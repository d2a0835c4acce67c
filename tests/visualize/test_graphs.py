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

from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from monai_god.transforms.graph import BuildAnatomyGraph
from monai_god.visualize.graphs import draw_graph, save_graph_sheet
from tests.anatomy_masks import chest, fundus


def test_nodes_are_drawn_at_their_pixels() -> None:
    graph = BuildAnatomyGraph("cxr")(chest())
    axes = Figure().subplots()
    draw_graph(axes, torch.zeros(3, 448, 448), graph, "cxr", title="film")
    dots = [collection for collection in axes.collections if len(collection.get_offsets()) > 1]
    assert [len(dot.get_offsets()) for dot in dots] == [24, 24, 24, 24, 16, 16]
    drawn = np.concatenate([dot.get_offsets() for dot in dots])
    np.testing.assert_allclose(drawn, graph.pos.numpy() * 448 - 0.5, atol=1e-3)
    # rows run downwards
    assert axes.get_ylim()[0] > axes.get_ylim()[1]


def test_sheet(tmp_path: Path) -> None:
    masks, landmarks = fundus()
    graphs = [BuildAnatomyGraph("fundus")(masks, landmarks), BuildAnatomyGraph("fundus")(masks, {})]
    target = save_graph_sheet(
        tmp_path / "new" / "sheet.png", [torch.rand(3, 64, 64), torch.rand(1, 64, 64)], graphs, "fundus"
    )
    picture = np.array(Image.open(target))
    assert picture.shape[0] > 200 and picture.std() > 10
    assert [path.name for path in target.parent.iterdir()] == ["sheet.png"]


def test_sheet_refuses_what_does_not_fit(tmp_path: Path) -> None:
    graph = BuildAnatomyGraph("cxr")(chest())
    with pytest.raises(ValueError, match="as many"):
        save_graph_sheet(tmp_path / "a.png", [], [], "cxr")
    with pytest.raises(ValueError, match="as many"):
        save_graph_sheet(tmp_path / "a.png", [torch.zeros(3, 9, 9)], [graph], "cxr", titles=["a", "b"])
    with pytest.raises(ValueError, match="shape"):
        save_graph_sheet(tmp_path / "a.png", [torch.zeros(2, 9, 9)], [graph], "cxr")
