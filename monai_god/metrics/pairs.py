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
"""What every metric over pairs of images needs: unit embeddings, patient codes, the valid pairs, similarity blocks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from monai_god.data.protocol import RetrievalMetadata, RetrievalProtocol

__all__ = ["BlockOfPairs", "EvaluationPairs", "patient_codes", "unit_embeddings"]

# similarities held at a time: 64 MB on the CPU; a GPU needs larger products to be busy
_BLOCK_ELEMENTS = {"cpu": 2**24, "gpu": 2**28}


def unit_embeddings(embeddings: Any) -> torch.Tensor:
    """Embeddings of unit length, so that the inner product of two of them is their cosine similarity.

    Args:
        embeddings: [n, d] tensor or array, or a list of [d].

    Returns:
        [n, d] float32 on the CPU. Equal rows stay equal to the last bit, wherever they stand.

    Raises:
        ValueError: not [n, d], n or d is 0, or rows that hold NaN or infinity or have no direction.
    """
    if isinstance(embeddings, (list, tuple)) and len(embeddings) and isinstance(embeddings[0], torch.Tensor):
        embeddings = torch.stack(list(embeddings))
    if isinstance(embeddings, torch.Tensor):
        embeddings = embeddings.detach().cpu().float().numpy()
    array = np.asarray(embeddings, dtype=np.float32)
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"embeddings must be [images, dimensions] and not empty, got shape {array.shape}.")
    result = np.empty_like(array)
    # in slices: the float64 copy of everything would be twice the size of the embeddings
    for start in range(0, len(array), 4096):
        part = array[start : start + 4096].astype(np.float64)
        norm = np.sqrt(np.einsum("nd,nd->n", part, part))
        bad = ~np.isfinite(norm) | (norm == 0)
        if bad.any():
            finite = np.isfinite(array).all(axis=1)
            zero = finite & ~array.any(axis=1)
            bad_rows = np.flatnonzero(~finite | zero)
            raise ValueError(
                f"{int((~finite).sum())} embeddings hold NaN or infinity and {int(zero.sum())} are all zero "
                f"(first at row {int(bad_rows[0])} of {len(array)}): they have no similarity to anything. "
                "Look at the training loss and at the images of these rows."
            )
        # + 0.0 turns -0.0 into 0.0, so that equal rows have equal bytes
        result[start : start + 4096] = part / norm[:, None] + 0.0
    return torch.from_numpy(result)


def patient_codes(patient_ids: Any) -> np.ndarray:
    """Integer codes of the patients, in the sorted order of their ids.

    Args:
        patient_ids: [n] str or int; sequence, array or tensor.

    Returns:
        [n] int64, from 0.

    Raises:
        ValueError: more than one dimension, or an unknown (None) patient.
    """
    if isinstance(patient_ids, torch.Tensor):
        patient_ids = patient_ids.detach().cpu().numpy()
    elif not isinstance(patient_ids, np.ndarray):
        patient_ids = list(patient_ids)
        unknown = sum(value is None for value in patient_ids)
        if unknown:
            raise ValueError(f"{unknown} of {len(patient_ids)} images have no patient: they cannot be evaluated.")
    ids = np.asarray(patient_ids)
    if ids.ndim != 1:
        raise ValueError(f"patient_ids must have one dimension, got shape {ids.shape}.")
    if not np.issubdtype(ids.dtype, np.integer):
        ids = ids.astype(str)
    return np.unique(ids, return_inverse=True)[1].reshape(-1).astype(np.int64)


class BlockOfPairs(NamedTuple):
    """The similarities of some queries with their whole gallery.

    Args:
        query: [b] indices of the images that ask.
        gallery: [g] indices of the images that may be found.
        similarity: [b, g] float32; -inf where a pair is not compared. The buffer is used again for the next block.
        match_row: [m] rows of the valid pairs of one patient, ascending.
        match_column: [m] their columns.
        match_similarity: [m] their similarities; in ``similarity`` itself these are -inf too.
    """

    query: np.ndarray
    gallery: np.ndarray
    similarity: torch.Tensor
    match_row: np.ndarray
    match_column: np.ndarray
    match_similarity: np.ndarray


class _Rows(NamedTuple):
    """Ragged lists of images by image, as in a sparse matrix's compressed rows."""

    start: np.ndarray
    column: np.ndarray

    @classmethod
    def build(cls, rows: Sequence[np.ndarray], columns: Sequence[np.ndarray], n: int) -> _Rows:
        row = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
        column = np.concatenate(columns) if columns else np.zeros(0, dtype=np.int64)
        order = np.argsort(row, kind="stable")
        start = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=n))])
        return cls(start, column[order].astype(np.int32))

    def take(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions in ``images`` and listed images, flat."""
        count = self.start[images + 1] - self.start[images]
        position = np.repeat(np.arange(len(images)), count)
        first = np.cumsum(count) - count
        return position, self.column[np.arange(len(position)) - np.repeat(first - self.start[images], count)]


class EvaluationPairs:
    """The pairs that a protocol compares, without a mask of all pairs.

    Every rule of :py:class:`~monai_god.data.protocol.RetrievalProtocol` but laterality concerns only pairs of one
    patient or of one group of near-duplicates, so those few are listed; laterality is met by comparing each side with
    its own gallery.

    Args:
        patient_ids: [n] patient of each image.
        protocol: the rules; by default :py:class:`RetrievalProtocol` as it comes.
        metadata: what the rules must know of the images; by default only the patients.

    Raises:
        ValueError: ``metadata`` is of other images or disagrees about who is the same patient.
    """

    def __init__(
        self,
        patient_ids: Any,
        protocol: RetrievalProtocol | None = None,
        metadata: RetrievalMetadata | None = None,
    ) -> None:
        self.patient = patient_codes(patient_ids)
        self.protocol = RetrievalProtocol() if protocol is None else protocol
        meta = RetrievalMetadata(self.patient) if metadata is None else metadata
        n = len(self.patient)
        if len(meta) != n:
            raise ValueError(f"metadata describes {len(meta)} images, but there are {n} patient ids.")
        pairing = np.unique(np.stack([self.patient, meta.patient]), axis=1)
        if metadata is not None and len(set(pairing[0])) + len(set(pairing[1])) != 2 * pairing.shape[1]:
            raise ValueError("metadata and patient_ids disagree about which images show the same patient.")
        self.metadata = meta
        self.chosen = self.protocol.query_gallery(meta)
        self._match, self._ignored = self._list_pairs()

    def _list_pairs(self) -> tuple[_Rows, _Rows]:
        n = len(self.patient)
        match: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        ignored: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        order = np.argsort(self.patient, kind="stable")
        count = np.bincount(self.patient)
        ends = np.cumsum(count)
        single = order[ends[count == 1] - 1]
        ignored[0].append(single)
        ignored[1].append(single)
        for end, size in zip(ends[count > 1], count[count > 1], strict=True):
            members = order[end - size : end]
            valid = self.protocol.valid_pairs(members, members, self.metadata)
            for (rows, columns), chosen in ((match, valid), (ignored, ~valid)):
                row, column = np.nonzero(chosen)
                rows.append(members[row])
                columns.append(members[column])
        group = self.metadata.duplicate_group
        if self.protocol.exclude_near_duplicates and (group >= 0).any():
            order = np.argsort(group, kind="stable")[int((group < 0).sum()) :]
            for members in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
                # pairs of one patient are listed above
                row, column = np.nonzero(self.patient[members][:, None] != self.patient[members])
                ignored[0].append(members[row])
                ignored[1].append(members[column])
        return _Rows.build(*match, n), _Rows.build(*ignored, n)

    def _parts(self, queries: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        gallery = self.chosen.gallery
        if self.protocol.laterality == "any":
            return [(queries, gallery)]
        side = self.metadata.laterality
        other = self.protocol.laterality != "same_eye"
        return [(queries[side[queries] == s], gallery[side[gallery] == (1 - s if other else s)]) for s in (0, 1)]

    def blocks(
        self,
        unit: torch.Tensor,
        queries: np.ndarray,
        chunk: int | None = None,
        device: torch.device | str | None = None,
        asking: torch.Tensor | None = None,
    ) -> Iterator[BlockOfPairs]:
        """Similarities of the queries with their galleries, block after block.

        Args:
            unit: [n, d] unit embeddings.
            queries: indices of the images that ask.
            chunk: queries in a block; by default as many as fit into 64 MB (CPU) or 1 GB (GPU).
            device: where the products are taken; the embeddings' own by default.
            asking: [n, d] unit embeddings of the images as queries, where they differ from those as gallery.

        Yields:
            :py:class:`BlockOfPairs`; a query with an empty gallery is in no block.

        Raises:
            ValueError: ``chunk`` < 1, or the number of embeddings differs from that of the patients.
        """
        if len(unit) != len(self.patient):
            raise ValueError(f"there are {len(unit)} embeddings, but {len(self.patient)} patient ids.")
        rows_of = unit if asking is None else asking
        if rows_of.shape != unit.shape:
            raise ValueError(f"query embeddings are {list(rows_of.shape)}, those of the gallery {list(unit.shape)}.")
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {chunk}.")
        target = unit.device if device is None else torch.device(device)
        elements = _BLOCK_ELEMENTS["cpu" if target.type == "cpu" else "gpu"]
        for part_queries, gallery in self._parts(queries):
            if not len(part_queries) or not len(gallery):
                continue
            rows = chunk or max(1, elements // len(gallery))
            column_of = np.full(len(unit), -1, dtype=np.int64)
            column_of[gallery] = np.arange(len(gallery))
            whole = len(gallery) == len(unit)
            columns = unit if whole else unit[torch.from_numpy(gallery)]
            inverse = None
            unique, back = _unique_rows(columns.numpy())
            if len(unique) < len(gallery):
                # A product's last bit may depend on the column's place in the kernel. Equal images must tie exactly.
                columns = columns[torch.from_numpy(unique)]
                inverse = torch.from_numpy(back).to(target)
            columns = columns.to(target)
            rows = min(rows, len(part_queries))
            buffer = torch.empty((rows, len(columns)), dtype=torch.float32, device=target)
            spread = None if inverse is None else torch.empty((rows, len(gallery)), device=target)
            for start in range(0, len(part_queries), rows):
                query = part_queries[start : start + rows]
                block = buffer[: len(query)]
                torch.mm(rows_of[torch.from_numpy(query)].to(target), columns.T, out=block)
                if inverse is not None and spread is not None:
                    block = torch.index_select(block, 1, inverse, out=spread[: len(query)])
                match_row, match_column = self._columns(self._match, query, column_of)
                ignored_row, ignored_column = self._columns(self._ignored, query, column_of)
                at = (torch.from_numpy(match_row).to(target), torch.from_numpy(match_column).to(target))
                match_similarity = block[at].cpu().numpy()
                block[at] = -torch.inf
                block[
                    torch.from_numpy(ignored_row).to(target), torch.from_numpy(ignored_column).to(target)
                ] = -torch.inf
                yield BlockOfPairs(query, gallery, block, match_row, match_column, match_similarity)

    @staticmethod
    def _columns(pairs: _Rows, query: np.ndarray, column_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        row, image = pairs.take(query)
        column = column_of[image]
        inside = column >= 0
        return row[inside], column[inside]


def _unique_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First index of each distinct row, and for every row the position of its like among them."""
    rows = np.ascontiguousarray(rows)
    as_bytes = rows.view(np.dtype((np.void, rows.shape[1] * rows.itemsize))).reshape(-1)
    _, first, inverse = np.unique(as_bytes, return_index=True, return_inverse=True)
    return first, inverse.reshape(-1)


def worker_threads() -> int:
    """Threads for work outside torch: as many as torch may use, and no more than there are cores."""
    return max(1, min(torch.get_num_threads(), os.cpu_count() or 1))
