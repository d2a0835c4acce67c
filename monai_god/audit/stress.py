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
"""Is it the anatomy? Test images whose graphs are spoiled in a known way, and graphs of other granularity."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from monai.transforms import Compose
from scipy import ndimage
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch_geometric.data import Batch
from tqdm import tqdm

from monai_god.data.feature_store import FeatureStore, feature_key
from monai_god.data.protocol import RetrievalMetadata, RetrievalProtocol
from monai_god.engines.cached_graphs import StoredGraphs, content_hash, describe_transform, graph_tensors, stored_form
from monai_god.engines.runs import embed_dataset
from monai_god.metrics import paired_patient_bootstrap, retrieval_metrics
from monai_god.metrics.bootstrap import bootstrap_interval, patient_bootstrap
from monai_god.metrics.retrieval import RETRIEVAL_METRICS, metric_values
from monai_god.networks.nets.backbones import Backbone
from monai_god.networks.nets.god_net import GoDNet
from monai_god.transforms.anatomy import DilateAnatomy
from monai_god.transforms.graph import AnatomyGraph, BuildAnatomyGraph, BuildAnatomyGraphd, DropNodes, Modality
from monai_god.transforms.graph.functional import nearest_neighbour_adjacency, pooling_weights

__all__ = ["CONDITIONS", "GRANULARITIES", "build_variant", "granularity_table", "graph_variants", "stress_table"]

logger = logging.getLogger(__name__)

#: name -> what :func:`build_variant` does; the first five are the paper's Table 5
CONDITIONS: dict[str, str] = {
    "10 % of the nodes dropped": "drop 0.1",
    "30 % of the nodes dropped": "drop 0.3",
    "50 % of the nodes dropped": "drop 0.5",
    "masks dilated by 5 px": "dilate 5",
    "masks dilated by 10 px": "dilate 10",
    "anatomy shifted by 5 %": "shift 0.05",
    "anatomy shifted by 10 %": "shift 0.1",
    "left and right swapped": "swap",
    "anatomy of another patient": "other",
    "nodes at random places": "random",
}
#: the paper's Table 6
GRANULARITIES = (0.5, 0.75, 1.0, 1.5, 2.0)


def _rng(anatomy: np.ndarray, seed: int = 0) -> np.random.Generator:
    """Fixed by the seed and the anatomy itself, so that neither order nor workers matter."""
    return np.random.default_rng([seed, zlib.crc32(np.ascontiguousarray(anatomy).tobytes())])


def _shift(
    anatomy: np.ndarray, landmarks: Mapping[str, np.ndarray], modality: Modality, share: float, size: tuple[int, int]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Masks and landmarks moved by ``share`` of the side, in a direction drawn for the image; not the field of view."""
    angle = _rng(anatomy).uniform(0, 2 * np.pi)
    along = share * np.array([np.cos(angle), np.sin(angle)])
    pixels = np.rint(along[::-1] * anatomy.shape[1:])
    moved = np.stack(
        [
            mask if organ == modality.field_of_view else ndimage.shift(mask, pixels, order=0)
            for organ, mask in zip(modality.organs, anatomy, strict=True)
        ]
    )
    return moved, {name: at + along * np.array(size[::-1]) for name, at in landmarks.items()}


def _swap(
    anatomy: np.ndarray, landmarks: Mapping[str, np.ndarray], modality: Modality
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The masks of paired organs exchanged, or the two ends of the frame's axis."""
    masks, points = anatomy.copy(), dict(landmarks)
    for left, right in modality.symmetry:
        a, b = modality.organs.index(left), modality.organs.index(right)
        masks[[a, b]] = anatomy[[b, a]]
    if modality.frame[0] == "axis":
        ends = dict(zip(modality.frame[1:], modality.frame[:0:-1], strict=True))
        points = {ends.get(name, name): at for name, at in points.items()}
    return masks, points


def _scatter(graph: AnatomyGraph, anatomy: np.ndarray, build: BuildAnatomyGraph) -> AnatomyGraph:
    """The same named nodes at random places of the image (of its field of view, where it has one), nearest joined."""
    count, size = int(graph.num_nodes or 0), anatomy.shape[1]
    view = build.modality.field_of_view
    ground = np.ones(anatomy.shape[1:], bool) if view is None else anatomy[build.modality.organs.index(view)] > 0
    cells = np.argwhere(ground if ground.any() else ~ground)
    rng = _rng(anatomy)
    points = cells[rng.integers(len(cells), size=count)][:, ::-1] + rng.uniform(-0.5, 0.5, (count, 2))
    points = points.clip(0, size - 1)
    pool = pooling_weights(points, np.full(count, -1), anatomy > 0, build.radius * size, build.grid)
    out = graph.clone()
    out.pos = torch.from_numpy(((points + 0.5) / size).astype(np.float32))
    out.pool = torch.from_numpy(pool.astype(np.float32))
    out.edge_index = torch.from_numpy(np.stack(np.nonzero(nearest_neighbour_adjacency(points, build.k))))
    return out


def build_variant(
    what: str,
    build: BuildAnatomyGraph,
    anatomy: Tensor,
    landmarks: Mapping[str, Any],
    size: tuple[int, int],
    other: tuple[Tensor, Mapping[str, Any]] | None = None,
) -> AnatomyGraph:
    """
    The graph of an image under one condition. The image itself stays as it is.

    Args:
        what: ``"as it is"``, a value of :data:`CONDITIONS` such as ``"drop 0.3"``, or ``"scale 1.5"``.
        build: the graph's builder.
        anatomy: {0, 1} [organs, S, S].
        landmarks: name to [K, 2] (x, y) in pixels of the image.
        size: (height, width) of the image.
        other: anatomy and landmarks of another patient's image, for ``"other"``.

    Raises:
        ValueError: for an unknown condition, or ``"other"`` without one.
    """
    kind, _, text = what.partition(" ")
    masks = np.asarray(anatomy)
    points = {name: np.asarray(at, dtype=np.float64).reshape(-1, 2) for name, at in landmarks.items()}
    if what == "as it is":
        return build(masks, points, size)
    if kind == "drop":
        graph = build(masks, points, size)
        return DropNodes(float(text))(graph) if graph.num_nodes else graph
    if kind == "dilate":
        return build(DilateAnatomy(float(text), build.modality)(torch.as_tensor(masks)), points, size)
    if kind == "shift":
        return build(*_shift(masks, points, build.modality, float(text), size), size)
    if kind == "swap":
        return build(*_swap(masks, points, build.modality), size)
    if kind == "other":
        if other is None:
            raise ValueError("the condition 'other' needs another patient's anatomy")
        return build(other[0], other[1], size)
    if kind == "random":
        return _scatter(build(masks, points, size), masks, build)
    if kind == "scale":
        scaled = BuildAnatomyGraph(
            build.modality, float(text), build.k, build.radius, build.grid, build.interior_order, allow_empty=True
        )
        return scaled(masks, points, size)
    raise ValueError(f"unknown condition {what!r}: one of {', '.join(CONDITIONS.values())}, or 'scale NUMBER'")


class _Variants(Dataset):  # type: ignore[type-arg]
    """Runs the transform and builds the graphs in the workers; a bad item becomes its error's text."""

    def __init__(
        self,
        items: Sequence[Mapping[str, Any]],
        others: Sequence[Mapping[str, Any] | None],
        wanted: Sequence[Sequence[str]],
        transform: Callable[[Any], Any],
        builder: BuildAnatomyGraphd,
    ) -> None:
        self.items, self.others, self.wanted = items, others, wanted
        self.transform, self.builder = transform, builder

    def __len__(self) -> int:
        return len(self.items)

    def _prepare(self, item: Mapping[str, Any]) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
        d = self.transform(dict(item))
        image = torch.as_tensor(d[self.builder.image_key]).float()
        anatomy = torch.as_tensor(d[self.builder.keys[0]])
        return image, anatomy, d.get(self.builder.landmarks_key) or {}

    def __getitem__(self, index: int) -> tuple[int, Any]:
        torch.set_num_threads(1)
        try:
            image, anatomy, landmarks = self._prepare(self.items[index])
            other = None
            item = self.others[index]
            if "other" in self.wanted[index] and item is not None:
                other = self._prepare(item)[1:]
            size = (int(image.shape[-2]), int(image.shape[-1]))
            graphs = {
                what: build_variant(what, self.builder.build, anatomy, landmarks, size, other)
                for what in self.wanted[index]
            }
            return index, (image, graphs)
        except Exception as error:  # a long run goes on without the item and counts it
            cause: BaseException = error
            while str(cause).startswith("applying transform") and cause.__cause__ is not None:
                cause = cause.__cause__
            return index, str(cause)


def _another(source: StoredGraphs, index: int, content: str) -> int | None:
    """
    An image of another patient, drawn for each image anew: were it the same for all images of a patient, they would
    know each other by it.
    """
    if source.num_patients < 2:
        return None
    rng = np.random.default_rng(int(content[:12], 16))
    while source.patient_ids[drawn := int(rng.integers(len(source)))] == source.patient_ids[index]:
        pass
    return drawn


def graph_variants(
    source: StoredGraphs,
    variants: Sequence[str],
    preprocessing: Compose,
    backbone: Backbone,
    num_workers: int = 0,
    device: torch.device | str = "cpu",
    batch_size: int = 8,
    name: str = "images",
) -> dict[str, StoredGraphs]:
    """
    The graphs of a data set under several conditions, on features of one pass of the backbone per image; what the store
    has already is not made again, so that a killed run goes on.

    The graph is spoiled after the image was aligned: only where it is read changes, not the image.

    Args:
        source: the data set as it is; its items and store are used.
        variants: see :func:`build_variant`.
        preprocessing: ends with :class:`BuildAnatomyGraphd`.
        backbone: of the features.
        num_workers: processes that prepare the images.
        device: of the backbone.
        batch_size: images per pass.
        name: of the progress bar.

    Returns:
        for each variant the data set; items that failed are in none of them.

    Raises:
        ValueError: when the preprocessing does not end with the graph's builder.
    """
    steps = list(preprocessing.transforms)
    if not steps or not isinstance(steps[-1], BuildAnatomyGraphd):
        raise ValueError("the preprocessing must end with BuildAnatomyGraphd, whose graphs are spoiled")
    builder, store = steps[-1], source.store
    hashes = [content_hash(item) for item in source.items]
    others = [_another(source, i, hashes[i]) for i in range(len(source))]
    described, fingerprint = describe_transform(preprocessing), backbone.fingerprint()

    def key(index: int, what: str) -> str:
        settings: dict[str, Any] = {"transform": described, "condition": what}
        other = others[index]
        if what == "other" and other is not None:
            settings["other"] = hashes[other]
        return feature_key(hashes[index], settings, fingerprint)

    missing = [[what for what in variants if key(i, what) not in store] for i in range(len(source))]
    todo = [i for i, wanted in enumerate(missing) if wanted]
    rows = _Variants(
        [source.items[i] for i in todo],
        [None if (other := others[i]) is None else source.items[other] for i in todo],
        [missing[i] for i in todo],
        Compose(steps[:-1]),
        builder,
    )
    failed = _extract(rows, todo, key, backbone, store, num_workers, torch.device(device), batch_size, name)
    if failed:
        logger.warning("%d of %d %s left out, the first because: %s", len(failed), len(source), name, failed[0])
    good = [i for i in range(len(source)) if all(key(i, what) in store for what in variants)]
    return {
        what: StoredGraphs([source.items[i] for i in good], [key(i, what) for i in good], store) for what in variants
    }


def _extract(
    rows: _Variants,
    todo: Sequence[int],
    key: Callable[[int, str], str],
    backbone: Backbone,
    store: FeatureStore,
    num_workers: int,
    device: torch.device,
    batch_size: int,
    name: str,
) -> list[str]:
    failed: list[str] = []
    if not todo:
        return failed
    backbone = backbone.to(device)
    loader = DataLoader(rows, batch_size=batch_size, num_workers=num_workers, collate_fn=list)
    bar = tqdm(total=len(todo), desc=f"variants of {name}", unit="image", mininterval=1)
    for batch in loader:
        failed += [content for _, content in batch if isinstance(content, str)]
        good = [(row, content) for row, content in batch if not isinstance(content, str)]
        if good:
            with torch.no_grad():
                g, feature_map = backbone(torch.stack([image for _, (image, _) in good]).to(device))
            g, flat = g.cpu(), feature_map.flatten(2).transpose(1, 2).float().cpu()
            for k, (row, (_, graphs)) in enumerate(good):
                for what, graph in graphs.items():
                    store.put(key(todo[row], what), stored_form(graph, flat[k], g[k], graph.get("problems") or []))
        bar.update(len(batch))
    bar.close()
    return failed


def _figures(
    z: np.ndarray, source: StoredGraphs, protocol: RetrievalProtocol, asking: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """[queries, 2] R1 and average precision of each query, and its patient."""
    result = retrieval_metrics(
        z,
        source.patient_ids,
        protocol=protocol,
        metadata=RetrievalMetadata.from_items(source.items),
        per_query=True,
        bootstrap=0,
        query_embeddings=asking,
    )
    columns = [RETRIEVAL_METRICS.index(name) for name in ("rank1", "map")]
    return metric_values(result["per_query"])[:, columns], result["per_query"]["patient"]


def _row(figures: np.ndarray, patients: np.ndarray, against: np.ndarray | None, bootstrap: int) -> dict[str, Any]:
    interval = bootstrap_interval(patient_bootstrap(figures, patients, bootstrap))
    row: dict[str, Any] = {}
    for column, name in enumerate(("rank1", "map")):
        row[name] = {"value": float(figures[:, column].mean()), "ci95": interval[:, column].tolist()}
        if against is not None:
            change = paired_patient_bootstrap(against[:, column], figures[:, column], patients, resamples=bootstrap)
            row[name]["change"] = {"value": change["difference"], "ci95": list(change["ci95"])}
    return row


def stress_table(
    net: GoDNet,
    variants: Mapping[str, StoredGraphs],
    protocol: RetrievalProtocol | None = None,
    device: torch.device | str = "cpu",
    bootstrap: int = 1000,
) -> dict[str, dict[str, Any]]:
    """
    R1 and mAP with spoiled graphs (paper Table 5 and more).

    Args:
        net: the network.
        variants: of :func:`graph_variants`, with ``"as it is"``.
        protocol: of the retrieval.
        device: where to compute.
        bootstrap: patient resamples.

    Returns:
        for each variant ``"queries"``: only the graphs of the images that ask are spoiled, and ``"all"``: those of the
        gallery too; each with ``rank1`` and ``map`` as ``value``, ``ci95`` and, but for ``"as it is"``, ``change``
        (paired over patients).
    """
    rules = protocol or RetrievalProtocol()
    clean = variants["as it is"]
    gallery = embed_dataset(net, clean, device)
    plain, patients = _figures(gallery, clean, rules)
    table: dict[str, dict[str, Any]] = {}
    for what, source in variants.items():
        if what == "as it is":
            table[what] = {"all": _row(plain, patients, None, bootstrap)}
            continue
        z = embed_dataset(net, source, device)
        table[what] = {
            "queries": _row(_figures(gallery, clean, rules, z)[0], patients, plain, bootstrap),
            "all": _row(_figures(z, source, rules)[0], patients, plain, bootstrap),
        }
    return table


def granularity_table(
    network: Mapping[str, Any],
    modality: Modality,
    training: Mapping[float, StoredGraphs],
    testing: Mapping[float, StoredGraphs],
    protocol: RetrievalProtocol | None = None,
    device: torch.device | str = "cpu",
    bootstrap: int = 1000,
) -> dict[float, dict[str, Any]]:
    """
    R1 and mAP of networks fitted in closed form to graphs of several granularities (paper Table 6), without gradient
    training, so that nothing but the number of nodes differs.

    Args:
        network: arguments of :class:`GoDNet`; ``num_nodes`` is replaced.
        modality: of the graphs.
        training: granularity -> graphs of the training patients.
        testing: granularity -> graphs to test on, with 1.0.
        protocol: of the retrieval.
        device: where to compute.
        bootstrap: patient resamples.

    Returns:
        for each granularity ``nodes`` of a complete graph, ``rank1`` and ``map`` as in :func:`stress_table`.
    """
    rules = protocol or RetrievalProtocol()
    found: dict[float, tuple[np.ndarray, np.ndarray]] = {}
    for scale, source in training.items():
        torch.manual_seed(0)
        net = GoDNet(**{**network, "num_nodes": modality.num_nodes(scale), "head_init": "closed_form"})
        tensors = graph_tensors(Batch.from_data_list([source.graph(i) for i in range(len(source))]), "cpu")
        net.initialise_closed_form(*tensors, source.patient_ids)
        z = embed_dataset(net, testing[scale], device)
        found[scale] = _figures(z, testing[scale], rules)
    plain = found[1.0][0]
    return {
        scale: {"nodes": modality.num_nodes(scale)}
        | _row(figures, patients, None if scale == 1.0 else plain, bootstrap)
        for scale, (figures, patients) in found.items()
    }
