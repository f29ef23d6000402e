"""Collective decisions: ranks that would wait for each other for ever raise the same error.

Before a step in which ranks share matrices, all ranks of a mesh or process group compare a hash of
the settings of the groups, the order and the shapes of the parameters that they share, the learning
rates, and the step of each of these parameters that has a gradient. The comparison is an all-reduce
of 16 bytes over gloo, which does not wait for the device. If the hashes differ, or if a rank failed
to prepare its step, the ranks exchange descriptions, and every rank raises the first difference.
After the step they compare once more whether a rank failed.

An all-reduce of gloo sends messages from rank to rank, all around the group, so its time grows with
the number of ranks. More than `FEW` ranks therefore form a grid, if their number has small factors,
and compare along one axis after the other: 16,384 ranks in five reductions of 8, 8, 8, 8 and 4
ranks.
"""

import hashlib
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeAlias

import torch

FEW = 8
"""The most ranks of one reduction, if the number of ranks has factors as small as this."""

Entry: TypeAlias = tuple[int, str, list[str]]
"""A rank, the text of its failure or "", and the lines that describe its step."""


class Failure(RuntimeError):
    """An error of one rank, or a difference between ranks, that all ranks raise."""


def partners(key: Any) -> Any:
    """The mesh or the process group of a `Sharing.key`."""
    return key[0] if isinstance(key, tuple) else key


def size(ranks: Any) -> int:
    """The number of ranks of a mesh or process group. None: of all ranks."""
    import torch.distributed as dist

    n: int = dist.get_world_size() if ranks is None else ranks.size()
    return n


def agree(
    ranks: Any, summary: object, describe: Callable[[], list[str]], failure: Failure | None
) -> None:
    """Raise the same `Failure` on every rank if their summaries or their failures differ.

    ranks: a mesh or a process group.
    summary: an object with a repr that must be the same on all ranks.
    describe: returns a line for each fact that must be the same. It is called if ranks differ.
    failure: the failure that this rank knows, or None.
    """
    import torch.distributed as dist

    error = str(failure or "")
    text = repr((summary, error))
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    # after the reductions: the least number, and minus the largest
    both = torch.tensor([number, -number], device="cpu")
    try:
        groups = _host_groups(ranks, dist.group.WORLD)
        for group in groups:
            dist.all_reduce(both, dist.ReduceOp.MIN, group)
        if both[0] == -both[1]:
            return
        found: list[Entry] = [(dist.get_rank(), error, describe())]
        for group in groups:
            theirs: list[Any] = [None] * group.size()
            dist.all_gather_object(theirs, found, group)
            found = _first_difference([entry for entries in theirs for entry in entries])
    except RuntimeError as e:
        raise RuntimeError(
            "some ranks did not call step() within the time-out of the process group: they "
            "stopped, or skipped a step that the other ranks took"
        ) from e
    raise Failure(_message(found)) from failure


def _first_difference(found: list[Entry]) -> list[Entry]:
    """Return the entry of the first rank that failed.

    If none failed, return those of the first rank and of the first one that differs from it.
    """
    found = sorted(found, key=lambda entry: entry[0])
    failed = [entry for entry in found if entry[1]]
    return failed[:1] or found[:1] + [entry for entry in found if entry[2] != found[0][2]][:1]


def _message(found: list[Entry]) -> str:
    (first, failure, ours), *others = found
    if failure:
        return failure
    for other, _, theirs in others:
        for a, b in zip([*ours, "nothing"], [*theirs, "nothing"], strict=False):
            if a != b:
                return (
                    f"the ranks disagree: rank {first} has {a}, but rank {other} has {b}. They "
                    "need the same parameters, settings and gradients (a gradient may be zero)"
                )
    return "internal error: the ranks disagree, but the descriptions of their steps are equal"


@lru_cache(maxsize=16)
def _host_groups(ranks: Any, world: Any) -> list[Any]:
    """The gloo groups of this rank, one for each axis of the grid of ranks.

    world: the default group, only a key of the cache. After a restart of torch.distributed within
    the process, the groups must be made again.
    """
    is_mesh = hasattr(ranks, "get_all_groups")
    groups = ranks.get_all_groups() if is_mesh else [ranks]
    return [small for group in groups for small in _small_groups(group)]


def _small_groups(group: Any) -> list[Any]:
    """Return the group itself if one reduction is enough and it speaks gloo, else new groups."""
    import torch.distributed as dist

    ranks = torch.tensor(dist.get_process_group_ranks(group), device="cpu")
    sizes = _factors(len(ranks))
    if len(sizes) == 1 and "cpu:gloo" in dist.get_backend_config(group):
        return [group]
    at = (ranks == dist.get_rank()).view(sizes).nonzero()[0].tolist()
    axes = [ranks.view(sizes).movedim(d, 0)[:, *at[:d], *at[d + 1 :]] for d in range(len(sizes))]
    # creating a group needs its members only, if all of them are in the same number of groups
    return [
        dist.new_group(axis.tolist(), _timeout(group), "gloo", use_local_synchronization=True)
        for axis in axes
    ]


def _factors(n: int) -> list[int]:
    """Factors of n, each at most FEW. The last one is larger if it has no such factor."""
    found = []
    while n > 1:
        found.append(next((f for f in range(FEW, 1, -1) if n % f == 0), n))
        n //= found[-1]
    return found


def _timeout(group: Any) -> timedelta:
    """The time-out of a process group. torch has no public way to read it. If this one goes, leave
    new groups at their default of 30 minutes."""
    time: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return time
