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
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pydicom
import torch
from PIL import Image, ImageOps
from pydicom.pixels import apply_modality_lut, apply_voi_lut, convert_color_space

__all__ = ["IMAGE_SUFFIXES", "MAXIMUM_PIXELS", "MINIMUM_SIDE", "ImageReadError", "content_hash", "read_image"]

MINIMUM_SIDE = 16
MAXIMUM_PIXELS = 120_000_000
NIFTI = (".nii", ".nii.gz")
#: names by which a folder is searched; what a file is, its content tells
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".dcm", ".dicom", *NIFTI)


class ImageReadError(ValueError):
    """An image file that cannot be used; the message names the file, the reason and the mend."""

    def __init__(self, path: str | Path, reason: str, mend: str) -> None:
        super().__init__(f"Cannot read {path}: {reason}. {mend}")
        self.path, self.reason, self.mend = str(path), reason, mend


def content_hash(image: torch.Tensor | np.ndarray) -> str:
    """SHA-256 of the decoded pixels (shape, type and values), independent of the file's name and compression."""
    array = np.ascontiguousarray(torch.as_tensor(image).detach().cpu().numpy())
    return hashlib.sha256(f"{array.shape}{array.dtype}".encode() + array.tobytes()).hexdigest()


def read_image(path: str | Path) -> tuple[np.ndarray, dict[str, Any]]:
    """
    Read PNG, JPEG, TIFF, DICOM or NIfTI as a colour image.

    Scaling to [0, 1]: 8-bit and 1-bit files by their full range; 16-bit files by 2^bits - 1, where bits is the
    smallest of 8, 10, 12, 14, 16 that holds the largest value (12-bit films are stored in 16-bit files); DICOM by the
    range after the VOI LUT; floating-point files and NIfTI by their own minimum and maximum unless they lie in [0,
    1].

    EXIF orientation is applied; transparency is dropped; MONOCHROME1 is inverted after the VOI LUT; a burned-in border
    stays. A NIfTI slice is turned so that its rows run from the patient's head (or front) to the feet (or back).

    Args:
        path: the file.

    Returns:
        float32 [3, H, W] in [0, 1], and what the file says of itself: ``photometric``, ``bits``, ``spacing`` (mm per
        pixel along rows and columns, NaN where unknown), ``view``, ``laterality``.

    Raises:
        ImageReadError: for a file that is missing, empty, truncated, of another kind, too small (side under 16
        pixels), too
            large (over 120 million pixels), constant, or with values that are not finite.
    """
    path = Path(path)
    if not path.is_file():
        raise ImageReadError(path, "there is no such file", "Check the path in the datalist")
    if path.stat().st_size == 0:
        raise ImageReadError(path, "the file is empty", "Copy it again from its source")
    with path.open("rb") as file:
        head = file.read(132)
    try:
        if path.name.lower().endswith(NIFTI):
            array, meta = _read_nifti(path)
        elif head[128:132] == b"DICM" or path.suffix.lower() in (".dcm", ".dicom"):
            array, meta = _read_dicom(path)
        else:
            array, meta = _read_picture(path)
    except ImageReadError:
        raise
    except Exception as error:  # every library has its own errors; the reader's user needs the file's name
        reason = f"{type(error).__name__} while decoding"
        raise ImageReadError(
            path, reason, "The file is truncated, damaged or not an image: copy or export it again"
        ) from error
    if array.ndim != 3 or array.shape[0] != 3:
        raise ImageReadError(path, f"it decodes to shape {array.shape}", "One two-dimensional image per file is needed")
    if min(array.shape[1:]) < MINIMUM_SIDE:
        size = f"{array.shape[2]} x {array.shape[1]}"
        raise ImageReadError(path, f"it is {size} pixels", f"Sides of at least {MINIMUM_SIDE} pixels are needed")
    if not np.isfinite(array).all():
        raise ImageReadError(path, "it holds NaN or infinite values", "Replace them before use")
    if float(array.max()) == float(array.min()):
        raise ImageReadError(path, "all its pixels are equal", "Leave it out or export it again")
    return np.ascontiguousarray(array, dtype=np.float32), meta


def _check_size(path: Path, rows: int, columns: int) -> None:
    if rows < 1 or columns < 1:
        raise ImageReadError(path, "it has no rows or no columns", "Export it again")
    if rows * columns > MAXIMUM_PIXELS:
        raise ImageReadError(
            path, f"it claims {columns} x {rows} pixels", f"At most {MAXIMUM_PIXELS} are read; make it smaller"
        )


def _read_picture(path: Path) -> tuple[np.ndarray, dict[str, Any]]:
    with Image.open(path) as opened:
        _check_size(path, opened.height, opened.width)
        mode = opened.mode
        picture = ImageOps.exif_transpose(opened)
        if mode in ("I;16", "I;16B", "I;16L", "I", "F"):
            grey = np.asarray(picture, dtype=np.float32)
            bits = 32 if mode == "F" else _bits(path, grey)
            scaled = _unit_range(grey) if mode == "F" else grey / (2**bits - 1)
            array = np.repeat(scaled[None], 3, axis=0)
        else:
            bits = 1 if mode == "1" else 8
            colour = picture.convert("RGBA" if mode in ("P", "PA") else "RGB").convert("RGB")
            array = np.asarray(colour, dtype=np.float32).transpose(2, 0, 1) / 255.0
    return array, {"photometric": mode, "bits": bits, "spacing": (np.nan, np.nan), "view": None, "laterality": None}


def _bits(path: Path, grey: np.ndarray) -> int:
    if grey.min() < 0 or grey.max() > 65535:
        raise ImageReadError(path, "its integers do not fit 16 bits without sign", "Export it with at most 16 bits")
    return next(b for b in (8, 10, 12, 14, 16) if grey.max() < 2**b)


def _unit_range(array: np.ndarray) -> np.ndarray:
    low, high = float(np.nanmin(array)), float(np.nanmax(array))
    if low >= 0.0 and high <= 1.0:
        return array
    return (array - low) / (high - low) if high > low else array


def _read_nifti(path: Path) -> tuple[np.ndarray, dict[str, Any]]:
    image = nib.as_closest_canonical(nib.load(path))
    shape = image.shape
    _check_size(path, *(int(n) for n in sorted(shape)[-2:]))
    data = np.asarray(image.dataobj, dtype=np.float32)
    thin = [axis for axis in range(3, data.ndim) if data.shape[axis] != 1]
    if thin or data.ndim < 2:
        raise ImageReadError(path, f"it has shape {shape}", "One two-dimensional image per file is needed")
    data = data.reshape(data.shape[:3]) if data.ndim > 3 else data
    if data.ndim == 3:
        flat = [axis for axis in range(3) if data.shape[axis] == 1]
        if not flat:
            raise ImageReadError(path, f"it is a volume of shape {shape}", "Extract one slice")
        data = data.squeeze(flat[-1])
    if not np.isfinite(data).all():
        raise ImageReadError(path, "it holds NaN or infinite values", "Replace them before use")
    # canonical axes grow to the patient's right-to-left, back-to-front, feet-to-head; rows of a picture run down
    grey = _unit_range(data.T[::-1, ::-1])
    zooms = tuple(float(z) for z in image.header.get_zooms()[:2])
    meta = {"photometric": "NIfTI", "bits": 32, "spacing": zooms[::-1], "view": None, "laterality": None}
    return np.repeat(grey[None], 3, axis=0), meta


def _read_dicom(path: Path) -> tuple[np.ndarray, dict[str, Any]]:
    dataset = pydicom.dcmread(path)
    rows, columns = int(dataset.get("Rows", 0) or 0), int(dataset.get("Columns", 0) or 0)
    _check_size(path, rows, columns)
    if int(dataset.get("NumberOfFrames", 1) or 1) > 1:
        raise ImageReadError(path, "it has several frames", "Extract one frame")
    if "PixelData" not in dataset:
        raise ImageReadError(path, "it has no pixel data", "Fetch the image object, not its report or its header")
    photometric = str(dataset.PhotometricInterpretation)
    pixels = dataset.pixel_array
    if photometric.startswith("MONOCHROME"):
        values = apply_voi_lut(apply_modality_lut(pixels, dataset), dataset, prefer_lut=True).astype(np.float32)
        windowed = "WindowCenter" in dataset or "VOILUTSequence" in dataset
        low, high = (float(values.min()), float(values.max())) if windowed else _stored_range(dataset, values)
        grey = np.clip((values - low) / max(high - low, 1e-6), 0.0, 1.0)
        array = np.repeat((1.0 - grey if photometric == "MONOCHROME1" else grey)[None], 3, axis=0)
    else:
        if photometric.startswith("PALETTE"):
            pixels = pydicom.pixels.apply_color_lut(pixels, dataset)
        elif photometric.startswith("YBR_FULL"):
            pixels = convert_color_space(pixels, photometric, "RGB")
        array = np.asarray(pixels, dtype=np.float32).transpose(2, 0, 1) / np.iinfo(pixels.dtype).max
    spacing = dataset.get("PixelSpacing") or dataset.get("ImagerPixelSpacing") or (np.nan, np.nan)
    meta = {
        "photometric": photometric,
        "bits": int(dataset.get("BitsStored", 8)),
        "spacing": tuple(float(s) for s in spacing),
        "view": dataset.get("ViewPosition") or None,
        "laterality": dataset.get("ImageLaterality") or dataset.get("Laterality") or None,
    }
    return array, meta


def _stored_range(dataset: pydicom.Dataset, values: np.ndarray) -> tuple[float, float]:
    """Range of the stored bits after the rescale; the values' own where a modality LUT leaves it."""
    bits, signed = int(dataset.BitsStored), int(dataset.get("PixelRepresentation", 0))
    slope, intercept = float(dataset.get("RescaleSlope", 1) or 1), float(dataset.get("RescaleIntercept", 0) or 0)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    if "ModalityLUTSequence" in dataset:
        return float(values.min()), float(values.max())
    return low * slope + intercept, high * slope + intercept
