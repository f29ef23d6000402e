"""What many rows say while they run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from . import records, stats
from .progress import clock
from .sweep import Executor, Local, Outcome, Row, left


def console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=110, soft_wrap=False)


class Board:
    """A bar for all rows and one for each that runs, on a terminal; a line an end elsewhere."""

    def __init__(self, console: Console, todo: Sequence[Row], done: int) -> None:
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
        if self.bars is None:
            return
        for row in self.todo:
            last = _last(row.folder)
            if last is None or "step" not in last:
                continue
            if row.folder not in self.tasks:
                self.tasks[row.folder] = self.bars.add_task("", total=row_steps(row))
            text = f"{label(row)}  loss {last['loss']:.3f}" if last.get("loss") else label(row)
            self.bars.update(self.tasks[row.folder], completed=last["step"], description=text)

    def end(self, outcome: Outcome) -> None:
        row = outcome.row
        self.ended += 1
        self.todo.remove(row)
        if self.bars is not None:
            if row.folder in self.tasks:
                self.bars.remove_task(self.tasks.pop(row.folder))
            self.bars.update(self.overall, completed=self.ended, description=self._count())
        self._say(f"[{self.ended}/{self.total}] {label(row)}: {_ended(outcome)}")
        for note in _notes(outcome):
            self._say(f"  {note}")

    def _say(self, text: str) -> None:
        console = self.bars.console if self.bars is not None else self.console
        console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        if self.bars is not None:
            self.bars.stop()


def run_rows(rows: Sequence[Row], workers: int, console: Console) -> list[Outcome]:
    """Run what is left of the rows; what did not come to a good end is in the answer."""
    todo = left(rows)
    if len(todo) < len(rows):
        console.print(
            f"{len(rows) - len(todo)} of {len(rows)} runs are done already", highlight=False
        )
    board = Board(console, todo, len(rows) - len(todo))
    execute: Executor = Local(min(workers, max(len(todo), 1)), board.poll)
    failed: list[Outcome] = []
    try:
        for outcome in execute(todo):
            board.end(outcome)
            if outcome.error or outcome.run is None or not outcome.run.done:
                failed.append(outcome)
    except KeyboardInterrupt:
        console.print("stopped: the same command goes on", highlight=False)
        raise
    finally:
        board.close()
    return failed


def label(row: Row) -> str:
    job = row.job
    words = [job.optimizer, f"seed {job.seed}"]
    if job.lr is not None:
        words.append(f"lr {job.lr:.3g}")
    if job.wd:
        words.append(f"wd {job.wd:g}")
    return ", ".join(words)


def row_steps(row: Row) -> int | None:
    with suppress(OSError, ValueError):
        return int(records.read(row.folder).job["steps"])
    return None


def _ended(outcome: Outcome) -> str:
    run = outcome.run
    if outcome.error or run is None or run.end is None:
        return outcome.error or "not finished"
    if run.finished:
        return f"validation loss {run.end['val_loss']:.4f} ({clock(run.end['seconds'])})"
    return str(run.end.get("reason", run.end["status"]))


def _notes(outcome: Outcome) -> list[str]:
    """What a run would have said if it had been alone."""
    run = outcome.run
    if run is None:
        return []
    seen = stats.epochs(run)
    again = [f"it saw some tokens more than once, in {seen:.3g} epochs"] if seen > 1 else []
    return stats.notes(run) + again


def _last(folder: Path) -> records.Record | None:
    """The last whole record of a run that is being written."""
    with suppress(OSError):
        with (folder / records.FILE).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            lines = file.read().splitlines()
        for line in reversed(lines):
            with suppress(json.JSONDecodeError, UnicodeDecodeError):
                return json.loads(line)  # type: ignore[no-any-return]
    return None
