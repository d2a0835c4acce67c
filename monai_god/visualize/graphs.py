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
"""Anatomy graphs drawn over their images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from monai_god.transforms.graph.anatomy_graph import AnatomyGraph
from monai_god.transforms.graph.modality import Modality, get_modality
from monai_god.visualize.save import save_figure

__all__ = ["draw_graph", "save_graph_sheet"]

# Okabe and Ito's palette, told apart with colour-blindness, on dark and on light images
COLOURS = ("#56B4E9", "#0072B2", "#E69F00", "#D55E00", "#009E73", "#F0E442", "#CC79A7", "#FFFFFF")


def _picture(image: Any) -> np.ndarray:
    """[H, W] or [H, W, 3] in [0, 1] of a [C, H, W] or [H, W] image in [0, 1]."""
    array = np.asarray(torch.as_tensor(image).detach().cpu(), dtype=np.float32).clip(0, 1)
    if array.ndim == 2:
        return array
    if array.ndim != 3 or array.shape[0] not in (1, 3):
        raise ValueError(f"expected an image [3, H, W], [1, H, W] or [H, W], got shape {array.shape}")
    return array[0] if array.shape[0] == 1 else array.transpose(1, 2, 0)


def draw_graph(
    ax: Axes, image: Any, graph: AnatomyGraph, modality: str | Modality, edges: bool = True, title: str = ""
) -> None:
    """
    Draw one graph over its image.

    Args:
        ax: where to draw.
        image: square, [3, S, S], [1, S, S] or [S, S], in [0, 1]; any S, since the nodes' positions are relative.
        graph: the graph of this image.
        modality: its modality, registered name or table.
        edges: whether to draw the edges: thin lines, symmetry edges are the long ones.
        title: short text above the picture.
    """
    picture = _picture(image)
    height, width = picture.shape[:2]
    points = graph.pos.numpy() * np.array([width, height]) - 0.5
    ax.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="bilinear")
    if edges and graph.edge_index is not None:
        source, target = graph.edge_index.numpy()
        once = source < target
        lines = np.stack([points[source[once]], points[target[once]]], axis=1)
        ax.add_collection(LineCollection(list(lines), colors="white", linewidths=0.4, alpha=0.35))
    for group in get_modality(modality).groups:
        chosen = points[graph.node_type.numpy() == group.type]
        colour = COLOURS[group.type % len(COLOURS)]
        ax.scatter(chosen[:, 0], chosen[:, 1], s=14, c=colour, edgecolors="black", linewidths=0.5, zorder=3)
    ax.set_xlim(-0.5, width - 0.5)
    ax.set_ylim(height - 0.5, -0.5)
    ax.set_axis_off()
    if title:
        ax.set_title(title, fontsize=8)


def save_graph_sheet(
    path: str | os.PathLike[str],
    images: Sequence[Any],
    graphs: Sequence[AnatomyGraph],
    modality: str | Modality,
    titles: Sequence[str] | None = None,
    columns: int = 4,
    edges: bool = True,
) -> Path:
    """
    Save a sheet of graphs over their images, node types in colour with a legend.

    What a graph lacks stands under its picture.

    Args:
        path: of the PNG; written beside and moved into place.
        images: see :func:`draw_graph`.
        graphs: one for each image.
        modality: of all of them.
        titles: one for each image; none by default. Keep patient identifiers out of them.
        columns: pictures in a row.
        edges: whether to draw the edges.

    Raises:
        ValueError: when there is nothing to draw or the numbers of images, graphs and titles differ.
    """
    if not images or len(images) != len(graphs) or (titles is not None and len(titles) != len(images)):
        raise ValueError(f"need as many graphs and titles as images, at least one: {len(images)}, {len(graphs)}")
    table = get_modality(modality)
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(3.0 * columns, 3.25 * rows + 0.6), layout="constrained", facecolor="white")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for i, ax in enumerate(axes):
        if i >= len(images):
            ax.set_axis_off()
            continue
        draw_graph(ax, images[i], graphs[i], table, edges, titles[i] if titles is not None else "")
        problems = graphs[i].get("problems") or []
        if problems:
            ax.text(0.5, -0.01, "\n".join(problems[:3]), transform=ax.transAxes, ha="center", va="top", fontsize=6)
    kinds = {group.type: group.name for group in reversed(table.groups)}
    handles = [
        Line2D(
            [], [], marker="o", linestyle="", color=COLOURS[kind % len(COLOURS)], markeredgecolor="black", label=name
        )
        for kind, name in sorted(kinds.items())
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), 3 if columns < 3 else 6), fontsize=8
    )
    return save_figure(figure, path)
