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

import subprocess
import sys

import pytest

import monai_god
from monai_god.apps.cli import main


def test_module_runs_as_a_program():
    done = subprocess.run([sys.executable, "-m", "monai_god", "--version"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"monai-god {monai_god.__version__}"


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["prepare"], ["prepare", "csv"], ["prepare", "folder"]])
def test_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: monai-god" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["prepare", "--help"], ["prepare", "csv", "--help"]])
def test_help(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 0
    assert "usage: monai-god" in capsys.readouterr().out
