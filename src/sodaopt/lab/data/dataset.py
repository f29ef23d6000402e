"""A data set: a folder with shards that have `train` or `val` in their names.

meta.json describes the shards. A folder without it contains GPT-2's ids, like the published shards
of FineWeb. Opening a folder checks all of its files.
"""

import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import write_atomically
from . import tokenizer as tokenizers
from .shards import DataError, count_tokens, largest_id, sha256
from .staging import ENDING
from .tokenizer import GPT2, GPT2_VOCAB, Tokenizer

KINDS = ("train", "val")
META, FORMAT = "meta.json", 1
CHECKED = "checked.json"  # the largest id of each shard


@dataclass(frozen=True)
class Dataset:
    """A checked data set: its shards are complete, and every id is in the vocabulary."""

    name: str
    folder: Path
    train: list[Path]
    val: list[Path]
    vocab: int
    train_tokens: int
    val_tokens: int
    tokenizer_name: str = GPT2
    meta: dict[str, Any] = field(default_factory=dict, repr=False)

    def tokenizer(self) -> Tokenizer:
        return tokenizers.load(self.tokenizer_name, self.folder)


def open_folder(folder: Path) -> Dataset:
    """Open the data set in a folder. Raise DataError if a file is missing or damaged."""
    if folder.name.endswith(ENDING):
        raise DataError(
            f"{folder} is the partial output of an interrupted `sodaopt data prepare`: remove it"
        )
    files = {kind: shards_of(folder, kind) for kind in KINDS}
    for kind, found in files.items():
        if not found:
            raise DataError(f"{folder} is not a data set: it has no shard named {kind}_*.bin")
    meta = read_meta(folder)
    counts = {path: count_tokens(path) for found in files.values() for path in found}
    if meta:
        _check_shards(folder, meta, counts)
    vocab, name = meta.get("vocab", GPT2_VOCAB), meta.get("tokenizer", GPT2)
    _check_ids(meta, counts, vocab)
    _check_tokenizer(folder, name, vocab)
    train, val = (sum(counts[path] for path in files[kind]) for kind in KINDS)
    title = folder.resolve().name
    return Dataset(title, folder, files["train"], files["val"], vocab, train, val, name, meta)


def shards_of(folder: Path, kind: str) -> list[Path]:
    """Return the shards of a kind. fineweb_val_000000.bin is of the kind val.

    If a name contains both words, the last one counts.
    """
    found = ((re.findall("train|val", path.stem), path) for path in folder.glob("[!.]*.bin"))
    return sorted(path for words, path in found if words and words[-1] == kind)


def read_meta(folder: Path) -> dict[str, Any]:
    """Return the content of meta.json, or an empty dict if there is none."""
    path = folder / META
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        meta = None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise DataError(
            f"{path} is damaged or does not have format {FORMAT}: prepare the data set again "
            f"(--force)"
        )
    if problem := _wrong_entry(meta):
        raise DataError(f"{path} is damaged ({problem}): prepare the data set again (--force)")
    return meta


TYPES: dict[str, type] = {
    "vocab": int,
    "tokenizer": str,
    "shards": dict,
    "sources": list,
    "licence": str,
}
SHARD_TYPES: dict[str, type] = {"tokens": int, "sha256": str}
SOURCE_TYPES: dict[str, type] = {"file": str, "sha256": str}


def _wrong_entry(meta: dict[str, Any]) -> str:
    """Return a description of the first entry of meta.json with a wrong type, or ''."""
    if "shards" not in meta:
        return "it has no shards"
    if wrong := _wrong_type(meta, TYPES):
        return wrong
    parts = [(f"shard {name}", part, SHARD_TYPES) for name, part in meta["shards"].items()]
    parts += [("source", part, SOURCE_TYPES) for part in meta.get("sources", [])]
    for name, part, types in parts:
        if not isinstance(part, dict):
            return f"{name} is {part!r:.60}"
        if wrong := next((f"no {k}" for k in types if k not in part), _wrong_type(part, types)):
            return f"{name}: {wrong}"
    name = meta.get("tokenizer", GPT2)
    is_file_name = Path(name).name == name and "\0" not in name  # so it is in the folder
    return "" if is_file_name else f"tokenizer is {name!r:.60}"


def _wrong_type(entries: dict[str, Any], types: dict[str, type]) -> str:
    wrong = [k for k, kind in types.items() if k in entries and type(entries[k]) is not kind]
    return f"{wrong[0]} is {entries[wrong[0]]!r:.60}" if wrong else ""


def _check_shards(folder: Path, meta: dict[str, Any], counts: dict[Path, int]) -> None:
    """Raise if the shards in the folder differ from the shards that meta.json lists."""
    listed = {name: shard["tokens"] for name, shard in meta["shards"].items()}
    here = {path.name: count for path, count in counts.items()}
    for name in sorted(listed | here):
        if listed.get(name) != here.get(name):
            raise DataError(
                f"{folder / name} has {here.get(name, 'no')} tokens, but {META} says "
                f"{listed.get(name, 'none')}: prepare the data set again (--force)"
            )


def _check_ids(meta: dict[str, Any], counts: dict[Path, int], vocab: int) -> None:
    for path, number in largest_ids(list(counts)).items():
        if number >= vocab:
            why = (
                "prepare the data set again (--force)"
                if meta
                else f"without {META}, a shard must contain GPT-2's ids"
            )
            raise DataError(
                f"{path} has the id {number}, but the vocabulary has {vocab} tokens: {why}"
            )


def _check_tokenizer(folder: Path, name: str, vocab: int) -> None:
    found = tokenizers.load(name, folder).vocab
    if found != vocab:
        raise DataError(
            f"{folder / name} has {found} tokens, but {META} says {vocab}: prepare the data set "
            "again (--force)"
        )


def largest_ids(paths: list[Path]) -> dict[Path, int]:
    """Return the largest id of each shard of a folder.

    Reading all ids takes time, so the results are kept in checked.json. A result is used
    until the size or the time of its shard changes.
    """
    memory = paths[0].parent / CHECKED
    known = _checked(memory)
    found = {}
    for path in paths:
        stamp = [path.stat().st_size, path.stat().st_mtime_ns]
        entry = known.get(path.name, [])
        found[path.name] = entry if entry[:2] == stamp else [*stamp, largest_id(path)]
    if any(known.get(name) != entry for name, entry in found.items()):
        with suppress(OSError):  # a read-only folder is checked again each time
            write_atomically(memory, [json.dumps(known | found, indent=1).encode()])
    return {path: found[path.name][2] for path in paths}


def _checked(path: Path) -> dict[str, list[int]]:
    """Return the entries of checked.json, without wrong entries, whose shards are read again."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    entries = known.items() if isinstance(known, dict) else ()
    return {name: entry for name, entry in entries if _is_checked(entry)}


def _is_checked(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 3 and all(isinstance(n, int) for n in entry)


def verify(data: Dataset) -> list[str]:
    """Compare the shards with the checksums in meta.json. Return a message for each damaged one."""
    shards = data.meta.get("shards", {})
    files = [path for path in data.train + data.val if path.name in shards]
    return [
        f"{path} is damaged: its sha256 is not the one in {META}"
        for path in files
        if sha256(path) != shards[path.name]["sha256"]
    ]
