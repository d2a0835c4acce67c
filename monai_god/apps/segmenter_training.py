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
"""What the trainings of the shipped segmenters share."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from monai_god.networks.nets.segmenter import AnatomySegmenter

__all__ = ["fit", "overlap_of", "turn"]


def fit(
    model: AnatomySegmenter,
    pools: list[tuple[float, list[torch.Tensor]]],
    augment: Callable[[torch.Tensor], torch.Tensor],
    steps: int,
    rate: float,
    batch_size: int,
    text: str,
) -> None:
    """
    Train in place by cross-entropy and Dice where the truth is known; the model is left with the moving average of its
    weights.

    Args:
        model: the network.
        pools: for each pool its share of the batch, and its items: [image channels + organs + organs, S, S], the image,
            the masks and where each mask is known.
        augment: of a batch of items.
        steps: number of batches.
        rate: highest learning rate of the one-cycle schedule.
        batch_size: items of a batch.
        text: name of the progress bar.
    """
    organs = len(model.organs)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.15)
    averaged = copy.deepcopy(model.state_dict())
    shares, items = [share for share, _ in pools], [pool for _, pool in pools]
    model.train()
    for step in (bar := tqdm(range(steps), desc=text, mininterval=10)):
        chosen = [random.choice(pool) for pool in random.choices(items, shares, k=batch_size)]
        batch = augment(torch.stack(chosen).float())
        image, truth, known = batch[:, : -2 * organs], batch[:, -2 * organs : -organs], batch[:, -organs:]
        known = (known > 0.99).float()
        logits = model.logits(image)
        cross = F.binary_cross_entropy_with_logits(logits, truth, reduction="none") * known
        p, t = torch.sigmoid(logits) * known, truth * known
        overlap = (2 * (p * t).sum((2, 3)) + 1) / (p.sum((2, 3)) + t.sum((2, 3)) + 1)
        told = (known.sum((2, 3)) > 0).float()
        loss = cross.sum() / known.sum().clamp_min(1) + ((1 - overlap) * told).sum() / told.sum().clamp_min(1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        decay = min(0.99, (step + 1) / (step + 10))
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                averaged[name].lerp_(value, 1 - decay)
            else:
                averaged[name].copy_(value)
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    model.load_state_dict(averaged)
    model.eval()


def turn(images: torch.Tensor, degrees: float) -> torch.Tensor:
    """Rotate [B, C, S, S] about the centre."""
    a = np.deg2rad(degrees)
    matrix = torch.tensor([[[np.cos(a), -np.sin(a), 0], [np.sin(a), np.cos(a), 0]]], dtype=torch.float32)
    grid = F.affine_grid(matrix.expand(len(images), -1, -1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def overlap_of(a: np.ndarray, b: np.ndarray) -> float:
    """Dice of two bool masks."""
    return float(2 * (a & b).sum() / max(a.sum() + b.sum(), 1))
