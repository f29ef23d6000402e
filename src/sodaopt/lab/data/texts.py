"""Read documents from text, JSON lines, Parquet or shards. The first two may be compressed."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO, cast

import numpy as np

from .dataset import open_folder
from .shards import DataError, open_shard
from .tokenizer import EOT

if TYPE_CHECKING:
    from typing_extensions import Buffer

PACKED = (".xz", ".zst", ".gz")
_SEPARATOR = EOT.encode()
_NEWLINE = re.compile(r"(?<=\S)\n(?=\S)")
_DAMAGED = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile)
Seen = Callable[[int], None]


def check_file(path: Path) -> None:
    """Raise if a file is missing, a folder or empty, before any work on other files."""
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if path.is_dir():
        raise DataError(f"{path} is a folder: name the files, such as {path}/*.txt")
    if not path.stat().st_size:
        raise DataError(f"{path} is empty")


def documents(path: Path, seen: Seen = lambda _: None, field: str = "text") -> Iterator[str]:
    """Yield the documents of a file in order.

    Plain text has a line `<|endoftext|>` between documents, or is one document. In JSON lines and
    Parquet, each line or row is a document. Shards of a data set (.bin) are decoded.

    seen: called with the number of bytes that were read since the last call
    field: the field of JSON lines, or the column of Parquet, with the text
    """
    with path.open("rb") as raw:
        found = _found(path, raw, field)
        empty, at = True, 0
        for text in found:
            seen(raw.tell() - at)
            at = raw.tell()
            if text.strip():
                empty = False
                yield text
    if empty:
        raise DataError(f"{path} contains no text")


def _found(path: Path, raw: BinaryIO, field: str) -> Iterator[str]:
    name = path.name.lower()
    if name.endswith(".parquet"):
        return _parquet(path, raw, field)
    if name.endswith(".bin"):
        return _shard(path, raw)
    for ending in PACKED:
        name = name.removesuffix(ending)
    lines = _lines(path, raw)
    return _json_lines(path, lines, field) if name.endswith(".jsonl") else _separated(path, lines)


def _parquet(path: Path, raw: BinaryIO, field: str) -> Iterator[str]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ModuleNotFoundError:
        raise DataError(f"{path} needs pyarrow: pip install pyarrow") from None
    try:
        file = parquet.ParquetFile(raw)
    except ArrowInvalid as e:
        raise DataError(f"{path} is damaged or cut short: {e}") from None
    if field not in file.schema_arrow.names:
        known = ", ".join(file.schema_arrow.names)
        raise DataError(f"{path} has no column {field!r}: name one of {known} with --field")
    for batch in file.iter_batches(columns=[field]):
        for text in batch.column(0).to_pylist():
            if not isinstance(text, str):
                raise DataError(f"{path}: expected text in the column {field!r}, got {text!r:.40}")
            yield text


def _shard(path: Path, raw: BinaryIO) -> Iterator[str]:
    """Yield the documents of a shard, decoded with the tokenizer of its data set."""
    tokenizer, ids = open_folder(path.parent).tokenizer(), open_shard(path)
    ends = [*(int(at) for at in np.flatnonzero(ids == tokenizer.eot)), len(ids)]
    for begin, end in pairwise([-1, *ends]):
        raw.seek(ids.itemsize * end)  # `seen` counts the bytes up to here
        yield tokenizer.decode(ids[begin + 1 : end].tolist())


def _lines(path: Path, raw: BinaryIO) -> Iterator[bytes]:
    try:
        yield from _unpacked(path, raw)
    except _DAMAGED as e:
        raise DataError(f"{path} is damaged or cut short: {e}") from None


def _unpacked(path: Path, raw: BinaryIO) -> IO[bytes]:
    match path.suffix.lower():
        case ".xz":
            return lzma.open(raw, "rb")
        case ".gz":
            return cast(IO[bytes], gzip.open(raw, "rb"))
        case ".zst":
            return io.BufferedReader(_Stream(_frames(raw)), 1 << 20)
        case _:
            return raw


def _frames(raw: BinaryIO) -> Iterator[bytes]:
    """Decompress a file of Zstandard frames. The library's own reader accepts incomplete files."""
    import zstandard

    unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame, data = unpacker.decompressobj(), raw.read(1 << 18)
    try:
        while data:
            yield frame.decompress(data)
            data = frame.unused_data or raw.read(1 << 18)
            if frame.eof and data:
                frame = unpacker.decompressobj()
    except zstandard.ZstdError as e:
        raise EOFError(str(e)) from None
    if not frame.eof:
        raise EOFError("its last frame has no end")


class _Stream(io.RawIOBase):
    """A readable file made of chunks."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self.parts, self.rest = parts, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        while not self.rest:
            part = next(self.parts, None)
            if part is None:
                return 0
            self.rest = memoryview(part)
        view = memoryview(buffer)
        n = min(len(view), len(self.rest))
        view[:n], self.rest = self.rest[:n], self.rest[n:]
        return n


def _separated(path: Path, lines: Iterator[bytes]) -> Iterator[str]:
    document: list[bytes] = []
    for line in lines:
        if line.startswith(_SEPARATOR) and line.rstrip(b"\r\n") == _SEPARATOR:
            yield _text(path, b"".join(document).removesuffix(b"\n").removesuffix(b"\r"))
            document = []
        else:
            document.append(line)
    if document:
        yield _text(path, b"".join(document))


def _json_lines(path: Path, lines: Iterator[bytes], field: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[field]
            if b"\\u" in line:
                text.encode()  # raises for half of a surrogate pair
        except (ValueError, KeyError, TypeError, AttributeError):
            text = None
        if not isinstance(text, str):
            raise DataError(f'{path}, line {number}: expected a JSON object with a field "{field}"')
        yield text


def _text(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        at = f"byte {data[e.start]:#04x} after {data[: e.start][-20:]!r}"
        raise DataError(f"{path} is not UTF-8 ({at}): convert it, for example with iconv") from None


def pieces(text: str, most: int = 1 << 20) -> Iterator[str]:
    """Split a long document into parts that have the same tokens as the whole.

    Parts end at a newline between two characters that are not spaces. GPT-2's rule for words makes
    such a newline a word of its own, so no token crosses it.

    most: a part ends at the first such newline after this many characters
    """
    begin = 0
    while len(text) - begin > most:
        cut = _NEWLINE.search(text, begin + most)
        if cut is None:
            break
        yield text[begin : cut.end()]
        begin = cut.end()
    yield text[begin:]
