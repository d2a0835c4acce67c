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

import json
import re
from pathlib import Path

import pytest

from monai_god.apps.cli import main
from monai_god.data import generate_cxr_phantoms

CONFIG = Path(__file__).resolve().parents[2] / "bundles" / "god_cxr" / "configs" / "train.json"


def test_the_table_is_what_the_runs_gave(tmp_path, monkeypatch):
    folder = tmp_path / "set"
    generate_cxr_phantoms(folder, patients=20, visits=3, size=128, num_workers=0, progress=False)
    # the bundle's batch of 16 patients does not fit this set
    config = json.loads(CONFIG.read_text())
    config.update(batch_size=8, images_per_patient=2)
    (tmp_path / "train.json").write_text(json.dumps(config))
    command = ["results", "--dataset_dir", str(folder), "--external_dir", str(folder), "--epochs", "0", "--seeds", "0"]
    command += ["--config_file", str(tmp_path / "train.json"), "--work_dir", str(tmp_path / "work")]
    command += ["--rows", "(A) backbone", "(E) alignment and", "--num_workers", "0"]
    assert main([*command, "--output", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text()
    assert "18 queries, 6 patients with two images or more." in page and "Zero-shot" in page
    for name, path in (
        ("(A) backbone only", "_A__backbone_only"),
        ("(E) alignment and matched similarity", "_E_*and*"),
    ):
        (report,) = (tmp_path / "work").glob(f"{path}/seed0/metrics.json")
        metrics = json.loads(report.read_text())["metrics"]
        row = next(line for line in page.splitlines() if line.startswith(f"| {name} |"))
        for cell, metric in zip(row.split("|")[2:4], ("rank1", "map"), strict=True):
            value, low, high = (float(x) for x in re.findall(r"\d\.\d+", cell))
            assert value == pytest.approx(metrics[metric]["value"], abs=6e-4)
            assert [low, high] == pytest.approx(metrics[metric]["ci95"], abs=6e-4)
    raw = [line for line in page.splitlines() if line.startswith("| features of the backbone")]
    assert len(raw) == 2 and raw[0] == raw[1]  # the external set of this test is the same
    assert "patient" in page and "phantom0-" not in page


def test_needs_the_configuration(tmp_path, capsys):
    command = ["results", "--dataset_dir", str(tmp_path), "--output", str(tmp_path / "page.md")]
    assert main([*command, "--config_file", str(tmp_path / "none.json")]) == 2
    assert "--config_file" in capsys.readouterr().err
