"""The pages about the lab: their commands run, and their tables agree with the code."""

from __future__ import annotations

import html
import math
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import training
from benchmarks.pages import filled
from sodaopt.cli import main
from sodaopt.lab.job import Job, resolve
from sodaopt.lab.optimizers import BASES
from sodaopt.lab.presets import PRESETS
from tests.support.lab_jobs import embedded, working
from tools import results_doc

assert embedded  # fixtures
assert working

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.search(r"```sh\n(.*?)```", (DOCS / "quickstart.md").read_text(), flags=re.DOTALL)
COMMANDS = BLOCK[1].splitlines() if BLOCK else []
TINY = ["--steps", "2", "--eval-tokens", "256", "--depth", "1"]
SHORT = {"train": TINY, "sweep": [*TINY, "--seeds", "0"], "compare": [*TINY, "--seeds", "0"]}


def test_quickstart(lab: Path) -> None:
    """Run the commands of the page, with two steps per run."""
    assert len(COMMANDS) == 5
    assert COMMANDS[0] == "make setup && . .venv/bin/activate"
    for command in COMMANDS[1:]:
        program, name, *rest = shlex.split(command)
        assert program == "sodaopt"
        assert main([name, *rest, *SHORT.get(name, [])]) == 0, command
    assert (lab / "runs/compare/report.html").stat().st_size > 50_000
    assert (lab / "runs/report.html").exists()
    assert list((lab / "runs").glob("report-*.png"))


def test_performance_is_up_to_date() -> None:
    text = filled(training.PAGE, "training", training.table())
    assert training.PAGE.read_text() == text, "run: python -m benchmarks.training --docs"


def test_results_are_up_to_date() -> None:
    assert results_doc.PAGE.read_text() == results_doc.results_page(), "run: make results"
    for page in DOCS.rglob("*.md"):
        assert page.read_text() == results_doc.with_claims(page), f"{page}: run make results"
    table = html.escape(results_doc.claims(results_doc.measured()), quote=False)
    assert table in results_doc.FIGURE.read_text(), "run: make results"


def test_every_claim_has_a_verdict() -> None:
    studies = results_doc.measured()
    names = [claim.name for claim in results_doc.CLAIMS]
    assert len(set(names)) == len(names)
    for claim in results_doc.CLAIMS:
        d = results_doc.compared(claim, studies)
        assert d["low"] < d["mean"] < d["high"]
        assert results_doc.verdict(d) in ("**holds**", "does not hold", "undecided")


@pytest.mark.parametrize("name", ["nano", "small", "proxy", "track3"])
def test_the_presets_of_the_page(name: str) -> None:
    p = PRESETS[name]
    row = f"| {name} | {p.width} | {p.depth} | {p.context} | {p.batch} |"
    assert row in (DOCS / "lab.md").read_text()


@pytest.mark.parametrize("name", BASES)
def test_the_optimizers_of_the_page(name: str) -> None:
    page = (DOCS / "lab.md").read_text()
    line = next(row for row in page.splitlines() if re.match(rf"\| .*\b{name}\b.*\|", row))
    resolved = resolve(Job(optimizer=name, preset="gpt-124m"), 50257)
    exponent = f"2^{round(math.log2(resolved.settings.lr))}"
    factor = "2 ReLU^2" if resolved.shape.activation == 2 else "ReLU^2"
    assert f"| {exponent} | {factor} |" in line
