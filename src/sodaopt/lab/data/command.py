"""`sodaopt data`: make, fetch and look at data sets."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, subcommand

from . import build, download, prepare
from .corpus import KNOWN, ROOT, here, open_data
from .dataset import Dataset, verify
from .shards import DataError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass
class Prepare:
    """Make a data set from files of text.

    .txt or any other text: documents are separated by lines <|endoftext|>, or a file is one.
    .jsonl: each line is a document, its field "text". Each may be compressed: .xz, .zst, .gz."""

    files: Positional[tuple[Path, ...]]
    """The files."""
    vocab: int | None = None
    """Words of the tokenizer that is trained on the text (a byte-level BPE); 8192 if not given."""
    tokenizer: str | None = None
    """Train none: gpt2, or a tokenizer.json."""
    val: tuple[Path, ...] = ()
    """Files of validation text."""
    val_fraction: float = 0.01
    """Without such files: the part of the documents that is set apart for validation."""
    out: Path | None = None
    """The folder to make; runs/data/NAME after the first file if not given."""
    shard_tokens: str = "100M"
    """Tokens in a shard, at most."""
    workers: int = os.cpu_count() or 1
    """Threads that encode."""
    seed: int = 0
    """Of the order of the documents."""
    licence: str = ""
    """A note that stays with the data set."""
    force: bool = False
    """Replace the data set that is there."""

    def run(self) -> int:
        return _told(self._run)

    def _run(self, console: Console) -> int:
        plan = prepare.Plan(
            self.files, self.out or prepare.default_out(self.files), self.vocab, self.tokenizer,
            self.val, self.val_fraction, prepare.count(self.shard_tokens), self.workers,
            self.seed, self.licence, self.force,
        )  # fmt: skip
        with _progress(console, plan.size) as (stage, tell):
            data = prepare.prepare(plan, stage, tell)
        _print(console, f"{data.folder}: {_summary(data)}")
        return 0


@dataclass
class Download:
    """Get shards of FineWeb from the Hugging Face Hub (200 MB each)."""

    name: Positional[Literal["fineweb10B", "fineweb100B"]]
    """Which."""
    shards: Positional[int] = 9
    """Shards for training, 100 M tokens each: up to 103 of fineweb10B, 1030 of fineweb100B."""
    out: Path | None = None
    """The folder; runs/data/NAME if not given."""
    endpoint: str | None = None
    """A mirror of the hub; HF_ENDPOINT if not given."""

    def run(self) -> int:
        return _told(self._run)

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
class Info:
    """Say what a data set holds, or which there are."""

    name: Positional[str] = ""
    """A name or a folder; all if not given."""
    verify: bool = False
    """Compare the checksums of the shards with those in meta.json."""

    def run(self) -> int:
        return _told(self._run)

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
            _print(console, f"{shards} checksums are right" if shards else "it has no checksums")
        return 1 if damaged else 0


Data = (
    Annotated[Prepare, subcommand("prepare")]
    | Annotated[Download, subcommand("download")]
    | Annotated[Info, subcommand("info")]
)


def _told(run: Callable[[Console], int]) -> int:
    """Run, and say in a line what is wrong with the data or the disk."""
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=132)
    try:
        return run(console)
    except (DataError, OSError) as e:
        print(f"sodaopt data: {e}", file=sys.stderr)
        return 2


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _summary(data: Dataset) -> str:
    return (
        f"{data.train_tokens:,} tokens for training in {_shards(data.train)}, "
        f"{data.val_tokens:,} for validation, vocabulary {data.vocab}"
    )


def _shards(paths: list[Path]) -> str:
    return f"{len(paths)} shard" + "s" * (len(paths) != 1)


def _all(root: Path) -> Table:
    """The known data sets and those in the folder."""
    from rich.table import Table

    table = Table("name", "here", "what", "licence", "how to get it")
    for name in [*KNOWN, *sorted(set(here(root)) - set(KNOWN))]:
        known = KNOWN.get(name)
        row = (known.about, known.licence, known.command) if known else ("your own", "", "")
        table.add_row(name, _state(root, name), *row)
    return table


def _state(root: Path, name: str) -> str:
    if not (root / name).exists():
        return "no"
    try:
        return f"{open_data(name, root).train_tokens / 1e6:,.1f} M tokens"
    except DataError:
        return "not whole"


def _one(data: Dataset) -> Table:
    from rich.table import Table

    table = Table(show_header=False, title=data.name, title_justify="left")
    known = KNOWN.get(data.name)
    sources = ", ".join(source["file"] for source in data.meta.get("sources", []))
    rows = {
        "folder": data.folder,
        "training": f"{data.train_tokens:,} tokens in {_shards(data.train)}",
        "validation": f"{data.val_tokens:,} tokens in {_shards(data.val)}",
        "vocabulary": f"{data.vocab:,} words",
        "tokenizer": data.tokenizer_name,
        "licence": data.meta.get("licence") or (known.licence if known else "not given"),
        "made from": sources or (known.about if known else "not given"),
        "made by": f"sodaopt {data.meta['sodaopt']}" if data.meta else "others (no meta.json)",
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


@contextmanager
def _progress(console: Console, total: int) -> Iterator[tuple[prepare.Stage, build.Tell]]:
    """A bar on a terminal, a line every tenth elsewhere."""
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
    done = 0

    def tell(more: int) -> None:
        nonlocal done
        before, done = done, done + more
        if 10 * before // total < 10 * done // total:
            _print(console, f"{done / 1e6:.1f} of {total / 1e6:.1f} MB")

    return tell
