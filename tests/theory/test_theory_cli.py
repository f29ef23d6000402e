"""The command `sodaopt theory`, its table and the page that it updates."""

import csv
import io
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from sodaopt import cli
from sodaopt.theory import command, figures, report, study
from sodaopt.theory.checks import Check
from sodaopt.theory.experiments import CASES, Curve, Measurement
from sodaopt.theory.remarks import Anchor

Console = pytest.importorskip("rich.console").Console
pytest.importorskip("tyro")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "theory.md"


@pytest.mark.slow
def test_the_command_prints_the_table_and_writes_files(tmp_path, capsys, monkeypatch, anchor_study):
    finished = [("anchor: distance", None), ("anchor: ablation", None), ("done", anchor_study)]
    monkeypatch.setattr(study, "run", lambda only, jobs: iter(finished))
    out = tmp_path / "out"
    assert cli.main(["theory", "--only", "anchor", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "[1/2] anchor: distance" in printed, "without a terminal, one line per task"
    assert "4 of 4 hold" in printed
    names = {path.name for path in out.iterdir()}
    assert names == {"theory.json", "theory.csv", "theory-anchor.png", "theory-anchor.svg"}
    rows = list(csv.DictReader((out / "theory.csv").open()))
    assert [row["holds"] for row in rows] == ["True"] * 4
    assert json.loads((out / "theory.json").read_text())["anchors"]["distance"]["xs"][0] == 1


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(anchor_study):
    *_, (_, shared) = study.run(["anchor"], jobs=2)
    assert [row.key for row in shared.rows] == [row.key for row in anchor_study.rows]
    for name, anchor in anchor_study.anchors.items():
        for column, values in asdict(anchor).items():
            got = getattr(shared.anchors[name], column)
            assert got == pytest.approx(values, rel=1e-6), (name, column)


def test_a_violated_bound_is_an_exit_code(tmp_path, monkeypatch):
    bad = Measurement("x", "smooth", "mine", "here", 9, 1.0, 2.0, None, "", False)
    monkeypatch.setattr(study, "run", lambda only, jobs: iter([("done", study.Study(rows=[bad]))]))
    assert cli.main(["theory", "--jobs", "1", "--out", str(tmp_path)]) == 1


def test_a_terminal_gets_a_progress_bar():
    console = Console(force_terminal=True, file=io.StringIO(), width=100)
    with command._progress(console, 2) as advance:
        advance("one")
        advance("two")
    assert "━" in console.file.getvalue()


def test_mutants_are_shown_with_the_checks_that_failed():
    found = {"E1": Check("E1", 2.0, 1.0), "E2": Check("E2", 0.0, 1.0)}
    console = Console(file=io.StringIO(), width=100)
    command.Theory()._show(study.Study(mutants={"alpha = 7": found}), console)
    assert "mutant alpha = 7: caught by E1\n" in console.file.getvalue()


def test_help_lists_the_commands_and_their_options(capsys):
    assert cli.main(["--help"]) == 0
    assert "theory" in capsys.readouterr().out
    with pytest.raises(SystemExit) as done:
        cli.main(["theory", "--help"])
    assert done.value.code == 0
    printed = capsys.readouterr().out
    assert all(option in printed for option in ("--out", "--only", "--jobs", "--docs"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["theroy"], "did you mean 'theory'?"),
        (["theory", "--only", "rates", "--docs", "docs"], "needs all parts"),
        (["theory", "--only", "ratse"], "lemmas"),
        (["theory", "--jobs", "0"], "at least 1"),
    ],
)
def test_bad_arguments_are_named(argv, message, capsys):
    try:
        code = cli.main(argv)
    except SystemExit as done:
        code = done.code
    assert code == 2
    printed = capsys.readouterr()
    assert message in " ".join((printed.err + printed.out).split())


def test_a_missing_package_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert cli.main(["theory"]) == 2
    assert "pip install 'sodaopt[lab]'" in capsys.readouterr().err


def test_the_table_shows_the_worst_of_each_lemma():
    rows = [
        Measurement("E1", "E1", "f", "one", 9, 1.0, 0.1, None, "", True),
        Measurement("E1", "E1", "g", "two", 9, 1.0, 0.4, None, "", True),
        Measurement("ODA regret", "ODA regret", "f", "one", 9, 1.0, 0.3, None, "", True),
        Measurement("ODA regret", "ODA regret", "f", "two", 9, 1.0, 0.2, None, "", False),
    ]
    e1, first, second = report.condensed(rows)
    assert (e1.problem, e1.measured, e1.setting) == ("g", 0.4, "all settings")
    assert (first.holds, second.holds) == (True, False)


@pytest.mark.parametrize("width", [60, 80, 132])
def test_the_table_fits_the_terminal(width):
    row = Measurement("noisy", "smooth", "quadratic, noisy", "lam_bar = lam/10", 1024, 0.0574,
                      0.0038, -0.48, "-0.5 +- 0.1", True)  # fmt: skip
    console = Console(file=io.StringIO(), width=width)
    console.print(report.table([row], console.width))
    printed = console.file.getvalue()
    assert all(len(line) <= width for line in printed.splitlines())
    assert "…" not in printed
    assert all(word in printed for word in ("smooth", "0.0574", "0.0038", "-0.48", "yes"))


# -- the page -------------------------------------------------------------------------------------


def test_fill_replaces_only_the_text_between_markers():
    anchor = Anchor([1.0], [1.0], [2.0], [3.0], [4.0])
    row = Measurement("fast", "accelerated", "f", "s", 9, 2.0, 1.0, -2.09, "<= -2", True)
    curve = Curve("fast", [9], [1.0], [1.0], [2.0])
    done = study.Study(rows=[row], curves={"fast": curve}, anchors={"a": anchor})
    page = "Slope <!-- begin slope.fast -->old<!-- end -->, kept."
    want = "Slope <!-- begin slope.fast -->−2.09<!-- end -->, kept."
    assert report.fill(page, done) == want
    assert report.fill(want, done) == want
    with pytest.raises(ValueError, match=r"'slope\.none', which the study does not have"):
        report.fill("<!-- begin slope.none --><!-- end -->", done)


def test_the_page_is_filled_and_its_figures_are_there():
    text = PAGE.read_text(encoding="utf-8")
    assert (
        text.count("<!-- begin ") == text.count("<!-- end -->") == len(report.MARKER.findall(text))
    )
    bodies = {match["key"]: match["body"] for match in report.MARKER.finditer(text)}
    assert all(body.strip() for body in bodies.values()), "run: sodaopt theory --docs docs"
    for line in text.splitlines():  # a comment at the start of a line would end the paragraph
        assert not re.match(r"\s*<!-- begin (?!table|mutants|comparison)", line), line
    keys = {key.split(".", 1)[1] for key in bodies if key.startswith("slope.")}
    known = {case.key for case in CASES} | {"tandem", "optimism", "averaging", "descent",
                                            "distance-zero"}  # fmt: skip
    assert keys <= known
    for name in re.findall(r"\]\(figures/([^)]+)\)", text):
        assert (PAGE.parent / "figures" / name).exists(), name
    drawn = {f"theory-{name}.svg" for name in figures.FIGURES}
    assert drawn == set(re.findall(r"\]\(figures/([^)]+)\)", text))
