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

import csv
import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch_geometric.data import Batch
from tqdm import tqdm

from monai_god.data.datalist import path_keys
from monai_god.data.feature_store import FeatureStore, feature_key
from monai_god.files import written_aside
from monai_god.networks.nets.backbones import Backbone
from monai_god.transforms.graph.anatomy_graph import AnatomyGraph, DenseGraphs, dense_nodes, densify

__all__ = [
    "CachedGraphDataset",
    "StoredGraphs",
    "collate_graphs",
    "content_hash",
    "describe_transform",
    "graph_tensors",
    "prepare_graph_batch",
    "stored_form",
]

logger = logging.getLogger(__name__)
KEPT = ("patient_id", "image", "visit", "laterality", "view", "source", "camera", "near_duplicate_of")


class _Prepared(Dataset):  # type: ignore[type-arg]
    """Runs the transform in the workers; a bad item becomes its error's text."""

    def __init__(self, items: Sequence[Mapping[str, Any]], transform: Callable[[Any], Any]) -> None:
        self.items, self.transform = items, transform

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        torch.set_num_threads(1)
        try:
            d = self.transform(dict(self.items[index]))
            image = torch.as_tensor(d["image"]).float()
            return index, {"image": image, "graph": d["graph"], "quality": d.get("anatomy_quality") or {}}
        except Exception as error:  # a long run goes on without the item and counts it
            cause: BaseException = error
            while str(cause).startswith("applying transform") and cause.__cause__ is not None:
                cause = cause.__cause__  # MONAI's wrapping hides which file and why
            return index, str(cause)


def _rows(rows: list[Any]) -> list[Any]:
    return rows


def describe_transform(transform: Any) -> Any:
    """
    What a transform does, as JSON values: its class and its public settings, those of transforms inside included. A
    transform that depends on more (weights, say) tells it by a method ``fingerprint()``. Part of the store's keys, so
    that features of other settings are never taken for these.
    """
    if transform is None or isinstance(transform, (bool, int, float, str)):
        return transform
    if isinstance(transform, (list, tuple)):
        return [describe_transform(value) for value in transform]
    if isinstance(transform, Mapping):
        return {str(key): describe_transform(value) for key, value in transform.items()}
    if isinstance(transform, (np.ndarray, Tensor)):
        return hashlib.sha256(np.ascontiguousarray(transform).tobytes()).hexdigest()
    name = getattr(transform, "__qualname__", None)
    if name is not None:  # a class or a function
        return f"{transform.__module__}.{name}"
    if isinstance(transform, (torch.device, np.random.RandomState)) or not hasattr(transform, "__dict__"):
        return type(transform).__qualname__
    settings = {key: describe_transform(value) for key, value in vars(transform).items() if key[0] not in "_R"}
    if hasattr(transform, "fingerprint"):
        settings["fingerprint"] = transform.fingerprint()
    return {f"{type(transform).__module__}.{type(transform).__qualname__}": settings}


def content_hash(item: Mapping[str, Any]) -> str:
    """Hash of the bytes of the image and of its anatomy, so that an edited file is not taken for the old one."""
    digest = hashlib.sha256()
    for key in path_keys()[:-1]:  # not the near-duplicate
        value = item.get(key)
        if isinstance(value, (str, os.PathLike)):
            digest.update(key.encode())
            try:
                digest.update(Path(value).read_bytes())
            except OSError:
                digest.update(b"missing")  # the transform says so in words
    if "chexmask" in item:
        digest.update(repr(sorted(dict(item["chexmask"]).items())).encode())
    for key in sorted(item):  # what parsers take from the item itself
        if key == "laterality" or key.endswith("_center"):
            digest.update(f"{key} {item[key]}".encode())
    return digest.hexdigest()


def stored_form(
    graph: AnatomyGraph, feature_map: Tensor, g: Tensor, problems: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """
    What the store keeps of an image.

    Args:
        graph: with pooling weights [N, G].
        feature_map: [G, C], row-major.
        g: [C].
        problems: of the anatomy.

    Raises:
        ValueError: when the graph was built for another grid.
    """
    if graph.pool.shape[1] != len(feature_map):
        raise ValueError(
            f"The graph pools over {graph.pool.shape[1]} cells, the backbone's map has {len(feature_map)}: set "
            "BuildAnatomyGraphd's grid to the backbone's."
        )
    return {
        "g": g.numpy().astype(np.float32),
        "x": (graph.pool @ feature_map).numpy().astype(np.float16),  # Eq. 1
        "node_type": graph.node_type.numpy(),
        "pos": graph.pos.numpy(),
        "edge_index": graph.edge_index.numpy(),
        "slot": graph.slot.numpy(),
        "problems": np.frombuffer("\n".join(problems).encode(), dtype=np.uint8),
    }


class StoredGraphs(Dataset):  # type: ignore[type-arg]
    """
    Anatomy graphs with backbone features that lie in a store.

    Args:
        items: of a datalist section.
        keys: of each item in the store.
        store: where the features are.
    """

    def __init__(self, items: Sequence[Mapping[str, Any]], keys: Sequence[str], store: FeatureStore) -> None:
        self.items, self.keys, self.store = [dict(item) for item in items], list(keys), store
        self.patient_ids = [str(item["patient_id"]) for item in self.items]
        places = {p: i for i, p in enumerate(sorted(set(self.patient_ids)))}
        self.labels = [places[p] for p in self.patient_ids]
        self.num_patients = len(places)

    def __len__(self) -> int:
        return len(self.items)

    def graph(self, index: int) -> AnatomyGraph:
        """The graph of one image, with ``x`` [N, C] and ``g`` [1, C]."""
        arrays = self.store.get(self.keys[index])
        if arrays is None:
            raise KeyError(f"The features of {self.items[index]['image']} have left the store: run again")
        return AnatomyGraph(
            x=torch.from_numpy(arrays["x"].astype(np.float32)),
            g=torch.from_numpy(arrays["g"])[None],
            node_type=torch.from_numpy(arrays["node_type"]),
            pos=torch.from_numpy(arrays["pos"]),
            edge_index=torch.from_numpy(arrays["edge_index"]),
            slot=torch.from_numpy(arrays["slot"]),
            num_nodes=len(arrays["slot"]),
        )

    def problems(self) -> dict[str, int]:
        """How often each problem of the anatomy occurs."""
        counts: dict[str, int] = {}
        for key in self.keys:
            arrays = self.store.get(key)
            text = "" if arrays is None else arrays["problems"].tobytes().decode()
            for problem in filter(None, text.split("\n")):
                counts[problem] = counts.get(problem, 0) + 1
        return counts

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = {key: self.items[index].get(key) for key in KEPT}
        return {"graph": self.graph(index), "label": self.labels[index], "index": index, **item}


class CachedGraphDataset(StoredGraphs):
    """
    Anatomy graphs with backbone features; the frozen backbone sees each image once and the store keeps the result.

    Items that cannot be read or have no usable anatomy are left out, counted in :attr:`failed` and listed (file and
    reason) in ``unreadable.csv`` beside the store. In a distributed run every process extracts its share.

    Args:
        items: of a datalist section, with absolute paths.
        transform: item -> dictionary with ``image`` [3, S, S], ``graph`` and ``anatomy_quality``; deterministic.
        backbone: see :class:`Backbone`.
        store: where features are kept.
        batch_size: images per backbone pass.
        num_workers: processes that run the transform.
        device: of the backbone.
        name: of the progress bar.

    Raises:
        ValueError: when no item is usable.
    """

    def __init__(
        self,
        items: Sequence[Mapping[str, Any]],
        transform: Callable[[Any], Any],
        backbone: Backbone,
        store: FeatureStore,
        batch_size: int = 8,
        num_workers: int = 0,
        device: torch.device | str = "cpu",
        name: str = "images",
    ) -> None:
        self.store, self.name = store, name
        steps = {"transform": describe_transform(transform)}
        self.backbone_fingerprint = backbone.fingerprint()
        keys = [feature_key(content_hash(item), steps, self.backbone_fingerprint) for item in items]
        missing = [i for i, key in enumerate(keys) if key not in store]
        distributed = dist.is_available() and dist.is_initialized()
        if distributed:
            missing = missing[dist.get_rank() :: dist.get_world_size()]
        failed = self._extract([items[i] for i in missing], [keys[i] for i in missing], transform, backbone, batch_size,
                               num_workers, torch.device(device))  # fmt: skip
        if distributed:
            shares: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(shares, failed)
            failed = [f for share in shares for f in share]
        self.failed: list[tuple[str, str]] = failed
        good = [i for i, key in enumerate(keys) if key in store]
        if not good:
            reason = f"; the first reason: {failed[0][1]}" if failed else ""
            raise ValueError(f"None of the {len(items)} {name} is usable{reason}")
        super().__init__([items[i] for i in good], [keys[i] for i in good], store)
        if failed:
            logger.warning("%d of %d %s left out: see unreadable.csv", len(failed), len(items), name)
            self._list_failed(store.path.parent / "unreadable.csv")

    def _list_failed(self, path: Path) -> None:
        with written_aside(path) as aside, aside.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("file", "reason"))
            writer.writerows(self.failed)

    def _extract(
        self,
        items: Sequence[Mapping[str, Any]],
        keys: Sequence[str],
        transform: Callable[[Any], Any],
        backbone: Backbone,
        batch_size: int,
        num_workers: int,
        device: torch.device,
    ) -> list[tuple[str, str]]:
        failed: list[tuple[str, str]] = []
        if not items:
            return failed
        backbone = backbone.to(device)
        loader = DataLoader(
            _Prepared(items, transform), batch_size=batch_size, num_workers=num_workers, collate_fn=_rows
        )
        bar = tqdm(total=len(items), desc=f"features of {self.name}", unit="image", mininterval=1)
        for rows in loader:
            good = [(i, d) for i, d in rows if not isinstance(d, str)]
            failed += [(str(items[i].get("image")), d) for i, d in rows if isinstance(d, str)]
            if good:
                images = torch.stack([d["image"] for _, d in good]).to(device)
                with torch.no_grad():
                    g, feature_map = backbone(images)
                g, flat = g.cpu(), feature_map.flatten(2).transpose(1, 2).float().cpu()
                for row, (i, d) in enumerate(good):
                    problems = d["quality"].get("problems", [])
                    self.store.put(keys[i], stored_form(d["graph"], flat[row], g[row], problems))
            bar.update(len(rows))
        bar.close()
        return failed


def collate_graphs(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows of :class:`CachedGraphDataset` to a batch: a PyG batch of graphs, labels [B], and lists of the rest."""
    batch: dict[str, Any] = {key: [row[key] for row in rows] for key in rows[0] if key not in ("graph", "label")}
    batch = {key: value for key, value in batch.items() if any(v is not None for v in value)}
    batch["graph"] = Batch.from_data_list([row["graph"] for row in rows])
    batch["label"] = torch.tensor([row["label"] for row in rows])
    return batch


def graph_tensors(batch: Any, device: torch.device | str) -> tuple[DenseGraphs, Tensor, Tensor]:
    """A PyG batch to what :class:`GoDNet` takes: dense graphs, nodes [B, N, C], g [B, C]."""
    batch = batch.to(device)
    return densify(batch), dense_nodes(batch.x, batch), batch.g


def prepare_graph_batch(
    batchdata: Mapping[str, Any], device: torch.device | str | None = None, non_blocking: bool = False, **_: Any
) -> tuple[Any, Any, tuple[Any, ...], dict[str, Any]]:
    """
    MONAI's ``prepare_batch`` for graphs: inputs, targets (labels, g), further arguments of the network, no keywords.
    """
    where = torch.device("cpu" if device is None else device)
    dense, nodes, g = graph_tensors(batchdata["graph"], where)
    return dense, (batchdata["label"].to(where), g), (nodes, g), {}
