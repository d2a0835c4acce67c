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
"""What an anatomy graph is made of, per kind of image: one table, read by parsers, graph builder and networks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydicom.sr.codedict import codes
from pydicom.sr.coding import Code

__all__ = ["MODALITIES", "AnatomyError", "Modality", "NodeGroup", "get_modality", "register_modality"]

#: how many names follow each kind of source
SOURCES = {"boundary": 1, "interior": 1, "region": 2, "landmark": 1, "polar": 2}


class AnatomyError(ValueError):
    """The anatomy of an image is missing or unusable for what was asked."""


@dataclass(frozen=True)
class NodeGroup:
    """
    Nodes of one type.

    Attributes:
        name: in words, the start of the nodes' names, for example ``"left lung boundary"``.
        type: node type, index into the network's table of type embeddings.
        count: number of nodes at scale 1, the most there can be.
        source: where the nodes come from:

            - ``("boundary", organ)`` and ``("interior", organ)``: sampled from the organ's mask;
            - ``("region", organ, landmark)``: one node at the landmark (or else the mask's centroid), whose pooling
              weights are the whole mask;
            - ``("landmark", name)``: at the landmark's points, in their order;
            - ``("polar", origin, target)``: rings about the landmark ``origin``, angle 0 towards ``target``.
        code: SNOMED CT code of the place, from pydicom's dictionary.
        side: SNOMED CT code of the side (patient's), for paired organs.
        rings: radii of the rings of a polar group, in units of half the distance from origin to target.
    """

    name: str
    type: int
    count: int
    source: tuple[str, ...]
    code: Code
    side: Code | None = None
    rings: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.source or SOURCES.get(self.source[0]) != len(self.source) - 1:
            raise ValueError(f"{self.name}: a source is one of {SOURCES} with so many names, got {self.source!r}")
        if self.count < 1 or self.type < 0:
            raise ValueError(f"{self.name}: count must be positive and type not negative")
        if (self.source[0] == "polar") != bool(self.rings) or (self.rings and self.count % len(self.rings)):
            raise ValueError(f"{self.name}: a polar group, and no other, has rings, with as many nodes on each")
        if self.source[0] == "region" and self.count != 1:
            raise ValueError(f"{self.name}: a region is one node")

    @property
    def organ(self) -> str | None:
        """The mask that the nodes belong to, if any."""
        return self.source[1] if self.source[0] in ("boundary", "interior", "region") else None

    @property
    def landmarks(self) -> tuple[str, ...]:
        """The landmarks that the nodes are placed by."""
        return {"region": self.source[2:], "landmark": self.source[1:], "polar": self.source[1:]}.get(
            self.source[0], ()
        )

    def scaled(self, scale: float) -> int:
        """Number of nodes at this granularity. A single landmark stays single; every ring keeps equal counts."""
        if self.count == 1:
            return 1
        rings = max(len(self.rings), 1)
        return rings * max(1, int(self.count / rings * scale + 0.5))


@dataclass(frozen=True)
class Modality:
    """
    Anatomy and nodes of one kind of image.

    Attributes:
        name: registered name.
        organs: channels of ``anatomy`` in their order.
        groups: the node groups; the fixed order of nodes is theirs.
        frame: what the canonical anatomical frame is fixed to: ``("organs", left, right)``, the masks of a pair of
            organs, or ``("axis", a, b)``, two landmarks, of which a comes to the right of b.
        symmetry: pairs (left, right) of organs joined by symmetry edges.
        field_of_view: channel outside which no node may lie.
    """

    name: str
    organs: tuple[str, ...]
    groups: tuple[NodeGroup, ...]
    frame: tuple[str, str, str]
    symmetry: tuple[tuple[str, str], ...] = ()
    field_of_view: str | None = None

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        if not names or len(set(names)) != len(names) or len(set(self.organs)) != len(self.organs):
            raise ValueError(f"{self.name}: needs node groups, and the names of groups and of organs must be unique")
        if self.frame[0] not in ("organs", "axis"):
            raise ValueError(f"{self.name}: frame is ('organs', left, right) or ('axis', a, b), got {self.frame!r}")
        named = [group.organ for group in self.groups if group.organ] + [
            organ for pair in self.symmetry for organ in pair
        ]
        named += list(self.frame[1:]) if self.frame[0] == "organs" else []
        named += [self.field_of_view] if self.field_of_view else []
        unknown = sorted(set(named) - set(self.organs))
        if unknown:
            raise ValueError(f"{self.name}: not among the organs: {', '.join(unknown)}")

    @property
    def landmarks(self) -> tuple[str, ...]:
        """Names of the landmarks that nodes or the frame are made from, in order of appearance."""
        names = [name for group in self.groups for name in group.landmarks]
        names += list(self.frame[1:]) if self.frame[0] == "axis" else []
        return tuple(dict.fromkeys(names))

    @property
    def num_types(self) -> int:
        """Size of the network's table of node types."""
        return max(group.type for group in self.groups) + 1

    def spans(self, scale: float = 1.0) -> Iterator[tuple[NodeGroup, int, int]]:
        """Each group with its first place and its number of places in the fixed order of nodes."""
        start = 0
        for group in self.groups:
            count = group.scaled(scale)
            yield group, start, count
            start += count

    def num_nodes(self, scale: float = 1.0) -> int:
        """Number of nodes of a complete graph."""
        return sum(count for _, _, count in self.spans(scale))

    def node_names(self, scale: float = 1.0) -> tuple[str, ...]:
        """Names in the fixed order: ``slot`` of a graph indexes them. A group of one node bears no number."""
        return tuple(
            f"{group.name} {i:02d}" if group.count > 1 else group.name
            for group, _, count in self.spans(scale)
            for i in range(count)
        )


MODALITIES: dict[str, Modality] = {}


def register_modality(modality: Modality) -> Modality:
    """Make a modality known by its name.

    Raises:
        ValueError: when the name is taken by another one.
    """
    if MODALITIES.setdefault(modality.name, modality) != modality:
        raise ValueError(f"a different modality {modality.name!r} is registered already")
    return modality


def get_modality(modality: str | Modality) -> Modality:
    """The registered modality of that name; a :class:`Modality` is passed through.

    Raises:
        ValueError: for an unknown name.
    """
    if isinstance(modality, Modality):
        return modality
    if modality not in MODALITIES:
        raise ValueError(f"unknown modality {modality!r}: choose from {', '.join(sorted(MODALITIES))}")
    return MODALITIES[modality]


_LEFT, _RIGHT = codes.SCT.Left, codes.SCT.Right

register_modality(
    Modality(
        name="cxr",
        organs=("left_lung", "right_lung", "heart"),
        groups=(
            NodeGroup("left lung boundary", 0, 24, ("boundary", "left_lung"), codes.SCT.Lung, _LEFT),
            NodeGroup("left lung interior", 1, 24, ("interior", "left_lung"), codes.SCT.Lung, _LEFT),
            NodeGroup("right lung boundary", 2, 24, ("boundary", "right_lung"), codes.SCT.Lung, _RIGHT),
            NodeGroup("right lung interior", 3, 24, ("interior", "right_lung"), codes.SCT.Lung, _RIGHT),
            NodeGroup("heart boundary", 4, 16, ("boundary", "heart"), codes.SCT.Heart),
            NodeGroup("heart interior", 5, 16, ("interior", "heart"), codes.SCT.Heart),
        ),
        frame=("organs", "left_lung", "right_lung"),
        symmetry=(("left_lung", "right_lung"),),
    )
)

register_modality(
    Modality(
        name="fundus",
        organs=("optic_disc", "vessels", "field_of_view"),
        groups=(
            NodeGroup("optic disc", 0, 1, ("region", "optic_disc", "optic_disc"), codes.SCT.OpticDiscStructure),
            # pydicom's dictionary has no code for the macula; the node lies at its centre, the fovea
            NodeGroup("macula", 1, 1, ("landmark", "fovea"), codes.SCT.FoveaCentralis),
            NodeGroup("vessel junction", 2, 16, ("landmark", "junctions"), codes.SCT.BloodVessel),
            NodeGroup("polar anchor", 3, 16, ("polar", "optic_disc", "fovea"), codes.SCT.Retina, rings=(1.0, 2.0)),
        ),
        frame=("axis", "optic_disc", "fovea"),
        field_of_view="field_of_view",
    )
)
