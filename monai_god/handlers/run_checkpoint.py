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
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Engine, Events

__all__ = ["RunCheckpoint"]


def _save(content: Mapping[str, Any], path: Path) -> None:
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    torch.save(dict(content), aside)
    aside.replace(path)


class RunCheckpoint:
    """
    Handler of a trainer: validate, record, save, resume.

    Before the first epoch and after each, the network is validated. ``last.pt`` holds all that goes on from there, so a
    killed run continues the same on the CPU, bit for bit; ``model.pt`` is the network that validated best, the start
    (the closed form) included; ``history.csv`` has a row per epoch. Files are written aside and renamed.

    Args:
        output_dir: where to write.
        network: the network; ``loss``, ``optimizer``, ``scheduler``: likewise, saved and restored.
        validate: gives the validation figures, for example ``{"val_map": 0.6, "val_rank1": 0.7}``.
        settings: of the run, kept in ``model.pt``.
        sampler: its ``set_epoch`` is called before each epoch.
        key: the figure by which the best network is chosen.
        resume: go on from ``last.pt`` where there is one.
        write: whether this process writes (rank 0).
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        network: torch.nn.Module,
        loss: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        validate: Callable[[], Mapping[str, float]],
        settings: Mapping[str, Any],
        sampler: Any = None,
        key: str = "val_map",
        resume: bool = True,
        write: bool = True,
    ) -> None:
        self.folder = Path(output_dir)
        self.parts = {"network": network, "loss": loss, "optimizer": optimizer, "scheduler": scheduler}
        self.validate, self.settings, self.sampler = validate, dict(settings), sampler
        self.key, self.resume, self.write = key, resume, write
        self.history: list[dict[str, float]] = []
        self.best = float("-inf")

    def attach(self, engine: Engine) -> None:
        engine.add_event_handler(Events.STARTED, self.started)
        engine.add_event_handler(Events.EPOCH_STARTED, self.epoch_started)
        engine.add_event_handler(Events.EPOCH_COMPLETED, self.epoch_completed)

    def restore(self, engine: Engine, epoch_length: int) -> bool:
        """
        Take up ``last.pt``; to be called before ``engine.run()``.

        Returns:
            whether epochs are left to train.

        Raises:
            ValueError: when ``last.pt`` belongs to a run with other settings.
        """
        path = self.folder / "last.pt"
        if not self.resume or not path.is_file():
            return int(engine.state.max_epochs or 0) > 0 or self._only_start(engine)
        content = torch.load(path, map_location="cpu", weights_only=True)
        if content["settings"] != self.settings:
            raise ValueError(
                f"{path} belongs to a run with other settings: name another --output_dir, or pass --resume false"
            )
        for name, part in self.parts.items():
            part.load_state_dict(content[name])
        self.history, self.best = content["history"], content["best"]
        epoch = int(content["epoch"])
        engine.state.epoch, engine.state.iteration = epoch, epoch * epoch_length
        engine.state.epoch_length = epoch_length
        return epoch < int(engine.state.max_epochs or 0)

    def _only_start(self, engine: Engine) -> bool:
        self.started(engine)
        return False

    def started(self, engine: Engine) -> None:
        if engine.state.epoch == 0:
            self._record(engine, {})

    def epoch_started(self, engine: Engine) -> None:
        if self.sampler is not None:
            self.sampler.set_epoch(engine.state.epoch)

    def epoch_completed(self, engine: Engine) -> None:
        output: Any = engine.state.output
        self._record(engine, {"loss": float(output["loss"])})

    def _record(self, engine: Engine, row: Mapping[str, float]) -> None:
        figures = {k: float(v) for k, v in self.validate().items()}
        rate = float(self.parts["optimizer"].param_groups[0]["lr"])  # type: ignore[union-attr, index]
        self.history.append({"epoch": engine.state.epoch, "lr": rate, **row, **figures})
        better = figures[self.key] > self.best
        self.best = max(self.best, figures[self.key])
        if not self.write:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        weights = self.parts["network"].state_dict()
        if better:
            _save(
                {"network": {k.removeprefix("module."): v for k, v in weights.items()}, "settings": self.settings},
                self.folder / "model.pt",
            )
        state = {name: part.state_dict() for name, part in self.parts.items()}
        _save(
            {
                **state,
                "epoch": engine.state.epoch,
                "history": self.history,
                "best": self.best,
                "settings": self.settings,
            },
            self.folder / "last.pt",
        )
        names = list(dict.fromkeys(name for entry in self.history for name in entry))
        aside = self.folder / "history.csv.tmp"
        with aside.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(self.history)
        aside.replace(self.folder / "history.csv")
