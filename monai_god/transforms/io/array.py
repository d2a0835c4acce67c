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

from pathlib import Path

import torch
from monai.data import MetaTensor
from monai.transforms import Transform
from monai.utils import TransformBackends

from .functional import read_image

__all__ = ["LoadMedicalImage"]


class LoadMedicalImage(Transform):
    """
    Read one image of any kind a hospital keeps (PNG, JPEG, TIFF, DICOM, NIfTI) in one form; see :func:`read_image`.

    MONAI's readers swap rows and columns of pictures, ignore EXIF orientation and MONOCHROME1, and give one, three or
    four channels; this one does not.

    Returns:
        MetaTensor float32 [3, H, W] in [0, 1]; ``meta`` holds ``filename_or_obj``, ``photometric``, ``bits``,
        ``spacing``, ``view`` and ``laterality``.

    Raises:
        ImageReadError: names the file, the reason and the mend.
    """

    backend = [TransformBackends.NUMPY]

    def __call__(self, filename: str | Path) -> MetaTensor:
        array, meta = read_image(filename)
        return MetaTensor(torch.from_numpy(array), meta={"filename_or_obj": str(filename), **meta})
