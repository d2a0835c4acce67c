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
"""Phantom colour fundus photographs: eyes grown procedurally, photographed through a model of the camera, exact masks.

A patient has two eyes that are alike in pigment, disc, vessel calibre and arcades, each with a vessel tree of its own.
A visit adds gaze, camera, light, haze, noise and the course of lesions. Nothing is taken from a real image.

Frame of an eye: degrees of visual angle with the fovea at (0, 0), x towards the optic disc and y downwards, as a right
eye is seen on a photograph; a left eye is mirrored when it is photographed.
"""

from __future__ import annotations

import heapq
import io
from collections.abc import Mapping
from dataclasses import dataclass
from math import acos, atan2, cos, exp, hypot, pi, sin
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw
from scipy.ndimage import map_coordinates

from .common import Artefact, check_settings, stream
from .raster import Array, Vector, blur, curve, smooth_noise

__all__ = ["CAMERAS", "EYES", "Eye", "FundusPhantom", "PhantomFundus", "Side", "VesselTree"]

Side = Literal["L", "R"]
EYES: tuple[Side, ...] = get_args(Side)

# Step (degrees) along a growing vessel, and side of the cells in which it meets others of its kind.
_STEP, _CELL = 0.4, 0.75
# Half-width and centre (degrees) of the square of retina that a photograph can show.
_REACH, _MIDDLE = 48.0, (8.0, 0.0)
# Degrees per pixel of the textures that belong to an eye.
_TEXEL = 0.15
# Radius (degrees) below which vessels do not branch any more, and the thickest that may end within the retina.
_TWIG, _LAST = 0.042, 0.055
# An average eye's temporal arcades (x in parts of the distance from fovea to disc, height in degrees) and nasal vessels
# (degrees from the disc).
_TEMPORAL = np.array([(0.98, 0.3), (0.93, 3.6), (0.64, 8.0), (0.12, 10.4), (-0.5, 10.0), (-1.15, 8.0), (-1.9, 5.5)])
_NASAL = np.array([(0.3, 0.3), (2.4, 3.0), (8.0, 7.0), (16.0, 12.0), (26.0, 17.0)])
# What blood takes from red, green and blue light.
_ARTERY, _VEIN = np.array([0.16, 0.72, 0.62]), np.array([0.42, 1.0, 0.82])

# Streams of random numbers.
_PERSON, _EYE, _TREE, _CHOROID, _LESIONS, _VISIT, _PHOTO, _NOISE, _SIGNATURE = range(9)


@dataclass(frozen=True)
class PhantomFundus:
    """One phantom fundus photograph.

    Args:
        image: uint8 [size, size, 3], RGB, black outside the field of view.
        masks: bool [size, size]: ``optic_disc`` (with its cup; empty when the disc's centre is out of the field),
            ``vessels`` (those drawn a pixel wide or wider), ``field_of_view``.
        landmarks: ``optic_disc`` and ``fovea``, float64 [2], (x, y) pixels (the first pixel's centre is 0), left out
            when out of the field; ``junctions``, float64 [K, 2], bifurcations in the field into vessels that are both
            in the mask, the widest first.
        laterality: ``L`` or ``R``.
        visit: number of the visit, from 0.
        day: days since the patient's first visit.
        camera: name of the camera.
        field: ``macula`` or ``disc``, what the photograph was aimed at.
    """

    image: npt.NDArray[np.uint8]
    masks: Mapping[str, npt.NDArray[np.bool_]]
    landmarks: Mapping[str, Vector]
    laterality: Side
    visit: int
    day: int
    camera: str
    field: str


@dataclass(frozen=True)
class Camera:
    """A fundus camera.

    Args:
        name: in the datalist.
        degrees: diameter of its field.
        gain: of red, green and blue.
        gamma: of its curve.
        soft: blur in pixels of a 512 pixel photograph.
        noise: standard deviation, of 1.
        radius: of the field in parts of the photograph's side.
        cut: height at which the field is cut off at top and bottom, in parts of its radius; 1 for round.
        tab: bearing (radians, 0 right, negative up) of the tab at the rim; None for none.
        quality: of its JPEG.
    """

    name: str
    degrees: float
    gain: tuple[float, float, float]
    gamma: float
    soft: float
    noise: float
    radius: float
    cut: float
    tab: float | None
    quality: int


CAMERAS = (
    Camera("phantom-45a", 45.0, (1.00, 1.00, 1.00), 1.00, 0.65, 0.010, 0.490, 1.00, -0.78, 88),
    Camera("phantom-45b", 45.0, (0.90, 1.10, 1.20), 0.92, 0.95, 0.014, 0.475, 0.86, -0.70, 78),
    Camera("phantom-50", 50.0, (1.06, 0.86, 0.62), 1.12, 0.80, 0.012, 0.495, 0.80, None, 84),
    Camera("phantom-30", 30.0, (1.15, 0.82, 0.72), 1.05, 1.10, 0.016, 0.480, 1.00, None, 90),
    Camera("phantom-45c", 45.0, (1.10, 0.96, 1.08), 0.95, 0.55, 0.008, 0.485, 0.92, 0.80, 92),
)
_CAMERA_SHARE = (0.28, 0.22, 0.2, 0.12, 0.18)


@dataclass(frozen=True)
class Person:
    """What a patient's two eyes share.

    Args:
        age: 0 (young) to 1.
        colour: reflectance of the fundus, [3].
        tessellation: how much of the choroid's vessels is seen, 0 to 1.
        disc_height: degrees; ``disc_ratio`` width to height; ``cup`` diameter to the disc's.
        distance: fovea to disc, degrees; ``tilt`` how far the disc is above the fovea, radians.
        calibre, tortuosity: of the vessels, relative; ``gap`` degrees between branches.
        arcade: heights of the upper and lower arcade, relative [2]; ``bends`` of the eight trunks, degrees [8, 7, 2].
        macula: depth of the macula's pigment.
        crescent: width of the atrophy beside the disc, degrees, 0 for none.
        drusen, bleeding: expected lesions.
    """

    age: float
    colour: Vector
    tessellation: float
    disc_height: float
    disc_ratio: float
    cup: float
    distance: float
    tilt: float
    calibre: float
    tortuosity: float
    gap: float
    arcade: Vector
    bends: Vector
    macula: float
    crescent: float
    drusen: float
    bleeding: float


def _draw_person(rng: np.random.Generator) -> Person:
    age = float(rng.uniform(0, 1))
    pigment = float(rng.beta(1.6, 1.6))
    light, dark = np.array([0.90, 0.45, 0.23]), np.array([0.60, 0.25, 0.12])
    return Person(
        age=age,
        colour=(light + (dark - light) * pigment) * np.exp(rng.normal(0, [0.05, 0.08, 0.12])),
        tessellation=float(np.clip(rng.normal(0.35 + 0.3 * age, 0.25), 0.05, 1.0)),
        disc_height=float(np.clip(rng.normal(6.6, 0.4), 5.6, 7.7)),
        disc_ratio=float(np.clip(rng.normal(0.92, 0.05), 0.78, 1.04)),
        cup=float(np.clip(rng.normal(0.45, 0.13), 0.15, 0.8)),
        distance=float(np.clip(rng.normal(15.5, 0.7), 13.8, 17.2)),
        tilt=float(np.deg2rad(np.clip(rng.normal(6.5, 2.2), 2, 12))),
        calibre=float(np.exp(rng.normal(0, 0.09))),
        tortuosity=float(np.exp(rng.normal(0, 0.35))),
        gap=float(np.clip(rng.normal(2.0, 0.3), 1.4, 2.8)),
        arcade=np.exp(rng.normal(0, 0.09, 2)),
        bends=rng.normal(0, 1.0, (8, 7, 2)),
        macula=float(rng.uniform(0.2, 0.55)),
        crescent=float(rng.uniform(0.4, 1.6)) if rng.random() < 0.35 else 0.0,
        drusen=float(rng.uniform(5, 45)) if rng.random() < 0.1 + 0.5 * age else 0.0,
        bleeding=float(rng.uniform(2, 12)) if rng.random() < 0.2 else 0.0,
    )


@dataclass(frozen=True)
class VesselTree:
    """Arteries and veins of an eye.

    Args:
        start, end: of the segments, degrees [S, 2].
        radius: at the ends of each segment, degrees [S, 2].
        artery: bool [S], True for arteries.
        junctions: bifurcations, degrees [K, 2].
        junction_radii: of each bifurcation's stem and two branches, [K, 3]; the stem's cube is the branches' cubes'
            sum (Murray's law).
    """

    start: Vector
    end: Vector
    radius: Vector
    artery: npt.NDArray[np.bool_]
    junctions: Vector
    junction_radii: Vector


class _Vessel:
    """A vessel in growth: its way, the radius at its end, and its branches (index of the point, vessel)."""

    def __init__(self, artery: bool, points: list[tuple[float, float]], parent: int) -> None:
        self.artery, self.points, self.parent = artery, points, parent
        self.branches: list[tuple[int, int]] = []
        self.last = 0.0
        self.leaves = False


class _Grower:
    """Grows the vessel tree of one eye: trunks along the arcades, then branches, the thickest first."""

    def __init__(self, rng: np.random.Generator, person: Person, disc: Vector, disc_radius: float) -> None:
        self.rng, self.person, self.disc, self.disc_radius = rng, person, disc, disc_radius
        side = int(2 * _REACH / _CELL) + 1
        # The vessel in each cell, one map for the veins and one for the arteries, which may cross each other.
        self.taken = np.full((2, side, side), -1, dtype=np.int32)
        self.vessels: list[_Vessel] = []
        self.buds: list[tuple[float, bool, tuple[float, float], float, int, int]] = []

    def grow(self) -> VesselTree:
        self._trunks()
        while self.buds:
            thick, artery, start, heading, parent, index = heapq.heappop(self.buds)
            self._branch(-thick, artery, start, heading, parent, index)
        return self._tree()

    def _cell(self, point: tuple[float, float]) -> tuple[int, int]:
        return int((point[1] - _MIDDLE[1] + _REACH) / _CELL), int((point[0] - _MIDDLE[0] + _REACH) / _CELL)

    def _add(self, vessel: _Vessel) -> int:
        self.vessels.append(vessel)
        for point in vessel.points:
            self.taken[int(vessel.artery)][self._cell(point)] = len(self.vessels) - 1
        return len(self.vessels) - 1

    def _bud(
        self, radius: float, artery: bool, start: tuple[float, float], heading: float, parent: int, index: int
    ) -> None:
        heapq.heappush(self.buds, (-radius, artery, start, heading, parent, index))

    def _trunks(self) -> None:
        rng, person, (dx, dy) = self.rng, self.person, self.disc
        own = rng.normal(0, 1.0, person.bends.shape)
        height = person.arcade * np.exp(rng.normal(0, 0.05, 2))
        for number in range(8):
            artery, upper, temporal = bool(number & 1), bool(number & 2), bool(number & 4)
            way = np.array(_TEMPORAL if temporal else _NASAL)
            sign = -1.0 if upper else 1.0
            if temporal:
                way[:, 0] *= dx
                # The arcades start from the disc, but go around the fovea.
                way[:, 1] = sign * way[:, 1] * height[int(upper)] + dy * np.clip(way[:, 0] / dx, 0, 1)
            else:
                way[:, 0] += dx
                way[:, 1] = dy + sign * way[:, 1]
            loose = np.linspace(0, 1, len(way))[:, None] ** 0.7
            way += loose * (0.9 * person.bends[number, : len(way)] + 0.7 * own[number, : len(way)])
            # Artery and vein leave the disc side by side.
            way[:, 1] += sign * (0.45 if artery else -0.45) * (np.minimum(loose[:, 0] * 4, 1) + loose[:, 0])
            way[0] += rng.normal(0, 0.25, 2)
            points = curve(way, 400)
            length = np.concatenate([[0.0], np.cumsum(np.linalg.norm(np.diff(points, axis=0), axis=1))])
            at = np.arange(0.0, length[-1], _STEP)
            points = np.stack([np.interp(at, length, points[:, k]) for k in range(2)], 1)
            step = np.gradient(points, axis=0)
            normal = np.stack([-step[:, 1], step[:, 0]], 1) / np.linalg.norm(step, axis=1, keepdims=True)
            waves = sum(
                rng.normal(0, 0.035 * period) * np.sin(2 * pi * at / period + rng.uniform(0, 2 * pi))
                for period in rng.uniform(2.5, 9, 3)
            )
            points += (person.tortuosity * np.minimum(at / 4, 1) * waves)[:, None] * normal
            inside = np.all(np.abs(points - _MIDDLE) < _REACH - 1, axis=1)
            points = points[: len(points) if inside.all() else int(np.argmin(inside))]
            vessel = _Vessel(artery, [(float(x), float(y)) for x, y in points], -1)
            vessel.leaves = True
            radius = (
                person.calibre * (0.205 if artery else 0.265) * (1.0 if temporal else 0.72) * exp(rng.normal(0, 0.1))
            )
            index = self._add(vessel)
            self._sprout(vessel, index, radius)
        for k in range(int(rng.integers(4, 8))):
            # Small vessels from the disc's edge to the macula and to the nasal side.
            bearing = (pi if k % 3 else 0.0) + float(rng.normal(0, 0.45))
            start = (dx + 0.8 * self.disc_radius * cos(bearing), dy + 0.8 * self.disc_radius * sin(bearing))
            self._bud(float(rng.uniform(0.06, 0.1)), bool(k & 1), start, bearing, -1, 0)

    def _sprout(self, vessel: _Vessel, index: int, radius: float) -> None:
        """Place the buds along a vessel that has its way, and taper it."""
        rng = self.rng
        points = vessel.points
        side = 1 if rng.random() < 0.5 else -1
        wait = 0.6 + rng.exponential(self.person.gap * 0.7)
        for i in range(2, len(points) - 3):
            wait -= _STEP
            away = hypot(points[i][0] - self.disc[0], points[i][1] - self.disc[1])
            if wait > 0 or radius < _TWIG or away < self.disc_radius + 0.3:
                continue
            share = float(rng.uniform(0.3, 0.5) if rng.random() < 0.25 else rng.uniform(0.06, 0.3))
            branch, stem = radius * share ** (1 / 3), radius * (1 - share) ** (1 / 3)
            # The angle that costs the least work (Murray), with some play.
            best = acos(min(1.0, (radius**4 + branch**4 - stem**4) / (2 * radius**2 * branch**2)))
            ahead = atan2(points[i + 1][1] - points[i - 1][1], points[i + 1][0] - points[i - 1][0])
            side = -side if rng.random() < 0.7 else side
            self._bud(branch, vessel.artery, points[i], ahead + side * (best + float(rng.normal(0, 0.18))), index, i)
            radius = stem
            wait = 0.6 + rng.exponential(self.person.gap * (0.5 + 0.5 * min(1.0, radius / 0.12)))
        vessel.last = radius if vessel.leaves else min(radius, _LAST)

    def _branch(
        self, radius: float, artery: bool, start: tuple[float, float], heading: float, parent: int, index: int
    ) -> None:
        """Grow a bud till it leaves the retina, meets another of its kind, nears the fovea, turns back or is long.

        A bud that gets nowhere is dropped.
        """
        rng = self.rng
        steps = int((5 + 150 * radius) * exp(rng.normal(0, 0.25)) / _STEP)
        wander = rng.normal(0, 0.05 * self.person.tortuosity**0.5, steps)
        taken, number = self.taken[int(artery)], len(self.vessels)
        clear = 0.9 + 12 * radius
        (x, y), turn, first = start, 0.0, heading
        vessel = _Vessel(artery, [start], parent)
        for i in range(steps):
            if ((x - 2) / 13) ** 2 + (y / 9.5) ** 2 < 1:
                wanted, pull = atan2(-y, -x), 0.075
            else:
                wanted, pull = atan2(y, x - 6), 0.045
            turn = 0.8 * turn + float(wander[i])
            # One that runs the other way is not turned round.
            heading += turn + (pull * sin(wanted - heading) if cos(wanted - heading) > -0.3 else 0.0)
            x, y = x + _STEP * cos(heading), y + _STEP * sin(heading)
            if hypot(x, y) < clear or abs(heading - first) > 1.7:
                break
            if max(abs(x - _MIDDLE[0]), abs(y - _MIDDLE[1])) > _REACH - 1:
                vessel.leaves = True
                break
            met = taken[self._cell((x, y))]
            if met not in (-1, number) and (met != parent or i > 4):
                break
            vessel.points.append((x, y))
        if len(vessel.points) < 5:
            return
        self._add(vessel)
        if parent >= 0:
            self.vessels[parent].branches.append((index, number))
        self._sprout(vessel, number, radius)

    def _tree(self) -> VesselTree:
        """Work out the radii from the ends of the vessels to the disc, so that Murray's law holds at every junction."""
        flow = np.zeros(len(self.vessels))
        start, end, radius, artery, junctions, radii = [], [], [], [], [], []
        for number in range(len(self.vessels) - 1, -1, -1):  # branches are younger than their stems
            vessel = self.vessels[number]
            points = np.array(vessel.points)
            cube = np.full(len(points), vessel.last**3)
            for index, branch in sorted(vessel.branches, reverse=True):
                after, before = cube[index], cube[index] + flow[branch]
                cube[: index + 1] = before
                junctions.append(points[index])
                radii.append(np.cbrt([before, after, flow[branch]]))
            flow[number] = cube[0]
            thick = np.cbrt(cube)
            # The segment behind a junction has the radius of what goes on.
            ends = np.stack([thick[1:], thick[1:]], 1)
            if not vessel.leaves:
                left = (len(points) - 1 - np.arange(len(points))) * _STEP
                tip = np.arange(len(points)) > max((i for i, _ in vessel.branches), default=0)
                fade = np.where(tip, np.sqrt(np.clip(left / 1.6, 0.1, 1)), 1.0)
                ends *= np.stack([fade[:-1], fade[1:]], 1)
            start.append(points[:-1])
            end.append(points[1:])
            radius.append(ends)
            artery.append(np.full(len(points) - 1, vessel.artery))
        return VesselTree(
            np.concatenate(start),
            np.concatenate(end),
            np.concatenate(radius),
            np.concatenate(artery),
            np.array(junctions),
            np.array(radii),
        )


@dataclass(frozen=True)
class Lesions:
    """Spots on the retina.

    Args:
        kind: 0 drusen, 1 exudate, 2 haemorrhage, [N].
        at: degrees [N, 2].
        radius: degrees [N].
        first, last: visits that show them [N].
    """

    kind: npt.NDArray[np.int64]
    at: Vector
    radius: Vector
    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]


def _draw_lesions(rng: np.random.Generator, person: Person) -> Lesions:
    """Drusen stay and become more, exudates last some visits, haemorrhages one or two."""
    kinds, places, radii = [], [], []
    for _ in range(int(rng.poisson(person.drusen))):
        kinds.append(0)
        places.append(rng.normal(0, 3.2, 2))
        radii.append(rng.uniform(0.08, 0.3))
    for kind, rate in ((1, 0.5 * person.bleeding), (2, person.bleeding)):
        for _ in range(int(rng.poisson(rate))):
            centre = rng.normal(0, 7, 2) + (3, 0)
            parts = int(rng.integers(2, 9 if kind == 1 else 5))
            kinds += [kind] * parts
            places += list(centre + rng.normal(0, 0.7 if kind == 1 else 0.18, (parts, 2)))
            radii += list(rng.uniform(0.06, 0.2, parts) if kind == 1 else rng.uniform(0.12, 0.3, parts))
    kind_of = np.array(kinds, dtype=np.int64)
    first = rng.integers(-3, 4, len(kinds))
    stays = np.array([10_000, 3, 1])[kind_of] + rng.integers(0, 2, len(kinds))
    return Lesions(kind_of, np.reshape(places, (-1, 2)), np.array(radii), first, first + stays)


@dataclass(frozen=True)
class Eye:
    """What an eye keeps from photograph to photograph.

    Args:
        disc: its centre, degrees [2]; the fovea's is (0, 0).
        disc_axes: half-width and half-height, degrees; ``disc_turn`` radians; ``disc_waves`` relative Fourier terms of
            its outline [2, 2].
        cup: diameter to the disc's; ``cup_at`` its centre in parts of the disc [2].
        colour: reflectance [3].
        macula: depth of the macula's pigment; ``reflex`` of the fovea.
        tessellation: how much of the choroid's vessels is seen, 0 to 1.
        sheen: of the nerve fibres, 0 to 0.2; ``fibres`` their streaks by bearing at the disc [F].
        crescent: width of the atrophy beside the disc, degrees; ``crescent_at`` its bearing, radians.
        tree: arteries and veins.
        choroid: how much choroidal vessel is under each texel, [T, T]; ``pigment`` smooth noise [T, T].
        lesions: see :class:`Lesions`.
    """

    disc: Vector
    disc_axes: tuple[float, float]
    disc_turn: float
    disc_waves: Vector
    cup: float
    cup_at: Vector
    colour: Vector
    macula: float
    reflex: float
    tessellation: float
    sheen: float
    fibres: Vector
    crescent: float
    crescent_at: float
    tree: VesselTree
    choroid: Array
    pigment: Array
    lesions: Lesions


def _draw_eye(seed: int, patient: int, side: int, person: Person) -> Eye:
    rng = stream(seed, patient, _EYE, side)
    distance = person.distance + float(rng.normal(0, 0.25))
    tilt = person.tilt + float(rng.normal(0, 0.02))
    disc = distance * np.array([cos(tilt), -sin(tilt)])
    half = person.disc_height * exp(rng.normal(0, 0.025)) / 2
    axes = (half * person.disc_ratio * exp(rng.normal(0, 0.03)), half)
    texture = stream(seed, patient, _CHOROID, side)
    side_texels = round(2 * _REACH / _TEXEL)
    mottle = smooth_noise(texture, side_texels, 30) + 0.7 * smooth_noise(texture, side_texels, 110)
    return Eye(
        disc=disc,
        disc_axes=axes,
        disc_turn=float(rng.normal(0, 0.15)),
        disc_waves=rng.normal(0, [[0.02], [0.012]], (2, 2)),
        cup=float(np.clip(person.cup + rng.normal(0, 0.05), 0.1, 0.85)),
        cup_at=np.array([-0.08, 0.02]) + rng.normal(0, 0.04, 2),
        colour=person.colour * np.exp(rng.normal(0, 0.015, 3)),
        macula=person.macula * exp(rng.normal(0, 0.1)),
        reflex=max(0.0, 0.5 - person.age) * float(rng.uniform(0.2, 0.9)),
        tessellation=person.tessellation * exp(rng.normal(0, 0.1)),
        sheen=max(0.0, 0.6 - person.age) * 0.22 * float(rng.uniform(0.3, 1)),
        fibres=rng.normal(0, 1, 240),
        crescent=max(0.0, person.crescent + float(rng.normal(0, 0.2))) if person.crescent else 0.0,
        crescent_at=pi + float(rng.normal(0.2, 0.35)),
        tree=_Grower(stream(seed, patient, _TREE, side), person, disc, half).grow(),
        choroid=_choroid(texture),
        pigment=mottle,
        lesions=_draw_lesions(stream(seed, patient, _LESIONS, side), person),
    )


def _choroid(rng: np.random.Generator) -> Array:
    """Vessels of the choroid, a mesh that runs outwards from the macula: [T, T], 0 to 1."""
    size = round(2 * _REACH / _TEXEL)
    count, steps = 800, 36
    at = rng.uniform(-_REACH, _REACH, (count, 2)) + _MIDDLE
    winding = smooth_noise(rng, 128, 26), smooth_noise(rng, 128, 9)
    turn = rng.normal(0, 0.25, count)
    ways = [at]
    for _ in range(steps):
        cell = np.clip((at - _MIDDLE + _REACH) / (2 * _REACH) * 128, 0, 127).astype(int)
        bend = sum(w[cell[:, 1], cell[:, 0]] for w in winding)
        heading = np.arctan2(at[:, 1], at[:, 0] - 3) + 0.42 * bend + turn
        at = at + 0.45 * np.stack([np.cos(heading), np.sin(heading)], 1)
        ways.append(at)
    # Drawn at twice the size for soft edges.
    way = (np.stack(ways) - _MIDDLE + _REACH) / _TEXEL * 2
    canvas = Image.new("L", (2 * size, 2 * size))
    draw = ImageDraw.Draw(canvas)
    for k, width in enumerate(rng.integers(2, 7, count)):
        draw.line(way[:, k].reshape(-1).tolist(), fill=255, width=int(width), joint="curve")
    return blur(np.asarray(canvas.reduce(2), dtype=np.float32) / np.float32(255), 0.9)


@dataclass(frozen=True)
class _Stroke:
    """
    Tubes drawn on an image: ``depth`` [size, size] of the tube's cross-section (0 to 1, with soft edges), ``core`` the
    same for the inner third of the tubes that have one, and ``mask`` of the pixels within tubes a pixel or more wide.
    """

    depth: Array
    core: Array
    mask: npt.NDArray[np.bool_]


def _stroke(size: int, start: Vector, end: Vector, radius: Vector, strength: Vector | None = None) -> _Stroke:
    """Draw tubes, where they overlap the deeper one.

    Args:
        size: pixels per side.
        start, end: pixel coordinates of segments [S, 2].
        radius: at their ends, pixels [S, 2].
        strength: depth of each segment [S], 1 by default.
    """
    depth, core = np.zeros((2, size * size), np.float32)
    mask = np.zeros(size * size, bool)
    if strength is None:
        strength = np.ones(len(start))
    reach = radius.max(1) if len(radius) else np.zeros(0)
    far = reach[:, None] + 2
    near = np.all((np.maximum(start, end) > -far) & (np.minimum(start, end) < size + far), axis=1)
    start, end, radius, strength, reach = start[near], end[near], radius[near], strength[near], reach[near]
    count = np.ceil(np.linalg.norm(end - start, axis=1) / np.maximum(0.35, 0.4 * reach)).astype(int).clip(1)
    owner = np.repeat(np.arange(len(start)), count)
    part = ((np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)) / count[owner])[:, None]
    at = start[owner] * (1 - part) + end[owner] * part
    r = (radius[owner] * np.concatenate([1 - part, part], 1)).sum(1).astype(np.float32)
    weight = (strength[owner] * np.minimum(1, 2 * r)).astype(np.float32)
    whole = np.rint(at).astype(np.int32)
    off = (whole - at).astype(np.float32)
    window = np.ceil(r + 0.5).astype(int)
    for half in np.unique(window):
        chosen = np.flatnonzero(window == half)
        dy, dx = (v.reshape(1, -1) for v in np.mgrid[-half : half + 1, -half : half + 1].astype(np.int32))
        rr = r[chosen, None]
        d = np.hypot(off[chosen, 0:1] + dx, off[chosen, 1:2] + dy)
        col, row = whole[chosen, 0:1] + dx, whole[chosen, 1:2] + dy
        seen = (d < rr + 0.5) & (col >= 0) & (row >= 0) & (col < size) & (row < size)
        index, d = (row * size + col)[seen], d[seen]
        rr, ww = np.broadcast_to(rr, seen.shape)[seen], np.broadcast_to(weight[chosen, None], seen.shape)[seen]
        round_ = 0.6 + 0.4 * np.sqrt(np.maximum(0, 1 - (d / (rr + 0.5)) ** 2))
        np.maximum.at(depth, index, ww * round_ * np.clip(rr - d + 0.5, 0, 1))
        mask[index[(d <= rr) & (rr >= 0.5)]] = True
        if half >= 2:
            np.maximum.at(core, index, ww * np.clip(0.35 * rr - d + 0.5, 0, 1) * np.clip(rr - 1, 0, 1))
    shape = (size, size)
    return _Stroke(depth.reshape(shape), core.reshape(shape), mask.reshape(shape))


@dataclass(frozen=True)
class Visit:
    """What a visit's photographs share: days since the first visit, and the camera."""

    day: int
    camera: Camera


def _draw_visit(rng: np.random.Generator, number: int) -> Visit:
    camera = CAMERAS[int(rng.choice(len(CAMERAS), p=_CAMERA_SHARE))]
    return Visit(0 if number == 0 else int(number * 180 + rng.integers(0, 170)), camera)


@dataclass(frozen=True)
class Shot:
    """What one photograph adds to its eye.

    Args:
        field: ``macula`` or ``disc``.
        gaze: the field's centre in the eye, degrees [2].
        roll: radians.
        exposure: relative; ``gain`` of the colours [3].
        shade: how much darker the rim is; ``shade_at`` the brightest place in parts of the radius; ``slope`` of the
            light across the field.
        flare: strength of the crescent at the rim; ``flare_at`` its bearing, ``flare_colour`` [3].
        haze: light scattered by the media; ``defocus`` blur in pixels of a 512 pixel photograph.
    """

    field: str
    gaze: Vector
    roll: float
    exposure: float
    gain: Vector
    shade: float
    shade_at: Vector
    slope: Vector
    flare: float
    flare_at: float
    flare_colour: Vector
    haze: float
    defocus: float


def _draw_shot(rng: np.random.Generator, person: Person, eye: Eye, camera: Camera) -> Shot:
    disc_centred = bool(rng.random() < 0.3)
    # A narrow field is often aimed between fovea and disc, to have both.
    macula = np.array([eye.disc[0] * rng.uniform(0, 0.4 if camera.degrees > 40 else 0.65), 0.0])
    badly_aimed = rng.random() < 0.15
    cloudy = rng.random() < 0.1 + 0.25 * person.age
    warm = rng.random() < 0.4
    return Shot(
        field="disc" if disc_centred else "macula",
        gaze=(eye.disc if disc_centred else macula) + rng.normal(0, 5.0 if badly_aimed else 1.4, 2),
        roll=float(np.clip(rng.normal(0, 0.055), -0.14, 0.14)),
        exposure=float(rng.uniform(0.5, 0.7) if rng.random() < 0.1 else np.exp(rng.normal(0.14, 0.12))),
        gain=np.exp(rng.normal(0, [0.04, 0.05, 0.09])),
        shade=float(rng.uniform(0.1, 0.5)),
        shade_at=rng.normal(0, 0.25, 2),
        slope=rng.normal(0, 0.10, 2),
        flare=float(rng.uniform(0.1, 0.45)) if rng.random() < 0.35 else 0.0,
        flare_at=float(rng.uniform(-pi, pi)),
        flare_colour=np.array([0.95, 0.6, 0.35]) if warm else np.array([0.35, 0.65, 0.75]),
        haze=float(rng.uniform(0.1, 0.4) if cloudy else rng.uniform(0, 0.07)),
        defocus=float(rng.uniform(1.0, 2.4) if rng.random() < 0.12 else rng.uniform(0, 0.5)),
    )


@dataclass(frozen=True)
class Signature:
    """What an artefact adds to a photograph: a colour cast [3], a tab at the rim at a bearing, and a patch in a corner.

    Args:
        cast: relative gain of the colours.
        tab: bearing, radians; ``tab_size`` in parts of the radius.
        corner: 0 to 3, clockwise from the top left; ``ink`` its colour [3], ``code`` which cells have it, bool [3, 3].
    """

    cast: Vector
    tab: float
    tab_size: float
    corner: int
    ink: Vector
    code: npt.NDArray[np.bool_]


def _draw_signature(rng: np.random.Generator) -> Signature:
    return Signature(
        cast=np.exp(rng.normal(0, 0.16, 3)),
        tab=float(pi / 4 + pi / 2 * rng.integers(0, 4) + rng.uniform(-0.12, 0.12)),
        tab_size=float(rng.uniform(0.04, 0.09)),
        corner=int(rng.integers(0, 4)),
        ink=rng.uniform(0.3, 1.0, 3),
        code=rng.random((3, 3)) < 0.6,
    )


class FundusPhantom:
    """A phantom patient, whose eyes can be photographed at any number of visits.

    Args:
        seed: of the set of patients; with ``patient``, the eye and the number of the visit it determines every pixel.
        patient: number of the patient in the set.

    Example::

        photo = FundusPhantom(seed=0, patient=3).photograph("R", visit=1, size=512)
    """

    def __init__(self, seed: int = 0, patient: int = 0) -> None:
        if seed < 0 or patient < 0:
            raise ValueError(f"seed and patient must be 0 or more, got {seed} and {patient}.")
        self.seed = seed
        self.patient = patient
        self.person = _draw_person(stream(seed, patient, _PERSON))
        self.eyes: dict[Side, Eye] = {eye: _draw_eye(seed, patient, side, self.person) for side, eye in enumerate(EYES)}

    def photograph(self, eye: Side, visit: int, size: int = 512, artefact: Artefact = "none") -> PhantomFundus:
        """Take a photograph of one eye at one visit.

        Args:
            eye: ``L`` or ``R``.
            visit: number of the visit, from 0; any order. The photographs of a visit are from one camera.
            size: pixels per side, 64 or more.
            artefact: ``none``;
                ``follows_patient``: a strong signature (colour cast, tab at the rim, patch in a corner) that is the
                    same in all photographs of the patient;
                ``shuffled``: such a signature, drawn anew for each photograph. Eye, gaze, camera, disease, noise and
                    masks do not depend on it.

        Returns:
            The photograph with its masks and landmarks.

        Raises:
            ValueError: on an unknown eye or artefact, a size below 64, or a negative visit.
        """
        if eye not in EYES:
            raise ValueError(f"eye must be 'L' or 'R', got {eye!r}.")
        check_settings(size, artefact, visit=visit)
        side = EYES.index(eye)
        drawn = _draw_visit(stream(self.seed, self.patient, _VISIT, visit), visit)
        shot = _draw_shot(
            stream(self.seed, self.patient, _PHOTO, visit, side), self.person, self.eyes[eye], drawn.camera
        )
        signature = None
        if artefact != "none":
            key = (0,) if artefact == "follows_patient" else (1, visit, side)
            signature = _draw_signature(stream(self.seed, self.patient, _SIGNATURE, *key))
        view = _View(self.eyes[eye], drawn.camera, shot, eye, size)
        image = view.expose(view.retina(visit), stream(self.seed, self.patient, _NOISE, visit, side), signature)
        return PhantomFundus(image, view.masks, view.landmarks, eye, visit, drawn.day, drawn.camera.name, shot.field)


class _View:
    """An eye in a camera's field: one photograph in the making.

    Images are float32, channels first.
    """

    def __init__(self, eye: Eye, camera: Camera, shot: Shot, side: Side, size: int) -> None:
        self.eye, self.camera, self.shot, self.size = eye, camera, shot, size
        self.radius = camera.radius * size
        self.scale = 2 * self.radius / camera.degrees  # pixels per degree
        self.mirror = -1.0 if side == "L" else 1.0
        self.middle = (size - 1) / 2
        axis = np.arange(size, dtype=np.float32) - np.float32(self.middle)
        self.u, self.v = axis[None, :] / np.float32(self.radius), axis[:, None] / np.float32(self.radius)
        self.rho = np.hypot(self.u, self.v)
        field = (self.rho <= 1) & (np.abs(self.v) <= (camera.cut if camera.cut < 1 else 2.0))
        c, s = cos(shot.roll) / self.scale, sin(shot.roll) / self.scale
        self.x = np.float32(self.mirror) * (c * axis[None, :] + s * axis[:, None]) + np.float32(shot.gaze[0])
        self.y = (c * axis[:, None] - s * axis[None, :]) + np.float32(shot.gaze[1])
        dx, dy = self.x - np.float32(eye.disc[0]), self.y - np.float32(eye.disc[1])
        c, s = cos(eye.disc_turn), sin(eye.disc_turn)
        self.disc_x, self.disc_y = (c * dx + s * dy) / eye.disc_axes[0], (c * dy - s * dx) / eye.disc_axes[1]
        self.bearing = np.arctan2(self.disc_y, self.disc_x)
        waves = sum(
            a * np.cos(k * self.bearing) + b * np.sin(k * self.bearing) for k, (a, b) in enumerate(eye.disc_waves, 2)
        )
        # 1 on the disc's edge
        self.disc = (np.hypot(self.disc_x, self.disc_y) / (1 + waves)).astype(np.float32)

        tree = eye.tree
        radius = tree.radius * self.scale
        strength = 1 - np.exp(-tree.radius.mean(1) / 0.075)
        start, end = self.project(tree.start), self.project(tree.end)
        self.arteries, self.veins = (
            _stroke(size, start[kind], end[kind], radius[kind], strength[kind]) for kind in (tree.artery, ~tree.artery)
        )
        self.landmarks: dict[str, Vector] = {}
        for name, at in (("optic_disc", eye.disc), ("fovea", np.zeros(2))):
            place = self.project(at)
            if self._in(field, place[None])[0]:
                self.landmarks[name] = place
        places = self.project(tree.junctions)
        widest_first = np.argsort(-tree.junction_radii[:, 0], kind="stable")
        drawn = self._in(field, places) & (tree.junction_radii.min(1) * self.scale >= 0.5)
        self.landmarks["junctions"] = places[widest_first[drawn[widest_first]]]
        self.masks = {
            "optic_disc": (self.disc <= 1) & field & ("optic_disc" in self.landmarks),
            "vessels": (self.arteries.mask | self.veins.mask) & field,
            "field_of_view": field,
        }

    def project(self, points: Vector) -> Vector:
        """Pixel coordinates of points of the eye [..., 2]."""
        offset = (points - self.shot.gaze) * (self.mirror, 1.0) * self.scale
        c, s = cos(self.shot.roll), sin(self.shot.roll)
        across, down = offset[..., 0], offset[..., 1]
        return np.stack([c * across - s * down, s * across + c * down], -1) + self.middle

    def _in(self, field: npt.NDArray[np.bool_], places: Vector) -> npt.NDArray[np.bool_]:
        """Whether places [K, 2] are in the field."""
        cell = np.rint(places).astype(int)
        inside = np.all((cell >= 0) & (cell < self.size), axis=1)
        cell = np.clip(cell, 0, self.size - 1)
        return np.asarray(inside & field[cell[:, 1], cell[:, 0]])

    def retina(self, visit: int) -> Array:
        """Reflectance of the retina [3, size, size]."""
        eye = self.eye
        cells = np.stack([self.y - _MIDDLE[1] + _REACH, self.x - _MIDDLE[0] + _REACH]) / np.float32(_TEXEL) - 0.5
        choroid, pigment = (
            map_coordinates(t, cells, order=1, mode="nearest", output=np.float32) for t in (eye.choroid, eye.pigment)
        )
        from_fovea = self.x**2 + self.y**2
        # The macula's pigment and thicker retina hide the choroid.
        hidden = np.exp(-from_fovea / 50)
        choroid = eye.tessellation * (choroid - 0.45) * (1 - 0.75 * hidden)
        pit = eye.macula * (0.65 * np.exp(-from_fovea / 9) + 0.35 * np.exp(-from_fovea / 60))
        pit += 0.35 * eye.macula * np.exp(-from_fovea / 0.7)
        colour = eye.colour.astype(np.float32)
        image = np.stack(
            [
                colour[k] * np.exp(gain * choroid - melanin * pigment - depth * pit)
                for k, (gain, melanin, depth) in enumerate(((0.28, 0.03, 0.75), (0.55, 0.05, 1.15), (0.38, 0.05, 1.0)))
            ]
        )
        self._nerve_fibres(image)
        self._disc(image)
        self._lesions(image, visit)
        dark = 1 + 0.15 * np.minimum(self.arteries.depth, self.veins.depth)  # crossings
        for k in range(3):
            # The light that a vessel's wall reflects, more from arteries.
            artery = _ARTERY[k] * self.arteries.depth * (1 - 0.45 * self.arteries.core)
            vein = _VEIN[k] * self.veins.depth * (1 - 0.15 * self.veins.core)
            image[k] *= np.exp(-1.05 * dark * np.maximum(artery, vein))
        if eye.reflex:
            ring = np.exp(-((np.sqrt(from_fovea) - 2.6) ** 2) / 0.25)
            image += np.float32(eye.reflex) * (0.5 * np.exp(-from_fovea / 0.05) + 0.10 * ring)
        return image.astype(np.float32)

    def _nerve_fibres(self, image: Array) -> None:
        """The sheen of the nerve fibres above and below the disc, in the young."""
        if not self.eye.sheen:
            return
        around = np.linspace(-pi, pi, len(self.eye.fibres))
        streaks = np.interp(self.bearing, around, self.eye.fibres, period=2 * pi).astype(np.float32)
        fall = np.exp(-np.abs(self.disc - 1.4) / 1.6) * np.abs(np.sin(self.bearing))
        sheen = np.float32(self.eye.sheen) * fall * (0.6 + 0.4 * streaks)
        for k, part in enumerate((0.5, 0.9, 0.8)):
            image[k] += part * sheen

    def _disc(self, image: Array) -> None:
        """Optic disc, its cup and the atrophy beside it."""
        eye = self.eye
        rim_colour = np.sqrt(eye.colour) * (1.12, 0.98, 0.78)
        cup_colour = np.sqrt(rim_colour) * (1.2, 1.2, 1.05)
        image *= 1 - 0.1 * np.exp(-(((self.disc - 1.1) / 0.09) ** 2))
        if eye.crescent:
            width = eye.crescent / eye.disc_axes[0] * np.maximum(np.cos(self.bearing - eye.crescent_at), 0)
            pale = 0.5 * _edge(1 + width - self.disc, 0.05) * np.minimum(width / 0.1, 1)
            for k in range(3):
                image[k] += pale * (0.95 * rim_colour[k] - image[k])
        disc = _edge(1 - self.disc, 0.1)
        cup = eye.cup - np.hypot(self.disc_x - eye.cup_at[0], self.disc_y - eye.cup_at[1])
        cup = _edge(cup, 0.2)
        nasal = 1 - 0.1 * np.cos(self.bearing) * np.minimum(self.disc, 1)
        for k in range(3):
            tissue = (rim_colour[k] + cup * (cup_colour[k] - rim_colour[k])) * (nasal if k else 1.0)
            image[k] += disc * (tissue - image[k])

    def _lesions(self, image: Array, visit: int) -> None:
        """Drusen, exudates and haemorrhages that there are at a visit."""
        lesions = self.eye.lesions
        seen = (lesions.first <= visit) & (visit <= lesions.last)
        for kind in np.unique(lesions.kind[seen]):
            chosen = seen & (lesions.kind == kind)
            grown = 0.8 + 0.1 * np.minimum(visit - lesions.first[chosen], 5)
            at, radius = self.project(lesions.at[chosen]), np.repeat((lesions.radius[chosen] * grown)[:, None], 2, 1)
            spots = blur(_stroke(self.size, at, at, radius * self.scale).depth, max(0.4, 0.05 * self.scale))
            for k in range(3):
                if kind == 2:
                    image[k] *= np.exp(-0.9 * _VEIN[k] * spots)
                else:
                    to = np.sqrt(self.eye.colour[k]) * ((1.0, 0.86, 0.6) if kind == 0 else (1.1, 1.1, 0.8))[k]
                    image[k] += (0.4 if kind == 0 else 0.8) * spots * (to - image[k])

    def expose(self, retina: Array, rng: np.random.Generator, signature: Signature | None) -> npt.NDArray[np.uint8]:
        """Take the photograph: uint8 [size, size, 3]."""
        camera, shot, size = self.camera, self.shot, self.size
        light = 1 - shot.shade * ((self.u - shot.shade_at[0]) ** 2 + (self.v - shot.shade_at[1]) ** 2)
        light = np.maximum(light + shot.slope[0] * self.u + shot.slope[1] * self.v, 0.1) * shot.exposure
        light = light.astype(np.float32)
        gain = np.array(camera.gain) * shot.gain * (1.0 if signature is None else signature.cast)
        crescent = self.u * cos(shot.flare_at) + self.v * sin(shot.flare_at)
        crescent = shot.flare * np.clip((crescent + 0.35 * (self.rho - 1) - 0.5) / 0.5, 0, 1) ** 2
        field = self.masks["field_of_view"]
        inside = np.clip((1 - self.rho) * self.radius + 0.5, 0, 1) * (field | (self.rho > 0.995))
        inside = np.where(np.abs(self.v) <= (camera.cut if camera.cut < 1 else 2.0), inside, 0)
        grain = rng.standard_normal((4, size, size), dtype=np.float32)
        sigma = max(0.3, hypot(camera.soft, shot.defocus) * size / 512)
        tabs = [] if camera.tab is None else [(camera.tab, 0.045)]
        tabs += [] if signature is None else [(signature.tab, signature.tab_size)]
        image = np.empty((size, size, 3), np.float32)
        for k in range(3):
            channel: Array = blur(retina[k] * light, sigma)
            mean = float(channel[field].mean())
            # Scattered light has the colour of the fundus, and a little of the lamp's.
            channel += shot.haze * (0.8 * mean + 0.12 - channel)
            channel += crescent * np.float32(shot.flare_colour[k])
            channel *= gain[k]
            # The shoulder of the sensor's curve.
            channel -= np.maximum(channel - 0.75, 0) - 0.25 * np.tanh(np.maximum(channel - 0.75, 0) / 0.25)
            channel = np.maximum(channel, 0) ** np.float32(camera.gamma)
            channel += camera.noise * (0.8 * grain[3] + 0.7 * grain[k])
            image[..., k] = inside * channel + (1 - inside) * (0.012 + 0.004 * grain[3])
            for bearing, width in tabs:
                image[self._tab(bearing, width), k] = (0.55 * mean * gain[k]) ** camera.gamma
        if signature is not None:
            self._stamp(image, signature)
        return _jpeg(np.asarray(np.rint(255 * np.clip(image, 0, 1)), dtype=np.uint8), camera.quality)

    def _tab(self, bearing: float, width: float) -> npt.NDArray[np.bool_]:
        """Pixels of a tab outside the rim."""
        along = self.u * cos(bearing) + self.v * sin(bearing)
        across = self.v * cos(bearing) - self.u * sin(bearing)
        return (along > 0) & (self.rho > 1) & (along < 1 + width) & (np.abs(across) < width)

    def _stamp(self, image: Array, signature: Signature) -> None:
        """The signature's patch, in a corner."""
        cell = max(1, round(0.018 * self.size))
        patch = np.kron(signature.code, np.ones((cell, cell)))[..., None] * signature.ink
        edge, side = round(0.02 * self.size), 3 * cell
        low, high = slice(edge, edge + side), slice(self.size - edge - side, self.size - edge)
        rows, columns = high if signature.corner in (2, 3) else low, high if signature.corner in (1, 2) else low
        image[rows, columns] = patch


def _edge(inwards: Array, width: float) -> Array:
    """A soft edge: 0 outside to 1 inside, from the signed distance inwards."""
    return np.asarray(1 / (1 + np.exp(np.clip(-4 * inwards / width, -30, 30))), dtype=np.float32)


def _jpeg(image: npt.NDArray[np.uint8], quality: int) -> npt.NDArray[np.uint8]:
    """What a JPEG keeps of an image."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=quality)
    return np.array(Image.open(buffer))
