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

import pytest
import torch

from monai_god.networks.nets import Backbones, build_backbone


@pytest.fixture(scope="module")
def lite():
    return build_backbone("efficientnet_lite0")


def test_pip_installed_backbone(lite):
    images = torch.rand(2, 3, 448, 448, generator=torch.Generator().manual_seed(0))
    g, feature_map = lite(images)
    assert g.shape == (2, 1280) and feature_map.shape == (2, 1280, 14, 14)
    assert lite.out_channels == 1280 and lite.grid == (14, 14) and lite.image_size == 448
    torch.testing.assert_close(g, feature_map.mean((2, 3)))
    # one at a time is the same
    torch.testing.assert_close(lite(images[1:])[0], g[1:], atol=1e-4, rtol=1e-4)


def test_middle_layers(lite):
    middle = build_backbone("efficientnet_lite0_middle")
    images = torch.rand(2, 3, 448, 448, generator=torch.Generator().manual_seed(0))
    g, feature_map = middle(images)
    assert feature_map.shape == (2, 424, 14, 14) and g.shape == (2, 424) and middle.out_channels == 424
    net, x = lite.features.net, (images - lite.mean) / lite.std
    x, expected = net._swish(net._bn0(net._conv_stem(x))), []
    for index, block in enumerate(net._blocks):
        x = block(x)
        if index in (4, 7, 10, 14):
            size = x.shape[2] // 14
            cells = x.reshape(2, x.shape[1], 14, size, 14, size).mean((3, 5))
            expected.append(cells / cells.square().mean(1, keepdim=True).sqrt())
    torch.testing.assert_close(feature_map, torch.cat(expected, 1), atol=1e-4, rtol=1e-3)


def test_normalises_as_imagenet_does(lite):
    seen = {}
    hook = lite.features.register_forward_pre_hook(lambda module, inputs: seen.update(x=inputs[0]))
    images = torch.rand(1, 3, 64, 64)
    lite(images)
    hook.remove()
    for channel, (mean, std) in enumerate(((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))):
        torch.testing.assert_close(seen["x"][:, channel], (images[:, channel] - mean) / std)


def test_frozen_means_frozen(lite):
    assert not any(p.requires_grad for p in lite.parameters())
    lite.train()
    assert not any(module.training for module in lite.modules())
    images = torch.rand(1, 3, 64, 64, requires_grad=True)
    assert not lite(images)[0].requires_grad
    free = build_backbone("efficientnet_lite0", weights="random", freeze=False).train()
    assert free.training and free(torch.rand(2, 3, 64, 64))[0].requires_grad


def test_fingerprint_tells_weights_apart(lite):
    assert lite.fingerprint() == build_backbone("efficientnet_lite0").fingerprint()
    assert lite.fingerprint() != build_backbone("efficientnet_lite0", weights="random").fingerprint()


@pytest.mark.parametrize("name, grid", [("resnet18", (2, 2)), ("vit_tiny_patch16_224", (14, 14))])
def test_timm_model_from_a_local_file(tmp_path, name, grid):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    size = 64 if name == "resnet18" else 224
    backbone = build_backbone(name, weights=tmp_path / "weights.pth", image_size=size)
    images = torch.rand(1, 3, size, size)
    g, feature_map = backbone(images)
    assert feature_map.shape == (1, backbone.out_channels, *grid) and backbone.grid == grid
    expected = model.eval().forward_features((images - backbone.mean) / backbone.std)
    if expected.ndim == 3:  # without the class token, row by row
        expected = expected[:, 1:].transpose(1, 2).reshape(1, -1, *grid)
    torch.testing.assert_close(feature_map, expected, atol=1e-4, rtol=1e-4)


def test_no_download_without_leave():
    pytest.importorskip("timm")
    with pytest.raises(ValueError, match="allow_download"):
        build_backbone("resnet18")


def test_unknown_names_and_wrong_weights(tmp_path):
    pytest.importorskip("timm")
    with pytest.raises(ValueError, match="efficientnet_lite0.*timm"):
        build_backbone("no_such_model", weights="random")
    torch.save({"conv1.weight": torch.zeros(64, 3, 7, 7)}, tmp_path / "half.pth")
    with pytest.raises(ValueError, match="lacks"):
        build_backbone("resnet18", weights=tmp_path / "half.pth")


def test_the_store_lists_what_pip_brings():
    assert {"efficientnet_lite0", "efficientnet_lite0_middle", "efficientnet_lite1"} <= set(Backbones.components)
