"""Train one model in several processes.

torchrun starts the processes, and torch shares the model and the batches among them.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from .execution import Execution
from .model import GPT


@dataclass(frozen=True)
class World:
    """Rank of this process, and number of processes that train together."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Replace a tensor by its mean over all processes, and return it."""
        if self.size > 1:
            dist.all_reduce(value)
            value /= self.size
        return value

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is set on any process."""
        if self.size == 1:
            return flag
        seen = torch.tensor(float(flag), device=device)
        dist.all_reduce(seen)
        return bool(seen)

    def least(self, value: int, device: torch.device) -> int:
        """Return the smallest value of all processes."""
        if self.size == 1:
            return value
        seen = torch.tensor(value, device=device)
        dist.all_reduce(seen, dist.ReduceOp.MIN)
        return int(seen)

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


def join_world(device: torch.device) -> World:
    """Join the process group if torchrun started several processes. Return rank and size."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World()
    if not dist.is_initialized():
        backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
        store, rank, size = next(rendezvous("env://"))
        dist.init_process_group(backend, store=_own(store), rank=rank, world_size=size)
    return World(dist.get_rank(), size)


def _own(store: Any) -> Any:
    """Return the part of torchrun's store that belongs to this restart.

    The rest of the store has the addresses of processes that have ended. On several nodes the whole
    store is returned, because nodes count restarts differently. Restarts on several nodes need
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    """
    alone = os.environ.get("GROUP_WORLD_SIZE") == "1"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"attempt {attempt}", store) if alone else store


def parallelize(model: GPT, execution: Execution, ranks: World, device: torch.device) -> Any:
    """Share the model among the ranks. Return the module to call in a training step.

    Under fsdp and hsdp the parameters of the model are DTensors afterwards.
    """
    if ranks.size == 1:
        return model
    if execution.parallel == "ddp":
        ids = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = _grid(execution, ranks)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _grid(execution: Execution, ranks: World) -> tuple[int, ...]:
    """Return the shape of the mesh: (shards,), or (replicas, shards)."""
    if execution.parallel == "fsdp":
        return (ranks.size,)
    shards = execution.shards or int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))
    if ranks.size % shards:
        raise ValueError(f"shards is {shards}: it must divide the {ranks.size} processes")
    return ranks.size // shards, shards


def accumulating(module: Any, last: bool) -> AbstractContextManager[Any]:
    """Return the context for one of the backward passes of a step.

    Replicas exchange their gradients in the last pass only. Shards reduce their gradients in every
    pass, so that no rank holds a whole gradient.

    last: whether this is the last pass of the step
    """
    if is_sharded(module):
        module.set_requires_all_reduce(last)
    exchanges_later = isinstance(module, DistributedDataParallel) and not last
    return module.no_sync() if exchanges_later else nullcontext()


def is_sharded(model: Any) -> bool:
    """Whether the model's parameters are sharded."""
    return hasattr(model, "set_requires_all_reduce")  # importing FSDPModule takes seconds


def forget_gathered(module: Any) -> None:
    """Make the next forward pass gather the weights again.

    After a forward pass without a backward pass, FSDP keeps the gathered weights of its root
    module. They are out of date after the next optimizer step.
    """
    if is_sharded(module):
        module.reshard()


def process_group(module: Any) -> Any:
    """Return the ranks that hold the same whole parameters, as under DDP, or None."""
    return module.process_group if isinstance(module, DistributedDataParallel) else None


def whole_weights(model: GPT) -> dict[str, Any]:
    """Return the weights of the model.

    If the model is sharded, all ranks must call this. Only rank 0 gets the weights, in host memory.
    """
    if not is_sharded(model):
        return model.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=whole)


def whole_model(model: GPT, weights: dict[str, Any]) -> GPT:
    """Return the model itself, or if it is sharded, an unsharded copy with these weights."""
    if not is_sharded(model):
        return model
    copy = GPT(model.shape)
    copy.load_state_dict(weights)
    return copy.to(next(model.parameters()).device)


class LostRank(ConnectionError):
    """Another rank stopped in the middle of the run."""


@contextmanager
def explained(ranks: World) -> Iterator[None]:
    """Raise an error with advice if the connection to another rank breaks."""
    try:
        yield
    except RuntimeError as e:
        if ranks.size == 1 or not _is_lost(e):
            raise
        raise LostRank(
            f"rank {ranks.rank} lost the connection to another rank, which stopped: see the "
            "messages of that rank. Run the same command again to continue from the last "
            "checkpoint, or start it with `torchrun --max-restarts 3`"
        ) from e


def _is_lost(e: BaseException | None) -> bool:
    """Whether the error or one of its causes is a failed collective.

    Gloo raises a plain RuntimeError, whose message has the name of a source file of gloo.
    """
    while e is not None:
        if isinstance(e, dist.DistError) or "gloo" in str(e):
            return True
        e = e.__cause__
    return False
