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
"""``monai-god mismatch`` and ``monai-god leak``: wrong patients' names in one set, the same patients in two."""

from __future__ import annotations

import argparse
import csv
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from monai_god.data.datalist import DatalistError, load_section
from monai_god.engines import load_run
from monai_god.files import written_aside
from monai_god.gallery import label_disagreement, pairs_above
from monai_god.metrics import SamePatientCalibrator

__all__ = ["add_parser"]


def _embeddings(path: str) -> tuple[np.ndarray, list[str]]:
    """What a run of the bundle's evaluation or inference left: vectors, and names of the images."""
    try:
        with np.load(path, allow_pickle=False) as saved:
            return saved["embeddings"], [str(name) for name in saved["images"]]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DatalistError(
            f"{path}: not the embeddings.npz of a run; make one by the bundle's inference or evaluation."
        ) from error


def _write(path: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with written_aside(path) as aside, aside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


def _mismatch(parsed: argparse.Namespace) -> int:
    z, images = _embeddings(parsed.embeddings)
    patients = {item["image"]: item["patient_id"] for item in load_section(parsed.datalist, parsed.section)}
    unknown = [name for name in images if name not in patients]
    if unknown:
        raise DatalistError(
            f"{parsed.datalist}: section {parsed.section} lacks {len(unknown)} of the {len(images)} embedded images, "
            f"{unknown[0]} first; give the datalist that was embedded."
        )
    found = label_disagreement(z, [patients[name] for name in images])
    order = [int(i) for i in np.argsort(-found.score, kind="stable") if found.score[i] > parsed.threshold]
    rows = [(images[i], f"{found.score[i]:.4f}", images[found.other[i]], images[found.own[i]]) for i in order]
    _write(parsed.output, ("image", "score", "nearest_of_another_patient", "nearest_of_its_own"), rows)
    alone = int(np.isnan(found.score).sum())
    print(f"{len(rows)} of {len(images)} images look more like another patient; written to {parsed.output}")
    if alone:
        print(f"{alone} images are their patient's only one: nothing can be said about them")
    return 0


def _leak(parsed: argparse.Namespace) -> int:
    first, first_images = _embeddings(parsed.first)
    second, second_images = _embeddings(parsed.second)
    calibration = load_run(parsed.ckpt_path).get("calibration")
    if calibration is None:
        raise DatalistError(f"{parsed.ckpt_path}: holds no calibration; train again with this version.")
    calibrate = SamePatientCalibrator.from_dict(calibration)
    grid = np.linspace(-1, 1, 20001)
    enough = grid[calibrate(grid, parsed.prior) >= parsed.probability]
    if not len(enough):
        print(f"no similarity reaches a probability of {parsed.probability} with this model and prior")
        return 1
    i, j, cosines = pairs_above(first, second, float(enough[0]))
    chances = calibrate(cosines, parsed.prior) if len(cosines) else cosines
    rows = [
        (first_images[a], second_images[b], f"{s:.4f}", f"{p:.4f}")
        for a, b, s, p in zip(i, j, cosines, chances, strict=True)
    ]
    _write(parsed.output, ("first", "second", "similarity", "probability"), rows)
    print(
        f"{len(rows)} pairs of the two sets show the same patient with a probability of {parsed.probability} or more "
        f"(similarity {enough[0]:.4f}); {len(set(i.tolist()))} of {len(first_images)} images of the first set and "
        f"{len(set(j.tolist()))} of {len(second_images)} of the second; written to {parsed.output}"
    )
    return 0


def add_parser(subparsers: Any) -> None:
    """Add the commands ``mismatch`` and ``leak``."""
    parser = subparsers.add_parser("mismatch", help="images that look like another patient than their label says")
    parser.add_argument("--embeddings", required=True, help="embeddings.npz of an evaluation or inference")
    parser.add_argument("--datalist", required=True, help="folder or file with the labels")
    parser.add_argument("--section", default="testing")
    parser.add_argument("--threshold", type=float, default=0.0, help="list images with a score above (default: 0)")
    parser.add_argument("--output", default="mismatch.csv")
    parser.set_defaults(run=_mismatch)

    parser = subparsers.add_parser("leak", help="patients that occur in both of two sets")
    parser.add_argument("--first", required=True, help="embeddings.npz of the one set")
    parser.add_argument("--second", required=True, help="embeddings.npz of the other, by the same model")
    parser.add_argument("--ckpt_path", required=True, help="model.pt of the training run, for the probability")
    parser.add_argument("--probability", type=float, default=0.5, help="list pairs from here (default: 0.5)")
    parser.add_argument("--prior", type=float, help="share of same-patient pairs (default: that of the validation set)")
    parser.add_argument("--output", default="leak.csv")
    parser.set_defaults(run=_leak)
