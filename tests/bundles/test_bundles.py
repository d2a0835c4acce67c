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
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from monai.bundle.workflows import ConfigWorkflow

from tests.bundles.conftest import BUNDLES, REPOSITORY, SMALL, command, configs_of, run


@pytest.fixture(scope="module")
def trained(bundle, phantoms, cache, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("trained")
    given = ["--dataset_dir", str(phantoms), "--cache_dir", str(cache), "--output_dir", str(output), "--epochs", "2"]
    # from inside the bundle
    run([*command(bundle, "train.json"), *given, *SMALL], folder=configs_of(bundle).parent)
    return output


def test_properties_are_complete(bundle, trained, phantoms, cache, tmp_path):
    given = {"dataset_dir": str(phantoms), "cache_dir": str(cache), "output_dir": str(tmp_path), "num_workers": 0}
    small = {"batch_size": 8, "images_per_patient": 2, "width": 32, "node_dim": 16, "epochs": 1}
    train = ConfigWorkflow(
        config_file=str(configs_of(bundle) / "train.json"), workflow_type="train", logging_file=False, **given, **small
    )
    train.initialize()
    assert train.check_properties() == []
    infer = ConfigWorkflow(
        config_file=str(configs_of(bundle) / "inference.json"),
        workflow_type="infer",
        logging_file=False,
        ckpt_path=str(trained / "model.pt"),
        **given,
    )
    infer.initialize()
    assert infer.check_properties() == []


def test_training_leaves_what_it_promises(bundle, trained):
    report = json.loads((trained / "metrics.json").read_text())
    assert report["components"] == "E" and report["seed"] == 0
    assert report["queries"] == {"god_cxr": 18, "god_fundus": 12}[bundle] and report["failed_images"] == 0
    for name in ("rank1", "map"):
        low, high = report["metrics"][name]["ci95"]
        assert 0 <= low <= report["metrics"][name]["value"] <= high <= 1
    for name in ("ranked_lists.png", "graphs.png", "curves.png"):
        assert (trained / name).read_bytes()[:4] == b"\x89PNG"
    assert "closed form" in (trained / "log.txt").read_text()
    with open(trained / "history.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1", "2"] and float(rows[1]["loss"]) > 0
    assert any(path.name.startswith("events.out") for path in trained.iterdir())
    assert not list(trained.glob("*.tmp*"))


def test_switches_can_be_words(bundle, phantoms, cache, tmp_path):
    """On the command line ``false`` arrives as a word, which is true in Python."""
    given = ["--dataset_dir", str(phantoms), "--cache_dir", str(cache), "--output_dir", str(tmp_path), "--epochs", "0"]
    run([*command(bundle, "train.json", "run"), *given, *SMALL, "--matched", "false", "--typed_pooling", "false"])
    assert (tmp_path / "metrics.json").is_file()
    network = torch.load(tmp_path / "model.pt", weights_only=True)["settings"]["network"]
    assert network["matched"] is False and network["typed_pooling"] is False


def test_no_patient_is_named(bundle, trained, phantoms):
    items = json.loads((phantoms / "datalist.json").read_text())["testing"]
    for name in ("metrics.json", "log.txt", "history.csv"):
        text = (trained / name).read_text()
        assert not any(item["patient_id"] in text for item in items)


def test_evaluation_needs_the_testing_section_only(bundle, trained, phantoms, cache, tmp_path):
    data = json.loads((phantoms / "datalist.json").read_text())
    for item in data["testing"]:
        for key in ("image", "left_lung", "right_lung", "heart", "optic_disc", "vessels"):
            if key in item:
                item[key] = str(phantoms / item[key])
    (tmp_path / "datalist.json").write_text(json.dumps({"testing": data["testing"]}))
    given = ["--dataset_dir", str(tmp_path), "--cache_dir", str(cache), "--output_dir", str(tmp_path / "out")]
    given += ["--ckpt_path", str(trained / "model.pt"), "--num_workers", "0"]
    run([*command(bundle, ["train.json", "evaluate.json"], "run"), *given])
    ours = json.loads((tmp_path / "out" / "metrics.json").read_text())
    theirs = json.loads((trained / "metrics.json").read_text())
    assert ours["metrics"] == theirs["metrics"]


def test_inference_on_a_folder_of_images(bundle, trained, phantoms, tmp_path):
    (tmp_path / "images").mkdir()
    for path in sorted((phantoms / "images").iterdir())[:5]:
        os.link(path, tmp_path / "images" / path.name)
    (tmp_path / "images" / "broken.png").write_bytes(b"no picture")
    given = ["--dataset_dir", str(tmp_path / "images"), "--output_dir", str(tmp_path / "out"), "--num_workers", "0"]
    text = run([*command(bundle, "inference.json", "inference"), *given, "--ckpt_path", str(trained / "model.pt")])
    assert "1 of 6 images left out" in text
    with np.load(tmp_path / "out" / "embeddings.npz", allow_pickle=False) as saved:
        z, images = saved["embeddings"], saved["images"]
    assert len(z) == len(images) == 5
    np.testing.assert_allclose(np.linalg.norm(z, axis=1), 1, atol=1e-5)
    with open(tmp_path / "out" / "neighbours.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5 * 4
    first = {name: k for k, name in enumerate(images)}
    for row in rows:
        cosine = z[first[row["image"]]] @ z[first[row["neighbour"]]]
        assert row["image"] != row["neighbour"] and float(row["similarity"]) == pytest.approx(cosine, abs=1e-4)
    order = sorted(rows, key=lambda row: float(row["similarity"]))
    chances = [float(row["probability"]) for row in order]
    assert chances == sorted(chances) and 0 <= chances[0] < chances[-1] <= 1
    with open(tmp_path / "out" / "cache" / "unreadable.csv") as file:
        assert "broken.png" in file.read()


def test_inference_with_the_shipped_model(bundle, phantoms, tmp_path):
    if not (REPOSITORY / "bundles" / bundle / "models" / "model.pt").exists():
        pytest.skip(f"{bundle} ships no trained model yet")
    (tmp_path / "images").mkdir()
    items = json.loads((phantoms / "datalist.json").read_text())["training"][:12]
    patients = {Path(item["image"]).name: item["patient_id"] for item in items}
    for item in items:
        os.link(phantoms / item["image"], tmp_path / "images" / Path(item["image"]).name)
    given = ["--dataset_dir", str(tmp_path / "images"), "--output_dir", str(tmp_path / "out"), "--num_workers", "0"]
    run([*command(bundle, "inference.json", "run"), *given])
    with open(tmp_path / "out" / "neighbours.csv") as file:
        nearest = [row for row in csv.DictReader(file) if row["rank"] == "1"]
    found = [patients[Path(row["image"]).name] == patients[Path(row["neighbour"]).name] for row in nearest]
    assert len(found) == 12 and np.mean(found) > 0.5  # by chance 0.18 (three films each) or 0.09 (two eyes)


def test_a_wrong_checkpoint_is_refused_in_words(bundle, phantoms, tmp_path):
    given = ["--dataset_dir", str(phantoms), "--output_dir", str(tmp_path), "--ckpt_path", str(tmp_path / "none.pt")]
    done = subprocess.run(
        [*command(bundle, ["train.json", "evaluate.json"], "evaluating"), *given],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "There is no checkpoint" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("bundle", ["god_cxr"], indirect=True)
def test_two_processes_equal_one(bundle, phantoms, cache, tmp_path):
    """The same loss curve and the same weights, within floating-point noise."""
    given = ["--dataset_dir", str(phantoms), "--cache_dir", str(cache), "--epochs", "3", *SMALL]
    given += ["--components", "D", "--head_init", "random", "--learning_rate", "0.001"]
    run([*command(bundle, "train.json"), *given, "--output_dir", str(tmp_path / "one")])
    two = command(bundle, ["train.json", "multi_gpu_train.json"], processes=2)
    run([*two, *given, "--output_dir", str(tmp_path / "two")])
    curves = []
    for name in ("one", "two"):
        with open(tmp_path / name / "history.csv") as file:
            curves.append([float(row["loss"]) for row in csv.DictReader(file) if row["loss"]])
    assert len(curves[0]) == 3
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-4)
    weights = [torch.load(tmp_path / name / "last.pt", weights_only=True)["network"] for name in ("one", "two")]
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, atol=2e-3, rtol=1e-2)


def _start(arguments: list[str]) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(arguments, cwd=REPOSITORY, env=environment, **quiet)


def _kill_when(process: subprocess.Popen, count, target: int, delay: float) -> bool:
    """Kill once ``count()`` has reached the target and the delay is over; False where the process was faster."""
    while process.poll() is None and count() < target:
        time.sleep(0.02)
    time.sleep(delay)
    alive = process.poll() is None
    if alive:
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return alive


@pytest.mark.slow
@pytest.mark.parametrize("bundle", ["god_cxr"], indirect=True)
def test_killed_training_goes_on_to_the_same_weights(bundle, phantoms, cache, tmp_path):
    given = ["--dataset_dir", str(phantoms), "--cache_dir", str(cache), "--epochs", "60", *SMALL]
    given += ["--components", "D", "--learning_rate", "0.0001"]
    run([*command(bundle, "train.json"), *given, "--output_dir", str(tmp_path / "whole")])
    arguments = [*command(bundle, "train.json"), *given, "--output_dir", str(tmp_path / "killed")]
    rng, history = random.Random(0), tmp_path / "killed" / "history.csv"

    def rows() -> int:
        return len(history.read_text().splitlines()) if history.is_file() else 0

    # at random moments of random epochs, some before the first and some while a checkpoint is written
    for _ in range(10):
        assert _kill_when(_start(arguments), rows, rows() + rng.randint(0, 5), rng.uniform(0.0, 0.6))
    assert 10 < rows() < 61
    run(arguments)
    one, two = (torch.load(tmp_path / name / "last.pt", weights_only=True) for name in ("whole", "killed"))
    assert one["history"] == two["history"] and len(one["history"]) == 61
    for part in ("network", "loss"):
        assert all(torch.equal(one[part][key], two[part][key]) for key in one[part])
    best = [torch.load(tmp_path / name / "model.pt", weights_only=True)["network"] for name in ("whole", "killed")]
    assert all(torch.equal(best[0][key], best[1][key]) for key in best[0])


@pytest.mark.slow
@pytest.mark.parametrize("bundle", ["god_cxr"], indirect=True)
def test_killed_extraction_goes_on_to_the_same_weights(bundle, phantoms, tmp_path):
    given = ["--dataset_dir", str(phantoms), "--epochs", "1", *SMALL]
    run([*command(bundle, "train.json"), *given, "--output_dir", str(tmp_path / "whole")])
    arguments = [*command(bundle, "train.json"), *given, "--output_dir", str(tmp_path / "killed")]
    rng, features = random.Random(1), tmp_path / "killed" / "cache" / "features"

    def stored() -> int:
        # in a process of its own, as the store of a killed one must be open to others
        code = f"from monai_god.data.feature_store import FeatureStore; print(len(FeatureStore({str(features)!r})))"
        if not features.is_dir():
            return 0
        return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    images = sum(len(section) for section in json.loads((phantoms / "datalist.json").read_text()).values())
    for kill in range(10):
        before = stored()
        process = _start(arguments)
        while process.poll() is None and not features.is_dir():
            time.sleep(0.02)
        size = (features / "data.mdb").stat().st_size if (features / "data.mdb").is_file() else 0

        def grown(size: int = size) -> int:
            return int((features / "data.mdb").stat().st_size > size) if (features / "data.mdb").is_file() else 0

        # every second one as soon as an entry has been written, the others at any moment of the start
        assert _kill_when(process, grown, kill % 2, rng.uniform(0.0, 0.4))
        assert before <= stored() <= images
    run(arguments)
    assert stored() == images
    one, two = (torch.load(tmp_path / name / "model.pt", weights_only=True)["network"] for name in ("whole", "killed"))
    assert all(torch.equal(one[key], two[key]) for key in one)


#: what tells one bundle's configuration from another's; the rest is one text
OWN = {"bundle_root", "output_dir", "dataset_dir", "align", "modality", "preprocessing"}


@pytest.mark.parametrize("name", ["train.json", "inference.json", "evaluate.json", "multi_gpu_train.json"])
def test_the_bundles_differ_in_their_modality_only(name):
    one, two = (json.loads((configs_of(bundle) / name).read_text()) for bundle in BUNDLES)
    assert list(one) == list(two)
    assert {key for key in one if one[key] != two[key]} <= OWN
    if "preprocessing" in one:
        train = [json.loads((configs_of(bundle) / "train.json").read_text()) for bundle in BUNDLES]
        assert [config["preprocessing"] for config in train] == [one["preprocessing"], two["preprocessing"]]
