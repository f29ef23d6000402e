"""Run many jobs. Each job has a folder of its own, and finished jobs are not repeated.

An executor is a function that takes trials and yields their outcomes in any order. `Local` runs
them in processes on this machine, and `OnRay` on a Ray cluster.
"""

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
class Trial:
    """A job with its folder and its execution settings."""

    job: Job
    folder: Path
    execution: Execution = field(default_factory=Execution)

    def text(self) -> str:
        """Return the trial as JSON, for `parse`."""
        return json.dumps(
            {
                "job": asdict(self.job),
                "folder": str(self.folder),
                "execution": asdict(self.execution),
            }
        )

    @classmethod
    def parse(cls, text: str) -> "Trial":
        values = json.loads(text)
        job = values["job"]
        if job.get("fade"):
            job["fade"] = tuple(job["fade"])
        return cls(Job(**job), Path(values["folder"]), Execution(**values["execution"]))

    def run(self) -> Run | None:
        """Return the run in the folder, or None if it has not started or cannot be read.

        If it cannot be read, training in the folder raises the error.
        """
        with suppress(OSError, ValueError):
            return records.begun(self.folder)
        return None


class Outcome(NamedTuple):
    """A trial that has ended, with its run, and with the error if it failed."""

    trial: Trial
    run: Run | None
    error: str = ""


Executor: TypeAlias = Callable[[Sequence[Trial]], Iterator[Outcome]]


def make_trials(jobs: Sequence[Job], folder: Path, execution: Execution, vocab: int) -> list[Trial]:
    """Return one trial for each distinct job, in order.

    folder: the parent of the folders of the trials
    vocab: vocabulary of the data set, on which the names of these folders depend
    """
    found = {resolve(job, vocab).key: job for job in jobs}
    return [Trial(job, folder / key, execution) for key, job in found.items()]


def grid(job: Job, over: dict[str, Sequence[Any]]) -> list[Job]:
    """Return the job with every combination of these settings. The last setting varies fastest."""
    return [vary(job, **dict(zip(over, values, strict=True))) for values in product(*over.values())]


def unfinished(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that are not done."""
    return [trial for trial in trials if (run := trial.run()) is None or not run.done]


# -- one machine ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Local:
    """Run trials in worker processes on this machine.

    A worker runs one trial after another and keeps its compiled code. A worker that dies loses
    only its own trial, and a new worker replaces it.
    """

    workers: int = 1
    poll: Callable[[], None] = lambda: None
    """Called a few times a second while trials run."""

    def __call__(self, todo: Sequence[Trial]) -> Iterator[Outcome]:
        queue = list(todo)
        free = [(slot, _worker()) for slot in range(min(self.workers, len(queue)))]
        busy: dict[Future[str], tuple[Trial, int, ProcessPoolExecutor]] = {}
        try:
            while queue or busy:
                while queue and free:
                    trial, (slot, worker) = queue.pop(0), free.pop()
                    placed = replace(trial, execution=trial.execution.placed(slot))
                    with _interrupt_blocked():
                        busy[worker.submit(work, placed.text())] = trial, slot, worker
                for future in [f for f in busy if f.done()]:
                    trial, slot, worker = busy.pop(future)
                    dead = isinstance(future.exception(), BrokenProcessPool)
                    free.append((slot, _worker() if dead else worker))
                    yield _outcome(trial, future)
                self.poll()
                time.sleep(0.1)
        finally:
            # Ctrl-C may have reached this process only. The workers must save their trials too.
            for _, _, worker in busy.values():
                _stop(worker)
            for worker in [w for _, w in free] + [w for _, _, w in busy.values()]:
                worker.shutdown(wait=True)


START = "spawn"
"""Start method of the workers. A forked process cannot use CUDA if its parent has used it."""
STOP = signal.SIGUSR1
"""Signal that asks a worker to save its trial and stop. It cannot be SIGINT, because the second
SIGINT ends a trial without saving it. SIGUSR1 ends a worker that has not set its handlers yet."""


def _worker() -> ProcessPoolExecutor:
    """Return a pool of one process. The process starts with its first trial."""
    context = multiprocessing.get_context(START)
    return ProcessPoolExecutor(1, context, initializer=_begin)


def _stop(worker: ProcessPoolExecutor) -> None:
    """Ask a worker to save its trial and stop.

    `_processes` is private, and no public function names the processes of a pool. If it goes, let
    `_begin` report the process id through a queue.
    """
    for pid in list(worker._processes or {}):
        with suppress(ProcessLookupError):
            os.kill(pid, STOP)


@contextmanager
def _interrupt_blocked() -> Iterator[None]:
    """Block Ctrl-C here and in a process that starts here, until that process can handle it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_stop_requested = False
_working = threading.Lock()


def _begin() -> None:
    """Prepare a worker process.

    Ctrl-C reaches the workers too: a running trial is saved, and a waiting trial does not start.
    The same happens when the parent process ends, even if it was killed.
    """
    for number in (signal.SIGINT, STOP):
        signal.signal(number, _request_stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _request_stop(number: int, frame: Any) -> None:
    global _stop_requested
    _stop_requested = True


def _end_with_parent() -> None:
    """Wait until the parent process ends. Then let the running trial save, and end this process."""
    global _stop_requested
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    _stop_requested = True
    with _working:  # free once the trial is saved
        os._exit(1)


def work(text: str) -> str:
    """Run a trial given as JSON. Return the error that stopped it, or an empty string."""
    from .train import train

    trial = Trial.parse(text)
    with _working:
        if _stop_requested:
            return "not started"
        try:
            train(trial.job, trial.folder, trial.execution, stop=lambda: _stop_requested)
        except torch.OutOfMemoryError:
            return NO_MEMORY
        except Exception as e:  # any error: the other trials must go on
            return f"{type(e).__name__}: {e}"
    return ""


def _outcome(trial: Trial, future: Future[str]) -> Outcome:
    run: Run | None = None
    try:
        error = future.result()
        run = trial.run()
    except BrokenProcessPool:
        error = "its process was killed (out of memory?)"
    except Exception as e:
        error = f"{type(e).__name__}: {e}"
    return Outcome(trial, run, error)
