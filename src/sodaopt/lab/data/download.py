"""`sodaopt data download`: the shards of FineWeb that were published with GPT-2's ids.

They are in the data set repositories of modded-nanogpt on the Hugging Face Hub: one of validation,
and many for training of 100 M tokens each.
"""

from __future__ import annotations

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
    repo: str
    shards: int
    """Of training; there is one of validation too."""


SOURCES = {
    "fineweb10B": Source("kjj0/fineweb10B-gpt2", 103),
    "fineweb100B": Source("kjj0/fineweb100B-gpt2", 1030),
}
Said = Callable[[str], None]


def download(
    name: str, shards: int, out: Path, endpoint: str | None = None, said: Said = lambda _: None
) -> Dataset:
    """Fetch the first shards; those that are there and whole are kept."""
    source = _source(name, shards)
    files = ["fineweb_val_000000.bin"]
    files += [f"fineweb_train_{k:06d}.bin" for k in range(1, shards + 1)]
    missing = [file for file in files if not _is_whole(out / file)]
    if len(missing) < len(files):
        said(f"{len(files) - len(missing)} of {len(files)} shards are already in {out}")
    out.mkdir(parents=True, exist_ok=True)
    _check_space(out, len(missing))
    for number, file in enumerate(missing, 1):
        said(f"[{number}/{len(missing)}] {file}")
        _fetch(source.repo, file, out, endpoint)
    return replace(open_folder(out), name=name)


def _source(name: str, shards: int) -> Source:
    if name not in SOURCES:
        raise DataError(unknown("data set", name, SOURCES))
    source = SOURCES[name]
    if not 1 <= shards <= source.shards:
        raise DataError(f"{name} has shards 1 to {source.shards} for training, got {shards}")
    return source


def _is_whole(path: Path) -> bool:
    try:
        count_tokens(path)
    except DataError:
        return False
    return True


def _check_space(out: Path, shards: int) -> None:
    free, needed = shutil.disk_usage(out).free, shards * SHARD_BYTES
    if free < needed:
        raise DataError(
            f"{shards} shards need {needed / 1e9:.1f} GB, and {out} has {free / 1e9:.1f} GB free: "
            f"ask for fewer, or choose another --out"
        )


def _fetch(repo: str, file: str, out: Path, endpoint: str | None) -> None:
    """One shard. The hub's client goes on after a broken connection, and renames at the end."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError, RepositoryNotFoundError

    path = out / file
    path.unlink(missing_ok=True)  # one that is not whole would be taken for the current one
    try:
        hf_hub_download(repo, file, repo_type="dataset", local_dir=out, endpoint=endpoint)
    except (RemoteEntryNotFoundError, RepositoryNotFoundError) as e:
        raise DataError(f"{endpoint or 'the hub'} has no {repo}/{file}: {_first(e)}") from None
    except Exception as e:  # the client's errors changed with its HTTP library, more than once
        if isinstance(e, OSError) and e.errno:  # no space, no permission: not the network
            raise
        raise DataError(_no_network(repo, file, out, e)) from e
    _check(path, repo)


def _check(path: Path, repo: str) -> None:
    try:
        count_tokens(path)
    except DataError as e:
        path.unlink(missing_ok=True)
        raise DataError(
            f"what {repo} sent for {path.name} is not a whole shard and was deleted ({e}); "
            f"run the command again"
        ) from None


def _no_network(repo: str, file: str, out: Path, e: Exception) -> str:
    return (
        f"could not download {file}: {_first(e.__cause__ or e)}. Run the command again when there "
        f"is a connection: whole shards are kept. Behind a mirror, give --endpoint (or HF_ENDPOINT)"
        f"; or copy the files of huggingface.co/datasets/{repo} into {out} from another machine"
    )


def _first(e: BaseException) -> str:
    return str(e).strip().split("\n")[0] or type(e).__name__
