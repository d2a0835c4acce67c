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
"""Broken files of many kinds: each is refused with a reason, none stops a preparation of a thousand images."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

from monai_god.apps.cli import main
from monai_god.data.datalist import load_datalist
from monai_god.transforms import ImageReadError, LoadMedicalImage

SIDE = 48


def noise(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (SIDE, SIDE), dtype=np.uint8)


def encoded(kind: str, array: np.ndarray | None = None) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(noise() if array is None else array).save(buffer, kind)
    return buffer.getvalue()


def nifti(array: np.ndarray) -> bytes:
    return nib.Nifti1Image(array, np.eye(4)).to_bytes()


def dicom(pixels: bytes | None) -> bytes:
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    data.SOPClassUID, data.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    data.Rows = data.Columns = SIDE
    data.SamplesPerPixel, data.PhotometricInterpretation = 1, "MONOCHROME2"
    data.BitsAllocated = data.BitsStored = 8
    data.HighBit, data.PixelRepresentation = 7, 0
    if pixels is not None:
        data.PixelData = pixels
    buffer = io.BytesIO()
    data.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()


def with_value(value: float) -> np.ndarray:
    array = noise().astype(np.float32)
    array[3, 4] = value
    return array


# name of the file, its content
UNREADABLE = {
    "empty file": ("empty.png", b""),
    "truncated PNG": ("truncated.png", encoded("PNG")[:600]),
    "text renamed": ("text.png", b"dear colleague, please find enclosed"),
    "truncated JPEG": ("truncated.jpg", encoded("JPEG")[:400]),
    "web page": ("page.jpeg", b"<!DOCTYPE html><html><body>404 not found</body></html>"),
    "truncated TIFF": ("truncated.tif", encoded("TIFF")[:900]),
    "NaN in NIfTI": ("nan.nii", nifti(with_value(np.nan))),
    "infinity in NIfTI": ("inf.nii", nifti(with_value(np.inf))),
    "truncated NIfTI": ("truncated.nii", nifti(noise())[:500]),
    "no gzip": ("garbage.nii.gz", bytes(range(256)) * 8),
    "gzip of text": ("text.nii.gz", gzip.compress(b"dear colleague" * 100)),
    "volume": ("volume.nii", nifti(np.random.default_rng(0).random((SIDE, SIDE, 20)).astype(np.float32))),
    "no DICOM": ("garbage.dcm", bytes(range(256)) * 8),
    "DICOM without pixels": ("report.dcm", dicom(None)),
    "DICOM cut off": ("truncated.dcm", dicom(noise().tobytes())[:-900]),
}
# files that can be decoded, but show nothing
USELESS = {
    "1 x 1": ("one.png", encoded("PNG", np.full((1, 1), 7, np.uint8))),
    "narrow strip": ("strip.png", encoded("PNG", noise()[:, :3])),
    "all zero": ("zero.png", encoded("PNG", np.zeros((SIDE, SIDE), np.uint8))),
    "constant 16-bit": ("constant.tif", encoded("TIFF", np.full((SIDE, SIDE), 900, np.uint16))),
    "blank DICOM": ("blank.dcm", dicom(bytes(SIDE * SIDE))),
}
BAD = {**UNREADABLE, **USELESS}


def place(folder: Path, name: str, content: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(content)
    return path


def listed(folder: Path) -> dict[str, str]:
    with open(folder / "unreadable.csv", newline="") as file:
        return {row["file"]: row["reason"] for row in csv.DictReader(file)}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_the_reader_names_the_file(tmp_path, kind):
    path = place(tmp_path, *UNREADABLE[kind])
    with pytest.raises(ImageReadError) as error:
        LoadMedicalImage()(str(path))
    assert str(path) in str(error.value)


@pytest.mark.parametrize("kind", BAD)
def test_one_bad_file_is_listed_and_the_rest_prepared(tmp_path, capsys, kind):
    place(tmp_path / "p", "a.png", encoded("PNG", noise(1)))
    place(tmp_path / "p", "b.png", encoded("PNG", noise(2)))
    bad = place(tmp_path / "p", *BAD[kind])
    assert main(["prepare", "folder", str(tmp_path), "--workers", "0"]) == 0
    assert list(listed(tmp_path)) == [str(bad)]
    assert len(listed(tmp_path)[str(bad)]) > 10
    assert sum(map(len, load_datalist(tmp_path).values())) == 2
    assert f"{bad}: " in capsys.readouterr().out


def test_a_dangling_link_is_listed(tmp_path):
    place(tmp_path / "p", "a.png", encoded("PNG"))
    (tmp_path / "p" / "link.png").symlink_to(tmp_path / "gone.png")
    assert main(["prepare", "folder", str(tmp_path), "--workers", "0"]) == 0
    assert list(listed(tmp_path)) == [str(tmp_path / "p" / "link.png")]


def test_a_thousand_images_with_every_kind_of_bad_file(tmp_path):
    kinds = list(BAD.values())
    bad = set()
    for number in range(1000):
        folder = tmp_path / f"p{number // 5}"
        if number % 20 == 7:
            name, content = kinds[number // 20 % len(kinds)]
            bad.add(str(place(folder, name, content)))
        else:
            place(folder, f"{number}.png", encoded("PNG", noise(number)))
    assert len(bad) == 50
    assert main(["prepare", "folder", str(tmp_path), "--workers", "2"]) == 0
    assert set(listed(tmp_path)) == bad
    sections = load_datalist(tmp_path)
    assert sum(map(len, sections.values())) == 950
    assert [len({item["patient_id"] for item in sections[name]}) for name in sections] == [140, 20, 40]
