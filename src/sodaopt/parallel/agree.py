"""Collective decisions: ranks that would wait for each other for ever raise the same error.

Before a step in which ranks share matrices, all ranks of a mesh or process group compare a hash. It
has the settings of the groups, the order and the shapes of the parameters that they share, the
learning rates, and the step of each parameter that has a gradient. The comparison is an all-reduce
of 16 bytes over gloo, which does not wait for the device. If the hashes differ, or if a rank failed
to prepare its step, two ranks write descriptions into the store, and every rank raises the first
difference. After the step they compare once more whether a rank failed.

A rank that cannot go on until the second comparison raises alone. It writes its error into the
store, where the others find it when their time-out has passed.

An all-reduce of gloo sends messages from rank to rank, all around the group. So many ranks form a
grid, with at most `FEW` ranks along each axis if their number has such factors, and compare along
one axis after the other: 16,384 ranks in five reductions of 8, 8, 8, 8 and 4 ranks.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch

FEW = 8
"""The most ranks of one reduction, if the number of ranks has factors as small as this."""
NONE = 1 << 62
"""A number larger than all ranks and hashes."""

ABSENT = (
    "some ranks did not call step() within the time-out of the process group: they stopped, or "
    "skipped a step that the other ranks took"
)


class Failure(RuntimeError):
    """An error of one rank, or a difference between ranks, that all ranks raise."""


class Refusal(Failure):
    """A failure before the step: no rank has changed a parameter."""


@lru_cache(maxsize=64)
def members(ranks: Any) -> list[int]:
    """The ranks of a mesh or process group in ascending order."""
    import torch.distributed as dist

    is_mesh = hasattr(ranks, "mesh")
    return sorted(ranks.mesh.flatten().tolist() if is_mesh else dist.get_process_group_ranks(ranks))


def order(ranks: Any, replicated: tuple[bool, ...] = ()) -> Any:
    """A number for sorting meshes, process groups and `Sharing.key`, alike on all their ranks.

    All ranks compare and exchange in this order, whatever the order of their parameters is.
    """
    names = tuple(getattr(ranks, "mesh_dim_names", None) or ())
    shape = tuple(getattr(ranks, "shape", ()))
    return len(members(ranks)), members(ranks), shape, names, replicated


def passes(every: list[Any]) -> list[Any]:
    """Return the sorted meshes and process groups in the order in which they compare.

    A failure must also reach the ranks of other meshes. The largest mesh comes last, and often has
    all ranks. Smaller ones compare again in the opposite order, so that they learn of failures
    elsewhere.
    """
    import torch.distributed as dist

    world = dist.get_world_size()
    return [*every, *(ranks for ranks in reversed(every) if len(members(ranks)) < world)]


class Host:
    """The ranks of a mesh or process group, as they communicate on the host.

    ranks: all these ranks, in ascending order.
    groups: a gloo group for each axis of the grid that they form.
    store: a store of their own.
    count: the number of comparisons so far, which all these ranks know.
    """

    def __init__(self, ranks: list[int], group: Any, world: Any) -> None:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import PrefixStore

        self.ranks, self.groups, self.count = ranks, list[Any](), 0
        sizes = _factors(len(ranks))
        name = hashlib.sha1(repr((ranks, sizes)).encode()).hexdigest()
        store = world.get_group_store()
        self.store = PrefixStore(f"sodaopt {group.group_name} {name}", store)
        grid, rank = torch.tensor(ranks, device="cpu").view(sizes), dist.get_rank()
        at = (grid == rank).nonzero()[0].tolist()
        for d in range(len(sizes)):
            axis = grid.movedim(d, 0)[:, *at[:d], *at[d + 1 :]].tolist()
            # dist.new_group names a group by the number of groups that a rank is in, which differs
            # between ranks if some are in more meshes than others. They would wait for ever.
            own = PrefixStore(f"{d} {axis}", self.store)
            time = _timeout(group)
            self.groups.append(dist.ProcessGroupGloo(own, axis.index(rank), len(axis), time))

    def least(self, *numbers: int) -> list[int]:
        """Return the least of each number over all ranks."""
        import torch.distributed as dist

        found = torch.tensor(numbers, device="cpu")
        for group in self.groups:
            group.allreduce([found], dist.ReduceOp.MIN).wait()
        return [int(n) for n in found.tolist()]

    def shown(self, number: int, has_failed: bool) -> list[int]:
        """The first rank that failed, or the first rank and the first one whose number differs."""
        import torch.distributed as dist

        rank, first = dist.get_rank(), self.ranks[0]
        (failed,) = self.least(rank if has_failed else NONE)
        if failed != NONE:
            return [failed]
        (firsts,) = self.least(number if rank == first else NONE)
        return [first, *self.least(NONE if number == firsts else rank)]

    def publish(self, text: str) -> None:
        """Show the error of this rank to ranks whose time-out will pass."""
        with suppress(RuntimeError):  # the store has gone
            if not self.store.check([f"alone {self.count}"]):  # the first error is the cause
                self.store.set(f"alone {self.count}", text)

    def published(self) -> Failure | None:
        """Return the error of a rank that raised alone since the last comparison."""
        with suppress(RuntimeError):
            if self.store.check([f"alone {self.count}"]):
                return Failure(self.store.get(f"alone {self.count}").decode())
        return None


HOSTS: dict[Any, Host] = {}


def host(ranks: Any) -> Host:
    """The `Host` of a mesh or process group. All its ranks make it together."""
    import torch.distributed as dist

    # the default group is a part of the key, because a restart of torch.distributed ends all hosts
    world: Any = dist.group.WORLD
    group, every = world if hasattr(ranks, "mesh") else ranks, members(ranks)
    key = world, group.group_name, tuple(every), tuple(_factors(len(every)))
    if key not in HOSTS:  # meshes of the same ranks have one host
        HOSTS[key] = Host(every, group, world)
    return HOSTS[key]


def published(every: Iterable[Any]) -> Failure | None:
    """Return the error of a rank of these meshes and process groups that raised alone."""
    found = (host(ranks).published() for ranks in every)
    return next(filter(None, found), None)


@contextmanager
def waiting() -> Iterator[None]:
    """Explain the error of a collective."""
    try:
        yield
    except RuntimeError as e:
        raise RuntimeError(
            "another rank stopped or raised elsewhere: see the messages of the other ranks"
        ) from e


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

    error, rank = str(failure or ""), dist.get_rank()
    text = repr((summary, error))
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    try:
        it = host(ranks)
    except RuntimeError as e:
        raise RuntimeError(ABSENT) from e
    try:
        least, most = it.least(number, -number)
        if least == -most:
            it.count += 1
            return
        shown = it.shown(number, bool(error))
        if rank in shown:
            it.store.set(f"{it.count} {rank}", json.dumps([error, describe()]))
        found = [json.loads(it.store.get(f"{it.count} {r}")) for r in shown]
    except RuntimeError as e:
        raise it.published() or RuntimeError(ABSENT) from e
    it.count += 1
    raise Failure(_message(shown, found)) from failure


def _message(ranks: list[int], found: list[tuple[str, list[str]]]) -> str:
    (failure, ours), *others = found
    if failure:
        return failure
    for other, (_, theirs) in zip(ranks[1:], others, strict=True):
        for a, b in zip([*ours, "nothing"], [*theirs, "nothing"], strict=False):
            if a != b:
                return (
                    f"the ranks disagree: rank {ranks[0]} has {a}, but rank {other} has {b}. They "
                    "need the same parameters, settings and gradients (a gradient may be zero)"
                )
    return "internal error: the ranks disagree, but the descriptions of their steps are equal"


def publish(every: Iterable[Any], text: str) -> None:
    """Show the error of this rank to all ranks of these meshes and process groups."""
    for ranks in every:
        host(ranks).publish(text)


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
