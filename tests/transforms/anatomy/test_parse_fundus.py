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

import json

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from monai_god.data.phantoms import FundusPhantom
from monai_god.transforms import (
    BuildAnatomyGraphd,
    LoadMedicalImage,
    ParseFundusAnatomy,
    ParseFundusAnatomyd,
    eye_side,
)
from monai_god.transforms.anatomy.parse_fundus import WEIGHTS

SIZE = 384


@pytest.fixture(scope="module")
def parse() -> ParseFundusAnatomy:
    return ParseFundusAnatomy()


def phantoms():
    """Photographs on which disc and fovea are in view, with their truth."""
    for patient in range(12):
        shot = FundusPhantom(7, patient).photograph("R" if patient % 2 else "L", 0, SIZE)
        if len(shot.landmarks.get("optic_disc", ())) and len(shot.landmarks.get("fovea", ())):
            yield torch.from_numpy(shot.image / np.float32(255)).permute(2, 0, 1), shot


def real(shared_data, source: str, count: int) -> list[tuple[torch.Tensor, dict]]:
    """Held-out photographs of one source."""
    data = json.loads((shared_data / "fundus" / "datalist.json").read_text())
    items = [item for item in data["testing"] if item["source"] == source][:count]
    return [(LoadMedicalImage()(shared_data / "fundus" / item["image"]), item) for item in items]


def test_weights_are_small():
    assert WEIGHTS.stat().st_size < 5e6


def test_phantoms_are_parsed(parse):
    right = {"optic_disc": 0, "fovea": 0, "side": 0}
    overlap = []
    shots = list(phantoms())
    assert len(shots) >= 5
    for image, shot in shots:
        found = parse(image)
        disc = shot.masks["optic_disc"]
        radius = np.sqrt(disc.sum() / np.pi)
        for name in ("optic_disc", "fovea"):
            at = found.landmarks[name].numpy()
            truth = np.asarray(shot.landmarks[name]).reshape(-1, 2)[0]
            right[name] += len(at) > 0 and np.hypot(*(at[0] - truth)) <= radius
        right["side"] += eye_side(found.landmarks) == shot.laterality
        vessels = found.anatomy[1].numpy() > 0
        overlap.append(2 * (vessels & shot.masks["vessels"]).sum() / (vessels.sum() + shot.masks["vessels"].sum()))
    assert all(count >= 0.8 * len(shots) for count in right.values()), right
    assert np.mean(overlap) > 0.6


@pytest.mark.xfail(reason="weights of the first round only: disc Dice 0.85 on these", strict=True)
def test_held_out_discs_and_sides(shared_data, parse):
    found_right, overlaps = [], []
    for image, item in real(shared_data, "papila", 6):
        truth = np.asarray(Image.open(shared_data / "fundus" / item["optic_disc"]).convert("L")) > 0
        disc = parse(image).anatomy[0].numpy() > 0
        overlaps.append(2 * (disc & truth).sum() / (disc.sum() + truth.sum()))
    assert np.mean(overlaps) > 0.88
    for image, item in real(shared_data, "grape", 12):
        side = eye_side(parse(image).landmarks)
        if side is not None:
            found_right.append(side == item["laterality"])
    assert len(found_right) >= 8 and np.mean(found_right) > 0.9


def test_junctions_survive_a_small_rotation_and_brightening(shared_data, parse):
    kept = total = 0
    angle = np.deg2rad(5)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    for image, _ in real(shared_data, "mfiddr", 3) + real(shared_data, "ridb", 3) + real(shared_data, "grape", 4):
        one = parse(image).landmarks["junctions"].numpy()
        plain = image.as_tensor().numpy()
        # on the photograph's own black ground, so that nothing is cut off
        pad = 40
        moved = np.pad(plain, ((0, 0), (pad, pad), (pad, pad)))
        moved = np.clip(1.15 * ndimage.rotate(moved, -5, axes=(1, 2), reshape=False, order=1), 0, 1)
        two = parse(torch.from_numpy(moved.astype(np.float32))).landmarks["junctions"].numpy() - pad
        centre = np.array([plain.shape[2] - 1, plain.shape[1] - 1]) / 2
        if len(one) and len(two):
            at = (one - centre) @ turn.T + centre
            distance = np.hypot(*(at[:, None] - two[None]).transpose(2, 0, 1)).min(1) * 512 / max(plain.shape[1:])
            kept += int((distance <= 8).sum())
        total += len(one)
    assert total > 60 and kept / total >= 0.8, (kept, total)


QUIRKS = {
    "nearly black": lambda x: 0.12 * x,
    "over-exposed": lambda x: (1.6 * x + 0.1 * (x > 0.05)).clip(0, 1),
    "greyscale": lambda x: x.mean(0, keepdim=True).expand(3, -1, -1),
    "one channel": lambda x: x.mean(0, keepdim=True),
    "rim flare": lambda x: (x + 0.5 * torch.sigmoid((torch.arange(SIZE) - 0.9 * SIZE) / 6) * (x.sum(0) > 0.2)).clip(
        0, 1
    ),
    "off-centre": lambda x: torch.nn.functional.pad(x, (90, 0, 0, 60)),
    "squeezed": lambda x: torch.nn.functional.interpolate(x[None], size=(SIZE, int(0.85 * SIZE)), mode="bilinear")[0],
    "no black border": lambda x: x[:, 56:-56, 56:-56],
}


@pytest.mark.parametrize("quirk", QUIRKS)
def test_quirks_give_the_right_place_or_none(parse, quirk):
    """A disc that is found is at the disc's place; most are found."""
    found = wrong = total = 0
    for image, shot in phantoms():
        changed = QUIRKS[quirk](image)
        truth = np.asarray(shot.landmarks["optic_disc"], dtype=float).reshape(-1, 2)[0]
        radius = np.sqrt(shot.masks["optic_disc"].sum() / np.pi)
        if quirk == "off-centre":
            truth = truth + (90, 0)
        elif quirk == "squeezed":
            truth = truth * (int(0.85 * SIZE) / SIZE, 1)
        elif quirk == "no black border":
            truth = truth - 56
            if not (radius < truth[0] < SIZE - 112 - radius and radius < truth[1] < SIZE - 112 - radius):
                continue
        parsed = parse(changed)
        assert parsed.anatomy.shape == (3, *changed.shape[1:])
        at = parsed.landmarks["optic_disc"].numpy()
        total += 1
        found += len(at) > 0
        wrong += len(at) > 0 and np.hypot(*(at[0] - truth)) > radius
        assert len(at) or any("optic disc" in problem for problem in parsed.problems)
    assert total >= 3 and found >= 0.7 * total and wrong <= 0.1 * total, (found, wrong, total)


def test_disc_at_the_edge_of_the_image(parse):
    """Cut through the disc: it is found where it is, or it is said to be missing."""
    for image, shot in phantoms():
        x = int(np.asarray(shot.landmarks["optic_disc"]).reshape(-1, 2)[0, 0])
        cut = image[:, :, :x] if shot.laterality == "R" else image[:, :, x:]
        truth = shot.masks["optic_disc"][:, :x] if shot.laterality == "R" else shot.masks["optic_disc"][:, x:]
        parsed = parse(cut)
        disc = parsed.anatomy[0].numpy() > 0
        if disc.any():
            near = ndimage.binary_dilation(truth, iterations=int(np.sqrt(truth.sum()) / 2))
            assert (disc & near).sum() > 0.6 * disc.sum()
        else:
            assert any("optic disc" in problem for problem in parsed.problems)


def test_nothing_to_see_is_said():
    parsed = ParseFundusAnatomy()(torch.zeros(3, 100, 120))
    assert not any(len(points) for points in parsed.landmarks.values())
    text = "; ".join(parsed.problems)
    assert "black" in text and "optic disc not found" in text and "fovea not found" in text and "junction" in text
    assert "of one colour" in ParseFundusAnatomy()(torch.ones(3, 100, 120)).problems[0]
    for bad in (torch.zeros(3, 4), torch.full((3, 8, 8), float("nan"))):
        with pytest.raises(ValueError, match="expected an image|NaN"):
            ParseFundusAnatomy()(bad)


def test_given_masks_and_points_go_before_the_network(tmp_path, parse):
    image, shot = next(iter(phantoms()))
    mask = np.zeros((SIZE, SIZE), np.uint8)
    mask[10:30, 20:50] = 255
    Image.fromarray(mask).save(tmp_path / "disc.png")
    item = {"image": image, "optic_disc": str(tmp_path / "disc.png"), "fovea_center": [100.0, 90.0]}
    out = ParseFundusAnatomyd()(item)
    assert out["anatomy"][0].sum() == 600 and out["landmarks"]["fovea"].tolist() == [[100.0, 90.0]]
    assert torch.equal(out["anatomy"][1], parse(image).anatomy[1])
    assert out["anatomy_quality"]["source"] == "masks+network"
    graph = BuildAnatomyGraphd(modality="fundus")(out)["graph"]
    assert "optic disc" in graph.node_name and "macula" in graph.node_name


def test_graph_of_a_real_photograph_has_all_types(shared_data):
    ((image, _),) = real(shared_data, "ridb", 1)
    square = torch.nn.functional.pad(image.as_tensor(), (0, 0, 86, 86))
    graph = BuildAnatomyGraphd(modality="fundus")(ParseFundusAnatomyd()({"image": square}))["graph"]
    assert set(graph.node_type.tolist()) == {0, 1, 2, 3} and 20 <= graph.num_nodes <= 34
