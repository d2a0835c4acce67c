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

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from safetensors.numpy import load, save

__all__ = ["FeatureStore", "FeatureStoreError", "feature_key"]

FORMAT = b"monai_god features 1"


class FeatureStoreError(RuntimeError):
    """A feature store that cannot be used; the message says where it is and what to do."""


def feature_key(content: str, preprocessing: Mapping[str, Any], backbone: str, view: int = 0) -> str:
    """
    Key of one image's features: SHA-256 of everything they depend on.

    Args:
        content: hash of the decoded image and of the anatomy files that go with it.
        preprocessing: settings of the transforms (JSON values).
        backbone: ``Backbone.fingerprint()``.
        view: number of the augmented view; 0 for the plain image.
    """
    text = json.dumps([content, dict(preprocessing), backbone, view], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


# LMDB allows one environment per file and process, and none may be carried over a fork.
_ENVIRONMENTS: dict[tuple[int, str], lmdb.Environment] = {}


class FeatureStore:
    """
    Arrays by key on disk: an LMDB environment, so writes are transactions (a killed process leaves no half entry),
    reads are memory-mapped, and several processes read while one writes.

    Args:
        path: folder; made when absent.
        map_size: bytes of address space to begin with; it doubles when it is full.

    Raises:
        FeatureStoreError: when the folder holds something else, or another version.
    """

    def __init__(self, path: str | os.PathLike[str], map_size: int = 1 << 30) -> None:
        self.path, self.map_size = Path(path), map_size
        with self._open().begin() as transaction:
            found = transaction.get(b"format")
        if found is None:
            self._write(b"format", FORMAT)
        elif found != FORMAT:
            raise FeatureStoreError(f"{self.path} holds another version of the store: remove the folder to rebuild it")

    def _open(self) -> lmdb.Environment:
        key = (os.getpid(), str(self.path.resolve()))
        if key not in _ENVIRONMENTS:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                environment = lmdb.open(str(self.path), map_size=self.map_size, max_readers=1024, readahead=False)
            except lmdb.Error as error:
                raise FeatureStoreError(
                    f"{self.path} is not a feature store: remove it or name another folder"
                ) from error
            _ENVIRONMENTS[key] = environment
        return _ENVIRONMENTS[key]

    def _write(self, key: bytes, value: bytes) -> None:
        while True:
            environment = self._open()
            try:
                with environment.begin(write=True) as transaction:
                    transaction.put(key, value)
                return
            except lmdb.MapFullError:
                self.map_size = 2 * max(self.map_size, environment.info()["map_size"])
                environment.set_mapsize(self.map_size)
            except lmdb.MapResizedError:  # another process made it larger
                environment.set_mapsize(0)
            except lmdb.DiskError as error:
                raise FeatureStoreError(f"{self.path} cannot be written: is the disk full?") from error

    def put(self, key: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Store arrays under a key; on disk when the call returns."""
        self._write(key.encode(), save({k: np.ascontiguousarray(v) for k, v in arrays.items()}))

    def get(self, key: str) -> dict[str, np.ndarray] | None:
        """The arrays of a key, or None."""
        environment = self._open()
        try:
            with environment.begin(buffers=True) as transaction:
                value = transaction.get(key.encode())
                return None if value is None else load(bytes(value))
        except lmdb.MapResizedError:
            environment.set_mapsize(0)
            return self.get(key)

    def __contains__(self, key: str) -> bool:
        with self._open().begin(buffers=True) as transaction:
            return transaction.get(key.encode()) is not None

    def __len__(self) -> int:
        return int(self._open().stat()["entries"]) - 1
