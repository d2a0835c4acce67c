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

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.data import MetaTensor

from monai_god.transforms import LocalContrastNormalize, LocalContrastNormalized


def test_equals_a_loop():
    image = torch.rand(1, 20, 17, generator=torch.Generator().manual_seed(0))
    out = LocalContrastNormalize(window=0.1)(image)
    sigma = 0.1 * 20
    reach = int(3 * sigma + 0.5)
    kernel = [math.exp(-(k**2) / (2 * sigma**2)) for k in range(-reach, reach + 1)]
    kernel = [k / sum(kernel) for k in kernel]

    def blur(a: np.ndarray) -> np.ndarray:
        padded = np.pad(a, reach, mode="symmetric")  # scipy's 'reflect'
        rows = sum(w * padded[k : k + a.shape[0]] for k, w in enumerate(kernel))
        return sum(w * rows[:, k : k + a.shape[1]] for k, w in enumerate(kernel))

    a = image[0].double().numpy()
    mean = blur(a)
    spread = np.sqrt(blur((a - mean) ** 2))
    expected = np.clip(0.5 + 0.2 * (a - mean) / (spread + 0.02), 0, 1)
    np.testing.assert_allclose(out[0].numpy(), expected, atol=1e-4)


@settings(max_examples=15, deadline=None)
@given(gain=st.floats(0.3, 1.0), offset=st.floats(0.0, 0.3), seed=st.integers(0, 100))
def test_exposure_hardly_matters(gain, offset, seed):
    image = torch.rand(1, 32, 32, generator=torch.Generator().manual_seed(seed))
    normalise = LocalContrastNormalize()
    a, b = normalise(image), normalise(image * gain * 0.7 + offset)
    assert (a - b).abs().max() < 0.12
    assert a.min() >= 0 and a.max() <= 1


def test_grey_is_filtered_once_and_colour_by_channel():
    colour = torch.rand(3, 24, 24, generator=torch.Generator().manual_seed(1))
    normalise = LocalContrastNormalize()
    out = normalise(colour)
    for channel in range(3):
        torch.testing.assert_close(out[channel : channel + 1], normalise(colour[channel : channel + 1]))
    grey = colour[:1].expand(3, -1, -1)
    assert torch.equal(normalise(grey)[0], normalise(grey)[2])


def test_dictionary_twin_keeps_the_meta_data():
    image = MetaTensor(torch.rand(1, 20, 20), meta={"filename_or_obj": "x.png"})
    d = LocalContrastNormalized(keys="image")({"image": image, "other": 1})
    assert d["image"].meta["filename_or_obj"] == "x.png" and d["other"] == 1
    torch.testing.assert_close(d["image"].as_tensor(), LocalContrastNormalize()(image.as_tensor()))
