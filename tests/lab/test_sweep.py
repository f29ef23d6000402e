"""Sweeps: grids, and trials that finish, fail, die or are interrupted without effect on others.
The commands, from their arguments to their files."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from sodaopt import cli
from sodaopt.factory import LR
from sodaopt.lab import records, results, reuse, runlog, sweep, train
from sodaopt.lab.arguments import axis
from sodaopt.lab.board import Board, run_trials
from sodaopt.lab.checkpoint import found
from sodaopt.lab.commands import Sample
from sodaopt.lab.execution import NO_MEMORY, Execution
from sodaopt.lab.job import Common, Job, ResolvedJob, resolve
from sodaopt.lab.many import Sweep, placed
from sodaopt.lab.optimizers import NAMES, averaged, parse
from sodaopt.lab.progress import short
from sodaopt.lab.report import Page
from sodaopt.lab.reproduce import listing
from sodaopt.lab.restore import restore
from sodaopt.lab.results import best
from sodaopt.lab.scales import SCALES
from sodaopt.lab.studies import DEFINITIONS, STUDIES
from sodaopt.lab.study_runs import Work
from sodaopt.lab.sweep import Local, Trial, grid, make_trials, unfinished
from tests.support.lab_jobs import (
    Command,
    begin,
    embedded,
    exit_code,
    flags,
    job,
    lines,
    losses,
    working,
)

assert embedded  # fixtures
assert working
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no fork and no signals")
lab = pytest.mark.usefixtures("lab")
OUT, VOCAB = Path("out"), 1024

# -- grids ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("lr=2^-12..2^-8", "lr", [2**-12, 2**-11, 2**-10, 2**-9, 2**-8]),
        ("lr=2^-8..2^-9", "lr", [2**-9, 2**-8]),
        ("lr=2**-3", "lr", [0.125]),
        ("lr=0.125..0.5", "lr", [0.125, 0.25, 0.5]),
        ("wd=0, 0.1,1e-3", "wd", [0.0, 0.1, 0.001]),
        ("horizon=1x,4x", "horizon", ["1x", "4x"]),
        ("steps=64..256", "steps", [64, 128, 256]),
        ("eval-every=5", "eval_every", [5]),
        ("seed=0,1", "seed", [0, 1]),
        ("data=../here", "data", ["../here"]),
        ("fade=0.5:0.9,0.8:1", "fade", [(0.5, 0.9), (0.8, 1.0)]),
        ("z0=init,zero", "z0", ["init", "zero"]),
    ],
)
def test_axis(text: str, name: str, values: list[Any]) -> None:
    found = axis(text)
    assert found == (name, values)
    assert [type(v) for v in found[1]] == [type(v) for v in values]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr", "SETTING=VALUE"),
        ("lr=", "SETTING=VALUE"),
        ("speed=1", "SETTING=VALUE"),
        ("optimizer=muon", "SETTING=VALUE"),
        ("lr=fast", "a number such as 0.1 or 2^-11"),
        ("lr=2^99999", "a number such as 0.1 or 2^-11"),
        ("lr=0.3..1", "powers of two"),
        ("lr=0..1", "powers of two"),
        ("lr=-4..-1", "powers of two"),
        ("lr=1..nan", "a number such as 0.1 or 2^-11"),
        ("wd=inf", "a number such as 0.1 or 2^-11"),
        ("steps=1.5", "a whole number"),
        ("steps=0.5..2", "a whole number"),
    ],
)
def test_wrong_axis(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("^", r"\^")):
        axis(text)


def test_grid() -> None:
    over = {"lr": [0.1, 0.2], "seed": [0, 1, 2]}
    expected = [(0.1, 0), (0.1, 1), (0.1, 2), (0.2, 0), (0.2, 1), (0.2, 2)]
    assert [(j.lr, j.seed) for j in grid(Job(), over)] == expected
    with pytest.raises(ValueError, match="did you mean 'seed'"):
        grid(Job(), {"sed": [1]})


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("muon", {"lr", "wd", "seed"}),
        ("gpa(muon)", {"lr", "wd", "seed"}),
        ("soda(muon)", {"lr", "seed"}),
        ("uscion", {"lr", "seed"}),
        ("soda_dagger", {"lr", "seed"}),
    ],
)
def test_only_optimizers_with_weight_decay_have_its_axis(name: str, axes: set[str]) -> None:
    found = Sweep((name,))._axes(name, {"lr": [0.1], "wd": [0.0, 0.1]})
    assert set(found) == axes


def test_an_axis_given_twice_has_the_values_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []

    def keep(self: Sweep, todo: list[Job], *args: Any) -> int:
        jobs.extend(todo)
        return 0

    monkeypatch.setattr(Sweep, "carry_out", keep)
    Sweep(("muon",), over=("lr=2^-9", "lr=2^-8,2^-9")).run()
    assert [it.lr for it in jobs] == [2**-9, 2**-8]


def test_seeds_are_an_axis_or_an_option() -> None:
    assert Sweep(("muon",), seeds=("3-4",))._axes("muon", {})["seed"] == (3, 4)
    assert Sweep(("muon",), seeds=("3", "4"))._axes("muon", {"seed": [7]})["seed"] == [7]


OTHER: dict[str, Any] = {
    "preset": "small", "data": "there", "lr": 0.1, "wd": 0.1, "steps": 7, "batch": 3, "context": 16,
    "width": 64, "depth": 2, "head_dim": 16, "activation": 1.5, "warmup": 0.1, "warmdown": 0.2,
    "alpha": 0.2, "alpha_bar": 0.3, "eval_every": 4, "eval_tokens": 99, "seed": 5,
    "horizon": "2x", "z0": "zero", "fade": (0.5, 0.75), "decay": "coupled",
    "optimizer": "soda(muon)",
}  # fmt: skip
HOW: dict[str, Any] = {
    "device": "cpu", "precision": "fp32", "compile": False, "graphs": False, "micro_batch": 3,
    "diagnostics": False, "log": "tensorboard",
    "threads": 2, "checkpoint_every": 9, "log_every": 8, "parallel": "hsdp", "shards": 2,
}  # fmt: skip


def test_trial_as_text() -> None:
    """Every field survives, and none is missing from this test."""
    assert {f.name for f in fields(Job)} == set(OTHER)
    assert {f.name for f in fields(Execution)} == set(HOW)
    for name, value in OTHER.items():
        optimizer = "soda(muon)" if name in ("z0", "fade", "decay") else "muon"
        it = Job(**{"optimizer": optimizer} | {name: value})
        trial = Trial(it, Path("a b/ü"), Execution(**HOW))
        again = Trial.parse(trial.text())
        assert again == trial
        assert getattr(again.job, name) == value
    for name, value in HOW.items():
        execution = Execution(**{name: value})
        assert Trial.parse(Trial(Job(), OUT, execution).text()).execution == execution


def test_trials_are_different_jobs() -> None:
    jobs = [job("muon"), job("Muon"), job("muon", warmup=0.0), job("muon", seed=1)]
    found = make_trials(jobs, OUT, Execution(), VOCAB)
    assert [trial.job.seed for trial in found] == [0, 1]
    assert len({trial.folder for trial in found}) == 2


# -- trials that run ------------------------------------------------------------------------------


def some(*jobs: Job, **how: Any) -> list[Trial]:
    return make_trials(jobs, OUT, Execution(**{"threads": 1} | how), VOCAB)


def run_all(found: list[Trial], workers: int = 2) -> list[sweep.Outcome]:
    return run_trials(found, workers, Console(quiet=True))


@lab
def test_finished_trials_are_kept() -> None:
    first = some(job("muon"))
    assert run_all(first) == []
    before = (first[0].folder / records.FILE).stat().st_mtime_ns
    more = some(job("muon"), job("adamw"))
    assert unfinished(more) == more[1:]
    assert run_all(more) == []
    assert unfinished(more) == []
    assert (first[0].folder / records.FILE).stat().st_mtime_ns == before
    assert [len(lines(trial.folder, "run")) for trial in more] == [1, 1]


@lab
def test_a_trial_runs_as_it_does_alone() -> None:
    (trial,) = some(job("soda(muon)"))
    assert run_all([trial]) == []
    train.train(trial.job, Path("alone"))
    assert losses(trial.folder) == losses(Path("alone"))


@lab
def test_a_run_that_diverges_is_done() -> None:
    found = some(job("adamw", lr=1e30, warmup=0.0), job("muon"))
    assert run_all(found) == []
    assert [trial.run().finished for trial in found] == [False, True]  # type: ignore[union-attr]


def bad_key(*args: Any, **how: Any) -> None:
    raise KeyError("lost")


@lab
def test_a_trial_that_fails() -> None:
    """A file is in the place of its folder. The other trials run."""
    found = some(*(job("muon", seed=s) for s in range(3)))
    OUT.mkdir()
    found[1].folder.write_text("in the way")
    outcomes = {o.trial: o for o in Local(2)(found)}
    assert [bool(outcomes[trial].error) for trial in found] == [False, True, False]
    assert "in the way" not in outcomes[found[1]].error
    assert all(outcomes[trial].run.finished for trial in (found[0], found[2]))  # type: ignore[union-attr]


@lab
def test_any_exception_is_the_error_of_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    (trial,) = some(job("muon"))
    monkeypatch.setattr(train, "train", bad_key)
    assert sweep.work(trial.text()) == "KeyError: 'lost'"


def test_a_record_without_a_head(tmp_path: Path) -> None:
    (tmp_path / records.FILE).write_text('{"kind": "ru\n{"kind": "step", "step": 1}\n')
    with pytest.raises(ValueError, match="does not begin with a run record"):
        records.begun(tmp_path)


@lab
def test_a_record_that_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    """The error is shown for its trial. The others run, and the report shows all readable runs."""
    bad, good = some(job("muon"), job("adamw"))
    bad.folder.mkdir(parents=True)
    (bad.folder / records.FILE).write_text('{"kind": "run", "format": 99}\n')
    arguments = ["compare", "muon", "adamw", *flags(), "--seeds", "0", "--workers", "1",
                 "--threads", "1", "--out", "out"]  # fmt: skip
    assert cli.main(arguments) == 1
    out, error = " ".join(capsys.readouterr().out.split()), "has format 99"
    assert f"{bad.folder / records.FILE} {error}" in out
    assert "1 of 2 runs are not done" in out
    assert good.run().finished  # type: ignore[union-attr]
    assert cli.main(["report", "out"]) == 0
    assert f"skipped: {bad.folder / records.FILE} {error}" in capsys.readouterr().out


@lab
def test_notes_of_a_run_are_shown_when_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """The notes also say that a run has read its data again, because a worker shows no progress."""
    (trial,) = some(job("muon"))
    writer = records.Writer(trial.folder)
    writer.write("run", format=records.FORMAT, job={})
    for _ in range(2):  # again, after a stop
        writer.write("note", step=3, text="step 3: [it] could not be saved")
    writer.write("end", step=6, status=records.FINISHED, val_loss=4.0, seconds=1.0, epochs=2.5)
    writer.close()
    board = Board(Console(), [trial], 0)
    board.end(sweep.Outcome(trial, trial.run()))
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "[1/1] muon, seed 0: validation loss 4.0000 (0:01)",
        "  step 3: [it] could not be saved",
        "  it read its training data 2.5 times",
    ]


def test_each_worker_has_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for count, names in ((1, ["auto"] * 3), (2, ["cuda:0", "cuda:1", "cuda:0"])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert [Execution().placed(slot).device for slot in range(3)] == names
        assert Execution(device="cuda:0").placed(1).device == "cuda:0"
        assert placed(Execution(), None, 9, "nano")[0] == count
    seen = []
    monkeypatch.setattr(sweep, "_worker", lambda: Recorder(seen))
    found = some(job("muon"), job("adamw"))
    assert len(list(Local(2)(found))) == 2
    assert sorted(Trial.parse(text).execution.device for text in seen) == ["cuda:0", "cuda:1"]


class Recorder:
    """A worker that records its trials and runs nothing."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def submit(self, call: Any, text: str) -> Future[str]:
        self.seen.append(text)
        future: Future[str] = Future()
        future.set_result("")
        return future

    def shutdown(self, wait: bool) -> None:
        pass


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("mps", "'mps' is not supported: use cpu, cuda or cuda:1"),
        ("meta", "'meta' is not supported"),
        ("cuda:2", "cuda:2 does not exist: use cuda:0 to cuda:1"),
        ("gpu", "unknown device 'gpu'"),
    ],
)
def test_wrong_devices_are_refused(
    device: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=words):
        Execution(device=device)


def no_memory(*args: Any, **how: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ...")


@lab
def test_a_gpu_that_is_too_small(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (trial,) = some(job("muon"))
    monkeypatch.setattr(train, "train", no_memory)
    monkeypatch.setattr("sodaopt.lab.commands.train", no_memory)
    assert sweep.work(trial.text()) == NO_MEMORY
    assert cli.main(["train", *flags()]) == 2
    assert capsys.readouterr().err == f"sodaopt: {NO_MEMORY}\n"
    assert "--micro-batch" in NO_MEMORY


def sweeping(*more: str, steps: int = 6, workers: int = 2, prepare: Any = None) -> Command:
    return begin(["sweep", "muon", "adamw", *flags(steps=steps), "--over", "lr=2^-10..2^-9",
                  "--workers", str(workers), "--out", "out", "--threads", "1", *more],
                 prepare)  # fmt: skip


def ended() -> set[Path]:
    return {p.parent for p in OUT.rglob(records.FILE) if lines(p.parent, "end")}


def dies() -> None:
    """Kill the process of the second trial, as the system does when memory is short."""
    ordinary = train.train

    def killed(it: Job, *args: Any, **how: Any) -> Any:
        if (it.optimizer, it.lr) == ("muon", 2**-9) and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return ordinary(it, *args, **how)

    train.train = killed


@lab
def test_a_worker_that_dies() -> None:
    command = sweeping(prepare=dies)
    assert command.end() == 1
    assert "lr 0.00195: its process was killed (out of memory?)" in command.output
    assert command.output.count("validation loss") >= 3
    assert len(ended()) == 3
    assert "1 of 4 runs are not done: run the same command again to continue" in command.output
    command = sweeping(prepare=dies)
    assert command.end() == 0, command.output
    assert "3 of 4 runs are already done" in command.output


@lab
def test_a_killed_sweep() -> None:
    command = sweeping(workers=1)
    command.until(lambda: len(ended()) >= 1)
    command.signal(signal.SIGKILL)
    assert command.end() == -signal.SIGKILL
    kept = {folder: (folder / records.FILE).stat().st_mtime_ns for folder in ended()}
    assert 1 <= len(kept) < 4
    command = sweeping()
    assert command.end() == 0, command.output
    assert f"{len(kept)} of 4 runs are already done" in command.output
    assert len(ended()) == 4
    for folder, time_ in kept.items():
        assert (folder / records.FILE).stat().st_mtime_ns == time_
        assert len(lines(folder, "run")) == 1


def begun() -> list[Path]:
    return [p.parent for p in OUT.rglob(records.FILE) if lines(p.parent, "step")]


@lab
@pytest.mark.parametrize("how", ["group", "alone", "killed"])
def test_an_interrupted_sweep(how: str) -> None:
    """After Ctrl-C, running trials are saved and waiting trials do not start. The same holds if the
    signal reaches the parent process only, or if the parent process is killed."""
    long = "--eval-every", "50000", "--log-every", "1"
    command = sweeping(*long, steps=100_000)
    command.until(lambda: len(begun()) == 2)
    assert len(Page.load(OUT).runs) > 2, "report.json has all planned runs from the start"
    if how != "killed":
        assert command.process.pid
        (os.killpg if how == "group" else os.kill)(command.process.pid, signal.SIGINT)
        assert command.end() == 130, command.output
        assert "run the same command again to continue" in command.output
        assert "report: out/report.html" in command.output, "with the runs so far"
    else:
        command.process.kill()
        command.end()
    deadline = time.monotonic() + 30
    while len(ended()) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(begun()) == len(ended()) == 2
    saved = {}
    for folder in begun():
        (end,) = lines(folder, "end")
        assert end["status"] == records.STOPPED
        saved[folder] = end["step"]
        assert found(folder / "checkpoints")[-1].stem == f"step-{end['step']:08d}"
    command = sweeping(*long, steps=100_000)
    command.until(lambda: all(len(lines(folder, "run")) == 2 for folder in saved))
    command.signal(signal.SIGINT)
    assert command.end() == 130
    for folder, step in saved.items():
        assert lines(folder, "run")[1]["resumed"] == step


def spawns() -> None:
    """Start workers as outside of tests, which takes seconds."""
    sweep.START = "spawn"
    began = sweep.ProcessPoolExecutor.submit

    def submit(self: Any, *args: Any) -> Any:
        future = began(self, *args)
        Path("started").touch()
        return future

    sweep.ProcessPoolExecutor.submit = submit  # type: ignore[method-assign,assignment]


@lab
def test_a_sweep_interrupted_while_its_workers_start() -> None:
    command = sweeping(workers=1, prepare=spawns)
    command.until(Path("started").exists)
    time.sleep(0.5)  # the worker is importing modules
    command.signal(signal.SIGINT)
    assert command.end() == 130, command.output
    assert command.output == "stopped: run the same command again to continue\n"
    assert not begun()


@lab
def test_workers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start as outside of tests."""
    monkeypatch.setattr(sweep, "START", "spawn")
    assert run_all(some(job("muon")), workers=1) == []


# -- finished runs in other folders ---------------------------------------------------------------

CLEAN = {"commit": "abc", "dirty": False}


@lab
@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [(CLEAN, CLEAN, True), (CLEAN, CLEAN | {"dirty": True}, False),
     (CLEAN, CLEAN | {"commit": "def"}, False), ({}, {}, False)],
)  # fmt: skip
def test_a_finished_run_elsewhere_is_copied(
    before: dict[str, Any], after: dict[str, Any], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is not copied if the source code has changed since, has uncommitted changes, or has no
    known commit.
    """
    monkeypatch.setattr(runlog, "git", lambda: before)
    first, second = (Path("runs") / name / "KEY" for name in ("train", "compare"))
    monkeypatch.setattr(ResolvedJob, "key", "KEY")
    run = train.train(job(), first)
    monkeypatch.setattr(reuse, "git", lambda: after)
    monkeypatch.setattr(runlog, "git", lambda: after)
    again = train.train(job(), second)
    assert len(lines(second, "run")) == 1
    assert again.head["git"] == after
    assert not kept or again.head["time"] == run.head["time"]
    assert ((second / "weights.pt").stat().st_nlink == 2) == kept
    assert restore(again)
    outside = train.train(job(), Path("elsewhere/KEY"))
    assert (Path("elsewhere/KEY/weights.pt")).stat().st_nlink == 1
    assert outside.finished


# -- commands -------------------------------------------------------------------------------------


@lab
def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", "muon", "soda(muon)", *flags(), "--seeds", "0-1", "--out", "out",
                 "--workers", "2", "--threads", "1"]  # fmt: skip
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    for words in ("[4/4]", "soda(muon)", "validation loss", "report: out/report.html"):
        assert words in out
    assert len(ended()) == 4
    page = (OUT / "report.html").read_text()
    assert "soda(muon)" in page
    ((one, other),) = Page.load(OUT).primary
    assert one.startswith("soda-muon-s0-")
    assert other.startswith("muon-s0-")
    assert cli.main(arguments) == 0
    assert "4 of 4 runs are already done" in capsys.readouterr().out

    (OUT / "report.html").unlink()
    assert cli.main(["report", "out", "--title", "Two of them"]) == 0
    assert "Two of them" in (OUT / "report.html").read_text()
    assert "soda(muon)" in capsys.readouterr().out


@lab
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compare", "muom"], "did you mean 'muon'"),
        (["compare", "muon", "soda(muon)", "--wd", "0.1"], "but soda(muon) has no weight decay"),
        (["compare", "muon", "--workers", "0"], "workers must be at least 1"),
        (["compare", "muon", "--seeds"], "at least one seed"),
        (["compare", "muon", "--wd", "nan"], "expected a number such as 0.1 or 2^-11"),
        (["compare", "muon", "--preset", "Nanoo"], "did you mean 'nano'"),
        (["train", "--preset", "GPT-1B"], "did you mean 'gpt-1b'"),
        (["sweep", "muon", "--seeds"], "at least one seed, such as --seeds 0 1"),
        (["sweep", "muon", "--over", "rate=1"], "SETTING=VALUE"),
        (["sweep"], "at least one optimizer"),
        (["sample", "nothing"], "nothing"),
        (["sample", ".", "--tokens", "0"], "must be at least 1"),
        (["reproduce", "table-layer"], "did you mean 'table-layers'"),
        (["reproduce", "table-layers", "--seeds", "4-2"], "4-2 is not an increasing range"),
        (["compare", "muon", "lion", "--primary", "muon"], "must be an optimizer after the first"),
        (["sweep", "muon", "--seeds", "x"], "--seeds must be seeds such as 0 1 2 or 0-4, got 'x'"),
        (["reproduce", "table-layers", "--workers", "0"], "workers must be at least 1"),
        (["report", "nothing"], "nothing"),
    ],
)
def test_wrong_commands(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(arguments) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not OUT.exists()


@lab
def test_report_writes_the_page_of_a_comparison_again(capsys: pytest.CaptureFixture[str]) -> None:
    """`sodaopt report` writes the same page again: its order, its baseline and its title."""

    def compare(*names: str) -> str:
        arguments = ["compare", *names, *flags(steps=2), "--seeds", "0", "--out", "out",
                     "--workers", "1", "--threads", "1"]  # fmt: skip
        assert cli.main(arguments) == 0
        return (OUT / "report.html").read_text()

    def report() -> str:
        capsys.readouterr()
        assert cli.main(["report", "out"]) == 0
        return (OUT / "report.html").read_text()

    page = compare("soda(muon)", "muon")
    assert "<title>SODA(Muon), Muon</title>" in page
    assert report() == page
    assert "adamw" in compare("muon", "adamw")
    page = report()  # of all that the folder holds, in the order of the last comparison
    assert "<title>out</title>" in page
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "finished" in line]
    assert names == ["muon", "adamw", "soda(muon)"]
    (OUT / "report.json").write_text("{")
    assert "<title>out</title>" in report()


@lab
def test_a_power_of_two_as_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in (["--lr", "2^-11"], ["--lr=2**-11"], ["--lr", "0.00048828125"]):
        assert cli.main(["train", "--optimizer", "muon", *flag, "--dry-run"]) == 0
        assert "muon, lr 0.0004883:" in capsys.readouterr().out


@lab
def test_a_diverged_run_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "--optimizer", "adamw", "--lr", "1e30", *flags(warmup=0), "--out", "a"]
    assert cli.main(arguments) == 1
    assert capsys.readouterr().out.count("diverged: the ") == 1
    assert cli.main(arguments) == 1
    assert "a has already ended: diverged: the " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("n", "text"),
    [(0.5, "0.5"), (999, "999"), (999.9, "1k"), (12345, "12.3k"), (2.6e9, "2.6G"),
     (1.81e12, "1.81T"), (1.86e18, "1.86E")],
)  # fmt: skip
def test_short_numbers(n: float, text: str) -> None:
    assert short(n) == text


@pytest.mark.parametrize("flag", ["temperature=-1", "temperature=nan", "top_k=0", "count=0"])
def test_wrong_options_of_sample(flag: str) -> None:
    name, value = flag.split("=")
    with pytest.raises(ValueError, match=f"^--{name.replace('_', '-')} must be at least"):
        Sample(Path("a"), **{name: float(value)})  # type: ignore[arg-type]


@lab
@pytest.mark.parametrize("name", ["muon", "schedule_free(adamw)"])
def test_sample(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*more: str) -> str:
        arguments = ["sample", "a", "--tokens", "5", "--prompt", "The sea", *more]
        assert cli.main(arguments) == 0
        return capsys.readouterr().out

    asked = iter([False, False, True])
    train.train(job(name, lr=0.01), Path("a"), stop=lambda: next(asked, False))
    half = text()
    assert half.startswith("The sea")
    assert half == text()
    assert half == text("--device", "cpu")
    assert text("--count", "2", "--temperature", "0").count("The sea") == 2
    model, _ = restore(records.read(Path("a")))
    state = model.state_dict()

    seen = {}

    def three(self: Any, *args: Any) -> None:
        if self.step == 3:
            with averaged(self.optimizer):
                seen.update({n: p.clone() for n, p in self.model.state_dict().items()})

    with pytest.MonkeyPatch.context() as patch:  # the output of the method at that step
        patch.setattr("sodaopt.lab.training.Training._check_losses", three)
        train.train(job(name, lr=0.01), Path("b"))
    assert all(torch.equal(state[n], seen[n]) for n in seen)

    run = train.train(job(name, lr=0.01), Path("a"))
    assert run.finished
    final = restore(run)[0].state_dict()
    assert not torch.equal(final["head.weight"], state["head.weight"])
    assert text().startswith("The sea")


# -- the paper's studies --------------------------------------------------------------------------


def test_listing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "--list"]) == 0
    out = capsys.readouterr().out
    assert out.strip() == listing()
    assert all(name in out for name in (*STUDIES, *DEFINITIONS, *SCALES))
    for name in DEFINITIONS:
        assert cli.main(["reproduce", name]) == 0
        assert "nothing to train" in capsys.readouterr().out


def work(study: str, scale: str, **changes: Any) -> Work:
    whole = Work(STUDIES[study], SCALES[scale], {}, OUT, Execution(), 1, 50304, Console(quiet=True))
    return replace(whole, **changes)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("study", STUDIES)
def test_every_cell_is_a_job(study: str, scale: str) -> None:
    it = STUDIES[study]
    found = work(study, scale)
    jobs = found.jobs({cell.base: SCALES[scale].rate(cell.base) for cell in it.cells})
    resolved: list[ResolvedJob] = [resolve(j, 50304) for j in jobs]
    count = sum(row.seeds for row in it.planned(SCALES[scale])) * len(it.cells)
    assert len({p.key for p in resolved}) == len(resolved) == count
    columns = [cell.column for cell in it.cells]
    assert len(set(columns)) == len(columns)
    assert all(column in columns for pair in it.pairs for column in pair)
    for label, values in it.published.items():
        assert len(values) == len(columns)
        assert label in ("1x", "4x")
    for base in {cell.base for cell in it.cells}:
        assert str(parse(base)) == base
        assert len(found._grid(base, {})) == 3
    assert all(cell.follows in ("", *columns) for cell in it.cells)
    if scale == "paper":
        choices = [c for cell in it.cells for c in cell.choices(SCALES[scale])]
        rows = [row.settings for row in it.rows(SCALES[scale])]
        own = {settings["lr"] for settings in (*choices, *rows) if "lr" in settings}
        for p in resolved:
            assert p.shape.depth == 12
            assert p.settings.lr in {LR[p.name.base], *own}
            assert p.batch * p.shape.context == 2**19


@pytest.mark.parametrize("study", ["fig-scale", "fig-scale-wrapper"])
def test_all_sizes_have_as_many_tokens_a_parameter(study: str) -> None:
    found = [resolve(j, 50257) for j in work(study, "paper").jobs({})]
    assert len({r.shape.parameters for r in found}) == 7
    assert all(r.horizon == pytest.approx(1, rel=2e-3) for r in found)


@pytest.mark.parametrize(
    ("tried", "following"),
    [
        ({}, [2**-11, 2**-10, 2**-9]),
        ({1: 5.0, 2: 4.0, 4: 4.5}, []),
        ({1: 3.0, 2: 4.0, 4: 4.5}, [0.5]),
        ({1: 5.0, 2: 4.0, 4: 3.5}, [8]),
        ({1: 5.0, 2: 4.0, 4: math.inf}, []),
        ({1: math.inf, 2: math.inf, 4: math.inf}, [0.5]),
    ],
)
def test_learning_rates_to_try(tried: dict[float, float], following: list[float]) -> None:
    assert work("table-layers", "proxy")._grid("muon", tried) == following


def test_tuning_holds_its_best_point_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that is lowest at 2^-13, three below the middle of the first grid."""
    monkeypatch.setattr(Work, "run", lambda self, jobs: None)
    monkeypatch.setattr(Work, "_loss", lambda self, j: abs(math.log2(j.lr) + 13))
    tried = work("fig-wd-sweep", "proxy").tune()
    assert list(tried) == ["muon"]
    assert best(tried["muon"]) == 2**-13
    assert sorted(tried["muon"]) == [2.0**e for e in range(-14, -8)]


WDS = (0.5, 1.0, 2.0)
TUNING_SEEDS = (100, 101)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_settings_are_chosen_on_other_seeds(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice has the lowest mean. A choice with a diverged run is never made."""
    losses = {wd: [3.1, 3.3] for wd in WDS} | {WDS[at - 1]: [1.0, math.inf], WDS[at]: [3.2, 3.1]}
    seen: list[Job] = []
    monkeypatch.setattr(Work, "run", lambda self, jobs: seen.extend(jobs))
    monkeypatch.setattr(Work, "_loss", lambda self, j: losses[j.wd][j.seed - TUNING_SEEDS[0]])
    two = replace(SCALES["proxy"], tuning_seeds=TUNING_SEEDS)
    before = replace(work("muon", "proxy", only=("1x",)), scale=two)
    tried, after = before.choose({"muon": 2**-10})
    assert [(j.seed, j.wd) for j in seen] == [(s, wd) for s in TUNING_SEEDS for wd in WDS]
    assert [t["settings"] for t in tried] == [{"wd": wd} for wd in WDS]
    assert [t["mean"] is None for t in tried] == [wd == WDS[at - 1] for wd in WDS]
    jobs = after.jobs({"muon": 2**-10})
    assert {j.wd for j in jobs if j.optimizer == "muon"} == {None, WDS[at]}
    assert {j.lr for j in [*seen, *jobs]} == {2**-10}
    assert not {j.seed for j in jobs} & set(TUNING_SEEDS)
    assert len(jobs) == 40


def test_others_use_the_learning_rate_that_the_reference_chose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """AdamW without weight decay has its own best learning rate, and each grid point runs once."""
    lowest = {0.0: -9, 0.1: -10, 0.25: -8, 0.5: -7}
    seen: list[Job] = []
    monkeypatch.setattr(Work, "run", lambda self, jobs: seen.extend(jobs))
    monkeypatch.setattr(
        Work, "_loss", lambda self, j: 3 + abs(math.log2(j.lr) - lowest[j.wd]) + (j.wd != 0.25)
    )
    _, after = work("adamw", "proxy").choose({})
    assert len(seen) == len(set(seen)) == 16
    found = {c.column: (c.settings["lr"], c.settings.get("wd", 0.0)) for c in after.study.cells}
    assert found.pop("AdamW") == (2**-9, 0.0)
    assert found.pop("AdamW, best wd") == (2**-8, 0.25)
    assert set(found.values()) == {(2**-8, 0.0)}


def test_rows_and_seeds_to_run() -> None:
    """Each row has its own number of seeds. Given rows and seeds replace all of them."""

    def counts(found: Work) -> dict[tuple[str | None, int], int]:
        return Counter((j.horizon, j.seed) for j in found.jobs({}))

    planned = {("1x", s): 5 for s in range(8)} | {("4x", s): 5 for s in range(3)}
    assert counts(work("muon", "proxy")) == planned
    assert counts(work("muon", "proxy", only=("4x",), seeds=(7,))) == {("4x", 7): 5}
    with pytest.raises(ValueError, match="unknown row '3x'"):
        work("muon", "proxy", only=("3x",)).jobs({})


@pytest.mark.parametrize("study", ["sizes", "horizons", "muon"])
@pytest.mark.parametrize("scale", SCALES)
def test_settings_are_chosen_at_the_standard_size_and_length(study: str, scale: str) -> None:
    """One choice then serves all rows, and the studies share its runs."""
    tried = work(study, scale).candidates({"muon": 2**-10})
    keys = {resolve(j, 50304).key for j in tried}
    assert keys == {resolve(j, 50304).key for j in work("muon", scale).candidates({"muon": 2**-10})}
    at = SCALES[scale]
    assert {(j.preset, j.horizon, j.width) for j in tried} == {(at.preset, at.horizons[0], None)}


@pytest.mark.parametrize(
    ("study", "bases"),
    [("muon", ["muon"]), ("adamw", []), ("scion", ["scion", "uscion", "soda_dagger"]),
     ("fig-anchor", ["soda_dagger"]), ("learning-rates", []), ("sizes", ["muon"])],
)  # fmt: skip
def test_learning_rates_are_tuned_for_cells_that_do_not_choose_one(
    study: str, bases: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Job] = []
    monkeypatch.setattr(Work, "run", lambda self, jobs: seen.extend(jobs))
    monkeypatch.setattr(Work, "_loss", lambda self, j: abs(j.lr - SCALES["nano"].rate(j.optimizer)))
    assert list(work(study, "nano").tune()) == bases
    assert {j.optimizer for j in seen} == set(bases)
    assert {j.seed for j in seen} <= set(SCALES["nano"].tuning_seeds)


def test_a_study_without_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Work, "run", lambda self, jobs: pytest.fail("it has no choices"))
    it = work("table-layers", "proxy")
    assert it.choose({}) == ([], it)


@lab
def test_reproduce(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["preset=nano", "horizon=0.0004x", "width=32", "depth=1", "head-dim=16",
                "context=32", "batch=2", "eval_tokens=256", "warmup=0"]  # fmt: skip
    arguments = ["reproduce", "table-layers", "--data", "embedded", "--tune", "False", "--seeds",
                 "0-1", "--workers", "2", "--threads", "1", "--out", "out", "--settings",
                 *settings]  # fmt: skip
    assert cli.main([*arguments, "--dry-run", "--json"]) == 0
    planned = [Trial.parse(line).job for line in capsys.readouterr().out.splitlines()]
    assert len(planned) == 14
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    folder = OUT / "table-layers-proxy"
    numbers = results.read(folder / "results.json")
    assert results.markdown(numbers) in out
    assert (folder / "report.html").exists()
    typed = shlex.split(numbers["command"])
    assert typed[:5] == ["sodaopt", "reproduce", "table-layers", "--scale", "proxy"]
    assert set(arguments) <= set(typed)
    capsys.readouterr()
    assert cli.main([*typed[1:], "--dry-run", "--json"]) == 0
    again = capsys.readouterr().out.splitlines()
    assert [Trial.parse(line).job for line in again] == planned
    columns = [cell.column for cell in STUDIES["table-layers"].cells]
    assert {cell["row"] for cell in numbers["cells"]} == {"0.000426x"}
    assert [cell["column"] for cell in numbers["cells"]] == columns
    for cell, it in zip(numbers["cells"], planned, strict=False):
        assert len(cell["losses"]) == 2
        assert cell["mean"] == pytest.approx(sum(cell["losses"]) / 2)
        assert cell["lr"] == it.lr
    muon, wrapped = numbers["cells"][0]["losses"], numbers["cells"][1]["losses"]
    gap = results.differences(numbers["cells"], numbers["pairs"], numbers["primary"])[0]
    assert (gap["one"], gap["other"], gap["n"]) == ("SODA(Muon) hidden", "Muon", 2)
    assert gap["mean"] == pytest.approx(sum(wrapped) / 2 - sum(muon) / 2)


@lab
def test_a_stopped_command_leaves_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers have the finished runs of all planned seeds, and of the seeds that are given."""
    tiny = ["width=32", "depth=1", "head_dim=16", "context=32", "batch=2", "eval_tokens=64"]
    arguments = ["reproduce", "horizons", "--scale", "nano", "--tune", "False", "--device", "cpu",
                 "--workers", "2", "--out", "out", "--quiet", "--settings", *tiny]  # fmt: skip
    for name in ("horizons", "lengths"):
        monkeypatch.setitem(
            SCALES, "nano", replace(SCALES["nano"], **{name: ("0.0004x", "0.0008x")})
        )
    monkeypatch.setitem(SCALES, "nano", replace(SCALES["nano"], tuning_seeds=(100,)))

    def seeds(*more: str, code: int = 0) -> dict[tuple[str, str], list[int]]:
        assert cli.main([*arguments, *more]) == code
        found = results.read(OUT / "horizons-nano" / "results.json")
        return {(c["row"], c["column"]): c["seeds"] for c in found["cells"]}

    one, other = "Muon, best wd", "SODA(Muon) hidden, coupled"
    short = {("0.0004x", one): [0], ("0.0004x", other): [0]}
    assert seeds("--rows", "0.0004x", "--seeds", "0") == short
    whole = short | {("0.0008x", one): [9], ("0.0008x", other): [9]}
    assert seeds("--rows", "0.0008x", "--seeds", "9") == whole
    monkeypatch.setattr("sodaopt.lab.study_runs.run_trials", lambda todo, *rest: [
        sweep.Outcome(trial, None) for trial in sweep.unfinished(todo)])  # fmt: skip
    assert seeds("--seeds", "0", "1", code=130) == short
    page = Page.load(OUT / "horizons-nano")
    assert (len(page.runs), len(page.primary)) == (8, 1)


@lab
def test_reproduce_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    """With steps instead of a horizon. The cells use the best learning rate."""
    arguments = ["reproduce", "fig-anchor", "--data", "embedded", "--seeds", "0", "--workers", "2",
                 "--threads", "1", "--out", "out", "--settings", "preset=nano", "steps=2",
                 "width=32", "depth=1", "head_dim=16", "context=32", "batch=2",
                 "eval_tokens=64"]  # fmt: skip
    assert cli.main(arguments) == 0
    assert "Learning rates of the baselines" in capsys.readouterr().out
    numbers = results.read(OUT / "fig-anchor-proxy" / "results.json")
    tried = {float(lr): loss for lr, loss in numbers["learning_rates"]["soda_dagger"].items()}
    finite = {lr: loss for lr, loss in tried.items() if loss is not None}
    assert min(tried) < best(finite) < max(tried)
    assert [cell["lr"] for cell in numbers["cells"]] == [best(finite)] * 2
    assert [cell["steps"] for cell in numbers["cells"]] == [2, 2]
    assert [cell["row"] for cell in numbers["cells"]] == ["0.000142x"] * 2


@lab
def test_a_study_goes_on_from_known_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings are not searched again, and runs of both commands are in the numbers."""
    tiny = ["width=32", "depth=1", "head_dim=16", "context=32", "batch=2", "eval_tokens=64"]
    arguments = ["reproduce", "muon", "--scale", "nano", "--device", "cpu", "--workers", "2",
                 "--rows", "0.0004x", "--out", "out", "--quiet", "--settings", *tiny]  # fmt: skip
    short = replace(SCALES["nano"], horizons=("0.0004x",), tuning_seeds=(100,))
    monkeypatch.setitem(SCALES, "nano", short)
    assert cli.main([*arguments, "--seeds", "0"]) == 0
    first = tmp_path / "first.json"
    shutil.move(OUT / "muon-nano" / "results.json", first)
    shutil.rmtree(OUT)
    columns = ["Muon, best wd", "SODA(Muon) hidden"]
    more = ["--seeds", "1", "--known", str(first), "--columns", *columns]
    assert cli.main([*arguments, *more, "--dry-run", "--json"]) == 0
    planned = capsys.readouterr().out.splitlines()
    assert cli.main([*arguments, *more]) == 0
    assert len(planned) == len(list(OUT.glob(f"muon-nano/*/{records.FILE}"))) == 2
    old, new = results.read(first), results.read(OUT / "muon-nano" / "results.json")
    for name in ("learning_rates", "choices", "planned", "pairs"):
        assert new[name] == old[name]
    assert [it["command"] for it in new["earlier"]] == [old["command"]]
    for before, after in zip(old["cells"], new["cells"], strict=True):
        both = after["column"] in columns
        assert after["seeds"] == ([0, 1] if both else [0])
        assert after["losses"][0] == before["losses"][0]
        assert after["mean"] == pytest.approx(sum(after["losses"]) / len(after["losses"]))
        assert after["settings"] == before["settings"]
    assert f"`{old['command']}`, then `{new['command']}`" in results.markdown(new)
    for text in ("[", "[]", "{}"):
        first.write_text(text)
        capsys.readouterr()
        assert cli.main([*arguments, *more]) != 0
        assert "first.json is not a results.json" in capsys.readouterr().err
    old["data"]["fingerprint"] = "other"
    with pytest.raises(ValueError, match="data with fingerprint other"):
        results.completed(new, [old])


@lab
@pytest.mark.parametrize(("error", "code"), [("", 130), ("OSError: no room", 1)])
def test_reproduce_unfinished(
    error: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def last_fails(todo: list[Trial], *args: Any) -> list[sweep.Outcome]:
        return [sweep.Outcome(todo[-1], None, error)]

    monkeypatch.setattr("sodaopt.lab.study_runs.run_trials", last_fails)
    assert cli.main(["reproduce", "fig-anchor", "--data", "embedded"]) == code
    out = capsys.readouterr().out
    assert "1 of 3 runs are not done" in out
    assert error in out
    assert "run the same command again to continue" in out


def numbers(**more: Any) -> results.Numbers:
    cell = {"row": "1x", "column": "Muon", "optimizer": "muon", "lr": 2**-10, "steps": 5,
            "epochs": 0.5, "seeds": [0, 1], "losses": [3.0, 3.2], "mean": 3.1, "spread": 0.1414,
            "diverged": 0, "tokens_per_second": [1e6, 1e6]}  # fmt: skip
    lost = cell | {"column": "SODA(Muon)", "losses": [None, None], "mean": None, "spread": None,
                   "diverged": 2, "tokens_per_second": [None, None]}  # fmt: skip
    return {
        "title": "A table", "command": "sodaopt reproduce it", "parameters": 6_800_000,
        "environment": {"device": "cpu", "torch": "2"}, "cells": [cell, lost],
        "data": {"name": "embedded", "train_tokens": 10**6, "vocab": 1024},
        "published": {"1x": [3.28146, 3.26654]}, "pairs": [["SODA(Muon)", "Muon"]], "primary": 1,
        "planned": {"1x": 3, "4x": 1}, "tuning_seeds": [100],
        "learning_rates": {"muon": {"0.25": None, "0.5": 3.0}, "scion": {"0.5": None}},
    } | more  # fmt: skip


def test_numbers_as_a_page(tmp_path: Path) -> None:
    it = numbers()
    results.write(tmp_path / "results.json", it)
    assert results.read(tmp_path / "results.json") == json.loads(json.dumps(it))
    text = results.markdown(it)
    for line in ("## A table", "| 1x | 3.1000 ± 0.1414 | diverged |",
                 "| *paper, 124M* | *3.28146* | *3.26654* |"):  # fmt: skip
        assert line in text
    assert "1x: seeds 0 to 1 of 3 planned. 4x: not measured yet." in text
    assert "Differences" not in text, "a column with a diverged seed is not compared"
    cells = [numbers()["cells"][0] | {"column": c, "losses": x} for c, x in
             (("Muon", [3.0, 3.2]), ("SODA(Muon)", [2.99, 3.19]), ("S", [3.1, 3.31]))]  # fmt: skip
    text = results.markdown(numbers(cells=cells, published={}))
    assert "| 1x | SODA(Muon) | Muon | -0.0100 | -0.0276 to +0.0076 | 0.134 |" in text
    assert "1x: residual sd 0.0041, 2 degrees of freedom; 2 seeds find a difference of" in text
    assert any(row.startswith("| muon | diverged | **3.0000** |") for row in text.splitlines())
    page = results.page([it, it], "# Numbers")
    assert page.startswith("# Numbers\n")
    assert page.count("## A table") == 2
    bare = results.markdown(numbers(cells=cells, pairs=[], learning_rates={}))
    assert "Learning rates" not in bare
    assert "Differences" not in bare
    tried = {"column": "Muon", "settings": {"wd": 0.5}, "seeds": [100, 101], "mean": 3.25}
    lost = tried | {"settings": {"wd": 2.0}, "mean": None}
    text = results.markdown(numbers(choices=[tried, lost]))
    assert "| Muon | wd 0.5 | 3.2500 | 100, 101 |\n| Muon | wd 2 | diverged |" in text


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_a_job(name: str) -> None:
    assert str(parse(name)) == re.sub(
        r"(soda\w*|cautious\w*)\(scion", r"\1(uscion", name
    )  # its pull
    assert parse(name.upper().replace("(", " ( ")) == parse(name)
    assert isinstance(resolve(Job(optimizer=name), VOCAB), ResolvedJob)


def test_shared_settings_are_part_of_a_job() -> None:
    assert {f.name for f in fields(Common)} < {f.name for f in fields(Job)}
