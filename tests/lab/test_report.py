"""`sodaopt report`: the page, the table and the figures."""

import io
import json
import os
import re
import statistics
from html.parser import HTMLParser

import pytest

from sodaopt.lab import labels
from sodaopt.lab.comparison import compare
from sodaopt.lab.records import DIVERGED, FILE, find
from sodaopt.lab.variants import group_by_variant
from tests.support.lab_runs import NASTY, comparison, fake

Console = pytest.importorskip("rich.console").Console
pytest.importorskip("tyro")
pytest.importorskip("matplotlib")

from sodaopt.lab.report import (  # noqa: E402
    Page,
    charts,
    comparison_table,
    figures,
    heat,
    panels,
    sentences,
    text,
    write_report,
)
from sodaopt.lab.report.command import Report  # noqa: E402


class Read(HTMLParser):
    """The elements of a page, its data, and the text of its body."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.text, self.json = [], [], [], ""
        self.attributes = []
        self.feed(html)
        self.data = json.loads(self.json)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag in ("script", "style", "title"):
            self.open.append((tag, dict(attrs).get("id")))

    def handle_endtag(self, tag):
        if self.open and self.open[-1][0] == tag:
            self.open.pop()

    def handle_data(self, data):
        if self.open == [("script", "data")]:
            self.json += data
        elif not self.open:
            self.text.append(data)


def page(folder, title="A title"):
    out = write_report(find([folder]), folder / "report.html", title)
    return Read(out.read_text(encoding="utf-8"))


def shown(runs, width=100, primary=()):
    console = Console(file=io.StringIO(), width=width)
    console.print(comparison_table(runs, width, primary))
    return console.file.getvalue()


def compared(folder, primary=()):
    return compare(group_by_variant(find([folder])), primary)


# -- the page -------------------------------------------------------------------------------------


def test_a_comparison_is_one_small_page_that_needs_no_network(tmp_path):
    comparison(tmp_path)
    found = page(tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 300_000
    assert not {"img", "iframe", "object"} & set(found.tags)
    links = [value for _, name, value in found.attributes if name in ("src", "href")]
    assert links == ["data:,"]
    said = " ".join(found.text)
    for words in ("soda(muon)", "3.56", "± 0.00", "−0.01", "sea, muon", "2.13.0", "01234567"):
        assert words in said, words
    assert [curve["label"] for curve in found.data["val"]] == ["muon", "soda(muon)", "adamw"]
    curve = found.data["val"][0]
    assert curve["steps"] == list(range(0, 201, 20))
    assert all(
        a < b < c for a, b, c in zip(curve["low"], curve["loss"], curve["high"], strict=True)
    )
    assert found.data["sweeps"] == []
    assert "Permission is hereby granted" in (tmp_path / "report.html").read_text()


def odd(folder, word):
    """A page with this word wherever a run has words."""
    fake(folder, word, sample=f"The {word}", z0=word, head={"environment": {word: word}})
    fake(folder, "muon", z0="init", head={"git": {"commit": word, "dirty": True}})
    fake(folder, "lion", status=word, done=0.5)
    return page(folder, word)


def test_nothing_in_a_run_becomes_html(tmp_path):
    good, bad = odd(tmp_path / "good", "words"), odd(tmp_path / "bad", NASTY)
    assert bad.tags == good.tags
    assert bad.data["val"][0]["label"].startswith(NASTY)
    words = "".join(good.text).count("words")
    assert "".join(bad.text).count(NASTY) == words - 1, "all but the commit, of which 8 signs show"


def test_a_report_while_runs_go_on(tmp_path):
    fake(tmp_path, "muon", final=3.5)
    fake(tmp_path, "adamw", status=None, done=0.5)
    empty = fake(tmp_path, "lion", status=None, done=0.0, every=10**9).folder
    lines = (empty / FILE).read_text().splitlines()
    (empty / FILE).write_text(lines[0] + '\n{"kind": "val", "st')  # the head, and a torn line
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / FILE).touch()
    found = page(tmp_path)
    assert [curve["label"] for curve in found.data["val"]] == ["muon", "adamw"]
    said = " ".join(found.text)
    assert "unfinished, 50%" in said
    assert "2 of 3 runs have not finished" in said


def test_a_report_of_runs_without_losses(tmp_path):
    run = fake(tmp_path, status=None, done=0.0)
    (run.folder / FILE).write_text((run.folder / FILE).read_text().splitlines()[0] + "\n")
    found = page(tmp_path)
    assert not any(found.data[name] for name in ("gap", "val", "train", "dynamics", "sweeps"))
    assert "No run has finished yet." in found.text


def test_diverged_runs_are_shown(tmp_path):
    fake(tmp_path, "muon", 0, final=3.5)
    fake(tmp_path, "muon", 1, final=3.5, status=DIVERGED)
    fake(tmp_path, "adamw", 0, status=DIVERGED)
    found = page(tmp_path)
    said = " ".join(found.text)
    assert "1 of 2 diverged" in said
    assert "2 of 3 runs diverged. A row with a diverged seed ranks after all rows" in said
    names = [curve["label"] for curve in found.data["val"]]
    assert names == ["muon", "muon, seed 1 diverged", "adamw"]
    assert all(y is not None for curve in found.data["val"] for y in curve["loss"])


def test_notes_of_runs_are_shown(tmp_path):
    """The notes name repeated data and failures to save."""
    fake(tmp_path, "muon")
    for epochs in (1.0, 2.25):
        run = fake(tmp_path, "adamw", seed=7, wd=epochs)
        end = (run.folder / FILE).read_text().replace('"epochs": 0.4', f'"epochs": {epochs}')
        (run.folder / FILE).write_text(end)
    note = '{"kind": "note", "step": 5, "text": "step 5: it could not be saved"}\n'
    head, rest = (run.folder / FILE).read_text().split("\n", 1)
    (run.folder / FILE).write_text(f"{head}\n{note}{note}{rest}")
    said = sentences.notes(compared(tmp_path))[-2:]
    assert said == [
        "1 of 3 runs read training data more than once, up to 2.25 times.",
        "1 of 3 runs left a note, for example adamw wd=2.25, seed 7: step 5: it could not be saved",
    ]


def test_one_run(tmp_path):
    fake(tmp_path, final=3.5)
    said = " ".join(page(tmp_path).text)
    assert "reaches a validation loss of 3.5000 (one seed)." in said
    assert "Differences" not in said


@pytest.mark.slow
def test_forty_runs(tmp_path):
    for j in range(40):
        fake(tmp_path, "muon", lr=2.0 ** -(5 + j % 20), wd=(0.0, 0.1)[j // 20], steps=480, every=4,
             final=3.5 + (j % 20 - 9) ** 2 / 300)  # fmt: skip
    found = page(tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 1_000_000
    assert len(found.data["val"]) == len(found.data["train"]) == 40
    assert max(len(curve["steps"]) for curve in found.data["train"]) <= charts.BUDGET / 40
    assert ("table", "class", "results long fine") in found.attributes
    assert [panel["axis"] for panel in found.data["sweeps"]] == ["lr", "wd"]
    assert found.data["sweeps"][0]["chosen"] == "wd"


def test_the_page_is_replaced_as_a_whole(tmp_path, monkeypatch):
    runs = [fake(tmp_path / "runs")]
    out = write_report(runs, tmp_path / "new" / "report.html", "first")

    def fail(*_):
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no"):
        write_report(runs, out, "second")
    assert "<title>first</title>" in out.read_text()
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]
    with pytest.raises(ValueError, match="at least one run"):
        write_report([], out, "none")


# -- charts --------------------------------------------------------------------------------


def test_long_curves_keep_their_ends(tmp_path):
    (variant,) = group_by_variant([fake(tmp_path, steps=40_000, every=16)])
    (curve,) = charts.curves([variant], "step")
    assert len(curve.steps) == len(curve.loss) == len(curve.tokens) == charts.POINTS
    assert (curve.steps[0], curve.steps[-1]) == (4, 40_000)


def test_a_thinned_noisy_curve_has_means(tmp_path):
    (variant,) = group_by_variant([fake(tmp_path, steps=4000, every=4)])
    (whole,) = charts.curves([variant], "step")
    thin = charts.thin(whole, 10, average=True)
    kept = [whole.steps.index(step) for step in thin.steps]
    for a, b, y in zip(kept, kept[1:], thin.loss[1:], strict=False):
        assert y == pytest.approx(statistics.fmean(whole.loss[a + 1 : b + 1]))


def test_the_gap_is_the_paired_difference(tmp_path):
    comparison(tmp_path)
    fake(tmp_path, "muon", 7, final=1.0)  # the others lack this seed
    soda, adamw = charts.gaps(compared(tmp_path))
    assert (soda.label, adamw.label) == ("soda(muon)", "adamw")
    muon = {run.job["seed"]: run for run in find([tmp_path]) if run.optimizer == "muon"}
    runs = [run for run in find([tmp_path]) if run.optimizer == "soda(muon)"]
    want = [run.of("val")[-1]["loss"] - muon[run.job["seed"]].of("val")[-1]["loss"] for run in runs]
    assert soda.loss[-1] == pytest.approx(statistics.fmean(want))
    assert soda.low[-1] < soda.loss[-1] < soda.high[-1]


def diagnosed(folder, optimizer, share):
    run = fake(folder, optimizer)
    *rest, end = (run.folder / FILE).read_text().splitlines()
    roles = {"hidden": {"share": share, "lr": 0.1, "angle": None}, "total": {"share": share / 2}}
    rows = [{"kind": "diagnostics", "step": k, "tokens": k, "seconds": k, "roles": roles}
            for k in (50, 100)]  # fmt: skip
    (run.folder / FILE).write_text("\n".join([*rest, *map(json.dumps, rows), end]) + "\n")


def test_diagnostics_are_small_charts(tmp_path):
    diagnosed(tmp_path, "muon", 0.0)
    diagnosed(tmp_path, "soda(muon)", 0.5)
    found = page(tmp_path).data["dynamics"]
    assert list(found) == ["hidden", "total"]
    assert [c["loss"] for c in found["hidden"]["share"]] == [[0, 0], [0.5, 0.5]]
    assert found["total"]["share"][1]["loss"] == [0.25, 0.25]
    assert found["hidden"]["angle"] == []
    bad = tmp_path / "000" / FILE
    bad.write_text(bad.read_text().replace('"share": 0.0', '"share": "x"'))
    with pytest.raises(ValueError, match="share is 'x'"):
        find([tmp_path])


def swept(folder):
    """Learning rates and weight decays. The lowest mean is that of a surviving seed."""
    for lr, wd, final, status in (
        (0.1, 0.0, 3.6, "finished"), (0.1, 1.0, 3.5, "finished"), (0.2, 0.0, 3.7, "finished"),
        (0.2, 1.0, 3.2, "finished"),
    ):  # fmt: skip
        for seed in (0, 1):
            lost = (lr, wd, seed) == (0.2, 1.0, 1)
            fake(folder, "muon", seed, lr=lr, wd=wd, final=final + 0.01 * seed,
                 status=DIVERGED if lost else status)  # fmt: skip
    fake(folder, "soda(muon)", lr=0.1)


def test_a_heat_map_marks_the_best_and_the_diverged(tmp_path):
    swept(tmp_path)
    (one,) = panels.heat_maps(group_by_variant(find([tmp_path])))
    assert (one.columns, one.rows, one.best.job["wd"], one.best.job["lr"]) == (
        [0.1, 0.2], [0.0, 1.0], 1.0, 0.1
    )  # fmt: skip
    html = heat.heat_section(group_by_variant(find([tmp_path])))
    assert re.search(r'class="best" style="--level:\d+%">3\.505</td>', html)
    assert re.search(r'class="gone">3\.200<span class="n">1 of 2 div', html)
    assert heat.heat_section(group_by_variant([fake(tmp_path / "one")])) == ""


def test_settings_that_differ_are_a_table(tmp_path):
    swept(tmp_path)
    said = " ".join(page(tmp_path).text)
    assert "Settings that differ" in said
    assert "Settings that differ" not in " ".join(page(fake(tmp_path / "b").folder.parent).text)


def test_the_first_row_is_the_winner_of_the_records(tmp_path):
    """The first row of a long table is the lowest mean without a diverged seed."""
    for j in range(12):
        for seed in range(2):
            lost = j == 3 and seed == 1
            fake(tmp_path, "muon", seed, lr=2.0**-j, final=3.5 + abs(j - 6) / 10 - (j == 3),
                 status=DIVERGED if lost else "finished")  # fmt: skip
    means = {}
    for run in find([tmp_path]):
        means.setdefault(run.job["lr"], []).append(run.val_loss)
    whole = {lr: statistics.fmean(x) for lr, x in means.items() if None not in x}
    page(tmp_path)
    html = (tmp_path / "report.html").read_text()
    first = re.search(r'<tbody><tr class="best" data-variant="([^"]+)"', html)[1]
    assert first == labels.pretty(f"muon lr={labels.value(min(whole, key=whole.get))}")


def test_an_optimizer_with_weight_decay_is_never_a_level_line(tmp_path):
    for wd in (0.0, 0.25):
        fake(tmp_path, "muon", wd=wd)
    fake(tmp_path, "adamw", final=3.6)
    fake(tmp_path, "soda(muon)", 0, final=3.4)
    fake(tmp_path, "soda(muon)", 1, status=DIVERGED)
    (panel,) = panels.panels(group_by_variant(find([tmp_path])))
    assert [(t.label, t.level) for t in panel.traces] == [
        ("muon", False), ("adamw", False), ("soda(muon)", True)
    ]  # fmt: skip
    assert "Level lines have no weight decay to tune: soda(muon)." in panel.notes
    assert not any("×" in note for note in panel.notes), "a level line has no cross"


def test_a_curve_is_a_mean_over_the_same_seeds(tmp_path):
    fake(tmp_path, "muon", 0)
    fake(tmp_path, "muon", 1, status=None, done=0.5, final=9.0)
    fake(tmp_path, "lion", 0, status=None, done=0.2)
    fake(tmp_path, "lion", 1, status=None, done=0.5)
    muon, lion = charts.curves(group_by_variant(find([tmp_path])), "val")
    assert (muon.steps[-1], max(muon.loss) < 12) == (200, True)
    assert lion.steps[-1] == 40


def test_soda_is_a_level_line_in_a_sweep_of_weight_decay(tmp_path):
    for wd, final in ((0.0, 3.6), (0.25, 3.5), (1.0, 3.7)):
        fake(tmp_path, "muon", wd=wd, final=final)
    run = fake(tmp_path, "soda(muon)", final=3.4)
    assert run.job["wd"] == 0
    (panel,) = panels.panels(group_by_variant(find([tmp_path])))
    assert (panel.axis, panel.title, panel.ticks) == ("wd", "", [-3.5, -2, 0])
    assert panel.names == ["0", "0.25", "1"]
    muon, soda = panel.traces
    assert (muon.level, muon.best, muon.edge) == (False, "0.25", False)
    assert (soda.level, soda.best, [point.loss for point in soda.points]) == (True, "", [3.4])


def test_each_horizon_of_a_sweep_has_its_panel(tmp_path):
    for horizon, steps in ((1.0, 100), (4.0, 400)):
        for lr in (2.0**-10, 2.0**-9):
            fake(tmp_path, lr=lr, horizon=horizon, steps=steps)
    found = panels.panels(group_by_variant(find([tmp_path])))
    assert [panel.title for panel in found] == ["horizon=1", "horizon=4"]
    assert [trace.label for panel in found for trace in panel.traces] == ["muon", "muon"]
    assert found[0].names == ["2^-10", "2^-9"]


def test_the_window_shows_the_better_half():
    low, high = panels.window([3.5, 3.51, 3.52, 9.0])
    assert low < 3.5
    assert 3.52 < high < 3.6
    assert panels.window([3.5]) == pytest.approx((3.465, 3.535))


@pytest.mark.filterwarnings("error::UserWarning")  # of a layout that does not fit
def test_figures(tmp_path):
    comparison(tmp_path)
    fake(tmp_path, "muon", wd=0.1, final=3.55)
    fake(tmp_path, "muon", wd=0.2, status=DIVERGED)
    fake(tmp_path, "$x_", lr=1.0, status=None, done=0.3)
    files = figures.draw(group_by_variant(find([tmp_path])), tmp_path / "out" / "r", ("png", "svg"))
    names = ["r-val.png", "r-val.svg", "r-wd.png", "r-wd.svg"]
    assert [path.name for path in files] == names
    assert all(path.stat().st_size > 5000 for path in files)
    assert "soda(muon)" in files[1].read_text() or "<path" in files[1].read_text()


@pytest.mark.parametrize(("every", "start"), [(200, True), (100, True), (20, False)])
def test_a_figure_of_few_points_has_the_first_of_them(every, start, tmp_path):
    """With more points the steep start is left out."""
    (curve,) = charts.curves(group_by_variant([fake(tmp_path, every=every)]), "val")
    low, high = figures._settled([curve])
    assert low < min(curve.loss)
    assert (max(curve.loss) < high) == start


# -- words and the terminal -----------------------------------------------------------------------


def test_the_headline_of_a_clear_difference(tmp_path):
    comparison(tmp_path)
    ((subject, rest),) = sentences.headlines(compared(tmp_path))
    assert subject == "soda(muon)"
    assert re.search(r"lowest validation loss, 3\.56\d\d ± 0\.00\d\d \(3 seeds\): ", rest)
    interval = r"\(95 % interval -0\.01\d\d to -0\.\d{4}\)"
    assert re.search(rf": 0\.0100 lower than muon {interval}\.$", rest)
    ((_, rest),) = sentences.headlines(compared(tmp_path, [("003", "000")]))
    assert rest.endswith(", p < 0.0001).")


def test_the_headline_of_an_interval_with_zero(tmp_path):
    for seed, gap in enumerate((0.02, -0.03, 0.0)):
        fake(tmp_path, "muon", seed, final=3.5)
        fake(tmp_path, "lion", seed, final=3.5 + gap)
    ((subject, rest),) = sentences.headlines(compared(tmp_path))
    assert subject == "lion"
    assert rest.endswith("0.0033 lower than muon (95 % interval -0.0658 to +0.0592, which includes "
                         "zero).")  # fmt: skip


def test_the_headline_skips_a_variant_with_a_diverged_seed(tmp_path):
    for seed in range(3):
        fake(tmp_path, "muon", seed, final=3.5)
        fake(tmp_path, "lion", seed, final=3.1, status=DIVERGED if seed else "finished")
    assert sentences.headlines(compared(tmp_path))[0][0] == "muon"
    assert "2 of 3 diverged" in " ".join(page(tmp_path).text)
    alone = tmp_path / "alone"
    for seed in range(3):
        fake(alone, "lion", seed, final=3.1, status=DIVERGED if seed else "finished")
    ((_, rest),) = sentences.headlines(compared(alone))
    assert rest == "has the lowest validation loss, 3.1000 (one seed), but 2 of 3 diverged."


def test_the_notes_name_the_fit_its_power_and_the_primary_comparison(tmp_path):
    comparison(tmp_path)
    said = " ".join(sentences.notes(compared(tmp_path)))
    assert re.search(
        r"one fit, loss = variant \+ seed, to all rows \(residual sd 0\.000\d, 4 deg", said
    )
    assert re.search(
        r"Power: with 3 seeds, a difference of 0\.000\d is found with a probability of 80 %", said
    )
    assert "intervals are not corrected" in said
    assert "Stars" not in said
    said = " ".join(sentences.notes(compared(tmp_path, [("003", "000"), ("006", "000")])))
    assert "soda(muon) against muon (p < 0.0001), adamw against muon (p < 0.0001), after" in said


def test_the_baseline_of_a_sweep_is_its_best(tmp_path):
    for lr, final in ((2.0**-12, 3.9), (2.0**-10, 3.5)):
        fake(tmp_path, "muon", lr=lr, final=final)
    fake(tmp_path, "adamw", lr=2.0**-9, final=3.6)
    rows = compared(tmp_path)
    assert [text.gap(row) for row in rows] == ["+0.4000", "baseline", "+0.1000"]
    assert [text.interval(row) for row in rows] == ["one seed", "", "one seed"]
    assert any("best row of a sweep" in note for note in sentences.notes(compared(tmp_path)))


def test_rows_with_unequal_seeds_are_named(tmp_path):
    comparison(tmp_path)
    fake(tmp_path, "muon", wd=0.1)
    notes = sentences.notes(compared(tmp_path))
    assert any(note.startswith("Rows have 1 to 3 seeds (n).") for note in notes)
    (panel,) = panels.panels(group_by_variant(find([tmp_path])))
    assert [(m.n, m.fewer) for m in panel.traces[0].points] == [(3, False), (1, True)]
    assert any("1 to 3 seeds" in note for note in panel.notes)


@pytest.mark.parametrize(
    ("x", "said"),
    [(5, "5.00"), (1234, "1.23k"), (999.9, "1.00k"), (4.7e6, "4.70M"), (2e12, "2.00T"), (None, "")],
)
def test_counts(x, said):
    assert text.count(x) == said


def test_the_terminal_table_fits_a_hundred_columns(tmp_path):
    comparison(tmp_path)
    for wd in (2.0**-8, 0.1):
        fake(tmp_path, "soda_all(schedule_free)", wd=wd, lr=3e-4, status=DIVERGED)
    fake(tmp_path, "[bold]lion", status=None, done=0.25)
    said = shown(find([tmp_path]))
    assert all(len(line) <= 100 for line in said.splitlines())
    assert "…" not in said
    assert "***" not in said
    whole = shown(find([tmp_path]), 200)
    for words in ("baseline", "-0.0", "diverged", "25%", "[bold]lion", "± 0.00", "2.1 MB"):
        assert words in whole, words
    assert "***" in shown(find([tmp_path]), primary=[("003", "000")])


@pytest.mark.parametrize("width", [24, 30, 40, 50, 60, 70, 80, 90])
def test_a_narrow_terminal_shows_the_same_numbers(width, tmp_path):
    comparison(tmp_path)
    whole, narrow = shown(find([tmp_path]), 200), shown(find([tmp_path]), width)
    assert all(len(line) <= width for line in narrow.splitlines())
    numbers = re.compile(r"[+-]?\d+\.\d+")
    found = numbers.findall(narrow)
    assert len(found) >= 6, "three losses with their spreads"
    assert set(found) <= set(numbers.findall(whole)), "no number is cut"
    assert ("to -0.0" in narrow) == (width >= 60), "the interval is among the last to go"


# -- the command ----------------------------------------------------------------------------------


def test_the_command_writes_what_it_says(tmp_path, capsys):
    comparison(tmp_path / "my-runs")
    assert Report((tmp_path / "my-runs",), svg=True, baseline="adamw").run() == 0
    said = capsys.readouterr().out
    out = tmp_path / "my-runs" / "report.html"
    assert str(out) in said
    assert "<title>my runs</title>" in out.read_text()
    assert (tmp_path / "my-runs" / "report-val.svg").exists()
    assert re.search(r"adamw .*3\.70\d\d ± 0\.00\d\d .*baseline", said)
    again = Report((tmp_path / "my-runs",), out=tmp_path / "x.html", title="T")
    assert again.run() == 0
    assert "<title>T</title>" in (tmp_path / "x.html").read_text()


def test_a_live_page_follows_the_runs(tmp_path, monkeypatch, capsys):
    fake(tmp_path, "muon", final=3.5)
    running = fake(tmp_path, "lion", status=None, done=0.5)
    Page("Two", ("000", "001")).save(tmp_path)
    pages = []

    def pause(seconds):
        pages.append((tmp_path / "report.html").read_text())
        end = {"kind": "end", "step": 200, "status": "finished", "val_loss": 3.4, "seconds": 1}
        with (running.folder / FILE).open("a") as file:
            file.write(json.dumps(end) + "\n")

    monkeypatch.setattr("sodaopt.lab.report.command.time.sleep", pause)
    assert Report((tmp_path,), live=2).run() == 0
    assert len(pages) == 1
    assert '<meta http-equiv="refresh" content="2">' in pages[0]
    last = (tmp_path / "report.html").read_text()
    assert "refresh" not in last.split("<style>")[0]
    assert "3.4000" in last
    with pytest.raises(ValueError, match="live must be above 0 seconds"):
        Report((tmp_path,), live=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runs": ("nothing",)}, "no runs in .*nothing: no run.jsonl"),
        ({"runs": ("nothin",)}, "did you mean"),
        ({"runs": ("one",), "baseline": "moun"}, "did you mean 'muon'"),
    ],
)
def test_bad_input_is_named(options, message, tmp_path):
    (tmp_path / "nothing").mkdir()
    fake(tmp_path / "one", "muon")
    runs = tuple(tmp_path / name for name in options.pop("runs"))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Report(runs, **options).run()
    with pytest.raises(ValueError, match="at least one folder"):
        Report(())
