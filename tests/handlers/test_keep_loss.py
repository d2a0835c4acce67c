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

import torch
from ignite.engine import Engine
from monai.handlers import from_engine

from monai_god.handlers import KeepLoss


def test_what_follows_reads_the_loss():
    weight = torch.nn.Parameter(torch.tensor(2.0))
    trainer = Engine(lambda engine, batch: {"loss": weight * batch, "pred": torch.zeros(1000)})
    KeepLoss().attach(trainer)
    trainer.run([3.0], max_epochs=1)
    loss = from_engine(["loss"], first=True)(trainer.state.output)
    assert loss.item() == 6.0 and not loss.requires_grad
    assert list(trainer.state.output[0]) == ["loss"]
