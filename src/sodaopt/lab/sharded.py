"""The checkpoints of sharded runs, by torch.distributed.checkpoint.

    step-00000100.dcp/           a folder, complete or not there
        *.distcp, .metadata      the shards of parameters and optimizer state, written by all ranks
        rest.pt                  everything else, as in a checkpoint of one process, and checksums

A run continues from either kind of checkpoint, with any number of ranks and any parallelism: each
tensor is loaded into the layout of the parameter that it belongs to.
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
    """Yield a key, the dict and the name under which a checkpoint has a tensor, and its parameter.

    The keys do not depend on the number of ranks.
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

    first: this is rank 0.
    write: writes one file completely or not at all.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    part = path.with_name(f"{path.name}.part")
    rest, shards = _split(state, model, optimizer)
    try:
        save(shards, checkpoint_id=part)
    except CheckpointException as e:  # not an Exception, and the same on every rank
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
    """Separate the sharded tensors from the rest of a checkpoint."""
    from torch.distributed.tensor import DTensor

    # copies, because the optimizer's dicts are its own
    states = {j: dict(tensors) for j, tensors in state["optimizer"]["state"].items()}
    optimizers = state["optimizer"] | {"state": states}
    rest = state | {"model": dict(state["model"]), "optimizer": optimizers}
    shards = {}
    for key, inside, name, _ in list(entries(rest, model, optimizer)):
        if isinstance(inside[name], DTensor):
            shards[key], inside[name] = inside[name], None
    return rest, shards


def fill(path: Path, state: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Put the tensors of a checkpoint into its state, each in the layout of its parameter.

    state: the content of the file of one process, or of `rest.pt`
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
    """Replace each parameter by a tensor of the checkpoint with the same layout."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    kinds: Any = FileSystemReader(path).read_metadata().state_dict_metadata
    for key, p in shards.items():
        shards[key] = torch.empty_like(p.detach(), dtype=kinds[key].properties.dtype)
    alone = not any(map(is_sharded, shards.values()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loading without the other ranks is meant
        load(shards, checkpoint_id=path, no_dist=alone)


def _reasons(e: Any) -> str:
    found = {str(error).splitlines()[0] for error, _ in e.failures.values()}
    return ", ".join(sorted(found))


def _checksums(folder: Path) -> dict[str, int]:
    files = [p for p in sorted(folder.iterdir()) if p.name != REST]
    return {p.name: _checksum(p) for p in files}


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            value = zlib.crc32(chunk, value)
    return value


def damage(path: Path, state: dict[str, Any]) -> str:
    """Say which file of a sharded checkpoint is damaged, or nothing."""
    for name, wanted in state[CHECKSUMS].items():
        if not (path / name).exists() or _checksum(path / name) != wanted:
            return str(name)
    return ""
