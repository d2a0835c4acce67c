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

from types import SimpleNamespace

import pytest
import torch
from ignite.engine import Engine
from monai.handlers import LrScheduleHandler
from torch import nn

from monai_god.handlers import RunCheckpoint


class Sampler:
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Run:
    """A toy training: the handler's only companions are an engine and a validator."""

    def __init__(self, folder, epochs=4, scores=(0.5, 0.6, 0.9, 0.7, 0.8), seed=3, stop=None, fail=None, **kwargs):
        torch.manual_seed(0)
        self.net, self.loss, self.sampler = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), nn.Linear(2, 1), Sampler()
        parameters = [*self.net.parameters(), *self.loss.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, epochs or 1)
        self.trainer = Engine(self.step)
        self.trainer.state.max_epochs, self.trainer.state.epoch_length = epochs, 3
        self.trainer.state.epoch = self.trainer.state.iteration = 0
        self.stop, self.fail, self.scores = stop, fail, scores
        self.validator = SimpleNamespace(run=self.validate, state=SimpleNamespace(metrics={}))
        self.checkpoint = RunCheckpoint(
            folder, self.net, self.loss, self.optimizer, self.scheduler, self.validator, {"seed": seed, **kwargs},
            self.sampler,
        )  # fmt: skip
        LrScheduleHandler(self.scheduler, print_lr=False).attach(self.trainer)
        self.checkpoint.attach(self.trainer)
        self.trainer.run_ = self.trainer.run
        self.trainer.run = lambda: self.trainer.run_([0, 1, 2], max_epochs=epochs, epoch_length=3)

    def step(self, engine: Engine, index: int) -> dict:
        if engine.state.epoch == self.stop and index == 1:
            raise KeyboardInterrupt
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * self.sampler.epoch + index))
        loss = self.loss(self.net.train()(x)).square().mean()
        if engine.state.epoch == self.fail:
            loss = loss * float("nan")
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.detach()}

    def validate(self) -> None:
        score = self.scores[self.trainer.state.epoch]
        self.validator.state.metrics = {"val_map": score, "val_rank1": score / 2, "other": 1.0}

    def go(self) -> bool:
        restored = self.checkpoint.restore(self.trainer)
        self.checkpoint.train(self.trainer)
        return restored


def test_keeps_the_network_that_validated_best(tmp_path):
    run = Run(tmp_path)
    assert run.go() is False
    history = (tmp_path / "history.csv").read_text().splitlines()
    assert history[0] == "epoch,loss,lr,val_map,val_rank1" and len(history) == 6
    best = torch.load(tmp_path / "model.pt", weights_only=True)
    other = Run(tmp_path / "two", epochs=4, stop=3)  # stopped right after the best epoch, 2
    with pytest.raises(KeyboardInterrupt):
        other.go()
    assert torch.equal(
        best["network"]["0.weight"], torch.load(tmp_path / "two" / "last.pt", weights_only=True)["network"]["0.weight"]
    )
    assert not torch.equal(best["network"]["0.weight"], run.net[0].weight)


def test_the_start_can_be_the_best(tmp_path):
    run = Run(tmp_path, scores=(0.9, 0.1, 0.1, 0.1, 0.1))
    start = run.net[0].weight.clone()
    run.go()
    assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=True)["network"]["0.weight"], start)


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_resumes_bit_for_bit(tmp_path, stop):
    whole = Run(tmp_path / "whole")
    whole.go()
    with pytest.raises(KeyboardInterrupt):
        Run(tmp_path / "cut", stop=stop).go()
    torch.manual_seed(999)
    resumed = Run(tmp_path / "cut")
    assert resumed.go() is True
    for a, b in zip([*whole.net.parameters(), *whole.loss.parameters()],
                    [*resumed.net.parameters(), *resumed.loss.parameters()], strict=True):  # fmt: skip
        assert torch.equal(a, b)
    assert (tmp_path / "whole" / "history.csv").read_text() == (tmp_path / "cut" / "history.csv").read_text()
    # a finished run is finished
    again = Run(tmp_path / "cut")
    assert again.go() is True and torch.equal(again.net[0].weight, whole.net[0].weight)


def test_no_epochs_saves_the_start(tmp_path):
    run = Run(tmp_path, epochs=0)
    run.go()
    assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=True)["network"]["0.weight"], run.net[0].weight)
    assert (tmp_path / "history.csv").read_text().splitlines()[1].startswith("0,,")


def test_another_runs_checkpoint_is_refused(tmp_path):
    Run(tmp_path).go()
    with pytest.raises(ValueError, match="other settings.*--output_dir"):
        Run(tmp_path, components="D").go()
    with pytest.raises(ValueError, match="other settings"):
        Run(tmp_path, epochs=5, scores=(0.1,) * 6).go()


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    run = Run(tmp_path, fail=2)
    with pytest.raises(FloatingPointError, match="epoch 2.*lower the learning rate"):
        run.go()
    assert torch.load(tmp_path / "last.pt", weights_only=True)["epoch"] == 1
