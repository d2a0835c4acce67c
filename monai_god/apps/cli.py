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
"""The command line ``monai-god``. Each sub-command lives in its own module, which adds its parser here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import monai_god
from monai_god.apps import audit, compare, prepare, results
from monai_god.data.datalist import DatalistError

__all__ = ["build_parser", "main"]

# Modules with `add_parser(subparsers)`, which sets `run`: a function of the parsed arguments that gives the exit code.
COMMANDS = (prepare, results, audit, compare)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="monai-god", description="Medical image re-identification with Graph-of-Differences."
    )
    parser.add_argument("--version", action="version", version=f"monai-god {monai_god.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        arguments: without the program's name; ``sys.argv[1:]`` by default.

    Returns:
        0 for success, 1 where a command found nothing usable, 2 for input that cannot be worked on as it is.
    """
    parsed = build_parser().parse_args(arguments)
    try:
        return parsed.run(parsed)
    except DatalistError as error:
        print(f"monai-god: error: {error}", file=sys.stderr)
        return 2
