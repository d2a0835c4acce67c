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
"""What a bundle's configuration calls: building the network of a run, its evaluation and what it leaves behind."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.inferers import Inferer
from torch.utils.data import DataLoader
from torch_geometric.data import Batch

from monai_god.data.protocol import RetrievalMetadata, RetrievalProtocol
from monai_god.losses import GoDLoss
from monai_god.metrics import retrieval_metrics, verification_metrics, write_metrics
from monai_god.networks.nets.god_net import GoDNet
from monai_god.visualize import plot_curves, plot_ranked_lists, save_graph_sheet

from .cached_graphs import CachedGraphDataset, collate_graphs, graph_tensors

__all__ = [
    "GraphInferer",
    "build_god_net",
    "embed_dataset",
    "evaluate_run",
    "initialise_run",
    "load_run",
    "write_embeddings",
]

logger = logging.getLogger(__name__)


class GraphInferer(Inferer):
    """
    Calls the network on graphs.

    Args:
        embedding_only: give z [B, E] instead of the whole :class:`GoDOutput`, as the metrics' handlers want it.
    """

    def __init__(self, embedding_only: bool = False) -> None:
        super().__init__()
        self.embedding_only = embedding_only

    def __call__(self, inputs: Any, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = network(inputs, *args, **kwargs)
        return output.z if self.embedding_only else output


def build_god_net(settings: Mapping[str, Any], checkpoint: Mapping[str, Any] | None = None) -> GoDNet:
    """
    The network of a run.

    Args:
        settings: arguments of :class:`GoDNet`.
        checkpoint: of :func:`load_run`, whose weights are taken.
    """
    net = GoDNet(**settings)
    if checkpoint is not None:
        net.load_state_dict(checkpoint["network"])
    return net


def load_run(path: str | Path) -> dict[str, Any]:
    """
    Read the ``model.pt`` of a run (``weights_only=True``): ``network`` (weights), ``settings`` (``network`` arguments,
    ``components``, ``backbone``, ``aligned``, ``seed``).

    Raises:
        ValueError: when the file is no run of this package.
    """
    if not Path(path).is_file():
        raise ValueError(f"There is no checkpoint {path}: give --ckpt_path the model.pt of a training run")
    content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or not {"network", "settings"} <= set(content):
        raise ValueError(f"{path} is not the model.pt of a training run of monai_god")
    return content


def _all_tensors(dataset: CachedGraphDataset) -> tuple[Any, torch.Tensor, torch.Tensor]:
    return graph_tensors(Batch.from_data_list([dataset.graph(i) for i in range(len(dataset))]), "cpu")


def initialise_run(net: GoDNet, loss: GoDLoss, dataset: CachedGraphDataset) -> dict[str, float]:
    """
    Start the heads from the closed form of the training patients (``head_init='closed_form'``), and the classifier from
    their mean embeddings. Returns what was fitted; does nothing for a random start.
    """
    if net.head_init != "closed_form":
        return {}
    dense, nodes, g = _all_tensors(dataset)
    report = net.initialise_closed_form(dense, nodes, g, dataset.patient_ids)
    z = torch.cat([_forward(net, dataset, i) for i in range(0, len(dataset), 64)])
    loss.identity.initialise_from_embeddings(z, torch.tensor(dataset.labels))
    logger.info("closed form: %s", {k: round(v, 4) for k, v in report.items()})
    return report


@torch.no_grad()
def _forward(net: GoDNet, dataset: CachedGraphDataset, start: int, count: int = 64) -> torch.Tensor:
    device = next(net.parameters()).device
    rows = [dataset.graph(i) for i in range(start, min(start + count, len(dataset)))]
    dense, nodes, g = graph_tensors(Batch.from_data_list(rows), device)
    training = net.training
    z = net.eval()(dense, nodes, g).z
    net.train(training)
    return z


@torch.no_grad()
def embed_dataset(
    net: torch.nn.Module, dataset: CachedGraphDataset, device: torch.device | str, batch_size: int = 64
) -> np.ndarray:
    """z of every image, float32 [n, E], in the dataset's order."""
    net = getattr(net, "module", net).to(device).eval()
    loader = DataLoader(dataset, batch_size=batch_size, collate_fn=collate_graphs)
    return np.concatenate([net(*graph_tensors(batch["graph"], device)).z.float().cpu().numpy() for batch in loader])


def evaluate_run(
    net: torch.nn.Module,
    dataset: CachedGraphDataset,
    output_dir: str | Path,
    transform: Callable[[Any], Any],
    protocol: RetrievalProtocol,
    settings: Mapping[str, Any],
    modality: str,
    device: torch.device | str = "cpu",
    history: str | Path | None = None,
) -> dict[str, Any]:
    """
    Evaluate a network on one section and leave ``metrics.json``, ``ranked_lists.png``, ``graphs.png``,
    ``embeddings.npz`` and, where a history is given, ``curves.png`` in the output folder.

    Args:
        net: the network; ``dataset``: the section's images.
        output_dir: where to write.
        transform: of the images, for the pictures.
        protocol: query and gallery rules.
        settings: of the run, see :func:`load_run`.
        modality: of the graphs.
        device: where to compute.
        history: CSV with a row per epoch.

    Returns:
        what was written to ``metrics.json``.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    z = embed_dataset(net, dataset, device)
    metadata = RetrievalMetadata.from_items(dataset.items)
    result = retrieval_metrics(z, dataset.patient_ids, protocol=protocol, metadata=metadata, per_query=True)
    verification = verification_metrics(z, dataset.patient_ids, protocol=protocol, metadata=metadata)
    report = write_metrics(
        folder / "metrics.json",
        result,
        components=settings["components"],
        seed=settings["seed"],
        verification=verification,
        failed_images=len(dataset.failed),
        anatomy_problems=dataset.problems(),
    )
    write_embeddings(folder / "embeddings.npz", z, dataset)

    def picture(index: int) -> Any:
        return transform(dict(dataset.items[index]))

    plot_ranked_lists(
        folder / "ranked_lists.png",
        z,
        dataset.patient_ids,
        lambda index: picture(index)["image"],
        protocol=protocol,
        metadata=metadata,
        result=result,
    )
    shown = [picture(i) for i in np.linspace(0, len(dataset) - 1, min(8, len(dataset))).astype(int)]
    save_graph_sheet(folder / "graphs.png", [d["image"] for d in shown], [d["graph"] for d in shown], modality)
    if history is not None and Path(history).is_file():
        plot_curves(history, folder / "curves.png")
    for name in ("rank1", "map"):
        low, high = result["ci95"][name]
        print(f"{name}: {result[name]:.4f} [{low:.4f}, {high:.4f}]")
    print(
        f"{result['queries']} queries, {result['gallery']} images, {result['patients']} patients; written to {folder}"
    )
    return report


def write_embeddings(path: str | Path, z: np.ndarray, dataset: CachedGraphDataset) -> None:
    """Embeddings [n, E] and the file name of each image, as a compressed NumPy archive without pickled objects."""
    aside = Path(path).with_suffix(".tmp.npz")
    aside.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(aside, embeddings=z, images=np.array([str(item["image"]) for item in dataset.items]))
    aside.replace(path)
