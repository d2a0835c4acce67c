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

import nibabel as nib
import numpy as np
import pytest
import torch
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

from monai_god.transforms import ImageReadError, LoadMedicalImage, LoadMedicalImaged

ROWS, COLUMNS = 24, 36


@pytest.fixture
def ramp() -> np.ndarray:
    """uint8 [24, 36]; every pixel tells its row and its column."""
    return (np.arange(ROWS)[:, None] * 7 + np.arange(COLUMNS)[None] * 2).astype(np.uint8)


def save_dicom(path, pixels: np.ndarray, photometric: str = "MONOCHROME2", bits: int = 16, **tags) -> str:
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = SecondaryCaptureImageStorage, generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    dataset.SOPClassUID, dataset.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    dataset.Rows, dataset.Columns = pixels.shape[:2]
    dataset.PhotometricInterpretation = photometric
    dataset.SamplesPerPixel = 1 if pixels.ndim == 2 else 3
    if pixels.ndim == 3:
        dataset.PlanarConfiguration = 0
    dataset.BitsAllocated = 8 * pixels.dtype.itemsize
    dataset.BitsStored, dataset.HighBit, dataset.PixelRepresentation = bits, bits - 1, 0
    dataset.PixelData = pixels.tobytes()
    for name, value in tags.items():
        setattr(dataset, name, value)
    dataset.save_as(path, enforce_file_format=True)
    return str(path)


@pytest.mark.parametrize("suffix", ["png", "tif", "bmp"])
def test_rows_stay_rows(ramp, tmp_path, suffix):
    path = tmp_path / f"image.{suffix}"
    Image.fromarray(ramp).save(path)
    image = LoadMedicalImage()(path)
    assert image.shape == (3, ROWS, COLUMNS) and image.dtype == torch.float32
    for channel in image:
        np.testing.assert_allclose(channel.numpy(), ramp / 255, atol=1e-6)
    assert image.meta["filename_or_obj"] == str(path)


def test_colour_grey_palette_and_alpha_give_three_channels(ramp, tmp_path):
    colour = np.stack([ramp, ramp[::-1], ramp[:, ::-1]], -1)
    alpha = np.dstack([colour, np.full_like(ramp, 200)])
    for name, picture, expected in (
        ("rgb", Image.fromarray(colour), colour),
        ("rgba", Image.fromarray(alpha), colour),
        ("grey_alpha", Image.fromarray(np.dstack([ramp, ramp]), "LA"), np.dstack([ramp] * 3)),
        ("palette", Image.fromarray(ramp).convert("P"), np.dstack([ramp] * 3)),
        ("binary", Image.fromarray(ramp > 100), np.dstack([(ramp > 100) * 255] * 3)),
    ):
        picture.save(tmp_path / f"{name}.png")
        image = LoadMedicalImage()(tmp_path / f"{name}.png")
        np.testing.assert_allclose(image.numpy().transpose(1, 2, 0), expected / 255, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path, orientation):
    """The bright corner lies at the top left of the picture that a viewer shows, whatever the stored orientation."""
    shown = np.zeros((ROWS, COLUMNS), np.uint8)
    shown[:8, :12] = 255
    undo = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[orientation]
    stored = Image.fromarray(shown)
    if undo is not None:
        stored = stored.transpose(Image.Transpose(undo))
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "image.png", exif=exif)
    image = LoadMedicalImage()(tmp_path / "image.png")
    np.testing.assert_allclose(image[0].numpy(), shown / 255)


@pytest.mark.parametrize("largest, bits", [(200, 8), (1000, 10), (4095, 12), (9000, 14), (65535, 16)])
def test_sixteen_bit_pictures_are_scaled_by_their_bits(tmp_path, largest, bits):
    values = np.linspace(0, largest, ROWS * COLUMNS).astype(np.uint16).reshape(ROWS, COLUMNS)
    Image.fromarray(values).save(tmp_path / "image.png")
    image = LoadMedicalImage()(tmp_path / "image.png")
    np.testing.assert_allclose(image[1].numpy(), values / (2**bits - 1), atol=1e-6)
    assert image.meta["bits"] == bits


def test_monochrome1_is_inverted_after_the_window(tmp_path):
    values = np.linspace(0, 4095, ROWS * COLUMNS).astype(np.uint16).reshape(ROWS, COLUMNS)
    window = {"WindowCenter": 1000, "WindowWidth": 800}
    two = LoadMedicalImage()(save_dicom(tmp_path / "two.dcm", values, bits=12, **window))
    one = LoadMedicalImage()(save_dicom(tmp_path / "one.dcm", values, "MONOCHROME1", bits=12, **window))
    expected = np.clip((values - (1000 - 0.5 - 799 / 2)) / 799, 0, 1)  # DICOM PS3.3 C.11.2.1.2
    np.testing.assert_allclose(two[0].numpy(), expected, atol=1e-3)
    np.testing.assert_allclose(one[0].numpy(), 1 - expected, atol=1e-3)


def test_dicom_without_a_window_is_scaled_by_its_stored_bits(tmp_path):
    values = np.linspace(100, 3000, ROWS * COLUMNS).astype(np.uint16).reshape(ROWS, COLUMNS)
    path = save_dicom(tmp_path / "x.dcm", values, bits=12, PixelSpacing=[0.2, 0.3], ViewPosition="PA")
    image = LoadMedicalImage()(path)
    np.testing.assert_allclose(image[0].numpy(), values / 4095, atol=1e-6)
    assert image.meta["spacing"] == (0.2, 0.3) and image.meta["view"] == "PA"


def test_colour_dicom(ramp, tmp_path):
    colour = np.ascontiguousarray(np.stack([ramp, ramp[::-1], ramp[:, ::-1]], -1))
    image = LoadMedicalImage()(save_dicom(tmp_path / "c.dcm", colour, "RGB", bits=8))
    np.testing.assert_allclose(image.numpy().transpose(1, 2, 0), colour / 255, atol=1e-6)


def test_nifti_is_upright(tmp_path):
    """In RAS+ the first axis grows to the patient's right-to-left and the second upwards: the head is row 0."""
    data = np.zeros((COLUMNS, ROWS, 1), np.float32)
    data[:10, -6:, 0] = 5.0  # the patient's right side (canonical start), high up
    data[0, 0, 0] = 10.0
    nib.save(nib.Nifti1Image(data, np.diag([-1.0, 1.0, 1.0, 1.0])), tmp_path / "x.nii.gz")
    image = LoadMedicalImage()(tmp_path / "x.nii.gz")
    assert image.shape == (3, ROWS, COLUMNS)
    canonical = nib.as_closest_canonical(nib.load(tmp_path / "x.nii.gz")).get_fdata()[..., 0]
    np.testing.assert_allclose(image[0].numpy(), canonical.T[::-1, ::-1] / 10)


def test_dictionary_twin_reads_several_keys(ramp, tmp_path):
    Image.fromarray(ramp).save(tmp_path / "a.png")
    load = LoadMedicalImaged(keys=["image", "other"], allow_missing_keys=True)
    d = load({"image": str(tmp_path / "a.png"), "patient_id": "x"})
    assert d["image"].shape == (3, ROWS, COLUMNS) and d["patient_id"] == "x"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ImageReadError, match=r"gone\.png.*no such file"):
        LoadMedicalImage()(tmp_path / "gone.png")
