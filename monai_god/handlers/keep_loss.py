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

from typing import Any

from ignite.engine import Engine, Events

__all__ = ["KeepLoss"]


class KeepLoss:
    """
    Handler of a trainer: of an iteration's output keep the loss only, as ``[{"loss": tensor}]``.

    Graph batches cannot be decollated, and what follows (MONAI's statistics, TensorBoard, MLflow by ``--tracking``)
    reads the loss from a decollated output. It also lets go of the batch's graphs. Attach it before those.
    """

    def attach(self, engine: Engine) -> None:
        engine.add_event_handler(Events.ITERATION_COMPLETED, self)

    def __call__(self, engine: Engine) -> None:
        output: Any = engine.state.output
        engine.state.output = [{"loss": output["loss"].detach()}]  # type: ignore[assignment]
