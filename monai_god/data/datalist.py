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
"""Datalists: MONAI's JSON of named sections, checked before anything is trained on it."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from monai_god.transforms.graph.modality import MODALITIES

__all__ = [
    "DATALIST_NAME",
    "DISJOINT_SECTIONS",
    "DatalistError",
    "PatientOverlapError",
    "check_patient_disjoint",
    "load_datalist",
    "load_section",
    "path_keys",
    "save_datalist",
]

DATALIST_NAME = "datalist.json"

# Sections that must never share a patient. Others (for example a collection of quirks) may hold anybody.
DISJOINT_SECTIONS = ("training", "validation", "testing")

# Problems listed in one message: enough to see the pattern.
_LISTED = 5

Item = dict[str, Any]


class DatalistError(ValueError):
    """A datalist, or the table it is made from, cannot be used as it is; the message names the file and the mend."""


class PatientOverlapError(DatalistError):
    """Sections that must be patient-disjoint share patients; the message says how many, never which.

    Args:
        shared: number of shared patients for each pair of sections.
        where: the file, named in the message.
    """

    def __init__(self, shared: Mapping[tuple[str, str], int], where: str | os.PathLike[str] | None = None) -> None:
        self.shared = dict(shared)
        pairs = "; ".join(
            f"{first} and {second} share {count} patient{'s' if count > 1 else ''}"
            for (first, second), count in self.shared.items()
        )
        prefix = f"{os.fspath(where)}: " if where is not None else ""
        super().__init__(
            f"{prefix}{pairs}. Retrieval figures on patients seen in training mean nothing: "
            "split by patient (monai_god.data.split_by_patient, or `monai-god prepare`)."
        )


def check_patient_disjoint(
    sections: Mapping[str, Sequence[Mapping[str, Any]]],
    names: Sequence[str] = DISJOINT_SECTIONS,
    where: str | os.PathLike[str] | None = None,
) -> None:
    """Check that no patient is in two of the named sections.

    Args:
        sections: items by section; items without ``patient_id`` are not compared.
        names: the sections to compare; absent ones are ignored.
        where: the file the sections come from, for the message.

    Raises:
        PatientOverlapError: with the number of shared patients.
    """
    patients = {
        name: {str(item["patient_id"]) for item in sections[name] if item.get("patient_id") is not None}
        for name in names
        if name in sections
    }
    shared = {
        (first, second): len(patients[first] & patients[second])
        for first, second in combinations(patients, 2)
        if patients[first] & patients[second]
    }
    if shared:
        raise PatientOverlapError(shared, where)


def path_keys() -> tuple[str, ...]:
    """
    Keys whose values are files, relative to the folder of the datalist: the image, masks of all registered modalities'
    organs, and an image that this one nearly duplicates.
    """
    organs = (organ for modality in MODALITIES.values() for organ in modality.organs)
    return tuple(dict.fromkeys(("image", *organs, "cardiomediastinum", "near_duplicate_of")))


def _datalist_path(path: str | os.PathLike[str]) -> Path:
    path = Path(path).expanduser()
    if path.is_dir():
        path = path / DATALIST_NAME
        mend = "make one with `monai-god prepare csv` or `monai-god prepare folder`"
    else:
        mend = f"give a folder that holds {DATALIST_NAME}, or the path of such a file"
    if not path.is_file():
        raise DatalistError(f"{path}: no such file; {mend}.")
    return path


def _read_json(path: Path) -> dict[str, list[Item]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DatalistError(f"{path}: not JSON, line {error.lineno} column {error.colno}: {error.msg}.") from error
    except UnicodeDecodeError as error:
        raise DatalistError(f"{path}: not a UTF-8 text file, so not a JSON datalist.") from error
    if not isinstance(content, dict):
        raise DatalistError(f"{path}: expected an object of named sections, found a JSON {type(content).__name__}.")
    # MONAI's datalists may carry strings and numbers (a name, a description, numTest) beside the sections
    sections = {name: value for name, value in content.items() if isinstance(value, list)}
    for name, items in sections.items():
        for position, item in enumerate(items):
            if not isinstance(item, dict):
                raise DatalistError(
                    f"{path}: section {name!r}, item {position}: expected an object, found {type(item).__name__}."
                )
    return sections


def _absolute(value: str, folder: Path) -> str:
    return os.path.normpath(os.path.join(folder, value))


def _patient(item: Item) -> tuple[str | None, str]:
    """The patient id as str, or None and what is wrong with it (without the value)."""
    if "patient_id" not in item:
        near = difflib.get_close_matches("patient_id", item, n=1, cutoff=0.7)
        hint = f" (there is {near[0]!r}: misspelt?)" if near else ""
        return None, f"no 'patient_id'{hint}"
    value = item["patient_id"]
    # a float is refused: 7.0 from one table and 7 from another would be two patients
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return None, f"'patient_id' must be a string or an integer, found {type(value).__name__}"
    text = str(value).strip()
    return (text, "") if text else (None, "'patient_id' is empty")


def _resolve(item: Item, folder: Path, known: set[str], patient_required: bool) -> tuple[Item, list[str]]:
    """An item with absolute paths and string ids, and what is wrong with it."""
    problems: list[str] = []
    resolved = dict(item)
    image = item.get("image")
    if not isinstance(image, str) or not image:
        problems.append("no 'image' (a path relative to the datalist's folder)")
    for key in path_keys():
        if key not in item or (key == "image" and problems):
            continue
        if not isinstance(item[key], str):
            problems.append(f"{key!r} must be one path, found {type(item[key]).__name__}")
            continue
        resolved[key] = _absolute(item[key], folder)
    if isinstance(item.get("chexmask"), dict) and "file" in item["chexmask"]:
        resolved["chexmask"] = {**item["chexmask"], "file": _absolute(str(item["chexmask"]["file"]), folder)}
    if isinstance(resolved.get("near_duplicate_of"), str) and resolved["near_duplicate_of"] not in known:
        problems.append(f"'near_duplicate_of' names an image that no section lists: {item['near_duplicate_of']}")
    if "patient_id" in item or patient_required:
        patient, problem = _patient(item)
        if patient is None:
            problems.append(problem)
        else:
            resolved["patient_id"] = patient
    if "camera" not in item and isinstance(item.get("notes"), str):
        noted = dict(part.strip().partition("=")[::2] for part in item["notes"].split(";"))
        if noted.get("camera"):
            resolved["camera"] = noted["camera"]
    if item.get("laterality") not in (None, "L", "R"):
        problems.append("'laterality' must be 'L' or 'R'")
    return resolved, problems


def _listed(lines: Sequence[str]) -> str:
    more = f"\n  ... and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
    return "\n  ".join(["", *lines[:_LISTED]]) + more


def load_datalist(
    path: str | os.PathLike[str],
    sections: Sequence[str] | None = None,
    patient_required: bool = True,
    check_files: bool = True,
) -> dict[str, list[Item]]:
    """Read sections of a datalist, check them, and resolve their paths.

    Args:
        path: a folder that holds ``datalist.json``, or the path of such a file.
        sections: the sections wanted; None for all. Only these are checked item by item, so a folder with
            nothing but a ``testing`` section can be evaluated.
        patient_required: whether an item without ``patient_id`` is an error (anatomy-only sections have none).
        check_files: whether every image and mask must exist.

    Returns:
        items by section; paths absolute, ``patient_id`` a non-empty str, ``camera`` from the notes ("camera=NAME; ...")
        where it has no key of its own. Keys that are not known are kept.

    Raises:
        DatalistError: no such file, not JSON, unknown or empty section, and for items: no ``image``, no
            ``patient_id``, an image listed twice in a section, an unresolved ``near_duplicate_of``, missing files.
        PatientOverlapError: training, validation and testing are not patient-disjoint.
    """
    path = _datalist_path(path)
    folder = path.parent.absolute()
    raw = _read_json(path)
    wanted = list(raw) if sections is None else list(sections)
    if not wanted:
        raise DatalistError(f"{path}: no section, that is, no list of items.")
    for name in wanted:
        if name not in raw:
            raise DatalistError(f"{path}: no section {name!r}; it has {', '.join(map(repr, raw)) or 'none'}.")
        if not raw[name]:
            raise DatalistError(f"{path}: section {name!r} is empty.")
    check_patient_disjoint(raw, where=path)

    known = {
        _absolute(item["image"], folder)
        for items in raw.values()
        for item in items
        if isinstance(item.get("image"), str)
    }
    loaded: dict[str, list[Item]] = {}
    problems: list[str] = []
    missing: list[str] = []
    for name in wanted:
        loaded[name] = []
        first_seen: dict[str, int] = {}
        for position, item in enumerate(raw[name]):
            resolved, found = _resolve(item, folder, known, patient_required)
            image = resolved.get("image")
            if isinstance(image, str) and not found:
                if image in first_seen:
                    found.append(f"same image as item {first_seen[image]}: a duplicate row, remove one")
                first_seen.setdefault(image, position)
            named = f" ({item['image']})" if isinstance(item.get("image"), str) else ""
            problems += [f"section {name!r}, item {position}{named}: {problem}" for problem in found]
            if check_files and not found:
                files = [resolved[key] for key in path_keys() if key in resolved]
                if isinstance(resolved.get("chexmask"), dict) and "file" in resolved["chexmask"]:
                    files.append(resolved["chexmask"]["file"])
                missing += [file for file in files if not os.path.isfile(file)]
            loaded[name].append(resolved)
    if problems:
        raise DatalistError(f"{path}: {len(problems)} bad items:{_listed(problems)}")
    if missing:
        raise DatalistError(
            f"{path}: {len(missing)} files do not exist (paths are relative to {folder}):{_listed(missing)}"
        )
    return loaded


def load_section(
    path: str | os.PathLike[str], section: str, patient_required: bool = True, check_files: bool = True
) -> list[Item]:
    """One section of a datalist; arguments, checks and errors of :py:func:`load_datalist`."""
    return load_datalist(path, [section], patient_required, check_files)[section]


def save_datalist(sections: Mapping[str, Sequence[Mapping[str, Any]]], path: str | os.PathLike[str]) -> Path:
    """Write a datalist; absolute paths become relative to its folder, so that the folder can be moved.

    The file is written aside and then renamed: a reader sees the old one or the new one, never a half.

    Args:
        sections: items by section.
        path: the JSON file, or an existing folder that gets ``datalist.json``.

    Returns:
        the path of the file.

    Raises:
        PatientOverlapError: training, validation and testing are not patient-disjoint.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        path = path / DATALIST_NAME
    check_patient_disjoint(sections, where=path)
    folder = path.parent.absolute()

    def relative(value: str) -> str:
        return Path(os.path.relpath(value, folder)).as_posix() if os.path.isabs(value) else value

    content: dict[str, list[Item]] = {}
    for name, items in sections.items():
        content[name] = []
        for item in items:
            written: Item = {key: relative(value) if key in path_keys() else value for key, value in item.items()}
            if isinstance(written.get("chexmask"), dict) and "file" in written["chexmask"]:
                written["chexmask"] = {**written["chexmask"], "file": relative(written["chexmask"]["file"])}
            content[name].append(written)
    folder.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, ensure_ascii=False, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return path
