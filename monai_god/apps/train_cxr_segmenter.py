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
Train the shipped chest X-ray segmenter: ``python -m monai_god.apps.train_cxr_segmenter --dataset_dir DATA``.

DATA is the folder with ``cxr/`` (lung masks of the training section) and ``chexmask_sample/`` (real shapes of lungs
and hearts without images). Open truth for the heart is scarce, so its labels come from three places: the shape that the
lungs lead to expect (:class:`HeartShape`, learnt from the CheXmask shapes), moved to where the film shows the heart's
borders; films drawn around the real shapes; and, in the second round, the network's own averaged predictions where the
fitted shape agrees with them.

``--evaluate`` prints the table of the card without training.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from scipy import ndimage
from tqdm import tqdm

from monai_god.apps.segmenter_training import fit, overlap_of, turn
from monai_god.networks.nets.segmenter import WEIGHTS_FOLDER, AnatomySegmenter, tidy_mask

__all__ = ["HeartShape", "evaluate", "main"]

ORGANS = ("left_lung", "right_lung", "heart")
# CheXmask's 120 landmarks
RIGHT_LUNG, LEFT_LUNG, HEART = slice(0, 44), slice(44, 94), slice(94, 120)


def read_grey(path: Path) -> torch.Tensor:
    image = Image.open(path)
    return torch.from_numpy(np.asarray(image.convert("RGB").convert("L"), dtype=np.float32) / 255.0)[None]


def read_mask(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.asarray(Image.open(path).convert("L")) > 0).float()


def read_box(item: dict, shape: Sequence[int]) -> torch.Tensor:
    """1 where the item's masks are known: everywhere, or inside ``mask_valid_box`` (x0, y0, x1, y1)."""
    if "mask_valid_box" not in item:
        return torch.ones(*shape)
    x0, y0, x1, y1 = (int(v) for v in item["mask_valid_box"].split(","))
    inside = torch.zeros(*shape)
    inside[y0:y1, x0:x1] = 1.0
    return inside


def read_item(root: Path, item: dict, model: AnatomySegmenter) -> torch.Tensor:
    """[1 + 3 + 3, size, size]: image, the three masks, and for each mask where its truth is known."""
    image = read_grey(root / item["image"])
    masks, known = torch.zeros(3, *image.shape[1:]), torch.zeros(3, *image.shape[1:])
    for channel, organ in enumerate(ORGANS):
        if organ in item:
            masks[channel] = read_mask(root / item[organ])
            known[channel] = read_box(item, image.shape[1:])
    return model.to_square(torch.cat([image, masks, known])[None])[0]


def read_shapes(folder: Path, held_out: Collection[str] = ()) -> list[np.ndarray]:
    """
    CheXmask tables -> landmarks [120, 2] as (x, y) in the unit square.

    Args:
        folder: where the tables are.
        held_out: patient ids as in the datalist (``nih14:00001437``) whose shapes are left out. Only the ChestX-ray8
            table shares patients with it.
    """
    shapes = []
    for table in sorted(folder.glob("*.csv")):
        rows = pd.read_csv(table, dtype=str)
        if "Image Index" in rows:
            rows = rows[~("nih14:" + rows["Image Index"].str.split("_").str[0]).isin(list(held_out))]
        for text in rows["Landmarks"]:
            points = np.asarray([float(v) for v in text.replace(",", " ").split()]).reshape(120, 2)
            shapes.append(points / 1024)
    return shapes


def fill_contour(points: np.ndarray, size: int) -> np.ndarray:
    """Contour [K, 2] as (x, y) in the unit square -> boolean [size, size]."""
    canvas = Image.new("L", (4 * size, 4 * size))
    ImageDraw.Draw(canvas).polygon([tuple(p) for p in points * 4 * size], fill=255)
    return np.asarray(canvas.resize((size, size), Image.Resampling.BOX)) > 127


class HeartShape:
    """
    The heart's contour that given lungs lead to expect, and how real hearts vary around it.

    Ridge regression from the lungs' outer outline, apices and diaphragm to the 26 heart landmarks. The lungs' inner
    border beside the heart is not used: some masks end there and others go on behind the heart.

    Args:
        shapes: landmarks as from :func:`read_shapes`.
        size: side of the square in pixels.
        modes: number of principal directions of the leave-one-out residuals in which the contour may move.
        ridge: strength of the regularisation, relative to the number of shapes.
    """

    def __init__(self, shapes: list[np.ndarray], size: int, modes: int = 8, ridge: float = 0.1) -> None:
        self.size = size
        features, hearts = [], []
        for points in shapes:
            left, right = fill_contour(points[LEFT_LUNG], size), fill_contour(points[RIGHT_LUNG], size)
            described, frame = self.describe(left, right)
            features.append(described)
            hearts.append(((points[HEART] * size - frame[:2]) / frame[2]).ravel())
        x, y = np.stack(features), np.stack(hearts)
        self.centre, self.scale = x.mean(0), x.std(0) + 1e-6
        design = np.c_[np.ones(len(x)), (x - self.centre) / self.scale]
        penalty = np.eye(design.shape[1]) * ridge * len(x)
        penalty[0, 0] = 0.0
        solve = np.linalg.solve(design.T @ design + penalty, design.T)
        self.coefficients = solve @ y
        leverage = np.einsum("ij,ji->i", design, solve)
        residuals = (y - design @ self.coefficients) / (1 - leverage)[:, None]
        _, singular, directions = np.linalg.svd(residuals - residuals.mean(0), full_matrices=False)
        self.spread, self.directions = singular[:modes] / np.sqrt(len(x)), directions[:modes]

    @staticmethod
    def describe(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Features of two lung masks, and the frame (x centre, top, chest width) that they are relative to."""
        (left_rows, left_columns), (right_rows, right_columns) = np.nonzero(left), np.nonzero(right)
        x0, x1, top = right_columns.min(), left_columns.max(), min(left_rows.min(), right_rows.min())
        frame = np.array([(x0 + x1) / 2, top, max(x1 - x0, 1)], dtype=float)
        height = max(left_rows.max(), right_rows.max()) - top
        features = [height, left_rows.min() - right_rows.min(), left_rows.max() - right_rows.max()]

        def edge(mask: np.ndarray, level: float, end: int) -> float:
            columns = np.flatnonzero(mask[int(top + level * height)])
            return (columns[end] if len(columns) else np.median(np.nonzero(mask)[1])) - frame[0]

        for level in np.linspace(0.12, 0.88, 8):  # outer borders
            features += [edge(right, level, 0), edge(left, level, -1)]
        for level in (0.15, 0.25, 0.35):  # inner borders above the heart
            features += [edge(right, level, -1), edge(left, level, 0)]
        for mask, outer, inward in ((right, x0, 1), (left, x1, -1)):  # diaphragm
            for depth in (0.08, 0.14, 0.2):
                column = int(np.clip(outer + inward * depth * frame[2], 0, mask.shape[1] - 1))
                rows = np.flatnonzero(mask[:, column])
                features.append((rows[-1] if len(rows) else np.nonzero(mask)[0].max()) - top)
        return np.asarray(features) / frame[2], frame

    def fit(self, image: np.ndarray, left: np.ndarray, right: np.ndarray, weight: float = 12.0) -> np.ndarray:
        """
        Move the expected contour to the film's edges: the cross-entropy method over the modes, where the score is the
        contrast across those parts of the contour that lie in a lung, less half the squared Mahalanobis distance.

        Args:
            image: [size, size].
            left: left lung, boolean [size, size].
            right: right lung, boolean [size, size].
            weight: weight of the image against the shape.

        Returns:
            heart, boolean [size, size].
        """
        described, frame = self.describe(left, right)
        # an outline outside what was seen must not be extrapolated
        expected = np.r_[1.0, np.clip((described - self.centre) / self.scale, -2.5, 2.5)] @ self.coefficients
        smooth = ndimage.gaussian_filter(image, 1.2)
        lungs = ndimage.binary_dilation(left | right, iterations=2).astype(np.float32)
        contrast_scale = 0.7 * (smooth[left | right].std() + 1e-3)

        def contours(modes: np.ndarray) -> np.ndarray:
            return (expected + (modes * self.spread) @ self.directions).reshape(len(modes), -1, 2)

        def score(modes: np.ndarray) -> np.ndarray:
            points = contours(modes)
            following = np.roll(points, -1, 1)
            tangent = following - np.roll(points, 1, 1)
            normal = np.stack([tangent[..., 1], -tangent[..., 0]], -1)
            normal /= np.linalg.norm(normal, axis=-1, keepdims=True) + 1e-9
            area = (points[..., 0] * following[..., 1] - following[..., 0] * points[..., 1]).sum(1)
            normal *= np.sign(area)[:, None, None]

            def sample(values: np.ndarray, distance: float) -> np.ndarray:
                at = (points + distance * normal) * frame[2] + frame[:2]
                return ndimage.map_coordinates(values, [at[..., 1], at[..., 0]], order=1, mode="nearest")

            contrast = np.mean([sample(smooth, -d) - sample(smooth, d) for d in (0.012, 0.025, 0.04)], axis=0)
            told = (sample(lungs, 0.03) * np.tanh(contrast / contrast_scale)).mean(1)
            return weight * told - 0.5 * (modes**2).sum(1)

        rng = np.random.default_rng(0)
        mean, deviation = np.zeros(len(self.spread)), np.ones(len(self.spread))
        for _ in range(8):
            candidates = np.clip(mean + deviation * rng.normal(size=(250, len(mean))), -2.5, 2.5)
            best = candidates[np.argsort(-score(candidates))[:25]]
            mean, deviation = best.mean(0), best.std(0) + 0.03
        return fill_contour((contours(mean[None])[0] * frame[2] + frame[:2]) / self.size, self.size)


def draw_film(masks: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
    """Draw a film around real shapes; returns [1 + 3 + 3, size, size] as :func:`read_item`."""
    left, right, heart = masks
    size = left.shape[0]
    y, x = np.mgrid[:size, :size] / size
    lungs = left | right
    rows, columns = np.nonzero(lungs | heart)
    top, bottom, x0, x1 = rows.min() / size, rows.max() / size, columns.min() / size, columns.max() / size
    middle = (x0 + x1) / 2

    def soft(mask: np.ndarray, low: float, high: float) -> np.ndarray:
        return ndimage.gaussian_filter(mask.astype(np.float32), rng.uniform(low, high))

    width = (x1 - x0) * rng.uniform(0.55, 0.68)
    body = 1 / (1 + np.exp((np.abs(x - middle) - width - 0.25 * np.maximum(0, top + 0.1 - y)) / 0.01))
    film = body * rng.uniform(0.55, 0.75)
    depth = rng.uniform(0.25, 0.5)
    air = soft(lungs & ~heart, 0.5, 1.5)
    behind = soft(lungs & heart, 1.0, 3.0)
    film -= depth * air + depth * rng.uniform(0.1, 0.4) * behind
    # heart fades towards the abdomen, and so does the liver under the diaphragm
    film += rng.uniform(0.02, 0.12) * soft(heart, 0.8, 2.0) * (1 - rng.uniform(0, 0.5) * (y - top))
    film += rng.uniform(0.0, 0.1) * (y > bottom - 0.05)
    spine_x = middle + rng.normal(0, 0.01) + rng.normal(0, 0.02) * (y - 0.5)
    spine = np.exp(-(((x - spine_x) / rng.uniform(0.02, 0.035)) ** 2))
    film += rng.uniform(0.03, 0.1) * spine * (0.8 + 0.2 * np.cos(2 * np.pi * y * rng.uniform(14, 20)))
    mediastinum = np.exp(-(((x - middle) / rng.uniform(0.04, 0.07)) ** 2)) * (y < bottom)
    film += rng.uniform(0.0, 0.12) * mediastinum
    count, slope, phase = rng.uniform(8, 12), rng.uniform(0.2, 0.6), rng.uniform(0, 1)
    arc = (y - top) / (bottom - top) - slope * np.abs(x - middle) ** rng.uniform(0.7, 1.3)
    film += rng.uniform(0.02, 0.1) * np.clip(np.cos(2 * np.pi * (count * arc + phase)), -0.2, 1) * (air + 0.3 * body)
    for side in (-1, 1):
        line = top + rng.uniform(0.02, 0.08) + rng.uniform(-0.3, 0.1) * np.abs(x - middle)
        clavicle = np.exp(-(((y - line) / rng.uniform(0.008, 0.014)) ** 2)) * ((x - middle) * side > 0.03)
        film += rng.uniform(0.02, 0.1) * clavicle
    height = np.exp(-(((y - (top + bottom) / 2) / 0.07) ** 2))
    hila = sum(height * np.exp(-(((x - middle - side * 0.08) / 0.04) ** 2)) for side in (-1, 1))
    film += rng.uniform(0, 0.15) * hila * air
    texture = ndimage.gaussian_filter(rng.normal(size=(size, size)), rng.uniform(1, 3))
    film += rng.uniform(0.005, 0.03) * texture / texture.std()
    film = np.clip(film, 0, 1).astype(np.float32)
    known = np.ones((3, size, size), np.float32)
    # the shapes end the lung at the heart, the hand-drawn masks go on behind it: not told there
    near = ndimage.binary_dilation(heart, iterations=max(1, size // 48))
    known[:2, near] = 0.0
    return torch.from_numpy(np.concatenate([film[None], masks.astype(np.float32), known]))


def augment(batch: torch.Tensor) -> torch.Tensor:
    """
    Random affine and smooth map for all channels; exposure, shading, opaque lungs, noise, blur, surround and small
    boxes for the image.

    One film in six is mirrored and its lungs change names, so that the left lung stays at the image's right: lungs
    are told by position, the heart by what is seen, and a heart on the wrong side shows a mirrored film.
    """
    count, size = len(batch), batch.shape[-1]
    swapped = batch.flip(-1)[:, [0, 2, 1, 3, 5, 4, 6]]
    batch = torch.where((torch.rand(count) < 0.17)[:, None, None, None], swapped, batch)
    matrices = []
    for _ in range(count):
        angle = np.deg2rad(random.gauss(0, 8))
        scale, aspect = np.exp(random.gauss(0, 0.16)), np.exp(random.gauss(0, 0.17))
        cos, sin = scale * np.cos(angle), scale * np.sin(angle)
        matrices.append([[cos, -sin * aspect, random.gauss(0, 0.1)], [sin, cos * aspect, random.gauss(0, 0.1)]])
    grid = F.affine_grid(torch.tensor(matrices, dtype=torch.float32), list(batch.shape), align_corners=False)
    bend = F.interpolate(torch.randn(count, 2, 4, 4) * 0.03, size=(size, size), mode="bicubic", align_corners=False)
    grid = grid + bend.permute(0, 2, 3, 1)
    outside = (grid.abs() > 1).any(-1)[:, None]
    batch = F.grid_sample(batch, grid, align_corners=False)
    image = batch[:, :1].clamp(1e-3, 1) ** torch.exp(torch.randn(count, 1, 1, 1) * 0.4)
    shading = F.interpolate(torch.randn(count, 1, 4, 4) * 0.12, size=(size, size), mode="bicubic", align_corners=False)
    image = image * (1 + shading) + torch.randn(count, 1, 1, 1) * 0.05
    # effusion, consolidation: parts of the lungs become as dense as the heart, and their outline has to be guessed
    heart = batch[:, 3:4]
    dense = (image * heart).sum((2, 3), keepdim=True) / (heart.sum((2, 3), keepdim=True) + 1)
    spots = F.interpolate(torch.randn(count, 1, 5, 5), size=(size, size), mode="bicubic", align_corners=False)
    lungs = F.avg_pool2d(batch[:, 1:3].amax(1, keepdim=True), 5, stride=1, padding=2)
    share = torch.sigmoid(6 * (spots - 0.3)) * lungs * torch.rand(count, 1, 1, 1)
    image = image + (torch.rand(count, 1, 1, 1) < 0.4) * share * (dense - image).clamp_min(0)
    if random.random() < 0.4:
        small = F.interpolate(image, scale_factor=random.uniform(0.4, 0.9), mode="bilinear", align_corners=False)
        image = F.interpolate(small, size=(size, size), mode="bilinear", align_corners=False)
    image = image + torch.randn_like(image) * 0.04 * torch.rand(count, 1, 1, 1)
    image = torch.where(outside & (torch.rand(count) < 0.15)[:, None, None, None], 1.0, image)
    for i in range(count):
        if random.random() < 0.4:  # collimator or white surround, at two sides
            edge, value = random.randint(1, size // 10), random.choice([0.0, 0.0, 1.0])
            turned = torch.rot90(image[i], random.randint(0, 3), (-2, -1))  # a view: written through
            turned[:, :edge] = value
            turned[:, :, : random.randint(1, edge + 1)] = value
        for _ in range(random.randint(0, 2)):  # labels, pads
            h, w = random.randint(4, size // 5), random.randint(4, size // 5)
            top, left = random.randint(0, size - h), random.randint(0, size - w)
            patch = image[i, :, top : top + h, left : left + w]
            image[i, :, top : top + h, left : left + w] = patch + (random.random() - patch) * random.random() * 0.6
    return torch.cat([image.clamp(0, 1), batch[:, 1:]], dim=1)


@torch.no_grad()
def pseudo_label(model: AnatomySegmenter, items: list[torch.Tensor], hearts: HeartShape) -> list[torch.Tensor]:
    """
    Label films by predictions averaged over small rotations and exposures.

    Kept where they look like a chest; a lung is told where the network is sure, the heart where moreover the fitted
    shape agrees.
    """

    kept = []
    for item in tqdm(items, desc="pseudo labels", mininterval=10):
        image = item[None, :1].float()
        views = [
            turn(torch.sigmoid(model.logits(turn(image**gamma, angle))), -angle)
            for angle, gamma in ((-5, 0.8), (0, 1.0), (5, 1.25))
        ]
        mean = torch.cat(views).mean(0)
        masks = np.stack([tidy_mask(m) for m in (mean > 0.5).numpy()])
        area = masks.mean((1, 2))
        lungs, heart = area[:2], area[2]
        if not (lungs.min() > 0.03 and lungs.max() < 0.3 and 0.02 < heart < 0.25 and 0.5 < lungs[0] / lungs[1] < 1.6):
            continue
        fitted = hearts.fit(image[0, 0].numpy(), masks[0], masks[1])
        agree = 2 * (fitted & masks[2]).sum() / (fitted.sum() + masks[2].sum())
        sure = ((mean - 0.5).abs() > 0.2).float()
        sure[2] *= torch.from_numpy(fitted == masks[2]) if agree > 0.75 else 0.0
        truth = torch.from_numpy(masks).float()
        given, known = item[1:4].float(), item[4:].float()
        truth = torch.where(known > 0.99, given, truth)
        kept.append(torch.cat([image[0], truth, torch.maximum(known, sure)]).half())
    return kept


def evaluate(model: AnatomySegmenter, root: Path) -> pd.DataFrame:
    """
    Agreement with the truth on patients not trained on, one row for each image.

    Lungs: Dice inside the box where the truth is known. CheXmask's lungs end at the heart, so there the heart is taken
    from both. Heart: Dice where there is one, else its place in the hand-drawn cardiomediastinum (heart and great
    vessels): the part inside, and at the rows of the heart's lower two thirds the left and right border's distance and
    the width's ratio (distances in chest widths, positive outwards); and the cardiothoracic ratio.
    """
    datalist = json.loads((root / "datalist.json").read_text())
    rows = []
    for section in ("validation", "testing", "evaluation_only"):
        for item in datalist[section]:
            if not any(k in item for k in (*ORGANS, "cardiomediastinum")):
                continue
            image = read_grey(root / item["image"])
            masks = model.segment([image])[0].numpy().astype(bool)
            known = read_box(item, image.shape[1:]).numpy() > 0
            row: dict = {"section": section, "source": item["source"], "image": item["image"]}
            truth = {o: read_mask(root / item[o]).numpy() > 0 for o in (*ORGANS, "cardiomediastinum") if o in item}
            for channel, organ in enumerate(ORGANS):
                if organ in truth:
                    told = known & ~(truth["heart"] | masks[2]) if "heart" in truth and organ != "heart" else known
                    row[organ] = overlap_of(masks[channel] & told, truth[organ] & told)
            heart, chest = masks[2], np.flatnonzero(masks[:2].any((0, 1)))
            if heart.any() and len(chest):
                row["cardiothoracic ratio"] = np.ptp(np.flatnonzero(heart.any(0))) / np.ptp(chest)
            if heart.any() and "cardiomediastinum" in truth:
                region = truth["cardiomediastinum"]
                row["inside"] = (heart & region).sum() / heart.sum()
                top, bottom = np.flatnonzero(heart.any(1))[[0, -1]]
                band = [y for y in range(top + (bottom - top) // 3, bottom) if region[y].any()]
                ours = np.array([np.flatnonzero(heart[y])[[0, -1]] for y in band])
                drawn = np.array([np.flatnonzero(region[y])[[0, -1]] for y in band])
                row["right border"] = (drawn[:, 0].min() - ours[:, 0].min()) / np.ptp(chest)
                row["left border"] = (ours[:, 1].max() - drawn[:, 1].max()) / np.ptp(chest)
                row["width ratio"] = np.ptp(ours) / np.ptp(drawn)
            rows.append(row)
    return pd.DataFrame(rows)


def summary(table: pd.DataFrame) -> str:
    """The means by source as text, and the images with the lowest Dice."""
    apart = np.where(table["section"] == "evaluation_only", "evaluation_only", "held out")
    grouped = table.drop(columns=["image", "section"]).assign(truth=apart).groupby(["source", "truth"])
    lines = [grouped.size().rename("images").to_frame().join(grouped.mean()).T.round(3).to_string()]
    lowest = table[["left_lung", "right_lung"]].min(axis=1)
    lines.append("lowest lung Dice:")
    lines += [f"  {lowest[i]:.3f} {table['image'][i]}" for i in lowest.sort_values().index[:6]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_dir", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=WEIGHTS_FOLDER / "cxr_segmenter.pt")
    parser.add_argument("--steps", type=int, nargs=2, default=(700, 1600), help="steps of the two rounds")
    parser.add_argument("--evaluate", action="store_true", help="only print the table of the weights at --output")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    root = arguments.dataset_dir / "cxr"
    if arguments.evaluate:
        print(summary(evaluate(AnatomySegmenter.load(arguments.output), root)))
        return
    random.seed(arguments.seed)
    torch.manual_seed(arguments.seed)
    rng = np.random.default_rng(arguments.seed)
    model = AnatomySegmenter(ORGANS)
    datalist = json.loads((root / "datalist.json").read_text())
    items = datalist["training"]
    held_out = {i["patient_id"] for section, others in datalist.items() if section != "training" for i in others}
    shapes = read_shapes(arguments.dataset_dir / "chexmask_sample", held_out)
    hearts = HeartShape(shapes, model.size)
    squares, drawn = [], []
    for item in tqdm(items, desc="films", mininterval=10):
        square = read_item(root, item, model)
        if "left_lung" in item and "right_lung" in item:
            heart = hearts.fit(square[0].numpy(), square[1].numpy() > 0.5, square[2].numpy() > 0.5)
            square[3], square[6] = torch.from_numpy(heart).float(), 1.0
            if "cardiomediastinum" in item:
                square[3] *= model.to_square(read_mask(root / item["cardiomediastinum"])[None, None])[0, 0]
            drawn.append(square.half())
        squares.append(square.half())
    films = []
    for points in tqdm(shapes * 2, desc="drawn films", mininterval=10):
        masks = np.stack([fill_contour(points[part], model.size) for part in (LEFT_LUNG, RIGHT_LUNG, HEART)])
        films.append(draw_film(masks, rng).half())
    print(f"{len(drawn)} films with hand-drawn lungs, {len(squares)} films, {len(shapes)} shapes")
    fit(model, [(0.7, drawn), (0.3, films)], augment, arguments.steps[0], 4e-3, 10, "round 1")
    model.save(arguments.output)
    print(summary(evaluate(model, root)))
    pseudo = pseudo_label(model, squares, hearts)
    print(f"{len(pseudo)} of {len(squares)} pseudo labels kept")
    pools = [(share, pool) for share, pool in ((0.4, drawn), (0.45, pseudo), (0.15, films)) if pool]
    fit(model, pools, augment, arguments.steps[1], 3e-3, 10, "round 2")
    model.save(arguments.output)
    print(summary(evaluate(model, root)))


if __name__ == "__main__":
    main()
