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

import numpy as np
import pytest
import torch
from pydicom.sr.codedict import codes

from monai_god.transforms.graph import (
    MODALITIES,
    BuildAnatomyGraph,
    Modality,
    NodeGroup,
    get_modality,
    register_modality,
)
from tests.anatomy_masks import ellipse


def dental() -> Modality:
    """A third modality: the jaw's outline and two teeth."""
    return Modality(
        name="dental panoramic",
        organs=("jaw", "incisor", "molar"),
        groups=(
            NodeGroup("jaw boundary", 0, 10, ("boundary", "jaw"), codes.SCT.Mandible),
            NodeGroup("incisor", 1, 1, ("region", "incisor", "incisor"), codes.SCT.Tooth),
            NodeGroup("molar", 1, 1, ("region", "molar", "molar"), codes.SCT.Tooth),
        ),
        frame=("organs", "incisor", "molar"),
    )


def test_a_third_modality_needs_a_table_only() -> None:
    masks = np.stack([ellipse(50, 50, 40, 30, 100), ellipse(50, 40, 5, 9, 100), ellipse(70, 40, 8, 8, 100)])
    graph = BuildAnatomyGraph(dental(), k=3)(masks)
    assert graph.node_name == [*(f"jaw boundary {i:02d}" for i in range(10)), "incisor", "molar"]
    torch.testing.assert_close(graph.pos[10], torch.tensor([0.505, 0.405]))
    assert graph.problems == []
    masks[1] = False
    assert BuildAnatomyGraph(dental(), k=3)(masks).problems == ["incisor not found"]


def test_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monai_god.transforms.graph.modality.MODALITIES", dict(MODALITIES))
    register_modality(dental())
    register_modality(dental())
    assert get_modality("dental panoramic") == dental()
    other = Modality("dental panoramic", ("jaw",), dental().groups[:1], ("axis", "a", "b"))
    with pytest.raises(ValueError, match="registered already"):
        register_modality(other)
    with pytest.raises(ValueError, match="choose from"):
        get_modality("dental")


def test_tables_of_the_paper() -> None:
    cxr, fundus = get_modality("cxr"), get_modality("fundus")
    assert cxr.organs == ("left_lung", "right_lung", "heart")
    assert (cxr.num_nodes(), cxr.num_types, fundus.num_nodes(), fundus.num_types) == (128, 6, 34, 4)
    assert len(set(cxr.node_names())) == 128


@pytest.mark.parametrize("name", sorted(MODALITIES))
def test_codes_are_in_pydicoms_dictionary_and_sides_are_the_patients(name: str) -> None:
    for group in get_modality(name).groups:
        assert group.code.scheme_designator == "SCT"
        assert group.code in {getattr(codes.SCT, keyword) for keyword in codes.SCT.dir(group.code.meaning.split()[0])}
        expected = "Left" if "left" in group.name else "Right" if "right" in group.name else None
        assert (group.side.meaning if group.side else None) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"source": ("edge", "jaw")},
        {"source": ("boundary",)},
        {"count": 0},
        {"type": -1},
        {"rings": (1.0,)},
        {"source": ("region", "jaw", "jaw")},
        {"source": ("polar", "a", "b"), "rings": (1.0, 2.0, 3.0)},
    ],
)
def test_wrong_groups(change: dict) -> None:
    right = {"name": "x", "type": 0, "count": 10, "source": ("boundary", "jaw"), "code": codes.SCT.Mandible}
    NodeGroup(**right)
    with pytest.raises(ValueError):
        NodeGroup(**{**right, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"organs": ("jaw",)},
        {"organs": ("jaw", "incisor", "molar", "jaw")},
        {"frame": ("box", "a", "b")},
        {"symmetry": (("jaw", "nose"),)},
        {"field_of_view": "nose"},
        {"groups": ()},
    ],
)
def test_wrong_tables(change: dict) -> None:
    table = dental()
    right = {"name": "x", "organs": table.organs, "groups": table.groups, "frame": table.frame}
    Modality(**right)
    with pytest.raises(ValueError):
        Modality(**{**right, **change})
