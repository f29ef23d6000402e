"""Make folders that appear complete or not at all."""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from ..files import alive

ENDING = ".partial"


@contextmanager
def staged(out: Path, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder next to `out`, and rename it to `out` at the end.

    No lock is used. Processes that make the same folder each write a temporary folder, and all but
    the first process get FileExistsError. The temporary folder of a killed process is removed by
    the next process.

    replace: replace `out` if it exists
    """
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    host = socket.gethostname()
    _remove_stale(out, host)
    folder = out.with_name(f".{out.name}.{host}.{os.getpid()}.{uuid4().hex[:8]}{ENDING}")
    folder.mkdir()
    try:
        yield folder
        if replace and out.exists():
            _swap(folder, out)
        else:
            _rename(folder, out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _rename(folder: Path, out: Path) -> None:
    try:
        folder.rename(out)
    except OSError as e:
        if out.exists() and any(out.iterdir()):
            raise FileExistsError(f"{out} already exists") from e
        raise


def _swap(folder: Path, out: Path) -> None:
    """Rename the folder to `out`, and remove the old `out`. After an error, restore the old one."""
    old = folder.with_name(f"{folder.name.removesuffix(ENDING)}.old{ENDING}")
    with suppress(FileNotFoundError):  # another process is replacing it as well
        out.rename(old)
    try:
        _rename(folder, out)
    except BaseException:
        if old.exists() and not out.exists():
            old.rename(out)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _remove_stale(out: Path, host: str) -> None:
    """Remove the folders of killed processes of this machine."""
    start = f".{out.name}.{host}."
    for path in out.parent.glob(f"{start}*{ENDING}"):
        pid = path.name.removeprefix(start).split(".")[0]
        if pid.isdigit() and not alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)
