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
"""Phantom chest X-rays: patients drawn procedurally, radiographed through a model of the beam, with exact masks.

A patient is a set of anatomical parameters; a visit adds pose, breath, disease, devices, exposure and noise
(:mod:`.anatomy`). Bones, vessels and devices are tubes in three dimensions, lungs, heart and body are path lengths
along the beam; their sum times the attenuation coefficients gives the primary beam, scatter is added, and a film
curve turns it into grey values. Nothing is taken from a real image.

Frame of a patient: x to the patient's left (right on the film), y towards the feet with 0 at the apices of the lungs,
z forwards, in mm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import cos, sin, tan
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw
from scipy.interpolate import PchipInterpolator

from .anatomy import Anatomy, Scanner, Visit, draw_anatomy, draw_scanner, draw_visit
from .common import Artefact, check_settings, stream
from .raster import Array, Splatter, Vector, blur, curve, resize, smooth_noise, stagger

__all__ = ["ORGANS", "CXRPhantom", "PhantomFilm"]

ORGANS = ("left_lung", "right_lung", "heart")

# Linear attenuation per mm at the mean energy of a chest exposure: soft tissue, and what bone and metal have beyond it.
_MU_SOFT, _MU_BONE, _MU_METAL = 0.0195, 0.036, 0.5
# An inflated lung has a quarter of the density of soft tissue.
_LACK = 0.74
# Depth (z) of the planes in which flat structures lie.
_Z_LUNG, _Z_HEART, _Z_SPINE, _Z_BREAST = 0.0, 28.0, -58.0, 100.0

# Grid (mm) of the tables over heights and over distances from the midline.
_GRID = np.arange(-60.0, 420.0)
# Height of the beam's centre.
_BEAM_Y = 124.0

# Half-width of the rib cage's inside by depth below the apex, relative to its greatest.
_CAGE_Y = np.array([-40, -16, -8, 0, 8, 19, 30, 43, 56, 80, 107, 134, 160, 187, 213, 245, 330], dtype=np.float64)
_CAGE_W = (
    np.array([20, 33, 39, 46, 53, 60, 66, 72, 77.5, 84, 88.8, 92.2, 95, 97.2, 99, 100, 100], dtype=np.float64) / 100
)
# The heart's outline: angle (degrees, 0 to the patient's left, 90 to the feet) and radius (mm) of an average adult.
_HEART_DEG = np.array([8, 22, 34, 45, 59, 92, 126, 157, 171, 196, 223, 242, 256, 273, 299, 328, 350], dtype=np.float64)
_HEART_MM = np.array([69, 77, 79, 75, 68, 60, 62, 71, 73, 70, 72, 72, 68, 61, 51, 50, 58], dtype=np.float64)
# Ribs 1 to 11: fall from back to front (mm), azimuth of the front end (radians from the back).
_RIB_FALL = np.array([34, 54, 68, 79, 89, 97, 103, 107, 106, 94, 66], dtype=np.float64)
_RIB_END = np.array([2.72, 2.70, 2.66, 2.62, 2.56, 2.50, 2.40, 2.26, 2.10, 1.92, 1.65], dtype=np.float64)

# Streams of random numbers, one for each thing, so that a change in one leaves the others as they are.
_ANATOMY, _LUNGS, _VISIT, _TEXTURE, _SCANNER = range(5)


@dataclass(frozen=True)
class PhantomFilm:
    """One phantom radiograph.

    Args:
        image: uint8 [size, size], bright is dense.
        masks: bool [size, size] by organ: ``left_lung`` (image right), ``right_lung``, ``heart``. The lungs are the
            pleural cavities above the domes of the diaphragm, with the part behind the heart; disease does not change
            them.
        view: ``PA`` or ``AP``.
        day: days since the patient's first film.
        visit: number of the visit, from 0.
    """

    image: npt.NDArray[np.uint8]
    masks: Mapping[str, npt.NDArray[np.bool_]]
    view: str
    day: int
    visit: int


class CXRPhantom:
    """A phantom patient, who can be radiographed at any number of visits.

    Args:
        seed: of the set of patients; with ``patient`` and the number of the visit it determines every pixel.
        patient: number of the patient in the set.

    Example::

        film = CXRPhantom(seed=0, patient=3).radiograph(visit=1, size=512)
    """

    def __init__(self, seed: int = 0, patient: int = 0) -> None:
        if seed < 0 or patient < 0:
            raise ValueError(f"seed and patient must be 0 or more, got {seed} and {patient}.")
        self.seed = seed
        self.patient = patient
        self.anatomy = draw_anatomy(stream(seed, patient, _ANATOMY))
        self._trees = [_vessel_tree(stream(seed, patient, _LUNGS, side), side, self.anatomy) for side in (0, 1)]

    def radiograph(self, visit: int, size: int = 512, artefact: Artefact = "none") -> PhantomFilm:
        """Take the film of one visit.

        Args:
            visit: number of the visit, from 0; any order.
            size: pixels per side, 64 or more.
            artefact: ``none``: ordinary, mild differences between films (marker or none, film curve, rarely a
                border), drawn anew for each;
                ``follows_patient``: a strong signature (marker, border, film curve) that is the same in all films of
                    the patient;
                ``shuffled``: such a signature, drawn anew for each film. Anatomy, pose, disease and masks do not
                    depend on it.

        Returns:
            The film with its masks.

        Raises:
            ValueError: on a size below 64, a negative visit, or an unknown artefact.
        """
        check_settings(size, artefact, visit=visit)
        key = (0,) if artefact == "follows_patient" else (1, visit)
        scanner = draw_scanner(stream(self.seed, self.patient, _SCANNER, *key), artefact != "none")
        drawn = draw_visit(stream(self.seed, self.patient, _VISIT, visit), self.anatomy, visit)
        exposure = _Exposure(
            self.anatomy, self._trees, drawn, visit, size, stream(self.seed, self.patient, _TEXTURE, visit)
        )
        return PhantomFilm(exposure.develop(scanner), exposure.masks, drawn.view, drawn.day, visit)


@dataclass(frozen=True)
class _Tree:
    """
    Vessels of a lung as quadratic curves: control points [S, 3 points, 3] (outwards, y, z from the hilum) and radii
    [S].
    """

    control: Vector
    radius: Vector


def _hilum(anatomy: Anatomy, side: int) -> tuple[float, float]:
    out, down = anatomy.hila[side] * (0.6, 1.0)
    return (40.0 + out, 92.0 + down) if side == 0 else (41.0 + out, 80.0 + down)


def _vessel_tree(rng: np.random.Generator, side: int, anatomy: Anatomy) -> _Tree:
    """Branching vessels of one lung, fixed for a patient."""
    roots = 11
    angle = np.deg2rad(np.linspace(-78, 88, roots) + rng.normal(0, 9, roots))
    start = np.column_stack([rng.normal(2, 4, roots), np.linspace(-16, 24, roots), rng.normal(0, 8, roots)])
    radius = np.clip(rng.normal(2.5, 0.5, roots) * (1 + 0.35 * np.sin(angle)), 1.3, 4.2) * anatomy.markings
    length = rng.uniform(20, 32, roots)
    lift = rng.normal(0, 0.55, roots)
    out0, down0 = _hilum(anatomy, side)
    controls, radii = [], []
    for _ in range(8):
        direction = np.column_stack([np.cos(angle) * np.cos(lift), np.sin(angle) * np.cos(lift), np.sin(lift)])
        end = start + direction * length[:, None]
        middle = (start + end) / 2 + rng.normal(0, 0.07, start.shape) * length[:, None]
        controls.append(np.stack([start, middle, end], 1))
        radii.append(radius)
        # Twigs that leave the lung, or are too thin to see, end.
        out, down = end[:, 0] + out0, end[:, 1] + down0
        cage = np.interp(down, _CAGE_Y, _CAGE_W) * anatomy.half_width
        alive = (out > 18) & (out < cage - 7) & (down > 5) & (down < anatomy.height + 16) & (radius > 0.42)
        if not alive.any():
            break
        # Each goes on as two: a stem that bends a little and a branch that leaves it.
        fork = np.deg2rad(rng.uniform(20, 58, alive.sum())) * rng.choice([-1, 1], alive.sum())
        bend = -fork * rng.uniform(0.15, 0.45, alive.sum())
        start = np.concatenate([end[alive]] * 2)
        angle = np.concatenate([angle[alive] + bend, angle[alive] + fork])
        lift = np.concatenate([lift[alive]] * 2) * 0.8 + rng.normal(0, 0.3, 2 * alive.sum())
        radius = np.concatenate([radius[alive] * 0.86, radius[alive] * rng.uniform(0.45, 0.75, alive.sum())])
        length = np.concatenate([length[alive] * 0.88, length[alive] * 0.8]) * rng.uniform(0.75, 1.2, 2 * alive.sum())
    return _Tree(np.concatenate(controls), np.concatenate(radii))


class _Exposure:
    """One film in the making."""

    def __init__(
        self,
        anatomy: Anatomy,
        trees: Sequence[_Tree],
        visit: Visit,
        number: int,
        size: int,
        rng: np.random.Generator,
    ) -> None:
        self.a, self.trees, self.v, self.number, self.size, self.rng = anatomy, trees, visit, number, size, rng
        self.mm = visit.field / size
        # The tube stands far behind a standing patient, nearer in front of one in bed.
        self.source, self.detector = (1800.0, 140.0) if visit.view == "PA" else (1150.0, -140.0)
        self.density = max(0.5, size / 512)  # samples along the tubes
        axis = (np.arange(size, dtype=np.float32) + 0.5 - size / 2) * np.float32(self.mm)
        du, dv = axis[None, :] - np.float32(visit.shift[0]), axis[:, None] - np.float32(visit.shift[1])
        c, s = cos(visit.roll), sin(visit.roll)
        self._u, self._v = c * du + s * dv, c * dv - s * du
        area = (self.mm / self._magnification(0.0)) ** 2
        self.soft, self.bone, self.metal = (Splatter(size, float(area)) for _ in range(3))
        self._cage()
        self._lungs_and_heart()

    # ---- geometry

    def _magnification(self, z: Any) -> Any:
        """Magnification at depth z, a number or an array."""
        return self.source / (self.source - abs(self.detector - z))

    def project(self, points: Vector) -> tuple[Vector, Vector]:
        """Pixel coordinates (column, row) of points [..., 3]."""
        x, y, z = points[..., 0], points[..., 1], points[..., 2]
        m = self._magnification(z)
        u = m * (x * cos(self.v.yaw) + z * sin(self.v.yaw))
        v = m * ((y - _BEAM_Y) * cos(self.v.pitch) + z * sin(self.v.pitch))
        c, s = cos(self.v.roll) / self.mm, sin(self.v.roll) / self.mm
        col = c * u - s * v + (self.v.shift[0] / self.mm + self.size / 2)
        row = s * u + c * v + (self.v.shift[1] / self.mm + self.size / 2)
        return col, row

    def plane(self, z: float, step: int = 1) -> tuple[Array, Array]:
        """Coordinates (x, y) of the pixels' rays in the plane at depth z, every ``step`` pixels."""
        m = self._magnification(z)
        u, v = self._u[::step, ::step], self._v[::step, ::step]
        x = u * (1 / (m * cos(self.v.yaw))) - z * tan(self.v.yaw)
        y = v * (1 / (m * cos(self.v.pitch))) - (z * tan(self.v.pitch) - _BEAM_Y)
        return x, y

    def tube(
        self,
        into: Splatter,
        points: Vector,
        radius: npt.ArrayLike,
        wall: npt.ArrayLike | None = None,
        strength: npt.ArrayLike = 1.0,
    ) -> None:
        """
        Draw tubes along curves [..., N, 3]; solid, or hollow with a ``wall`` in mm. The rest are numbers or [..., N].
        """
        r, thick, weight = (
            np.broadcast_to(np.asarray(v, dtype=np.float32), points.shape[:-1])
            for v in (radius, 0.0 if wall is None else wall, strength)
        )
        if points.ndim == 2:
            # Sample it finer than the pixels.
            per_mm = float(self._magnification(0.0)) / self.mm
            knots = np.concatenate([[0.0], np.cumsum(np.linalg.norm(np.diff(points, axis=0), axis=1))])
            fine = np.linspace(0, knots[-1], max(4, int(np.ceil(knots[-1] * per_mm * 1.5))))
            points = np.stack([np.interp(fine, knots, points[:, k]) for k in range(3)], -1)
            r, thick, weight = (np.interp(fine, knots, v).astype(np.float32) for v in (r, thick, weight))
        points = points.astype(np.float32)
        col, row = self.project(points)
        step = np.linalg.norm(np.gradient(points, axis=-2), axis=-1)
        dc, dr = np.gradient(col, axis=-1), np.gradient(row, axis=-1)
        norm = np.maximum(np.hypot(dc, dr), 1e-6)
        per_mm = float(self._magnification(0.0)) / self.mm
        across = 2 * float(r.max()) * per_mm
        around = int(np.clip(np.ceil(across * (1.1 if across < 16 else 1.6)), 3, 90))
        # Even steps in angle: the samples lie densest where the chord is steepest.
        angle = np.float32(np.pi) * (stagger(col.size, around).reshape(*col.shape, around) - 0.5)
        s, c = np.sin(angle), np.cos(angle)
        chord = c
        if wall is not None:
            inner = np.maximum(1 - thick / r, 0.0)[..., None]
            chord = c - np.sqrt(np.maximum(inner**2 - s**2, 0.0))
        volume = (2 * np.pi / around) * (weight * r**2 * step)[..., None] * chord * c
        reach = (r * per_mm)[..., None] * s
        into.points(
            col[..., None] - (dr / norm)[..., None] * reach, row[..., None] + (dc / norm)[..., None] * reach, volume
        )

    # ---- lungs, heart, body

    def _cage(self) -> None:
        """Outlines of the lungs by height, on a grid of 1 mm."""
        a, v = self.a, self.v
        y = _GRID
        stretch = a.height / 215.0
        wide = a.half_width * (1 + 0.012 * v.breath)
        bumps = PchipInterpolator([-60, 15, 90, 180, 420], np.vstack([a.cage[:, :1].T, a.cage.T]), axis=0)(y)
        shape = PchipInterpolator(_CAGE_Y * stretch, _CAGE_W)(np.clip(y, -40 * stretch, 330 * stretch))
        self.cage = [wide * shape * (1 + bumps[:, side]) for side in (0, 1)]
        self.cage_depth = (a.half_depth * (1 + 0.02 * v.breath)) * np.clip(shape, 0.35, 1.0) ** 0.7
        apex = 40.0
        knots = np.array([0.0, 1.0, 3.0, 7.0, 13.0, 22.0])
        self.lateral, self.medial = [], []
        for side in (0, 1):
            width = self.cage[side] - 3.0
            top = np.interp(22.0, y, width)
            out = PchipInterpolator(knots, apex + (top - apex) * np.array([0.0, 0.30, 0.48, 0.68, 0.85, 1.0]))(
                np.clip(y, 0, 22)
            )
            near = PchipInterpolator(
                knots, apex + (a.medial[side] - apex) * np.array([0.0, 0.34, 0.56, 0.78, 0.93, 1.0])
            )(np.clip(y, 0, 22))
            if side == 1:
                # The arch of the aorta indents the left lung, the descending aorta runs below it, towards the spine.
                height, radius, stand = a.arch
                bulge = np.sqrt(np.maximum(1 - ((y - height) / (1.25 * radius)) ** 2, 0))
                near = np.maximum(near, (stand + 4) * bulge)
                near = near - np.interp(y, [height, 260], [0.0, 7.0])
            else:
                near = near - np.interp(y, [60, 220], [0.0, 4.0])
            self.lateral.append(np.where(y < 22, out, width))
            # The border that the ray touches lies behind the midplane.
            self.medial.append(near + (1 if side == 1 else -1) * -30.0 * np.tan(v.yaw))

    @staticmethod
    def _look(table: Vector, at: npt.NDArray[np.floating]) -> Array:
        """Values of a table on the grid of 1 mm from -60 at ``at``."""
        place = np.clip(at.astype(np.float32) + np.float32(-_GRID[0]), 0, len(table) - 1.001)
        low = place.astype(np.int32)
        values = table.astype(np.float32)
        step = np.append(np.diff(values), np.float32(0))
        return values[low] + step[low] * (place - low)

    def _dome(self, side: int) -> Vector:
        """Height of the diaphragm by distance outwards from the midline, on a grid of 1 mm from -60."""
        a, v = self.a, self.v
        out = _GRID
        top = a.height + a.dome[side] + 13.0 * v.breath - (0.0 if v.view == "PA" else 4.0)
        middle = 0.55 * a.half_width
        t = (out - middle) / (a.half_width - middle)
        lateral = a.dome_drop[side] * np.maximum(t, 0) ** 2.1
        inner = 13.0 * np.maximum(-t, 0) ** 2.0
        return top + np.minimum(lateral, 90.0) + np.minimum(inner, 24.0)

    def _heart_outline(self) -> tuple[float, float, Vector]:
        """Centre, and radius by angle (720 steps)."""
        a, v = self.a, self.v
        angle = np.linspace(0, 2 * np.pi, 720, endpoint=False)
        deg = np.concatenate([_HEART_DEG - 360, _HEART_DEG, _HEART_DEG + 360])
        radius = PchipInterpolator(deg, np.tile(_HEART_MM, 3))(np.rad2deg(angle))
        for k, (c, s) in enumerate(a.heart_waves, start=2):
            radius = radius * (1 + c * np.cos(k * angle) + s * np.sin(k * angle))
        wide = a.heart_scale[0] * v.heart * (1 - 0.035 * v.breath)
        tall = a.heart_scale[1] * (1 + 0.03 * v.breath)
        turn = a.heart_turn + 0.07 * v.breath
        x, y = radius * np.cos(angle), radius * np.sin(angle)
        x, y = x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn)
        x, y = wide * x, tall * y
        theta = np.arctan2(y, x) % (2 * np.pi)
        order = np.argsort(theta)
        radius = np.interp(angle, theta[order], np.hypot(x, y)[order], period=2 * np.pi)
        # It rests on the diaphragm: its centre follows the domes.
        centre_y = a.height - 27.0 + a.heart_shift[1] + 9.0 * v.breath - 0.35 * 62 * (tall - 1)
        return 22.0 * wide + a.heart_shift[0], centre_y, radius

    def _lungs_and_heart(self) -> None:
        size = self.size
        x, y = self.plane(_Z_LUNG)
        self._lung_xy = (x, y)
        self.masks: dict[str, npt.NDArray[np.bool_]] = {}
        lungs = np.zeros((size, size), np.float32)
        over = np.zeros((size, size), np.float32)
        depth = 2 * self._look(self.cage_depth, y)
        self.lung_parts = []
        for side, name in enumerate(("right_lung", "left_lung")):
            # Only the part of the film that can hold this lung.
            near = np.flatnonzero((-x if side == 0 else x).max(0) > 0)
            part = slice(near[0], near[-1] + 1) if near.size else slice(0)
            out, down = (-x if side == 0 else x)[:, part], y[:, part]
            lateral, medial = self._look(self.lateral[side], down), self._look(self.medial[side], down)
            below = down - self._look(self._dome(side), out)
            inside = (out > medial) & (out < lateral) & (down > 0)
            mask = np.zeros((size, size), np.bool_)
            mask[:, part] = inside & (below < 0)
            self.masks[name] = mask
            across = np.clip(out / np.maximum(lateral, 1), -1, 1)
            chord = depth[:, part] * np.sqrt(np.maximum(1 - across**2, 0)) * inside
            # Medially the lungs give way to the mediastinum, below the dome to the organs that the dome covers.
            g = np.clip((out - medial) / 42.0, 0, 1)
            chord *= 0.14 + 0.86 * g * (1.6 - 0.6 * g)
            lungs[:, part] += chord
            over[:, part] += np.sqrt(np.clip(below / 30.0, 0, 1)) * inside
            self.lung_parts.append((part, out, lateral, below, inside))
        hx, hy, outline = self._heart_outline()
        px, py = self.plane(_Z_HEART)
        px, py = px - hx, py - hy
        reach = float(outline.max())
        rows = np.flatnonzero((np.abs(py) < reach).any(1))
        cols = np.flatnonzero((np.abs(px) < reach).any(0))
        self.masks["heart"] = np.zeros((size, size), np.bool_)
        heart = np.zeros((size, size), np.float32)
        if rows.size and cols.size:
            box = np.s_[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]
            angle = np.arctan2(py[box], px[box])
            at = np.where(angle < 0, angle + np.float32(2 * np.pi), angle) * np.float32(len(outline) / (2 * np.pi))
            low = np.minimum(at.astype(np.int32), len(outline) - 1)
            closed = np.append(outline, outline[0]).astype(np.float32)
            rho = np.hypot(px[box], py[box]) / (closed[low] + np.diff(closed)[low] * (at - low))
            self.masks["heart"][box] = rho < 1
            heart[box] = 125.0 * self.a.heart_scale[0] * np.sqrt(np.maximum(1 - rho**2, 0))
        self.heart_at = (hx, hy)
        self.lungs = np.maximum(lungs - heart, 0.14 * lungs) * (1 - 0.94 * over)

    def _body(self) -> Array:
        """Path length through the body, [size, size]."""
        a, v = self.a, self.v
        step = 2 if self.size >= 256 else 1
        x, y = self.plane(0.0, step)
        wall = a.wall + v.weight
        # Trunk: widest at the armpits and below; its top closes under the shoulders.
        half = (self._look(self.cage[0], y) + self._look(self.cage[1], y)) / 2 + wall
        trunk_y = np.clip((y + 30) / 60, 0, 1)
        half = np.where(y > 250, half - 0.18 * np.minimum(y - 250, 90), half)
        front_back = 2 * (a.half_depth + 0.75 * wall + 10)
        trunk = (
            front_back
            * (0.75 + 0.25 * np.clip(y / 120, 0, 1))
            * np.sqrt(np.maximum(1 - np.abs(x / half) ** 8, 0))
            * np.sqrt(trunk_y * (2 - trunk_y))
        )
        total = trunk**5
        for sign in (-1, 1):
            joint = np.array(self._shoulder(sign)[:2])
            elbow = self._elbow(sign)[:2]
            parts = [
                (np.array([sign * 30.0, -42.0]), joint + (sign * 2.0, 0.0), 46.0 + 0.25 * wall, 44 + 0.4 * wall, 1.4),
                (np.array([sign * 62.0, 26.0]), joint + (0.0, 10.0), 50.0 + 0.3 * wall, 48 + 0.4 * wall, 1.4),
                (joint, elbow, 44 + 0.5 * wall, 38 + 0.4 * wall, 1.3),
            ]
            for start, end, r0, r1, deep in parts:
                total += self._capsule(x, y, start, end, r0, r1, deep) ** 5
        total += (
            self._capsule(x, y, np.array([0.0, -150.0]), np.array([0.0, 10.0]), 52 + 0.3 * wall, 60 + 0.3 * wall, 1.0)
            ** 5
        )
        total += self._capsule(x, y, np.array([0.0, -230.0]), np.array([0.0, -170.0]), 82, 82, 1.0) ** 5
        return resize((total**0.2).astype(np.float32), self.size)

    @staticmethod
    def _capsule(x: Array, y: Array, start: Vector, end: Vector, r0: float, r1: float, deep: float) -> Array:
        (sx, sy), (dx, dy) = start.tolist(), (end - start).tolist()
        px, py = x - sx, y - sy
        t = np.clip((px * dx + py * dy) / (dx * dx + dy * dy), 0, 1)
        away2 = (px - t * dx) ** 2 + (py - t * dy) ** 2
        r = r0 + t * (r1 - r0)
        return 2 * deep * np.sqrt(np.maximum(r**2 - away2, 0))

    def _shoulder(self, sign: int) -> Vector:
        a, v = self.a, self.v
        side = (sign + 1) // 2
        return np.array(
            [sign * (a.half_width + 30 + a.shoulder[0]), 27 + a.shoulder[1] + v.shoulders[side], -8.0 - 10 * v.arms]
        )

    def _elbow(self, sign: int) -> Vector:
        out = np.interp(self.v.arms, [0, 1], [28.0, 130.0])
        return self._shoulder(sign) + np.array([sign * out, np.sqrt(280.0**2 - out**2), 20.0])

    # ---- bones

    def _ribs(self) -> None:
        a, v = self.a, self.v
        count = round(440 * self.density)
        beta = np.linspace(0, 1, count)
        stretch = a.height / 215.0
        around = 2 * max(8, round(15 * self.density))
        phi = np.float32(2 * np.pi) * stagger(count, around)
        c, s = np.cos(phi)[..., None], np.sin(phi)[..., None]
        for side, sign in ((0, -1), (1, 1)):
            for i in range(11):
                end = _RIB_END[i]
                start = 0.1
                alpha = start + (end - start) * beta
                whole = (alpha - start) / (np.pi - start)
                # Upper ribs leave the spine level, lower ones slope at once.
                steep = 0.085 * i
                arch = whole**2 * (3 - 2 * whole) - 0.05 * np.exp(-(((whole - 0.17) / 0.11) ** 2))
                fall = (1 - steep) * arch + steep * 1.25 * whole
                drop = _RIB_FALL[i] * a.rib_drop * stretch**0.5 * (1 - 0.05 * v.breath)
                y = (a.rib_first + a.rib_pitch * i * stretch**0.8) + a.rib_steps[side, i] + drop * fall
                wide = self._look(self.cage[side], y) + 3.0
                deep = self._look(self.cage_depth, y) + 3.0
                out = wide * np.sin(alpha) ** 0.92
                points = np.stack([sign * out, y, -deep * np.cos(alpha) - 6.0], -1)
                if a.rib_scar[0] == i and side == 0:
                    scar = np.exp(-(((alpha - a.rib_scar[1]) / 0.06) ** 2))
                    points[:, 1] += 3.5 * scar
                else:
                    scar = np.zeros(count)
                tangent = np.gradient(points, axis=0)
                step = np.linalg.norm(tangent, axis=1)
                outward = np.stack([points[:, 0] / wide**2, np.zeros(count), (points[:, 2] + 6.0) / deep**2], -1)
                outward /= np.linalg.norm(outward, axis=1, keepdims=True)
                upward = np.cross(tangent, outward)
                upward /= np.maximum(np.linalg.norm(upward, axis=1, keepdims=True), 1e-6)
                high = a.rib_height * (0.9 + 0.25 * beta) * (0.75 if i == 10 else 1.0) * (1 + 0.4 * scar)
                thick = 3.3 * (1 + 0.5 * scar) * np.ones(count)
                fade = np.clip((1 - beta) / 0.04, 0, 1) * (1 - 0.35 * beta)
                axis, up, out_ = (
                    v.astype(np.float32)[:, None] for v in (points, high[:, None] * upward, thick[:, None] * outward)
                )
                arc = np.hypot(high[:, None] * s[..., 0], thick[:, None] * c[..., 0]) * (2 * np.pi / around)
                volume = (arc * ((1 + scar) * step * fade)[:, None]).astype(np.float32)
                ring = c * up + s * out_
                self.bone.points(*self.project(axis + ring), 1.25 * volume)
                self.bone.points(*self.project(axis + 0.55 * ring[:, ::2]), 1.1 * volume[:, ::2])

    def _girdle(self) -> None:
        """Clavicles, scapulae, upper arms."""
        a, v = self.a, self.v
        for sign in (-1, 1):
            side = (sign + 1) // 2
            joint = self._shoulder(sign)
            raised = v.shoulders[side] + a.shoulder[1]
            base = np.array(
                [
                    [13.0, 27.0, 66.0],
                    [52.0, 17.0 + 0.25 * raised, 74.0],
                    [98.0, 2.0 + 0.7 * raised, 36.0],
                    [a.half_width + 14 + a.shoulder[0], -4.0 + raised, 2.0],
                ]
            )
            shift = a.clavicle[min(side, a.clavicle.shape[0] - 1)]
            line = curve((base + shift * (0.5, 0.6, 1.0)) * (sign, 1, 1))
            t = np.linspace(0, 1, len(line))
            ends = np.sqrt(np.clip(np.minimum(t, 1 - t) / 0.03, 0.02, 1))
            self.tube(self.bone, line, (5.6 + 2.2 * np.abs(2 * t - 1) ** 2.5) * ends, wall=1.5)
            self.tube(self.bone, line, 4.0, strength=0.25)
            # Blade of the shoulder, in its own frame: across from its medial border, down from its upper angle.
            tall, wide, turn = a.scapula
            turn = turn + 0.22 + 0.35 * v.arms
            edge = joint + np.array([sign * -6.0, 6.0, -20.0])

            def blade(
                points: Sequence[Sequence[float]],
                edge: Vector = edge,
                sign: int = sign,
                tall: float = tall,
                wide: float = wide,
                turn: float = turn,
            ) -> Vector:
                p = np.asarray(points, dtype=np.float64)
                out, down = p[:, 0] * wide, p[:, 1] * tall
                x = out * np.cos(turn) - down * -np.sin(turn)
                y = down * np.cos(turn) - out * np.sin(turn)
                return np.stack([edge[0] + sign * x, edge[1] + y, edge[2] - 0.35 * (-out)], -1)

            inward = 1.0 - 0.004 * v.scapulae
            _glenoid, neck = (0.0, 0.0), (-8.0, 18.0)
            lower, upper = (-62.0 * inward, 112.0), (-66.0 * inward, -22.0)
            lateral = blade([neck, (-20, 48), (-40 * inward, 86), lower])
            medial = blade([lower, (-74 * inward, 80), (-78 * inward, 30), upper])
            top = blade([upper, (-44 * inward, -25), (-22, -16), (-6, -6)])
            for border, radius, strength in ((lateral, 3.6, 0.75), (medial, 1.6, 0.6), (top, 1.4, 0.5)):
                self.tube(self.bone, curve(border), radius, strength=strength)
            outline = np.concatenate([curve(p, 24) for p in (lateral, medial, top)])
            self._plates.append((outline, 1.1))
            spine = blade([(-76 * inward, 22), (-45 * inward, 2), (-18, -16), (10, -28), (20, -24)])
            t = np.linspace(0, 1)
            self.tube(self.bone, curve(spine), 1.6 + 4.2 * t**2, wall=1.1)
            coracoid = blade([(-12, -8), (-6, -16), (4, -10)])
            self.tube(self.bone, curve(coracoid), 4.2, wall=1.2)
            ring = np.linspace(0, 2 * np.pi)
            socket = blade(np.stack([-4 + 3.5 * np.cos(ring), 2 + 15 * np.sin(ring)], -1).tolist())
            self.tube(self.bone, socket, 0.9, strength=2.0)
            # Upper arm: a round head on a hollow shaft.
            head = joint + np.array([sign * 18.0, 2.0, 6.0])
            elbow = self._elbow(sign)
            along = np.linspace(0, 1, 100)[:, None]
            shaft = head + (0, 8, 0) + along * (elbow - head)
            t = along[:, 0]
            flare = np.exp(-((t / 0.09) ** 2))
            self.tube(self.bone, shaft, 10.5 + 10.0 * flare, wall=3.0 - 2.2 * flare)
            self._spheres.append((head + np.array([sign * -3.0, 0, 0]), 22.0, 0.6))

    def _spine(self) -> Array:
        """The column of vertebrae, as millimetres of bone."""
        a = self.a
        x, y = self.plane(_Z_SPINE)
        out = np.zeros((self.size, self.size), np.float32)
        t = (_GRID + 130) / 480
        bend = sum(amplitude * np.sin(np.pi * k * t + k) for k, amplitude in enumerate(a.bend, start=1))
        d = x - self._look(0.6 * bend, y)
        near = np.abs(d) < 46
        y, d = y[near], d[near]
        half = a.spine_size * np.interp(y, [-140, 0, 130, 320], [11.5, 14.5, 17.0, 23.0]).astype(np.float32)
        stretch = a.height / 215.0
        # Number of the vertebra as a smooth function of height; its fraction is the place within one.
        grid = np.arange(-220.0, 420.0)
        pitch = np.interp(grid, [-140, 0, 300], [16.5, 20.5, 32.0]) * stretch
        number = np.interp(y, grid, np.cumsum(1 / pitch)).astype(np.float32)
        f = number - np.floor(number)
        tall = np.interp(y, grid, pitch).astype(np.float32)
        waist = half * (1 - 0.14 * np.sin(np.pi * np.clip(f / 0.8, 0, 1)))
        chord = 2 * 0.9 * half * np.sqrt(np.maximum(1 - (d / waist) ** 2, 0))
        in_body = np.clip(np.minimum(f, 0.8 - f) * tall / 1.2 + 0.5, 0, 1)
        bone = chord * 0.11 * in_body
        inside = np.clip((waist - np.abs(d)) / 1.0 + 0.5, 0, 1)
        end_plate = np.exp(-((f * tall / 1.3) ** 2)) + np.exp(-(((f - 0.8) * tall / 1.3) ** 2))
        bone += 1.5 * end_plate * inside
        bone += 1.1 * np.exp(-(((np.abs(d) - waist) / 1.3) ** 2)) * in_body
        # Pedicles (rings), spinous process (drop), transverse processes.
        ring = np.hypot((np.abs(d) - 0.66 * half) / 3.6, (f - 0.26) * tall / 5.2)
        bone += 1.8 * np.exp(-(((ring - 1) / 0.3) ** 2)) + 0.6 * (ring < 1)
        drop = np.hypot(d / 3.0, (f - 0.72) * tall / 6.5)
        bone += 1.6 * np.exp(-(((drop - 1) / 0.4) ** 2))
        wing = np.exp(-(((f - 0.2) * tall / 3.5) ** 2)) * np.clip((34 - np.abs(d)) / 8, 0, 1) * (np.abs(d) > 0.7 * half)
        bone += 1.6 * wing
        # Processes behind the bodies blur into a band.
        bone += 1.0 * np.exp(-((d / (0.8 * half)) ** 4))
        out[near] = bone
        return out

    # ---- soft structures, disease, devices

    def _mediastinum(self) -> None:
        a, v = self.a, self.v
        b = v.breath
        # Windpipe and main bronchi: air.
        carina = np.array([3.0, 66 + 4 * b, -18.0])
        for path, radius, strength in (
            ([[0, -150, 5], [1, -60, 0], [4, 10, -8], carina], 7.8, -0.85),
            ([carina, carina + (-14, 20, 0), carina + (-30, 36, 2)], 5.8, -0.6),
            ([carina, carina + (18, 18, 0), carina + (40, 30, -2)], 5.2, -0.6),
        ):
            self.tube(self.soft, curve(np.asarray(path, dtype=np.float64)), radius, strength=strength)
        # Roots of the lungs.
        for side, sign in ((0, -1), (1, 1)):
            out, down = _hilum(a, side)
            down += 4 * b
            stem = (
                [(out - 20, down - 8, 5), (out - 2, down + 2, 0), (out + 7, down + 22, -5), (out + 8, down + 46, -12)]
                if side == 0
                else [
                    (out - 22, down - 4, 8),
                    (out - 2, down - 4, 0),
                    (out + 8, down + 14, -10),
                    (out + 6, down + 40, -16),
                ]
            )
            line = curve(np.asarray(stem) * (sign, 1, 1))
            t = np.linspace(0, 1, len(line))
            self.tube(self.soft, line, (7.2 - 3.6 * t) * a.markings**0.5, strength=1.0)
            branch = curve(
                np.asarray([(out - 14, down - 6, 5), (out + 1, down - 18, 0), (out + 9, down - 36, 0)]) * (sign, 1, 1),
            )
            self.tube(self.soft, branch, (5.4 - 2.8 * np.linspace(0, 1, len(branch))) * a.markings**0.5)
        # Trunk of the lung artery, between the arch and the heart's border.
        trunk = curve([(2, 138, 45), (20, 114, 35), (29, 98, 20), (33, 84, 8)])
        t = np.linspace(0, 1, len(trunk))
        fade = np.clip(3 * np.minimum(t, 1 - t), 0, 1)
        self.tube(self.soft, trunk + (1.5 * a.bulge, 4 * b, 0), 13.0 + 1.8 * a.bulge, strength=fade)
        # Arch of the aorta and the aorta going down.
        height, radius, stand = a.arch
        going = np.array([[stand - 8, height, -40], [stand - 9, 130, -55], [stand - 17, 250, -58]])
        self.tube(self.soft, curve(going), 0.72 * radius, strength=0.7 * fade)
        if a.arch_calcium > 0.05:
            turn = np.linspace(-1.9, 0.7)
            shell = np.stack(
                [stand - radius + radius * np.cos(turn), height + radius * np.sin(turn), np.full(turn.shape, -20.0)], -1
            )
            self.tube(self.bone, shell, 0.9, strength=2.0 * a.arch_calcium)
        # Upper right: the great vein.
        vein = curve([(-10, -40, 15), (-17, 40, 15), (-19, 190, 20)])
        self.tube(self.soft, vein, 8.0, strength=fade)

    def _vessels(self) -> None:
        a, v = self.a, self.v
        swell = 1 + 0.12 * v.water
        for side, sign in ((0, -1), (1, 1)):
            tree = self.trees[side]
            out0, down0 = _hilum(a, side)
            reach = a.height + a.dome[side] - down0
            # Thick and thin apart, so that each gets the samples that it needs.
            for low, high, count in ((0.0, 0.8, 20), (0.8, 1.7, 28), (1.7, 9.0, 56)):
                pick = (tree.radius >= low) & (tree.radius < high)
                if not pick.any():
                    continue
                t = np.linspace(0, 1, max(8, round(count * self.density)))[None, :, None]
                p0, p1, p2 = (tree.control[pick, k, None, :] for k in range(3))
                points = (1 - t) ** 2 * p0 + 2 * t * (1 - t) * (2 * p1 - 0.5 * (p0 + p2)) + t**2 * p2
                # Below the hilum they follow the diaphragm, sideways the cage.
                points = points * np.array([1 + 0.012 * v.breath, 1.0, 1.0])
                points[..., 1] *= np.where(points[..., 1] > 0, 1 + 13.0 * v.breath / reach, 1.0)
                points = (points + np.array([out0, down0 + 4 * v.breath, -4.0])) * np.array([sign, 1, 1])
                self.tube(self.vessels, points, swell * tree.radius[pick][:, None], strength=2.0)

    def _disease(self) -> Array:
        """Fraction of air that disease has replaced, [size, size]; draws pleural lines."""
        v = self.v
        size = self.size
        x, y = self._lung_xy
        filled = np.zeros((size, size), np.float32)
        cloud = 0.8 * smooth_noise(self.rng, size, 16) + 0.5 * smooth_noise(self.rng, size, 42)
        fine = smooth_noise(self.rng, size, 110)
        for side_f, across, along, radius, strength in v.blotches:
            side = int(side_f)
            out, down = self.place(side, across, along)
            sx = -out if side == 0 else out
            r2 = (((x - sx) / (1.15 * radius)) ** 2 + ((y - down) / radius) ** 2).astype(np.float32)
            filled += np.float32(strength) * np.exp(-0.9 * r2) * (1 + 0.25 * cloud)
        if v.water > 0:
            filled += np.float32(0.05 * v.water) * np.clip(1 + 0.3 * cloud + 0.2 * fine, 0, 4)
        filled = np.float32(0.85) * np.tanh(np.maximum(filled * (1 + 0.06 * fine), 0) / np.float32(0.85))
        for side, (part, out_map, lateral, below, inside) in enumerate(self.lung_parts):
            here = filled[:, part]
            if v.effusion[side] > 0:
                # Fluid stands higher at the sides; bedside films veil the whole field instead.
                sharp = 5.0 if v.view == "PA" else 22.0
                rim = np.clip(out_map / np.maximum(lateral, 1), 0, 1) ** 3
                level = v.effusion[side] * (0.35 + 0.75 * rim) - 14.0
                wet = 1 / (1 + np.exp(-np.clip((below + level) / sharp, -30, 30)))
                here = np.where(inside, np.maximum(here, 0.93 * wet), here)
            if v.pneumothorax[side] > 0:
                width = v.pneumothorax[side] * np.clip(1.3 - y[:, part] / 190, 0.15, 1.3)
                depth = np.minimum(lateral - out_map, y[:, part] * 1.4)
                empty = np.clip((width - depth) / 1.2, 0, 1) * inside
                self.no_vessels[:, part] = np.maximum(self.no_vessels[:, part], empty)
                here = np.where(inside, here * (1 - empty) - 0.10 * empty, here)
                self.line[:, part] += 1.6 * np.exp(-(((depth - width) / 0.8) ** 2)) * inside
            filled[:, part] = here
        return filled

    def place(self, side: int, across: float, along: float) -> tuple[float, float]:
        """A place in a lung: (outwards, y), from parts across it and along it."""
        down = 8 + along * (float(np.interp(0.5 * self.a.half_width, _GRID, self._dome(side))) - 14)
        near, far = (float(np.interp(down, _GRID, table[side])) for table in (self.medial, self.lateral))
        return near + across * (far - near), down

    def _marks(self) -> None:
        """Small things that a patient keeps: granulomas, a fissure, wires and a pacemaker."""
        a = self.a
        for side_f, across, along, radius in a.granulomas:
            out, down = self.place(int(side_f), across, along)
            self._spheres.append((np.array([out if side_f else -out, down, 10.0]), radius, 0.0))
        if a.fissure > 0.2:
            out, down = self.place(0, 0.3, 0.52)
            far, _ = self.place(0, 0.95, 0.52)
            line = curve([(-out, down - 1, 20), (-(out + far) / 2, down - 5, 30), (-far, down + 3, 20)])
            self.tube(self.soft, line, 0.8, strength=6.0 * min(a.fissure, 1.0))
        if a.sternal_wires:
            turn = np.linspace(0, 2 * np.pi)
            for k in range(5):
                ring = np.stack(
                    [
                        1.0 + 6.5 * np.cos(turn),
                        50.0 + 24 * k + 4.5 * np.sin(turn) + np.cos(turn),
                        np.full(turn.shape, 92.0),
                    ],
                    -1,
                )
                self.tube(self.metal, ring, 0.5)
        if 0 <= a.pacemaker <= self.number:
            turn = np.linspace(0, 2 * np.pi, 40)
            box = np.stack(
                [
                    102 + 21 * np.sign(np.cos(turn)) * np.abs(np.cos(turn)) ** 0.6,
                    38 + 18 * np.sin(turn),
                    np.full(40, 85.0),
                ],
                -1,
            )
            self._metal_plates.append((box, 3.0))
            hx, hy = self.heart_at
            lead = curve(
                [
                    (90, 30, 85),
                    (70, 14, 70),
                    (30, 14, 40),
                    (-14, 40, 20),
                    (-22, 110, 25),
                    (-14, hy + 30, 40),
                    (hx + 18, hy + 42, 55),
                ],
            )
            self.tube(self.metal, lead, 0.75)
            self.tube(self.metal, lead[-2:], 1.4)

    def _devices(self) -> None:
        v, rng = self.v, self.rng
        front = 115.0 if v.view == "PA" else 120.0
        for _ in range(v.wires):
            spot = np.array([rng.choice([-1, 1]) * rng.uniform(60, 125), rng.uniform(15, 215), front])
            away = np.array([rng.uniform(-160, 160), rng.choice([-130.0, 330.0]), front])
            middle = (spot + away) / 2 + np.append(rng.normal(0, 30, 2), 0)
            self.tube(
                self.metal,
                curve(np.stack([spot, (spot + middle) / 2 + np.append(rng.normal(0, 14, 2), 0), middle, away])),
                0.62,
            )
            self._rings += [(spot, 8.0, 0.1), (spot, 2.6, 1.6)]
        hx, hy = self.heart_at
        if v.central_line:
            line = [
                (-46, -95, 30),
                (-34, -40, 20),
                (-20, 10, 12),
                (-19, 60, 15),
                (-21, float(rng.uniform(85, 125)), 20),
            ]
            self.tube(self.metal, curve(line), 0.95, strength=0.5)
        if v.airway_tube:
            line = [(2, -170, 15), (0, -70, 2), (3, float(rng.uniform(8, 48)), -10)]
            path = curve(line)
            self.tube(self.metal, path, 5.0, wall=0.9, strength=0.09)
            self.tube(self.metal, path + np.array([4.0, 0, 0]), 0.6, strength=0.8)
        if v.stomach_tube:
            line = [(0, -170, -20), (4, 0, -35), (8, 120, -38), (14, 222, -20), (50, 285, 10), (90, 300, 15)]
            self.tube(self.metal, curve(line), 1.7, strength=0.22)
        if v.drain:
            side = int(rng.integers(0, 2))
            sign = 2 * side - 1
            far = self.a.half_width
            drain = [
                (sign * (far + 70), 190.0, 0.0),
                (sign * (far + 4), 165, -20),
                (sign * 0.72 * far, 110, -35),
                (sign * 0.6 * far, 50, -30),
            ]
            self.tube(self.metal, curve(drain), 3.6, wall=0.8, strength=0.12)
            self.tube(self.metal, curve(drain), 0.6, strength=0.5)

    # ---- putting it together

    def _polygon(self, outline: Vector, thickness: float) -> Array:
        col, row = self.project(outline)
        canvas = Image.new("L", (self.size, self.size))
        ImageDraw.Draw(canvas).polygon(
            [(float(c) - 0.5, float(r) - 0.5) for c, r in zip(col, row, strict=True)], fill=1
        )
        return np.asarray(canvas, dtype=np.float32) * np.float32(thickness)

    def _ball(self, into: Array, centre: Vector, radius: float, shell: float) -> None:
        """Add the chord of a ball, or of a shell of ``shell`` mm over a spongy inside, to an image."""
        col, row = (float(v) for v in self.project(centre))
        r = radius * float(self._magnification(centre[2])) / self.mm
        c0, c1 = (int(np.clip(v, 0, self.size)) for v in (col - r - 1, col + r + 2))
        r0, r1 = (int(np.clip(v, 0, self.size)) for v in (row - r - 1, row + r + 2))
        if c0 >= c1 or r0 >= r1:
            return
        d2 = ((np.arange(c0, c1) + 0.5 - col)[None, :] / r) ** 2 + ((np.arange(r0, r1) + 0.5 - row)[:, None] / r) ** 2
        whole = 2 * radius * np.sqrt(np.maximum(1 - d2, 0))
        if shell > 0:
            k = (radius - shell) / radius
            hollow = 2 * radius * np.sqrt(np.maximum(k * k - d2, 0))
            whole = whole - 0.9 * hollow
        into[r0:r1, c0:c1] += whole.astype(np.float32)

    def _attenuation(self) -> Array:
        """Sum of path length times attenuation coefficient, [size, size]."""
        a, _v = self.a, self.v
        size = self.size
        area = self.soft.pixel_area
        self.vessels = Splatter(size, area)
        self.no_vessels = np.zeros((size, size), np.float32)
        self.line = np.zeros((size, size), np.float32)
        self._plates: list[tuple[Vector, float]] = []
        self._metal_plates: list[tuple[Vector, float]] = []
        self._spheres: list[tuple[Vector, float, float]] = []
        self._rings: list[tuple[Vector, float, float]] = []
        self._ribs()
        self._girdle()
        self._mediastinum()
        self._vessels()
        self._marks()
        self._devices()
        px = 512 / size
        bone = self.bone.image() + self._spine()
        for outline, thickness in self._plates:
            bone += self._polygon(outline, thickness)
        for centre, radius, shell in self._spheres:
            self._ball(bone, centre, radius, shell)
        bone = 11 * np.tanh(bone / 11)
        bone = blur(bone, max(0.45, 0.75 / px))
        metal = self.metal.image()
        for outline, thickness in self._metal_plates:
            metal += self._polygon(outline, thickness)
        for centre, radius, thickness in self._rings:
            disc = np.zeros((size, size), np.float32)
            self._ball(disc, centre, radius, 0.0)
            metal += np.float32(thickness) * ((disc > 0) & (disc < radius * 1.6))
        metal = blur(metal, max(0.4, 0.6 / px))

        filled = self._disease()
        texture = 1 + 0.012 * smooth_noise(self.rng, size, 30) + 0.014 * smooth_noise(self.rng, size, 110)
        air = self.lungs * (1 - filled) * texture
        vessels = blur(13 * np.tanh(self.vessels.image() / 13), max(0.4, 0.6 / px)) * (1 - self.no_vessels)
        inside = np.clip(air / 25, 0, 1)
        soft = blur(self.soft.image(), max(0.5, 0.9 / px))
        body = self._body()
        if a.female:
            body = body + self._breasts()
        mm = body - _LACK * air + _LACK * vessels * inside + self.line
        mm = mm + np.where(soft > 0, soft * (0.25 + 0.5 * np.clip(air / 40, 0, 1)), soft)
        mm = mm - self._stomach()
        mm = np.maximum(mm, 0)
        # Fat and muscle are not even.
        mm = mm * (1 + 0.012 * smooth_noise(self.rng, size, 14) + 0.006 * smooth_noise(self.rng, size, 60))
        grain = 1 + 0.05 * smooth_noise(self.rng, size, 200)
        return (_MU_SOFT * mm + _MU_BONE * a.bone * bone * grain + _MU_METAL * np.minimum(metal, 4)).astype(np.float32)

    def _breasts(self) -> Array:
        away, height, radius, thick = self.a.breast
        step = 2 if self.size >= 256 else 1
        x, y = self.plane(_Z_BREAST, step)
        height = height - 30 * self.v.arms + (12 if self.v.view == "AP" else 0)
        total = np.zeros_like(x)
        for sign in (-1, 1):
            lower = np.where(y > height, 1.0, 1.9)  # steep below, sloping above
            r2 = ((x - sign * away) / (radius * 1.12)) ** 2 + ((y - height) / (radius * lower)) ** 2
            total += thick * np.maximum(1 - r2, 0) ** np.where(y > height, 0.5, 0.9)
        return resize(total.astype(np.float32), self.size)

    def _stomach(self) -> Array:
        v = self.v
        if v.gas < 4:
            return np.zeros((self.size, self.size), np.float32)
        step = 2 if self.size >= 256 else 1
        x, y = self.plane(10.0, step)
        top = float(np.interp(v.gas_at[0], _GRID, self._dome(1)))
        wobble = 1 + 0.25 * resize(smooth_noise(self.rng, 64, 5), x.shape[0])
        r2 = ((x - v.gas_at[0]) / (1.5 * v.gas)) ** 2 + ((y - top - 6 - v.gas) / v.gas) ** 2
        return resize((1.7 * v.gas * np.sqrt(np.maximum(1 - r2 * wobble, 0))).astype(np.float32), self.size)

    def develop(self, scanner: Scanner) -> npt.NDArray[np.uint8]:
        """Expose and develop the film: uint8 [size, size]."""
        v, rng, size = self.v, self.rng, self.size
        attenuation = self._attenuation()
        primary = np.exp(-attenuation)
        coarse = np.asarray(Image.fromarray(primary).resize((64, 64), Image.Resampling.BOX))
        scatter = np.float32(v.scatter) * (0.25 * resize(blur(np.minimum(coarse, 0.2), 7.0), size) + 0.004)
        signal = primary + np.maximum(scatter, 1e-4)
        seen = -np.log(signal)
        quantum = np.float32(0.0016 * scanner.noise) / np.sqrt(signal)
        white = rng.standard_normal((size, size), dtype=np.float32)
        soft_noise = resize(rng.standard_normal((size // 2, size // 2), dtype=np.float32), size)
        seen = seen + quantum * (0.8 * white + 0.8 * soft_noise)
        # The exposure is set for the lungs; the window puts lungs and mediastinum at their levels.
        lungs = self.masks["left_lung"] | self.masks["right_lung"]
        thin = float(np.quantile(seen[lungs][::7], 0.25))
        thick = float(np.quantile(seen[self.masks["heart"]][::7], 0.7)) if self.masks["heart"].any() else thin + 2
        slope = (v.dense_level - v.lung_level) / max(thick - thin, 0.4)
        grey = v.lung_level + slope * (seen - thin)
        # Toe and shoulder of the film.
        grey = np.where(grey > 0.75, 0.75 + 0.25 * np.tanh((grey - 0.75) / 0.25), grey)
        grey = np.where(grey < 0.14, 0.14 * np.exp((grey - 0.14) / 0.14), grey)
        if scanner.detail > 0:
            base = resize(
                blur(np.ascontiguousarray(grey[::4, ::4], dtype=np.float32), scanner.detail_mm / (4 * self.mm)), size
            )
            grey = grey + np.float32(scanner.detail) * (grey - base)
        grey = np.clip(grey, 0, 1) ** np.float32(scanner.gamma)
        grey = self._sign(grey.astype(np.float32), scanner)
        return np.asarray(np.rint(255 * np.clip(grey, 0, 1)), dtype=np.uint8)

    def _sign(self, grey: Array, scanner: Scanner) -> Array:
        """Marker and border."""
        size = self.size
        if scanner.border:
            left, top, right, bottom = (w * size for w in scanner.border_width)
            fill = 1.0 if scanner.border == 2 else 0.0
            mask = Image.new("L", (size, size), 255)
            radius = 0.06 * size if scanner.border == 3 else 0
            ImageDraw.Draw(mask).rounded_rectangle((left, top, size - 1 - right, size - 1 - bottom), radius, fill=0)
            cover = np.asarray(mask, dtype=np.float32) / 255
            grey = (grey * (1 - cover) + fill * cover).astype(np.float32)
        if scanner.letter:
            stamp, alpha = _letter(
                scanner.letter, scanner.style, scanner.letter_turn, max(8, round(scanner.letter_size / self.mm))
            )
            h, w = stamp.shape
            r0 = int(np.clip(scanner.letter_at[1] * size - h / 2, 0, size - h))
            c0 = int(np.clip(scanner.letter_at[0] * size - w / 2, 0, size - w))
            window = grey[r0 : r0 + h, c0 : c0 + w]
            grey[r0 : r0 + h, c0 : c0 + w] = window * (1 - alpha) + stamp * alpha
        return grey


# Strokes of the letters in a unit box.
_STROKES: Mapping[str, Sequence[Sequence[tuple[float, float]]]] = {
    "L": [[(0.3, 0.1), (0.3, 0.9), (0.75, 0.9)]],
    "R": [
        [(0.28, 0.92), (0.28, 0.1), (0.55, 0.1), (0.7, 0.2), (0.7, 0.38), (0.55, 0.48), (0.28, 0.48)],
        [(0.5, 0.48), (0.74, 0.92)],
    ],
}


@lru_cache(maxsize=256)
def _letter(letter: str, style: int, turn: float, height: int) -> tuple[Array, Array]:
    """
    A lead marker: grey values and coverage, both [h, h]. Styles: plain, in a ring, dark on a plate, bold on a dark
    disc.
    """
    big = 4 * height
    stamp, alpha = Image.new("L", (big, big)), Image.new("L", (big, big))
    ink, cover = ImageDraw.Draw(stamp), ImageDraw.Draw(alpha)
    inset, pen = (0.24, 0.06) if style in (1, 3) else (0.16, 0.09)
    shade = 245
    if style == 1:
        for draw in (ink, cover):
            draw.ellipse(
                (0.04 * big, 0.04 * big, 0.96 * big, 0.96 * big), outline=230, width=max(2, round(0.045 * big))
            )
    elif style == 2:
        cover.rectangle((0.12 * big, 0.04 * big, 0.88 * big, 0.96 * big), fill=220)
        ink.rectangle((0.12 * big, 0.04 * big, 0.88 * big, 0.96 * big), fill=215)
        shade = 40
    elif style == 3:
        cover.ellipse((0.04 * big, 0.04 * big, 0.96 * big, 0.96 * big), fill=255)
        pen = 0.1
    for stroke in _STROKES[letter]:
        line = [((inset + (1 - 2 * inset) * x) * big, (inset + (1 - 2 * inset) * y) * big) for x, y in stroke]
        ink.line(line, fill=shade, width=max(3, round(pen * big)), joint="curve")
        cover.line(line, fill=235, width=max(3, round(pen * big)), joint="curve")
    grey, coverage = (
        np.asarray(
            im.rotate(np.rad2deg(turn), Image.Resampling.BICUBIC).resize((height, height), Image.Resampling.LANCZOS),
            dtype=np.float32,
        )
        / 255
        for im in (stamp, alpha)
    )
    # The stamp's own coverage dims its values; undo that where there is any.
    if style in (0, 1):
        grey = np.clip(grey / np.maximum(coverage, 0.05), 0, 1)
    return grey.astype(np.float32), coverage.astype(np.float32)
