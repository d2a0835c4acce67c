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
"""Pictures of what a model finds: queries and their most similar images."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from monai_god.data.protocol import RetrievalMetadata, RetrievalProtocol
from monai_god.metrics.retrieval import ranked_lists, retrieval_metrics
from monai_god.visualize.save import save_figure

__all__ = ["choose_queries", "plot_ranked_lists"]

# the titles say it in words too, for readers who cannot tell green from red
_RIGHT, _WRONG, _QUERY = "#11883A", "#CC1F1A", "#333333"
_TILE = 1.7


def choose_queries(per_query: Mapping[str, np.ndarray], count: int = 3) -> dict[str, np.ndarray]:
    """Queries that show how good and how bad it gets: those of highest, median and lowest average precision.

    Args:
        per_query: of :py:func:`retrieval_metrics` with ``per_query=True``.
        count: queries of each kind; fewer where there are fewer patients, since each kind shows a patient once, and
            no query is shown twice.

    Returns:
        ``best``, ``median`` and ``worst``: positions in ``per_query``.

    Raises:
        ValueError: ``count`` < 1.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}.")
    precision = per_query["map"]
    # equal precision: the query with more to find is the better one, and the one whose first match is lower the worse
    falling = np.lexsort((per_query["query"], per_query["first_rank"], -per_query["matches"], -precision))
    middle = np.argsort(np.abs(np.arange(len(falling)) - (len(falling) - 1) / 2), kind="stable")
    orders = {"best": falling, "worst": falling[::-1], "median": falling[middle]}
    used: set[int] = set()
    chosen = {}
    for name, order in orders.items():
        patients: set[int] = set()
        rows: list[int] = []
        for row in order.tolist():
            patient = int(per_query["patient"][row])
            if len(rows) == count:
                break
            if row not in used and patient not in patients:
                rows.append(row)
                patients.add(patient)
        used.update(rows)
        chosen[name] = np.asarray(rows, dtype=np.int64)
    return {name: chosen[name] for name in ("best", "median", "worst")}


def _picture(image: Any) -> np.ndarray:
    """[3, H, W], [1, H, W] or [H, W], in [0, 1] or uint8, as matplotlib wants it."""
    array = np.asarray(image.detach().cpu() if hasattr(image, "detach") else image)
    if array.dtype == np.uint8:
        array = array / 255.0
    if array.ndim == 3 and array.shape[0] in (1, 3):
        array = array[0] if array.shape[0] == 1 else np.moveaxis(array, 0, 2)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] != 3):
        raise ValueError(f"an image must be [3, H, W], [1, H, W] or [H, W], got shape {array.shape}.")
    return np.clip(array, 0.0, 1.0)


def _draw(axes: Axes, image: Any, colour: str, title: str) -> None:
    axes.imshow(_picture(image), cmap="gray", vmin=0, vmax=1)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(title, fontsize=7, color=colour, pad=3)
    for spine in axes.spines.values():
        spine.set(color=colour, linewidth=3)


def plot_ranked_lists(
    path: str | os.PathLike[str],
    embeddings: Any,
    patient_ids: Any,
    images: Callable[[int], Any] | Sequence[Any],
    *,
    protocol: RetrievalProtocol | None = None,
    metadata: RetrievalMetadata | None = None,
    count: int = 3,
    top: int = 5,
    captions: Sequence[str] | None = None,
    result: Mapping[str, Any] | None = None,
) -> Path:
    """Ranked lists of the best, median and worst queries as one picture.

    A row shows a query, the ``top`` images most similar to it, framed green where they show the same patient and red
    where not, with their similarities, and at the end the first image of the same patient, wherever it ranks.

    Args:
        path: file to write, png, pdf or svg.
        embeddings: [n, d].
        patient_ids: [n]. They are not written into the picture.
        images: gives the picture of image i, [3, H, W] or [H, W] in [0, 1] or uint8; a sequence or a function.
        protocol: which pairs are compared.
        metadata: what the protocol must know of the images.
        count: queries of each kind.
        top: length of the lists.
        captions: [n] a line under each image, for example its file name; none by default.
        result: of :py:func:`retrieval_metrics` with ``per_query=True`` for the same arguments, if there is one already.

    Returns:
        the path.

    Raises:
        ValueError: ``result`` without figures per query, or an image of another shape.
    """
    if result is None:
        result = retrieval_metrics(
            embeddings, patient_ids, protocol=protocol, metadata=metadata, per_query=True, bootstrap=0
        )
    if "per_query" not in result:
        raise ValueError("result holds no figures per query: call retrieval_metrics(..., per_query=True).")
    per_query = result["per_query"]
    chosen = choose_queries(per_query, count)
    rows = [(kind, row) for kind, positions in chosen.items() for row in positions]
    queries = per_query["query"][[row for _, row in rows]]
    lists = ranked_lists(embeddings, patient_ids, queries, top, protocol=protocol, metadata=metadata)
    load: Callable[[int], Any] = images if callable(images) else images.__getitem__

    columns = top + 2
    figure = Figure(figsize=(_TILE * columns + 0.4, (_TILE + 0.3) * len(rows) + 0.5), layout="constrained")
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for axes, (kind, row), query, found, similarity, correct in zip(
        grid, rows, queries, lists.image, lists.similarity, lists.correct, strict=True
    ):
        first_rank = int(per_query["first_rank"][row])
        _draw(axes[0], load(int(query)), _QUERY, f"query, AP {per_query['map'][row]:.2f}")
        axes[0].set_ylabel(kind, fontsize=9)
        shown = [int(query), *found.tolist(), int(per_query["first_match"][row])]
        for place in range(top):
            if found[place] < 0:
                axes[place + 1].set_axis_off()
                continue
            word = "same" if correct[place] else "other"
            colour = _RIGHT if correct[place] else _WRONG
            _draw(axes[place + 1], load(int(found[place])), colour, f"{place + 1}: {similarity[place]:.3f}, {word}")
        _draw(axes[-1], load(shown[-1]), _RIGHT, f"first same: rank {first_rank}")
        if captions is not None:
            for tile, image in zip(axes, shown, strict=True):
                if image >= 0:
                    tile.set_xlabel(captions[image], fontsize=5)
    figure.suptitle(
        f"R1 {result['rank1']:.3f}, mAP {result['map']:.3f}, {result['queries']} queries, "
        f"gallery of {result['gallery']}; frame: green same patient, red other patient; number: cosine similarity",
        fontsize=8,
    )
    return save_figure(figure, path)
