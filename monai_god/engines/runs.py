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
import torch.distributed as dist
from monai.inferers import Inferer
from torch.utils.data import DataLoader
from torch_geometric.data import Batch

from monai_god.data.datalist import DATALIST_NAME, load_datalist
from monai_god.data.protocol import RetrievalMetadata, RetrievalProtocol
from monai_god.files import written_aside
from monai_god.gallery.embeddings import write_embeddings
from monai_god.metrics import (
    SamePatientCalibrator,
    pair_histogram,
    retrieval_metrics,
    verification_metrics,
    write_metrics,
)
from monai_god.networks.nets.god_net import GoDNet
from monai_god.transforms.io.functional import IMAGE_SUFFIXES, read_image
from monai_god.visualize import plot_curves, plot_ranked_lists, save_graph_sheet

from .cached_graphs import CachedGraphDataset, StoredGraphs, collate_graphs, graph_tensors

__all__ = [
    "GraphInferer",
    "build_god_net",
    "calibrate_run",
    "embed_dataset",
    "evaluate_run",
    "find_images",
    "initialise_run",
    "load_run",
    "log_to",
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


def build_god_net(settings: Mapping[str, Any], weights: Mapping[str, torch.Tensor] | None = None) -> GoDNet:
    """
    The network of a run.

    Args:
        settings: arguments of :class:`GoDNet`.
        weights: the ``network`` of :func:`load_run`; None for a new network.
    """
    net = GoDNet(**settings)
    if weights is not None:
        net.load_state_dict(weights)
    return net


def log_to(path: str | Path) -> None:
    """Send what is logged to a file too, appended."""
    if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)


def find_images(path: str | Path) -> list[dict[str, Any]]:
    """
    The items to embed: of a datalist's section ``testing`` (patients need not be known), else every image file under a
    folder.

    Raises:
        ValueError: when there is none.
    """
    folder = Path(path)
    if (folder / DATALIST_NAME).is_file() or folder.suffix == ".json":
        return load_datalist(folder, ("testing",), patient_required=False)["testing"]
    files = [file for file in sorted(folder.rglob("*")) if file.name.lower().endswith(IMAGE_SUFFIXES)]
    items = [{"image": str(file), "patient_id": None} for file in files]
    if not items:
        raise ValueError(f"{folder} holds no image: give --dataset_dir a folder of images, or one with {DATALIST_NAME}")
    return items


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


def initialise_run(
    net: torch.nn.Module, loss: torch.nn.Module, dataset: CachedGraphDataset, seed: int, shrinkage: float | str = "cv"
) -> dict[str, float]:
    """
    Start the network and the loss: random numbers of the seed, then, with ``head_init='closed_form'``, the heads from
    the closed form of the training patients and the classifier from their mean embeddings. In a distributed run all
    processes get the start of rank 0.

    Args:
        net: the network, or its DistributedDataParallel.
        loss: the :class:`GoDLoss`, likewise.
        dataset: the training images.
        seed: of the random numbers.
        shrinkage: of the closed form, see :func:`fit_closed_form`.

    Returns:
        what the closed form found, empty for a random start.
    """
    god: Any = getattr(net, "module", net)
    terms: Any = getattr(loss, "module", loss)
    torch.manual_seed(seed)
    god.reset_parameters()
    terms.reset_parameters()
    report: dict[str, float] = {}
    if god.head_init == "closed_form":
        graphs = Batch.from_data_list([dataset.graph(i) for i in range(len(dataset))])
        device = next(god.parameters()).device
        tensors = graph_tensors(graphs, "cpu")
        report = god.cpu().initialise_closed_form(*tensors, dataset.patient_ids, shrinkage=shrinkage)
        god.to(device)
        z = torch.from_numpy(embed_dataset(god, dataset, device)).to(device)
        terms.identity.initialise_from_embeddings(z, torch.tensor(dataset.labels, device=device))
        logger.info("closed form: %s", {k: round(v, 4) for k, v in report.items()})
    if dist.is_available() and dist.is_initialized():
        for tensor in (*god.state_dict().values(), *terms.state_dict().values()):
            dist.broadcast(tensor, src=0)
    return report


@torch.no_grad()
def embed_dataset(
    net: torch.nn.Module, dataset: StoredGraphs, device: torch.device | str, batch_size: int = 64
) -> np.ndarray:
    """z of every image, float32 [n, E], in the dataset's order."""
    god = getattr(net, "module", net).to(device)
    training = god.training
    god.eval()
    loader = DataLoader(dataset, batch_size=batch_size, collate_fn=collate_graphs)
    rows = [god(*graph_tensors(batch["graph"], device)).z.float().cpu().numpy() for batch in loader]
    god.train(training)
    return np.concatenate(rows)


def calibrate_run(
    net: torch.nn.Module,
    dataset: CachedGraphDataset,
    output_dir: str | Path,
    protocol: RetrievalProtocol,
    device: torch.device | str = "cpu",
) -> None:
    """
    Fit the probability that two images show one patient on the validation patients, for the network in ``model.pt``,
    and keep it there as ``calibration`` (see :class:`SamePatientCalibrator`).
    """
    if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return
    path = Path(output_dir) / "model.pt"
    run = load_run(path)
    god = getattr(net, "module", net)
    god.load_state_dict(run["network"])
    histogram = pair_histogram(
        embed_dataset(god, dataset, device),
        dataset.patient_ids,
        protocol=protocol,
        metadata=RetrievalMetadata.from_items(dataset.items),
    )
    run["calibration"] = SamePatientCalibrator().fit_histogram(histogram).to_dict()
    with written_aside(path) as aside:
        torch.save(run, aside)


def evaluate_run(
    net: torch.nn.Module,
    dataset: CachedGraphDataset,
    output_dir: str | Path,
    transform: Callable[[Any], Any],
    protocol: RetrievalProtocol,
    ckpt_path: str | Path,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """
    Evaluate the network of a checkpoint on one section and leave ``metrics.json``, ``ranked_lists.png``,
    ``graphs.png``, ``embeddings.npz`` and, where the folder has a ``history.csv``, ``curves.png`` in the output
    folder.

    Args:
        net: the network, whose weights are replaced by the checkpoint's.
        dataset: the section's images.
        output_dir: where to write.
        transform: of the images, for the pictures.
        protocol: query and gallery rules.
        ckpt_path: the ``model.pt`` of a training run.
        device: where to compute.

    Returns:
        what was written to ``metrics.json``; empty on ranks other than 0.

    Raises:
        ValueError: for a checkpoint that is none, or whose backbone had other weights.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return {}
    run = load_run(ckpt_path)
    settings = run["settings"]
    if settings["backbone_fingerprint"] != dataset.backbone_fingerprint:
        raise ValueError(f"{ckpt_path} was trained on a backbone with other weights: give the same --backbone_weights")
    god = getattr(net, "module", net)
    god.load_state_dict(run["network"])
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    z = embed_dataset(god, dataset, device)
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
    write_embeddings(folder / "embeddings.npz", z, [str(item["image"]) for item in dataset.items])
    plot_ranked_lists(
        folder / "ranked_lists.png",
        z,
        dataset.patient_ids,
        lambda index: _raw_image(dataset.items[index]),
        protocol=protocol,
        metadata=metadata,
        result=result,
    )
    shown = [
        transform(dict(dataset.items[i])) for i in np.linspace(0, len(dataset) - 1, min(8, len(dataset))).astype(int)
    ]
    save_graph_sheet(
        folder / "graphs.png", [d["image"] for d in shown], [d["graph"] for d in shown], settings["modality"]
    )
    history = folder / "history.csv"
    if history.is_file():
        plot_curves(history, folder / "curves.png")
    for name in ("rank1", "map"):
        low, high = result["ci95"][name]
        print(f"{name}: {result[name]:.4f}, 95 % CI {low:.4f} to {high:.4f}")
    print(
        f"{result['queries']} queries, {result['gallery']} images, {result['patients']} patients; written to {folder}"
    )
    print("protocol: " + ", ".join(f"{rule} {value}" for rule, value in protocol.to_dict().items()))
    return report


def _raw_image(item: Mapping[str, Any]) -> np.ndarray:
    return read_image(item["image"])[0]
