"""Write files completely or not at all."""

import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

HOUR = 3600.0


def write_atomically(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file so that readers see the old one or the complete new one.

    It is written under a temporary name in the same folder, flushed to disk, and renamed. If the
    process is killed, the next call for the same path removes the temporary file.
    """
    host = socket.gethostname()
    _remove_stale(path, host)
    prefix = f".{path.name}.{host}.{os.getpid()}."
    handle, name = tempfile.mkstemp(prefix=prefix, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())  # mkstemp allows the owner only
        os.replace(name, path)
        sync_folder(path.parent)
    except BaseException as e:
        Path(name).unlink(missing_ok=True)
        if isinstance(e, OSError) and e.errno and not e.filename:  # such as a full disk
            e.filename = str(path)
        raise


def _remove_stale(path: Path, host: str) -> None:
    """Remove the temporary files that killed processes of this machine have left.

    Files of version 0.1 do not have the process in their name. They are removed after an hour.
    """
    name = re.escape(path.name)
    named = re.compile(rf"\.{name}\.(?:{re.escape(host)}\.(?P<pid>\d+)\.)?[a-z0-9_]{{8}}")
    with suppress(OSError):
        for other in path.parent.iterdir():
            if found := named.fullmatch(other.name):
                pid = found["pid"]
                stale = not alive(int(pid)) if pid else _age(other) > HOUR
                if stale:
                    other.unlink(missing_ok=True)


def _age(path: Path) -> float:
    return time.time() - path.stat().st_mtime


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


def alive(pid: int) -> bool:
    """Return whether a process with this number runs on this machine."""
    if sys.platform == "win32":  # Windows has no signal 0 to test a process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
