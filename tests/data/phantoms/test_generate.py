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
import multiprocessing

import numpy as np
import pytest
from PIL import Image

from monai_god.data import check_patient_disjoint, generate_cxr_phantoms, generate_fundus_phantoms, load_datalist
from monai_god.data.phantoms import PhantomFolderError
from monai_god.data.phantoms.generate import section_sizes

SMALL = {"patients": 6, "visits": 2, "size": 64, "progress": False}


def digest(folder) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_a_set_is_a_datalist_with_exact_masks(tmp_path):
    path = generate_cxr_phantoms(tmp_path / "set", num_workers=0, **SMALL)
    sections = load_datalist(path)
    check_patient_disjoint(sections)
    assert {name: len(items) for name, items in sections.items()} == {"training": 6, "validation": 2, "testing": 4}
    for item in sections["training"]:
        assert item["source"] == "phantom" and item["view"] in ("PA", "AP")
        assert Image.open(item["image"]).size == (64, 64)
        for organ in ("left_lung", "right_lung", "heart"):
            mask = np.array(Image.open(item[organ]))
            assert mask.shape == (64, 64) and set(np.unique(mask).tolist()) <= {False, True, 255}


def test_a_fundus_set_has_both_eyes_and_leaves_out_what_is_out_of_the_field(tmp_path):
    sections = load_datalist(generate_fundus_phantoms(tmp_path / "set", num_workers=0, **SMALL))
    check_patient_disjoint(sections)
    assert {name: len(items) for name, items in sections.items()} == {"training": 12, "validation": 4, "testing": 8}
    items = [item for section in sections.values() for item in section]
    assert len({(item["patient_id"], item["laterality"], item["visit"]) for item in items}) == len(items) == 24
    for item in items:
        assert item["source"] == "phantom" and item["laterality"] in "LR" and item["camera"]
        assert np.array(Image.open(item["image"])).shape == (64, 64, 3)
        assert Image.open(item["vessels"]).size == (64, 64)
        assert ("optic_disc" in item) == ("optic_disc_center" in item)
        if "optic_disc" in item:
            x, y = item["optic_disc_center"]
            assert np.array(Image.open(item["optic_disc"]))[round(y), round(x)]
    assert any("fovea_center" in item for item in items)


@pytest.mark.parametrize("generate", [generate_cxr_phantoms, generate_fundus_phantoms])
def test_settings_out_of_range(tmp_path, generate):
    for wrong in ({"visits": 0}, {"size": 32}, {"seed": -1}, {"artefact": "stripes"}, {"patients": 2}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            generate(tmp_path / "set", **{**SMALL, **wrong})


@pytest.mark.parametrize("generate", [generate_cxr_phantoms, generate_fundus_phantoms])
def test_workers_do_not_change_the_files(tmp_path, generate):
    generate(tmp_path / "one", num_workers=0, **SMALL)
    generate(tmp_path / "two", num_workers=2, **SMALL)
    assert digest(tmp_path / "one") == digest(tmp_path / "two")


def test_is_drawn_once_and_again_when_the_settings_change(tmp_path):
    folder = tmp_path / "set"
    generate_cxr_phantoms(folder, num_workers=0, **SMALL)
    before = (folder / "datalist.json").stat().st_mtime_ns
    generate_cxr_phantoms(folder, num_workers=0, **SMALL)
    assert (folder / "datalist.json").stat().st_mtime_ns == before
    generate_cxr_phantoms(folder, num_workers=0, **{**SMALL, "visits": 1})
    assert json.loads((folder / "phantoms.json").read_text())["visits"] == 1
    next((folder / "images").iterdir()).unlink()  # an incomplete set is not taken for a whole one
    generate_cxr_phantoms(folder, num_workers=0, **{**SMALL, "visits": 1})
    assert len(list((folder / "images").iterdir())) == 6


def test_nobodys_files_are_replaced(tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(PhantomFolderError, match="holds files"):
        generate_cxr_phantoms(tmp_path, num_workers=0, **SMALL)
    assert (tmp_path / "mine.txt").read_text() == "precious"


def _draw(folder) -> None:
    generate_cxr_phantoms(folder, num_workers=0, **SMALL)


def test_two_processes_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=_draw, args=(tmp_path / "set",)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert len(load_datalist(tmp_path / "set")["training"]) == 6
    assert [p.name for p in tmp_path.iterdir()] == ["set"]


def test_sections():
    assert section_sizes(64) == {"training": 36, "validation": 8, "testing": 20}
    assert section_sizes(3) == {"training": 1, "validation": 1, "testing": 1}
    with pytest.raises(ValueError, match="3 or more"):
        section_sizes(2)
