"""Collective decisions: ranks that would wait for each other for ever raise the same error.

Before a step in which shards travel, all ranks of a mesh (or of the process group) compare a number
that is computed from the settings of the groups, the order and the shapes of their parameters, and
the step of each parameter that has a gradient. That is one all-reduce of 16 bytes on the host, over
gloo, which does not wait for the device. If the numbers differ, or if a rank failed to prepare its
step, the ranks exchange descriptions, and every rank raises the first difference.

On more than `MANY` ranks, only the first step is checked, because the latency of gloo's ring grows
with the number of ranks. Ranks that disagree later stop at the time-out of their process group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

MANY = 256


def partners(key: Any) -> Any:
    """The ranks that share parameters with this one: a mesh or a process group."""
    return key[0] if isinstance(key, tuple) else key


def agree(
    ranks: Any,
    summary: object,
    describe: Callable[[], list[str]],
    failure: Exception | None,
    first: bool,
) -> None:
    """Raise on every rank unless all have the same summary and none failed.

    ranks: a mesh or a process group.
    describe: returns one line for each fact that must be the same.
    first: it is the first step.
    """
    import torch.distributed as dist

    group = _host_group(ranks, dist.group.WORLD)
    if dist.get_world_size(group) > MANY and not first:
        return
    text = repr((summary, failure))
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    both = torch.tensor([number, -number])
    try:
        dist.all_reduce(both, dist.ReduceOp.MIN, group)
        if both[0] == -both[1]:
            return
        found: list[Any] = [None] * dist.get_world_size(group)
        mine = dist.get_rank(), None if failure is None else str(failure), describe()
        dist.all_gather_object(found, mine, group)
    except RuntimeError as e:
        raise RuntimeError(
            "some ranks did not call step() within the time-out of the process group: they "
            "stopped, or skipped a step that the other ranks took"
        ) from e
    raise RuntimeError(_difference(found)) from failure


def _difference(found: list[tuple[int, str | None, list[str]]]) -> str:
    for rank, failure, _ in found:
        if failure is not None:
            return f"rank {rank} could not prepare the step: {failure}"
    (first, _, ours) = found[0]
    for other, _, theirs in found[1:]:
        for a, b in zip([*ours, "nothing"], [*theirs, "nothing"], strict=False):
            if a != b:
                return (
                    f"the ranks disagree: rank {first} has {a}, but rank {other} has {b}. They "
                    "need the same parameters, settings and gradients (a gradient may be zero)"
                )
    return "the ranks disagree, but describe their steps alike"


@lru_cache(maxsize=16)
def _host_group(ranks: Any, world: Any) -> Any:
    """The group for messages on the host: the ranks' own group if it has gloo, else a new one."""
    import torch.distributed as dist

    if hasattr(ranks, "get_coordinate"):  # a mesh
        numbers = sorted(ranks.mesh.flatten().tolist())
        own = ranks.get_group() if ranks.ndim == 1 else None
    else:
        numbers, own = dist.get_process_group_ranks(ranks), ranks
    if own is not None and "gloo" in dist.get_backend(own):
        return own
    return dist.new_group(numbers, backend="gloo", use_local_synchronization=True)
