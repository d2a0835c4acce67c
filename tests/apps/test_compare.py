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

import numpy as np
import pytest
import torch
from PIL import Image

from monai_god.apps.cli import main
from monai_god.data import save_datalist
from monai_god.metrics import SamePatientCalibrator


def rows(path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def set_of_films(tmp_path):
    """20 patients x 3 images; two images bear each other's patient; a 21st patient has one image."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((21, 32))
    truth = [p for p in range(20) for _ in range(3)] + [20]
    z = centres[truth] + 0.3 * rng.standard_normal((61, 32))
    label = list(truth)
    label[4], label[40] = label[40], label[4]
    items = []
    for k, patient in enumerate(label):
        Image.fromarray(rng.integers(0, 255, (32, 32), dtype=np.uint8)).save(tmp_path / f"{k:02d}.png")
        items.append({"image": str(tmp_path / f"{k:02d}.png"), "patient_id": f"secret-{patient}"})
    save_datalist({"testing": items}, tmp_path / "datalist.json")
    np.savez(tmp_path / "embeddings.npz", embeddings=z.astype(np.float32), images=np.array([i["image"] for i in items]))
    return tmp_path


def test_mismatch_finds_the_swapped_labels(set_of_films, capsys):
    folder = set_of_films
    command = ["mismatch", "--embeddings", str(folder / "embeddings.npz"), "--datalist", str(folder)]
    assert main([*command, "--output", str(folder / "out.csv")]) == 0
    found = rows(folder / "out.csv")
    assert {row["image"][-6:] for row in found[:2]} == {"04.png", "40.png"}
    text = capsys.readouterr().out + (folder / "out.csv").read_text()
    assert "secret" not in text and "1 images are their patient's only one" in text


def test_mismatch_needs_the_right_datalist(set_of_films, capsys):
    folder = set_of_films
    np.savez(folder / "other.npz", embeddings=np.ones((1, 3)), images=np.array(["elsewhere.png"]))
    assert main(["mismatch", "--embeddings", str(folder / "other.npz"), "--datalist", str(folder)]) == 2
    assert "elsewhere.png" in capsys.readouterr().err
    (folder / "no.npz").write_bytes(b"text")
    assert main(["mismatch", "--embeddings", str(folder / "no.npz"), "--datalist", str(folder)]) == 2
    assert "no.npz" in capsys.readouterr().err


def test_leak_finds_shared_patients(tmp_path, capsys):
    rng = np.random.default_rng(1)
    centres = rng.standard_normal((40, 32))
    first = centres[:20] + 0.2 * rng.standard_normal((20, 32))
    second = centres[18:38] + 0.2 * rng.standard_normal((20, 32))  # patients 18 and 19 are in both
    for name, z in (("a", first), ("b", second)):
        images = np.array([f"{name}{k}.png" for k in range(20)])
        np.savez(tmp_path / f"{name}.npz", embeddings=z.astype(np.float32), images=images)
    similarity = np.concatenate([rng.normal(0.95, 0.03, 50), rng.normal(0.0, 0.2, 2000)])
    calibration = SamePatientCalibrator().fit(similarity, np.arange(2050) < 50).to_dict()
    torch.save({"network": {}, "settings": {}, "calibration": calibration}, tmp_path / "model.pt")
    command = ["leak", "--first", str(tmp_path / "a.npz"), "--second", str(tmp_path / "b.npz")]
    command += ["--ckpt_path", str(tmp_path / "model.pt"), "--output", str(tmp_path / "leak.csv")]
    assert main(command) == 0
    assert {(row["first"], row["second"]) for row in rows(tmp_path / "leak.csv")} == {
        ("a18.png", "b0.png"),
        ("a19.png", "b1.png"),
    }
    assert "2 of 20 images of the first set" in capsys.readouterr().out
    torch.save({"network": {}, "settings": {}}, tmp_path / "model.pt")
    assert main(command) == 2 and "no calibration" in capsys.readouterr().err
