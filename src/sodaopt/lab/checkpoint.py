"""Checkpoints that are there whole or not at all: the last two of a run."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

KEEP = 2
NONSENSE = zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError
"""What bytes that are no archive lead to. No trouble of the disk or of memory is among them."""
WEIGHTS = "weights.pt"
FOLDER = "checkpoints"


class SaveError(RuntimeError):
    """A checkpoint could not be written; the earlier ones are as they were."""


class Damaged(ValueError):
    """A checkpoint that cannot be read."""


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write folder/step-N.pt and drop all but the last two."""
    path = folder / f"step-{step:08d}.pt"
    write(path, state)
    for old in found(folder)[:-KEEP]:
        old.unlink(missing_ok=True)
    return path


def write(path: Path, value: Any) -> None:
    """All of it under its name, or nothing: written beside, then renamed."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file, _summed():
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except (OSError, RuntimeError) as e:  # torch's writer turns a full disk into a RuntimeError
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise SaveError(f"{path} could not be saved ({_reason(e)})") from e


@contextmanager
def _summed() -> Iterator[None]:
    """With the sums by which damage is found, whatever torch is set to."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _reason(e: BaseException) -> str:
    """The system's own word, which torch's writer hides in the chain of causes."""
    cause: BaseException | None = e
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(e).splitlines()[0]


def found(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(folder.glob("step-*.pt")) if folder.is_dir() else []


def step(path: Path) -> int:
    """Updates done when it was written."""
    return int(path.stem.removeprefix("step-"))


def clear(run: Path) -> None:
    """Remove the checkpoints of a run that has ended, if its weights are saved apart."""
    folder = run / FOLDER
    if not (run / WEIGHTS).exists():
        return
    for path in (*found(folder), *folder.glob("*.damaged")):
        path.unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def tidy(*folders: Path) -> None:
    """Remove what a killed process had half written."""
    for folder in folders:
        for path in folder.glob("*.part"):
            path.unlink(missing_ok=True)


def newest(kept: list[Path], say: Callable[[str], None]) -> tuple[Path, Any] | None:
    """The last of the checkpoints that can be read, and what is in it; None if all are damaged."""
    for path in reversed(kept):
        try:
            return path, load(path)
        except Damaged as e:
            say(f"{e}: looking for an older one")
    return None


def load(path: Path) -> Any:
    """What was written, checked by the sums that the file has of all its parts."""
    try:
        with zipfile.ZipFile(path) as file:
            part = file.testzip()
    except NONSENSE as e:
        raise Damaged(f"{path} is damaged ({e or type(e).__name__})") from e
    if part is not None:
        raise Damaged(f"{path} is damaged (in {part})")
    return torch.load(path, map_location="cpu", weights_only=True)
