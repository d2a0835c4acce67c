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

import pickle

import pytest
import torch
from monai.data import MetaTensor

from monai_god.transforms.anatomy.array import SegmentCXRAnatomy
from monai_god.transforms.anatomy.dictionary import SegmentCXRAnatomyD, SegmentCXRAnatomyd, SegmentCXRAnatomyDict


def image_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(3, 224, 224), (3, 300, 180), (1, 97, 211), (3, 1, 1)])
def test_masks_have_the_images_size(shape: tuple[int, ...]) -> None:
    masks = SegmentCXRAnatomy()(image_of(*shape))
    assert masks.shape == (3, *shape[1:]) and masks.dtype == torch.uint8
    assert set(masks.unique().tolist()) <= {0, 1}


def test_constant_image_gives_no_error() -> None:
    assert SegmentCXRAnatomy()(torch.zeros(3, 128, 100)).shape == (3, 128, 100)


def test_deterministic_and_batch_equals_single() -> None:
    segment = SegmentCXRAnatomy()
    images = [image_of(3, 200, 160, seed=1), image_of(3, 120, 220, seed=2)]
    batch = segment.batch(images)
    for image, masks in zip(images, batch, strict=True):
        assert torch.equal(masks, segment(image))
    assert segment.batch([]) == []


def test_dictionary_twin() -> None:
    image = MetaTensor(image_of(3, 128, 96, seed=3))
    data = {"image": image, "patient_id": "a"}
    result = SegmentCXRAnatomyd()(data)
    assert torch.equal(result["anatomy"], SegmentCXRAnatomy()(image))
    assert type(result["anatomy"]) is torch.Tensor
    assert "anatomy" not in data and result["image"] is image
    assert SegmentCXRAnatomyD is SegmentCXRAnatomyDict is SegmentCXRAnatomyd
    assert "masks" in SegmentCXRAnatomyd("image", anatomy_key="masks")(data)
    with pytest.raises(KeyError):
        SegmentCXRAnatomyd("film")(data)


def test_can_be_sent_to_workers_before_and_after_use() -> None:
    segment, image = SegmentCXRAnatomy(), image_of(3, 64, 64)
    before = pickle.loads(pickle.dumps(segment))
    assert torch.equal(before(image), segment(image))
    assert torch.equal(pickle.loads(pickle.dumps(segment))(image), segment(image))


def test_bad_images() -> None:
    with pytest.raises(ValueError, match=r"\[channels, H, W\]"):
        SegmentCXRAnatomy()(torch.rand(64, 64))
    with pytest.raises(ValueError, match="NaN"):
        SegmentCXRAnatomy()(torch.full((3, 64, 64), float("nan")))
