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
"""Do the nodes with the highest attribution carry the decision? Insertion and deletion curves, with intervals."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Batch
from tqdm import tqdm

from monai_god.data.protocol import RetrievalMetadata, RetrievalProtocol
from monai_god.engines.cached_graphs import graph_tensors
from monai_god.files import written_aside
from monai_god.metrics.bootstrap import bootstrap_interval, patient_bootstrap
from monai_god.metrics.pairs import patient_codes
from monai_god.networks.nets.god_net import GoDNet
from monai_god.transforms.graph.anatomy_graph import AnatomyGraph

from .attributions import METHODS, GraphBatch, attribute_nodes, node_ranks, scope_embedding

__all__ = ["GraphSource", "available_methods", "faithfulness_audit", "load_graphs"]

MODES = ("deletion", "insertion")


class GraphSource(Protocol):
    """Graphs with node features, such as :class:`CachedGraphDataset`."""

    patient_ids: list[str]
    items: list[dict[str, Any]]

    def __len__(self) -> int: ...

    def graph(self, index: int) -> AnatomyGraph: ...


def available_methods(net: GoDNet, scope: str) -> tuple[str, ...]:
    """The attribution methods that this network has in this scope."""
    exact = scope == "embedding" and net.matched
    return METHODS if exact else tuple(method for method in METHODS if method != "contribution")


def load_graphs(source: GraphSource, index: Sequence[int] | NDArray[np.int64], device: torch.device) -> GraphBatch:
    """A batch of some of the graphs."""
    return GraphBatch(*graph_tensors(Batch.from_data_list([source.graph(int(i)) for i in index]), device))


def _random_ranks(mask: Tensor, queries: Sequence[int], seed: int, order: int) -> Tensor:
    """The same ranks in random order, drawn for each query on its own, whatever the batch."""
    ranks = torch.full(mask.shape, mask.shape[1], dtype=torch.long)
    for row, query in enumerate(queries):
        present = mask[row].nonzero().flatten().cpu()
        drawn = np.random.default_rng([seed, order, int(query)]).permutation(len(present))
        ranks[row, present] = torch.from_numpy(drawn)
    return ranks.to(mask.device)


class _Retrieval:
    """Is the most similar valid gallery image one of the query's patient? Ties count as misses."""

    def __init__(self, gallery: Tensor, patient: NDArray[np.int64], protocol: RetrievalProtocol, meta: Any) -> None:
        self.gallery, self.patient, self.protocol, self.meta = gallery, patient, protocol, meta

    def rules(self, queries: Sequence[int]) -> tuple[Tensor, Tensor]:
        """bool [q, n]: valid images of the same patient, and of others."""
        valid = self.protocol.valid_pairs(queries, np.arange(len(self.patient)), self.meta) & self.meta.is_gallery
        same = self.patient[list(queries)][:, None] == self.patient[None]
        device = self.gallery.device
        return torch.from_numpy(valid & same).to(device), torch.from_numpy(valid & ~same).to(device)

    def nearest(self, embedding: Tensor, right: Tensor, wrong: Tensor) -> Tensor:
        return (embedding @ self.gallery.T).masked_fill(~(right | wrong), -torch.inf).argmax(1)

    def hits(self, embedding: Tensor, right: Tensor, wrong: Tensor) -> NDArray[np.bool_]:
        similarity = embedding @ self.gallery.T
        best = [similarity.masked_fill(~which, -torch.inf).amax(1) for which in (right, wrong)]
        return (best[0] > best[1]).cpu().numpy()


@torch.no_grad()
def _gallery(net: GoDNet, source: GraphSource, scope: str, batch_size: int, device: torch.device) -> Tensor:
    rows = [
        scope_embedding(net(*load_graphs(source, range(start, min(start + batch_size, len(source))), device)), scope)
        for start in range(0, len(source), batch_size)
    ]
    return torch.cat(rows)


def _key(net: GoDNet, source: GraphSource, settings: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, value in sorted(net.state_dict().items()):
        digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    digest.update("\n".join(str(item.get("image")) for item in source.items).encode())
    return digest.hexdigest()[:16]


def faithfulness_audit(
    net: GoDNet,
    source: GraphSource,
    *,
    methods: Sequence[str] | None = None,
    scope: str = "embedding",
    protocol: RetrievalProtocol | None = None,
    fractions: Sequence[float] = tuple(np.linspace(0, 1, 21).round(4)),
    random_orders: int = 10,
    signed: bool | None = None,
    seed: int = 0,
    bootstrap: int = 1000,
    batch_size: int = 64,
    device: torch.device | str = "cpu",
    work_dir: str | Path | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """
    Insertion and deletion curves of R1 over the nodes of the query's graph (spec of the audit; paper Fig. 4).

    The pair that is attributed is the query and the image ranked first for its whole graph. Deletion: the m nodes of
    highest attribution are taken from every query's graph, with their edges, the graph is encoded again and ranked
    against the whole gallery. Insertion: from no nodes, they are put back in that order. Random: the same m in random
    order. Delta deletion AUC = mean of the random curve minus that of the method (above 0: faithful), delta insertion
    AUC the other way round; intervals by a bootstrap over patients.

    Args:
        net: the network; put into evaluation mode.
        source: the test images.
        methods: attribution methods, see :func:`attribute_nodes`; None for all that the network has.
        scope: ``"graph"`` for g_G, ``"embedding"`` for z.
        protocol: of the retrieval.
        fractions: of the query's nodes taken away or put back, ascending from 0 to 1.
        random_orders: number of random orders.
        signed: see :func:`node_ranks`.
        seed: of these and of the bootstrap.
        bootstrap: resamples.
        batch_size: graphs per pass.
        device: where to compute.
        work_dir: where finished parts are kept, so that a killed audit goes on; None for no such thing.
        progress: show a progress bar.

    Returns:
        JSON-ready: ``scope``, ``queries``, ``fractions``, ``curves`` (order -> mode -> R1 at each fraction; ``random``
        is the mean of its orders), ``delta`` (method -> mode -> ``value``, ``ci95``), ``graphs_per_second`` (measured
        over the parts that were not taken from ``work_dir``), ``protocol``.

    Raises:
        ValueError: for a network without a graph, an unknown method, fractions out of order, or no query.
    """
    net.eval()
    if net.encoder is None:
        raise ValueError("Level (A) has no graph, so nothing to delete from it.")
    steps = np.asarray(fractions, dtype=np.float64)
    if steps.ndim != 1 or len(steps) < 2 or steps[0] != 0 or steps[-1] != 1 or (np.diff(steps) <= 0).any():
        raise ValueError(f"fractions must ascend from 0 to 1, got {list(fractions)}")
    if random_orders < 1:
        raise ValueError(f"random_orders must be positive, got {random_orders}")
    chosen = available_methods(net, scope) if methods is None else tuple(methods)
    rules, where = protocol or RetrievalProtocol(), torch.device(device)
    net.to(where)
    named = zip(source.items, source.patient_ids, strict=True)
    meta = RetrievalMetadata.from_items([{**item, "patient_id": patient} for item, patient in named])
    queries = rules.query_gallery(meta).query
    if not len(queries):
        raise ValueError("no image has another valid image of its patient to find: look at the protocol's rules")
    folder = None
    if work_dir is not None:
        settings = {
            "methods": chosen,
            "scope": scope,
            "protocol": rules.to_dict(),
            "fractions": steps.tolist(),
            "random_orders": random_orders,
            "signed": signed,
            "seed": seed,
            "batch_size": batch_size,
        }
        folder = Path(work_dir) / f"faithfulness_{_key(net, source, settings)}"
        folder.mkdir(parents=True, exist_ok=True)
    patient = patient_codes(source.patient_ids)
    retrieval = _Retrieval(_gallery(net, source, scope, batch_size, where), patient, rules, meta)
    orders = [*chosen, *(f"random {k}" for k in range(random_orders))]
    parts, encoded, seconds = [], 0, 0.0
    bar = tqdm(total=len(queries), desc=f"audit, {scope}", unit="query", disable=not progress, mininterval=1)
    for start in range(0, len(queries), batch_size):
        part = queries[start : start + batch_size]
        kept = None if folder is None else folder / f"{start:09d}.npz"
        if kept is not None and kept.is_file():
            with np.load(kept, allow_pickle=False) as saved:
                parts.append(saved["hits"])
        else:
            begin = time.perf_counter()
            hits, passes = _curves(
                net, source, retrieval, part, chosen, random_orders, signed, scope, steps, seed, where
            )
            seconds, encoded = seconds + time.perf_counter() - begin, encoded + passes * len(part)
            parts.append(hits)
            if kept is not None:
                with written_aside(kept) as aside, aside.open("wb") as file:
                    np.savez_compressed(file, hits=hits)
        bar.update(len(part))
    bar.close()
    hits = np.concatenate(parts, axis=-1)  # [orders, modes, fractions, queries]
    return _report(hits, orders, chosen, patient[queries], steps, seed, bootstrap) | {
        "scope": scope,
        "protocol": rules.to_dict(),
        "graphs_per_second": encoded / seconds if encoded else None,
    }


def _curves(
    net: GoDNet,
    source: GraphSource,
    retrieval: _Retrieval,
    queries: NDArray[np.int64],
    methods: Sequence[str],
    random_orders: int,
    signed: bool | None,
    scope: str,
    steps: NDArray[np.float64],
    seed: int,
    device: torch.device,
) -> tuple[NDArray[np.bool_], int]:
    """bool [orders, modes, fractions, queries], and the number of passes through the network."""
    index = [int(q) for q in queries]
    batch = load_graphs(source, index, device)
    mask = batch.dense.mask
    right, wrong = retrieval.rules(index)
    with torch.no_grad():
        whole = scope_embedding(net(*batch), scope)
        partner = net(*load_graphs(source, retrieval.nearest(whole, right, wrong).tolist(), device))
    # a node that says nothing: the mean of these
    baseline = batch.nodes[mask].mean(0)
    ranks = [
        node_ranks(attribute_nodes(net, batch, partner, method, scope, baseline=baseline), mask, method, signed)
        for method in methods
    ]
    ranks += [_random_ranks(mask, index, seed, k) for k in range(random_orders)]
    count = mask.sum(1, keepdim=True)
    hits = np.empty((len(ranks), len(MODES), len(steps), len(index)), dtype=bool)
    with torch.no_grad():
        full = retrieval.hits(whole, right, wrong)
        none = retrieval.hits(scope_embedding(net(*batch.keep(torch.zeros_like(mask))), scope), right, wrong)
        passes = 3
        for row, rank in enumerate(ranks):
            for column, fraction in enumerate(steps):
                taken = rank < (fraction * count + 0.5).floor()
                for mode, keep in enumerate((~taken, taken)):
                    if fraction in (0, 1):
                        hits[row, mode, column] = full if (fraction == 0) == (mode == 0) else none
                    else:
                        embedding = scope_embedding(net(*batch.keep(keep)), scope)
                        hits[row, mode, column] = retrieval.hits(embedding, right, wrong)
                        passes += 1
    return hits, passes


def _report(
    hits: NDArray[np.bool_],
    orders: Sequence[str],
    methods: Sequence[str],
    patient: NDArray[np.int64],
    steps: NDArray[np.float64],
    seed: int,
    bootstrap: int,
) -> dict[str, Any]:
    curves = hits.mean(-1)
    auc = hits.mean(2)  # [orders, modes, queries]
    chance = auc[len(methods) :].mean(0)
    delta: dict[str, Any] = {}
    for row, method in enumerate(methods):
        delta[method] = {}
        for mode, name in enumerate(MODES):
            difference = (chance[mode] - auc[row, mode]) * (1 if name == "deletion" else -1)
            interval = bootstrap_interval(patient_bootstrap(difference, patient, bootstrap, seed))
            delta[method][name] = {"value": float(difference.mean()), "ci95": interval.tolist()}
    shown = {order: curves[row] for row, order in enumerate(orders[: len(methods)])}
    shown["random"] = curves[len(methods) :].mean(0)
    return {
        "queries": int(hits.shape[-1]),
        "patients": len(np.unique(patient)),
        "fractions": steps.tolist(),
        "random_orders": len(orders) - len(methods),
        "curves": {order: dict(zip(MODES, curve.tolist(), strict=True)) for order, curve in shown.items()},
        "delta": delta,
    }
