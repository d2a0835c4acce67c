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

import numpy as np
import pytest
import torch
from monai.data import MetaTensor

from monai_god.transforms.graph import AnatomyError, BuildAnatomyGraphd, DropNodesd
from tests.anatomy_masks import chest, fundus


def test_graph_is_written_beside_the_masks_and_problems_are_added() -> None:
    masks = chest()
    masks[2] = 0
    quality = {"source": "masks", "usable": True, "problems": ["film looks mirrored"]}
    data = {"anatomy": torch.from_numpy(masks), "anatomy_quality": quality, "image": torch.zeros(3, 448, 448)}
    out = BuildAnatomyGraphd(modality="cxr")(data)
    assert out["graph"].num_nodes == 96
    assert out["anatomy_quality"]["problems"] == ["film looks mirrored", "heart mask empty"]
    assert out["anatomy_quality"]["usable"]
    # the input stays as it was
    assert quality["problems"] == ["film looks mirrored"] and "graph" not in data


def test_landmarks_count_the_images_pixels() -> None:
    masks, landmarks = fundus()
    double = {name: torch.as_tensor((at + 0.5) * 2 - 0.5) for name, at in landmarks.items()}
    data = {"anatomy": masks, "landmarks": double, "image": torch.zeros(3, 448, 448)}
    plain = {"anatomy": masks, "landmarks": landmarks}
    build = BuildAnatomyGraphd(modality="fundus")
    torch.testing.assert_close(build(data)["graph"].pos, build(plain)["graph"].pos)


def test_missing_anatomy_names_the_file() -> None:
    image = MetaTensor(torch.zeros(3, 32, 32), meta={"filename_or_obj": "film_17.png"})
    data = {"anatomy": np.zeros((3, 32, 32), dtype=np.uint8), "image": image}
    with pytest.raises(AnatomyError, match=r"film_17\.png"):
        BuildAnatomyGraphd()(data)
    out = BuildAnatomyGraphd(allow_empty=True)(data)
    assert out["graph"].num_nodes == 0 and not out["anatomy_quality"]["usable"]


def test_missing_key() -> None:
    with pytest.raises(KeyError):
        BuildAnatomyGraphd()({})
    assert BuildAnatomyGraphd(allow_missing_keys=True)({}) == {}


def test_drop_nodes() -> None:
    data = BuildAnatomyGraphd()({"anatomy": chest()})
    assert DropNodesd(fraction=0.25)(data)["graph"].num_nodes == 96
    assert data["graph"].num_nodes == 128
