"""Make a folder of shards from documents, completely or not at all.

Several threads encode the documents into one long file of ids. The documents are then copied to
the shards in shuffled order. The text is never in memory as a whole.
"""

import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..files import write_atomically
from . import texts
from .dataset import CHECKED, FORMAT, META
from .shards import DataError, Ids, sha256, write_shard
from .shuffle import Indices, permutation
from .staging import staged
from .tokenizer import FILE, GPT2, Tokenizer

SHARD_TOKENS = 100_000_000
BATCH = 1 << 20  # characters that a thread encodes at a time
CHUNK = 1 << 26  # ids to read at a time
Tell = Callable[[int], None]  # called with the number of input bytes since the last call


@dataclass(frozen=True)
class Recipe:
    """The inputs and the settings of a data set."""

    train: Sequence[Path]
    tokenizer: Tokenizer
    val: Sequence[Path] = ()
    val_fraction: float = 0.01
    """Fraction of `train` that becomes validation data if `val` is empty."""
    shard_tokens: int = SHARD_TOKENS
    workers: int = os.cpu_count() or 1
    seed: int = 0
    licence: str = ""
    field: str = "text"
    """Field or column with the text, in JSON lines and Parquet."""


def build(recipe: Recipe, out: Path, replace: bool = False, tell: Tell = lambda _: None) -> None:
    """Make the data set in the folder `out`. After an error, the folder is unchanged.

    replace: replace a data set that is in the folder
    tell: called with the number of input bytes since the last call
    """
    if replace:
        check_replaceable(out)
    with staged(out, replace) as folder:
        shards = _shards(recipe, folder, tell)
        if recipe.tokenizer.json is not None:
            write_atomically(folder / FILE, [recipe.tokenizer.json.encode()])
        meta = _meta(recipe, shards)
        text = json.dumps(meta, indent=1, ensure_ascii=False) + "\n"
        write_atomically(folder / META, [text.encode()])


def check_replaceable(out: Path) -> None:
    """Raise if the folder has files that no data set has, so that these are never overwritten."""
    # A killed process may leave a temporary file of `write_atomically`: .checked.json.HOST.PID.x
    known = re.compile(rf"{META}|{FILE}|{CHECKED}|.*\.bin|\.({META}|{FILE}|{CHECKED})\..+")
    inside = sorted(path.name for path in out.iterdir()) if out.exists() else []
    other = [name for name in inside if not known.fullmatch(name)]
    if other:
        raise DataError(
            f"{out} contains other files ({', '.join(other)}) and is not replaced: "
            "choose another --out"
        )


def _meta(recipe: Recipe, shards: dict[str, Any]) -> dict[str, Any]:
    from sodaopt import __version__

    counts = {
        f"{kind}_tokens": sum(s["tokens"] for name, s in shards.items() if name.startswith(kind))
        for kind in ("train", "val")
    }
    sources = [
        {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in [*recipe.train, *recipe.val]
    ]
    name = GPT2 if recipe.tokenizer.json is None else FILE
    tokenizer = {"tokenizer": name, "vocab": recipe.tokenizer.vocab}
    origin = {"sources": sources, "licence": recipe.licence, "sodaopt": __version__}
    return {"format": FORMAT, **tokenizer, **counts, "shards": shards, **origin}


def _shards(recipe: Recipe, folder: Path, tell: Tell) -> dict[str, Any]:
    """Write the shards for training and validation. Return their entries in meta.json."""
    ids = _encoded(recipe, recipe.train, folder / "train.ids", tell)
    documents = _documents(ids, recipe.tokenizer.eot)
    documents = documents[permutation(len(documents), recipe.seed)]
    if recipe.val:
        # Validation data is not shuffled, so it is the same for every seed.
        val_ids = _encoded(recipe, recipe.val, folder / "val.ids", tell)
        val = _documents(val_ids, recipe.tokenizer.eot)
    else:
        val_ids = ids
        documents, val = _divided(documents, recipe.val_fraction)
    shards = _written(folder, "train", ids, documents, recipe.shard_tokens)
    shards |= _written(folder, "val", val_ids, val, recipe.shard_tokens)
    del ids, val_ids
    for path in folder.glob("*.ids"):
        path.unlink()
    return shards


def _encoded(recipe: Recipe, files: Sequence[Path], path: Path, tell: Tell) -> Ids:
    """Write the ids of all documents to a file, each after the separator. Return the ids."""
    batches = _batches(files, recipe, tell)
    with path.open("wb") as file, ThreadPoolExecutor(recipe.workers) as pool:
        jobs = (pool.submit(_encode, recipe.tokenizer, batch) for batch in batches)
        _drain(jobs, 2 * recipe.workers, file)
    return np.memmap(path, dtype=np.uint16, mode="r")


def _drain(jobs: Iterable[Future[Ids]], ahead: int, file: BinaryIO) -> None:
    """Write results in order, and keep `ahead` jobs queued so that no thread waits."""
    waiting: deque[Future[Ids]] = deque()
    for job in jobs:
        waiting.append(job)
        if len(waiting) > ahead:
            file.write(waiting.popleft().result().data)
    for job in waiting:
        file.write(job.result().data)


Part = tuple[str, bool]  # text, and whether it is the start of a document


def _batches(files: Sequence[Path], recipe: Recipe, tell: Tell) -> Iterator[list[Part]]:
    batch: list[Part] = []
    size = 0
    for part in _parts(files, recipe, tell):
        batch.append(part)
        size += len(part[0])
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _parts(files: Sequence[Path], recipe: Recipe, tell: Tell) -> Iterator[Part]:
    for path in files:
        for document in texts.documents(path, tell, recipe.field):
            parts = texts.pieces(document) if recipe.tokenizer.splittable else [document]
            for k, part in enumerate(parts):
                yield part, k == 0


def _encode(tokenizer: Tokenizer, batch: list[Part]) -> Ids:
    """Return the ids of a batch, with the separator before each document."""
    encoded = tokenizer.encode_batch([text for text, _ in batch])
    eot, none = np.array([tokenizer.eot], np.uint16), np.empty(0, np.uint16)
    pairs = ((eot if start else none, ids) for (_, start), ids in zip(batch, encoded, strict=True))
    return np.concatenate([part for pair in pairs for part in pair])


def _documents(ids: Ids, eot: int) -> Indices:
    """Return the start and the end of each document. Each document starts with the separator."""
    steps = range(0, len(ids), CHUNK)
    begins = np.concatenate([np.flatnonzero(ids[k : k + CHUNK] == eot) + k for k in steps])
    return np.stack([begins, np.append(begins[1:], len(ids))], axis=1)


def _divided(documents: Indices, fraction: float) -> tuple[Indices, Indices]:
    """Split documents into training and validation data.

    Validation data is whole documents, or the end of the longest document if all are too long.
    """
    lengths = documents[:, 1] - documents[:, 0]
    most = int(fraction * lengths.sum())
    count = int(np.searchsorted(np.cumsum(lengths), most, side="right"))
    if 0 < count < len(documents):
        return documents[count:], documents[:count]
    train, longest = documents.copy(), int(np.argmax(lengths))
    end = documents[longest, 1]
    train[longest, 1] = end - most
    return train, np.array([[end - most, end]])


def _written(folder: Path, kind: str, ids: Ids, spans: Indices, most: int) -> dict[str, Any]:
    """Write the documents to shards. Return the entries of these shards in meta.json.

    The shards have about the same size, because a tiny last shard might not contain a window.

    spans: the start and the end of each document
    most: the most tokens of a shard
    """
    total = int((spans[:, 1] - spans[:, 0]).sum())
    if total < 2:
        raise DataError(
            f"too little text for {kind} data: {total} tokens, and at least 2 are needed. Add text"
        )
    size = -(-total // -(-total // most))
    shards = {}
    for number, part in enumerate(_filled(ids, spans, size)):
        path = folder / f"{kind}_{number:06d}.bin"
        digest = write_shard(path, part)
        shards[path.name] = {"tokens": len(part), "sha256": digest}
    return shards


def _filled(ids: Ids, spans: Indices, size: int) -> Iterator[Ids]:
    """Copy the spans into a buffer. Yield the buffer each time it is full, and at the end."""
    buffer, used = np.empty(size, np.uint16), 0
    for begin, end in spans.tolist():
        while begin < end:
            n = min(end - begin, size - used)
            buffer[used : used + n] = ids[begin : begin + n]
            begin, used = begin + n, used + n
            if used == size:
                yield buffer
                used = 0
    if used:
        yield buffer[:used]
