"""A small network, plain or sharded, and its training, which the distributed tests compare."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sodaopt import SODA, Method, zoo

LR, STEPS = 0.02, 10


def network(dtype: torch.dtype = torch.float64, width: int = 13) -> nn.Sequential:
    """Return a network whose layers divide unevenly. The last one has one row for two ranks."""
    torch.manual_seed(0)
    layers = nn.Linear(6, width), nn.GELU(), nn.Linear(width, 5), nn.GELU(), nn.Linear(5, 1)
    return nn.Sequential(*layers).to(dtype)


def takes(method: Method, shape: Sequence[int]) -> bool:
    try:
        method.geometry.check(shape)
    except ValueError:
        return False
    return True


def groups(model: nn.Module, method: Method) -> list[dict[str, object]]:
    """Return a group of matrices and one of vectors, with Adam if the method refuses vectors."""
    split: dict[bool, list[Tensor]] = {True: [], False: []}
    for p in model.parameters():
        split[p.ndim == 2].append(p)
    rest = method if takes(method, (3,)) else zoo.adam()
    return [{"params": split[True], "method": method}, {"params": split[False], "method": rest}]


def batch(k: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(k)
    return torch.randn(8, 6, generator=rng).to(dtype), torch.randn(8, 1, generator=rng).to(dtype)


def train(
    model: nn.Module, opt: SODA, steps: Iterable[int] = range(STEPS), halves: bool = False
) -> None:
    """Take a step on each batch.

    halves: this rank sees its part of a batch only. The mean of all ranks' gradients is that of the
    batch.
    """
    dtype = next(model.parameters()).dtype
    for k in steps:
        X, Y = batch(k, dtype)
        if halves:
            half = slice(dist.get_rank(), None, dist.get_world_size())
            X, Y = X[half], Y[half]
        opt.zero_grad()
        (model(X) - Y).square().mean().backward()
        opt.step()


def whole(t: Tensor) -> Tensor:
    t = t.detach()
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def weights(model: nn.Module) -> list[Tensor]:
    return [whole(p).clone() for p in model.parameters()]


def gap(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).abs().max().nan_to_num(torch.inf)) for a, b in pairs)


def equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def cut(t: Tensor, mesh: Any, placements: Sequence[Any]) -> Tensor:
    """Return a tensor that every rank has as a DTensor."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(t, mesh, placements, src_data_rank=None)


def shard(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model)
