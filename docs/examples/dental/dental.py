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
"""A third modality, panoramic dental films: one table of node types and one parser. See docs/add_modality.md."""

from __future__ import annotations

import torch
from pydicom.sr.codedict import codes
from scipy import ndimage
from torch import Tensor

from monai_god.transforms import Modality, NodeGroup, ParseAnatomyd, ParsedAnatomy, register_modality

register_modality(
    Modality(
        name="dental_panoramic",
        organs=("left_mandible", "right_mandible", "teeth"),
        groups=(
            NodeGroup(
                "left mandible boundary", 0, 16, ("boundary", "left_mandible"), codes.SCT.BoneStructureOfMandible,
                codes.SCT.Left,
            ),
            NodeGroup(
                "right mandible boundary", 1, 16, ("boundary", "right_mandible"), codes.SCT.BoneStructureOfMandible,
                codes.SCT.Right,
            ),
            NodeGroup("teeth interior", 2, 24, ("interior", "teeth"), codes.SCT.AlveolarProcessOfMandible),
        ),
        frame=("organs", "left_mandible", "right_mandible"),
        symmetry=(("left_mandible", "right_mandible"),),
    )
)  # fmt: skip


class ParseDentalAnatomyd(ParseAnatomyd):
    """Bone and teeth by brightness: enough for an example, where a real parser would have a network."""

    modality = "dental_panoramic"

    def find(self, image: Tensor) -> ParsedAnatomy:
        grey = ndimage.gaussian_filter(image.mean(0).numpy(), 1)
        bone, teeth = grey > 0.35, grey > 0.75
        half = image.shape[-1] // 2
        left, right = bone.copy(), bone.copy()
        left[:, :half], right[:, half:] = False, False  # the patient's left is the image's right
        masks = torch.stack([torch.from_numpy(mask).to(torch.uint8) for mask in (left, right, teeth)])
        problems = [f"{name} not seen" for name, mask in (("bone", bone), ("teeth", teeth)) if not mask.any()]
        return ParsedAnatomy(masks, {}, problems)
