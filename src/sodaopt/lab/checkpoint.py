"""Write and read checkpoints. A run keeps its last two.

A file is written completely or not at all. A sharded run writes folders instead of files, see
sharded.py.
"""

import os
import pickle
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from . import sharded
from .files import sync_folder
from .parallel import World

KEEP = 2
NOT_AN_ARCHIVE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
)
"""Errors that zipfile raises for damaged bytes. Errors of the disk and of memory are excluded."""
WRONG_CONTENT = (
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors that torch raises for an archive with unexpected content."""
PARTS = ("step", "model", "optimizer", "schedule", "loader", "rng", "smooth", "lowest", "val",
         "watch")  # fmt: skip
"""Parts that every checkpoint has. Checkpoints newer than version 0.1 also have 'run'."""
WEIGHTS = "weights.pt"
FOLDER = "checkpoints"


class SaveError(RuntimeError):
    """A checkpoint could not be written. Earlier checkpoints are unchanged."""


class Damaged(ValueError):
    """A checkpoint cannot be read."""


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write folder/step-N.pt and remove all but the last two checkpoints."""
    path = folder / f"step-{step:08d}.pt"
    write(path, state)
    _keep_two(folder)
    return path


def save_shards(
    folder: Path, step: int, state: dict[str, Any], model: Any, optimizer: Any, first: bool
) -> None:
    """Write folder/step-N.dcp. All ranks must call this, and then wait for rank 0.

    first: whether this is rank 0
    """
    path = folder / f"step-{step:08d}.dcp"
    try:
        sharded.save_shards(path, state, model, optimizer, first, write)
    except OSError as e:
        raise SaveError(str(e)) from e
    if first:
        _keep_two(folder)


def _keep_two(folder: Path) -> None:
    for old in found(folder)[:-KEEP]:
        remove(old)


def remove(path: Path) -> None:
    """Remove a checkpoint, a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)


def write(path: Path, value: Any) -> None:
    """Save a value as a file: write it under another name first, then rename it."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file, _checksums():
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as e:  # torch's writer turns a full disk into a RuntimeError
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise SaveError(f"{path} could not be saved ({_reason(e)})") from e


@contextmanager
def _checksums() -> Iterator[None]:
    """Make torch.save write checksums, whatever the user's setting. `load` verifies them."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _reason(e: BaseException) -> str:
    """Return the system's message, which torch's writer hides in the chain of causes."""
    cause: BaseException | None = e
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(e).splitlines()[0]


def found(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    named = [p for p in folder.glob("step-*") if re.fullmatch(r"step-\d+\.(pt|dcp)", p.name)]
    return sorted(named, key=step)


def step(path: Path) -> int:
    """Return the number of updates in a checkpoint."""
    return int(path.stem.removeprefix("step-"))


def contains(path: Path, state: dict[str, Any]) -> bool:
    """Return whether a file of weights exists and has exactly these tensors."""
    try:
        saved = load(path)
    except (OSError, Damaged):
        return False
    return (
        isinstance(saved, dict)
        and saved.keys() == state.keys()
        and all(torch.equal(saved[name], value.cpu()) for name, value in state.items())
    )


def clear(run: Path) -> None:
    """Remove the checkpoints of a finished run, if its weights are saved."""
    folder = run / FOLDER
    if not (run / WEIGHTS).exists():
        return
    for path in (*found(folder), *folder.glob("*.damaged")):
        remove(path)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def remove_partial(*folders: Path) -> None:
    """Remove the unfinished files of a killed process."""
    for folder in folders:
        for path in folder.glob("*.part"):
            remove(path)


def newest(kept: list[Path], say: Callable[[str], None]) -> tuple[Path, Any] | None:
    """Return the path and the content of the last readable checkpoint, or None.

    say: called with a message for each damaged checkpoint
    """
    for path in reversed(kept):
        try:
            return path, load_state(path)
        except Damaged as e:
            say(f"{e}: trying an older one")
    return None


def agreed(
    kept: list[Path], ranks: World, device: torch.device, say: Callable[[str], None]
) -> tuple[Path, dict[str, Any]]:
    """Load the newest checkpoint that every rank can read. Return its path and its content.

    Later checkpoints get the suffix .damaged.

    kept: the checkpoints of the run, oldest first
    say: called with a message for each damaged checkpoint
    """
    best = newest(kept, say)
    last = ranks.least(step(best[0]) if best else -1, device)
    if best is None or last < 0:
        folder = kept[0].parent
        raise Damaged(f"all checkpoints in {folder} are damaged: remove the folder to start again")
    path, state = best
    if step(path) != last:  # another rank cannot read the newest one
        path = next(p for p in kept if step(p) == last)
        state = load_state(path)
    if ranks.first:
        for later in kept[kept.index(path) + 1 :]:
            later.rename(later.with_suffix(".damaged"))
    return path, state


def load(path: Path) -> Any:
    """Load a checkpoint, and verify its checksums first."""
    try:
        with zipfile.ZipFile(path) as file:
            part = file.testzip()
    except NOT_AN_ARCHIVE as e:
        raise Damaged(f"{path} is damaged ({e or type(e).__name__})") from e
    if part is not None:
        raise Damaged(f"{path} is damaged (in {part})")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as e:  # torch's message advises to run the code in the file
        raise Damaged(f"{path} is damaged (it contains more than tensors and numbers)") from e
    except WRONG_CONTENT as e:
        raise Damaged(f"{path} is damaged ({first_line(e)})") from e


def load_state(path: Path) -> dict[str, Any]:
    """Load the checkpoint of a run. Raise Damaged if a part is missing."""
    file = path / sharded.REST if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise Damaged(f"{path} is damaged (it has no {file.name})")
    state = load(file)
    if not isinstance(state, dict):
        raise Damaged(f"{path} is damaged (it contains a {type(state).__name__})")
    if missing := [name for name in PARTS if name not in state]:
        raise Damaged(f"{path} is damaged (it has no {', '.join(missing)})")
    if state["step"] != step(path):
        raise Damaged(f"{path} is damaged (it is of step {state['step']})")
    run = state.get("run", {"job": {}, "fingerprint": ""})
    if not (isinstance(run, dict) and isinstance(run.get("job"), dict) and "fingerprint" in run):
        raise Damaged(f"{path} is damaged (it has no record of its job)")
    if path.is_dir() and (part := sharded.damage(path, state)):
        raise Damaged(f"{path} is damaged (in {part})")
    return state


def first_line(e: Exception) -> str:
    """Return the first line of the error's message, or the error's type if it has no message."""
    return (str(e).splitlines() or [type(e).__name__])[0]
