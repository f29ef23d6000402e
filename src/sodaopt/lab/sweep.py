"""Many jobs, each a row: a plain record with a folder of its own. Finished ones are not repeated.

An executor is a function from rows to their ends, in whatever order they come. The one here runs
them in processes of this machine; one that sends `Row.text()` to a cluster and watches the folders
would do as well.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from . import records
from .execution import NO_MEMORY, Execution
from .job import Job, resolve, vary
from .records import Run


@dataclass(frozen=True)
class Row:
    """A job and where it runs."""

    job: Job
    folder: Path
    execution: Execution = field(default_factory=Execution)

    def text(self) -> str:
        """As JSON, for whoever runs it."""
        return json.dumps(
            {
                "job": asdict(self.job),
                "folder": str(self.folder),
                "execution": asdict(self.execution),
            }
        )

    @classmethod
    def parse(cls, text: str) -> Row:
        values = json.loads(text)
        job = values["job"]
        if job.get("fade"):
            job["fade"] = tuple(job["fade"])
        return cls(Job(**job), Path(values["folder"]), Execution(**values["execution"]))

    def run(self) -> Run | None:
        """What its folder says by now; none if it was never begun or cannot be read, which whoever
        runs it is told."""
        with suppress(OSError, ValueError):
            return records.begun(self.folder)
        return None


class Outcome(NamedTuple):
    """A row that came to an end: its run, or why there is none."""

    row: Row
    run: Run | None
    error: str = ""


Executor: TypeAlias = Callable[[Sequence[Row]], Iterator[Outcome]]


def rows(jobs: Sequence[Job], folder: Path, execution: Execution, vocab: int) -> list[Row]:
    """One row for each different job, in order."""
    found = {resolve(job, vocab).key: job for job in jobs}
    return [Row(job, folder / key, execution) for key, job in found.items()]


def grid(job: Job, over: dict[str, Sequence[Any]]) -> list[Job]:
    """Every combination of these settings: the last one varies fastest."""
    return [vary(job, **dict(zip(over, values, strict=True))) for values in product(*over.values())]


def left(found: Sequence[Row]) -> list[Row]:
    """The rows that are not done."""
    return [row for row in found if (run := row.run()) is None or not run.done]


# -- one machine ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Local:
    """Worker processes on this machine; each runs rows one after another and keeps what it has
    compiled. One that dies takes only its own row with it: another takes its place."""

    workers: int = 1
    poll: Callable[[], None] = lambda: None
    """Called a few times a second while rows run."""

    def __call__(self, todo: Sequence[Row]) -> Iterator[Outcome]:
        queue = list(todo)
        free = [(slot, _worker()) for slot in range(min(self.workers, len(queue)))]
        busy: dict[Future[str], tuple[Row, int, ProcessPoolExecutor]] = {}
        try:
            while queue or busy:
                while queue and free:
                    row, (slot, worker) = queue.pop(0), free.pop()
                    placed = replace(row, execution=row.execution.placed(slot))
                    with _held():
                        busy[worker.submit(work, placed.text())] = row, slot, worker
                for future in [f for f in busy if f.done()]:
                    row, slot, worker = busy.pop(future)
                    dead = isinstance(future.exception(), BrokenProcessPool)
                    free.append((slot, _worker() if dead else worker))
                    yield _outcome(row, future)
                self.poll()
                time.sleep(0.1)
        finally:  # Ctrl-C may have reached this process alone: the rows that run are saved
            for _, _, worker in busy.values():
                _stop(worker)
            for worker in [w for _, w in free] + [w for _, _, w in busy.values()]:
                worker.shutdown(wait=True)


START = "spawn"
"""How workers start: a fork of a process that has used CUDA cannot use it."""
STOP = signal.SIGUSR1
"""Not SIGINT, of which a second one ends a row at once. It ends a worker that still starts."""


def _worker() -> ProcessPoolExecutor:
    """One process, begun with its first row."""
    context = multiprocessing.get_context(START)
    return ProcessPoolExecutor(1, context, initializer=_begin)


def _stop(worker: ProcessPoolExecutor) -> None:
    """Its row is saved and left."""
    for pid in list(worker._processes or {}):
        with suppress(ProcessLookupError):
            os.kill(pid, STOP)


@contextmanager
def _held() -> Iterator[None]:
    """Ctrl-C waits, also in a process that is started here, until it can handle it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_asked = False
_busy = threading.Lock()


def _begin() -> None:
    """Ctrl-C reaches the workers too: a row that runs is saved and left, one that waits is not
    begun. So does the end of the command that started them, even if it was killed."""
    for number in (signal.SIGINT, STOP):
        signal.signal(number, _remember)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    threading.Thread(target=_follow, daemon=True).start()


def _remember(number: int, frame: Any) -> None:
    global _asked
    _asked = True


def _follow() -> None:
    global _asked
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    _asked = True
    with _busy:  # its row is saved by then
        os._exit(1)


def work(text: str) -> str:
    """Run a row, given as JSON; the error, if one stopped it."""
    from .train import train

    row = Row.parse(text)
    with _busy:
        if _asked:
            return "not begun"
        try:
            train(row.job, row.folder, row.execution, stop=lambda: _asked)
        except torch.OutOfMemoryError:
            return NO_MEMORY
        except Exception as e:  # whatever it is, the other rows go on
            return f"{type(e).__name__}: {e}"
    return ""


def _outcome(row: Row, future: Future[str]) -> Outcome:
    run: Run | None = None
    try:
        error = future.result()
        run = row.run()
    except BrokenProcessPool:
        error = "its process was killed (out of memory?)"
    except Exception as e:
        error = f"{type(e).__name__}: {e}"
    return Outcome(row, run, error)
