"""Find a finished run of the same job in another folder, so that no job is trained twice."""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from . import records
from .checkpoint import WEIGHTS
from .environment import environment, git
from .files import write_atomically
from .identity import Refused, check_run
from .records import Run

RUNS = Path("runs")
SAME = ("sodaopt", "torch", "device")
"""Parts of the environment that must be the same for a run to be reused."""


def reuse(folder: Path, key: str, asked: dict[str, Any], device: torch.device) -> Path | None:
    """Copy a finished run of this job from another folder under runs/. Return that folder, or None.

    The run must have the same data, device and source code, and no uncommitted changes of the code.

    folder: the folder of the job, to which the run is copied
    key: the name of this folder
    asked: the identity of the job, see identity.py
    """
    if not folder.resolve().is_relative_to(RUNS.resolve()):
        return None
    source = None
    for run in _named(key, folder):
        source = source or _source(device)
        if _same(run, asked, source):
            _copy(run.folder, folder)
            return run.folder
    return None


def _named(key: str, folder: Path) -> Iterator[Run]:
    """Yield the readable runs in other folders of this name under runs/."""
    for depth in ("*", "*/*"):
        for path in sorted(RUNS.glob(f"{depth}/{key}/{records.FILE}")):
            if path.parent.resolve() != folder.resolve():
                with suppress(OSError, ValueError):
                    yield records.read(path.parent)


def _source(device: torch.device) -> dict[str, Any]:
    """Return the state of the source code, and the parts of the environment in SAME."""
    here = environment(device)
    return {"git": git(), "environment": {name: here[name] for name in SAME}}


def _same(run: Run, asked: dict[str, Any], source: dict[str, Any]) -> bool:
    """Whether a run is finished, and has this identity, source code and environment.

    Without a commit nobody knows whether the source code is the same.
    """
    here = source["git"]
    if not run.finished or not here or here.get("dirty") or run.head.get("git") != here:
        return False
    known = run.head.get("environment", {})
    try:
        check_run(run, asked, run.folder)
    except Refused:
        return False
    return all(known.get(name) == value for name, value in source["environment"].items())


def _copy(found: Path, folder: Path) -> None:
    """Copy the records of a run, and link its weights, which may be large.

    The records come last, because a folder with records counts as a finished run.
    """
    weights = found / WEIGHTS
    if weights.exists():
        try:
            os.link(weights, folder / WEIGHTS)
        except OSError:  # another file system
            shutil.copyfile(weights, folder / WEIGHTS)
    write_atomically(folder / records.FILE, [(found / records.FILE).read_bytes()])
