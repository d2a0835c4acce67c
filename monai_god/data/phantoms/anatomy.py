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
"""What a phantom chest X-ray is drawn from: the patient's anatomy, a visit, a scanner, as random parameters.

All lengths in mm. The spreads are those of adults' films: width of the thorax, ratio of its height to its width,
cardiothoracic ratio, position and scale on the film.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .raster import Vector

__all__ = ["Anatomy", "Scanner", "Visit", "draw_anatomy", "draw_scanner", "draw_visit"]


@dataclass(frozen=True)
class Anatomy:
    """What a patient keeps from film to film.

    Pairs are (right, left) unless said otherwise.

    Args:
        female: draws breasts, and a smaller thorax.
        half_width: greatest half-width of the rib cage's inside.
        half_depth: half of its depth from back to front.
        height: apex of the lungs to the dome of the right diaphragm, at full breath.
        wall: thickness of the chest wall at the sides (habitus).
        cage: relative bumps of the cage's outline, [2 sides, 4 heights].
        dome: how much lower than ``height`` each dome stands.
        dome_drop: from the dome down to the costophrenic angle.
        medial: distance of the lungs from the midline.
        heart_scale: width and height, relative.
        heart_shift: offset of the heart's centre (x, y).
        heart_turn: radians, upright to lying.
        heart_waves: relative Fourier terms of its outline, [3, 2].
        arch: aortic arch: height, radius, how far it stands out.
        arch_calcium: 0 to 1.
        bulge: prominence of the pulmonary trunk.
        bend: the spine's sideways bend: three sine terms.
        spine_size: relative.
        bone: density of the skeleton, relative.
        rib_first: height of the first rib's back end; ``rib_pitch`` from rib to rib, ``rib_drop`` from back to front,
            relative, ``rib_steps`` their irregularity [2, 11], ``rib_height`` half the height of a rib.
        rib_scar: a healed fracture: index of the rib (-1 for none) and its angle.
        clavicle: offsets of the clavicles' control points [2, 4, 3].
        scapula: height, width, and turn of the blades.
        shoulder: offset of the shoulder joints outwards and down.
        breast: distance from the midline, height, radius, thickness.
        markings: strength of the vessels.
        hila: offsets of the hila [2, 2].
        granulomas: calcified spots: (side, across, along, radius) each.
        fissure: strength of the minor fissure's line, 0 for unseen.
        sternal_wires: wires after heart surgery.
        pacemaker: -1 none, else the first visit that shows it.
        frailty: how much disease the patient's visits bring.
        habit: the usual pose (yaw, pitch, roll, breath, arms).
    """

    female: bool
    half_width: float
    half_depth: float
    height: float
    wall: float
    cage: Vector
    dome: tuple[float, float]
    dome_drop: tuple[float, float]
    medial: tuple[float, float]
    heart_scale: tuple[float, float]
    heart_shift: tuple[float, float]
    heart_turn: float
    heart_waves: Vector
    arch: tuple[float, float, float]
    arch_calcium: float
    bulge: float
    bend: Vector
    spine_size: float
    bone: float
    rib_first: float
    rib_pitch: float
    rib_drop: float
    rib_steps: Vector
    rib_height: float
    rib_scar: tuple[int, float]
    clavicle: Vector
    scapula: tuple[float, float, float]
    shoulder: tuple[float, float]
    breast: tuple[float, float, float, float]
    markings: float
    hila: Vector
    granulomas: Vector
    fissure: float
    sternal_wires: bool
    pacemaker: int
    frailty: float
    habit: Vector


def draw_anatomy(rng: np.random.Generator) -> Anatomy:
    """Draw a patient."""
    n = rng.normal
    female = bool(rng.random() < 0.45)
    build = n()  # stout or slender
    age = float(rng.uniform(0, 1))
    enlarged = max(0.0, n(0.0, 0.09)) + 0.05 * age
    return Anatomy(
        female=female,
        half_width=float(np.clip(n(131 if female else 143, 7.5), 112, 165)),
        half_depth=float(np.clip(84 + 8 * build + n(0, 7), 64, 112)),
        height=float(np.clip(n(208 if female else 218, 16) - 8 * build, 165, 260)),
        wall=float(np.clip(24 + 9 * build + n(0, 4), 11, 60)),
        cage=n(0, [0.05, 0.035, 0.022, 0.022], (2, 4)) * 0.4 + n(0, [0.05, 0.035, 0.022, 0.022], (1, 4)),
        dome=(float(n(0, 3)), float(n(13, 7))),
        dome_drop=(float(np.clip(n(40, 8), 20, 60)), float(np.clip(n(37, 8), 18, 60))),
        medial=(float(n(17, 2)), float(n(20, 2.5))),
        heart_scale=(float(np.clip(n(0.93, 0.07) + enlarged, 0.72, 1.35)), float(n(0.98, 0.06) + 0.5 * enlarged)),
        heart_shift=(float(n(0, 5)), float(n(0, 6))),
        heart_turn=float(n(0.09 * build, 0.12)),
        heart_waves=n(0, 0.030, (3, 2)),
        arch=(float(n(62, 6)), float(n(15 + 3 * age, 2.5)), float(np.clip(n(27 + 7 * age, 4), 19, 44))),
        arch_calcium=float(max(0.0, age - 0.55) * 2 * rng.random()),
        bulge=float(n(0, 1)),
        bend=n(0, [6, 4, 2.0]) * (2.3 if rng.random() < 0.15 else 1.0),
        spine_size=float(n(0.95 if female else 1.05, 0.05)),
        bone=float(np.clip(n(1.1 - 0.35 * age, 0.12), 0.5, 1.4)),
        rib_first=float(n(-14, 4)),
        rib_pitch=float(n(23.0, 1.3)),
        rib_drop=float(n(1.0, 0.10)),
        rib_steps=n(0, 1.6, (2, 11)),
        rib_height=float(n(6.0 if female else 6.8, 0.5)),
        rib_scar=(int(rng.integers(3, 9)) if rng.random() < 0.15 else -1, float(rng.uniform(1.0, 1.8))),
        clavicle=n(0, 3.0, (1, 4, 3)) + n(0, 1.5, (2, 4, 3)),
        scapula=(float(n(1.0, 0.07)), float(n(1.0, 0.08)), float(n(0, 0.12))),
        shoulder=(float(n(0, 6)), float(n(0, 9))),
        breast=(
            float(n(82, 8)),
            float(n(175, 16)),
            float(np.clip(n(58, 9) + 6 * build, 36, 85)),
            float(np.clip(n(24, 9) + 6 * build, 5, 48)),
        ),
        markings=float(np.exp(n(0, 0.18))),
        hila=n(0, 5, (2, 2)),
        granulomas=np.column_stack(
            [rng.integers(0, 2, 3), rng.uniform(0.15, 0.9, 3), rng.uniform(0.1, 0.9, 3), rng.uniform(1.2, 4.0, 3)]
        )[: int(rng.choice([0, 1, 2, 3], p=[0.55, 0.25, 0.12, 0.08]))],
        fissure=float(max(0.0, n(0.1, 0.5))),
        sternal_wires=bool(rng.random() < 0.1),
        pacemaker=int(rng.integers(0, 3)) if rng.random() < 0.1 else -1,
        frailty=float(rng.beta(1.2, 1.8)),
        habit=n(0, [0.018, 0.035, 0.012, 0.35, 0.5]),
    )


@dataclass(frozen=True)
class Visit:
    """What changes from film to film of one patient.

    Args:
        view: PA or AP.
        day: days since the first film.
        yaw, pitch, roll: pose in radians.
        shift: of the beam's centre on the film.
        field: width of the film.
        breath: 0 a full breath, negative less.
        shoulders: raised by so much; ``arms`` 0 at the side to 1 abducted; ``scapulae`` moved outwards.
        lung_level, dense_level: grey levels aimed at for the lungs and the mediastinum.
        scatter: scattered part of the beam.
        weight: change of the chest wall.
        water: interstitial fluid, 0 none.
        gas: size of the stomach's bubble, 0 none; ``gas_at`` its place.
        blotches: consolidations: (side, across, along, radius, strength) each.
        effusion: height of the fluid (right, left), 0 none.
        pneumothorax: width of the air (right, left), 0 none.
        heart: relative width against the patient's usual.
        wires: ECG leads.
        central_line, airway_tube, stomach_tube, drain: devices.
    """

    view: str
    day: int
    yaw: float
    pitch: float
    roll: float
    shift: tuple[float, float]
    field: float
    breath: float
    shoulders: Vector
    arms: float
    scapulae: float
    lung_level: float
    dense_level: float
    scatter: float
    weight: float
    water: float
    gas: float
    gas_at: tuple[float, float]
    blotches: Vector
    effusion: tuple[float, float]
    pneumothorax: tuple[float, float]
    heart: float
    wires: int
    central_line: bool
    airway_tube: bool
    stomach_tube: bool
    drain: bool


def draw_visit(rng: np.random.Generator, anatomy: Anatomy, number: int) -> Visit:
    """Draw the film of visit ``number`` of a patient."""
    n, u = rng.normal, rng.random
    yaw, pitch, roll, breath, arms = anatomy.habit
    bedside = bool(u() < 0.2 + 0.5 * anatomy.frailty)
    ill = anatomy.frailty * (1.5 if bedside else 0.7)
    blotches = int(rng.poisson(1.3 * ill))
    sick_side = rng.integers(0, 2)
    effusion = [float(rng.uniform(8, 80)) if u() < 0.32 * ill else 0.0 for _ in range(2)]
    air = [float(rng.uniform(8, 30)) if u() < 0.04 * ill else 0.0 for _ in range(2)]
    shrink = 1.0 + (0.09 if bedside else 0.0)
    return Visit(
        view="AP" if bedside else "PA",
        day=0 if number == 0 else int(number * 40 + rng.integers(0, 38)),
        yaw=float(yaw + n(0, 0.055 if bedside else 0.03)),
        pitch=float(pitch + (n(-0.10, 0.10) if bedside else n(0.0, 0.05))),
        roll=float(roll + n(0, 0.05 if bedside else 0.022)),
        shift=(float(n(0, 11 if bedside else 6)), float(n(0, 16 if bedside else 10))),
        field=float(np.clip(shrink * (2.55 * anatomy.half_width + n(35, 17)), 330, 480)),
        breath=float(min(1.0, breath + (n(-1.5, 0.9) if bedside else n(-0.2, 0.6)))),
        shoulders=n(0, 7, 2) * 0.5 + n(-6 if bedside else 0, 7),
        arms=float(np.clip(arms * 0.2 + (n(0.15, 0.2) if bedside else n(0.6, 0.25)), 0, 1)),
        scapulae=float(n(-24 if bedside else 4, 11)),
        lung_level=float(n(0.36 if bedside else 0.27, 0.065)),
        dense_level=float(n(0.78 if bedside else 0.82, 0.05)),
        scatter=float(np.clip(n(0.9 if bedside else 0.6, 0.2), 0.2, 1.5)),
        weight=float(n(0, 3)),
        water=float(max(0.0, n(-0.3, 0.8)) * ill),
        gas=float(max(0.0, n(8, 14))),
        gas_at=(float(n(70, 12)), float(n(28, 8))),
        blotches=np.column_stack(
            [
                np.where(rng.random(blotches) < 0.7, sick_side, 1 - sick_side),
                rng.uniform(0.1, 0.9, blotches),
                rng.beta(3, 1.6, blotches),
                rng.uniform(9, 42, blotches),
                rng.uniform(0.25, 0.95, blotches),
            ]
        ),
        effusion=(effusion[0], effusion[1]),
        pneumothorax=(air[0], air[1]),
        heart=float(1.0 + n(0, 0.025)),
        wires=int(rng.integers(1, 5)) if u() < (0.7 if bedside else 0.1) else 0,
        central_line=bool(u() < (0.35 if bedside else 0.05)),
        airway_tube=bool(u() < (0.2 if bedside else 0.0)),
        stomach_tube=bool(u() < (0.2 if bedside else 0.02)),
        drain=bool(u() < 0.06 * ill),
    )


@dataclass(frozen=True)
class Scanner:
    """What a room and its vendor leave on a film.

    Args:
        gamma: of the film's curve.
        detail: gain of the local contrast, ``detail_mm`` its scale.
        noise: relative.
        letter: ``L``, ``R`` or empty; ``style`` 0 to 3, ``letter_at`` its place in parts of the film, ``letter_size``
            mm, ``letter_turn`` radians.
        border: 0 none, 1 black collimation, 2 white frame, 3 black with round corners; ``border_width`` left, top,
            right, bottom in parts of the film.
    """

    gamma: float
    detail: float
    detail_mm: float
    noise: float
    letter: str
    style: int
    letter_at: tuple[float, float]
    letter_size: float
    letter_turn: float
    border: int
    border_width: tuple[float, float, float, float]


def draw_scanner(rng: np.random.Generator, artefact: bool) -> Scanner:
    """Draw a scanner.

    Args:
        rng: random numbers.
        artefact: a strong, always visible signature (marker, border, curve) instead of the ordinary mild differences
            between films.
    """
    letter = str(rng.choice(["L", "R"]))
    outwards = 1.0 if letter == "L" else -1.0
    widths = rng.uniform(0.01, 0.06, 4) if artefact else rng.uniform(0, 0.05, 4) * (rng.random(4) < 0.5)
    return Scanner(
        gamma=float(np.exp(rng.normal(0, 0.30 if artefact else 0.14))),
        detail=float(rng.choice([0.0, 0.35, 0.8, 1.4], p=[0.45, 0.3, 0.17, 0.08])),
        detail_mm=float(rng.uniform(6, 18)),
        noise=float(np.exp(rng.normal(0, 0.45))),
        letter=letter if artefact or rng.random() < 0.75 else "",
        style=int(rng.integers(0, 4)),
        letter_at=(0.5 + outwards * float(rng.uniform(0.32, 0.44)), float(rng.uniform(0.06, 0.2))),
        letter_size=float(rng.uniform(9, 20)),
        letter_turn=float(rng.normal(0, 0.12) - (np.pi / 2 if rng.random() < 0.12 else 0.0)),
        border=int(rng.choice([0, 1, 2, 3], p=[0.0, 0.4, 0.3, 0.3] if artefact else [0.7, 0.15, 0.05, 0.1])),
        border_width=(float(widths[0]), float(widths[1]), float(widths[2]), float(widths[3])),
    )
