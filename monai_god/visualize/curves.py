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
"""Curves of a training run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from monai_god.visualize.save import save_figure

__all__ = ["plot_curves"]

_STEPS = ("epoch", "iteration", "step")
# Okabe and Ito, without the yellow that white paper swallows
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_STYLES = ("-", "--", ":", "-.")


def _panel(name: str) -> str:
    low = name.lower()
    if "loss" in low:
        return "loss"
    if low in ("lr", "learning_rate") or low.startswith(("lr_", "learning_rate_")):
        return "learning rate"
    return "metric"


def _table(history: Any) -> pd.DataFrame:
    if isinstance(history, (str, os.PathLike)):
        where = os.fspath(history)
        try:
            table = pd.read_csv(where)
        except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError) as error:
            raise ValueError(f"{where}: not a CSV table ({error}).") from error
    else:
        where = "history"
        table = pd.DataFrame([dict(row) for row in history])
    numbers = table.apply(pd.to_numeric, errors="coerce").dropna(axis=1, how="all")
    if not len(numbers) or not any(name not in _STEPS for name in numbers):
        raise ValueError(f"{where}: no numbers to draw: expected a row per epoch, for example epoch, loss, val_map.")
    return numbers


def plot_curves(
    history: Sequence[Mapping[str, Any]] | str | os.PathLike[str], path: str | os.PathLike[str], title: str = ""
) -> Path:
    """Draw losses, metrics and learning rates of a run, one panel each, as far as there are any.

    Args:
        history: a row per epoch, as mappings from name to number, or a CSV file with such rows. ``epoch`` (or
            ``iteration``, ``step``) is the horizontal axis, else the number of the row. Names with ``loss`` go to the
            first panel, ``lr`` to the last, all others are metrics, whose best value is marked; rows may lack a name.
            Columns without numbers are left out.
        path: file to write, png, pdf or svg.
        title: above all panels.

    Returns:
        the path.

    Raises:
        ValueError: nothing to draw, or a CSV file that is none.
    """
    table = _table(history)
    step = next((name for name in _STEPS if name in table), None)
    x = table[step].to_numpy(float) if step else np.arange(1, len(table) + 1, dtype=float)
    panels: dict[str, list[str]] = {"loss": [], "metric": [], "learning rate": []}
    for name in table.columns:
        if name not in _STEPS:
            panels[_panel(name)].append(name)
    used = {panel: names for panel, names in panels.items() if names}

    figure = Figure(figsize=(5.2 * len(used), 3.9), layout="constrained")
    for axes, (panel, names) in zip(figure.subplots(1, len(used), squeeze=False)[0], used.items(), strict=True):
        for number, name in enumerate(names):
            y = table[name].to_numpy(float)
            known = np.isfinite(y) & np.isfinite(x)
            colour = _COLOURS[number % len(_COLOURS)]
            label = name
            if panel == "metric" and known.any():
                # of an equal error rate the lowest is the best
                best = np.flatnonzero(known)[np.argmax(-y[known] if name.endswith("eer") else y[known])]
                label = f"{name} (best {y[best]:.3f} at {x[best]:g})"
                axes.plot(x[best], y[best], "o", color=colour, markersize=5)
            style = _STYLES[number // len(_COLOURS) % len(_STYLES)]
            # a mark on every point: a curve of one epoch would not be seen otherwise
            marker = "." if known.sum() < 40 else None
            axes.plot(x[known], y[known], style, color=colour, marker=marker, linewidth=1.4, label=label)
        axes.set_title(panel, fontsize=10)
        axes.set_xlabel(step or "row")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
        values = table[names].to_numpy(float)
        if panel == "learning rate" and (values[np.isfinite(values)] > 0).all():
            axes.set_yscale("log")
    if title:
        figure.suptitle(title, fontsize=11)
    return save_figure(figure, path)
