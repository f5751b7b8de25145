"""The figures that hold today, as ``docs/results.md``, out of the data files and the packs.

    python -m tests.bench.results [--check]

One table an area, each with what it is, its command, hardware, provenance and date. ``--check``
writes nothing and fails if the page is not what the data say.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from fluxgen.core.record import Record
from fluxgen.core.settings import data_dir
from fluxgen.db.packs import pack_files, read_pack

DATA = Path(__file__).with_name("data")
PAGE = Path(__file__).parents[2] / "docs" / "results.md"

HEAD = """# Results

These are the figures that hold today. `python -m tests.bench.results` writes this page out of
the files in `tests/bench/data` and the packs in `tuning_db`, and a test fails when they differ.
How the figures came about, and what was tried before, is in [the log](log/README.md).

A figure is *measured* when several GPUs, or a host, did the work that it names; *emulated* when
one GPU did one rank's work and the link was imitated at a stated rate, or when there was no
link at all; *predicted* when it comes from the model in `fluxgen/predict`. No link between GPUs
has been measured yet. Times are medians of interleaved runs; absolute times hold only on the
GPU that is named.
"""


def load(name: str) -> Any:
    """A data file."""
    return json.loads((DATA / f"{name}.json").read_text())


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def _filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False)


def section(
    title: str, what: str, command: str, hardware: str, provenance: str, date: str, body: str
) -> str:
    """One area: its figures, and where they come from."""
    source = f"Command: `{command}`. Hardware: {hardware}. Provenance: {provenance}. Date: {date}."
    return f"## {title}\n\n{_filled(what)}\n\n{body}\n{_filled(source)}\n"


def _mean(values: Iterable[float]) -> float:
    return math.exp(statistics.mean(map(math.log, values)))


def _ratio(value: float) -> str:
    return f"{value:.3f}"


def data_present() -> str:
    """The cost of the fused form: no link, all data there."""
    files = [load("h200_data_present_models"), load("h200_data_present_models_long")]
    found: dict[tuple[str, int, int, int], float] = {}
    for file in files:
        for r in file["results"]:
            found[r["op"], r["m"], r["n"], r["k"]] = r["best"][0]["ratio"]
    rows = []
    for m in sorted({key[1] for key in found}):
        of_m = {key: ratio for key, ratio in found.items() if key[1] == m}
        means = [
            _mean(v for key, v in of_m.items() if op in (None, key[0]))
            for op in ("ag_gemm", "gemm_rs", None)
        ]
        rows.append([m, len(of_m), *map(_ratio, means), f"{max(of_m.values()):.2f}"])
    what = """
        What the fused form costs where it has nothing to hide: the time of our GEMM over
        cuBLAS's, as geometric means over every GEMM of one layer of GPT-3 175B, Llama-3.1-8B,
        70B and 405B, Qwen2.5-72B and Devstral-123B at tp 8. Below 1 we are faster. Short
        problems lose 4 to 6 us at the end of a kernel that signals, and cuBLAS splits K where
        tiles do not fill the GPU.
    """
    return section(
        "The fused GEMM with all data present", what,
        "python -m tests.bench.bench_data_present --shapes models", "one NVIDIA H200, bf16",
        "emulated (flags up, local inboxes)", "2026-12-03",
        table(("m", "shapes", "`ag_gemm`", "`gemm_rs`", "both", "worst"), rows),
    )  # fmt: skip


def few_tokens() -> str:
    """The same of decoding."""
    file = load("h200_data_present_decode")
    rows = []
    for m, group in groupby(sorted(file["results"], key=lambda r: r["m"]), lambda r: r["m"]):
        of_m = list(group)
        ratios = {
            op: [r["best"][0]["ratio"] for r in of_m if op in (None, r["op"])]
            for op in ("ag_gemm", "gemm_rs", None)
        }
        means = [_ratio(_mean(ratios[op])) for op in ("ag_gemm", "gemm_rs", None)]
        rows.append([m, len(of_m), *means, f"{max(ratios[None]):.2f}"])
    what = """
        The same for few tokens, where flat kernels are among the candidates: every GEMM of one
        layer of Llama-3.1-8B, 70B and GPT-3 175B at tp 8.
    """
    return section(
        "Few tokens", what, "python -m tests.bench.bench_data_present --shapes decode",
        "one NVIDIA H200, bf16", "emulated (flags up, local inboxes)", "2026-12-03",
        table(("m", "shapes", "`ag_gemm`", "`gemm_rs`", "both", "worst"), rows),
    )  # fmt: skip


def side_by_side() -> str:
    """Whole calls over an imitated link."""
    file = load("h200_side_by_side_method5")
    rows = []
    for r in file["results"]:
        us = {key: value["median"] for key, value in r["us"].items()}
        rows.append([
            f"`{r['op']}` {r['m']}, {r['n']}, {r['k']}",
            *(f"{us[key]:.0f}" for key in ("gemm", "unfused", "decomposed", "fluxgen")),
            f"{us['unfused'] / us['fluxgen']:.2f}", f"{us['decomposed'] / us['fluxgen']:.2f}",
            f"{r['us']['fluxgen']['E']:.2f}",
        ])  # fmt: skip
    what = f"""
        Whole calls at tp 8, the link imitated at {file["link_gbs"]:g} GB/s and
        {file["latency_us"]:g} us, in microseconds. *Unfused* is cuBLAS and the bytes at the
        link's rate, less than NCCL takes; *decomposed* is a loop over slabs as in Torch's async
        TP; E is the paper's overlap efficiency, 1 where the link costs nothing. Where the two
        times are equal the record says that the unfused path runs.
    """
    heads = (
        "op m, n, k", "cuBLAS", "unfused", "decomposed", "fluxgen", "unfused / fluxgen",
        "decomposed / fluxgen", "E",
    )  # fmt: skip
    return section(
        "Whole calls over NVLink", what, "python -m tests.bench.bench_side_by_side",
        "one NVIDIA H200, bf16", "emulated (link imitated)", "2026-12-03", table(heads, rows),
    )  # fmt: skip


def pcie() -> str:
    """Whole calls over a real PCIe link."""
    rows = [
        [
            f"`{r['op']}`", r["m"],
            *(f"{r['us'][k]['median']:.0f}" for k in ("gemm", "copies", "unfused", "fluxgen")),
            f"{r['us']['unfused']['median'] / r['us']['fluxgen']['median']:.2f}",
        ]
        for r in load("h200_pcie_again")["rows"]
    ]  # fmt: skip
    what = """
        Whole calls of GPT-3 175B's MLP at tp 8 over the GPU's own PCIe Gen5 link, in
        microseconds: pinned host memory stands for the peers, and as many bytes go the other
        way meanwhile. *Unfused* is cuBLAS and plain copies.
    """
    return section(
        "Whole calls over PCIe", what, "python -m tests.bench.bench_pcie", "one NVIDIA H200, bf16",
        "emulated (host memory as the peers)", "2026-12-04",
        table(("op", "m", "cuBLAS", "copies", "unfused", "fluxgen", "unfused / fluxgen"), rows),
    )  # fmt: skip


def packs() -> str:
    """What ships."""
    rows = []
    for path in pack_files(data_dir("tuning_db")):
        records: list[Record] = list(read_pack(path))
        fused = [r for r in records if not r.is_baseline]
        speedups = [r.speedup for r in fused]
        (provenance,) = {r.provenance.value for r in records}
        best = f"{statistics.median(speedups):.2f}, {max(speedups):.2f}" if speedups else "none"
        rows.append([
            f"`{path.parent.name}`", f"`{path.stem}`", provenance, len(records), len(fused), best,
        ])  # fmt: skip
    what = """
        How many records ship, in how many of them a fused kernel wins, and by how much over the
        unfused path (median and best of those that win). What an emulated record is compared
        with is a bound that NCCL does not reach.
    """
    return section(
        "The tuning database", what, "fluxgen tune --model MODEL --tp TP --target GPU --link LINK",
        "one NVIDIA H200 where emulated, none where predicted", "as each row says",
        "2026-12-02 to 2026-12-04",
        table(("pack", "op", "provenance", "records", "fused", "speedup"), rows),
    )  # fmt: skip


def search() -> str:
    """The search against an exhaustive sweep."""
    file = load("h200_search_compared")
    rows = []
    for p in file["problems"]:
        op, *_, m, n, k, _ = p["problem"].split("/")
        found = p["found_over_best"]
        rows.append([
            f"`{op}` {m[1:]}, {n[1:]}, {k[1:]}", p["trials"], f"{p['best_over_unfused']:.3f}",
            *(_ratio(found[budget]) for budget in ("16", "64")),
        ])  # fmt: skip
    what = """
        What the search finds with few trials, over the best of all configurations, which were
        timed one by one. Five of six are within 2 %; the sixth stays unfused either way.
    """
    heads = ("op m, n, k", "configurations", "best / unfused", "16 trials", "64 trials")
    return section(
        "The search", what, "python -m tests.bench.bench_search compare", "one NVIDIA H200, bf16",
        "emulated (link imitated)", file["date"], table(heads, rows),
    )  # fmt: skip


def host_cost() -> str:
    """What calls cost the host."""
    found: dict[str, list[float]] = load("h200_host_cost")["us"]
    kinds = list(dict.fromkeys(key.split(": ")[0] for key in found))
    ops = ("linear", "ag fluxgen", "rs fluxgen", "ar fluxgen", "a2a-gemm fluxgen",
           "gemm-a2a fluxgen")  # fmt: skip
    us = {key: f"{values[0]:.1f}" for key, values in found.items()}
    rows = [[kind, *(us.get(f"{kind}: {op}", "-") for op in ops)] for kind in kinds]
    file = load("h200_host_cost")
    what = (
        """
        What a warm eager call costs the host, in microseconds, from the call until it returns,
        beside `F.linear` of the same size. One process is one rank whose peers' flags are up;
        what it queues is what a rank of a group queues.
    """
        + " "
        + file["note"]
    )
    heads = ("ranks, transport", "`F.linear`", "`ag_gemm`", "`gemm_rs`", "`gemm_ar`", "`a2a_gemm`",
             "`gemm_a2a`")  # fmt: skip
    return section(
        "Host cost of a call", what, file["command"], file["hardware"], file["provenance"],
        file["date"], table(heads, rows),
    )  # fmt: skip


def lookups() -> str:
    """What lookups cost."""
    file = load("lookup")
    rows = [[r["what"], f"{r['us']:g}"] for r in file["rows"]]
    return section(
        "Lookups", "What a lookup costs, in microseconds.", file["command"], file["hardware"],
        file["provenance"], file["date"], table(("call", "us"), rows),
    )  # fmt: skip


def ampere() -> str:
    """Ampere's kernels, on a Hopper."""
    rows = [
        [
            f"`{r['op']}` {r['m']}, {r['n']}, {r['k']}",
            *(f"{r['ms'][key] * 1e3:.0f}" for key in ("cublas", "cutlass2x", "fluxgen")),
            _ratio(r["ratio"]),
        ]
        for r in load("h200_ampere")["rows"]
    ]  # fmt: skip
    what = """
        Ampere's kernels have run on a Hopper GPU only, which compiles their PTX. They are
        compared with the best of several CUTLASS 2.x GEMMs in the same code, all data present,
        in microseconds; cuBLAS uses Hopper's own instructions there.
    """
    heads = ("op m, n, k", "cuBLAS", "CUTLASS 2.x", "fluxgen", "fluxgen / CUTLASS 2.x")
    return section(
        "Ampere's kernels", what, "python -m tests.bench.bench_ampere run", "one NVIDIA H200, bf16",
        "emulated (data present)", "2026-12-02", table(heads, rows),
    )  # fmt: skip


def published_steps() -> str:
    """Published steps of training and serving, and their predictions."""
    file = load("plan_errors")
    rows = [
        [name, g["rows"], f"{g['bias']:.3f}", f"{g['error']:.3f}", f"{g['worst']:.2f}"]
        for name, g in (*file["groups"].items(), *file["total"].items())
    ]
    ranking, others = file["ranking"], file["chosen_by_others"]
    shares = ", ".join(f"{each['share']:.3f}" for each in others.values())
    what = f"""Steps that others measured and published, predicted by `fluxgen plan`
        (tests/bench/data/plan_rows.jsonl has each with its source; docs/plan.md tells how). Bias is
        the geometric mean of predicted over measured time, error that of the factor by which a
        prediction is off. Of {ranking["pairs"]} pairs of layouts of one model on one machine that
        are more than 3 % apart, {ranking["right"]} are ranked as measured. The layouts of
        {len(others)} published recipes take {shares} of the predicted time of the best that the
        plan finds for them; below 1 the plan takes the published one for too large."""
    return section(
        "Published steps, predicted", what, file["command"], "as each row says", "predicted",
        "2026-12-07", table(("source", "rows", "bias", "error", "worst"), rows),
    )  # fmt: skip


def gpu_suite() -> str:
    """Outcomes of the GPU tests."""
    file = load("gpu_suite")
    rows = [
        [r["date"], r["abi"], r["what"], r["outcome"], f"`{r['command']}`"] for r in file["runs"]
    ]
    what = file["note"]
    return section(
        "The GPU tests", what, "make gpu-test TIER=core, TIER=full", file["hardware"],
        file["provenance"], "as each row says",
        table(("date", "ABI", "tests", "outcome", "command"), rows),
    )  # fmt: skip


AREAS: tuple[Callable[[], str], ...] = (
    side_by_side, pcie, data_present, few_tokens, ampere, host_cost, lookups, search, packs,
    published_steps, gpu_suite,
)  # fmt: skip


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(area() for area in AREAS)])


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    made = page()
    if parser.parse_args().check:
        if PAGE.read_text() != made:
            print(f"{PAGE} is not what the data say: run python -m tests.bench.results")
            return 1
        return 0
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
