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
"""``monai-god prepare``: a table or a folder of images becomes a datalist; every image is read once, as a check."""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from monai_god.data.datalist import DATALIST_NAME, DISJOINT_SECTIONS, DatalistError, save_datalist
from monai_god.data.protocol import split_by_patient
from monai_god.transforms import LoadMedicalImage
from monai_god.transforms.io.functional import IMAGE_SUFFIXES

__all__ = [
    "Candidates",
    "Problem",
    "Summary",
    "add_parser",
    "candidates_from_folder",
    "candidates_from_table",
    "prepare",
]

UNREADABLE_NAME = "unreadable.csv"
# Keys of an item that a column or a named group of a regular expression may give, beside image and patient.
OPTIONAL_KEYS = ("visit", "visit_unit", "day", "view", "laterality", "camera", "source")
MASK_KEYS = ("left_lung", "right_lung", "heart", "cardiomediastinum", "optic_disc", "vessels")
LATERALITY = {"l": "L", "left": "L", "os": "L", "le": "L", "r": "R", "right": "R", "od": "R", "re": "R"}
# Below this there is no anatomy to see; it catches icons and 1 x 1 placeholders.
MINIMUM_SIDE = 32
# Files named in the printed summary; all of them are in the table beside the datalist.
LISTED = 5
# Longest bar of the printed histogram, in characters.
BAR = 40


class Problem(NamedTuple):
    """A file that cannot be used, and why; never a patient."""

    file: str
    reason: str


@dataclass
class Candidates:
    """Images to be checked, and those that were ruled out before.

    Args:
        items: datalist items with absolute paths.
        sections: the section of each item, or None where the items are to be split.
        problems: what was ruled out.
    """

    items: list[dict[str, Any]] = field(default_factory=list)
    sections: list[str] | None = None
    problems: list[Problem] = field(default_factory=list)


@dataclass
class Summary:
    """What :py:func:`prepare` did.

    Args:
        sections: items by section, as written.
        problems: files that cannot be used.
        checked: images found, usable or not.
        duplicates: images whose pixels equal those of an earlier image.
        conflicts: files among those whose earlier image is of another patient.
        datalist: the written file; None where nothing was usable.
        unreadable: the table of problems.
    """

    sections: dict[str, list[dict[str, Any]]]
    problems: list[Problem]
    checked: int
    duplicates: int
    conflicts: list[str]
    datalist: Path | None
    unreadable: Path

    @property
    def usable(self) -> int:
        """Images in the datalist."""
        return sum(map(len, self.sections.values()))

    def __str__(self) -> str:
        everything = Counter(item["patient_id"] for items in self.sections.values() for item in items)
        pairs = sum(count > 1 for count in everything.values())
        lines = [
            f"usable images        {self.usable} of {self.checked}",
            f"patients             {len(everything)}, of them {pairs} with two images or more",
        ]
        histogram = Counter(min(count, 10) for count in everything.values())
        if histogram:
            widest = max(histogram.values())
            lines.append("images per patient")
            for count in sorted(histogram):
                bar = "#" * max(1, round(BAR * histogram[count] / widest))
                lines.append(f"  {str(count) + ('+' if count == 10 else ''):>3}  {histogram[count]:>7}  {bar}")
            lines.append(f"{'section':<16}{'images':>8}{'patients':>10}{'with >= 2 images':>18}")
            for name, items in self.sections.items():
                counts = Counter(item["patient_id"] for item in items)
                lines.append(f"{name:<16}{len(items):>8}{len(counts):>10}{sum(c > 1 for c in counts.values()):>18}")
        if everything and not pairs:
            lines.append("No patient has two images: nothing can be retrieved. Is the patient column the right one?")
        if self.duplicates:
            lines.append(f"identical images     {self.duplicates}, marked near_duplicate_of")
        if self.conflicts:
            lines.append(f"  of them {len(self.conflicts)} under another patient than their copy; one filing is wrong:")
            lines += _named(self.conflicts)
        if self.problems:
            lines.append(f"left out             {len(self.problems)}, listed in {self.unreadable}:")
            lines += _named([f"{problem.file}: {problem.reason}" for problem in self.problems])
        lines.append(
            f"written              {self.datalist}" if self.datalist else "Nothing usable: no datalist written."
        )
        return "\n".join(lines)


def _named(lines: Sequence[str]) -> list[str]:
    more = [f"    ... and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
    return [f"    {line}" for line in lines[:LISTED]] + more


def _normalised(values: Mapping[str, str]) -> tuple[dict[str, Any], str | None]:
    """Optional keys of an item from text, and what is wrong with them; empty text is unknown and left out."""
    item: dict[str, Any] = {key: text.strip() for key, text in values.items() if text and text.strip()}
    if "laterality" in item:
        side = LATERALITY.get(item["laterality"].lower())
        if side is None:
            return item, "laterality is none of L, R, left, right, OS, OD"
        item["laterality"] = side
    if "day" in item:
        try:
            item["day"] = int(item["day"])
        except ValueError:
            return item, "day is not a whole number"
    return item, None


def _read_table(table: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The columns' names, and the rows with their line numbers; blank rows are skipped."""
    if not table.is_file():
        raise DatalistError(f"{table}: no such file.")
    try:
        with open(table, newline="", encoding="utf-8-sig") as file:
            header = file.readline()
            separator = max(",;\t", key=header.count)
            file.seek(0)
            reader = csv.reader(file, delimiter=separator)
            columns = [column.strip() for column in next(reader, [])]
            rows = [(reader.line_num, row) for row in reader if any(map(str.strip, row))]
    except csv.Error as error:
        raise DatalistError(f"{table}: not a table of comma-, semicolon- or tab-separated columns: {error}.") from error
    except UnicodeDecodeError as error:
        raise DatalistError(f"{table}: not UTF-8 text; a spreadsheet must be saved as CSV (UTF-8) first.") from error
    if not columns:
        raise DatalistError(f"{table}: the file is empty.")
    if not rows:
        raise DatalistError(f"{table}: the table has a header, but no rows.")
    return columns, rows


class _Finder:
    """Files by the names in a table: below a root, or by bare name anywhere below it (searched once, if needed)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.by_name: dict[str, list[str]] | None = None

    def __call__(self, name: str) -> tuple[str, str | None]:
        """The absolute path, and what is wrong with it."""
        direct = os.path.normpath(self.root / name)
        if os.path.isfile(direct) or "/" in name or os.sep in name:
            return direct, None if os.path.isfile(direct) else "no such file"
        if self.by_name is None:
            self.by_name = defaultdict(list)
            for folder, _, files in os.walk(self.root):
                for file in files:
                    self.by_name[file].append(os.path.join(folder, file))
        found = self.by_name.get(name, [])
        if len(found) == 1:
            return found[0], None
        return direct, f"{len(found)} files of this name below {self.root}" if found else "no such file"


def candidates_from_table(
    table: str | os.PathLike[str],
    image_column: str,
    patient_column: str,
    root: str | os.PathLike[str] | None = None,
    columns: Mapping[str, str] | None = None,
    masks: Mapping[str, str] | None = None,
    section_column: str | None = None,
) -> Candidates:
    """Items from a CSV or TSV file with one row an image.

    Args:
        table: the file; comma-, semicolon- or tab-separated, UTF-8, first row the columns' names.
        image_column: column of the image files: paths relative to ``root``, or names found anywhere below it.
        patient_column: column of the patients.
        root: folder of the images; the table's own by default.
        columns: column for each of the optional keys of an item (visit, day, view, laterality, camera, source ...).
        masks: column for each mask key (left_lung, right_lung, heart, optic_disc ...), values as in ``image_column``.
        section_column: column of the sections, where the table has its own split.

    Raises:
        DatalistError: the table cannot be read, or a column is missing.
    """
    table = Path(table).expanduser().absolute()
    header, lines = _read_table(table)
    columns, masks = dict(columns or {}), dict(masks or {})
    wanted = [image_column, patient_column, *columns.values(), *masks.values()]
    if section_column is not None:
        wanted.append(section_column)
    missing = sorted({column for column in wanted if column not in header})
    if missing:
        raise DatalistError(
            f"{table}: no column {', '.join(map(repr, missing))}; it has {', '.join(map(repr, header))}."
        )
    twice = sorted({column for column in wanted if header.count(column) > 1})
    if twice:
        raise DatalistError(f"{table}: several columns are called {', '.join(map(repr, twice))}: rename them.")
    root = Path(root).expanduser().absolute() if root is not None else table.parent
    if not root.is_dir():
        raise DatalistError(f"{root}: no such folder of images.")
    find = _Finder(root)
    result = Candidates(sections=None if section_column is None else [])
    rows: dict[str, list[dict[str, str]]] = defaultdict(list)
    for number, fields in lines:
        # surplus empty fields are a trailing separator (as in the NIH's table); others have shifted the columns
        if any(map(str.strip, fields[len(header) :])):
            reason = f"{len(fields)} fields, but {len(header)} columns: is a separator inside a text not quoted?"
            result.problems.append(Problem(f"{table.name}, line {number}", reason))
            continue
        record = dict(zip_longest(header, fields[: len(header)], fillvalue=""))
        name = record[image_column].strip()
        if not name:
            result.problems.append(Problem(f"{table.name}, line {number}", f"column {image_column!r} is empty"))
            continue
        path, problem = find(name)
        if problem:
            result.problems.append(Problem(path, problem))
        else:
            rows[path].append(record)
    for path, same in rows.items():
        record = same[0]
        patients = {entry[patient_column].strip() for entry in same}
        item, problem = _normalised({key: record[column] for key, column in columns.items()})
        if len(patients) > 1:
            problem = f"listed {len(same)} times, under {len(patients)} different patients: all rows left out"
        elif not record[patient_column].strip():
            problem = f"column {patient_column!r} (the patient) is empty"
        elif section_column is not None and not record[section_column].strip():
            problem = f"column {section_column!r} (the section) is empty"
        if problem:
            result.problems.append(Problem(path, problem))
            continue
        if len(same) > 1:
            result.problems.append(Problem(path, f"listed {len(same)} times: duplicate rows, the first is kept"))
        for key, column in masks.items():
            if name := record[column].strip():
                item[key], problem = find(name)
                if problem:
                    result.problems.append(Problem(item.pop(key), f"{problem} (mask {key!r}; the image is kept)"))
        result.items.append({"image": path, "patient_id": record[patient_column].strip(), **item})
        if result.sections is not None and section_column is not None:
            result.sections.append(record[section_column].strip())
    return result


def candidates_from_folder(
    root: str | os.PathLike[str], pattern: str | None = None, patient_regex: str | None = None
) -> Candidates:
    """Items from a folder of images.

    Args:
        root: the folder.
        pattern: glob of the files' names, at any depth; by default every PNG, JPEG, TIFF, DICOM and NIfTI file.
        patient_regex: regular expression searched in the path below ``root`` (with ``/``): its group ``patient``, or
            its only group, is the patient; groups ``visit``, ``day``, ``view``, ``laterality``, ``camera`` and
            ``source`` fill these keys. By default the patient is the name of the folder: ``root/PATIENT/file``.

    Raises:
        DatalistError: no such folder, no files, a bad expression, or deeper folders without an expression.
    """
    root = Path(root).expanduser().absolute()
    if not root.is_dir():
        raise DatalistError(f"{root}: no such folder.")
    expression = None
    if patient_regex is not None:
        try:
            expression = re.compile(patient_regex)
        except re.error as error:
            raise DatalistError(f"--patient-regex {patient_regex!r}: not a regular expression: {error}.") from error
        unknown = set(expression.groupindex) - {"patient", *OPTIONAL_KEYS}
        if unknown or ("patient" not in expression.groupindex and expression.groups != 1):
            raise DatalistError(
                f"--patient-regex {patient_regex!r}: needs a group (?P<patient>...), or a single group; other groups "
                f"may be named {', '.join(OPTIONAL_KEYS)}."
            )
    paths = [
        path
        for path in sorted(root.rglob(pattern or "*"))
        if (path.is_file() or path.is_symlink())
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
        and (pattern is not None or path.name.lower().endswith(IMAGE_SUFFIXES))
    ]
    if not paths:
        raise DatalistError(
            f"{root}: no file matches {pattern or ' '.join('*' + suffix for suffix in IMAGE_SUFFIXES)}."
        )
    result = Candidates()
    for path in paths:
        below = path.relative_to(root)
        if expression is None:
            if len(below.parts) > 2:
                raise DatalistError(
                    f"{path}: {len(below.parts) - 1} folders below {root}, so the patient's is not plain: say which "
                    "part of the path is the patient, for example --patient-regex '^([^/]+)/'."
                )
            groups = {"patient": below.parts[0] if len(below.parts) == 2 else ""}
            missed = "lies in no patient's folder"
        else:
            match = expression.search(below.as_posix())
            groups = {} if match is None else {key: value or "" for key, value in match.groupdict().items()}
            if match is not None and "patient" not in groups:
                groups["patient"] = match.group(1) or ""
            missed = "--patient-regex finds no patient in its path"
        patient = groups.pop("patient", "").strip()
        item, problem = _normalised(groups)
        if not patient:
            problem = missed
        if problem:
            result.problems.append(Problem(str(path), problem))
        else:
            result.items.append({"image": str(path), "patient_id": patient, **item})
    return result


class _Checked(NamedTuple):
    problem: str
    digest: str
    mask_problems: dict[str, str]


class _Check(Dataset[_Checked]):
    """Reads image by image, in the processes of a DataLoader; an item is what was found, never an error."""

    def __init__(self, items: Sequence[Mapping[str, Any]]) -> None:
        self.items = items
        self.reader = LoadMedicalImage()

    def __len__(self) -> int:
        return len(self.items)

    def _read(self, path: str) -> tuple[np.ndarray, str]:
        try:
            return np.ascontiguousarray(torch.as_tensor(self.reader(path)).numpy()), ""
        # Whatever a decoder does on a broken file, the other thousand files must still be prepared.
        except Exception as error:
            return np.empty((3, 0, 0), dtype=np.float32), " ".join(str(error).split()) or type(error).__name__

    def __getitem__(self, index: int) -> _Checked:
        item = self.items[index]
        image, problem = self._read(item["image"])
        if problem:
            return _Checked(problem, "", {})
        height, width = image.shape[-2:]
        if min(height, width) < MINIMUM_SIDE:
            return _Checked(f"only {width} x {height} pixels: at least {MINIMUM_SIDE} a side are needed", "", {})
        if not np.isfinite(image).all():
            return _Checked("holds values that are not finite", "", {})
        if image.min() == image.max():
            return _Checked("blank: all pixels have the same value", "", {})
        mask_problems = {}
        for key in MASK_KEYS:
            if key in item:
                mask, wrong = self._read(item[key])
                if not wrong and mask.shape[-2:] != (height, width):
                    wrong = f"{mask.shape[-1]} x {mask.shape[-2]} pixels, but its image has {width} x {height}"
                if wrong:
                    mask_problems[key] = wrong
        digest = hashlib.blake2b(image.tobytes(), digest_size=16)
        digest.update(repr(image.shape).encode())
        return _Checked("", digest.hexdigest(), mask_problems)


def _write_problems(problems: Sequence[Problem], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(Problem._fields)
            writer.writerows(problems)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def prepare(
    candidates: Candidates,
    output: str | os.PathLike[str],
    fractions: Mapping[str, float] | None = None,
    seed: int = 0,
    workers: int = 0,
) -> Summary:
    """Read every image, split by patient, and write the datalist and the table of what was left out.

    Images with the same pixels as an earlier one get ``near_duplicate_of``, so that a protocol can leave them out.

    Args:
        candidates: from :py:func:`candidates_from_table` or :py:func:`candidates_from_folder`.
        output: the datalist to write; ``unreadable.csv`` (file, reason) goes beside it.
        fractions: share of the patients by section, where the candidates have no sections of their own.
        seed: of the split.
        workers: processes that read; 0 reads in this one.

    Returns:
        the :py:class:`Summary`; printing it tells the user all there is to know.

    Raises:
        PatientOverlapError: the candidates' own sections share patients.
    """
    output = Path(output).expanduser().absolute()
    items = [dict(item) for item in candidates.items]
    problems = list(candidates.problems)
    loader = DataLoader(_Check(items), batch_size=None, num_workers=workers)
    kept: list[int] = []
    first: dict[str, int] = {}
    duplicates, conflicts = 0, []
    for index, checked in enumerate(tqdm(loader, desc="reading images", unit="image", total=len(items))):
        item = items[index]
        if checked.problem:
            problems.append(Problem(item["image"], checked.problem))
            continue
        for key, wrong in checked.mask_problems.items():
            problems.append(Problem(item.pop(key), f"{wrong} (mask {key!r}; the image is kept)"))
        kept.append(index)
        original = first.setdefault(checked.digest, index)
        if original != index:
            item["near_duplicate_of"] = items[original]["image"]
            duplicates += 1
            if items[original]["patient_id"] != item["patient_id"]:
                conflicts.append(item["image"])
    sections: dict[str, list[dict[str, Any]]] = {}
    if candidates.sections is None:
        sections = split_by_patient([items[index] for index in kept], fractions, seed)
    else:
        for index in kept:
            sections.setdefault(candidates.sections[index], []).append(items[index])
    sections = {name: content for name, content in sections.items() if content}
    unreadable = output.with_name(UNREADABLE_NAME)
    datalist = save_datalist(sections, output) if sections else None
    _write_problems(problems, unreadable)
    found = {item["image"] for item in items} | {p.file for p in candidates.problems if "(mask " not in p.reason}
    return Summary(sections, problems, len(found), duplicates, conflicts, datalist, unreadable)


def _run(arguments: argparse.Namespace) -> int:
    output = arguments.output
    if output is None:
        output = Path(
            arguments.folder if arguments.form == "folder" else arguments.root or Path(arguments.table).parent
        )
    output = Path(output).expanduser()
    if output.suffix.lower() != ".json":
        output = output / DATALIST_NAME
    if output.exists() and not arguments.overwrite:
        raise DatalistError(f"{output}: exists already; name another file with --output, or allow --overwrite.")
    if any(share < 0 for share in arguments.split) or not np.isclose(sum(arguments.split), 1.0):
        raise DatalistError(f"--split {' '.join(map(str, arguments.split))}: shares must be >= 0 and sum to 1.")
    if arguments.form == "csv":
        masks = {}
        for given in arguments.mask:
            key, _, column = given.partition("=")
            if key not in MASK_KEYS or not column:
                raise DatalistError(f"--mask {given!r}: expected NAME=COLUMN with NAME one of {', '.join(MASK_KEYS)}.")
            masks[key] = column
        columns = {key: getattr(arguments, f"{key}_column") for key in OPTIONAL_KEYS}
        candidates = candidates_from_table(
            arguments.table,
            arguments.image_column,
            arguments.patient_column,
            arguments.root,
            {key: column for key, column in columns.items() if column is not None},
            masks,
            arguments.section_column,
        )
    else:
        candidates = candidates_from_folder(arguments.folder, arguments.pattern, arguments.patient_regex)
    if arguments.source is not None:
        candidates.items = [{**item, "source": item.get("source", arguments.source)} for item in candidates.items]
    shares = dict(zip(DISJOINT_SECTIONS, arguments.split, strict=True))
    summary = prepare(candidates, output, shares, arguments.seed, arguments.workers)
    print(summary)
    return 0 if summary.usable else 1


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``prepare`` and its two forms to the command line."""
    parser = subparsers.add_parser(
        "prepare",
        help="make a datalist from a table or a folder of images",
        description="Make a datalist from a table or a folder of images: each image is read once, patients are dealt "
        "to training, validation and testing, and files that cannot be used are listed.",
    )
    forms = parser.add_subparsers(title="from", metavar="FORM", dest="form", required=True)

    table = forms.add_parser("csv", help="a table with one row an image")
    table.add_argument("table", type=Path, help="CSV or TSV file")
    table.add_argument("--image-column", required=True, help="column of the image files")
    table.add_argument("--patient-column", required=True, help="column of the patients")
    table.add_argument("--root", type=Path, help="folder of the images (default: the table's folder)")
    for key in OPTIONAL_KEYS:
        table.add_argument(f"--{key.replace('_', '-')}-column", help=f"column of the item's {key}")
    table.add_argument(
        "--mask", action="append", default=[], metavar="NAME=COLUMN", help="column of mask files; may be repeated"
    )
    table.add_argument("--section-column", help="column of the table's own split")

    folder = forms.add_parser("folder", help="a folder of images, by default FOLDER/PATIENT/file")
    folder.add_argument("folder", type=Path, help="folder of the images")
    folder.add_argument("--pattern", help="glob of the files' names, such as '*.png' (default: every known kind)")
    folder.add_argument(
        "--patient-regex", help="where in the path below FOLDER the patient stands, such as '^(?P<patient>[^_]+)_'"
    )

    for form in (table, folder):
        form.add_argument("--source", help="source of the images, where nothing else says it")
        form.add_argument("--output", type=Path, help=f"datalist to write (default: {DATALIST_NAME} beside the images)")
        form.add_argument("--overwrite", action="store_true", help="replace an existing datalist")
        form.add_argument(
            "--split",
            nargs=3,
            type=float,
            default=(0.7, 0.1, 0.2),
            metavar=("TRAINING", "VALIDATION", "TESTING"),
            help="shares of the patients (default: 0.7 0.1 0.2)",
        )
        form.add_argument("--seed", type=int, default=0, help="of the split (default: 0)")
        form.add_argument(
            "--workers",
            type=int,
            default=min(4, os.cpu_count() or 1),
            help="processes that read images (default: %(default)s)",
        )
        form.set_defaults(run=_run)
