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
"""Retrieval and verification as MONAI metrics: fed batch by batch, gathered over processes, computed at the end."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from monai.metrics import CumulativeIterationMetric
from monai.utils import convert_to_tensor, evenly_divisible_all_gather, string_list_all_gather

from monai_god.data.protocol import RetrievalMetadata, RetrievalProtocol
from monai_god.metrics.retrieval import retrieval_metrics
from monai_god.metrics.verification import DEFAULT_FARS, verification_metrics

__all__ = ["EmbeddingMetric", "RetrievalMetric", "VerificationMetric"]

# what protocols, reports and pictures read of an item
ITEM_KEYS = (
    "index",
    "image",
    "patient_id",
    "visit",
    "day",
    "laterality",
    "camera",
    "view",
    "source",
    "near_duplicate_of",
    "is_query",
    "is_gallery",
)


def _plain(key: str, value: Any) -> Any:
    """A value of an item as JSON has it; an image becomes the name of its file, or None."""
    if key == "image" and not isinstance(value, str):
        name = getattr(value, "meta", {}).get("filename_or_obj")
        return name if isinstance(name, str) else None
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return value.item()
    return value


class EmbeddingMetric(CumulativeIterationMetric):
    """Collects embeddings and the items they belong to; subclasses compute figures of them all.

    Called as ``metric(embeddings, items)``: embeddings [B, d] or a list of B [d]; items either a list of mappings with
    the keys of a datalist (``patient_id`` is needed; ``visit``, ``laterality``, ``near_duplicate_of``, ... as far as
    the protocol asks; other keys are ignored), or the B patient ids alone (str, int, or a tensor).

    In a distributed run every process feeds its own share, of any size, and :py:meth:`gather` brings them together.
    Items that a sampler dealt twice to make the shares equal are counted once, known by ``index`` or by the file of
    ``image``; without either they cannot be told from real ones, so give items then.

    Args:
        protocol: which pairs are compared; by default :py:class:`RetrievalProtocol` as it comes.
        bootstrap: number of patient resamples for the 95 % intervals; 0 for none.
        seed: of the resampling.
        chunk: queries in a block of similarities.
        device: where the similarities are taken.
    """

    def __init__(
        self,
        protocol: RetrievalProtocol | None = None,
        bootstrap: int = 1000,
        seed: int = 0,
        chunk: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.protocol = RetrievalProtocol() if protocol is None else protocol
        self.bootstrap = bootstrap
        self.seed = seed
        self.chunk = chunk
        self.device = device

    def reset(self) -> None:
        """Forget everything collected."""
        super().reset()
        self._items: list[dict[str, Any]] = []
        self._gathered: tuple[torch.Tensor, list[dict[str, Any]]] | None = None

    def __call__(self, y_pred: Any, y: Any = None, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """Collect a batch; see the class.

        Returns:
            [B, d] the embeddings, as collected.

        Raises:
            ValueError: no items, or other numbers of embeddings and of items, or an item without patient.
        """
        if y is None:
            raise ValueError(f"{type(self).__name__} needs the items, or the patient ids, of the embeddings.")
        if isinstance(y_pred, (list, tuple)):
            y_pred = torch.stack([torch.as_tensor(row) for row in y_pred])
        rows = self._compute_tensor(y_pred)
        items = []
        for item in y.tolist() if isinstance(y, (torch.Tensor, np.ndarray)) else y:
            known = item if isinstance(item, Mapping) else {"patient_id": item}
            kept = {key: _plain(key, known[key]) for key in ITEM_KEYS if key in known}
            items.append({key: value for key, value in kept.items() if value is not None})
        if len(items) != len(rows):
            raise ValueError(f"there are {len(rows)} embeddings, but {len(items)} items.")
        without = sum("patient_id" not in item for item in items)
        if without:
            raise ValueError(f"{without} of {len(items)} items have no 'patient_id'.")
        self.extend(rows)
        self._items += items
        self._gathered = None
        return rows

    def _compute_tensor(self, y_pred: torch.Tensor, y: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        if not isinstance(y_pred, torch.Tensor) or y_pred.ndim != 2:
            shape = tuple(getattr(y_pred, "shape", ()))
            raise ValueError(f"embeddings must be a tensor [batch, dimensions], got shape {shape}.")
        # off the accelerator: a test set's embeddings do not compete with the network for memory
        return convert_to_tensor(y_pred.detach(), dtype=torch.float32, device="cpu", track_meta=False)

    def _sync(self) -> None:
        """Gather the embeddings of all processes, those that have none too."""
        if self._synced:
            return
        local = torch.stack(self._buffers[0]) if self._buffers else torch.zeros((0, 0))
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # a process without items must take part, and needs the width
            width = max(int(value) for value in string_list_all_gather([str(local.shape[1])]))
            local = evenly_divisible_all_gather(local if len(local) else torch.zeros((0, width)), concat=True)
        self._synced_tensors = [local]
        self._synced = True

    def gather(self) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        """What all processes have collected, each image once.

        Returns:
            [n, d] embeddings and the n items, in the order of ``index`` or else of the image's file name where every
            item has one, so that the number of processes does not show; else in the order of collection. In a
            distributed run all processes must call it.

        Raises:
            ValueError: nothing was collected.
        """
        if self._gathered is not None:
            return self._gathered
        self._sync()
        assert self._synced_tensors is not None and self._synced_tensors[0] is not None
        embeddings = self._synced_tensors[0]
        lines = string_list_all_gather([json.dumps(item) for item in self._items])
        items = [json.loads(line) for line in lines if line]
        if not items:
            raise ValueError(f"{type(self).__name__} has collected nothing: was the evaluation empty?")
        for key in ("index", "image"):
            if all(key in item for item in items):
                values = [item[key] for item in items]
                # the first of equal values stands for all
                first = {value: position for position, value in reversed(list(enumerate(values)))}
                order = [first[value] for value in sorted(first)]
                embeddings, items = embeddings[order], [items[position] for position in order]
                break
        self._gathered = embeddings, items
        return self._gathered

    @abstractmethod
    def aggregate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The figures of everything collected, by all processes."""

    def _arguments(self) -> dict[str, Any]:
        embeddings, items = self.gather()
        return {
            "embeddings": embeddings,
            "patient_ids": [str(item["patient_id"]) for item in items],
            "protocol": self.protocol,
            "metadata": RetrievalMetadata.from_items(items),
            "bootstrap": self.bootstrap,
            "seed": self.seed,
            "chunk": self.chunk,
            "device": self.device,
        }


class RetrievalMetric(EmbeddingMetric):
    """:py:func:`retrieval_metrics` of everything collected; arguments of :py:class:`EmbeddingMetric`.

    Args:
        per_query: also return the figures of every query; their indices are positions in what ``gather()`` returns.

    Example::

        metric = RetrievalMetric(protocol=RetrievalProtocol(exclude_same_visit=True))
        for batch in loader:
            metric(network(batch["image"]), decollate_batch(batch))
        print(metric.aggregate()["rank1"])
        metric.reset()
    """

    def __init__(self, protocol: RetrievalProtocol | None = None, per_query: bool = False, **kwargs: Any) -> None:
        super().__init__(protocol, **kwargs)
        self.per_query = per_query

    def aggregate(self) -> dict[str, Any]:  # type: ignore[override]
        """Result of :py:func:`retrieval_metrics`; in a distributed run all processes must call it, and get the same."""
        return retrieval_metrics(**self._arguments(), per_query=self.per_query)


class VerificationMetric(EmbeddingMetric):
    """:py:func:`verification_metrics` of everything collected; arguments of :py:class:`EmbeddingMetric`.

    Args:
        fars: false accept rates at which the true accept rate is given.
    """

    def __init__(
        self, protocol: RetrievalProtocol | None = None, fars: Sequence[float] = DEFAULT_FARS, **kwargs: Any
    ) -> None:
        super().__init__(protocol, **kwargs)
        self.fars = tuple(fars)

    def aggregate(self) -> dict[str, Any]:  # type: ignore[override]
        """Result of :py:func:`verification_metrics`; in a distributed run all processes must call it."""
        return verification_metrics(**self._arguments(), fars=self.fars)
