"""`sodaopt data download`: download shards of FineWeb with GPT-2's ids.

The shards are in the data set repositories of modded-nanogpt on the Hugging Face Hub. A repository
has one shard for validation, and many for training, with 100 M tokens each.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sodaopt._errors import unknown

from .dataset import Dataset, open_folder
from .shards import DataError, count_tokens

SHARD_BYTES = 200_001_024


@dataclass(frozen=True)
class Source:
    """A data set repository on the Hugging Face Hub."""

    repo: str
    shards: int
    """Number of training shards."""


SOURCES = {
    "fineweb10B": Source("kjj0/fineweb10B-gpt2", 103),
    "fineweb100B": Source("kjj0/fineweb100B-gpt2", 1030),
}
Say = Callable[[str], None]


def download(
    name: str, shards: int, out: Path, endpoint: str | None = None, say: Say = lambda _: None
) -> Dataset:
    """Download the first shards of a data set, except complete ones that are already in `out`.

    shards: number of training shards
    endpoint: address of a mirror of the hub
    say: called with messages about the progress
    """
    source = _source(name, shards)
    files = ["fineweb_val_000000.bin"]
    files += [f"fineweb_train_{k:06d}.bin" for k in range(1, shards + 1)]
    missing = [file for file in files if not _is_complete(out / file)]
    if len(missing) < len(files):
        say(f"{len(files) - len(missing)} of {len(files)} shards are already in {out}")
    out.mkdir(parents=True, exist_ok=True)
    _check_space(out, len(missing))
    for number, file in enumerate(missing, 1):
        say(f"[{number}/{len(missing)}] {file}")
        _fetch(source.repo, file, out, endpoint)
    return replace(open_folder(out), name=name)


def _source(name: str, shards: int) -> Source:
    if name not in SOURCES:
        raise DataError(unknown("data set", name, SOURCES))
    source = SOURCES[name]
    if not 1 <= shards <= source.shards:
        raise DataError(f"shards must be in 1..{source.shards} for {name}, got {shards}")
    return source


def _is_complete(path: Path) -> bool:
    try:
        count_tokens(path)
    except DataError:
        return False
    return True


def _check_space(out: Path, shards: int) -> None:
    free, needed = shutil.disk_usage(out).free, shards * SHARD_BYTES
    if free < needed:
        raise DataError(
            f"{shards} shards need {needed / 1e9:.1f} GB, but {out} has {free / 1e9:.1f} GB free: "
            f"download fewer shards, or choose another --out"
        )


def _fetch(repo: str, file: str, out: Path, endpoint: str | None) -> None:
    """Download a shard. The hub's client resumes a broken download, and renames a complete one."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError, RepositoryNotFoundError

    path = out / file
    path.unlink(missing_ok=True)  # the client would accept an incomplete file as current
    try:
        hf_hub_download(repo, file, repo_type="dataset", local_dir=out, endpoint=endpoint)
    except (RemoteEntryNotFoundError, RepositoryNotFoundError) as e:
        raise DataError(f"{endpoint or 'the hub'} has no {repo}/{file}: {_first(e)}") from None
    except Exception as e:  # the client's error classes differ between its versions
        if isinstance(e, OSError) and e.errno:  # the disk, not the network
            raise
        raise DataError(_no_network(repo, file, out, e)) from e
    _check(path, repo)


def _check(path: Path, repo: str) -> None:
    try:
        count_tokens(path)
    except DataError as e:
        path.unlink(missing_ok=True)
        raise DataError(
            f"the download of {path.name} from {repo} was damaged and is deleted ({e}): "
            f"run the command again"
        ) from None


def _no_network(repo: str, file: str, out: Path, e: Exception) -> str:
    return (
        f"could not download {file}: {_first(e.__cause__ or e)}. Run the command again when there "
        f"is a connection. Complete shards are kept. For a mirror, use --endpoint or HF_ENDPOINT. "
        f"Without a connection, copy the files of huggingface.co/datasets/{repo} into {out}"
    )


def _first(e: BaseException) -> str:
    return str(e).strip().split("\n")[0] or type(e).__name__
