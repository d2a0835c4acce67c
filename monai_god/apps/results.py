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
"""``monai-god results``: the table of levels, every row trained and tested by the bundle's own configuration."""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.bundle.workflows import ConfigWorkflow

from monai_god.data.datalist import DatalistError, load_section
from monai_god.data.protocol import RetrievalMetadata, RetrievalProtocol
from monai_god.engines import CachedGraphDataset, embed_dataset, load_run
from monai_god.files import written_aside
from monai_god.metrics import paired_patient_bootstrap, retrieval_metrics
from monai_god.metrics.bootstrap import bootstrap_interval, patient_bootstrap
from monai_god.metrics.report import versions
from monai_god.metrics.retrieval import RETRIEVAL_METRICS, metric_values

__all__ = ["LEVELS", "RAW", "add_parser"]

#: name of a row -> what it overrides in the bundle's training configuration
LEVELS: dict[str, dict[str, Any]] = {
    "(A) backbone only": {"components": "A"},
    "(B) + graph": {"components": "B"},
    "(C) + correspondence": {"components": "C"},
    "(D) + difference alignment": {"components": "D"},
    "(D) without the correspondence triplet": {"components": "D", "correspondence_triplet": False},
    "(D) with one pool and 512 numbers, as in the paper": {"components": "D", "typed_pooling": False, "embed_dim": 512},
    "(E) alignment alone": {"components": "E", "matched": False},
    "(E) matched similarity alone": {"components": "E", "align": "none"},
    "(E) alignment and matched similarity": {"components": "E"},
    "(A) random head, as in the paper": {"components": "A", "head_init": "random", "embed_dim": 512},
    "(D) random head, one pool, 512 numbers, as in the paper": {
        "components": "D",
        "head_init": "random",
        "typed_pooling": False,
        "embed_dim": 512,
    },
    "(A) on the backbone's last layer": {"components": "A", "backbone": "efficientnet_lite0"},
    "(E) on the backbone's last layer": {"components": "E", "backbone": "efficientnet_lite0"},
}
RAW = "features of the backbone, untrained"
#: pairs of rows whose difference is tested
COMPARISONS = (
    ("(A) backbone only", "(D) + difference alignment"),
    ("(A) backbone only", "(E) alignment alone"),
    ("(A) backbone only", "(E) matched similarity alone"),
    ("(A) backbone only", "(E) alignment and matched similarity"),
    ("(D) + difference alignment", "(E) alignment and matched similarity"),
)
SHOWN = ("rank1", "map")
#: name of a protocol -> its rules, and what it means
PROTOCOLS: dict[str, tuple[RetrievalProtocol, str]] = {
    "any": (
        RetrievalProtocol(),
        "every image of the section is a query against all its other images",
    ),
    "same_eye": (
        RetrievalProtocol(laterality="same_eye"),
        "the gallery of a query is the images of the same side, of all patients; images of unknown side take no part",
    ),
    "contralateral_eye": (
        RetrievalProtocol(laterality="contralateral_eye"),
        "the gallery of a query is the images of the other side, of all patients, so that the only match is the other "
        "eye; images of unknown side take no part",
    ),
    "different_visit": (
        RetrievalProtocol(exclude_same_visit=True),
        "images of the query's own visit are left out",
    ),
    "different_camera": (
        RetrievalProtocol(camera="different_camera"),
        "of the query's patient only images of another known camera count, of other patients all",
    ),
}


@dataclass
class _Row:
    """Figures of one row on one set: a list entry for each seed, [queries, metrics]."""

    patients: list[str] = field(default_factory=list)
    seeds: list[np.ndarray] = field(default_factory=list)

    def mean(self) -> np.ndarray:
        """[queries, metrics], averaged over seeds."""
        return np.mean(self.seeds, axis=0)


def _measure(row: _Row, z: np.ndarray, items: Sequence[Mapping[str, Any]], protocol: str) -> None:
    metadata = RetrievalMetadata.from_items(items)
    patients = [item["patient_id"] for item in items]
    result = retrieval_metrics(
        z, patients, protocol=PROTOCOLS[protocol][0], metadata=metadata, per_query=True, bootstrap=0
    )
    row.patients = [str(p) for p in result["per_query"]["patient"]]
    row.seeds.append(metric_values(result["per_query"]))


def _train(config: Path, overrides: Mapping[str, Any], output: Path) -> ConfigWorkflow:
    """Run the bundle's training in this process; a run that is finished is taken as it is."""
    workflow = ConfigWorkflow(
        config_file=str(config), workflow_type="train", logging_file=False, output_dir=str(output), **overrides
    )
    workflow.initialize()
    workflow.run()
    workflow.finalize()
    return workflow


def _datasets(workflow: ConfigWorkflow, external: str | None) -> dict[str, CachedGraphDataset]:
    get = workflow.parser.get_parsed_content
    sets = {"testing": get("test#dataset")}
    if external is not None:
        sets["external"] = CachedGraphDataset(
            load_section(external, "testing"),
            get("preprocessing"),
            get("backbone_def"),
            get("store"),
            num_workers=int(get("num_workers")),
            device=get("device"),
            name="external images",
        )
    return sets


def _raw(dataset: CachedGraphDataset) -> np.ndarray:
    g = np.concatenate([dataset.graph(i).g.numpy() for i in range(len(dataset))])
    return g / np.linalg.norm(g, axis=1, keepdims=True)


def _interval(values: np.ndarray, patients: list[str]) -> str:
    low, high = bootstrap_interval(patient_bootstrap(values, patients, 1000, 0))
    return f"{values.mean():.3f} [{low:.3f}, {high:.3f}]"


def _table(rows: Mapping[str, _Row]) -> list[str]:
    lines = ["| | R1 | mAP | R1 of each seed |", "|---|---|---|---|"]
    for name, row in rows.items():
        cells = [_interval(row.mean()[:, RETRIEVAL_METRICS.index(metric)], row.patients) for metric in SHOWN]
        each = ", ".join(f"{s[:, RETRIEVAL_METRICS.index('rank1')].mean():.3f}" for s in row.seeds)
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {each} |")
    return lines


def _comparisons(rows: Mapping[str, _Row]) -> list[str]:
    lines = ["| from | to | R1 | mAP |", "|---|---|---|---|"]
    for first, second in COMPARISONS:
        if first not in rows or second not in rows:
            continue
        cells = []
        for metric in SHOWN:
            column = RETRIEVAL_METRICS.index(metric)
            a, b = rows[first].mean()[:, column], rows[second].mean()[:, column]
            test = paired_patient_bootstrap(a, b, rows[first].patients)
            low, high = test["ci95"]
            cells.append(f"{test['difference']:+.3f} [{low:+.3f}, {high:+.3f}]")
        lines.append(f"| {first} | {second} | {cells[0]} | {cells[1]} |")
    return lines


def _run(parsed: argparse.Namespace) -> int:
    if not Path(parsed.config_file).is_file():
        raise DatalistError(
            f"{parsed.config_file}: no such file; run from the repository's root, or give --config_file."
        )
    logging.getLogger().setLevel(logging.WARNING)
    for name in ("ignite", "monai", "monai_god"):
        logging.getLogger(name).setLevel(logging.WARNING)
    work = Path(parsed.work_dir)
    sets = ["testing"] if parsed.external_dir is None else ["testing", "external"]
    tables = {(key, protocol): {RAW: _Row()} for key in sets for protocol in parsed.protocols}
    names = [name for name in LEVELS if parsed.rows is None or any(name.startswith(row) for row in parsed.rows)]
    for name in names:
        for seed in parsed.seeds:
            folder = work / f"{name}".translate(str.maketrans(" +,()", "_____")) / f"seed{seed}"
            overrides = {
                **LEVELS[name],
                "dataset_dir": parsed.dataset_dir,
                "cache_dir": str(work / "cache"),
                "seed": seed,
                "epochs": parsed.epochs,
                "num_workers": parsed.num_workers,
            }
            print(f"{name}, seed {seed}", flush=True)
            workflow = _train(Path(parsed.config_file), overrides, folder)
            net, device = workflow.parser.get_parsed_content("net"), workflow.parser.get_parsed_content("device")
            net.load_state_dict(load_run(folder / "model.pt")["network"])
            for key, dataset in _datasets(workflow, parsed.external_dir).items():
                z, raw = embed_dataset(net, dataset, device), _raw(dataset)
                for protocol in parsed.protocols:
                    rows = tables[key, protocol]
                    _measure(rows.setdefault(name, _Row()), z, dataset.items, protocol)
                    if not rows[RAW].seeds:
                        _measure(rows[RAW], raw, dataset.items, protocol)
    _write(Path(parsed.output), tables, parsed)
    print(f"written to {parsed.output}")
    return 0


def _write(path: Path, tables: Mapping[tuple[str, str], Mapping[str, _Row]], parsed: argparse.Namespace) -> None:
    titles = {
        "testing": "Held-out patients of the same sources",
        "external": "Zero-shot: another source, never trained on",
    }
    options = [f"--dataset_dir {parsed.dataset_dir}"]
    if parsed.external_dir is not None:
        options.append(f"--external_dir {parsed.external_dir}")
    if parsed.protocols != ["any"]:
        options.append(f"--protocols {' '.join(parsed.protocols)}")
    options += [
        f"--config_file {parsed.config_file} --epochs {parsed.epochs}",
        f"--seeds {' '.join(map(str, parsed.seeds))} --output {parsed.output}",
    ]
    lines = [f"# {parsed.title}", "", "Made by", "", "    monai-god results " + " ".join(options), ""]
    lines += [
        "In brackets: 95 % intervals, bootstrap over patients, 1,000 resamples. The figure of a row is the mean over",
        "its seeds; a row's network is the one that validated best, its start included. Heads start from the closed",
        "form unless the row says otherwise.",
        "",
    ]
    for (key, protocol), rows in tables.items():
        first = next(iter(rows.values()))
        heading = titles[key] if protocol == "any" else f"{titles[key]}: {protocol.replace('_', ' ')}"
        lines += [
            f"## {heading}",
            "",
            f"Protocol `{protocol}`: {PROTOCOLS[protocol][1]}.",
            "",
            f"{len(first.patients)} queries, {len(set(first.patients))} patients with",
            "",
        ]
        lines[-2] += " two images or more."
        lines += [
            *_table(rows),
            "",
            "Differences on the same queries, paired over patients:",
            "",
            *_comparisons(rows),
            "",
        ]
    lines += [
        "Versions: " + ", ".join(f"{k} {v}" for k, v in versions().items()) + f"; {torch.get_num_threads()} threads.",
        "",
    ]
    with written_aside(path) as aside:
        aside.write_text("\n".join(lines), encoding="utf-8")


def add_parser(subparsers: Any) -> None:
    """Add the command ``results``."""
    parser = subparsers.add_parser(
        "results",
        help="train and test every level on a data set, and write the table",
        description="Train and test every level with several seeds by the bundle's configuration; finished runs in "
        "the work folder are not repeated.",
    )
    parser.add_argument(
        "--dataset_dir", required=True, help="folder with datalist.json (training, validation, testing)"
    )
    parser.add_argument("--external_dir", help="folder with datalist.json (testing) of another source")
    parser.add_argument("--config_file", default="bundles/god_cxr/configs/train.json", help="of the bundle")
    parser.add_argument("--output", required=True, help="Markdown file to write")
    parser.add_argument("--title", default="Results on chest X-rays", help="of the page")
    parser.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=["any"], help="one table for each")
    parser.add_argument("--work_dir", default=os.path.join(tempfile.gettempdir(), "monai_god_results"))
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", help="only rows that start with one of these, for example '(A)' '(E)'")
    parser.add_argument("--num_workers", type=int, default=2)
    parser.set_defaults(run=_run)
