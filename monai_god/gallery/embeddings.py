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
from collections.abc import Sequence

import numpy as np

from monai_god.files import written_aside

__all__ = ["write_embeddings"]


def write_embeddings(path: str | os.PathLike[str], embeddings: np.ndarray, images: Sequence[str]) -> None:
    """Embeddings [n, E] and the file name of each image, as a compressed NumPy archive without pickled objects."""
    with written_aside(path) as aside, aside.open("wb") as file:
        np.savez_compressed(file, embeddings=embeddings, images=np.array(images))
