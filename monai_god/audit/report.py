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
"""The audit as one page that opens from disk: no network, no identifiers, keyboard and printer work."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image

from monai_god.transforms.graph import Modality
from monai_god.visualize.graphs import COLOURS

from .pair_view import NodeView, PairView

__all__ = ["case_section", "curves_svg", "render_report", "verdict"]

#: side of a picture in the page, pixels
SIDE = 420
#: links shown at first: the nodes that add most
LINKS = 12
METHOD_NAMES = {
    "contribution": "exact terms of level (E)",
    "attention": "attention weights",
    "grad_x_input": "gradient x input",
    "integrated_gradients": "integrated gradients",
    "leave_one_out": "leave one node out",
    "random": "random order",
}
SCOPE_NAMES = {"graph": "graph embedding alone (the paper's scope)", "embedding": "whole embedding, through the fusion"}

_STYLE = """
:root { color-scheme: light; --line: #c9ced6; --ink: #1b1f24; --soft: #4a5462; --accent: #0b57a4; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: #fff; margin: 0 auto; max-width: 72rem;
  padding: 1rem 1.5rem 4rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin-bottom: .3rem; } p { max-width: 48rem; } .soft { color: var(--soft); }
nav ul { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; list-style: none; padding: 0; } a { color: var(--accent); }
table { border-collapse: collapse; margin: .8rem 0; } caption { text-align: left; color: var(--soft); }
th, td { border: 1px solid var(--line); padding: .25rem .6rem; text-align: left; vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.pair { max-width: 56rem; width: 100%; height: auto; background: #000; display: block; }
.pair .link { stroke: #ffd54a; stroke-width: 1.5; opacity: 0; } .pair .link.on { opacity: .75; }
.pair .node { stroke: #000; stroke-width: 1; cursor: pointer; }
.pair .node:focus { outline: none; } .pair .node:focus, .pair .node.lit { stroke: #fff; stroke-width: 3; }
.told { min-height: 3rem; padding: .4rem .6rem; border: 1px solid var(--line); border-top: 0; max-width: 56rem; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; padding: 0; list-style: none; }
.legend span { display: inline-block; width: .9rem; height: .9rem; border: 1px solid #000; border-radius: 50%;
  vertical-align: -.1rem; }
figure { margin: .8rem 0; } figure svg { max-width: 100%; height: auto; }
@media print { nav, .told { display: none; } section.case, table, figure { break-inside: avoid; } }
"""

_SCRIPT = """
for (const pair of document.querySelectorAll('.case')) {
  const told = pair.querySelector('.told');
  const links = pair.querySelectorAll('.link');
  const nodes = pair.querySelectorAll('.node');
  const first = [...links].filter(link => link.classList.contains('on'));
  const show = node => {
    told.textContent = node.getAttribute('aria-label');
    nodes.forEach(other => other.classList.toggle('lit', other === node || other.id === node.dataset.match));
    links.forEach(link => link.classList.toggle('on', link.dataset.a === node.id || link.dataset.b === node.id));
  };
  const rest = () => {
    nodes.forEach(node => node.classList.remove('lit'));
    links.forEach(link => link.classList.toggle('on', first.includes(link)));
  };
  nodes.forEach((node, index) => {
    node.addEventListener('mouseenter', () => show(node));
    node.addEventListener('focus', () => show(node));
    node.addEventListener('mouseleave', rest);
    node.addEventListener('blur', rest);
    node.addEventListener('keydown', event => {
      const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
      if (!step) return;
      event.preventDefault();
      const next = nodes[(index + step + nodes.length) % nodes.length];
      node.setAttribute('tabindex', '-1');
      next.setAttribute('tabindex', '0');
      next.focus();
    });
  });
}
"""


def verdict(interval: Sequence[float]) -> str:
    """What an interval of Delta AUC says: ``faithful``, ``not shown to be faithful`` or ``misleading``."""
    low, high = interval
    return "faithful" if low > 0 else "misleading" if high < 0 else "not shown to be faithful"


def curves_svg(report: Mapping[str, Any]) -> str:
    """Deletion and insertion curves of one scope (a result of :func:`faithfulness_audit`) as an SVG element."""
    figure = Figure(figsize=(9.2, 3.4), layout="constrained")
    dashes = ("solid", "dashed", "dashdot", "dotted", (0, (5, 1, 1, 1, 1, 1)))
    for axes, mode in zip(figure.subplots(1, 2), ("deletion", "insertion"), strict=True):
        for k, (name, curves) in enumerate(report["curves"].items()):
            style: dict[str, Any] = {"color": "black", "linestyle": "dotted", "linewidth": 2.2}
            if name != "random":
                style = {"color": COLOURS[(1, 3, 4, 6, 0)[k % 5]], "linestyle": dashes[k % 5], "linewidth": 1.6}
            axes.plot(report["fractions"], curves[mode], label=METHOD_NAMES.get(name, name), **style)
        axes.set(title=mode.capitalize(), xlabel="share of the query's nodes", ylabel="rank-1", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=7, loc="lower left")
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :].replace(
        "<svg", f'<svg role="img" aria-label="Deletion and insertion curves, {escape(report["scope"])} scope"', 1
    )


def _number(value: float, interval: Sequence[float] | None = None, sign: bool = False) -> str:
    shown = f"{value:+.3f}" if sign else f"{value:.3f}"
    if interval is None:
        return shown
    ends = [f"{end:+.3f}" if sign else f"{end:.3f}" for end in interval]
    return f"{shown} [{ends[0]}, {ends[1]}]"


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"<table><caption>{escape(caption)}</caption><thead><tr>"]
    lines += [f'<th scope="col">{escape(cell)}</th>' for cell in head]
    lines.append("</tr></thead><tbody>")
    for row in rows:
        cells = "".join(f'<td class="n">{escape(cell)}</td>' for cell in row[1:])
        lines.append(f'<tr><th scope="row">{escape(row[0])}</th>{cells}</tr>')
    return "".join(lines) + "</tbody></table>"


def _faithfulness(parts: Sequence[Mapping[str, Any]]) -> str:
    out = []
    for part in parts:
        rows = [
            (
                METHOD_NAMES.get(method, method),
                _number(modes["deletion"]["value"], modes["deletion"]["ci95"], sign=True),
                _number(modes["insertion"]["value"], modes["insertion"]["ci95"], sign=True),
                verdict(modes["deletion"]["ci95"]),
            )
            for method, modes in part["delta"].items()
        ]
        out.append(f"<h3>Scope: {escape(SCOPE_NAMES[part['scope']])}</h3>")
        out.append(f"<figure>{curves_svg(part)}</figure>")
        out.append(
            _table(
                f"{part['queries']} queries of {part['patients']} patients, against {part['random_orders']} random "
                "orders; 95 % intervals over patients",
                ("attribution", "Delta deletion AUC", "Delta insertion AUC", "by deletion"),
                rows,
            )
        )
    return "".join(out)


def _change(cell: Mapping[str, Any]) -> str:
    shown = _number(cell["value"], cell["ci95"])
    if "change" in cell:
        shown += f"; change {_number(cell['change']['value'], cell['change']['ci95'], sign=True)}"
    return shown


def _stress(table: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for what, cells in table.items():
        one, both = cells.get("queries"), cells["all"]
        rows.append(
            (
                what,
                "" if one is None else _change(one["rank1"]),
                _change(both["rank1"]),
                _change(both["map"]),
            )
        )
    head = ("graph", "R1, queries spoiled", "R1, all spoiled", "mAP, all spoiled")
    return _table("Where the graph is read is changed; the image and its global descriptor are not", head, rows)


def case_section(number: int, title: str, text: str, view: PairView, images: Sequence[Any], modality: Modality) -> str:
    """
    One pair as HTML: both images, their nodes, and links between matched ones.

    Args:
        number: of the case, for ids.
        title: heading.
        text: paragraph under it.
        view: of :func:`view_pair`.
        images: the two, [3, S, S] in [0, 1].
        modality: of both.
    """
    colour = {group.name: COLOURS[group.type % len(COLOURS)] for group in modality.groups}
    gap = 12
    places = [
        [(node.pos[0] * SIDE + k * (SIDE + gap), node.pos[1] * SIDE) for node in nodes]
        for k, nodes in enumerate(view.nodes)
    ]
    lines = [
        f'<svg class="pair" viewBox="0 0 {2 * SIDE + gap} {SIDE}" role="group" '
        f'aria-label="Query at the left, image found at the right, with their nodes">'
    ]
    for k, image in enumerate(images):
        lines.append(
            f'<image href="{_data_url(image)}" x="{k * (SIDE + gap)}" y="0" width="{SIDE}" height="{SIDE}" '
            f'role="img" aria-label="{("query", "image found")[k]}"/>'
        )
    top = sorted(range(len(view.nodes[0])), key=lambda i: -view.nodes[0][i].effect)[:LINKS]
    for i, node in enumerate(view.nodes[0]):
        if node.match is not None:
            (x, y), (u, v) = places[0][i], places[1][node.match]
            lines.append(
                f'<line class="link{" on" if i in top and node.effect > 0 else ""}" x1="{x:.1f}" y1="{y:.1f}" '
                f'x2="{u:.1f}" y2="{v:.1f}" data-a="c{number}a{i}" data-b="c{number}b{node.match}"/>'
            )
    for side, other, nodes, where in (("a", "b", view.nodes[0], places[0]), ("b", "a", view.nodes[1], places[1])):
        partners = view.nodes[1] if side == "a" else view.nodes[0]
        for i, (node, (x, y)) in enumerate(zip(nodes, where, strict=True)):
            match = "" if node.match is None else f' data-match="c{number}{other}{node.match}"'
            lines.append(
                f'<circle class="node" id="c{number}{side}{i}"{match} cx="{x:.1f}" cy="{y:.1f}" '
                f'r="{3.5 + 9 * min(node.share, 0.3) ** 0.5:.1f}" fill="{colour[node.group]}" role="img" '
                f'tabindex="{0 if i == 0 else -1}" aria-label="{escape(_told(node, partners, side))}">'
                f"<title>{escape(_told(node, partners, side))}</title></circle>"
            )
    lines.append("</svg>")
    rows = [
        (name, f"{100 * share:.0f} %", f"{view.differences[name]:.3f}" if name in view.differences else "")
        for name, share in view.shares.items()
    ]
    legend = "".join(
        f'<li><span style="background:{colour[name]}"></span> {escape(name)}</li>'
        for name in dict.fromkeys(group.name for group in modality.groups)
    )
    hint = "Point at a node, or reach one with Tab and go on with the arrow keys: its name, match and share stand here."
    return (
        f'<section class="case"><h3>{escape(title)}</h3><p>{escape(text)}</p>{"".join(lines)}'
        f'<div class="told" aria-live="polite">{hint}</div><ul class="legend">{legend}</ul>'
        + _table(
            f"What speaks for the match, by structure of the query ({METHOD_NAMES[view.method]}), and the mean "
            "difference |delta| of its matched nodes",
            ("structure", "share", "mean |delta|"),
            rows,
        )
        + "</section>"
    )


def _told(node: NodeView, partners: Sequence[NodeView], side: str) -> str:
    where = "query" if side == "a" else "image found"
    text = f"{node.name} ({where}): adds {node.effect:+.4f}, {100 * node.share:.1f} % of what speaks for the match"
    if node.match is None:
        return text + "; no node of its type to match"
    partner = partners[node.match].name
    return text + f"; matched with {partner}, confidence {node.confidence:.2f}; difference {node.difference:.3f}"


def _data_url(image: Any) -> str:
    array = np.asarray(torch.as_tensor(image).detach().cpu().float().clamp(0, 1) * 255).round().astype(np.uint8)
    array = np.repeat(array, 3, 0) if len(array) == 1 else array
    buffer = io.BytesIO()
    Image.fromarray(array.transpose(1, 2, 0)).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(
        buffer, "JPEG", quality=85
    )
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def render_report(content: Mapping[str, Any], cases: Sequence[str]) -> str:
    """
    The page.

    Args:
        content: ``title``, ``facts`` (name -> text), and where they were made ``faithfulness`` (list of results of
            :func:`faithfulness_audit`), ``structures`` (name -> mean share and interval), ``stress``, ``granularity``.
        cases: of :func:`case_section`.

    Returns:
        HTML.
    """
    sections: list[tuple[str, str, str]] = []
    parts = content.get("faithfulness") or []
    if parts:
        lines = []
        for part in parts:
            good = [METHOD_NAMES[m] for m, d in part["delta"].items() if verdict(d["deletion"]["ci95"]) == "faithful"]
            rest = [METHOD_NAMES[m] for m, d in part["delta"].items() if verdict(d["deletion"]["ci95"]) != "faithful"]
            lines.append(
                f"<p><strong>{escape(SCOPE_NAMES[part['scope']])}.</strong> Faithful by deletion: "
                f"{escape(', '.join(good) or 'none')}. Not: {escape(', '.join(rest) or 'none')}.</p>"
            )
        explained = (
            "<p>An attribution is faithful when taking away the nodes it ranks first hurts retrieval more than taking "
            "away as many at random: Delta AUC above 0 with its whole interval. Attributions that are not tell nothing "
            "about the decision, however plausible they look.</p>"
        )
        sections.append(("faithful", "Can the named nodes be trusted?", explained + "".join(lines)))
        sections.append(("curves", "Deletion and insertion", _faithfulness(parts)))
    if content.get("structures"):
        rows = [
            (name, _number(100 * cell["value"], [100 * end for end in cell["ci95"]]) + " %")
            for name, cell in content["structures"].items()
        ]
        caption = "Mean share of what speaks for the image found first, over all queries; 95 % intervals over patients"
        sections.append(("structures", "Which structures decide", _table(caption, ("structure", "share"), rows)))
    if content.get("stress"):
        sections.append(("stress", "Stress tests", _stress(content["stress"])))
    if content.get("granularity"):
        scales = [
            (f"{float(scale):g} x", str(row["nodes"]), _change(row["rank1"]), _change(row["map"]))
            for scale, row in content["granularity"].items()
        ]
        caption = "Networks fitted anew in closed form, without gradient training"
        table = _table(caption, ("granularity", "nodes", "R1", "mAP"), scales)
        sections.append(("granularity", "Granularity", table))
    if cases:
        sections.append(("cases", "Best, median and worst cases", "".join(cases)))
    facts = "".join(
        f'<tr><th scope="row">{escape(k)}</th><td>{escape(str(v))}</td></tr>' for k, v in content["facts"].items()
    )
    links = "".join(f'<li><a href="#{key}">{escape(title)}</a></li>' for key, title, _ in sections)
    body = "".join(f'<section id="{key}"><h2>{escape(title)}</h2>{text}</section>' for key, title, text in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
        f"<title>{escape(content['title'])}</title><style>{_STYLE}</style></head><body><main>"
        f'<h1>{escape(content["title"])}</h1><table>{facts}</table><nav aria-label="Sections"><ul>{links}</ul></nav>'
        f"{body}</main><script>{_SCRIPT}</script></body></html>\n"
    )
