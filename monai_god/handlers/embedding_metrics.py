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
"""Ignite handlers of the embedding metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from ignite.engine import Engine
from monai.handlers.ignite_metric import IgniteMetricHandler

from monai_god.data.protocol import RetrievalProtocol
from monai_god.metrics.cumulative import ITEM_KEYS, EmbeddingMetric, RetrievalMetric, VerificationMetric
from monai_god.metrics.retrieval import RETRIEVAL_METRICS
from monai_god.metrics.verification import DEFAULT_FARS, far_name

__all__ = ["EmbeddingMetricHandler", "RetrievalHandler", "VerificationHandler"]


class EmbeddingMetricHandler(IgniteMetricHandler):
    """Feeds an embedding metric from a MONAI engine and publishes its figures.

    At the end of the run ``engine.state.metrics[name]``, ``name`` being the one it is attached by, holds the figure
    chosen by ``key``, a float, so that it can be a MONAI evaluator's key metric; with ``publish_all`` the other figures
    stand beside it, named ``prefix`` + their own name. ``engine.state.metric_details[name]`` holds the whole result
    (intervals, counts, protocol).

    Args:
        metric: the metric.
        key: name of the figure.
        names: names of all figures.
        publish_all: whether to publish the other figures.
        prefix: of their names, for example ``"val_"``.
        pred_key: key of the embedding in ``engine.state.output``.
        output_transform: gives (embeddings, items) from ``engine.state.output``. By default the embeddings are read
            from ``pred_key`` of the output and the items from ``engine.state.batch``, decollated or not.

    Raises:
        ValueError: ``key`` is not among ``names``.
    """

    def __init__(
        self,
        metric: EmbeddingMetric,
        key: str,
        names: Sequence[str],
        publish_all: bool = True,
        prefix: str = "",
        pred_key: str = "pred",
        output_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        if key not in names:
            raise ValueError(f"key must be one of {tuple(names)}, got {key!r}.")
        self.key = key
        self.names = tuple(names)
        self.publish_all = publish_all
        self.prefix = prefix
        self.pred_key = pred_key
        self._from_engine = output_transform is None
        super().__init__(metric_fn=metric, output_transform=output_transform or (lambda output: output))

    @torch.no_grad()
    def iteration_completed(self, engine: Engine) -> None:
        """Collect the embeddings and the items of the batch."""
        if not self._from_engine:
            super().iteration_completed(engine)
            return
        output: Any = engine.state.output
        embeddings = output[self.pred_key] if isinstance(output, Mapping) else [o[self.pred_key] for o in output]
        self.update((embeddings, _items(engine.state.batch, len(embeddings))))

    def compute(self) -> float:
        """Compute all figures, publish them, and return the chosen one."""
        result = self.metric_fn.aggregate()
        self._is_reduced = True
        if self._engine is None or self._name is None:
            raise RuntimeError("attach() the handler to an engine first.")
        self._engine.state.metric_details[self._name] = result  # type: ignore[attr-defined]
        if self.publish_all:
            for name in self.names:
                if self.prefix + name != self._name:
                    self._engine.state.metrics[self.prefix + name] = result[name]
        return result[self.key]


def _items(batch: Any, size: int) -> list[Mapping[str, Any]]:
    """The items of a batch, whether it is decollated or not."""
    if not isinstance(batch, Mapping):
        return list(batch)
    columns = {key: batch[key] for key in ITEM_KEYS if key in batch}
    if "image" in columns and not isinstance(columns["image"], (list, tuple)):
        # collated images carry the names of their files in a list
        names = getattr(columns["image"], "meta", {}).get("filename_or_obj")
        columns["image"] = names if isinstance(names, (list, tuple)) and len(names) == size else [None] * size
    return [{key: values[row] for key, values in columns.items()} for row in range(size)]


class RetrievalHandler(EmbeddingMetricHandler):
    """Handler of :py:class:`RetrievalMetric`; further arguments of :py:class:`EmbeddingMetricHandler`.

    Args:
        protocol: which pairs are compared.
        key: figure that stands under the handler's name.
        per_query: keep the figures of every query in ``metric_details``.
        bootstrap: number of patient resamples; 0 for none, for example in each epoch's validation.
        seed: of the resampling.
        device: where the similarities are taken.

    Example::

        evaluator = SupervisedEvaluator(..., key_val_metric={"val_map": RetrievalHandler(prefix="val_", bootstrap=0)})
    """

    def __init__(
        self,
        protocol: RetrievalProtocol | None = None,
        key: str = "map",
        per_query: bool = False,
        bootstrap: int = 1000,
        seed: int = 0,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        metric = RetrievalMetric(protocol, per_query=per_query, bootstrap=bootstrap, seed=seed, device=device)
        super().__init__(metric, key, RETRIEVAL_METRICS, **kwargs)


class VerificationHandler(EmbeddingMetricHandler):
    """Handler of :py:class:`VerificationMetric`; further arguments of :py:class:`EmbeddingMetricHandler`.

    Args:
        protocol: which pairs are compared.
        key: figure that stands under the handler's name.
        fars: false accept rates at which the true accept rate is given.
        bootstrap: number of patient resamples; 0 for none.
        seed: of the resampling.
        device: where the similarities are taken.
    """

    def __init__(
        self,
        protocol: RetrievalProtocol | None = None,
        key: str = "roc_auc",
        fars: Sequence[float] = DEFAULT_FARS,
        bootstrap: int = 1000,
        seed: int = 0,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        metric = VerificationMetric(protocol, fars=fars, bootstrap=bootstrap, seed=seed, device=device)
        names = ["roc_auc", "eer", *(f"tar_at_far_{far_name(far)}" for far in fars)]
        super().__init__(metric, key, names, **kwargs)
