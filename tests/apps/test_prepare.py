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
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from monai_god.apps.cli import main
from monai_god.data.datalist import load_datalist

SECRET = "secret-7351"


def picture(path: Path, seed: int = 0, side: int = 48) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (side, side), dtype=np.uint8)).save(path)
    return path


def problems(folder: Path) -> dict[str, str]:
    with open(folder / "unreadable.csv", newline="") as file:
        return {Path(row["file"]).name: row["reason"] for row in csv.DictReader(file)}


def table(folder: Path, text: str, name: str = "table.csv") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


COLUMNS = ["--image-column", "file", "--patient-column", "patient", "--workers", "0"]


def items(folder: Path) -> list[dict]:
    return [item for section in load_datalist(folder).values() for item in section]


def test_folder(tmp_path, capsys):
    for patient in range(10):
        for image in range(2 + patient % 2):
            picture(tmp_path / f"{SECRET}-{patient}" / f"{image}.png", 10 * patient + image)
    (tmp_path / "notes.txt").write_text("not an image")
    assert main(["prepare", "folder", str(tmp_path), "--workers", "0", "--source", "toy", "--seed", "3"]) == 0
    sections = load_datalist(tmp_path)
    assert Counter({name: len({i["patient_id"] for i in s}) for name, s in sections.items()}) == {
        "training": 7,
        "validation": 1,
        "testing": 2,
    }
    assert len(items(tmp_path)) == 25 and {i["source"] for i in items(tmp_path)} == {"toy"}
    raw = json.loads((tmp_path / "datalist.json").read_text())
    assert not any(Path(i["image"]).is_absolute() for s in raw.values() for i in s)
    assert problems(tmp_path) == {}
    captured = capsys.readouterr()
    assert "25 of 25" in captured.out and "10, of them 10 with two images" in captured.out
    assert "reading images" in captured.err
    assert SECRET not in captured.out + captured.err


def test_several_processes_give_the_same_datalist(tmp_path):
    for image in range(12):
        picture(tmp_path / f"p{image // 3}" / f"{image}.png", image)
    (tmp_path / "p0" / "bad.png").write_bytes(b"")
    for workers in ("0", "2"):
        out = tmp_path / f"out{workers}.json"
        assert main(["prepare", "folder", str(tmp_path), "--workers", workers, "--output", str(out)]) == 0
    assert (tmp_path / "out0.json").read_text() == (tmp_path / "out2.json").read_text()


def test_folder_with_expression(tmp_path):
    picture(tmp_path / "deep" / "er" / "0007_L_v2.png", 1)
    picture(tmp_path / "0007_R_v1.png", 2)
    picture(tmp_path / "other.png", 3)
    expression = r"(?P<patient>\d+)_(?P<laterality>[LR])_v(?P<visit>\d)"
    command = ["prepare", "folder", str(tmp_path), "--workers", "0", "--pattern", "*.png"]
    assert main([*command, "--patient-regex", expression]) == 0
    found = sorted((i["patient_id"], i["laterality"], i["visit"]) for i in items(tmp_path))
    assert found == [("0007", "L", "2"), ("0007", "R", "1")]
    assert problems(tmp_path) == {"other.png": "--patient-regex finds no patient in its path"}
    assert main([*command, "--overwrite", "--patient-regex", r"(\d+)_"]) == 0
    assert {i["patient_id"] for i in items(tmp_path)} == {"0007"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--patient-regex", "("], "not a regular expression"),
        (["--patient-regex", "a"], "needs a group"),
        (["--patient-regex", "(?P<patient>a)(?P<colour>b)"], "needs a group"),
        (["--pattern", "*.tif"], "no file matches"),
        ([], "2 folders below .*--patient-regex"),
        (["--split", "0.5", "0.1", "0.1"], "sum to 1"),
    ],
)
def test_bad_folder_arguments(tmp_path, capsys, arguments, message):
    picture(tmp_path / "patient" / "visit" / "a.png")
    assert main(["prepare", "folder", str(tmp_path), "--workers", "0", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_an_existing_datalist_is_not_replaced_unasked(tmp_path, capsys):
    picture(tmp_path / "p" / "a.png")
    (tmp_path / "datalist.json").write_text("precious")
    assert main(["prepare", "folder", str(tmp_path), "--workers", "0"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "datalist.json").read_text() == "precious"
    assert main(["prepare", "folder", str(tmp_path), "--workers", "0", "--overwrite"]) == 0


def test_nothing_usable(tmp_path, capsys):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "a.png").write_bytes(b"")
    assert main(["prepare", "folder", str(tmp_path), "--workers", "0"]) == 1
    assert "Nothing usable" in capsys.readouterr().out
    assert not (tmp_path / "datalist.json").exists() and "a.png" in problems(tmp_path)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_table(tmp_path, separator):
    picture(tmp_path / "a.png", 1)
    picture(tmp_path / "sub" / "b.png", 2)
    picture(tmp_path / "mask.png", 3)
    rows = [
        ["file", "patient", "when", "eye", "mask", "split"],
        ["a.png", "007", "3", "OD", "mask.png", "testing"],
        ["b.png", "007", "-4", "", "", "testing"],
    ]
    path = table(tmp_path, "\ufeff" + "\n".join(separator.join(row) for row in rows) + "\n")
    more = [
        "--day-column",
        "when",
        "--laterality-column",
        "eye",
        "--mask",
        "optic_disc=mask",
        "--section-column",
        "split",
    ]
    assert main(["prepare", "csv", path, *COLUMNS, *more]) == 0
    first, second = load_datalist(tmp_path)["testing"]
    assert (first["patient_id"], first["day"], first["laterality"]) == ("007", 3, "R")
    assert first["optic_disc"] == str(tmp_path / "mask.png")
    assert second["image"] == str(tmp_path / "sub" / "b.png"), "found by its bare name"
    assert second["day"] == -4 and "laterality" not in second and "optic_disc" not in second


def test_trailing_separators_do_not_shift_columns(tmp_path):
    picture(tmp_path / "a.png", 1)
    assert main(["prepare", "csv", table(tmp_path, "file,patient,x\na.png,7,1,\n"), *COLUMNS]) == 0
    assert items(tmp_path)[0]["patient_id"] == "7"


BAD_ROWS = {
    "empty patient": (f"a.png,,\nb.png,{SECRET},\n", "a.png", "the patient\\) is empty", 1),
    "duplicate rows": (f"a.png,{SECRET},\na.png,{SECRET},\nb.png,{SECRET},\n", "a.png", "listed 2 times: duplicate", 2),
    "two patients": (f"a.png,{SECRET},\na.png,2,\nb.png,{SECRET},\n", "a.png", "under 2 different patients", 1),
    "no such file": (f"gone.png,{SECRET},\nb.png,{SECRET},\n", "gone.png", "no such file", 1),
    "no such path": (f"x/a.png,{SECRET},\nb.png,{SECRET},\n", "a.png", "no such file", 1),
    "ambiguous name": (f"twice.png,{SECRET},\nb.png,{SECRET},\n", "twice.png", "2 files of this name", 1),
    "empty image": (f",{SECRET},\nb.png,{SECRET},\n", "table.csv, line 2", "'file' is empty", 1),
    "too many fields": (f"a.png,{SECRET},1,2\nb.png,{SECRET},\n", "table.csv, line 2", "4 fields, but 3 columns", 1),
    "bad day": (f"a.png,{SECRET},soon\nb.png,{SECRET},\n", "a.png", "not a whole number", 1),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_bad_rows_are_listed_and_the_rest_is_prepared(tmp_path, capsys, kind):
    rows, name, reason, usable = BAD_ROWS[kind]
    for number, path in enumerate(("a.png", "b.png", "s/twice.png", "t/twice.png")):
        picture(tmp_path / path, number)
    path = table(tmp_path, "file,patient,when\n" + rows)
    assert main(["prepare", "csv", path, *COLUMNS, "--day-column", "when"]) == 0
    found = problems(tmp_path)
    assert list(found) == [name]
    assert re.search(reason, found[name])
    assert len(items(tmp_path)) == usable
    captured = capsys.readouterr()
    assert SECRET not in captured.out + captured.err + (tmp_path / "unreadable.csv").read_text()


@pytest.mark.parametrize(
    "text, arguments, message",
    [
        ("", [], "the file is empty"),
        ("file,patient\n", [], "no rows"),
        ("file,patient,patient\na.png,1,1\n", [], "several columns are called 'patient'"),
        ("file,person\na.png,1\n", [], "no column 'patient'; it has 'file', 'person'"),
        ("file,patient\na.png,1\n", ["--visit-column", "visit"], "no column 'visit'"),
        ("file,patient\na.png,1\n", ["--section-column", "split"], "no column 'split'"),
        ("file,patient\na.png,1\n", ["--root", "/no/such/folder"], "no such folder"),
        ("file,patient\na.png,1\n", ["--mask", "liver=x"], "expected NAME=COLUMN"),
        ("file,patient,s\na.png,1,training\nb.png,1,testing\n", ["--section-column", "s"], "share 1 patient"),
    ],
)
def test_bad_tables(tmp_path, capsys, text, arguments, message):
    for number, name in enumerate(("a.png", "b.png")):
        picture(tmp_path / name, number)
    assert main(["prepare", "csv", table(tmp_path, text), *COLUMNS, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "datalist.json").exists()


def test_no_table_and_no_text(tmp_path, capsys):
    assert main(["prepare", "csv", str(tmp_path / "gone.csv"), *COLUMNS]) == 2
    (tmp_path / "book.csv").write_bytes(b"PK\x03\x04\xff\xfe\x00\xd0")
    assert main(["prepare", "csv", str(tmp_path / "book.csv"), *COLUMNS]) == 2
    message = capsys.readouterr().err
    assert "gone.csv: no such file" in message and "book.csv: not UTF-8" in message


def test_a_bad_mask_is_dropped_and_said(tmp_path):
    picture(tmp_path / "a.png", 1)
    picture(tmp_path / "b.png", 2)
    picture(tmp_path / "small.png", 3, side=40)
    path = table(tmp_path, "file,patient,m\na.png,1,small.png\nb.png,1,gone.png\n")
    assert main(["prepare", "csv", path, *COLUMNS, "--mask", "heart=m"]) == 0
    assert [i for i in items(tmp_path) if "heart" in i] == [] and len(items(tmp_path)) == 2
    assert problems(tmp_path) == {
        "small.png": "40 x 40 pixels, but its image has 48 x 48 (mask 'heart'; the image is kept)",
        "gone.png": "no such file (mask 'heart'; the image is kept)",
    }


def test_identical_pixels_are_marked_whatever_the_file(tmp_path, capsys):
    original = picture(tmp_path / "p" / "a.png", 1)
    Image.open(original).save(tmp_path / "p" / "b.tif")
    picture(tmp_path / "q" / "c.png", 1)
    picture(tmp_path / "q" / "d.png", 2)
    assert main(["prepare", "folder", str(tmp_path), "--workers", "0", "--split", "0", "0", "1"]) == 0
    copies = {
        Path(i["image"]).name: Path(i["near_duplicate_of"]).name for i in items(tmp_path) if "near_duplicate_of" in i
    }
    assert copies == {"b.tif": "a.png", "c.png": "a.png"}
    out = capsys.readouterr().out
    assert "identical images     2" in out and "1 under another patient" in out and "c.png" in out


def test_patients_with_one_image(tmp_path, capsys):
    for number in range(3):
        picture(tmp_path / f"p{number}" / "a.png", number)
    assert main(["prepare", "folder", str(tmp_path), "--workers", "0"]) == 0
    assert "No patient has two images" in capsys.readouterr().out
