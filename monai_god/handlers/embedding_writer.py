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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ignite.engine import Engine, Events

from monai_god.files import written_aside
from monai_god.gallery import nearest_neighbours, write_embeddings
from monai_god.metrics import SamePatientCalibrator

__all__ = ["EmbeddingWriter"]


class EmbeddingWriter:
    """
    Handler of an evaluator: keep the embeddings and, for each image, the images most similar to it.

    Written at the end of the run, aside and then renamed: ``embeddings.npz`` (``embeddings`` float32 [n, E] of unit
    length, ``images`` file names, without pickled objects) and ``neighbours.csv`` (image, rank, neighbour,
    similarity).

    Args:
        output_dir: where to write.
        neighbours: how many images to list for each.
        calibration: of the run (``SamePatientCalibrator.to_dict``); with it the table has a column ``probability``:
            that the two images show one patient, were pairs of one patient as frequent as among all pairs of the
            validation section.
        chunk: images compared at once; memory grows with ``chunk`` x n.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        neighbours: int = 5,
        calibration: Mapping[str, Any] | None = None,
        chunk: int = 1024,
    ) -> None:
        self.calibrate = None if calibration is None else SamePatientCalibrator.from_dict(calibration)
        self.folder, self.neighbours, self.chunk = Path(output_dir), neighbours, chunk
        self._rows: list[np.ndarray] = []
        self._images: list[str] = []

    def attach(self, engine: Engine) -> None:
        engine.add_event_handler(Events.EPOCH_STARTED, self.started)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self.collect)
        engine.add_event_handler(Events.COMPLETED, self.write)

    def started(self, engine: Engine) -> None:
        self._rows, self._images = [], []

    def collect(self, engine: Engine) -> None:
        output: Any = engine.state.output
        batch: Any = engine.state.batch
        self._rows.append(output["pred"].detach().float().cpu().numpy())
        self._images += [str(name) for name in batch["image"]]

    def write(self, engine: Engine) -> None:
        z = np.concatenate(self._rows)
        write_embeddings(self.folder / "embeddings.npz", z, self._images)
        count = min(self.neighbours, len(z) - 1)
        table = self.folder / "neighbours.csv"
        with written_aside(table) as aside, aside.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            columns = ["image", "rank", "neighbour", "similarity"]
            writer.writerow(columns if self.calibrate is None else [*columns, "probability"])
            values, places = nearest_neighbours(z, k=count, chunk=self.chunk)
            for row, (cosines, indices) in enumerate(zip(values, places, strict=True)):
                for rank, (value, index) in enumerate(zip(cosines, indices, strict=True), start=1):
                    line = [self._images[row], rank, self._images[index], f"{value:.4f}"]
                    if self.calibrate is not None:
                        line.append(f"{float(self.calibrate(value)):.4f}")
                    writer.writerow(line)
