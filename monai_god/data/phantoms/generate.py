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
"""Sets of phantoms on disk: drawn once, whole or not at all, the same on any number of processes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from ..datalist import DATALIST_NAME, path_keys, save_datalist
from .common import Artefact, check_settings
from .cxr import CXRPhantom
from .fundus import EYES, FundusPhantom

__all__ = [
    "SETTINGS_NAME",
    "PhantomFolderError",
    "draw_phantom_set",
    "generate_cxr_phantoms",
    "generate_fundus_phantoms",
    "section_sizes",
]

# What a set was drawn with; its presence says that this module made the folder.
SETTINGS_NAME = "phantoms.json"
# All that a set's folder holds; a folder with anything else in it is never replaced.
_CONTENT = {SETTINGS_NAME, DATALIST_NAME, "images", "masks"}

Item = dict[str, Any]


class PhantomFolderError(ValueError):
    """The folder for phantoms holds other things; the message names it and the mend."""


class PatientDrawer(Protocol):
    """
    Draws one patient's images into a folder and returns their datalist items, paths relative to the folder.
    Picklable.
    """

    def __call__(self, folder: Path, patient: int) -> list[Item]: ...


class _Patients(Dataset):  # type: ignore[type-arg]
    """One item is one patient, drawn and written: lets a DataLoader's workers share the drawing."""

    def __init__(self, drawer: PatientDrawer, folder: Path, patients: int) -> None:
        self.drawer, self.folder, self.patients = drawer, folder, patients

    def __len__(self) -> int:
        return self.patients

    def __getitem__(self, index: int) -> list[Item]:
        return self.drawer(self.folder, index)


def section_sizes(patients: int) -> dict[str, int]:
    """Number of patients in training, validation and testing: 36, 8 and 20 of 64, in proportion, none empty.

    Raises:
        ValueError: on fewer than 3 patients.
    """
    if patients < 3:
        raise ValueError(
            f"patients must be 3 or more, one for each of training, validation and testing; got {patients}."
        )
    validation, testing = max(1, round(patients * 8 / 64)), max(1, round(patients * 20 / 64))
    return {"training": patients - validation - testing, "validation": validation, "testing": testing}


def _sources_hash() -> str:
    """Hash of the drawing code: a set drawn by another version of it is not the same set."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _is_current(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether the folder holds the whole set drawn with these settings."""
    try:
        if json.loads((folder / SETTINGS_NAME).read_text(encoding="utf-8")) != settings:
            return False
        sections = json.loads((folder / DATALIST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return all(
        (folder / item[key]).is_file()
        for items in sections.values()
        for item in items
        for key in path_keys()
        if key in item
    )


def _remove_abandoned(folder: Path) -> None:
    """Remove what killed runs on this machine left beside the folder."""
    for path in folder.parent.glob(f".{folder.name}.drawing-*"):
        host, _, pid = path.name.removeprefix(f".{folder.name}.drawing-").rpartition("-")
        if host != socket.gethostname() or not pid.isdigit() or int(pid) == os.getpid():
            continue
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue


def draw_phantom_set(
    folder: str | os.PathLike[str],
    drawer: PatientDrawer,
    patients: int,
    settings: Mapping[str, Any],
    num_workers: int | None = None,
    progress: bool = True,
) -> Path:
    """Draw a set of phantom patients into a folder, unless it is there already.

    The set is drawn in a folder beside and renamed when it is whole, so that a killed run leaves no half set. The
    patients are drawn independently: the files do not depend on the number of workers.

    Args:
        folder: becomes ``datalist.json``, ``images``, ``masks`` and ``phantoms.json`` (the settings). An older set of
            phantoms there is replaced.
        drawer: draws one patient.
        patients: number of patients, 3 or more.
        settings: all that determines the set (JSON values).
        num_workers: processes; None for one per usable core, 0 for none beside this one.
        progress: show a progress bar.

    Returns:
        path of the datalist, with the patient-disjoint sections training, validation and testing.

    Raises:
        PhantomFolderError: the folder exists and holds other things.
        ValueError: on fewer than 3 patients.
    """
    folder = Path(folder).expanduser().absolute()
    sizes = section_sizes(patients)
    wanted = {**settings, "patients": patients, "drawn_by": _sources_hash()}
    if _is_current(folder, wanted):
        return folder / DATALIST_NAME
    if folder.exists():
        content = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
        if content and (SETTINGS_NAME not in content or content - _CONTENT):
            raise PhantomFolderError(
                f"{folder}: holds files that are not a set of phantoms, and is left as it is; name another folder."
            )
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder)
    if num_workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        num_workers = min(cores, patients) if cores > 1 else 0
    aside = folder.with_name(f".{folder.name}.drawing-{socket.gethostname()}-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        for name in ("images", "masks"):
            (aside / name).mkdir(parents=True)
        loader = DataLoader(
            _Patients(drawer, aside, patients),
            batch_size=None,
            num_workers=num_workers,
            # its own, so that drawing phantoms does not advance the caller's random numbers
            generator=torch.Generator(),
        )
        bar = tqdm(loader, desc="drawing phantoms", unit="patient", total=patients, disable=not progress)
        drawn: list[list[Item]] = list(bar)
        sections: dict[str, list[Item]] = {}
        start = 0
        for name, count in sizes.items():
            sections[name] = [item for items in drawn[start : start + count] for item in items]
            start += count
        save_datalist(sections, aside / DATALIST_NAME)
        (aside / SETTINGS_NAME).write_text(json.dumps(wanted, indent=1), encoding="utf-8")
        _put_in_place(aside, folder, wanted)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder / DATALIST_NAME


def _put_in_place(aside: Path, folder: Path, settings: Mapping[str, Any]) -> None:
    """Rename the finished set to its folder; an older set goes first."""
    old = aside.with_name(aside.name + "-old")
    if folder.exists():
        os.replace(folder, old)
    try:
        os.rename(aside, folder)
    except OSError:
        # Another process was faster with the same set.
        if not _is_current(folder, settings):
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


class _Drawer:
    """Draws a patient: ``images/*.png`` (8 bits), ``masks/*.png`` (1 bit)."""

    def __init__(self, visits: int, size: int, seed: int, artefact: Artefact) -> None:
        self.visits, self.size, self.seed, self.artefact = visits, size, seed, artefact

    def _item(self, patient: int, stem: str, **values: Any) -> Item:
        return {
            "image": f"images/{stem}.png",
            "patient_id": f"phantom{self.seed}-{patient:04d}",
            **values,
            "source": "phantom",
        }

    @staticmethod
    def _save(folder: Path, item: Item, image: npt.NDArray[np.uint8], masks: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write an item's image and masks, and name the masks in the item."""
        # Little compression: noise does not compress, and this is a quarter of the time.
        Image.fromarray(image).save(folder / item["image"], compress_level=1)
        for organ, mask in masks.items():
            item[organ] = f"masks/{Path(item['image']).stem}_{organ}.png"
            Image.fromarray(mask).save(folder / item[organ])


class _CXRDrawer(_Drawer):
    def __call__(self, folder: Path, patient: int) -> list[Item]:
        phantom = CXRPhantom(self.seed, patient)
        items = []
        for visit in range(self.visits):
            film = phantom.radiograph(visit, self.size, self.artefact)
            item = self._item(patient, f"{patient:04d}_{visit:02d}", visit=film.visit, day=film.day, view=film.view)
            self._save(folder, item, film.image, film.masks)
            items.append(item)
        return items


class _FundusDrawer(_Drawer):
    def __call__(self, folder: Path, patient: int) -> list[Item]:
        phantom = FundusPhantom(self.seed, patient)
        items = []
        for visit in range(self.visits):
            for eye in EYES:
                photo = phantom.photograph(eye, visit, self.size, self.artefact)
                item = self._item(
                    patient,
                    f"{patient:04d}_{visit:02d}_{eye}",
                    laterality=photo.laterality,
                    visit=photo.visit,
                    day=photo.day,
                    camera=photo.camera,
                )
                # What is out of the field has no mask and no place.
                masks = {k: photo.masks[k] for k in ("optic_disc", "vessels") if k == "vessels" or photo.masks[k].any()}
                self._save(folder, item, photo.image, masks)
                for key, name in (("optic_disc_center", "optic_disc"), ("fovea_center", "fovea")):
                    if name in photo.landmarks:
                        item[key] = [round(float(v), 2) for v in photo.landmarks[name]]
                items.append(item)
        return items


def _draw_kind(
    kind: str,
    drawer: type[_CXRDrawer] | type[_FundusDrawer],
    folder: str | os.PathLike[str],
    patients: int,
    visits: int,
    size: int,
    seed: int,
    artefact: Artefact,
    num_workers: int | None,
    progress: bool,
) -> Path:
    """Check the settings and draw the set."""
    if visits < 1:
        raise ValueError(f"visits must be 1 or more, got {visits}.")
    check_settings(size, artefact, seed)
    settings = {"kind": kind, "visits": visits, "size": size, "seed": seed, "artefact": artefact}
    return draw_phantom_set(folder, drawer(visits, size, seed, artefact), patients, settings, num_workers, progress)


def generate_cxr_phantoms(
    folder: str | os.PathLike[str],
    patients: int = 64,
    visits: int = 4,
    size: int = 512,
    seed: int = 0,
    artefact: Artefact = "none",
    num_workers: int | None = None,
    progress: bool = True,
) -> Path:
    """Draw a set of phantom chest X-rays with exact masks, unless the same set is there already.

    Two sets that differ only in ``artefact`` have the same patients, poses, diseases and masks, film by film: a model
    trained on the training section of the one can be tested on the testing section of the other, and what it loses it
    had learnt from the artefact.

    Args:
        folder: see :func:`draw_phantom_set`.
        patients: number of patients, 3 or more; 36 of 64 are for training, 8 for validation, 20 for testing.
        visits: films per patient.
        size: pixels per side, 64 or more.
        seed: determines everything, together with the other settings.
        artefact: signature of the scanner: ``none``, ``follows_patient`` or ``shuffled``; see
            :meth:`CXRPhantom.radiograph`.
        num_workers: processes; None for one per usable core.
        progress: show a progress bar.

    Returns:
        path of the datalist. Items: ``image``, ``patient_id``, ``visit``, ``day``, ``view``, ``source`` ("phantom"),
        ``left_lung``, ``right_lung``, ``heart``.

    Raises:
        PhantomFolderError: the folder exists and holds other things.
        ValueError: on a setting out of its range.
    """
    return _draw_kind("cxr", _CXRDrawer, folder, patients, visits, size, seed, artefact, num_workers, progress)


def generate_fundus_phantoms(
    folder: str | os.PathLike[str],
    patients: int = 64,
    visits: int = 2,
    size: int = 512,
    seed: int = 0,
    artefact: Artefact = "none",
    num_workers: int | None = None,
    progress: bool = True,
) -> Path:
    """Draw a set of phantom fundus photographs with exact masks, unless the same set is there already.

    Both eyes are photographed at every visit. Two sets that differ only in ``artefact`` have the same patients, gazes,
    diseases and masks, photograph by photograph, as in :func:`generate_cxr_phantoms`.

    Args:
        folder: see :func:`draw_phantom_set`.
        patients: number of patients, 3 or more; 36 of 64 are for training, 8 for validation, 20 for testing.
        visits: visits per patient, two photographs each.
        size: pixels per side, 64 or more.
        seed: determines everything, together with the other settings.
        artefact: signature of the camera: ``none``, ``follows_patient`` or ``shuffled``; see
            :meth:`FundusPhantom.photograph`.
        num_workers: processes; None for one per usable core.
        progress: show a progress bar.

    Returns:
        path of the datalist. Items: ``image``, ``patient_id``, ``laterality``, ``visit``, ``day``, ``camera``,
        ``source`` ("phantom"), ``vessels``, and where they are in the field ``optic_disc``, ``optic_disc_center`` and
        ``fovea_center`` ([x, y] pixels).

    Raises:
        PhantomFolderError: the folder exists and holds other things.
        ValueError: on a setting out of its range.
    """
    return _draw_kind("fundus", _FundusDrawer, folder, patients, visits, size, seed, artefact, num_workers, progress)
