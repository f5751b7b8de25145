"""A plan as one self-contained page: where each layout's step goes, the timeline of the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fluxgen.predict.simulate import Timeline
from fluxgen.report.page import STYLE, drawn

__all__ = ["plan_page"]

_PARTS = {
    "compute": "#9db8d6", "tp": "#c8553d", "bubble": "#d8d4c4", "stages": "#b08a2f",
    "replicas": "#8a5fb0", "optimiser": "#3d8a5f", "other": "#4a4a4a",
}  # fmt: skip


def plan_page(
    title: str, choices: Sequence[Mapping[str, Any]], timelines: Mapping[str, Timeline]
) -> str:
    """The page.

    Args:
        choices: of a plan, as plain values, the best first. timelines: of the best, by name.
    """
    return "\n".join(
        [
            "<!doctype html><html lang=en><head><meta charset=utf-8>",
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            "<p class=note>All figures are predicted (docs/plan.md).</p>",
            "<h2>Where the step of each layout goes</h2>",
            _bars(choices),
            _table(choices),
            f"<h2>Inside a step of {escape(str(choices[0]['key']))}</h2>",
            drawn(
                timelines, "Simulated, one rank, each on a scale of its own; what is on the "
                "critical path ends where the next thing begins.", one_scale=False,
            ),
            "</body></html>",
        ]
    ) + "\n"  # fmt: skip


def _bars(choices: Sequence[Mapping[str, Any]]) -> str:
    longest = max(max(choice["step_us"], choice["unfused_us"]) for choice in choices)
    width, left, row = 900, 230, 20
    legend = " &nbsp; ".join(
        f"<svg viewBox='0 0 12 12' style='width:12px'><rect width=12 height=12 fill='{colour}'/>"
        f"</svg> {name}"
        for name, colour in _PARTS.items()
    )
    height = row * len(choices) + 6
    out = [
        f"<p class=note>{legend} &nbsp; grey mark: the same layout without fused ops</p>",
        f"<svg viewBox='0 0 {width} {height}' role=img>",
    ]
    scale = (width - left - 10) / longest
    for i, choice in enumerate(choices):
        at, y = float(left), row * i + 2
        key = escape(str(choice["key"]))
        out.append(f"<text x={left - 6} y={y + 12} text-anchor=end>{key}</text>")
        for name, us in choice["parts_us"].items():
            out.append(
                f"<rect x={at:.1f} y={y} height=14 width={us * scale:.2f} fill='{_PARTS[name]}'>"
                f"<title>{name}: {us / 1e3:.1f} ms</title></rect>"
            )
            at += us * scale
        mark = left + choice["unfused_us"] * scale
        out.append(f"<line x1={mark:.1f} x2={mark:.1f} y1={y} y2={y + 14} stroke='#555'/>")
    return "".join([*out, "</svg>"])


def _table(choices: Sequence[Mapping[str, Any]]) -> str:
    heads = ("layout", "step ms", "tokens/s/GPU", "MFU %", "GB", "exposed %", "unfused ms")
    head = "".join(f"<th>{each}</th>" for each in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in (
            escape(str(c["key"])), f"{c['step_us'] / 1e3:.1f}", f"{c['tokens_per_s_per_gpu']:.0f}",
            f"{100 * c['mfu']:.1f}", f"{c['memory_gb']:.1f}", f"{100 * c['exposed']:.1f}",
            f"{c['unfused_us'] / 1e3:.1f}",
        )) + "</tr>"
        for c in choices
    )  # fmt: skip
    return f"<div class=scroll><table><tr>{head}</tr>{body}</table></div>"
