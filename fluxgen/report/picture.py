"""The speedups of a set of records as one SVG file, for a README or a slide.

Of each op a line of the geometric means by m, a band from the least to the best, and a dot for each
record. It stands alone: no script, no font that is not everywhere, a background of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from fluxgen.core.record import Provenance, Record

WIDTH, HEIGHT = 820, 390
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 18, 74, 52
_COLOURS = ("#1f77b4", "#d95f02", "#2ca02c", "#9467bd", "#8c564b")
_FONT = "font-family='Helvetica, Arial, sans-serif'"


def speedup_svg(title: str, records: Sequence[Record]) -> str:
    """The picture.

    Args:
        title: its first line. records: at least one, of one topology; each counts by its
            ``speedup``, which is 1 where the unfused path wins.

    Returns:
        The text of an SVG file, the same for the same records.
    """
    of_op: dict[str, dict[int, list[float]]] = {}
    for r in sorted(records, key=lambda r: (r.problem.op.value, r.problem.m, r.problem.key)):
        of_op.setdefault(r.problem.op.value, {}).setdefault(r.problem.m, []).append(r.speedup)
    every = [s for by_m in of_op.values() for of_m in by_m.values() for s in of_m]
    ms = sorted({r.problem.m for r in records})
    low = min(1.0, math.floor(min(every) * 10) / 10)
    high = max(low + 0.2, math.ceil(max(every) * 10) / 10)

    def x(m: int) -> float:
        first, last = math.log2(ms[0]), math.log2(ms[-1])
        share = (math.log2(m) - first) / (last - first) if last > first else 0.5
        return _LEFT + 14 + share * (WIDTH - _LEFT - _RIGHT - 28)

    def y(speedup: float) -> float:
        return _TOP + (high - speedup) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    out = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' "
        f"width='{WIDTH}' height='{HEIGHT}' role='img' {_FONT} font-size='12' fill='#333'>",
        f"<title>{escape(title)}</title>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='#fff'/>",
        _text(_LEFT, 20, title, "font-size='15' font-weight='bold'"),
        _text(_LEFT, 38, _subtitle(records), "fill='#666'"),
    ]
    step = 0.1 if high - low <= 1 else 0.25 if high - low <= 2.5 else 1.0
    for i in range(round((high - low) / step) + 1):
        at = low + i * step
        stroke = "#888" if abs(at - 1) < 1e-9 else "#e6e6e6"
        out.append(
            f"<line x1='{_LEFT}' x2='{WIDTH - _RIGHT}' y1='{y(at):.1f}' y2='{y(at):.1f}' "
            f"stroke='{stroke}'/>"
        )
        out.append(_text(_LEFT - 8, y(at) + 4, f"{at:.2g}", "text-anchor='end'"))
    for m in ms:
        out.append(_text(x(m), HEIGHT - _BOTTOM + 18, str(m), "text-anchor='middle'"))
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    out.append(_text(middle, HEIGHT - 14, "m: tokens of the call", "text-anchor='middle'"))
    for i, (op, by_m) in enumerate(of_op.items()):
        out += _series(op, by_m, _COLOURS[i % len(_COLOURS)], x, y)
        left = _LEFT + 150 * i
        out.append(
            f"<line x1='{left}' x2='{left + 22}' y1='56' y2='56' "
            f"stroke='{_COLOURS[i % len(_COLOURS)]}' stroke-width='3'/>"
        )
        out.append(_text(left + 28, 60, op, ""))
    return "\n".join([*out, "</svg>"]) + "\n"


def _series(
    op: str,
    by_m: dict[int, list[float]],
    colour: str,
    x: Callable[[int], float],
    y: Callable[[float], float],
) -> list[str]:
    upper = [(x(m), y(max(of_m))) for m, of_m in by_m.items()]
    lower = [(x(m), y(min(of_m))) for m, of_m in by_m.items()]
    mean = [(x(m), y(math.exp(sum(map(math.log, of_m)) / len(of_m)))) for m, of_m in by_m.items()]
    out = [f"<polygon points='{_points([*upper, *lower[::-1]])}' fill='{colour}' opacity='0.12'/>"]
    for m, of_m in by_m.items():
        for speedup in of_m:
            out.append(
                f"<circle cx='{x(m):.1f}' cy='{y(speedup):.1f}' r='2.2' fill='{colour}' "
                f"opacity='0.55'><title>{escape(op)}, m={m}: {speedup:.2f}</title></circle>"
            )
    out.append(
        f"<polyline points='{_points(mean)}' fill='none' stroke='{colour}' stroke-width='2.5'/>"
    )
    return out


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{px:.1f},{py:.1f}" for px, py in places)


def _text(at_x: float, at_y: float, text: str, style: str) -> str:
    return f"<text x='{at_x:.1f}' y='{at_y:.1f}' {style}>{escape(text)}</text>"


def _subtitle(records: Sequence[Record]) -> str:
    shapes = {(r.problem.op, r.problem.n, r.problem.k) for r in records}
    known = [p.value for p in Provenance if any(r.provenance is p for r in records)]
    return (
        f"Speedup over the unfused path, {len(shapes)} GEMMs: geometric mean, range and each "
        f"({', '.join(known)}; 1 where the unfused path wins)"
    )
