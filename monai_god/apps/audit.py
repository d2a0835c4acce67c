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
"""``monai-god audit``: which anatomy decided, and can it be trusted; ``shortcut``: does it read the scanner."""

from __future__ import annotations

import argparse
import csv
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.bundle.workflows import ConfigWorkflow
from tqdm import tqdm

from monai_god.audit import (
    CONDITIONS,
    GRANULARITIES,
    attribute_nodes,
    case_section,
    faithfulness_audit,
    granularity_table,
    graph_variants,
    load_graphs,
    render_report,
    share_outside,
    shares,
    stress_table,
    view_pair,
)
from monai_god.data import generate_cxr_phantoms, generate_fundus_phantoms
from monai_god.data.datalist import DatalistError, load_section
from monai_god.data.protocol import RetrievalMetadata, RetrievalProtocol
from monai_god.engines import CachedGraphDataset, build_god_net, embed_dataset, load_run
from monai_god.engines.cached_graphs import StoredGraphs
from monai_god.files import written_aside
from monai_god.metrics import SamePatientCalibrator, paired_patient_bootstrap, retrieval_metrics
from monai_god.metrics.bootstrap import bootstrap_interval, patient_bootstrap
from monai_god.metrics.report import versions
from monai_god.networks.nets.god_net import GoDNet
from monai_god.transforms import get_modality
from monai_god.visualize.ranked_lists import choose_queries

__all__ = ["add_parser"]

PARTS = ("faithfulness", "stress", "granularity", "cases")
#: level -> what it overrides in the bundle's training configuration, for the shortcut test
LEVELS: dict[str, dict[str, Any]] = {f"({level})": {"components": level} for level in "ABCDE"}


def _quiet() -> None:
    for name in (None, "ignite", "monai", "monai_god"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _bundle(config_file: str, **overrides: Any) -> ConfigWorkflow:
    if not Path(config_file).is_file():
        raise DatalistError(f"{config_file}: no such file; run from the repository's root, or give --config_file.")
    workflow = ConfigWorkflow(config_file=config_file, workflow_type="train", logging_file=False, **overrides)
    workflow.initialize()
    return workflow


class _Subject:
    """A trained network and the images that it is audited on."""

    def __init__(self, parsed: argparse.Namespace) -> None:
        run = load_run(parsed.ckpt_path)
        self.settings, self.calibration = run["settings"], run.get("calibration")
        output = Path(parsed.output)
        workflow = _bundle(
            parsed.config_file,
            output_dir=str(output),
            cache_dir=str(parsed.cache_dir or output / "cache"),
            dataset_dir=parsed.dataset_dir,
            components=self.settings["components"],
            align=self.settings["align"],
            backbone=self.settings["backbone"],
            num_workers=parsed.num_workers,
        )
        get = workflow.parser.get_parsed_content
        self.modality = get_modality(self.settings["modality"])
        if get("modality") != self.modality.name:
            raise DatalistError(f"{parsed.ckpt_path} is of {self.modality.name}, {parsed.config_file} is not.")
        self.preprocessing, self.backbone, self.store = get("preprocessing"), get("backbone_def"), get("store")
        self.device, self.protocol = get("device"), get("protocol")
        self.workers = parsed.num_workers
        if self.backbone.fingerprint() != self.settings["backbone_fingerprint"]:
            raise DatalistError(f"{parsed.ckpt_path} was trained on a backbone with other weights.")
        self.net: GoDNet = build_god_net(self.settings["network"], run["network"]).to(self.device).eval()
        if self.net.encoder is None:
            raise DatalistError(f"{parsed.ckpt_path} is of level (A), which has no graph: audit another level.")
        self.testing = self.dataset(load_section(parsed.dataset_dir, parsed.section), f"{parsed.section} images")

    def dataset(self, items: Sequence[Mapping[str, Any]], name: str) -> CachedGraphDataset:
        return CachedGraphDataset(
            items,
            self.preprocessing,
            self.backbone,
            self.store,
            num_workers=self.workers,
            device=self.device,
            name=name,
        )

    def variants(self, source: StoredGraphs, names: Sequence[str], what: str) -> dict[str, StoredGraphs]:
        return graph_variants(
            source, names, self.preprocessing, self.backbone, num_workers=self.workers, device=self.device, name=what
        )


def _structures(subject: _Subject, found: np.ndarray, queries: np.ndarray) -> dict[str, Any]:
    """Mean share of each structure in what speaks for the image found first."""
    source, net = subject.testing, subject.net
    method = "contribution" if net.matched else "leave_one_out"
    rows: list[Mapping[str, float]] = []
    for start in tqdm(range(0, len(queries), 64), desc="structures", mininterval=1):
        part = slice(start, start + 64)
        batch = load_graphs(source, queries[part], subject.device)
        with torch.no_grad():
            partner = net(*load_graphs(source, found[part], subject.device))
            own = net(*batch)
        attribution = attribute_nodes(net, batch, partner, method)
        rows += shares(attribution, own.slot, own.mask, subject.modality)
    names = [group.name for group in subject.modality.groups]
    values = np.array([[row[name] for name in names] for row in rows])
    patients = [source.patient_ids[q] for q in queries]
    interval = bootstrap_interval(patient_bootstrap(values, patients, 1000, 0))
    order = np.argsort(-values.mean(0))
    return {names[k]: {"value": float(values[:, k].mean()), "ci95": interval[:, k].tolist()} for k in order}


def _nearest(z: np.ndarray, items: Sequence[Mapping[str, Any]], query: int, protocol: RetrievalProtocol) -> int:
    """The image found first for a query."""
    meta = RetrievalMetadata.from_items(items)
    valid = protocol.valid_pairs([query], np.arange(len(items)), meta)[0] & meta.is_gallery
    return int(np.where(valid, z @ z[query], -np.inf).argmax())


def _cases(
    subject: _Subject, z: np.ndarray, result: Mapping[str, Any], count: int, show_names: bool
) -> tuple[list[str], list[dict[str, Any]]]:
    source, figures = subject.testing, result["per_query"]
    calibrate = None if subject.calibration is None else SamePatientCalibrator.from_dict(subject.calibration)
    sections: list[str] = []
    rows: list[dict[str, Any]] = []
    for kind, positions in choose_queries(figures, count).items():
        for place in positions.tolist():
            query = int(figures["query"][place])
            found = _nearest(z, source.items, query, subject.protocol)
            view = view_pair(subject.net, source.graph(query), source.graph(found), subject.modality)
            same = source.patient_ids[query] == source.patient_ids[found]
            number = len(sections) + 1
            text = f"The image found first shows {'the same' if same else 'another'} patient; similarity "
            text += f"{view.similarity:.3f}"
            if calibrate is not None:
                text += f", probability of the same patient {float(calibrate(np.array([view.similarity]))[0]):.3f}"
            text += f". The first image of the query's patient ranks {int(figures['first_rank'][place])}."
            if show_names:
                text += f" Files: {source.items[query]['image']}, {source.items[found]['image']}."
            images = [subject.preprocessing(dict(source.items[i]))["image"] for i in (query, found)]
            sections.append(
                case_section(number, f"Case {number}: {kind}", text, view, images, subject.modality)
            )  # fmt: skip
            rows.append(
                {
                    "case": number,
                    "kind": kind,
                    "same_patient": same,
                    "similarity": view.similarity,
                    "rank_of_own": int(figures["first_rank"][place]),
                    "method": view.method,
                    "shares": dict(view.shares),
                    "nodes": [[node._asdict() for node in nodes] for nodes in view.nodes],
                }
                | ({"files": [str(source.items[i]["image"]) for i in (query, found)]} if show_names else {})
            )
    return sections, rows


def _csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with written_aside(path) as aside, aside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


def _tables(folder: Path, content: Mapping[str, Any]) -> None:
    """The figures of the page as CSV files."""
    parts = content.get("faithfulness") or []
    if parts:
        _csv(
            folder / "curves.csv",
            ("scope", "order", "mode", "fraction", "rank1"),
            [
                (part["scope"], order, mode, fraction, value)
                for part in parts
                for order, modes in part["curves"].items()
                for mode, values in modes.items()
                for fraction, value in zip(part["fractions"], values, strict=True)
            ],
        )
        _csv(
            folder / "delta.csv",
            ("scope", "method", "mode", "delta_auc", "low", "high"),
            [
                (part["scope"], method, mode, cell["value"], *cell["ci95"])
                for part in parts
                for method, modes in part["delta"].items()
                for mode, cell in modes.items()
            ],
        )
    for name, groups in (("stress", ("queries", "all")), ("granularity", (None,))):
        table = content.get(name)
        if not table:
            continue
        rows = []
        for key, cells in table.items():
            for group in groups:
                cell = cells if group is None else cells.get(group)
                if cell is None:
                    continue
                for metric in ("rank1", "map"):
                    change = cell[metric].get("change", {"value": "", "ci95": ("", "")})
                    values = (cell[metric]["value"], *cell[metric]["ci95"], change["value"], *change["ci95"])
                    rows.append((key, group or "all", metric, *values))
        head = (name, "spoiled", "metric", "value", "low", "high", "change", "change_low", "change_high")
        _csv(folder / f"{name}.csv", head, rows)


def _audit(parsed: argparse.Namespace) -> int:
    _quiet()
    subject = _Subject(parsed)
    output, source = Path(parsed.output), subject.testing
    z = embed_dataset(subject.net, source, subject.device)
    metadata = RetrievalMetadata.from_items(source.items)
    result = retrieval_metrics(z, source.patient_ids, protocol=subject.protocol, metadata=metadata, per_query=True)
    found = np.array([_nearest(z, source.items, int(q), subject.protocol) for q in result["per_query"]["query"]])
    content: dict[str, Any] = {
        "title": f"Audit of anatomy: {subject.modality.name}, level ({subject.settings['components']})",
        "facts": {
            "Images": f"{len(source)} ({len(source.failed)} left out), {result['queries']} queries of "
            f"{result['patients']} patients",
            "Protocol": ", ".join(f"{rule} {value}" for rule, value in subject.protocol.to_dict().items()),
            "Rank-1": f"{result['rank1']:.3f}, 95 % {result['ci95']['rank1'][0]:.3f} to "
            f"{result['ci95']['rank1'][1]:.3f}",
            "mAP": f"{result['map']:.3f}, 95 % {result['ci95']['map'][0]:.3f} to {result['ci95']['map'][1]:.3f}",
            "Backbone": subject.settings["backbone"],
            "Versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        },
        "structures": _structures(subject, found, result["per_query"]["query"]),
    }
    if "faithfulness" in parsed.parts:
        content["faithfulness"] = [
            faithfulness_audit(
                subject.net,
                source,
                scope=scope,
                protocol=subject.protocol,
                random_orders=parsed.random_orders,
                device=subject.device,
                work_dir=output / "parts",
            )
            for scope in ("graph", "embedding")
        ]
        for part in content["faithfulness"]:
            for method, modes in part["delta"].items():
                cell = modes["deletion"]
                low, high = cell["ci95"]
                print(
                    f"{part['scope']:9} {method:20} delta deletion AUC {cell['value']:+.3f} [{low:+.3f}, {high:+.3f}]"
                )
    if "stress" in parsed.parts:
        sets = subject.variants(source, ["as it is", *CONDITIONS.values()], f"{parsed.section} images")
        named = {"as it is": sets["as it is"], **{name: sets[what] for name, what in CONDITIONS.items()}}
        content["stress"] = stress_table(subject.net, named, subject.protocol, subject.device)
    if "granularity" in parsed.parts:
        names = [f"scale {scale:g}" for scale in GRANULARITIES]
        training = subject.dataset(load_section(parsed.dataset_dir, "training"), "training images")
        fitted, tested = (
            dict(zip(GRANULARITIES, subject.variants(data, names, what).values(), strict=True))
            for data, what in ((training, "training images"), (source, f"{parsed.section} images"))
        )
        content["granularity"] = granularity_table(
            subject.settings["network"], subject.modality, fitted, tested, subject.protocol, subject.device
        )
    sections: list[str] = []
    if "cases" in parsed.parts:
        sections, content["cases"] = _cases(subject, z, result, parsed.cases, parsed.show_names)
    _tables(output, content)
    with written_aside(output / "audit.json") as aside:
        aside.write_text(json.dumps(content, indent=1), encoding="utf-8")
    with written_aside(output / "audit.html") as aside:
        aside.write_text(render_report(content, sections), encoding="utf-8")
    print(f"written to {output / 'audit.html'}, with the same figures in audit.json and the .csv files")
    return 0


def _shortcut_figures(
    workflow: ConfigWorkflow, folder: Path, sets: Mapping[str, str], pairs: int, seed: int
) -> dict[str, Any]:
    """R1 of each query on each set, and shares of the attribution outside the anatomy on the last."""
    get = workflow.parser.get_parsed_content
    net, device = get("net"), get("device")
    net.load_state_dict(load_run(folder / "model.pt")["network"])
    out: dict[str, Any] = {}
    for name, path in sets.items():
        dataset = CachedGraphDataset(
            load_section(path, "testing"), get("preprocessing"), get("backbone_def"), get("store"),
            num_workers=int(get("num_workers")), device=device, name=f"{name} images",
        )  # fmt: skip
        z = embed_dataset(net, dataset, device)
        result = retrieval_metrics(z, dataset.patient_ids, per_query=True, bootstrap=0)
        figures = result["per_query"]
        out[name] = (figures["first_rank"] <= 1).astype(float)
        out["patients"] = [dataset.patient_ids[q] for q in figures["query"]]
        chosen = np.random.default_rng(seed).permutation(figures["query"])[:pairs]
        found = [(int(q), _nearest(z, dataset.items, int(q), RetrievalProtocol())) for q in chosen]
        out["outside"] = share_outside(net, get("backbone_def"), get("preprocessing"), dataset.items, found, z, device)
    return out


def _shortcut(parsed: argparse.Namespace) -> int:
    _quiet()
    work = Path(parsed.work_dir)
    modality = _bundle(parsed.config_file, output_dir=str(work)).parser.get_parsed_content("modality")
    draw = {"cxr": generate_cxr_phantoms, "fundus": generate_fundus_phantoms}[modality]
    sets = {
        artefact: str(draw(work / f"{modality}_{artefact}", patients=parsed.patients, seed=7, artefact=artefact).parent)
        for artefact in ("none", "follows_patient", "shuffled")
    }
    tested = {name: sets[name] for name in ("follows_patient", "shuffled")}
    lines = []
    for level, settings in LEVELS.items():
        cells = []
        for trained_on in ("follows_patient", "none"):
            folder = work / f"{modality}_{settings['components']}_{trained_on}"
            overrides = {**settings, "dataset_dir": sets[trained_on], "cache_dir": str(work / "cache")}
            overrides |= {"epochs": parsed.epochs, "num_workers": parsed.num_workers, "output_dir": str(folder)}
            print(f"level {level}, trained on phantoms with artefact {trained_on}", flush=True)
            workflow = _bundle(parsed.config_file, **overrides)
            workflow.run()
            workflow.finalize()
            figures = _shortcut_figures(workflow, folder, tested, parsed.pairs, 0)
            drop = paired_patient_bootstrap(figures["follows_patient"], figures["shuffled"], figures["patients"])
            low, high = drop["ci95"]
            outside = figures["outside"].mean(0)
            cells += [
                f"{figures['follows_patient'].mean():.3f}",
                f"{figures['shuffled'].mean():.3f}",
                f"{drop['difference']:+.3f} [{low:+.3f}, {high:+.3f}]",
                f"{100 * outside[0]:.0f} % (area {100 * outside[1]:.0f} %)",
            ]
        lines.append(f"| {level} | " + " | ".join(cells) + " |")
    columns = ("R1, artefact follows", "R1, shuffled", "change", "attribution outside anatomy")
    head = [f"{kind}: {column}" for kind in ("trained with shortcut", "trained without") for column in columns]
    text = [
        f"# Shortcut test, {modality}",
        "",
        "Made by",
        "",
        f"    monai-god shortcut --config_file {parsed.config_file} --patients {parsed.patients} "
        f"--epochs {parsed.epochs} --output {parsed.output}",
        "",
        "Phantoms whose scanner leaves a strong artefact (marker, border, film curve or colour cast). Trained once",
        "with artefacts that follow the patient, once without strong ones; tested on other patients, with artefacts",
        "that follow the patient and with the same artefacts shuffled between images. Change: shuffled minus",
        "following, 95 % interval over patients. Attribution: gradient on the backbone's map, shuffled set,",
        f"{parsed.pairs} pairs; what lies outside the convex hull of the organs.",
        "",
        "| level | " + " | ".join(head) + " |",
        "|---" * (len(head) + 1) + "|",
        *lines,
        "",
    ]
    with written_aside(parsed.output) as aside:
        aside.write_text("\n".join(text), encoding="utf-8")
    print("\n".join(text[-len(lines) - 3 :]))
    return 0


def add_parser(subparsers: Any) -> None:
    """Add the commands ``audit`` and ``shortcut``."""
    parser = subparsers.add_parser(
        "audit",
        help="which anatomy decided, and can it be trusted: one HTML page, JSON and CSV",
        description="Audit a trained network on one section of a data set. A run that was killed goes on.",
    )
    parser.add_argument("--dataset_dir", required=True, help="folder with datalist.json, or such a file")
    parser.add_argument("--section", default="testing")
    parser.add_argument("--config_file", default="bundles/god_cxr/configs/train.json", help="of the bundle")
    parser.add_argument("--ckpt_path", default="bundles/god_cxr/models/model.pt", help="model.pt of a training run")
    parser.add_argument("--output", required=True, help="folder to write to")
    parser.add_argument("--cache_dir", help="features of the backbone, shared with training (default: in the output)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="granularity needs `training`")
    parser.add_argument("--random_orders", type=int, default=10)
    parser.add_argument("--cases", type=int, default=2, help="of each kind: best, median, worst")
    parser.add_argument("--show_names", action="store_true", help="name the image files, which may identify patients")
    parser.add_argument("--num_workers", type=int, default=2)
    parser.set_defaults(run=_audit)

    parser = subparsers.add_parser("shortcut", help="does a network read the scanner: a test on phantoms")
    parser.add_argument("--config_file", default="bundles/god_cxr/configs/train.json", help="of the bundle")
    parser.add_argument("--output", required=True, help="Markdown file to write")
    parser.add_argument("--work_dir", default=os.path.join(tempfile.gettempdir(), "monai_god_shortcut"))
    parser.add_argument("--patients", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=40, help="pairs whose attribution is measured")
    parser.add_argument("--num_workers", type=int, default=2)
    parser.set_defaults(run=_shortcut)
