"""The pages about the lab: their commands run, and their tables agree with the code."""

from __future__ import annotations

import html
import json
import math
import re
import shlex
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks import diagnostics, training
from sodaopt.cli import main
from sodaopt.lab.job import Job, resolve
from sodaopt.lab.optimizers import BASES
from sodaopt.lab.presets import PRESETS
from sodaopt.lab.scales import SCALES
from sodaopt.lab.studies import STUDIES
from tests.support.lab_jobs import embedded, working
from tools import gpu_time, results_doc
from tools.pages import filled

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


def test_the_diagnostics_take_less_than_a_hundredth() -> None:
    """The page says so, and the last measurement agrees."""
    assert 0 < json.loads(diagnostics.RESULT.read_text())["share"] < 0.01


def test_results_are_up_to_date() -> None:
    for page, text in results_doc.pages().items():
        assert page.read_text() == text, f"{page}: run make results"
    for page in results_doc.citing():
        assert page.read_text() == results_doc.with_claims(page), f"{page}: run make results"
    for figure, claims in results_doc.figures().items():
        table = html.escape(results_doc.claims(claims, results_doc.measured()), quote=False)
        assert table in figure.read_text(), f"{figure}: run make results"
    rows = str(results_doc._rounded(results_doc.along_rows(results_doc.measured())))
    assert html.escape(rows, quote=False) in results_doc.ROWS.read_text(), "run: make results"


def test_every_claim_has_a_verdict() -> None:
    studies = results_doc.measured()
    names = [claim.name for claim in results_doc.CLAIMS]
    assert len(set(names)) == len(names)
    verdicts = {results_doc.HOLDS, results_doc.FAILS, results_doc.UNDECIDED}
    measured = set()
    for claim, scale in product(results_doc.CLAIMS, results_doc.SHOWN):
        columns = [cell.column for cell in STUDIES[claim.study].cells]
        assert {claim.one, claim.other} <= set(columns), claim
        assert claim.label(scale) is not None
        if d := results_doc.compared(claim, scale, studies):
            assert results_doc.verdict(d) in verdicts
            assert d["low"] is None or d["low"] < d["mean"] < d["high"]
            measured.add(scale)
    assert measured == set(results_doc.SHOWN)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [((3, -2, -1), "**holds**"), ((3, -1, 1), "undecided"), ((3, 1, 2), "does not hold"),
     ((2, -2, -1), "undecided"), ((1, None, None), "undecided")],
)  # fmt: skip
def test_verdicts(ends: tuple[Any, ...], expected: str) -> None:
    assert results_doc.verdict(dict(zip(("n", "low", "high"), ends, strict=True))) == expected


def test_missing_runs_are_counted_once() -> None:
    """A finished study lacks no run. A run that studies share counts for the first of them."""
    whole = gpu_time.missing({})
    keys = [run.key for runs in whole.values() for run in runs]
    assert len(set(keys)) == len(keys)
    cells = [{"row": row.label, "column": cell.column, "seeds": range(row.seeds)}
             for row in STUDIES["muon"].planned(SCALES["proxy"])
             for cell in STUDIES["muon"].cells]  # fmt: skip
    rest = gpu_time.missing({"muon": {"cells": cells}})
    assert not rest["muon"]
    assert len(whole["muon"]) == 3 + 3 + 5 * (8 + 3)


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


def test_shared_rows_are_the_same_runs() -> None:
    muon = gpu_time.runs("muon")
    for (study, row), same in results_doc.SHARED.items():
        own = {at[1:]: run for at, run in gpu_time.runs(study).items() if at[0] == row}
        assert own
        assert all(run.key == muon[same, *at].key for at, run in own.items())
