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
"""Batches of P patients with K images each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import Sampler

__all__ = ["PatientBatchSampler"]


class PatientBatchSampler(Sampler[list[int]]):
    """Batches of ``patients_per_batch`` patients x ``images_per_patient`` images, for mining pairs within a batch.

    An epoch shows every image of every eligible patient at least once. A patient's images are shuffled and cut into
    groups of K; a group that comes out short is filled with other images of the patient, and with repeats (other
    augmented views of the same file) where the patient has fewer than K. So every batch has positive pairs of two
    different files, unless ``singletons="repeat"`` asks for augmented pairs, and P different patients, so negative
    pairs too. A batch lists its patients one after another, K images each.

    The order depends on ``(seed, epoch)`` alone, so nothing else has to be saved to resume. With several processes,
    each takes P / world_size whole patients of the same global batch: joining the processes' batches in the order of
    their ranks gives the very batch that one process would have had.

    Args:
        patient_ids: [n] patient of each image of the data set.
        patients_per_batch: P, at least 2, of the global batch.
        images_per_patient: K, at least 2.
        seed: of the shuffling.
        singletons: ``"leave_out"`` patients with a single image, or ``"repeat"`` that image K times.
        rank: of this process; from ``torch.distributed`` by default, 0 where it is not initialised.
        world_size: number of processes; likewise, 1.

    Raises:
        ValueError: P or K too small, P not a multiple of the number of processes, or fewer than P eligible patients.

    Example::

        sampler = PatientBatchSampler([item["patient_id"] for item in items], patients_per_batch=16)
        loader = DataLoader(dataset, batch_sampler=sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for batch in loader: ...
    """

    def __init__(
        self,
        patient_ids: Sequence[Any],
        patients_per_batch: int = 16,
        images_per_patient: int = 4,
        seed: int = 0,
        singletons: str = "leave_out",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if distributed else 0
        self.world_size = world_size if world_size is not None else dist.get_world_size() if distributed else 1
        self.patients_per_batch = patients_per_batch
        self.images_per_patient = images_per_patient
        self.seed = seed
        self.singletons = singletons
        self.epoch = 0
        if patients_per_batch < 2 or images_per_patient < 2:
            raise ValueError(
                f"a batch needs at least 2 patients (for a negative pair) with 2 images each (for a positive pair), "
                f"got patients_per_batch={patients_per_batch} and images_per_patient={images_per_patient}."
            )
        if singletons not in ("leave_out", "repeat"):
            raise ValueError(f"singletons must be 'leave_out' or 'repeat', got {singletons!r}.")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be in [0, {self.world_size}), got {self.rank}.")
        if patients_per_batch % self.world_size:
            raise ValueError(
                f"patients_per_batch={patients_per_batch} cannot be shared evenly by {self.world_size} processes: "
                "make it a multiple."
            )
        images: dict[str, list[int]] = {}
        for index, patient in enumerate(patient_ids):
            images.setdefault(str(patient), []).append(index)
        at_least = 1 if singletons == "repeat" else 2
        self._images = [np.asarray(indices) for indices in images.values() if len(indices) >= at_least]
        if len(self._images) < patients_per_batch:
            need, mend = "two images or more", ", or use patients with one image too (singletons='repeat')"
            if singletons == "repeat":
                need, mend = "an image", ""
            raise ValueError(
                f"a batch needs {patients_per_batch} patients, but only {len(self._images)} of {len(images)} "
                f"have {need}: lower patients_per_batch (in a bundle, --batch_size){mend}."
            )
        self._groups = np.asarray([-(-len(indices) // images_per_patient) for indices in self._images])

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration gives; the same number on every process."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Batches of an epoch; the same for every epoch and process."""
        return max(-(-int(self._groups.sum()) // self.patients_per_batch), int(self._groups.max()))

    def _filled(self, group: np.ndarray, images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A group of exactly K images: first other images of the patient, then repeats."""
        others = rng.permutation(np.setdiff1d(images, group))[: self.images_per_patient - len(group)]
        return np.resize(np.concatenate([group, others]), self.images_per_patient)

    def global_batches(self) -> list[list[int]]:
        """The batches of this epoch, [P * K] indices each, as one process would see them."""
        rng = np.random.default_rng((self.seed, self.epoch))
        waiting: list[list[np.ndarray]] = []
        for images in self._images:
            shuffled = rng.permutation(images)
            groups = [
                shuffled[at : at + self.images_per_patient] for at in range(0, len(images), self.images_per_patient)
            ]
            waiting.append([self._filled(group, images, rng) for group in groups])
        remaining = self._groups.copy()
        batches = []
        while remaining.any():
            # the patients with most groups left, ties at random: the fewest batches in which no patient comes twice
            chosen = np.lexsort((rng.random(len(remaining)), -remaining))[: self.patients_per_batch]
            batch: list[int] = []
            for patient in chosen:
                if remaining[patient]:
                    group = waiting[patient].pop()
                    remaining[patient] -= 1
                else:  # the last batches are filled up with patients that have been seen
                    images = self._images[patient]
                    group = self._filled(rng.permutation(images)[: self.images_per_patient], images, rng)
                batch += group.tolist()
            batches.append(batch)
        return [batches[position] for position in rng.permutation(len(batches))]

    def __iter__(self) -> Iterator[list[int]]:
        share = self.patients_per_batch // self.world_size * self.images_per_patient
        for batch in self.global_batches():
            yield batch[self.rank * share : (self.rank + 1) * share]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(patients={len(self._images)}, patients_per_batch={self.patients_per_batch}, "
            f"images_per_patient={self.images_per_patient}, seed={self.seed}, epoch={self.epoch}, "
            f"rank={self.rank}, world_size={self.world_size})"
        )
