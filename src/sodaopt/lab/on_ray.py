"""Run the trials of a sweep on a Ray cluster: `sodaopt sweep --on ray`.

The nodes need sodaopt[ray] and the data set, but no shared file system: a trial runs in a temporary
folder of its node, and its records travel back while it runs. If a node or a worker is lost, its
trials run again from their beginning. RAY_ADDRESS names the cluster. Without it, Ray starts on this
machine.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from . import records
from .checkpoint import WEIGHTS
from .sweep import Outcome, Trial, work

ERROR = "error"
"""The name of the last part of a trial. Its content is the error, or empty."""


@dataclass(frozen=True)
class OnRay:
    """Run trials as Ray tasks, one on each free CPU or GPU.

    poll: called while trials run.
    attempts: the most times that a trial is started.
    """

    poll: Callable[[], None] = lambda: None
    attempts: int = 3

    def __call__(self, todo: Sequence[Trial]) -> Iterator[Outcome]:
        import ray

        if not ray.is_initialized():
            ray.init(log_to_driver=False)
        starts = {trial.folder: 0 for trial in todo}
        running = {self._start(ray, trial, starts): trial for trial in todo}
        try:
            while running:
                ready, _ = ray.wait(list(running), timeout=0.2, fetch_local=False)
                for parts in ready:
                    trial = running[parts]
                    lost, ended = _receive(ray, parts, trial)
                    if lost and starts[trial.folder] < self.attempts:
                        del running[parts]
                        running[self._start(ray, trial, starts)] = trial
                    elif lost or ended is not None:
                        del running[parts]
                        yield Outcome(trial, trial.run(), lost or ended or "")
                self.poll()
        finally:
            for parts in running:
                ray.cancel(parts)

    def _start(self, ray: Any, trial: Trial, starts: dict[Path, int]) -> Any:
        """Start a trial from its beginning. Return the generator of its parts."""
        starts[trial.folder] += 1
        trial.folder.mkdir(parents=True, exist_ok=True)
        (trial.folder / records.FILE).unlink(missing_ok=True)
        has_gpus = trial.execution.device == "auto" and ray.cluster_resources().get("GPU", 0)
        gpus = 1 if has_gpus else 0
        task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(parts_of)
        return task.remote(trial.text(), os.getcwd())


def _receive(ray: Any, parts: Any, trial: Trial) -> tuple[str, str | None]:
    """Write the next part of a trial to its folder. Return (lost, ended).

    lost: why the worker of the trial was lost, or ''
    ended: the error of a trial that has ended, or '' if there was none. None: the trial goes on.
    """
    try:
        name, content = ray.get(next(parts))
    except ray.exceptions.RayError as e:
        return f"its worker was lost ({type(e).__name__})", None
    except StopIteration:
        return "its worker was lost", None
    if name == ERROR:
        return "", content.decode()
    with (trial.folder / name).open("ab" if name == records.FILE else "wb") as file:
        file.write(content)
    return "", None


def parts_of(text: str, where: str) -> Iterator[tuple[str, bytes]]:
    """Run a trial on a node. Yield its records as they appear, its weights, and its error.

    where: the folder of the command. The trial runs in it if the node has it, because the paths of
    data sets are relative to it.
    """
    if Path(where).is_dir():
        os.chdir(where)
    trial, errors = Trial.parse(text), list[str]()
    with TemporaryDirectory() as folder:
        here = replace(trial, folder=Path(folder) / trial.folder.name)
        thread = threading.Thread(target=lambda: errors.append(work(here.text())))
        thread.start()
        sent, is_running = 0, True
        while is_running:
            thread.join(0.1)
            is_running = thread.is_alive()  # before the read, which must not miss the last records
            if new := _after(here.folder / records.FILE, sent):
                sent += len(new)
                yield records.FILE, new
        if (weights := here.folder / WEIGHTS).exists():
            yield WEIGHTS, weights.read_bytes()
    yield ERROR, "".join(errors).encode()


def _after(path: Path, sent: int) -> bytes:
    """Return the complete lines of a file after its first `sent` bytes."""
    new = path.read_bytes()[sent:] if path.exists() else b""
    return new[: new.rfind(b"\n") + 1]
