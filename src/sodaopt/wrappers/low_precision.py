"""The fp32 step of 16-bit parameters under a wrapper.

During the base optimizer's step, 16-bit parameters hold fp32 memory. Neither the update nor the
moments are rounded: the only rounding is the one into the parameter's own memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sodaopt.backends import not_compiled
from sodaopt.core.optimizer import SODA
from sodaopt.parallel import sharded
from sodaopt.rounding import HALVES


@contextmanager
def in_fp32(
    params: Sequence[Tensor], points: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> Iterator[None]:
    """Let 16-bit parameters hold fp32 memory and fp32 gradients.

    points: the memory, this rank's shards.
    """
    own, own_grads = [sharded.local(p).detach() for p in params], [p.grad for p in params]
    try:
        _hold(params, points, grads)
        yield
    finally:
        for p, x in zip(params, points, strict=True):
            if sharded.local(p).data_ptr() != x.data_ptr():  # some bases set p.data
                x.copy_(sharded.local(p))
        _hold(params, own, own_grads)


@not_compiled  # torch.compile cannot trace another dtype of a parameter
def _hold(
    params: Sequence[Tensor], shards: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> None:
    for p, shard, grad in zip(params, shards, grads, strict=True):
        p.grad = None  # a gradient has the dtype of its parameter
        sharded.refill(p, shard)
        p.grad = grad


def stepped_in_fp32(base: Optimizer) -> list[Tensor]:
    """The 16-bit parameters whose state is in fp32, because the base steps them in fp32.

    SODA keeps its state in fp32 by itself. An empty parameter is not stepped.
    """
    if isinstance(base, SODA):
        return []
    found = [p for group in base.param_groups for p in group["params"]]
    return [p for p in found if p.dtype in HALVES and p.numel()]


def load_in_fp32(base: Optimizer, state_dict: dict[str, Any]) -> None:
    """Load the base's state into fp32 parameters: torch casts it to their dtype."""
    params = stepped_in_fp32(base)
    shards = [sharded.local(p) for p in params]
    # one element of memory is enough, because only dtype, device and shape matter
    points = [x.new_zeros((), dtype=torch.float32).expand(x.shape) for x in shards]
    with in_fp32(params, points, [None] * len(params)):
        base.load_state_dict(state_dict)


def fp32_copies(tensors: list[Any]) -> list[Tensor]:
    """Copy tensors to fp32. On a GPU one launch copies all of them."""
    shards = [sharded.local(t) for t in tensors]
    copies = [torch.empty_like(shard, dtype=torch.float32) for shard in shards]
    torch._foreach_copy_(copies, shards)
    return [sharded.like(copy, t) for copy, t in zip(copies, tensors, strict=True)]
