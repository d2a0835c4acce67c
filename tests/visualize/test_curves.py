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
from PIL import Image

from monai_god.visualize import curves, plot_curves

HISTORY = [
    {"epoch": 1, "train_loss": 3.0, "lr": 1e-3, "note": "warm-up"},
    {"epoch": 2, "train_loss": 2.0, "lr": 5e-4, "val_map": 0.4, "val_eer": 0.2},
    {"epoch": 3, "train_loss": 1.5, "lr": 1e-4, "val_map": 0.6, "val_eer": 0.1},
    {"epoch": 4, "train_loss": 1.4, "lr": 5e-5, "val_map": 0.5, "val_eer": 0.3},
]


@pytest.fixture
def figures(monkeypatch):
    drawn = []
    monkeypatch.setattr(curves, "save_figure", lambda figure, path: drawn.append(figure) or path)
    return drawn


def test_panels_and_curves(figures):
    plot_curves(HISTORY, "a.png", title="run")
    panels = {axes.get_title(): axes for axes in figures[0].axes}
    assert list(panels) == ["loss", "metric", "learning rate"]
    (loss,) = panels["loss"].get_lines()
    np.testing.assert_array_equal(loss.get_xydata(), [[1, 3], [2, 2], [3, 1.5], [4, 1.4]])
    labels = [text.get_text() for text in panels["metric"].get_legend().get_texts()]
    assert labels == ["val_map (best 0.600 at 3)", "val_eer (best 0.100 at 3)"]
    known = next(line for line in panels["metric"].get_lines() if line.get_label() == labels[0])
    np.testing.assert_array_equal(known.get_xdata(), [2, 3, 4])
    assert panels["learning rate"].get_yscale() == "log"


def test_csv_gives_the_same(figures, tmp_path):
    path = tmp_path / "history.csv"
    names = ["epoch", "train_loss", "lr", "val_map", "val_eer", "note"]
    path.write_text("\n".join([",".join(names)] + [",".join(str(row.get(n, "")) for n in names) for row in HISTORY]))
    plot_curves(HISTORY, "a.png")
    plot_curves(path, "a.png")
    for first, second in zip(figures[0].axes, figures[1].axes, strict=True):
        for one, other in zip(first.get_lines(), second.get_lines(), strict=True):
            np.testing.assert_array_equal(one.get_xydata(), other.get_xydata())


def test_written_to_a_file(tmp_path):
    path = plot_curves([{"loss": 1.0}], tmp_path / "new" / "curves.png")
    assert np.asarray(Image.open(path).convert("L")).min() < 200
    assert [file.name for file in path.parent.iterdir()] == ["curves.png"]
    assert plot_curves(HISTORY, tmp_path / "curves.svg").read_text().startswith("<?xml")


def test_nothing_to_draw_is_an_error(tmp_path):
    for history in ([], [{"epoch": 1}], [{"note": "x"}]):
        with pytest.raises(ValueError, match="history: no numbers"):
            plot_curves(history, tmp_path / "a.png")
    path = tmp_path / "empty.csv"
    path.write_text("")
    with pytest.raises(ValueError, match="empty.csv: not a CSV"):
        plot_curves(path, tmp_path / "a.png")
