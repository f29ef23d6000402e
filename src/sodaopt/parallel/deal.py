"""Which rank computes which matrix, and which parameters are in one round.

Every matrix has one owner, which computes it once for all ranks. A shard keeps its whole matrices
(experts sharded over experts), until their work is 1/S of the parameter's. All others are dealt one
by one, the largest of a group first, each to the rank with the least work so far. So a rank has at
most the mean work plus one matrix.

The parameters are cut into rounds. In a round, a rank's shards have at most `limit` elements, and
its matrices have at most `limit` too. If one matrix or one parameter's shard is larger, the limit
is its size.

All ranks deal alike, and need no communication for it.
"""

from collections import Counter
from functools import lru_cache
from heapq import heapreplace
from typing import Any

from sodaopt.parallel.layout import Grid, Kind, Param, Piece, Round


@lru_cache(maxsize=64)
def deal(grid: Grid, params: tuple[Param, ...], limit: int) -> list[Round]:
    """Deal the matrices of all parameters to ranks, and cut the parameters into rounds.

    limit: the most elements of a rank in a round.
    """
    owners, found = _owners(grid, params), list[Round]()

    def kind(p: Param, own: list[int]) -> Kind:
        travels = [owner % grid.S for owner in own] != [task.holder for task in p.tasks]
        return Kind(p.number, bool(p.tasks), travels)

    kinds = list(map(kind, params, owners))

    def order(j: int) -> Any:  # one shape after the other, because an owner computes it in a batch
        return params[j].number, -params[j].largest, kinds[j], params[j].shape

    for j in sorted(range(len(params)), key=order):
        p = params[j]
        if not found or not found[-1].fits(kinds[j], p, owners[j]):
            # allow one matrix for each shard, or two if shards are uneven
            one = min(grid.S * p.shard // max(len(p.tasks), 1), 2 * p.largest)
            held: list[list[Piece]] = [[] for _ in range(grid.R)]
            found.append(Round(grid, kinds[j], limit, max(limit, one), p.largest, held=held))
        found[-1].add(j, p, owners[j])
    return [round_.close() for round_ in found]


def _owners(grid: Grid, params: tuple[Param, ...]) -> list[list[int]]:
    """Return the rank r * S + s that computes each task of each parameter.

    First the matrices that stay, and then all others.
    """
    found, balance, left = [[0 for _ in p.tasks] for p in params], Balance(grid), []

    def order(j: int) -> Any:
        return params[j].number, -params[j].largest, params[j].shape

    for j in sorted(range(len(params)), key=order):
        share = sum(task.flops for task in params[j].tasks) / grid.S
        stays = Counter[int | None]()
        for n, task in enumerate(params[j].tasks):
            stays[task.holder] += task.flops
            if grid.S > 1 and task.holder is not None and stays[task.holder] <= share:
                found[j][n] = balance.add(task.flops, task.holder)
            else:
                left.append((j, n, task))
    for j, n, task in left:
        is_near = balance.least(task.holder) == balance.least(None)
        found[j][n] = balance.add(task.flops, task.holder if is_near else None)
    return found


class Balance:
    """The work of each rank r * S + s. A heap of all ranks and one for each s find the least."""

    def __init__(self, grid: Grid) -> None:
        self.work = [0] * (grid.R * grid.S)
        ranks = [(0, rank) for rank in range(len(self.work))]
        self.heaps: dict[int | None, list[tuple[int, int]]] = {None: ranks}
        self.heaps |= {s: ranks[s :: grid.S] for s in range(grid.S)}

    def add(self, flops: int, s: int | None) -> int:
        """Add work to the least busy rank with shard s, or of all ranks if s is None. Return it."""
        self.least(s)
        owner = self.heaps[s][0][1]
        self.work[owner] += flops
        return owner

    def least(self, s: int | None) -> int:
        """Return the least work of a rank with shard s, or of any rank if s is None."""
        heap = self.heaps[s]
        while heap[0][0] != self.work[heap[0][1]]:  # the rank was given work by another heap
            heapreplace(heap, (self.work[heap[0][1]], heap[0][1]))
        return heap[0][0]
