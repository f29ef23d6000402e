"""`sodaopt data`: make, download and inspect data sets."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg, subcommand

from ..visible import visible
from . import build, download, prepare, wikipedia
from .corpus import KNOWN, ROOT, here, open_data
from .dataset import Dataset, verify
from .shards import DataError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass
class Prepare:
    """Make a data set from text files.

    .jsonl and .parquet: each line or row is a document. Its text is in the field of --field.
    .bin: shards of a data set, which are decoded, to be encoded with another tokenizer.
    .txt and other text: lines <|endoftext|> separate documents. A file without them is a document.
    Text and JSON lines may be compressed: .xz, .zst, .gz."""

    files: Annotated[Positional[tuple[Path, ...]], arg(metavar="FILE ...")]
    """The text files."""
    field: str = "text"
    """Field of JSON lines, or column of Parquet, with the text."""
    vocab: int | None = None
    """Vocabulary of a new byte-level BPE tokenizer, trained on the text. Default: 8192."""
    tokenizer: str | None = None
    """An existing tokenizer instead of a new one: gpt2, or a tokenizer.json."""
    val: tuple[Path, ...] = ()
    """Files with validation text."""
    val_fraction: float = 0.01
    """Fraction of the documents for validation, without --val."""
    out: Path | None = None
    """Folder of the data set. Default: runs/data/NAME, named after the first file."""
    shard_tokens: str = "100M"
    """Most tokens in a shard."""
    workers: int = os.cpu_count() or 1
    """Number of threads."""
    seed: int = 0
    """Seed of the order of the documents."""
    licence: str = ""
    """Licence of the text, which is noted in meta.json."""
    force: bool = False
    """Replace an existing data set."""

    def run(self) -> int:
        return _report_errors(self._run)

    def _run(self, console: Console) -> int:
        options = prepare.PrepareOptions(
            self.files, self.out or prepare.default_out(self.files), self.vocab, self.tokenizer,
            self.val, self.val_fraction, prepare.count(self.shard_tokens), self.workers,
            self.seed, self.licence, self.force, self.field,
        )  # fmt: skip
        with _progress(console, options.size) as (stage, tell):
            data = prepare.prepare(options, stage, tell)
        _print(console, f"{data.folder}: {_summary(data)}")
        return 0


@dataclass
class Download:
    """Download shards of FineWeb from the Hugging Face Hub (200 MB each)."""

    name: Positional[Literal["fineweb10B", "fineweb100B"]]
    """Name of the data set."""
    shards: Annotated[Positional[int], arg(metavar="SHARDS")] = 9
    """Number of training shards, 100 M tokens each: up to 103 for fineweb10B, 1030 for
    fineweb100B. `sodaopt train --dry-run` says how many a run needs."""
    out: Path | None = None
    """Folder of the data set. Default: runs/data/NAME."""
    endpoint: str | None = None
    """Address of a mirror of the hub. Default: HF_ENDPOINT."""

    def run(self) -> int:
        return _report_errors(self._run)

    def _run(self, console: Console) -> int:
        from huggingface_hub.utils.tqdm import disable_progress_bars

        if not console.is_terminal:
            disable_progress_bars()
        out = self.out or ROOT / self.name
        say = lambda text: _print(console, text)  # noqa: E731
        data = download.download(self.name, self.shards, out, self.endpoint, say)
        _print(console, f"{data.folder}: {_summary(data)}")
        return 0


@dataclass
class Wikipedia:
    """Make the data set of the preset proxy from English Wikipedia.

    The text of the articles is downloaded from two repositories on GitHub, at fixed commits
    (830 MB). It is cleaned, split into training and validation data, and tokenised."""

    out: Path = ROOT / "proxy"
    """Folder of the data set."""
    texts: Path = Path("runs/wikipedia")
    """Folder for the downloaded files and the clean text."""
    vocab: int = prepare.VOCAB
    """Vocabulary of the tokenizer, which is trained on the text."""
    workers: int = os.cpu_count() or 1
    """Number of threads."""
    endpoint: str = wikipedia.HOST
    """Address of a mirror of raw.githubusercontent.com."""
    force: bool = False
    """Replace an existing data set."""

    def run(self) -> int:
        return _report_errors(self._run)

    def _run(self, console: Console) -> int:
        prepare.check_out(self.out, self.force)
        say = lambda text: _print(console, text)  # noqa: E731
        train, val = wikipedia.write_texts(wikipedia.SOURCES, self.texts, self.endpoint, say)
        return Prepare(
            tuple(train), val=(val,), vocab=self.vocab, out=self.out, workers=self.workers,
            licence=wikipedia.LICENCE, force=self.force,
        )._run(console)  # fmt: skip


@dataclass
class Info:
    """Describe a data set, or list all data sets."""

    name: Annotated[Positional[str], arg(metavar="NAME")] = ""
    """Name or folder of a data set. Default: list all data sets."""
    verify: bool = False
    """Compute the checksums of the shards and compare them with meta.json."""

    def run(self) -> int:
        return _report_errors(self._run)

    def _run(self, console: Console) -> int:
        if not self.name:
            console.print(_all(ROOT))
            return 0
        data = open_data(self.name)
        console.print(_one(data))
        damaged = verify(data) if self.verify else []
        for line in damaged:
            _print(console, line)
        if self.verify and not damaged:
            shards = len(data.meta.get("shards", {}))
            _print(
                console, f"{shards} checksums are right" if shards else "meta.json has no checksums"
            )
        return 1 if damaged else 0


Data = (
    Annotated[Prepare, subcommand("prepare")]
    | Annotated[Download, subcommand("download")]
    | Annotated[Wikipedia, subcommand("wikipedia")]
    | Annotated[Info, subcommand("info")]
)


def _report_errors(run: Callable[[Console], int]) -> int:
    """Run a command. Print errors of the data or the disk as one line. Return the exit code."""
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=132)
    try:
        return run(console)
    except (DataError, OSError) as e:
        print(f"sodaopt data: {visible(e)}", file=sys.stderr)
        return 2


def _print(console: Console, text: str) -> None:
    console.print(visible(text), markup=False, highlight=False, soft_wrap=True)


def _summary(data: Dataset) -> str:
    return (
        f"{data.train_tokens:,} tokens for training in {_shards(data.train)}, "
        f"{data.val_tokens:,} for validation, vocabulary {data.vocab}"
    )


def _shards(paths: list[Path]) -> str:
    return f"{len(paths)} shard" + "s" * (len(paths) != 1)


def _all(root: Path) -> Table:
    """Return a table of the known data sets, and of other folders under `root`."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("name", "here", "content", "licence", "how to get it")
    for name in [*KNOWN, *sorted(set(here(root)) - set(KNOWN))]:
        known = KNOWN.get(name)
        about = (known.about, known.licence, known.command) if known else ("your own", "", "")
        table.add_row(escape(visible(name)), _state(root, name), *about)
    return table


def _state(root: Path, name: str) -> str:
    if not (root / name).exists():
        return "no"
    try:
        return f"{open_data(name, root).train_tokens / 1e6:,.1f} M tokens"
    except DataError:
        return "damaged or incomplete"


def _one(data: Dataset) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, title=escape(visible(data.name)), title_justify="left")
    known = KNOWN.get(data.name)
    sources = ", ".join(source["file"] for source in data.meta.get("sources", []))
    facts = {
        "folder": data.folder,
        "training": f"{data.train_tokens:,} tokens in {_shards(data.train)}",
        "validation": f"{data.val_tokens:,} tokens in {_shards(data.val)}",
        "vocabulary": f"{data.vocab:,} tokens",
        "tokenizer": data.tokenizer_name,
        "licence": data.meta.get("licence") or (known.licence if known else "not given"),
        "made from": sources or (known.about if known else "not given"),
        "made by": f"sodaopt {data.meta.get('sodaopt', '?')}"
        if data.meta
        else "others (no meta.json)",
    }
    for name, value in facts.items():
        table.add_row(name, escape(visible(value)))
    return table


@contextmanager
def _progress(console: Console, total: int) -> Iterator[tuple[prepare.Stage, build.Tell]]:
    """Show a bar on a terminal, or a line for every tenth of the input.

    Yield the functions `stage` and `tell` of `prepare`, which update it.

    total: the number of input bytes
    """
    if not console.is_terminal:
        yield lambda text: _print(console, text), _tenths(console, total)
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(), DownloadColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total)
        yield (
            lambda text: bar.update(task, description=text),
            lambda more: bar.update(task, advance=more),
        )


def _tenths(console: Console, total: int) -> build.Tell:
    """Return a function that prints a line after every tenth of the input."""
    done = 0

    def tell(more: int) -> None:
        nonlocal done
        before, done = done, done + more
        if 10 * before // total < 10 * done // total:
            _print(console, f"{done / 1e6:.1f} of {total / 1e6:.1f} MB")

    return tell
