"""Which rank computes which matrix, and which parameters are in one round.

Every matrix has one owner, a rank that computes it once for all ranks. A matrix that one shard has
whole (an expert, if each shard has some of the experts) stays with this shard, until the work that
stays there is 1/S of the parameter's. All others are dealt one by one, the largest of a bucket
first, each to the rank with the least work so far. So a rank has at most the mean work plus one
matrix.

The parameters are cut into rounds. In a round, a rank's shards have at most `limit` elements, and
the matrices that it computes have at most `limit` too. A round may have more if its first
parameter, which has the largest matrix, needs more. See `Round.capacity`.

Every rank deals all matrices, with the same result, so this needs no communication.
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

    def order(j: int) -> Any:  # equal shapes together: an owner computes them in one batch
        return params[j].number, -params[j].largest, kinds[j], params[j].shape

    for j in sorted(range(len(params)), key=order):
        p = params[j]
        if not found or not found[-1].fits(kinds[j], p, owners[j]):
            # Let each of the S shards own a matrix of this size. If shards are uneven, the first
            # ones then hold more elements than a matrix has: allow at most twice as many.
            one = min(grid.S * p.shard_size // max(len(p.tasks), 1), 2 * p.largest)
            held: list[list[Piece]] = [[] for _ in range(grid.R)]
            found.append(Round(grid, kinds[j], limit, max(limit, one), p.largest, held=held))
        found[-1].add(j, p, owners[j])
    return [round_.close() for round_ in found]


def _owners(grid: Grid, params: tuple[Param, ...]) -> list[list[int]]:
    """Return the rank r * S + s that computes each task of each parameter.

    Tasks that stay with their shard are dealt first. For the others, a rank that has the matrices
    whole is preferred among the least busy ranks.
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
        is_near = balance.first(task.holder)[0] == balance.first(None)[0]
        found[j][n] = balance.add(task.flops, task.holder if is_near else None)
    return found


class Balance:
    """The work of each rank r * S + s.

    The least busy rank is found by a heap of all ranks, and by one heap for each s.
    """

    def __init__(self, grid: Grid) -> None:
        self.work = [0] * (grid.R * grid.S)
        ranks = [(0, rank) for rank in range(len(self.work))]
        self.heaps: dict[int | None, list[tuple[int, int]]] = {None: ranks}
        self.heaps |= {s: ranks[s :: grid.S] for s in range(grid.S)}

    def add(self, flops: int, s: int | None) -> int:
        """Add work to the least busy rank with shard s, or of all ranks if s is None. Return it."""
        _, owner = self.first(s)
        self.work[owner] += flops
        return owner

    def first(self, s: int | None) -> tuple[int, int]:
        """Return (work, rank) of the least busy rank with shard s, or of all ranks if s is None."""
        heap = self.heaps[s]
        while heap[0][0] != self.work[heap[0][1]]:  # work was added through another heap
            heapreplace(heap, (self.work[heap[0][1]], heap[0][1]))
        return heap[0]
