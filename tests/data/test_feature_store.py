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
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from monai_god.data import FeatureStore, FeatureStoreError, feature_key


def arrays(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"g": rng.standard_normal(5, dtype=np.float32), "x": rng.standard_normal((4, 5)).astype(np.float16)}


def test_what_is_put_comes_back(tmp_path):
    store = FeatureStore(tmp_path / "store")
    for seed in range(3):
        store.put(str(seed), arrays(seed))
    again = FeatureStore(tmp_path / "store")
    assert len(again) == 3 and "1" in again and "7" not in again and again.get("7") is None
    for seed in range(3):
        for name, value in again.get(str(seed)).items():
            np.testing.assert_array_equal(value, arrays(seed)[name])
            assert value.dtype == arrays(seed)[name].dtype


def test_grows_beyond_its_first_size(tmp_path):
    store = FeatureStore(tmp_path / "store", map_size=1 << 16)
    big = {"x": np.arange(40_000, dtype=np.float32)}
    for k in range(5):
        store.put(str(k), big)
    assert len(store) == 5
    np.testing.assert_array_equal(store.get("4")["x"], big["x"])


def test_another_process_reads_while_one_writes(tmp_path):
    store = FeatureStore(tmp_path / "store")
    store.put("a", arrays(0))
    code = (
        "import sys; from monai_god.data import FeatureStore; s = FeatureStore(sys.argv[1]); "
        "print(float(s.get('a')['g'].sum())); sys.stdin.readline(); print('b' in s)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "store")]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert float(reader.stdout.readline()) == pytest.approx(float(arrays(0)["g"].sum()))
    store.put("b", arrays(1))
    assert reader.communicate("go\n")[0].strip() == "True"


def test_travels_to_workers(tmp_path):
    store = FeatureStore(tmp_path / "store")
    store.put("a", arrays(0))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(store)).get("a")["g"], arrays(0)["g"])


def test_a_killed_writer_leaves_no_half_entry(tmp_path):
    code = (
        "import sys, numpy as np; from monai_god.data import FeatureStore; s = FeatureStore(sys.argv[1]);\n"
        "for k in range(100000): s.put(str(k), {'x': np.full(50000, k, np.float32)}); print(k, flush=True)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
    for _ in range(5):
        writer.stdout.readline()
    time.sleep(0.05)
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    store = FeatureStore(tmp_path / "store")
    assert len(store) >= 5
    for k in range(len(store)):
        assert (store.get(str(k))["x"] == k).all()
    store.put("more", {"x": np.ones(3)})


def test_key_depends_on_everything():
    base = dict(content="c", preprocessing={"size": 448}, backbone="b", view=0)
    keys = {feature_key(**base)}
    for name, value in (("content", "d"), ("preprocessing", {"size": 224}), ("backbone", "a"), ("view", 1)):
        keys.add(feature_key(**{**base, name: value}))
    assert len(keys) == 5 and feature_key(**base) in keys


def test_other_files_are_not_taken_for_a_store(tmp_path):
    (tmp_path / "data.mdb").write_bytes(b"something else" * 1000)
    with pytest.raises(FeatureStoreError, match="not a feature store"):
        FeatureStore(tmp_path)
