"""Find data sets by name: the one in the package, downloaded ones, and your own."""

from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from sodaopt._errors import unknown

from . import texts, tokenizer
from .build import Recipe, build
from .dataset import Dataset, open_folder, read_meta
from .shards import DataError, sha256
from .tokenizer import ASSETS

ROOT = Path("runs/data")
EMBEDDED, EMBEDDED_VOCAB = "embedded", 1024
SMALL = {"train": ASSETS / "small_train.txt.xz", "val": ASSETS / "small_val.txt.xz"}


@dataclass(frozen=True)
class Known:
    """A data set with a fixed name, and how to get it."""

    about: str
    licence: str
    command: str
    own: bool = False
    """Whether users make it on their machine, and may make it from other text."""


KNOWN = {
    EMBEDDED: Known(
        "US State of the Union addresses from 1850 on, and Moby-Dick",
        "public domain (files PDDL 1.0, contents CC0)",
        "included, prepared at first use",
    ),
    "fineweb10B": Known(
        "10.3 G tokens of FineWeb, as GPT-2's ids",
        "ODC-By 1.0",
        "sodaopt data download fineweb10B 9",
    ),
    "proxy": Known(
        "586 MB of English Wikipedia for the preset proxy, or as much text of your own",
        "CC BY-SA 3.0, or that of the text",
        "sodaopt data wikipedia",
        own=True,
    ),
    "proxy-fineweb": Known(
        "two shards of FineWeb for the preset proxy, with a tokenizer of their own",
        "ODC-By 1.0",
        "sodaopt data download fineweb10B 2, and then sodaopt data prepare "
        "runs/data/fineweb10B/*train*.bin --vocab 8192 --out runs/data/proxy-fineweb",
        own=True,
    ),
    "fineweb100B": Known(
        "103 G tokens of FineWeb, as GPT-2's ids",
        "ODC-By 1.0",
        "sodaopt data download fineweb100B 9",
    ),
}


def open_data(name_or_path: str, root: Path = ROOT) -> Dataset:
    """Open a data set: `embedded`, the name of a folder under `root`, or the path of a folder."""
    name = str(name_or_path)
    if name == EMBEDDED:
        return _embedded(root / EMBEDDED)
    for folder in (root / name, Path(name)):
        if folder.is_dir():
            return open_folder(folder)
    raise DataError(_absent(name, root))


def _absent(name: str, root: Path) -> str:
    if name in KNOWN:
        verb = "make" if KNOWN[name].own else "get"
        return f"{name} is not in {root}: {verb} it with {KNOWN[name].command}"
    text = unknown("data set", name, {*KNOWN, *here(root)})
    near = get_close_matches(name, KNOWN, n=1)
    if near and near[0] not in here(root):
        return f"{text} ({KNOWN[near[0]].command})"
    return f"{text}. Make one with: sodaopt data prepare FILES --vocab N --out {root}/NAME"


def here(root: Path) -> list[str]:
    """Return the names of the folders under `root`."""
    return sorted(path.name for path in root.glob("[!.]*") if path.is_dir())


def _embedded(folder: Path) -> Dataset:
    """Open the package's corpus. It is tokenised at first use, and again if it has changed."""
    stale = folder.exists() and not _is_current(folder)
    if stale or not folder.exists():
        inner = tokenizer.load(tokenizer.FILE, ASSETS)
        licence = f"{KNOWN[EMBEDDED].licence}; sources: assets/NOTICE"
        recipe = Recipe([SMALL["train"]], inner, [SMALL["val"]], licence=licence)
        with suppress(FileExistsError):  # another process has made it in the meantime
            build(recipe, folder, replace=stale)
    return replace(open_folder(folder), name=EMBEDDED)


def _is_current(folder: Path) -> bool:
    try:
        sources = {source["sha256"] for source in read_meta(folder)["sources"]}
        same = (folder / tokenizer.FILE).read_bytes() == (ASSETS / tokenizer.FILE).read_bytes()
    except (DataError, KeyError, OSError):
        return False
    return same and sources == {sha256(path) for path in SMALL.values()}


def train_embedded_tokenizer() -> tokenizer.Tokenizer:
    """Train the tokenizer of the package's corpus again. assets/tokenizer.json is its `json`."""
    return tokenizer.train(texts.documents(SMALL["train"]), EMBEDDED_VOCAB)
