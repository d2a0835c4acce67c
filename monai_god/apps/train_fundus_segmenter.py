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
"""
Train the shipped fundus segmenter: ``python -m monai_god.apps.train_fundus_segmenter --dataset_dir DATA``.

DATA is the folder with ``fundus/`` (its sections training and anatomy). Disc masks are drawn on two patients only, so
that elsewhere the disc's outline is found around its known centre (:func:`disc_around`); vessels are drawn on CHASE_DB1
and HRF, the fovea is a point on IDRiD. Phantoms, whose truth is exact, are added, and in the second round the network's
own averaged predictions on photographs that nobody has drawn on, where it is sure.

``--evaluate`` prints the table of the card without training.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage
from skimage.measure import EllipseModel
from skimage.transform import warp_polar
from tqdm import tqdm

from monai_god.apps.segmenter_training import fit, overlap_of, turn
from monai_god.data.phantoms import FundusPhantom
from monai_god.networks.nets.backbones import keep_memory
from monai_god.networks.nets.segmenter import WEIGHTS_FOLDER, AnatomySegmenter, PretrainedUNet
from monai_god.transforms.anatomy.functional import resample, transform_points
from monai_god.transforms.anatomy.fundus import eye_side, find_field_of_view
from monai_god.transforms.anatomy.parse_fundus import ParseFundusAnatomy, field_frame

__all__ = ["disc_around", "evaluate", "main"]

ORGANS = ("optic_disc", "vessels", "fovea")
SIZE, CROP = 576, 320
#: the fovea is learnt as a round spot, of this share of its distance from the disc
FOVEA_SPOT = 0.12
#: radius of the disc as a share of its distance from the fovea
DISC_SHARE = 0.19
#: every so many-th image of these sources is measured and never trained on
HELD_OUT = {"idrid": 5, "hrf": 5}


def disc_around(image: NDArray[np.floating], centre: tuple[float, float], radius: float) -> NDArray[np.bool_]:
    """
    Ellipse of the optic disc around its known centre: the closed path of strongest fall of light on rays from it.

    Args:
        image: [3, H, W].
        centre: (x, y).
        radius: expected, in pixels; found between 0.5 and 1.7 of it.

    Returns:
        bool [H, W].
    """
    light = ndimage.gaussian_filter(0.6 * image[0] + 0.4 * image[1], 0.05 * radius)
    # vessels cross the rim: a closing fills them
    light = ndimage.grey_closing(light, size=max(3, int(0.3 * radius)))
    angles, steps = 96, 48
    rays = warp_polar(
        light, (centre[1], centre[0]), radius=2.2 * radius, output_shape=(angles, int(2.2 * steps)), order=1
    )
    fall = -ndimage.gaussian_filter1d(rays, 0.06 * steps, axis=1, order=1)
    fall = ndimage.gaussian_filter1d(fall, 1.5, axis=0, mode="wrap") / (rays.std() + 1e-6)
    at = np.arange(fall.shape[1]) / steps
    score = fall * steps - 1.2 * np.log(np.maximum(at, 0.05)) ** 2
    score[:, (at < 0.5) | (at > 1.7)] = -1e6
    # the best path that moves by at most one step from ray to ray; twice around, of which the middle counts
    twice = np.concatenate([score, score])
    best, came = twice[0], np.zeros((len(twice), score.shape[1]), int)
    for ray in range(1, len(twice)):
        shifted = np.stack([np.roll(best, s) for s in (1, 0, -1)])
        choice = shifted.argmax(0)
        came[ray] = np.arange(score.shape[1]) + choice - 1
        best = shifted.max(0) + twice[ray]
    path = [int(best.argmax())]
    for ray in range(len(twice) - 1, 0, -1):
        path.append(int(np.clip(came[ray][path[-1]], 0, score.shape[1] - 1)))
    found = np.roll(np.array(path[::-1])[angles // 2 : angles // 2 + angles], angles // 2) / steps * radius
    theta = np.linspace(0, 2 * np.pi, angles, endpoint=False)
    points = np.stack([centre[0] + found * np.cos(theta), centre[1] + found * np.sin(theta)], 1)
    ellipse = EllipseModel.from_estimate(points)
    if not ellipse:
        raise ValueError(f"no ellipse fits the disc's rim: {ellipse}")
    (x, y), (a, b) = ellipse.center, ellipse.axis_lengths
    turned = ellipse.theta
    yy, xx = np.mgrid[: image.shape[1], : image.shape[2]]
    u = (xx - x) * np.cos(turned) + (yy - y) * np.sin(turned)
    v = -(xx - x) * np.sin(turned) + (yy - y) * np.cos(turned)
    return (u / a) ** 2 + (v / b) ** 2 <= 1


def read_image(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.asarray(Image.open(path).convert("RGB"), dtype=np.float32) / 255).permute(2, 0, 1)


def read_mask(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.asarray(Image.open(path).convert("L")) > 0).float()[None]


def spot(centre: NDArray[np.floating], radius: float) -> torch.Tensor:
    """[1, SIZE, SIZE], 1 within ``radius`` of the centre (x, y)."""
    yy, xx = np.mgrid[:SIZE, :SIZE]
    return torch.from_numpy((xx - centre[0]) ** 2 + (yy - centre[1]) ** 2 <= radius**2).float()[None]


def read_item(root: Path, item: Mapping[str, Any]) -> torch.Tensor:
    """[3 + 3 + 3, SIZE, SIZE] in the field's frame: image, disc, vessels and fovea, and where each is known."""
    image = read_image(root / item["image"])
    frame = field_frame(find_field_of_view(image), (image.shape[1], image.shape[2]), SIZE)
    out = torch.zeros(9, SIZE, SIZE)
    out[:3] = resample(image, frame, (SIZE, SIZE))
    centre, fovea = (
        transform_points(np.asarray(item[key], dtype=np.float64)[None], frame)[0] if key in item else None
        for key in ("optic_disc_center", "fovea_center")
    )
    distance = 0.36 * SIZE if centre is None or fovea is None else float(np.hypot(*(centre - fovea)))
    if "optic_disc" in item:
        out[3] = resample(read_mask(root / item["optic_disc"]), frame, (SIZE, SIZE))[0] > 0.5
        out[6] = 1
    elif centre is not None:
        expected = DISC_SHARE * distance
        found = disc_around(out[:3].numpy(), (float(centre[0]), float(centre[1])), expected)
        ys, xs = np.nonzero(found)
        size, off = np.sqrt(found.sum() / np.pi), np.hypot(xs.mean() - centre[0], ys.mean() - centre[1])
        if size < 1.3 * expected and off < 0.35 * size:
            out[3] = torch.from_numpy(found)
            # the found rim is not trusted to the pixel
            edge = ndimage.binary_dilation(found, iterations=3) & ~ndimage.binary_erosion(found, iterations=3)
            out[6] = torch.from_numpy(~edge)
        else:  # only its middle and its surroundings are known
            out[3] = spot(centre, 0.7 * expected)[0]
            out[6] = out[3] + 1 - spot(centre, 1.6 * expected)[0]
    if "vessels" in item:
        out[4] = resample(read_mask(root / item["vessels"]), frame, (SIZE, SIZE))[0] > 0.5
        out[7] = 1
    if fovea is not None:
        out[5], out[8] = spot(fovea, FOVEA_SPOT * distance)[0], 1
    return out


def read_phantom(patient: int) -> torch.Tensor:
    """The same of a phantom, where all is known."""
    shot = FundusPhantom(1, patient).photograph("R" if patient % 2 else "L", patient % 3, SIZE)
    image = torch.from_numpy(shot.image / np.float32(255)).permute(2, 0, 1)
    frame = field_frame(find_field_of_view(image), (SIZE, SIZE), SIZE)
    masks = torch.from_numpy(np.stack([shot.masks["optic_disc"], shot.masks["vessels"]]).astype(np.float32))
    out = torch.ones(9, SIZE, SIZE)
    out[:3] = resample(image, frame, (SIZE, SIZE))
    out[3:5] = (resample(masks, frame, (SIZE, SIZE)) > 0.5).float()
    out[5] = 0
    marks = {
        name: transform_points(np.asarray(at, dtype=np.float64).reshape(-1, 2), frame)
        for name, at in shot.landmarks.items()
        if name != "junctions" and len(at)
    }
    if "fovea" in marks:
        ends = [marks[name][0] for name in ("optic_disc", "fovea") if name in marks]
        distance = float(np.hypot(*(ends[0] - ends[1]))) if len(ends) == 2 else 0.36 * SIZE
        out[5] = spot(marks["fovea"][0], FOVEA_SPOT * distance)[0]
    return out


def augment(batch: torch.Tensor) -> torch.Tensor:
    """
    Random similarity, mirror and crop for all channels; colour, exposure, shading, haze, blur and noise for the image.
    """
    count = len(batch)
    flips = torch.rand(count) < 0.5
    batch = torch.where(flips[:, None, None, None], batch.flip(-1), batch)
    matrices = []
    for _ in range(count):
        angle, scale = np.deg2rad(random.gauss(0, 15)), (CROP / SIZE) * np.exp(random.gauss(0, 0.22))
        aspect = np.exp(random.gauss(0, 0.06))
        cos, sin = scale * np.cos(angle), scale * np.sin(angle)
        reach = max(0.0, 1.1 - scale)
        shift = [random.uniform(-reach, reach) for _ in range(2)]
        matrices.append([[cos * aspect, -sin, shift[0]], [sin * aspect, cos, shift[1]]])
    grid = F.affine_grid(
        torch.tensor(matrices, dtype=torch.float32), [count, batch.shape[1], CROP, CROP], align_corners=False
    )
    batch = F.grid_sample(batch, grid, align_corners=False)
    image = batch[:, :3]
    lit = (image.amax(1, keepdim=True) > 0.04).float()
    image = image.clamp(1e-3, 1) ** torch.exp(torch.randn(count, 3, 1, 1) * 0.15 + torch.randn(count, 1, 1, 1) * 0.3)
    shading = F.interpolate(torch.randn(count, 1, 3, 3) * 0.2, size=(CROP, CROP), mode="bicubic", align_corners=False)
    image = image * (1 + shading) * torch.exp(torch.randn(count, 3, 1, 1) * 0.12)
    haze = (torch.rand(count, 1, 1, 1) < 0.3) * torch.rand(count, 1, 1, 1) * 0.4
    image = image + haze * (image.mean((2, 3), keepdim=True) - image)
    grey = torch.rand(count, 1, 1, 1) < 0.06
    image = torch.where(grey, image.mean(1, keepdim=True), image)
    if random.random() < 0.35:
        small = F.interpolate(image, scale_factor=random.uniform(0.4, 0.9), mode="bilinear", align_corners=False)
        image = F.interpolate(small, size=(CROP, CROP), mode="bilinear", align_corners=False)
    image = image + torch.randn_like(image) * 0.03 * torch.rand(count, 1, 1, 1)
    # flare at a rim of the crop
    rim = torch.linspace(-1, 1, CROP)[None, None, None].expand(count, 1, CROP, CROP)
    rim = torch.where(torch.rand(count, 1, 1, 1) < 0.5, rim, rim.transpose(2, 3))
    flare = torch.sigmoid(12 * (rim * (2 * (torch.rand(count, 1, 1, 1) < 0.5) - 1) - 0.85))
    image = image + (torch.rand(count, 1, 1, 1) < 0.15) * flare * torch.rand(count, 3, 1, 1)
    image = image * lit.clamp_min(0.02)
    batch = torch.cat([image.clamp(0, 1), batch[:, 3:]], dim=1)
    batch[:, 3:6] = (batch[:, 3:6] > 0.5).float()
    return batch


@torch.no_grad()
def pseudo_label(model: AnatomySegmenter, items: list[torch.Tensor]) -> list[torch.Tensor]:
    """Fill in what is not known by predictions averaged over small rotations and exposures, where they are sure."""
    out = []
    for item in tqdm(items, desc="pseudo labels", mininterval=10):
        image = item[None, :3].float()
        views = [
            turn(torch.sigmoid(model.logits(turn(image**gamma, angle))), -angle)
            for angle, gamma in ((-8, 0.8), (0, 1.0), (8, 1.25))
        ]
        mean = torch.cat(views).mean(0)
        sure = ((mean < 0.15) | (mean > 0.8)).float()
        # a picture in which nothing is sure tells nothing, also not that there is nothing
        for channel in (0, 2):
            if mean[channel].max() < 0.8 and mean[channel].max() > 0.15:
                sure[channel] = 0
        known = item[6:].float()
        whole = known.amax((1, 2), keepdim=True) > 0.5
        truth = torch.where(whole, item[3:6].float(), (mean > 0.5).float())
        out.append(torch.cat([image[0], truth, torch.where(whole, known, sure)]).half())
    return out


def split(root: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Items to train on, and those of the anatomy section and of other patients to measure on."""
    datalist = json.loads((root / "datalist.json").read_text())
    train, held = list(datalist["training"]), [*datalist["validation"], *datalist["testing"]]
    for source, every in HELD_OUT.items():
        of = [item for item in datalist["anatomy"] if item["source"] == source]
        held += of[::every]
        train += [item for index, item in enumerate(of) if index % every]
    return train, held


def evaluate(root: Path, path: Path) -> pd.DataFrame:
    """Agreement with the truth on images not trained on, one row for each image."""
    find = ParseFundusAnatomy(AnatomySegmenter.load(path))
    rows = []
    for item in tqdm(split(root)[1], desc="measured", mininterval=10):
        if not {"optic_disc", "optic_disc_center", "vessels", "fovea_center", "laterality"} & set(item):
            continue
        found = find(read_image(root / item["image"]))
        disc, vessels = (found.anatomy[i].numpy() > 0 for i in (0, 1))
        row: dict[str, Any] = {"source": item["source"], "image": item["image"]}
        centre = found.landmarks["optic_disc"][:1]
        radius = np.sqrt(disc.sum() / np.pi) if disc.any() else np.nan
        if "optic_disc" in item:
            truth = read_mask(root / item["optic_disc"])[0].numpy() > 0
            row["disc_dice"] = overlap_of(disc, truth)
            radius = np.sqrt(truth.sum() / np.pi)
        if "optic_disc_center" in item:
            row["disc_found"] = len(centre) > 0
            distance = np.hypot(*(centre[0].numpy() - item["optic_disc_center"])) if len(centre) else np.inf
            row["disc_right"] = distance <= radius
        if "fovea_center" in item:
            fovea = found.landmarks["fovea"][:1]
            truth_radius = DISC_SHARE * np.hypot(*np.subtract(item["fovea_center"], item["optic_disc_center"]))
            row["fovea_found"] = len(fovea) > 0
            off = np.hypot(*(fovea[0].numpy() - item["fovea_center"])) if len(fovea) else np.inf
            row["fovea_right"], row["fovea_off"] = off <= truth_radius, off / truth_radius
        if "vessels" in item:
            row["vessel_dice"] = overlap_of(vessels, read_mask(root / item["vessels"])[0].numpy() > 0)
        if "laterality" in item:
            side = eye_side(found.landmarks)
            row["side_known"] = side is not None
            row["side_right"] = side == item["laterality"] if side else np.nan
        rows.append(row)
    return pd.DataFrame(rows)


def summary(table: pd.DataFrame) -> str:
    """The means by source as text."""
    numbers = table.drop(columns="image").set_index("source").astype(float)
    grouped = numbers.groupby("source")
    return grouped.size().rename("images").to_frame().join(grouped.mean()).T.round(3).to_string()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_dir", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=WEIGHTS_FOLDER / "fundus_segmenter.pt")
    parser.add_argument("--steps", type=int, nargs=2, default=(800, 1600), help="steps of the two rounds")
    parser.add_argument("--resume", action="store_true", help="go on with round 2 from the weights at --output")
    parser.add_argument("--evaluate", action="store_true", help="only print the table of the weights at --output")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    keep_memory()
    root = arguments.dataset_dir / "fundus"
    if arguments.evaluate:
        print(summary(evaluate(root, arguments.output)))
        return
    random.seed(arguments.seed)
    torch.manual_seed(arguments.seed)
    if arguments.resume:
        model = AnatomySegmenter.load(arguments.output).requires_grad_(True)
        model.size = SIZE
    else:
        model = AnatomySegmenter(ORGANS, SIZE, (64, 32, 16, 8), colour=True, encoder="efficientnet_lite0")
        model.net = PretrainedUNet(6, len(ORGANS), model.channels, weights=None)
    model.to(memory_format=torch.channels_last)
    items = [(item, read_item(root, item).half()) for item in tqdm(split(root)[0], desc="images", mininterval=10)]
    every = [tensor for _, tensor in items]
    discs = [t for item, t in items if "optic_disc" in item]
    centres = [t for item, t in items if "optic_disc" not in item and "optic_disc_center" in item]
    vessels = [t for item, t in items if "vessels" in item]
    if not arguments.resume:
        pools = [(0.15, discs), (0.45, centres), (0.4, vessels)]
        fit(model, pools, augment, arguments.steps[0], 3e-3, 8, "round 1")
        model.save(arguments.output)
        print(summary(evaluate(root, arguments.output)), flush=True)
    drawn = [read_phantom(patient).half() for patient in tqdm(range(80), desc="phantoms", mininterval=10)]
    pools = [(0.1, discs), (0.22, centres), (0.36, vessels), (0.1, drawn), (0.22, pseudo_label(model, every))]
    fit(model, pools, augment, arguments.steps[1], 3e-3, 8, "round 2")
    model.save(arguments.output)
    print(summary(evaluate(root, arguments.output)))


if __name__ == "__main__":
    main()
