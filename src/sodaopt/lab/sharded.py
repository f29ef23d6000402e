"""Write and read the checkpoints of sharded runs with torch.distributed.checkpoint.

    step-00000100.dcp/           a folder that appears complete or not at all
        *.distcp, .metadata      the shards of parameters and optimizer state, written by all ranks
        rest.pt                  everything else, as in a checkpoint of one process, and checksums

A run continues from a checkpoint of one process or of several, with any number of ranks and any
parallelism: each tensor is loaded into the layout of its parameter.
"""

import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sodaopt.parallel.sharded import is_sharded, place

from .files import sync_folder

REST = "rest.pt"
CHECKSUMS = "checksums"


def entries(
    state: dict[str, Any], model: nn.Module, optimizer: Optimizer
) -> Iterator[tuple[str, dict[Any, Any], Any, Tensor]]:
    """Yield (key, tensors, name, parameter) for each tensor of a checkpoint.

    key: the name of the tensor in the folder. It does not depend on the number of ranks.
    tensors: the dict in `state` that has the tensor as tensors[name]
    parameter: the parameter whose layout the tensor has
    """
    for name, own in model.state_dict().items():
        yield f"model.{name}", state["model"], name, own
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for j, tensors in state["optimizer"]["state"].items():
        for name in tensors:
            yield f"optimizer.{j}.{name}", tensors, name, params[j]


def save_shards(
    path: Path,
    state: dict[str, Any],
    model: nn.Module,
    optimizer: Optimizer,
    first: bool,
    write: Callable[[Path, Any], None],
) -> None:
    """Save the checkpoint of a sharded run. All ranks must call it, and then wait for rank 0.

    first: whether this is rank 0
    write: writes one file completely or not at all
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    part = path.with_name(f"{path.name}.part")
    rest, shards = _split(state, model, optimizer)
    try:
        save(shards, checkpoint_id=part)
    except CheckpointException as e:  # a BaseException, which every rank gets
        if first:
            shutil.rmtree(part, ignore_errors=True)
        raise OSError(f"{path} could not be saved ({_reasons(e)})") from e
    if first:
        write(part / REST, rest | {CHECKSUMS: _checksums(part)})
        shutil.rmtree(path, ignore_errors=True)
        part.rename(path)
        sync_folder(path.parent)


def _split(
    state: dict[str, Any], model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the rest of a checkpoint, and its sharded tensors by key."""
    from torch.distributed.tensor import DTensor

    # The optimizer uses the dicts in `state`, so copies are changed.
    states = {j: dict(tensors) for j, tensors in state["optimizer"]["state"].items()}
    optimizers = state["optimizer"] | {"state": states}
    rest = state | {"model": dict(state["model"]), "optimizer": optimizers}
    shards = {}
    for key, inside, name, _ in list(entries(rest, model, optimizer)):
        if isinstance(inside[name], DTensor):
            shards[key], inside[name] = inside[name], None
    return rest, shards


def fill(path: Path, state: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Bring all tensors of a checkpoint to the layout of their parameters, in `state`.

    path: the checkpoint, a file or a folder
    state: the content of the file, or of `rest.pt` in the folder, whose sharded tensors are None
    """
    shards = {}
    for key, inside, name, p in entries(state, model, optimizer):
        if inside[name] is None:
            inside[name] = shards[key] = p
        elif isinstance(inside[name], Tensor) and inside[name].shape == p.shape:
            inside[name] = place(inside[name], p)
    if shards:
        _load(path, shards)
        for key, inside, name, _ in entries(state, model, optimizer):
            inside[name] = shards.get(key, inside[name])


def _load(path: Path, shards: dict[str, Tensor]) -> None:
    """Replace each parameter in `shards` by its tensor in the checkpoint, in the same layout."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    kinds: Any = FileSystemReader(path).read_metadata().state_dict_metadata
    for key, p in shards.items():
        shards[key] = torch.empty_like(p.detach(), dtype=kinds[key].properties.dtype)
    alone = not any(map(is_sharded, shards.values()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns if it loads without other ranks
        load(shards, checkpoint_id=path, no_dist=alone)


def _reasons(e: Any) -> str:
    """Return the first line of each different error of the ranks."""
    found = {str(error).splitlines()[0] for error, _ in e.failures.values()}
    return ", ".join(sorted(found))


def _checksums(folder: Path) -> dict[str, int]:
    """Return the checksums of the files with shards, by file name."""
    files = [p for p in sorted(folder.iterdir()) if p.name != REST]
    return {p.name: _checksum(p) for p in files}


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            value = zlib.crc32(chunk, value)
    return value


def damage(path: Path, state: dict[str, Any]) -> str:
    """Return the name of the first damaged file of a sharded checkpoint, or ''."""
    for name, wanted in state[CHECKSUMS].items():
        if not (path / name).exists() or _checksum(path / name) != wanted:
            return str(name)
    return ""
