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

import json
from pathlib import Path
from typing import Any

import pytest

from monai_god.data.datalist import (
    DatalistError,
    PatientOverlapError,
    check_patient_disjoint,
    load_datalist,
    load_section,
    save_datalist,
)

SECRET = "secret-7351"


def write(folder: Path, content: Any) -> Path:
    (folder / "images").mkdir(exist_ok=True)
    for name in ("a", "b", "c"):
        (folder / "images" / f"{name}.png").write_bytes(b"x")
    path = folder / "datalist.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def item(name: str, patient: Any = SECRET, **more: Any) -> dict[str, Any]:
    return {"image": f"images/{name}.png", "patient_id": patient, **more}


def test_folder_or_file_paths_and_ids(tmp_path):
    path = write(
        tmp_path, {"name": "toy", "training": [item("a", 7), item("b", "7", near_duplicate_of="images/a.png")]}
    )
    for source in (tmp_path, path, str(tmp_path)):
        first, second = load_section(source, "training")
        assert first["image"] == str(tmp_path / "images" / "a.png")
        assert first["patient_id"] == second["patient_id"] == "7"
        assert second["near_duplicate_of"] == first["image"]


def test_relative_folder_gives_absolute_paths(tmp_path, monkeypatch):
    write(tmp_path, {"testing": [item("a")]})
    monkeypatch.chdir(tmp_path)
    assert load_section(".", "testing")[0]["image"] == str(tmp_path / "images" / "a.png")


def test_only_the_wanted_section_is_checked(tmp_path):
    write(tmp_path, {"training": [{"image": "gone.png"}], "testing": [item("a")]})
    assert len(load_section(tmp_path, "testing")) == 1


def test_anatomy_section_without_patients(tmp_path):
    write(tmp_path, {"anatomy": [{"image": "images/a.png"}]})
    assert load_section(tmp_path, "anatomy", patient_required=False)
    with pytest.raises(DatalistError, match="no 'patient_id'"):
        load_section(tmp_path, "anatomy")


BAD = {
    "not JSON": ("{", "training", "not JSON, line 1"),
    "a list": ("[]", "training", "named sections"),
    "unknown section": ({"training": [item("a")]}, "testing", "no section 'testing'; it has 'training'"),
    "empty section": ({"training": []}, "training", "is empty"),
    "item is no object": ({"training": ["a.png"]}, "training", "item 0: expected an object"),
    "no image": ({"training": [{"patient_id": SECRET}]}, "training", "no 'image'"),
    "no patient": ({"training": [{"image": "images/a.png"}]}, "training", r"images/a.png.*no 'patient_id'"),
    "misspelt key": (
        {"training": [{"image": "images/a.png", "pateint_id": "1"}]},
        "training",
        "'pateint_id': misspelt",
    ),
    "empty patient": ({"training": [item("a", " ")]}, "training", "'patient_id' is empty"),
    "float patient": ({"training": [item("a", 7.0)]}, "training", "found float"),
    "null patient": ({"training": [item("a", None)]}, "training", "found NoneType"),
    "duplicate row": ({"training": [item("a"), item("a")]}, "training", "same image as item 0: a duplicate row"),
    "missing file": ({"training": [item("d")]}, "training", r"1 files do not exist[\s\S]*d\.png"),
    "missing mask": ({"training": [item("a", heart="heart.png")]}, "training", r"heart\.png"),
    "missing CheXmask": ({"training": [item("a", chexmask={"file": "x.csv"})]}, "training", r"x\.csv"),
    "unresolved duplicate": (
        {"training": [item("a", near_duplicate_of="z.png")]},
        "training",
        "no section lists: z.png",
    ),
    "laterality": ({"training": [item("a", laterality="OD")]}, "training", "'L' or 'R'"),
    "two images in one item": ({"training": [{"image": ["a", "b"], "patient_id": "1"}]}, "training", "no 'image'"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_datalists(kind, tmp_path):
    content, section, message = BAD[kind]
    path = write(tmp_path, content)
    with pytest.raises(DatalistError, match=message) as error:
        load_section(path, section)
    assert str(path) in str(error.value)
    assert SECRET not in str(error.value)


def test_no_file(tmp_path):
    with pytest.raises(DatalistError, match="no such file.*monai-god prepare"):
        load_datalist(tmp_path)
    with pytest.raises(DatalistError, match="no such file"):
        load_datalist(tmp_path / "other.json")


def test_a_long_list_of_problems_is_cut(tmp_path):
    write(tmp_path, {"training": [item(f"gone{i}") for i in range(40)]})
    with pytest.raises(DatalistError, match=r"40 files do not exist[\s\S]*and 35 more"):
        load_datalist(tmp_path)


def test_overlap_is_counted_and_never_named(tmp_path):
    write(tmp_path, {"training": [item("a"), item("b", "2")], "testing": [item("c")], "quirks": [item("c", "2")]})
    for wanted in (None, ["testing"]):
        with pytest.raises(PatientOverlapError, match="training and testing share 1 patient[.]") as error:
            load_datalist(tmp_path, wanted)
        assert SECRET not in str(error.value)
        assert error.value.shared == {("training", "testing"): 1}


def test_overlap_compares_numbers_with_text():
    with pytest.raises(PatientOverlapError, match="share 2 patients"):
        check_patient_disjoint(
            {
                "training": [{"patient_id": 1}, {"patient_id": "2"}],
                "validation": [{"patient_id": "1"}, {"patient_id": 2}],
            }
        )


def test_save_and_load_again(tmp_path):
    write(
        tmp_path,
        {"training": [item("a", "1", visit=3), item("b", "1", near_duplicate_of="images/a.png", heart="images/c.png")]},
    )
    loaded = load_datalist(tmp_path)
    other = tmp_path / "sub" / "list.json"
    assert save_datalist(loaded, other) == other
    written = json.loads(other.read_text())["training"]
    assert written[0]["image"] == "../images/a.png"
    assert written[1]["near_duplicate_of"] == "../images/a.png"
    assert load_datalist(other) == loaded
    assert [p.name for p in other.parent.iterdir()] == ["list.json"]


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = save_datalist({"training": [item("a")]}, tmp_path)
    before = path.read_text()
    with pytest.raises(ValueError, match="Out of range"):
        save_datalist({"training": [item("a", weight=float("nan"))]}, path)
    with pytest.raises(PatientOverlapError):
        save_datalist({"training": [item("a")], "testing": [item("b")]}, path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["datalist.json"]


@pytest.mark.parametrize(
    "folder, section, count", [("cxr", "training", 333), ("cxr", "quirks", 61), ("fundus", "testing", 184)]
)
def test_real_datalists(shared_data, folder, section, count):
    items = load_section(shared_data / folder, section)
    assert len(items) == count
    assert all(Path(entry["image"]).is_file() for entry in items)
