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
"""Who is compared with whom: patient-disjoint splits, and the query and gallery rules of a retrieval evaluation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

__all__ = ["QueryGallery", "RetrievalMetadata", "RetrievalProtocol", "split_by_patient"]

DEFAULT_FRACTIONS = {"training": 0.7, "validation": 0.1, "testing": 0.2}


def _codes(values: Sequence[Any]) -> np.ndarray:
    """Small integers in order of first appearance; None is -1."""
    table: dict[Any, int] = {}
    return np.asarray([-1 if v is None else table.setdefault(v, len(table)) for v in values], dtype=np.int64)


def _duplicate_groups(items: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Connected components of ``near_duplicate_of``; -1 for an item that nobody duplicates.

    Two images that name a third one are near-duplicates of each other, also where the third is not among the items.
    """
    if not any(item.get("near_duplicate_of") for item in items):
        return np.full(len(items), -1, dtype=np.int64)
    # an image without a path (features only) is a node of its own
    names = [str(item["image"]) if isinstance(item.get("image"), str) else object() for item in items]
    node: dict[Any, int] = {}
    for name in names:
        node.setdefault(name, len(node))
    edges = [
        (node[name], node.setdefault(str(item["near_duplicate_of"]), len(node)))
        for name, item in zip(names, items, strict=True)
        if item.get("near_duplicate_of")
    ]
    rows, columns = np.asarray(edges).T
    graph = coo_array((np.ones(len(edges)), (rows, columns)), shape=(len(node), len(node)))
    labels = connected_components(graph, directed=False)[1]
    groups = labels[[node[name] for name in names]].astype(np.int64)
    alone = np.bincount(groups, minlength=len(node))[groups] < 2
    groups[alone] = -1
    return groups


class RetrievalMetadata:
    """What a protocol must know of n images, as integer codes; -1 is unknown.

    Args:
        patient: [n] patient of each image: integers >= 0, or str (coded here).
        visit: [n] study or visit. Codes need only be unique within a patient.
        laterality: [n] 0 left, 1 right.
        camera: [n] device.
        duplicate_group: [n] images with the same code are near-duplicates of each other.
        is_query: [n] bool, images that may ask; all by default.
        is_gallery: [n] bool, images that may be found; all by default.

    Raises:
        ValueError: lengths differ, or a patient is unknown.
    """

    def __init__(
        self,
        patient: Sequence[Any] | np.ndarray,
        visit: Sequence[int] | np.ndarray | None = None,
        laterality: Sequence[int] | np.ndarray | None = None,
        camera: Sequence[int] | np.ndarray | None = None,
        duplicate_group: Sequence[int] | np.ndarray | None = None,
        is_query: Sequence[bool] | np.ndarray | None = None,
        is_gallery: Sequence[bool] | np.ndarray | None = None,
    ) -> None:
        patients = np.asarray(patient)
        if patients.ndim != 1:
            raise ValueError(f"patient must have one dimension, got shape {patients.shape}.")
        if not np.issubdtype(patients.dtype, np.integer):
            patients = _codes(patients.tolist())
        n = len(patients)

        def array(name: str, values: Any, fill: int | bool, dtype: Any) -> np.ndarray:
            result = np.full(n, fill, dtype=dtype) if values is None else np.asarray(values, dtype=dtype)
            if result.shape != (n,):
                raise ValueError(f"{name} has shape {result.shape}, but there are {n} images.")
            return result

        self.patient = array("patient", patients, -1, np.int64)
        self.visit = array("visit", visit, -1, np.int64)
        self.laterality = array("laterality", laterality, -1, np.int64)
        self.camera = array("camera", camera, -1, np.int64)
        self.duplicate_group = array("duplicate_group", duplicate_group, -1, np.int64)
        self.is_query = array("is_query", is_query, True, bool)
        self.is_gallery = array("is_gallery", is_gallery, True, bool)
        if (self.patient < 0).any():
            raise ValueError(f"{int((self.patient < 0).sum())} images have no patient: they cannot be evaluated.")

    @classmethod
    def from_items(cls, items: Sequence[Mapping[str, Any]]) -> RetrievalMetadata:
        """Codes from datalist items.

        Keys read: ``patient_id``; where present ``visit``, ``laterality``, ``camera``, ``image`` with
        ``near_duplicate_of``, ``is_query``, ``is_gallery``.

        Raises:
            ValueError: an item has no ``patient_id``, or its laterality is neither L nor R.
        """
        without = sum(item.get("patient_id") is None for item in items)
        if without:
            raise ValueError(f"{without} of {len(items)} items have no 'patient_id'.")
        sides: dict[Any, int] = {None: -1, "L": 0, "R": 1}
        unknown = {item.get("laterality") for item in items} - set(sides)
        if unknown:
            raise ValueError(f"laterality must be 'L' or 'R', found {sorted(map(str, unknown))}.")
        return cls(
            patient=_codes([str(item["patient_id"]) for item in items]),
            visit=_codes(
                [None if item.get("visit") is None else (str(item["patient_id"]), str(item["visit"])) for item in items]
            ),
            laterality=[sides[item.get("laterality")] for item in items],
            camera=_codes([item.get("camera") for item in items]),
            duplicate_group=_duplicate_groups(items),
            is_query=[bool(item.get("is_query", True)) for item in items],
            is_gallery=[bool(item.get("is_gallery", True)) for item in items],
        )

    def __len__(self) -> int:
        return len(self.patient)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(images={len(self)}, patients={len(np.unique(self.patient))})"


class QueryGallery(NamedTuple):
    """Who asks and who may be found.

    Args:
        query: [q] indices of the images that ask; each has at least one valid image of its patient in the gallery.
        gallery: [g] indices of the images that may be found.
        left_out: images that may ask, but have no valid image of their patient to find.
        singletons: patients with a single image.
    """

    query: np.ndarray
    gallery: np.ndarray
    left_out: int
    singletons: int


@dataclass(frozen=True)
class RetrievalProtocol:
    """The rules of a retrieval evaluation, printed with every result since they change what its figures mean.

    Every image is a query against all other images, minus the pairs that a rule
    makes invalid. A query without any valid image of its patient is reported and left out.

    Args:
        singletons: patients with a single image stay in the gallery as ``"distractors"``, or ``"leave_out"``.
        exclude_same_visit: an image of the query's own visit is neither a hit nor a miss. Only where both visits
            are known: the rule cannot remove what the datalist does not say.
        exclude_near_duplicates: an image marked as near-duplicate of the query is neither a hit nor a miss,
            whatever patient it is filed under: finding a copy proves nothing.
        laterality: ``"any"``; ``"same_eye"``: the gallery of a query is the images of the same side;
            ``"contralateral_eye"``: of the other side. For all patients alike; images of unknown side take no part.
        camera: ``"any"``; ``"different_camera"``: an image of the query's patient counts only where both cameras are
            known and differ, while images of other patients stay whatever their camera, so that a model that
            recognises the camera loses.

    Raises:
        ValueError: an unknown rule.
    """

    singletons: str = "distractors"
    exclude_same_visit: bool = False
    exclude_near_duplicates: bool = True
    laterality: str = "any"
    camera: str = "any"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("singletons", ("distractors", "leave_out")),
            ("laterality", ("any", "same_eye", "contralateral_eye")),
            ("camera", ("any", "different_camera")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}.")

        for name in ("exclude_same_visit", "exclude_near_duplicates"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}.")

    def to_dict(self) -> dict[str, Any]:
        """The rules as JSON-ready values."""
        return asdict(self)

    def valid_pairs(
        self,
        query_index: np.ndarray | Sequence[int],
        gallery_index: np.ndarray | Sequence[int],
        meta: RetrievalMetadata,
    ) -> np.ndarray:
        """Which pairs are compared; the others are neither hit nor miss. For one block of a streaming metric.

        Args:
            query_index: [q] indices into ``meta``.
            gallery_index: [g] indices into ``meta``.
            meta: all images.

        Returns:
            [q, g] bool. An image is never paired with itself.
        """
        query = np.asarray(query_index)[:, None]
        gallery = np.asarray(gallery_index)[None, :]
        valid = query != gallery
        if self.exclude_near_duplicates:
            group = meta.duplicate_group
            valid &= (group[query] != group[gallery]) | (group[query] < 0)
        if self.laterality != "any":
            side = meta.laterality
            known = (side[query] >= 0) & (side[gallery] >= 0)
            valid &= known & ((side[query] == side[gallery]) == (self.laterality == "same_eye"))
        if self.exclude_same_visit or self.camera != "any":
            other_patient = meta.patient[query] != meta.patient[gallery]
            if self.exclude_same_visit:
                visit = meta.visit
                valid &= other_patient | (visit[query] != visit[gallery]) | (visit[query] < 0)
            if self.camera != "any":
                camera = meta.camera
                known = (camera[query] >= 0) & (camera[gallery] >= 0)
                valid &= other_patient | (known & (camera[query] != camera[gallery]))
        return valid

    def query_gallery(self, meta: RetrievalMetadata) -> QueryGallery:
        """The queries and the gallery of a set of images; see :py:class:`QueryGallery`."""
        order = np.argsort(meta.patient, kind="stable")
        images = np.bincount(meta.patient)
        of_patient = np.split(order, np.flatnonzero(np.diff(meta.patient[order])) + 1) if len(order) else []
        gallery = meta.is_gallery.copy()
        if self.singletons == "leave_out":
            gallery &= images[meta.patient] > 1
        query = np.zeros(len(meta), dtype=bool)
        for members in of_patient:
            if len(members) > 1:
                query[members] = self.valid_pairs(members, members[gallery[members]], meta).any(axis=1)
        query &= meta.is_query
        return QueryGallery(
            query=np.flatnonzero(query),
            gallery=np.flatnonzero(gallery),
            left_out=int((meta.is_query & ~query).sum()),
            singletons=int((images == 1).sum()),
        )


def split_by_patient(
    items: Sequence[Mapping[str, Any]],
    fractions: Mapping[str, float] | None = None,
    seed: int = 0,
    stratify_by: str = "source",
) -> dict[str, list[dict[str, Any]]]:
    """Split items into patient-disjoint sections.

    Patients are dealt in shares of each source, those with several images apart from those with one, so that every
    section gets its part of both. Patients that share a near-duplicate image (one person under two ids, or an error
    of filing) stay together. The result does not depend on the order of the items.

    Args:
        items: datalist items with ``patient_id``.
        fractions: share of the patients by section, summing to 1; by default 0.7 training, 0.1 validation, 0.2 testing.
        seed: of the shuffling.
        stratify_by: the key whose values are dealt evenly.

    Returns:
        items by section, in their given order; a section may be empty where there are few patients.

    Raises:
        ValueError: fractions that are negative or do not sum to 1, or an item without ``patient_id``.
    """
    shares = dict(DEFAULT_FRACTIONS if fractions is None else fractions)
    values = np.asarray(list(shares.values()), dtype=float)
    if not len(values) or (values < 0).any() or not np.isclose(values.sum(), 1.0):
        raise ValueError(f"fractions must be >= 0 and sum to 1, got {shares}.")
    without = sum(item.get("patient_id") is None for item in items)
    if without:
        raise ValueError(f"{without} of {len(items)} items have no 'patient_id'.")
    if not items:
        return {name: [] for name in shares}

    patients = [str(item["patient_id"]) for item in items]
    patient = _codes(patients)
    group = _duplicate_groups(items)
    linked = group >= 0
    n_patients = int(patient.max()) + 1
    size = n_patients + int(group.max()) + 1
    graph = coo_array((np.ones(linked.sum()), (patient[linked], n_patients + group[linked])), shape=(size, size))
    cluster = connected_components(graph, directed=False)[1][patient]

    members: dict[int, list[int]] = defaultdict(list)
    for index, label in enumerate(cluster.tolist()):
        members[label].append(index)
    strata: dict[tuple[str, bool], list[tuple[str, list[int]]]] = defaultdict(list)
    for indices in members.values():
        sources = Counter(str(items[i].get(stratify_by, "")) for i in indices)
        source = min(sources, key=lambda name: (-sources[name], name))
        strata[source, len(indices) > 1].append((min(patients[i] for i in indices), indices))

    rng = np.random.default_rng(seed)
    counts = np.zeros(len(values))
    section_of = np.empty(len(items), dtype=np.int64)
    for stratum in sorted(strata):
        clusters = sorted(strata[stratum])
        for position in rng.permutation(len(clusters)):
            # to the section that is furthest behind its share: exact over any run of patients, to within one or two
            chosen = int(np.argmax(np.where(values > 0, values * (counts.sum() + 1) - counts, -np.inf)))
            counts[chosen] += 1
            section_of[clusters[position][1]] = chosen
    return {
        name: [dict(item) for item, section in zip(items, section_of, strict=True) if section == number]
        for number, name in enumerate(shares)
    }
