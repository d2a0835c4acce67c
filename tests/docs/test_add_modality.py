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
"""The third modality of docs/add_modality.md, trained as that page says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from tests.bundles.conftest import REPOSITORY, SMALL

EXAMPLE = REPOSITORY / "docs" / "examples" / "dental"


def film(patient: int, visit: int) -> Image.Image:
    """A jaw with teeth of the patient's own widths, seen from a slightly different place at each visit."""
    of_patient, of_visit = np.random.default_rng([0, patient]), np.random.default_rng([1, patient, visit])
    image = Image.new("L", (192, 96), 20)
    draw = ImageDraw.Draw(image)
    dx, dy = of_visit.integers(-4, 5, 2)
    reach, depth = of_patient.integers(70, 86), of_patient.integers(40, 56)
    draw.arc((96 - reach + dx, 84 - 2 * depth + dy, 96 + reach + dx, 84 + dy), 0, 180, fill=130, width=18)
    x = 96 - 52 + dx
    for width, height in zip(of_patient.integers(5, 12, 11), of_patient.integers(14, 26, 11), strict=True):
        draw.rectangle((int(x), 52 + int(dy) - int(height), int(x + width - 2), 52 + int(dy)), fill=235)
        x += width + 1
    noise = of_visit.normal(0, 4, (96, 192))
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


def test_the_example_trains(tmp_path: Path) -> None:
    sections: dict[str, list[dict[str, str]]] = {"training": [], "validation": [], "testing": []}
    for patient in range(24):
        name = "training" if patient < 14 else "validation" if patient < 18 else "testing"
        for visit in range(2):
            file = f"{patient:02d}_{visit}.png"
            film(patient, visit).save(tmp_path / file)
            sections[name].append({"image": file, "patient_id": f"jaw{patient:02d}", "visit": str(visit)})
    (tmp_path / "datalist.json").write_text(json.dumps(sections))
    configs = [str(REPOSITORY / "bundles" / "god_cxr" / "configs" / "train.json"), str(EXAMPLE / "train.json")]
    command = [sys.executable, "-m", "monai.bundle", "run", "training", "--config_file", str(configs), *SMALL]
    command += ["--dataset_dir", str(tmp_path), "--output_dir", str(tmp_path / "out"), "--epochs", "1"]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert report["queries"] == 12 and report["failed_images"] == 0 and not report["anatomy_problems"]
    assert report["metrics"]["rank1"]["value"] > 0.5  # by chance 0.09
