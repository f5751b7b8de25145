"""What the documents say of files and figures holds: pages are current, short, and link right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fluxgen.cli import main
from tests.bench import results

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def test_results_are_what_the_data_say():
    made = results.page()
    assert results.PAGE.read_text() == made, "run python -m tests.bench.results"
    assert len(made.splitlines()) <= 250
    for area in made.split("\n## ")[1:]:
        for word in ("Command: `", "Hardware: ", "Provenance: ", "Date: "):
            assert word in " ".join(area.split()), (area.splitlines()[0], word)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_picture_is_that_of_the_packs(tmp_path):
    svg = tmp_path / "s.svg"
    command = ["report", "--target", "h200", "--packs", str(ROOT / "tuning_db")]
    assert main([*command, "--out", str(tmp_path / "p.html"), "--svg", str(svg)]) == 0
    assert svg.read_text() == (ROOT / "docs" / "speedups.svg").read_text(), (
        "run fluxgen report --target h200 --packs tuning_db --svg docs/speedups.svg"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_within_the_repository_resolve(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.relative_to(ROOT)}: {link}"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE)
            slugs = [re.sub(r"[^a-z0-9 _-]", "", head.lower()).replace(" ", "-") for head in heads]
            assert anchor in slugs, f"{page.relative_to(ROOT)}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_are_there(page):
    if "docs/log" in str(page):
        return  # as it was on the day
    for name in re.findall(
        r"`((?:docs|tests|fluxgen|templates|examples)/[\w./-]+)`", page.read_text()
    ):
        assert (ROOT / name).exists(), f"{page.relative_to(ROOT)}: {name}"
