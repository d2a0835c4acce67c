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
"""What every kind of phantom shares: random streams, the artefact settings, checks of settings."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

__all__ = ["ARTEFACTS", "Artefact", "check_settings", "stream"]

Artefact = Literal["none", "follows_patient", "shuffled"]
ARTEFACTS: tuple[str, ...] = get_args(Artefact)


def stream(seed: int, *key: int) -> np.random.Generator:
    """Random numbers of one thing; every ``key`` has its own, so that a change in one leaves the others as they are."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *key])))


def check_settings(size: int, artefact: str, seed: int = 0, visit: int = 0) -> None:
    """
    Check the settings of a phantom image or set.

    Raises:
        ValueError: on a size below 64, a negative seed or visit, or an unknown artefact.
    """
    if size < 64:
        raise ValueError(f"size must be 64 pixels or more, got {size}.")
    for name, value in (("seed", seed), ("visit", visit)):
        if value < 0:
            raise ValueError(f"{name} must be 0 or more, got {value}.")
    if artefact not in ARTEFACTS:
        raise ValueError(f"artefact must be one of {', '.join(ARTEFACTS)}, got {artefact!r}.")
