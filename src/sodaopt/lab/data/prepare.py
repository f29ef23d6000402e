"""`sodaopt data prepare`: make a data set from text files."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from . import build, texts, tokenizer
from .corpus import KNOWN, ROOT
from .dataset import Dataset, open_folder
from .shards import DataError
from .tokenizer import Tokenizer

SAMPLE = 100_000_000  # characters to train a tokenizer on: more text changes few of its tokens
VOCAB = 8192
Stage = Callable[[str], None]
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True)
class PrepareOptions:
    """Input files and settings, checked before any file is read."""

    files: Sequence[Path]
    out: Path
    vocab: int | None = None
    tokenizer: str | None = None
    val: Sequence[Path] = ()
    val_fraction: float = 0.01
    shard_tokens: int = build.SHARD_TOKENS
    workers: int = 1
    seed: int = 0
    licence: str = ""
    force: bool = False
    field: str = "text"

    def __post_init__(self) -> None:
        if not self.files:
            raise DataError("no files given: name the text files to prepare")
        if not 0 < self.val_fraction < 1:
            raise DataError(f"--val-fraction must be between 0 and 1, got {self.val_fraction}")
        if self.workers < 1 or self.shard_tokens < 2:
            raise DataError(
                f"--workers must be at least 1 and --shard-tokens at least 2, got {self.workers} "
                f"and {self.shard_tokens}"
            )
        if self.tokenizer and self.vocab:
            raise DataError(
                f"--vocab {self.vocab} is for a new tokenizer: leave it out, or leave out "
                f"--tokenizer {self.tokenizer}"
            )
        if self.vocab is not None:
            tokenizer.check_vocab(self.vocab)
        self._check_files()
        check_out(self.out, self.force)

    def _check_files(self) -> None:
        seen: set[Path] = set()
        for path in (*self.files, *self.val):
            texts.check_file(path)
            if path.resolve() in seen:
                raise DataError(f"{path} is named twice: remove one of the two")
            seen.add(path.resolve())

    @property
    def size(self) -> int:
        """Number of bytes to read."""
        return sum(path.stat().st_size for path in (*self.files, *self.val))


def prepare(
    options: PrepareOptions, stage: Stage = lambda _: None, tell: build.Tell = lambda _: None
) -> Dataset:
    """Make a data set, and open it.

    stage: called with the name of each stage when it begins
    tell: called with the number of input bytes since the last call
    """
    recipe = build.Recipe(
        options.files, _tokenizer(options, stage), options.val, options.val_fraction,
        options.shard_tokens, options.workers, options.seed, options.licence, options.field,
    )  # fmt: skip
    stage("encoding")
    try:
        build.build(recipe, options.out, options.force, tell)
    except FileExistsError as e:
        raise DataError(f"{e}: another process has made it in the meantime") from None
    return replace(open_folder(options.out), name=options.out.name)


def _tokenizer(options: PrepareOptions, stage: Stage) -> Tokenizer:
    if options.tokenizer is not None:
        return tokenizer.load(options.tokenizer)
    vocab = options.vocab or VOCAB
    stage(f"training a tokenizer of {vocab} tokens")
    return tokenizer.train(sample(options.files, field=options.field), vocab)


def sample(files: Sequence[Path], most: int = SAMPLE, field: str = "text") -> Iterator[str]:
    """Yield text from the beginning of each file, about as many characters from each.

    most: the number of characters from all files together
    """
    for path in files:
        left = most // len(files)
        parts = chain.from_iterable(
            texts.pieces(text) for text in texts.documents(path, field=field)
        )
        for part in parts:
            yield part
            left -= len(part)
            if left <= 0:
                break


def check_out(out: Path, force: bool) -> None:
    """Raise if the data set cannot be written to this folder, before any work is done."""
    known = KNOWN.get(out.name)
    if out.parent.resolve() == ROOT.resolve() and known and not known.own:
        raise DataError(f"{out.name} is the name of a known data set: choose another --out")
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file: choose another --out")
    if out.exists() and any(out.iterdir()) and not force:
        raise DataError(f"{out} already exists: replace it with --force, or choose another --out")
    build.check_replaceable(out)


def default_out(files: Sequence[Path]) -> Path:
    """Return the folder runs/data/NAME, where NAME is from the first file."""
    return ROOT / (files[0].name.split(".")[0] if files else "")


def count(text: str) -> int:
    """Parse a number of tokens: '100M' -> 100000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.strip().upper().replace("_", ""))
    if not match:
        raise DataError(f"--shard-tokens must be a number such as 5000, 100M or 1.5G, got {text!r}")
    return round(float(match[1]) * _UNITS[match[2]])
