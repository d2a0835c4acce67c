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

import csv
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ignite.engine import Engine, Events

from monai_god.files import written_aside

__all__ = ["RunCheckpoint"]

logger = logging.getLogger(__name__)


def _save(content: Mapping[str, Any], path: Path) -> None:
    with written_aside(path) as aside:
        torch.save(dict(content), aside)


def _write_history(history: Sequence[Mapping[str, float]], path: Path) -> None:
    first = ("epoch", "loss", "lr")
    names = [*first, *sorted({name for row in history for name in row}.difference(first))]
    with written_aside(path) as aside, aside.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(history)


class RunCheckpoint:
    """
    Handler of a trainer: validate, record, save, resume.

    Before the first epoch and after each, the network is validated. ``last.pt`` holds all that the run needs to go
    on, so a killed run continues the same on the CPU, bit for bit; ``model.pt`` is the network that validated best,
    the start (the closed form) included; ``history.csv`` has a row per epoch. Files are written aside and renamed, by
    rank 0.

    Attach it after the learning rate's handler, so that the rate of the next epoch is saved.

    Args:
        output_dir: where to write.
        network: the network, or its DistributedDataParallel.
        loss: the loss module, likewise.
        optimizer: the optimizer.
        scheduler: of the learning rate, stepped once per epoch.
        validator: evaluator whose ``state.metrics`` hold the validation figures.
        settings: of the run, kept in ``model.pt``; ``settings["seed"]`` and the epoch seed the random numbers.
        sampler: its ``set_epoch`` is called before each epoch.
        key: the figure by which the best network is chosen.
        resume: go on from ``last.pt`` where there is one.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        network: torch.nn.Module,
        loss: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        validator: Any,
        settings: Mapping[str, Any],
        sampler: Any = None,
        key: str = "val_map",
        resume: bool = True,
    ) -> None:
        self.folder = Path(output_dir)
        self.network, self.loss, self.optimizer, self.scheduler = network, loss, optimizer, scheduler
        self.validator, self.settings, self.sampler = validator, dict(settings), sampler
        self.key, self.resume = key, resume
        self.history: list[dict[str, float]] = []
        self.best = float("-inf")

    def attach(self, engine: Engine) -> None:
        engine.add_event_handler(Events.STARTED, self.started)
        engine.add_event_handler(Events.EPOCH_STARTED, self.epoch_started)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self.iteration_completed)
        engine.add_event_handler(Events.EPOCH_COMPLETED, self.epoch_completed)

    def _parts(self) -> dict[str, Any]:
        return {
            "network": getattr(self.network, "module", self.network),
            "loss": getattr(self.loss, "module", self.loss),
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }

    def restore(self, engine: Engine) -> bool:
        """
        Take up ``last.pt`` where there is one and ``resume`` is on; to be called before :meth:`train`.

        Returns:
            whether there was one.

        Raises:
            ValueError: when ``last.pt`` belongs to a run with other settings.
        """
        path = self.folder / "last.pt"
        if not (self.resume and path.is_file()):
            return False
        content = torch.load(path, map_location="cpu", weights_only=True)
        if content["settings"] != self.settings or content["epochs"] != engine.state.max_epochs:
            raise ValueError(
                f"{path} belongs to a run with other settings: name another --output_dir, or begin anew with "
                "--resume False"
            )
        for name, part in self._parts().items():
            part.load_state_dict(content[name])
        self.history, self.best = content["history"], content["best"]
        epoch = int(content["epoch"])
        engine.state.epoch, engine.state.iteration = epoch, epoch * int(engine.state.epoch_length or 0)
        logger.info("resuming after epoch %d of %d", epoch, engine.state.max_epochs)
        return True

    def train(self, engine: Engine) -> None:
        """Train the epochs that are left. With no epochs at all, the start is validated and saved."""
        if engine.state.epoch < int(engine.state.max_epochs or 0):
            engine.run()
        elif not self.history:
            self._record(engine, {})

    def started(self, engine: Engine) -> None:
        if not self.history:
            self._record(engine, {})

    def epoch_started(self, engine: Engine) -> None:
        torch.manual_seed(1_000_003 * int(self.settings["seed"]) + engine.state.epoch)
        self._losses: list[float] = []
        if self.sampler is not None:
            self.sampler.set_epoch(engine.state.epoch)

    def iteration_completed(self, engine: Engine) -> None:
        output: Any = engine.state.output
        output = output[0] if isinstance(output, list) else output
        self._losses.append(output["loss"].item())
        if not math.isfinite(self._losses[-1]):
            raise FloatingPointError(
                f"The loss is {self._losses[-1]} in epoch {engine.state.epoch}: lower the learning rate; last.pt holds "
                "the state before this epoch"
            )

    def epoch_completed(self, engine: Engine) -> None:
        self._record(engine, {"loss": math.fsum(self._losses) / len(self._losses)})

    def _record(self, engine: Engine, row: Mapping[str, float]) -> None:
        self.validator.run()
        figures = {k: float(v) for k, v in self.validator.state.metrics.items() if k.startswith("val_")}
        rate = float(self.optimizer.param_groups[0]["lr"])
        self.history.append({"epoch": engine.state.epoch, **row, "lr": rate, **figures})
        better = figures[self.key] > self.best
        self.best = max(self.best, figures[self.key])
        if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
            return
        state = {name: part.state_dict() for name, part in self._parts().items()}
        if better:
            _save({"network": state["network"], "settings": self.settings}, self.folder / "model.pt")
        _write_history(self.history, self.folder / "history.csv")
        more = {"epoch": engine.state.epoch, "epochs": int(engine.state.max_epochs or 0), "history": self.history}
        _save({**state, **more, "best": self.best, "settings": self.settings}, self.folder / "last.pt")
