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

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from monai.networks.nets import UNet
from monai.networks.nets.basic_unet import UpCat
from scipy import ndimage

from .backbones import load_lite

__all__ = ["WEIGHTS_FOLDER", "AnatomySegmenter", "PretrainedUNet", "load_cxr_segmenter", "tidy_mask"]

WEIGHTS_FOLDER = Path(__file__).resolve().parents[1] / "weights"


def tidy_mask(mask: np.ndarray) -> np.ndarray:
    """
    The largest component of a boolean [H, W] mask, its holes filled: an organ is one piece.

    An empty mask stays empty; whether that is plausible is for ``anatomy_quality`` to say.
    """
    labels, count = ndimage.label(mask)
    if count > 1:
        mask = labels == 1 + np.argmax(np.bincount(labels.ravel())[1:])
    return ndimage.binary_fill_holes(mask)


class PretrainedUNet(torch.nn.Module):
    """
    U-Net whose encoder is the first eleven blocks of EfficientNet-Lite0 (to 1/16 of the side), so that it can start
    from ImageNet where there is little to learn from; the image itself joins again at full resolution.

    The encoder's normalisation keeps ImageNet's statistics and the decoder's is of each image alone, so that the
    network computes the same in training, on crops, as in use: statistics of batches did not carry over to whole
    photographs of other cameras.

    Args:
        in_channels: of the input; the first three are the encoder's, colours about [0, 1].
        out_channels: number of maps.
        channels: widths of the decoder, from 1/8 of the side to the whole.
        weights: ``"random"``, a file, or None for the weights that pip installed.
    """

    #: index of the encoder's block -> its channels, at 1/2, 1/4, 1/8 and 1/16 of the side
    SKIPS = {0: 16, 2: 24, 4: 40, 10: 112}

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        channels: tuple[int, ...] = (48, 32, 24, 16),
        weights: str | Path | None = "random",
    ) -> None:
        super().__init__()
        net = load_lite(0, weights).net
        self.stem = torch.nn.Sequential(net._conv_stem, net._bn0, net._swish)
        self.stages = torch.nn.ModuleList(net._blocks[: max(self.SKIPS) + 1])
        skips = [*self.SKIPS.values()][:-1][::-1] + [in_channels]
        widths = [self.SKIPS[max(self.SKIPS)], *channels]
        self.up = torch.nn.ModuleList(
            UpCat(
                2,
                before,
                skip,
                after,
                act=("relu", {"inplace": True}),
                norm=("instance", {"affine": True}),
                bias=True,
                upsample="nontrainable",
            )
            for before, skip, after in zip(widths[:-1], skips, channels, strict=True)
        )
        self.head = torch.nn.Conv2d(channels[-1], out_channels, 1)

    def train(self, mode: bool = True) -> PretrainedUNet:
        super().train(mode)
        for module in (self.stem, self.stages):
            module.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, in_channels, S, S], S a multiple of 16 -> [B, out_channels, S, S]."""
        skips = [x]
        y = self.stem(4 * x[:, :3] - 2)
        for index, stage in enumerate(self.stages):
            y = stage(y)
            if index in self.SKIPS:
                skips.append(y)
        y = skips.pop()
        for up in self.up:
            y = up(y, skips.pop())
        return self.head(y)


class AnatomySegmenter(torch.nn.Module):
    """
    A small U-Net with the geometry and normalisation it was trained with.

    Args:
        organs: names of the output channels. They may overlap (a lung goes on behind the heart), so each is a sigmoid.
        size: side in pixels of the square the network sees; the image is padded, not squashed.
        channels: widths of the U-Net's levels, or of the decoder's with an encoder.
        colour: True to feed the three colour channels, False to feed the grey image.
        encoder: ``"unet"`` (MONAI's, no pretraining) or ``"efficientnet_lite0"`` (:class:`PretrainedUNet`, colour).

    Raises:
        ValueError: for an unknown encoder, or the pretrained one without colour.
    """

    def __init__(
        self,
        organs: tuple[str, ...] = ("left_lung", "right_lung", "heart"),
        size: int = 192,
        channels: tuple[int, ...] = (16, 32, 64, 96, 160),
        colour: bool = False,
        encoder: str = "unet",
    ) -> None:
        super().__init__()
        if encoder not in ("unet", "efficientnet_lite0") or (encoder != "unet" and not colour):
            raise ValueError(f"encoder is 'unet', or with colour=True 'efficientnet_lite0'; got {encoder=}, {colour=}")
        self.organs, self.size, self.channels, self.colour = tuple(organs), size, tuple(channels), colour
        self.encoder = encoder
        # the plain image and the locally normalised one: the second is what carries over to other scanners
        in_channels = 6 if colour else 2
        self.net: torch.nn.Module
        if encoder == "unet":
            self.net = UNet(
                spatial_dims=2,
                in_channels=in_channels,
                out_channels=len(self.organs),
                channels=self.channels,
                strides=(2,) * (len(self.channels) - 1),
                num_res_units=1,
                norm="BATCH",
            )
        else:
            self.net = PretrainedUNet(in_channels, len(self.organs), self.channels)

    def to_square(self, images: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] -> [B, C, size, size], centred, padded with zeros."""
        height, width = images.shape[-2:]
        scale = self.size / max(height, width)
        h, w = max(1, round(height * scale)), max(1, round(width * scale))
        small = F.interpolate(images, size=(h, w), mode="bilinear", antialias=True, align_corners=False)
        top, left = (self.size - h) // 2, (self.size - w) // 2
        return F.pad(small, (left, self.size - w - left, top, self.size - h - top))

    def normalise(self, square: torch.Tensor) -> torch.Tensor:
        """
        Stack the image scaled between its 2nd and 98th percentile and its locally normalised twin.

        Of a photograph black is the lower end, so that a crop without the black surround is scaled as the whole is.
        """
        flat = square[..., ::2, ::2].flatten(2)  # a quarter of the pixels gives the same percentiles
        low = torch.quantile(flat, 0.02, dim=2)[..., None, None] * (not self.colour)
        high = torch.quantile(flat, 0.98, dim=2)[..., None, None]
        scaled = ((square - low) / (high - low + 1e-3)).clamp(-0.5, 1.5)
        radius = self.size // 12

        def box(x: torch.Tensor, dim: int) -> torch.Tensor:
            # by differences of running sums: the cost does not grow with the radius
            at = torch.arange(x.shape[dim], device=x.device)
            low, high = (at - radius).clamp_min(0), (at + radius + 1).clamp_max(x.shape[dim])
            total = F.pad(x.cumsum(dim), (0, 0, 1, 0) if dim == -2 else (1, 0))
            count = (high - low).to(x.dtype)
            return (total.index_select(dim, high) - total.index_select(dim, low)) / (
                count[:, None] if dim == -2 else count
            )

        def local_mean(x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):  # two box filters, rows then columns: close to a Gaussian, and cheap
                x = box(box(x, -2), -1)
            return x

        centred = square - local_mean(square)
        local = (centred / (local_mean(centred.square()).sqrt() + 0.02)).clamp(-4, 4)
        return torch.cat([scaled, local], dim=1)

    def logits(self, square: torch.Tensor) -> torch.Tensor:
        """[B, 1 or 3, size, size] in [0, 1] -> [B, organs, size, size]."""
        return self.net(self.normalise(square))

    def from_square(self, square: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Undo :meth:`to_square` for an image of this height and width: [B, K, size, size] -> [B, K, height, width]."""
        scale = self.size / max(height, width)
        h, w = max(1, round(height * scale)), max(1, round(width * scale))
        top, left = (self.size - h) // 2, (self.size - w) // 2
        inside = square[..., top : top + h, left : left + w]
        return F.interpolate(inside, size=(height, width), mode="bilinear", align_corners=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """
        Args:
            images: [B, 3, H, W] (or one channel), values in [0, 1].

        Returns:
            probabilities [B, organs, H, W] in the images' own geometry.
        """
        images = images.float()
        square = self.to_square(images if self.colour else images.mean(dim=1, keepdim=True))
        return self.from_square(torch.sigmoid(self.logits(square)), *images.shape[-2:])

    @torch.no_grad()
    def segment(self, images: Sequence[torch.Tensor], threshold: float = 0.5) -> list[torch.Tensor]:
        """
        Masks of several images, which may differ in size, in one pass.

        Args:
            images: each [3, H, W] (or one channel), values in [0, 1].
            threshold: probability from which a pixel belongs to an organ.

        Returns:
            for each image uint8 {0, 1} masks [organs, H, W] on the CPU, each organ one piece without holes
            (:func:`tidy_mask`).
        """
        batch = [(i if self.colour else i.mean(dim=0, keepdim=True))[None] for i in map(torch.Tensor.float, images)]
        probabilities = torch.sigmoid(self.logits(torch.cat([self.to_square(i) for i in batch])))
        masks = []
        for image, probability in zip(batch, probabilities, strict=True):
            found = (self.from_square(probability[None], *image.shape[-2:])[0] >= threshold).cpu().numpy()
            masks.append(torch.from_numpy(np.stack([tidy_mask(organ) for organ in found]).astype(np.uint8)))
        return masks

    def settings(self) -> dict:
        return {
            "organs": list(self.organs),
            "size": self.size,
            "channels": list(self.channels),
            "colour": self.colour,
            "encoder": self.encoder,
        }

    def save(self, path: str | Path) -> None:
        """Write settings and half-precision weights; read back by :meth:`load`."""
        state = {k: v.half() if v.is_floating_point() else v for k, v in self.state_dict().items()}
        aside = Path(path).with_suffix(".tmp")
        torch.save({"settings": self.settings(), "state": state}, aside)
        aside.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> AnatomySegmenter:
        """Read a file written by :meth:`save` (``weights_only=True``)."""
        content = torch.load(path, map_location="cpu", weights_only=True)
        model = cls(**content["settings"])
        model.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in content["state"].items()})
        return model.eval().requires_grad_(False)


@lru_cache(maxsize=1)
def load_cxr_segmenter() -> AnatomySegmenter:
    """The shipped network for left lung, right lung and heart; its card is ``networks/weights/cxr_segmenter.md``."""
    return AnatomySegmenter.load(WEIGHTS_FOLDER / "cxr_segmenter.pt")
