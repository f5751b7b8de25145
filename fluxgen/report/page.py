"""One self-contained HTML page: speedups, how searches went, and what happens in a call.

No scripts and nothing from elsewhere: it opens from a file, and prints.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from fluxgen.core.record import Record
from fluxgen.predict.simulate import Timeline
from fluxgen.report.tables import baseline_text
from fluxgen.report.timeline import track_order

TRACKS = 18
"""Slots drawn of a timeline, evenly over all."""

_COLOURS = ("#2f6fb0", "#c8553d", "#3d8a5f", "#8a5fb0", "#b08a2f", "#4a4a4a")
_KINDS = {
    "tile": "#9db8d6", "wait": "#e8b4a4", "copy": "#3d8a5f", "gemm": "#9db8d6",
    "reduce": "#8a5fb0", "attention": "#2f6fb0", "memory": "#b0a98a", "collective": "#c8553d",
    "fused": "#8a5fb0", "ring": "#b58fd0", "forward": "#9db8d6", "backward": "#2f6fb0",
}  # fmt: skip

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem;
       color: #1c1c1c; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-size: 13px; }
td, th { padding: .15rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }
td:first-child, th:first-child { text-align: left; }
.note { color: #555; font-size: 13px; } svg { width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: #333; }
.scroll { overflow-x: auto; }
"""


def page(
    title: str,
    records: Sequence[Record],
    searches: Mapping[str, Sequence[float | None]],
    timelines: Mapping[str, Timeline],
) -> str:
    """The page.

    Args:
        records: of one topology. searches: of each problem, the trials' times in their order
            (None: failed), microseconds. timelines: by name, drawn below each other on one scale.
    """
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        "<h2>Speedup over the unfused path</h2>",
        _speedups(records),
        _table(records),
    ]
    if searches:
        parts += ["<h2>How the searches went</h2>", _progress(searches)]
    if timelines:
        parts += ["<h2>Inside a call</h2>", drawn(timelines, IN_A_CALL)]
    return "".join([*parts, "</body></html>\n"])


def _label(record: Record) -> str:
    p = record.problem
    return f"{p.op.value} n={p.n} k={p.k}"


def _speedups(records: Sequence[Record]) -> str:
    if not records:
        return "<p class=note>No records.</p>"
    series: dict[str, list[tuple[float, float, str]]] = {}
    for r in sorted(records, key=lambda r: (_label(r), r.problem.m)):
        tip = f"{_label(r)} m={r.problem.m}: {r.time_us:.1f} us, unfused {r.baseline_us:.1f} us"
        found = series.setdefault(f"{_label(r)}, {r.provenance.value}", [])
        found.append((math.log2(r.problem.m), r.speedup, tip))
    ms = sorted({r.problem.m for r in records})
    note = (
        "<p class=note>Ratio of the unfused time to the winner's; 1 where the unfused path wins. "
        "Provenance is in the legend: predicted figures are the model's.</p>"
    )
    return note + _chart(series, [(math.log2(m), str(m)) for m in ms], "m (tokens)", 1.0)


def _progress(searches: Mapping[str, Sequence[float | None]]) -> str:
    series, longest = {}, 1
    for name, times in searches.items():
        finite = [t for t in times if t is not None and math.isfinite(t)]
        if not finite:
            continue
        end, best, points = min(finite), math.inf, []
        for number, time_us in enumerate(times, 1):
            best = min(best, time_us if time_us is not None else math.inf)
            if math.isfinite(best):
                points.append((number, best / end, f"{name}, trial {number}: best {best:.1f} us"))
        series[name] = points
        longest = max(longest, len(times))
    if not series:
        return "<p class=note>No trial was finished.</p>"
    step = max(1, longest // 8)
    ticks = [(float(x), str(x)) for x in range(1, longest + 1, step)]
    note = (
        "<p class=note>Best time so far over the best at the end; the first trial is the unfused "
        "path.</p>"
    )
    return note + _chart(series, ticks, "trial", 1.0)


def _chart(
    series: Mapping[str, Sequence[tuple[float, float, str]]],
    ticks: Sequence[tuple[float, str]],
    x_name: str,
    line_at: float,
) -> str:
    """Lines with points, a legend below; ``line_at`` is drawn across."""
    width, height, left, bottom, top = 900, 320, 46, 34, 12
    ys = [y for points in series.values() for _, y, _ in points] + [line_at]
    low, high = min(ys), max(ys)
    pad = max(0.02, 0.08 * (high - low))
    low, high = low - pad, high + pad
    xs = [x for x, _ in ticks] + [x for points in series.values() for x, _, _ in points]
    first, last = min(xs), max(xs)
    across = max(last - first, 1e-9)

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + (x - first) / across * (width - left - 16),
            top + (high - y) / (high - low) * (height - top - bottom),
        )

    out = [f"<svg viewBox='0 0 {width} {height}' role=img>"]
    for i in range(6):
        value = low + (high - low) * i / 5
        _, y = at(first, value)
        out.append(f"<line x1={left} x2={width - 16} y1={y:.1f} y2={y:.1f} stroke='#eee'/>")
        out.append(f"<text x={left - 6} y={y + 4:.1f} text-anchor=end>{value:.2f}</text>")
    _, y = at(first, line_at)
    out.append(f"<line x1={left} x2={width - 16} y1={y:.1f} y2={y:.1f} stroke='#888'/>")
    for x, text in ticks:
        place, _ = at(x, low)
        out.append(f"<text x={place:.1f} y={height - 16} text-anchor=middle>{escape(text)}</text>")
    middle = (left + width) / 2
    out.append(f"<text x={middle} y={height - 2} text-anchor=middle>{escape(x_name)}</text>")
    for i, (_, points) in enumerate(series.items()):
        colour, dash = _style(i)
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py in (at(x, y) for x, y, _ in points))
        out.append(
            f"<polyline points='{line}' fill=none stroke='{colour}' stroke-width=1.6 {dash}/>"
        )
        for x, y, tip in points:
            px, py = at(x, y)
            out.append(
                f"<circle cx={px:.1f} cy={py:.1f} r=3 fill='{colour}'>"
                f"<title>{escape(tip)}</title></circle>"
            )
    out.append("</svg><p class=note>")
    for i, name in enumerate(series):
        colour, dash = _style(i)
        out.append(
            f"<svg viewBox='0 0 26 8' style='width:26px'><line x1=0 x2=26 y1=4 y2=4 "
            f"stroke='{colour}' stroke-width=2 {dash}/></svg> {escape(name)} &nbsp; "
        )
    return "".join([*out, "</p>"])


def _style(index: int) -> tuple[str, str]:
    colour = _COLOURS[index % len(_COLOURS)]
    dashes = ("", "stroke-dasharray='6 3'", "stroke-dasharray='2 3'")
    return colour, dashes[index // len(_COLOURS) % len(dashes)]


def _table(records: Iterable[Record]) -> str:
    heads = ("problem", "m", "kernel", "us", "unfused us", "unfused by", "speedup", "known by")
    rows = [
        (
            _label(r),
            r.problem.m,
            "unfused" if r.kernel is None else r.kernel.name,
            f"{r.time_us:.1f}",
            f"{r.baseline_us:.1f}",
            baseline_text(r.baseline),
            f"{r.speedup:.2f}",
            r.provenance.value,
        )
        for r in sorted(records, key=lambda r: (_label(r), r.problem.m))
    ]
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<div class=scroll><table><tr>{head}</tr>{body}</table></div>"


IN_A_CALL = (
    "Simulated from the prediction, one rank, one scale for all; grey line: the GEMM alone would "
    "end here, what lies right of it is exposed."
)


def drawn(timelines: Mapping[str, Timeline], note: str, one_scale: bool = True) -> str:
    """Timelines below each other, with ``note`` and what the colours mean above them."""
    last = max(timeline.end_us for timeline in timelines.values())
    width, left = 900, 84
    legend = " &nbsp; ".join(
        f"<svg viewBox='0 0 12 12' style='width:12px'><rect width=12 height=12 fill='{colour}'/>"
        f"</svg> {kind}"
        for kind, colour in _KINDS.items()
        if any(s.kind == kind for t in timelines.values() for s in t.spans)
    )
    out = [f"<p class=note>{escape(note)} {legend}</p>"]
    for name, timeline in timelines.items():
        end = last if one_scale else timeline.end_us
        tracks = sorted({s.track for s in timeline.spans}, key=track_order)
        slots = [t for t in tracks if t.startswith("slot ")]
        if len(slots) > TRACKS:
            kept = {slots[i * len(slots) // TRACKS] for i in range(TRACKS)}
            tracks = [t for t in tracks if t in kept or not t.startswith("slot ")]
        rows = {track: i for i, track in enumerate(tracks)}
        height = 14 * len(tracks) + 22

        def x(us: float, end: float = end) -> float:
            return left + us / end * (width - left - 8)

        out.append(f"<h3>{escape(name)}: {timeline.end_us:.0f} us</h3>")
        out.append(f"<svg viewBox='0 0 {width} {height}' role=img>")
        for track, row in rows.items():
            out.append(f"<text x={left - 6} y={14 * row + 10} text-anchor=end>{track}</text>")
        for s in timeline.spans:
            if s.track in rows:
                out.append(
                    f"<rect x={x(s.begin_us):.1f} y={14 * rows[s.track]} height=12 "
                    f"width={max(0.4, x(s.end_us) - x(s.begin_us)):.1f} "
                    f"fill='{_KINDS[s.kind]}' stroke='#fff' stroke-width=.4><title>"
                    f"{escape(s.name)}: {s.begin_us:.1f} to {s.end_us:.1f} us</title></rect>"
                )
        if timeline.gemm_us:
            gemm = x(timeline.gemm_us)
            out.append(f"<line x1={gemm:.1f} x2={gemm:.1f} y1=0 y2={height - 20} stroke='#888'/>")
        for i in range(6):
            us = end * i / 5
            anchor = "end" if i == 5 else "middle"
            out.append(f"<text x={x(us):.1f} y={height - 4} text-anchor={anchor}>{us:.0f}</text>")
        out.append("</svg>")
    return "".join(out)
