"""Read and write shards: files of token ids, in the format of modded-nanogpt and llm.c.

A shard has a header of 256 int32 (magic 20240520, version 1, number of tokens, zeros), and then the
ids as uint16, all little endian. It is written under another name and renamed, so an existing shard
is complete.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..files import write_atomically

MAGIC, VERSION = 20240520, 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
MOST_IDS = 1 << 16  # ids are uint16
CHUNK = 1 << 24  # ids to read at a time, 32 MB

AGAIN = "Delete it, and download or prepare it again."

Ids = npt.NDArray[np.uint16]


class DataError(ValueError):
    """Data that cannot be used. The message names the file and the remedy."""


def write_shard(path: Path, ids: npt.NDArray[Any]) -> str:
    """Write ids to a shard. Return the sha256 of the file."""
    if ids.ndim != 1 or ids.dtype.kind not in "ui":
        raise DataError(
            f"{path}: ids must be a vector of integers, got {ids.dtype} of shape {ids.shape}"
        )
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < MOST_IDS:
        raise DataError(f"{path}: ids must be in 0..{MOST_IDS - 1}, the range of uint16")
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(ids)
    parts = [header.data, np.ascontiguousarray(ids, dtype="<u2").data]
    write_atomically(path, parts)
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def open_shard(path: Path) -> Ids:
    """Map the ids of a shard into memory. Raise DataError if the shard is not complete."""
    count = count_tokens(path)
    if not count:
        return np.empty(0, dtype="<u2")
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(count,))


def count_tokens(path: Path) -> int:
    """Return the number of tokens of a shard from its header. Raise if the file's size differs."""
    try:
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
            size = file.seek(0, os.SEEK_END)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    if len(header) < HEADER_BYTES:
        raise DataError(
            f"{path} is cut short: it has {size} bytes, but the header has 1024. {AGAIN}"
        )
    magic, version, count = (int(n) for n in np.frombuffer(header, dtype="<i4", count=3))
    if magic != MAGIC:
        raise DataError(f"{path} is not a shard of tokens: it begins with {magic}, not {MAGIC}")
    if version != VERSION:
        raise DataError(f"{path} has format version {version}, but this sodaopt reads {VERSION}")
    _check_size(path, count, size)
    return count


def _check_size(path: Path, count: int, size: int) -> None:
    wanted = HEADER_BYTES + 2 * count
    if count >= 0 and size == wanted:
        return
    problem = "cut short" if size < wanted else "damaged"
    raise DataError(
        f"{path} is {problem}: its header says {count} tokens, or {wanted} bytes, but it has "
        f"{size} bytes. {AGAIN}"
    )


def largest_id(path: Path) -> int:
    """Return the largest id in a shard, or -1 if it is empty."""
    ids = open_shard(path)
    return max((int(ids[k : k + CHUNK].max()) for k in range(0, len(ids), CHUNK)), default=-1)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
