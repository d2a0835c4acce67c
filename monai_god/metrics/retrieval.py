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
"""Retrieval metrics: exact, and never more than a block of similarities in memory."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from monai_god.data.protocol import RetrievalMetadata, RetrievalProtocol
from monai_god.metrics.bootstrap import bootstrap_interval, patient_bootstrap
from monai_god.metrics.pairs import BlockOfPairs, EvaluationPairs, unit_embeddings, worker_threads

__all__ = ["RETRIEVAL_METRICS", "RankedLists", "ranked_lists", "retrieval_metrics"]

RETRIEVAL_METRICS = ("rank1", "rank5", "rank10", "map", "map_at_r", "r_precision")

# thresholds up to which one comparison each is cheaper than the histogram
_FEW = 32
_BINS = 4096


def retrieval_metrics(
    embeddings: Any,
    patient_ids: Any,
    *,
    protocol: RetrievalProtocol | None = None,
    metadata: RetrievalMetadata | None = None,
    per_query: bool = False,
    bootstrap: int = 1000,
    seed: int = 0,
    chunk: int | None = None,
    device: torch.device | str | None = None,
    query_embeddings: Any = None,
) -> dict[str, Any]:
    """Rank-k, mAP, mAP@R and R-precision of cosine retrieval, every other image being the gallery of each image.

    Exact and streaming: similarities are taken block by block in float32, and the rank of each true match is its
    place among the true matches plus the number of wrong images at least as similar; nothing is sorted by similarity
    but the few true matches, and no matrix of all pairs exists. Ties are pessimistic: a wrong image as similar as a
    true match ranks before it, so that constant embeddings score near 0.

    Definitions, for a query with R true matches at ranks r_1 < ... < r_R, averaged over the queries:

    - rank1, rank5, rank10 (CMC): r_1 <= k. rank1 is also called precision@1.
    - map: mean over j of j / r_j.
    - map_at_r: sum over the j with r_j <= R of j / r_j, divided by R.
    - r_precision: share of the j with r_j <= R.

    Args:
        embeddings: [n, d] tensor or array, brought to unit length here.
        patient_ids: [n] str or int.
        protocol: which pairs are compared; by default each image with every other one.
        metadata: what the protocol must know of the images (visit, near-duplicates, ...).
        per_query: also return the figures of every query.
        bootstrap: number of patient resamples for the 95 % intervals; 0 for none.
        seed: of the resampling.
        chunk: queries in a block. It does not change the result but for pairs whose similarities differ by rounding.
        device: where the products are taken, for example ``"cuda"``.
        query_embeddings: [n, d], the same images as queries, where they are not what they are as gallery (spoiled, or
            photographed again); an image is still never compared with itself.

    Returns:
        A dictionary: the six figures as floats by the names above; ``ci95``: name to [low, high]; ``queries``,
        ``gallery``, ``patients`` (with at least one query), ``queries_left_out`` (no valid image of their patient to
        find), ``singletons`` (patients with one image): counts; ``protocol``: the rules. With ``per_query`` also
        ``per_query``: arrays [queries] ``query`` (index of the image), ``patient`` (code), ``matches`` (R),
        ``first_rank`` (r_1), ``first_match`` (index of that image), ``map``, ``map_at_r``, ``r_precision``.

    Raises:
        ValueError: embeddings with NaN or of length zero, lengths that differ, or no query with a true match.

    Example::

        figures = retrieval_metrics(z, [item["patient_id"] for item in items])
        print(figures["rank1"], figures["ci95"]["rank1"])
    """
    unit = unit_embeddings(embeddings)
    asking = None if query_embeddings is None else unit_embeddings(query_embeddings)
    pairs = EvaluationPairs(patient_ids, protocol, metadata)
    chosen = pairs.chosen
    if len(unit) != len(pairs.patient):
        raise ValueError(f"there are {len(unit)} embeddings, but {len(pairs.patient)} patient ids.")
    if not len(chosen.query):
        raise ValueError(
            f"none of {len(unit)} images has another valid image of its patient to find "
            f"({chosen.singletons} patients have a single image). Look at the patient ids and at the protocol's rules: "
            f"{pairs.protocol}."
        )
    parts: list[dict[str, np.ndarray]] = []
    with ThreadPoolExecutor(worker_threads()) as pool:
        for block in pairs.blocks(unit, chosen.query, chunk, device, asking):
            parts.append(_score(block, pool))
    queries = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(queries["query"], kind="stable")
    queries = {name: values[order] for name, values in queries.items()}
    queries["patient"] = pairs.patient[queries["query"]]

    figures = metric_values(queries)
    result: dict[str, Any] = {name: float(figures[:, i].mean()) for i, name in enumerate(RETRIEVAL_METRICS)}
    if bootstrap:
        samples = patient_bootstrap(figures, queries["patient"], bootstrap, seed)
        interval = bootstrap_interval(samples)
        result["ci95"] = {name: interval[:, i].tolist() for i, name in enumerate(RETRIEVAL_METRICS)}
    result.update(
        queries=len(queries["query"]),
        gallery=len(chosen.gallery),
        patients=len(np.unique(queries["patient"])),
        queries_left_out=chosen.left_out,
        singletons=chosen.singletons,
        protocol=pairs.protocol.to_dict(),
    )
    if per_query:
        result["per_query"] = queries
    return result


def metric_values(per_query: dict[str, np.ndarray]) -> np.ndarray:
    """[queries, 6] float64: what each query adds to each of ``RETRIEVAL_METRICS``."""
    hits = [per_query["first_rank"] <= k for k in (1, 5, 10)]
    return np.stack([*hits, per_query["map"], per_query["map_at_r"], per_query["r_precision"]], axis=1).astype(float)


def _score(block: BlockOfPairs, pool: ThreadPoolExecutor) -> dict[str, np.ndarray]:
    """Figures of the queries of one block that have a match."""
    order = np.lexsort((-block.match_similarity, block.match_row))
    row = block.match_row[order]
    similarity = block.match_similarity[order]
    rows, start, count = np.unique(row, return_index=True, return_counts=True)
    place = np.arange(len(row)) - np.repeat(start, count) + 1
    if block.similarity.device.type == "cpu":
        wrong = _count_with_threads(block.similarity.numpy(), rows, start, count, similarity, pool)
    else:
        wrong = _count_on_device(block.similarity, row, place, similarity)
    rank = place + wrong
    matches = np.repeat(count, count)
    precision = place / rank
    early = rank <= matches
    return {
        "query": block.query[rows],
        "matches": count,
        "first_rank": rank[start],
        "first_match": block.gallery[block.match_column[order[start]]],
        "map": np.add.reduceat(precision, start) / count,
        "map_at_r": np.add.reduceat(np.where(early, precision, 0.0), start) / count,
        "r_precision": np.add.reduceat(early.astype(float), start) / count,
    }


def _count_with_threads(
    similarity: np.ndarray,
    rows: np.ndarray,
    start: np.ndarray,
    count: np.ndarray,
    thresholds: np.ndarray,
    pool: ThreadPoolExecutor,
) -> np.ndarray:
    """For each threshold, the values of its row that are at least as large."""
    result = np.empty(len(thresholds), dtype=np.int64)

    def work(part: np.ndarray) -> None:
        for i in part:
            own = slice(start[i], start[i] + count[i])
            result[own] = _count_at_least(similarity[rows[i]], thresholds[own])

    # dealt like cards: patients with many images stand together in most lists
    workers = worker_threads()
    list(pool.map(work, [np.arange(worker, len(rows), workers) for worker in range(workers)]))
    return result


def _count_at_least(values: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Number of values >= each threshold, exactly.

    Args:
        values: [g] float32, -inf allowed.
        thresholds: [m] float32, descending and finite.

    Returns:
        [m] int64.
    """
    if len(thresholds) <= _FEW:
        return np.asarray([np.count_nonzero(values >= threshold) for threshold in thresholds], dtype=np.int64)
    low, high = thresholds[-1], thresholds[0]
    # Bins that grow with the value: rounding cannot break the order, so that a value in a higher bin is larger.
    # Only values that share a bin with a threshold are compared themselves.
    with np.errstate(divide="ignore", over="ignore"):
        scale = np.minimum(np.float32(_BINS) / (high - low), np.float32(1e30))
    positions = (values - low) * scale
    positions += np.float32(1)
    np.clip(positions, 0, _BINS + 1, out=positions)
    bins = positions.astype(np.intp)
    threshold_bins = np.clip((thresholds - low) * scale + np.float32(1), 0, _BINS + 1).astype(np.intp)
    shared = np.zeros(_BINS + 2, dtype=bool)
    shared[threshold_bins] = True
    histogram = np.bincount(bins, minlength=_BINS + 2)
    histogram[shared] = 0
    above = np.cumsum(histogram[::-1])[::-1]
    close = np.sort(values[np.take(shared, bins)])
    return above[threshold_bins] + len(close) - np.searchsorted(close, thresholds, side="left")


def _count_on_device(
    similarity: torch.Tensor, row: np.ndarray, place: np.ndarray, thresholds: np.ndarray
) -> np.ndarray:
    """As ``_count_at_least`` for every row of a block, by tensor operations alone.

    Args:
        similarity: [b, g].
        row: [m] row of each threshold.
        place: [m] place of the threshold in its row, from 1, largest first.
        thresholds: [m] float32.

    Returns:
        [m] int64.
    """
    device = similarity.device
    rows = torch.from_numpy(row).to(device)
    # ascending in each row; rows with few thresholds are filled with infinity, which no similarity reaches
    width = int(place.max())
    edges = torch.full((len(similarity), width), torch.inf, device=device)
    count = torch.bincount(rows, minlength=len(similarity))
    column = count[rows] - torch.from_numpy(place).to(device)
    edges[rows, column] = torch.from_numpy(thresholds).to(device)
    # right=True: a value equal to an edge lies above it
    bucket = torch.searchsorted(edges, similarity, right=True)
    histogram = torch.zeros((len(similarity), width + 1), dtype=torch.int64, device=device)
    histogram.scatter_add_(1, bucket, torch.ones((1, 1), dtype=torch.int64, device=device).expand_as(bucket))
    at_least = histogram.flip(1).cumsum(1).flip(1)
    return at_least[rows, column + 1].cpu().numpy()


class RankedLists(NamedTuple):
    """The most similar images of some queries.

    Args:
        query: [q] indices of the images that ask.
        image: [q, k] indices of the images found, most similar first; -1 where the gallery is smaller.
        similarity: [q, k] cosine similarities; NaN there.
        correct: [q, k] bool, same patient.
    """

    query: np.ndarray
    image: np.ndarray
    similarity: np.ndarray
    correct: np.ndarray


def ranked_lists(
    embeddings: Any,
    patient_ids: Any,
    queries: Sequence[int] | np.ndarray,
    k: int = 5,
    *,
    protocol: RetrievalProtocol | None = None,
    metadata: RetrievalMetadata | None = None,
) -> RankedLists:
    """The k most similar images of each query, in the order that :py:func:`retrieval_metrics` scores.

    Args:
        embeddings: [n, d].
        patient_ids: [n].
        queries: indices of the images that ask.
        k: length of each list.
        protocol: which pairs are compared.
        metadata: what the protocol must know of the images.

    Returns:
        :py:class:`RankedLists`.

    Raises:
        ValueError: ``k`` < 1, or a query that is no index of an image.
    """
    unit = unit_embeddings(embeddings)
    pairs = EvaluationPairs(patient_ids, protocol, metadata)
    wanted = np.asarray(queries, dtype=np.int64).reshape(-1)
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}.")
    if ((wanted < 0) | (wanted >= len(unit))).any():
        raise ValueError(f"queries must be indices from 0 to {len(unit) - 1}.")
    image = np.full((len(wanted), k), -1, dtype=np.int64)
    similarity = np.full((len(wanted), k), np.nan, dtype=np.float32)
    correct = np.zeros((len(wanted), k), dtype=bool)
    unique = np.unique(wanted)
    for block in pairs.blocks(unit, unique):
        values = block.similarity.numpy()
        is_match = np.zeros(values.shape, dtype=bool)
        is_match[block.match_row, block.match_column] = True
        values[block.match_row, block.match_column] = block.match_similarity
        for row, query in enumerate(block.query):
            order = np.lexsort((is_match[row], -values[row]))[:k]
            order = order[np.isfinite(values[row][order])]
            for target in np.flatnonzero(wanted == query):
                image[target, : len(order)] = block.gallery[order]
                similarity[target, : len(order)] = values[row][order]
                correct[target, : len(order)] = is_match[row][order]
    return RankedLists(wanted, image, similarity, correct)
