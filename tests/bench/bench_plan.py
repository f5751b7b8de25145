"""Predicted steps beside published ones: ``tests/bench/data/plan_rows.jsonl``, needs no GPU.

    python -m tests.bench.bench_plan [--rows GROUP] [--out FILE]

Each row is a step that somebody measured and published, with its source. The step is predicted
from the row's model, machine, layout and practice alone; where the source does not say the
micro-batch or the interleaving, the best ones are taken, as its authors will have done. Prints the
error factor (predicted over measured) of each group, and how layouts of one model are ranked. Rows
that a number was fitted to are marked so, and left out of the last line.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations, groupby, product
from pathlib import Path
from typing import Any

from fluxgen.core.topology import parse_gpu
from fluxgen.planning.cluster import Cluster
from fluxgen.planning.layout import MICROS, Layout, why_not
from fluxgen.planning.model import Transformer
from fluxgen.planning.practice import practice
from fluxgen.planning.search import plan
from fluxgen.planning.timing.fused import Fusion
from fluxgen.planning.timing.step import Stepper

DATA = Path(__file__).with_name("data")


@dataclass(frozen=True)
class Row:
    """A published step and its prediction, seconds."""

    data: dict[str, Any]
    measured: float
    predicted: float
    layout: Layout

    @property
    def factor(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


def rows() -> list[dict[str, Any]]:
    """The published steps."""
    return [json.loads(line) for line in (DATA / "plan_rows.jsonl").read_text().splitlines()]


def seconds(row: dict[str, Any], model: Transformer) -> float:
    """What was measured, as the time of a step."""
    found, tokens = row["measured"], row["batch"] * row["seq"]
    gpu = parse_gpu(row["gpu"])
    if "step_s" in found:
        return float(found["step_s"])
    if "tokens_per_s_per_gpu" in found:
        return tokens / (found["tokens_per_s_per_gpu"] * row["gpus"])
    if "mfu" in found:
        rate = found["mfu"] * gpu.tflops * 1e12
        return model.flops(tokens, row["seq"]) / (rate * row["gpus"])
    # arXiv 2104.04473, section 3: 96 B s l h^2 (1 + s / 6h + V / 16lh), computed again included.
    h, layers, s = model.hidden, model.layers, row["seq"]
    flops = 96 * tokens * layers * h * h * (1 + s / (6 * h) + model.vocab / (16 * layers * h))
    return flops / (found["tflops_per_gpu"] * 1e12 * row["gpus"])


def predict(row: dict[str, Any]) -> Row | None:
    """The row's step; None where no layout of those that are not stated can run."""
    model = Transformer(**row["model"])
    cluster = Cluster.of(parse_gpu(row["gpu"]), row["gpus"], row["node"])
    stepper = Stepper(
        model, cluster, row["batch"], row["seq"], practice(row["practice"]), Fusion(cluster),
        row["what"],
    )  # fmt: skip
    given = row["layout"]
    micros = MICROS if given["micro"] is None else [given["micro"]]
    chunks = [1, 2, 3, 4] if given["vp"] is None else [given["vp"]]
    best: tuple[float, Layout] | None = None
    for micro, vp in product(micros, chunks):
        layout = replace(Layout(**{**given, "micro": micro, "vp": vp}))
        if why_not(model, cluster, layout, row["batch"], row["seq"]) is None:
            us = stepper.step(layout).step_us
            best = min(best or (us, layout), (us, layout))
    if best is None:
        return None
    return Row(row, seconds(row, model), best[0] / 1e6, best[1])


def error(found: Iterable[Row]) -> float:
    """Geometric mean of the factor by which predictions are off, at least 1."""
    return math.exp(statistics.mean(abs(math.log(row.factor)) for row in found))


def summary(found: list[Row]) -> dict[str, Any]:
    """Of a group: rows, bias, mean and worst error factor."""
    return {
        "rows": len(found),
        "bias": round(math.exp(statistics.mean(math.log(row.factor) for row in found)), 3),
        "error": round(error(found), 3),
        "worst": round(max(max(row.factor, 1 / row.factor) for row in found), 3),
    }


def pairs(found: list[Row]) -> dict[str, int]:
    """Pairs of layouts of one model on one machine that are more than 3 % apart: how many are
    ranked as measured, by tokens a second."""

    def key(row: Row) -> str:
        of = {k: row.data[k] for k in ("group", "gpu", "gpus", "seq", "practice")}
        return json.dumps([of, row.data["model"]["layers"], row.data["model"]["hidden"]])

    def rate(row: Row, seconds: float) -> float:
        return float(row.data["batch"]) / seconds

    right = total = 0
    for _, members in groupby(sorted(found, key=key), key):
        for one, two in combinations(list(members), 2):
            apart = rate(one, one.measured) / rate(two, two.measured)
            if one.layout.key != two.layout.key and abs(math.log(apart)) > math.log(1.03):
                total += 1
                right += (apart > 1) == (rate(one, one.predicted) > rate(two, two.predicted))
    return {"pairs": total, "right": right}


PUBLISHED_BEST = (
    "dgxc-gpt3-175b-bf16-128", "dgxc-llama31-70b-bf16-64", "dgxc-llama31-8b-bf16-8",
    "dgxc-llama31-405b-bf16-576", "dgxc-nemotron4-340b-bf16-256", "dgxc-nemotron4-15b-bf16-tp4-64",
)  # fmt: skip
"""Recipes whose layouts their vendor has chosen, one of each model."""


def chosen_by_others(found: list[Row]) -> dict[str, dict[str, Any]]:
    """Predicted time of each recipe's layout over that of the best layout that the plan finds."""
    out = {}
    for row in found:
        if row.data["id"] in PUBLISHED_BEST:
            data = row.data
            best = plan(
                Transformer(**data["model"]), target=data["gpu"], gpus=data["gpus"],
                node=data["node"], batch=data["batch"], seq=data["seq"],
                practice=data["practice"], fused="off", best=1,
            ).best  # fmt: skip
            share = row.predicted / (best.step.step_us / 1e6)
            out[data["id"]] = {
                "published": row.layout.key, "best": best.layout.key, "share": round(share, 3),
            }  # fmt: skip
    return out


def main() -> int:
    """Print the table; the exit code is 1 if a row cannot be predicted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="", help="List the rows of groups that begin so.")
    parser.add_argument("--out", type=Path, help="Write the figures as JSON.")
    chosen = parser.parse_args()
    every = [(row, predict(row)) for row in rows()]
    lost = [row["id"] for row, found in every if found is None]
    found = [row for _, row in every if row is not None]
    groups: dict[str, dict[str, Any]] = {}
    for name, members in groupby(sorted(found, key=lambda r: r.data["group"]),
                                 lambda r: r.data["group"]):  # fmt: skip
        groups[name] = summary(list(members))
        print(f"{name:16s} {groups[name]}")
    apart = [row for row in found if not row.data.get("fitted")]
    total = {"all": summary(found), "nothing fitted": summary(apart)}
    within = sum(max(row.factor, 1 / row.factor) <= 1.25 for row in found) / len(found)
    print(total, f"within 1.25: {within:.3f}")
    print(pairs(found))
    others = chosen_by_others(found)
    for name, what in others.items():
        print(name, what)
    if chosen.rows:
        for row in found:
            if row.data["group"].startswith(chosen.rows):
                print(f"{row.data['id'][:44]:44s} {row.measured:9.3f} {row.predicted:9.3f} "
                      f"{row.factor:6.3f} {row.layout.key}")  # fmt: skip
    if lost:
        print(f"no layout can run: {', '.join(lost)}", file=sys.stderr)
    if chosen.out:
        document = {
            "command": "python -m tests.bench.bench_plan --out tests/bench/data/plan_errors.json",
            "groups": groups, "total": total, "within": round(within, 3),
            "ranking": pairs(found), "chosen_by_others": others,
        }  # fmt: skip
        chosen.out.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    return 1 if lost else 0


if __name__ == "__main__":
    raise SystemExit(main())
