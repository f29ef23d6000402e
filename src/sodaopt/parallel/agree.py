"""Collective decisions: ranks that would wait for each other for ever raise the same error.

Before a step in which shards travel, all ranks of a mesh (or of the process group) compare a hash.
It is a hash of the settings of the groups, the order and the shapes of their parameters, and the
step of each parameter that has a gradient. The comparison is an all-reduce of 16 bytes over gloo
for each dimension of the mesh. It does not wait for the device. If the hashes differ, or if a rank
failed to prepare its step, the ranks exchange descriptions, and every rank raises the first
difference. After the step they compare once more, in case a computation failed on one rank.

On more than `MANY` ranks, only the first step is checked, because the latency of gloo's ring grows
with the number of ranks. Ranks that disagree later stop at the time-out of their process group.
"""

import hashlib
import math
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
    doing: str,
    first: bool,
) -> None:
    """Raise on every rank unless all have the same summary and none failed.

    ranks: a mesh or a process group.
    describe: returns one line for each fact that must be the same.
    doing: the verb for an error: a rank could not "prepare" the step.
    first: it is the first step.
    """
    import torch.distributed as dist

    groups = _host_groups(ranks, dist.group.WORLD)
    if math.prod(map(dist.get_world_size, groups)) > MANY and not first:
        return
    text = repr((summary, failure))
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    both = torch.tensor([number, -number])
    found: list[Any] = []
    try:
        for group in groups:
            dist.all_reduce(both, dist.ReduceOp.MIN, group)
        if both[0] == -both[1]:
            return
        found = [(dist.get_rank(), None if failure is None else str(failure), describe())]
        for group in groups:
            theirs: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(theirs, found, group)
            found = [entry for entries in theirs for entry in entries]
    except RuntimeError as e:
        raise RuntimeError(
            "some ranks did not call step() within the time-out of the process group: they "
            "stopped, or skipped a step that the other ranks took"
        ) from e
    raise RuntimeError(_difference(found, doing)) from failure


def _difference(found: list[tuple[int, str | None, list[str]]], doing: str) -> str:
    for rank, failure, _ in found:
        if failure is not None:
            return f"rank {rank} could not {doing} the step: {failure}"
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
def _host_groups(ranks: Any, world: Any) -> list[Any]:
    """The groups for messages on the host: one for each dimension of a mesh, or one.

    world: the default group. After a restart within the process, groups must be made again.

    A new group needs only its members, if all of them are in the same number of groups.
    """
    import torch.distributed as dist

    is_mesh = hasattr(ranks, "get_all_groups")
    groups = ranks.get_all_groups() if is_mesh else [ranks]
    return [
        group
        if "cpu:gloo" in dist.get_backend_config(group)
        else dist.new_group(
            dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True
        )
        for group in groups
    ]
