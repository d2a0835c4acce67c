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
"""Verification: are these two images of one patient? Over all pairs, by histograms that fill as the pairs stream by."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from monai_god.data.protocol import RetrievalMetadata, RetrievalProtocol
from monai_god.metrics.bootstrap import bootstrap_interval, patient_bootstrap
from monai_god.metrics.pairs import EvaluationPairs, unit_embeddings, worker_threads

__all__ = ["OperatingPoint", "PairHistogram", "far_name", "pair_histogram", "verification_metrics"]

DEFAULT_FARS = (1e-2, 1e-3, 1e-4)
# values of one histogram update: they and their bins stay in the cache
_GROUP = 2**17


class OperatingPoint(NamedTuple):
    """What happens when pairs at least as similar as a threshold are called the same patient.

    Args:
        threshold: similarity.
        far: false accept rate, the share of the pairs of two patients that are called the same.
        tar: true accept rate, the share of the pairs of one patient that are.
        error_bound: a finer threshold could reach a ``tar`` larger by no more than this.
    """

    threshold: float
    far: float
    tar: float
    error_bound: float


class PairHistogram:
    """Counts of cosine similarities of pairs of one patient (genuine) and of two (impostor).

    The bins are 2 / ``bins`` wide. Pairs in different bins are ordered exactly; only the order within a bin is unknown,
    and every figure comes with the bound of the error that this can cause.

    Args:
        bins: number of bins over [-1, 1].

    Raises:
        ValueError: ``bins`` < 2 or > 2**20, where float32 does not resolve them.
    """

    def __init__(self, bins: int = 2**16) -> None:
        if not 2 <= bins <= 2**20:
            raise ValueError(f"bins must lie between 2 and {2**20}, got {bins}.")
        self.bins = bins
        # the ends lie in the middle of a bin, since rounding can carry a cosine beyond 1
        self.genuine = np.zeros(bins + 1, dtype=np.int64)
        self.impostor = np.zeros(bins + 1, dtype=np.int64)

    @property
    def edges(self) -> np.ndarray:
        """[bins + 2] borders of the bins, ascending."""
        return (np.arange(self.bins + 2) - 0.5) * (2.0 / self.bins) - 1.0

    @property
    def centers(self) -> np.ndarray:
        """[bins + 1] middles of the bins, ascending."""
        return np.arange(self.bins + 1) * (2.0 / self.bins) - 1.0

    def bin_of(self, similarity: np.ndarray) -> np.ndarray:
        """Bin of each similarity, -1 for -inf (a pair that is not compared)."""
        position = similarity.astype(np.float32) * np.float32(self.bins / 2)
        position += np.float32(self.bins / 2 + 1.5)
        np.clip(position, 0, self.bins + 1, out=position)
        return position.astype(np.intp) - 1

    def count(self, similarity: np.ndarray) -> np.ndarray:
        """[bins + 1] number of similarities in each bin; -inf is not counted."""
        return np.bincount(self.bin_of(similarity.reshape(-1)) + 1, minlength=self.bins + 2)[1:]

    def add(self, similarity: Any, same: Any) -> None:
        """Add pairs.

        Args:
            similarity: [n] cosine similarities.
            same: [n] bool, whether the two images show one patient.

        Raises:
            ValueError: lengths differ, NaN, or similarities beyond [-1, 1].
        """
        values = np.asarray(similarity, dtype=np.float32).reshape(-1)
        labels = np.asarray(same, dtype=bool).reshape(-1)
        if len(values) != len(labels):
            raise ValueError(f"there are {len(values)} similarities, but {len(labels)} labels.")
        if not (np.abs(values) <= 1.001).all():
            raise ValueError("similarities must be cosines in [-1, 1], without NaN.")
        self.genuine += self.count(values[labels])
        self.impostor += self.count(values[~labels])

    def _require_both(self) -> tuple[int, int]:
        genuine, impostor = int(self.genuine.sum()), int(self.impostor.sum())
        if not genuine or not impostor:
            raise ValueError(f"verification needs pairs of one patient and of two; there are {genuine} and {impostor}.")
        return genuine, impostor

    def rates(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The whole curve.

        Returns:
            thresholds, far, tar, each [bins + 2], thresholds ascending: the rates of accepting what lies at or above.
        """
        genuine, impostor = self._require_both()
        tar = np.append(np.cumsum(self.genuine[::-1])[::-1], 0) / genuine
        far = np.append(np.cumsum(self.impostor[::-1])[::-1], 0) / impostor
        return self.edges, far, tar

    def roc_auc(self) -> tuple[float, float]:
        """Area under the ROC curve, equal pairs counting half, and the bound of its error."""
        genuine, impostor = self._require_both()
        below = np.cumsum(self.impostor) - self.impostor
        undecided = float((self.genuine.astype(float) * self.impostor).sum()) / genuine / impostor
        return float((self.genuine.astype(float) * below).sum()) / genuine / impostor + undecided / 2, undecided / 2

    def eer(self) -> tuple[float, float, float]:
        """Equal error rate, the bound of its error, and the threshold."""
        thresholds, far, tar = self.rates()
        frr = 1 - tar
        k = int(np.argmax(frr >= far))
        # at the first edge everything is accepted, so that k >= 1
        before, after = far[k - 1] - frr[k - 1], frr[k] - far[k]
        share = before / (before + after)
        value = far[k - 1] + share * (far[k] - far[k - 1])
        low, high = max(far[k], frr[k - 1]), min(far[k - 1], frr[k])
        threshold = thresholds[k - 1] + share * (thresholds[k] - thresholds[k - 1])
        return float(value), float(max(high - value, value - low, 0.0)), float(threshold)

    def at_far(self, far: float) -> OperatingPoint:
        """The lowest threshold at a bin's border whose false accept rate is at most ``far``.

        Raises:
            ValueError: ``far`` is not in (0, 1].
        """
        if not 0 < far <= 1:
            raise ValueError(f"far must lie in (0, 1], got {far}.")
        thresholds, fars, tars = self.rates()
        k = int(np.argmax(fars <= far))
        return OperatingPoint(
            threshold=float(thresholds[k]),
            far=float(fars[k]),
            tar=float(tars[k]),
            error_bound=float(tars[max(k - 1, 0)] - tars[k]),
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(genuine={self.genuine.sum()}, impostor={self.impostor.sum()}, bins={self.bins})"


class _Pairs(NamedTuple):
    histogram: PairHistogram
    genuine: np.ndarray
    query: np.ndarray
    pairs: EvaluationPairs


def _stream(
    embeddings: Any,
    patient_ids: Any,
    protocol: RetrievalProtocol | None,
    metadata: RetrievalMetadata | None,
    bins: int,
    chunk: int | None,
    device: torch.device | str | None,
) -> _Pairs:
    unit = unit_embeddings(embeddings)
    pairs = EvaluationPairs(patient_ids, protocol, metadata)
    histogram = PairHistogram(bins)
    asking = np.flatnonzero(pairs.metadata.is_query)
    if pairs.protocol.singletons == "leave_out":
        asking = asking[np.bincount(pairs.patient)[pairs.patient[asking]] > 1]
    genuine, query = [np.zeros(0, dtype=np.float32)], [np.zeros(0, dtype=np.int64)]
    with ThreadPoolExecutor(worker_threads()) as pool:
        for block in pairs.blocks(unit, asking, chunk, device):
            genuine.append(block.match_similarity)
            query.append(block.query[block.match_row])
            flat = block.similarity.cpu().numpy().reshape(-1)
            groups = [flat[start : start + _GROUP] for start in range(0, len(flat), _GROUP)]
            workers = worker_threads()

            def count(part: Sequence[np.ndarray]) -> np.ndarray:
                total = np.zeros(histogram.bins + 1, dtype=np.int64)
                for group in part:
                    total += histogram.count(group)
                return total

            for total in pool.map(count, [groups[worker::workers] for worker in range(workers)]):
                histogram.impostor += total
    similarity = np.concatenate(genuine)
    histogram.genuine += histogram.count(similarity)
    return _Pairs(histogram, similarity, np.concatenate(query), pairs)


def pair_histogram(
    embeddings: Any,
    patient_ids: Any,
    *,
    protocol: RetrievalProtocol | None = None,
    metadata: RetrievalMetadata | None = None,
    bins: int = 2**16,
    chunk: int | None = None,
    device: torch.device | str | None = None,
) -> PairHistogram:
    """Similarities of all pairs that the protocol compares, for example to fit a ``SamePatientCalibrator``.

    Args:
        embeddings: [n, d].
        patient_ids: [n].
        protocol: which pairs are compared.
        metadata: what the protocol must know of the images.
        bins: see :py:class:`PairHistogram`.
        chunk: queries in a block.
        device: where the products are taken.

    Returns:
        :py:class:`PairHistogram`; a pair counts once for each of its images that asks for the other.
    """
    return _stream(embeddings, patient_ids, protocol, metadata, bins, chunk, device).histogram


def far_name(far: float) -> str:
    """Name of a false accept rate in results: 0.001 is ``1e-3``."""
    mantissa, exponent = f"{far:e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def verification_metrics(
    embeddings: Any,
    patient_ids: Any,
    *,
    protocol: RetrievalProtocol | None = None,
    metadata: RetrievalMetadata | None = None,
    fars: Sequence[float] = DEFAULT_FARS,
    bins: int = 2**16,
    bootstrap: int = 1000,
    seed: int = 0,
    chunk: int | None = None,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """ROC AUC, EER and TAR at chosen FARs over all pairs that the protocol compares.

    Every image that may ask takes part, also one whose patient has no other image: it makes impostor pairs. A pair
    counts once for each of its two images that asks for the other, which does not change a rate.

    The intervals resample the patients of the genuine pairs. The impostor pairs, of which there are many more, and with
    them the thresholds, are held fixed; the EER, which depends on both, has no interval.

    Args:
        embeddings: [n, d], brought to unit length here.
        patient_ids: [n].
        protocol: which pairs are compared.
        metadata: what the protocol must know of the images.
        fars: false accept rates. One below 1 / impostor pairs allows no false accept at all.
        bins: of the histograms over [-1, 1].
        bootstrap: number of patient resamples for the 95 % intervals; 0 for none.
        seed: of the resampling.
        chunk: queries in a block.
        device: where the products are taken.

    Returns:
        A dictionary: ``roc_auc``, ``eer``, ``tar_at_far_1e-2`` ... as floats; ``ci95`` and ``error_bound`` by the same
        names; ``thresholds``: ``eer``, ``far_1e-2`` ...: similarities at or above are accepted; ``far_reached``: the
        share of impostor pairs actually accepted there; ``genuine_pairs``, ``impostor_pairs``; ``protocol``.

    Raises:
        ValueError: embeddings with NaN or of length zero, or no pairs of one of the two kinds.
    """
    streamed = _stream(embeddings, patient_ids, protocol, metadata, bins, chunk, device)
    histogram = streamed.histogram
    auc, auc_bound = histogram.roc_auc()
    eer, eer_bound, eer_threshold = histogram.eer()
    result: dict[str, Any] = {"roc_auc": auc, "eer": eer}
    bounds = {"roc_auc": auc_bound, "eer": eer_bound}
    thresholds = {"eer": eer_threshold}
    reached = {}
    genuine_bin = histogram.bin_of(streamed.genuine)
    impostor = histogram.impostor / histogram.impostor.sum()
    # share of the impostor pairs below each genuine pair: its mean is the AUC
    columns = [(np.cumsum(impostor) - impostor / 2)[genuine_bin]]
    for far in fars:
        point = histogram.at_far(far)
        name = far_name(far)
        result[f"tar_at_far_{name}"] = point.tar
        bounds[f"tar_at_far_{name}"] = point.error_bound
        thresholds[f"far_{name}"] = point.threshold
        reached[f"far_{name}"] = point.far
        columns.append(histogram.edges[genuine_bin] >= point.threshold)
    if bootstrap:
        patients = streamed.pairs.patient[streamed.query]
        interval = bootstrap_interval(patient_bootstrap(np.stack(columns, axis=1), patients, bootstrap, seed))
        names = [name for name in result if name != "eer"]
        result["ci95"] = {name: interval[:, i].tolist() for i, name in enumerate(names)}
    result.update(
        error_bound=bounds,
        thresholds=thresholds,
        far_reached=reached,
        genuine_pairs=int(histogram.genuine.sum()),
        impostor_pairs=int(histogram.impostor.sum()),
        protocol=streamed.pairs.protocol.to_dict(),
    )
    return result
