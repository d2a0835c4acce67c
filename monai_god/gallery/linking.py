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

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["LabelDisagreement", "label_disagreement", "nearest_neighbours", "pairs_above"]


def _unit(embeddings: Any) -> Tensor:
    z = torch.as_tensor(np.asarray(embeddings), dtype=torch.float32)
    if z.ndim != 2:
        raise ValueError(f"embeddings must be [n, E], got shape {tuple(z.shape)}")
    if not bool(torch.isfinite(z).all()):
        raise ValueError("embeddings hold NaN or infinite values")
    return torch.nn.functional.normalize(z, dim=1)


def _chunks(queries: Tensor, gallery: Tensor, chunk: int) -> Iterator[tuple[int, Tensor]]:
    """Start of a block of queries, and their cosines with the whole gallery [chunk, n]."""
    if queries.shape[1] != gallery.shape[1]:
        raise ValueError(
            f"The two sets were embedded by different models: {queries.shape[1]} and {gallery.shape[1]} numbers each"
        )
    for start in range(0, len(queries), chunk):
        yield start, queries[start : start + chunk] @ gallery.T


def nearest_neighbours(
    queries: Any, gallery: Any | None = None, k: int = 5, chunk: int = 1024
) -> tuple[np.ndarray, np.ndarray]:
    """
    The k most similar images of a gallery, exactly.

    Args:
        queries: [m, E], any length of vector.
        gallery: [n, E]; None for the queries themselves, an image then not being its own neighbour.
        k: how many; fewer where the gallery is smaller.
        chunk: queries compared at once: memory grows with ``chunk`` x n, never with m x n.

    Returns:
        cosines [m, k], descending, and places in the gallery [m, k].

    Raises:
        ValueError: for shapes that do not fit, or values that are not finite.
    """
    q = _unit(queries)
    g = q if gallery is None else _unit(gallery)
    k = min(k, len(g) - (gallery is None))
    values, places = np.empty((len(q), k), np.float32), np.empty((len(q), k), np.int64)
    for start, cosines in _chunks(q, g, chunk):
        rows = torch.arange(len(cosines))
        if gallery is None:
            cosines[rows, start + rows] = -torch.inf
        best = cosines.topk(k)
        values[start : start + len(rows)], places[start : start + len(rows)] = best.values, best.indices
    return values, places


class LabelDisagreement(NamedTuple):
    """
    How far each image's neighbours speak against its patient, see :func:`label_disagreement`.

    Attributes:
        score: [n], above 0 where another patient's image is nearer than all of the image's own patient; NaN where the
            patient has no other image, since nothing can be said then.
        own: [n] place of the most similar image of the same patient, -1 for none.
        other: [n] place of the most similar image of another patient.
    """

    score: np.ndarray
    own: np.ndarray
    other: np.ndarray


def label_disagreement(embeddings: Any, patient_ids: Sequence[object], chunk: int = 1024) -> LabelDisagreement:
    """
    Wrong-patient detection: score each image by the cosine of the nearest image of another patient minus that of the
    nearest image of its own.

    Args:
        embeddings: [n, E].
        patient_ids: n ids, as the records have them.
        chunk: images compared at once.

    Raises:
        ValueError: for lengths that differ, or fewer than two patients.
    """
    z = _unit(embeddings)
    names, code_array = np.unique(np.asarray([str(p) for p in patient_ids]), return_inverse=True)
    if len(code_array) != len(z) or len(names) < 2:
        raise ValueError(
            f"{len(z)} embeddings need as many patient ids, of two patients or more; got {len(code_array)}"
        )
    code = torch.from_numpy(code_array)
    score, own, other = np.empty(len(z), np.float32), np.empty(len(z), np.int64), np.empty(len(z), np.int64)
    for start, cosines in _chunks(z, z, chunk):
        rows = torch.arange(len(cosines))
        same = code[start : start + len(rows), None] == code
        foreign = cosines.masked_fill(same, -torch.inf).max(1)
        same[rows, start + rows] = False
        kin = cosines.masked_fill(~same, -torch.inf).max(1)
        alone = ~same.any(1)
        block = slice(start, start + len(rows))
        score[block] = (foreign.values - kin.values).masked_fill(alone, torch.nan)
        own[block], other[block] = kin.indices.masked_fill(alone, -1), foreign.indices
    return LabelDisagreement(score, own, other)


def pairs_above(
    first: Any, second: Any, threshold: float, chunk: int = 1024
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    All pairs of two sets at least so similar.

    Args:
        first: [m, E].
        second: [n, E].
        threshold: cosine from which a pair is listed.
        chunk: images of the first set compared at once.

    Returns:
        places in the first set, places in the second, and cosines, the most similar pair first.
    """
    a, b = _unit(first), _unit(second)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for start, cosines in _chunks(a, b, chunk):
        rows, columns = (cosines >= threshold).nonzero(as_tuple=True)
        found.append((rows + start, columns, cosines[rows, columns]))
    i, j, s = (torch.cat(part).numpy() for part in zip(*found, strict=True))
    order = np.argsort(-s, kind="stable")
    return i[order], j[order], s[order]
