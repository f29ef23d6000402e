"""Train one job in its folder: claim it, take it up where it was left, stop when asked.

NAME/run.jsonl                what happened, as it happens
NAME/checkpoints/step-*.pt    the last two, while it runs
NAME/weights.pt               the trained weights, when it is done
"""

from __future__ import annotations

import fcntl
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from . import checkpoint, records
from .data import Dataset, Windows, open_data
from .execution import Execution, World, world
from .job import Job, Plan, resolve
from .progress import Progress, Silent
from .records import Run
from .training import Training

DATA = Path("runs/data")


class Refused(ValueError):
    """A run that must not be started as asked."""


def train(
    job: Job,
    folder: Path,
    execution: Execution = Execution(),  # noqa: B008
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Run:
    """Train the job in its folder, from its last checkpoint if there is one.

    stop: asked after each step; where it answers yes the run is saved and left.
    """
    device = execution.target()
    if execution.threads:
        torch.set_num_threads(execution.threads)
    among, say = world(device), progress or Silent()
    data = _opened(job, among)
    plan = resolve(job, data.vocab)
    with _claimed(folder, among), _stopping(stop) as stopped:
        if run := records.begun(folder):
            _same(run, plan, folder)
            _same_data(run, data, plan, folder)
            if run.done:
                if run.finished and among.first:
                    checkpoint.clear(folder)  # if it was killed before it did
                return run
        training = Training(plan, data, folder, execution, device, among, say, stopped)
        training.run()
    among.wait()
    return records.read(folder)


def _opened(job: Job, among: World) -> Dataset:
    """Rank 0 first: it may have to make the shards."""
    if not among.first:
        among.wait()
    data = open_data(job.dataset, DATA)
    if among.first:
        among.wait()
    return data


def _same(run: Run, plan: Plan, folder: Path) -> None:
    ours, theirs = _normal(plan.record()), run.job
    differ = sorted(k for k in {*ours, *theirs} if ours.get(k) != theirs.get(k))
    if differ:
        what = ", ".join(f"{k} {theirs.get(k)} -> {ours.get(k)}" for k in differ)
        raise Refused(f"{folder} holds another run ({what}): choose another --out, or remove it")


def _same_data(run: Run, data: Dataset, plan: Plan, folder: Path) -> None:
    """A data set that was made anew under its old name is another one."""
    before = run.head.get("data", {}).get("fingerprint")
    if before not in (None, Windows(data.train, plan.shape.context).fingerprint()):
        raise Refused(
            f"{folder} holds a run on other data than {data.name} has now: choose another --out, "
            "or remove it"
        )


def _normal(record: dict[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in record.items()}


@contextmanager
def _claimed(folder: Path, among: World) -> Iterator[None]:
    """Two processes must not write one run. The system releases the lock of a killed process."""
    if not among.first:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"{folder} is being written by another process") from None
        yield


@contextmanager
def _stopping(stop: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM end the run after the current step, saved; a second one at once."""
    asked = False

    def handle(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before: dict[int, Any] = {}
    with suppress(ValueError):  # not in the main thread: somebody else handles signals
        before |= {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked or stop()
    finally:
        for s, h in before.items():
            signal.signal(s, h)
