"""The records of a run: lines of JSON, written during the run.

    runs/NAME/JOB/run.jsonl

    {"kind": "run", "job": {...}, "model": {...}, "environment": {...}, "git": {...}, ...}
    {"kind": "step", "step": 10, "loss": 6.1, "lr": 0.001, "tokens": 20480, "seconds": 1.4, ...}
    {"kind": "val", "step": 50, "loss": 5.2, "tokens": 102400, "seconds": 7.2}
    {"kind": "diagnostics", "step": 50, "roles": {"hidden": {"pull": 0.1, "share": 0.02, ...}, ...}}
    {"kind": "epoch", "step": 120, "epoch": 2, "tokens": 245760, "seconds": 18.0}
    {"kind": "note", "step": 150, "text": "step 150: ... could not be saved ..."}
    {"kind": "sample", "step": 200, "prompt": "The", "text": "The people of ..."}
    {"kind": "end", "step": 200, "status": "finished", "val_loss": 4.3, "seconds": 30.1, ...}

A killed and resumed run writes some steps again. The last line of a kind and step counts. Readers
skip an incomplete line.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

from sodaopt._errors import unknown

from .files import sync_folder
from .schema import problem

FILE = "run.jsonl"
FORMAT = 1
FINISHED, DIVERGED, STOPPED = "finished", "diverged", "stopped"
Record = dict[str, Any]


class Writer:
    """Append records to the file of a run.

    If a killed process has left an incomplete last line, the records begin on a new line.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = path = folder / FILE
        incomplete = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        self.file: TextIO = path.open("a", encoding="utf-8")
        if incomplete:
            self.file.write("\n")

    def write(self, kind: str, **values: Any) -> None:
        """Write a record as one line, which stays if the process is killed afterwards.

        The first and the last line of a run survive a power cut too, as its checkpoints do.
        """
        line = json.dumps({"kind": kind} | {k: _plain(v) for k, v in values.items()})
        try:
            self.file.write(line + "\n")
            self.file.flush()
            if kind in ("run", "end"):
                os.fsync(self.file.fileno())
                sync_folder(self.path.parent)
        except OSError as e:
            raise OSError(
                e.errno, f"{e.strerror}: a run cannot continue without its records. Free disk "
                "space and run it again: it continues from its last checkpoint", str(self.path)
            ) from e  # fmt: skip

    def close(self) -> None:
        with suppress(OSError):  # `write` has raised the same error
            self.file.close()


def _plain(value: Any) -> Any:
    """Replace nan and infinity, which JSON does not have, by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


@dataclass(frozen=True)
class Run:
    """A run, read from its file."""

    folder: Path
    head: Record
    records: list[Record] = field(repr=False)

    @property
    def job(self) -> Record:
        """The settings that decide the losses: optimizer, lr, wd, seed, steps, ..."""
        return self.head.get("job", {})  # type: ignore[no-any-return]

    @property
    def optimizer(self) -> str:
        return str(self.job.get("optimizer", "?"))

    @cached_property
    def end(self) -> Record | None:
        """The end record, or None if the run has not ended, or was resumed after it."""
        last = self.records[-1] if self.records else self.head
        return last if last["kind"] == "end" else None

    @property
    def finished(self) -> bool:
        return self.end is not None and self.end["status"] == FINISHED

    @property
    def done(self) -> bool:
        """Whether nothing is left to do: the run finished, or diverged and would diverge again."""
        return self.end is not None and self.end["status"] in (FINISHED, DIVERGED)

    @property
    def val_loss(self) -> float | None:
        """The final validation loss, or None if the run did not finish."""
        return self.end.get("val_loss") if self.end and self.finished else None

    def of(self, kind: str) -> list[Record]:
        """Return the records of a kind, one for each step, in order of steps."""
        last = {r["step"]: r for r in self.records if r["kind"] == kind and "step" in r}
        return [last[step] for step in sorted(last)]


def begun(folder: Path) -> Run | None:
    """Return the run in a folder, or None if it has no complete record yet."""
    return read(folder) if (folder / FILE).exists() and _records(folder / FILE) else None


def read(folder: Path) -> Run:
    """Read a run from its folder. Raise ValueError if its file has no run, or is damaged."""
    path = folder / FILE
    records = _records(path)
    heads = [r for r in records if r["kind"] == "run"]
    if not heads:
        raise ValueError(f"{path} does not begin with a run record: it is not a run of this lab")
    if heads[-1].get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {heads[-1].get('format')}, but this sodaopt reads format {FORMAT}"
        )
    if wrong := next(filter(None, map(problem, records)), ""):
        raise ValueError(f"{path} is damaged ({wrong}): remove {folder} and train it again")
    return Run(folder, heads[-1], [r for r in records if r["kind"] != "run"])


def _records(path: Path) -> list[Record]:
    return [r for line in path.read_bytes().splitlines() if (r := parse_line(line))]


def parse_line(line: bytes) -> Record | None:
    """Return the record in a line, or None if the line is incomplete."""
    try:
        record = json.loads(line)
        if b"\\ud" in line.lower():  # half of a surrogate pair cannot be written to any file
            record = json.loads(json.dumps(record, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and "kind" in record else None


def find(paths: Iterable[Path], skip: Callable[[str], None] | None = None) -> list[Run]:
    """Return every run in or under these folders, in order of their paths.

    skip: called with a message for each unreadable run. Without it, such a run is an error.
    """
    runs: dict[Path, Run] = {}
    for path in paths:
        if not path.exists():
            near = unknown("folder", str(path), _siblings(path))
            raise FileNotFoundError(near if path.parent.is_dir() else f"{path} does not exist")
        files = [path / FILE] if (path / FILE).exists() else sorted(path.rglob(FILE))
        for file in files:
            try:
                if run := begun(file.parent):
                    runs[file.parent.resolve()] = run
            except (OSError, ValueError) as e:
                if skip is None:
                    raise
                skip(str(e))
    return list(runs.values())


def _siblings(path: Path) -> Sequence[str]:
    return [str(p) for p in path.parent.iterdir()] if path.parent.is_dir() else []
