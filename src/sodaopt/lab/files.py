"""Write files completely or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a temporary file in the same folder, flush it to disk, and rename it."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())  # mkstemp allows the owner only
        os.replace(name, path)
        sync_folder(path.parent)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Flush the names of new and renamed files to disk."""
    with suppress(OSError):  # some file systems cannot do this for folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _umask() -> int:
    """Return the umask. It can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
