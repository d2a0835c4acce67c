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

import os
import subprocess
import sys
from pathlib import Path

import pytest

from monai_god.data import generate_cxr_phantoms, generate_fundus_phantoms

REPOSITORY = Path(__file__).resolve().parents[2]
BUNDLES = ("god_cxr", "god_fundus")
#: small enough for a test: 4 patients x 2 images a batch, three batches an epoch
SMALL = ["--batch_size", "8", "--images_per_patient", "2", "--num_workers", "0", "--width", "32", "--node_dim", "16"]


@pytest.fixture(scope="session", params=BUNDLES)
def bundle(request) -> str:
    """Name of a bundle: tests that take it run on each."""
    return request.param


@pytest.fixture(scope="session")
def phantoms(bundle, tmp_path_factory) -> Path:
    """Folder with 20 phantom patients x 3 films of 128 pixels, or x 2 photographs (both eyes)."""
    folder = tmp_path_factory.mktemp("phantoms") / "set"
    if bundle == "god_cxr":
        generate_cxr_phantoms(folder, patients=20, visits=3, size=128, num_workers=0, progress=False)
    else:
        generate_fundus_phantoms(folder, patients=20, visits=1, size=192, num_workers=0, progress=False)
    return folder


@pytest.fixture(scope="session")
def cache(bundle, tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def configs_of(bundle: str) -> Path:
    return REPOSITORY / "bundles" / bundle / "configs"


def command(bundle: str, configs: list[str] | str, run_id: str = "training", processes: int = 1) -> list[str]:
    """``python -m monai.bundle run``, or the same by torchrun."""
    names = [configs] if isinstance(configs, str) else configs
    paths = [str(configs_of(bundle) / name) for name in names]
    config = paths[0] if len(paths) == 1 else str(paths)
    launcher = [sys.executable, "-m"]
    if processes > 1:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", "-m"]
    return [*launcher, "monai.bundle", "run", run_id, "--config_file", config]


def run(arguments: list[str], folder: Path = REPOSITORY) -> str:
    """Output of a command that must succeed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr
