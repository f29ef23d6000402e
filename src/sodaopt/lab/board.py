"""Show the progress of many trials on the console."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from . import records, variants
from .on_ray import OnRay
from .progress import clock
from .schema import problem
from .sweep import Executor, Local, Outcome, Trial, unfinished
from .visible import visible


class Board:
    """Show the progress of many trials.

    Each trial prints one line when it ends. A terminal also shows one bar for all trials, and one
    bar for each running trial.

    todo: the trials that will run.
    done: the number of trials that were finished before.
    """

    def __init__(self, console: Console, todo: Sequence[Trial], done: int) -> None:
        self.console, self.todo = console, list(todo)
        self.total, self.ended = done + len(todo), done
        self.bars: Progress | None = None
        if console.is_terminal and todo:
            columns = (BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
            self.bars = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
            self.overall = self.bars.add_task(self._count(), total=self.total, completed=done)
            self.tasks: dict[Path, Any] = {}
            self.bars.start()

    def _count(self) -> str:
        return f"{self.ended}/{self.total} runs"

    def poll(self) -> None:
        """Update the bars of the running trials from their records."""
        if self.bars is None:
            return
        for trial in self.todo:
            last = _last(trial.folder)
            if last is None or "step" not in last:
                continue
            if trial.folder not in self.tasks:
                self.tasks[trial.folder] = self.bars.add_task("", total=_steps(trial))
            text = f"{label(trial)}  loss {last['loss']:.3f}" if last.get("loss") else label(trial)
            self.bars.update(self.tasks[trial.folder], completed=last["step"], description=text)

    def end(self, outcome: Outcome) -> None:
        """Count a trial that has ended, and print its outcome."""
        trial = outcome.trial
        self.ended += 1
        self.todo.remove(trial)
        if self.bars is not None:
            if trial.folder in self.tasks:
                self.bars.remove_task(self.tasks.pop(trial.folder))
            self.bars.update(self.overall, completed=self.ended, description=self._count())
        self._say(f"[{self.ended}/{self.total}] {label(trial)}: {_ended(outcome)}")
        for note in _notes(outcome):
            self._say(f"  {note}")

    def _say(self, text: str) -> None:
        console = self.bars.console if self.bars is not None else self.console
        console.print(visible(text), markup=False, highlight=False)

    def close(self) -> None:
        if self.bars is not None:
            self.bars.stop()


def run_trials(
    trials: Sequence[Trial], workers: int, console: Console, on: str = "here"
) -> list[Outcome]:
    """Run the unfinished trials. Return the outcomes of the trials that are still unfinished.

    workers: the number of processes on this machine.
    on: "here" runs the trials in these processes, "ray" on a Ray cluster.
    """
    todo = unfinished(trials)
    if len(todo) < len(trials):
        console.print(
            f"{len(trials) - len(todo)} of {len(trials)} runs are already done", highlight=False
        )
    board = Board(console, todo, len(trials) - len(todo))
    execute: Executor = Local(min(workers, max(len(todo), 1)), board.poll)
    if on == "ray":
        execute = OnRay(board.poll)
    failed: list[Outcome] = []
    try:
        for outcome in execute(todo):
            board.end(outcome)
            if outcome.error or outcome.run is None or not outcome.run.done:
                failed.append(outcome)
    except KeyboardInterrupt:
        console.print("stopped: run the same command again to continue", highlight=False)
        raise
    finally:
        board.close()
    return failed


def label(trial: Trial) -> str:
    """Return the name of a trial in the progress display, such as 'muon, seed 0, wd 0.1'."""
    job = trial.job
    words = [job.optimizer, f"seed {job.seed}"]
    if job.lr is not None:
        words.append(f"lr {job.lr:.3g}")
    if job.wd:
        words.append(f"wd {job.wd:g}")
    return ", ".join(words)


def _steps(trial: Trial) -> int | None:
    with suppress(OSError, ValueError):
        return int(records.read(trial.folder).job["steps"])
    return None


def _ended(outcome: Outcome) -> str:
    run = outcome.run
    if outcome.error or run is None or run.end is None:
        return outcome.error or "not finished"
    if run.finished:
        return f"validation loss {run.end['val_loss']:.4f} ({clock(run.end['seconds'])})"
    return str(run.end.get("reason", run.end["status"]))


def _notes(outcome: Outcome) -> list[str]:
    """Return the messages that the run would have printed if it were not part of a sweep."""
    run = outcome.run
    if run is None:
        return []
    count = variants.epochs(run)
    repeated = [f"it read its training data {count:.3g} times"] if count > 1 else []
    return variants.notes(run) + repeated


def _last(folder: Path) -> records.Record | None:
    """Return the last complete record of a run that is being written."""
    with suppress(OSError):
        with (folder / records.FILE).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            lines = file.read().splitlines()
        for line in reversed(lines):
            if (record := records.parse_line(line)) and not problem(record):
                return record
    return None
