"""Train one job in its folder: lock the folder, resume from a checkpoint, and stop on request.

NAME/run.jsonl                the records, written during the run
NAME/checkpoints/step-*       the last two checkpoints, until the run has finished
NAME/weights.pt               the trained weights, once the run has finished
"""

import fcntl
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from . import checkpoint, records
from .data import Dataset, Windows, open_data
from .execution import Execution
from .identity import Refused, check_run, identity
from .job import Job, resolve
from .parallel import World, explained, join_world
from .presets import preset
from .progress import Progress, Silent
from .records import Run
from .reuse import reuse
from .training import Training

DATA = Path("runs/data")


def train(
    job: Job,
    folder: Path,
    execution: Execution = Execution(),  # noqa: B008
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Run:
    """Train the job in its folder, from its last checkpoint if there is one.

    stop: called after each step. If it returns True, the run is saved and stops there.
    """
    device = execution.target()
    if threads := execution.threads or preset(job.preset).threads:
        torch.set_num_threads(threads)
    ranks = join_world(device)
    data = _opened(job, ranks)
    resolved = resolve(job, data.vocab)
    asked = identity(resolved, Windows(data.train, resolved.shape.context).fingerprint())
    shown = progress or Silent()
    with _locked(folder, ranks), _stop_on_signal(stop) as stopped:
        _check_shared(folder, ranks, device)
        new = ranks.size == 1 and not (folder / records.FILE).exists()
        if new and (other := reuse(folder, resolved.key, asked, device)):
            shown.say(f"this job is done already: copied from {other}")
        if run := records.begun(folder):
            check_run(run, asked, folder)
            if run.done:
                if run.finished and ranks.first:
                    checkpoint.clear(folder)  # the run may have been killed before it did this
                return run
        with explained(ranks):
            Training(resolved, data, folder, execution, device, ranks, shown, stopped).run()
    ranks.wait()
    return records.read(folder)


def _opened(job: Job, ranks: World) -> Dataset:
    """Open the data set, first on rank 0, because rank 0 may have to make the shards."""
    if not ranks.first:
        ranks.wait()
    data = open_data(job.dataset, DATA)
    if ranks.first:
        ranks.wait()
    return data


@contextmanager
def _locked(folder: Path, ranks: World) -> Iterator[None]:
    """Lock the folder, because two processes must not write one run.

    The system releases the lock of a killed process.
    """
    if not ranks.first:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another process is writing to {folder}: choose another --out") from None
        yield


def _check_shared(folder: Path, ranks: World, device: torch.device) -> None:
    """Raise on every rank if the ranks see different folders.

    They would start at different steps, and wait for each other forever.
    """
    ranks.wait()  # until rank 0 has made the folder
    saved = [checkpoint.step(path) for path in checkpoint.found(folder / checkpoint.FOLDER)]
    seen = -1 if not folder.exists() else sum(saved) + (folder / records.FILE).exists()
    smallest, largest = ranks.least(seen, device), -ranks.least(-seen, device)
    if smallest != largest:
        raise Refused(
            f"{folder} is not the same folder on all ranks: --out must be on a shared file system"
        )


@contextmanager
def _stop_on_signal(stop: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether to stop: if `stop` says so, or after Ctrl-C or SIGTERM.

    A second signal ends the run at once, without saving.
    """
    requested = False

    def handle(number: int, frame: Any) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True

    before: dict[int, Any] = {}
    with suppress(ValueError):  # only the main thread can handle signals
        before |= {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: requested or stop()
    finally:
        for s, h in before.items():
            signal.signal(s, h)
