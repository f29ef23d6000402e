"""Which rank holds which slice of a matrix, and which rank computes it.

The ranks that share a parameter form a grid of R x S ranks. S ranks hold different shards,
and each shard has R replicas:

    FSDP, tensor parallel, FSDP x TP    R = 1
    HSDP                                R replicas of S shards
    DDP                                 S = 1

Every matrix has one owner, which computes it once for all ranks. The heaviest matrix goes to the
rank with the least work so far, then the next one. So a rank has at most the mean work
plus one matrix. If each shard of a parameter has whole matrices (experts sharded over experts), a
matrix is owned by a rank that has it, and does not travel to its owner. Such matrices may be dealt
unevenly. The other matrices travel in rounds. In a round, an owner receives at most `limit` / R
elements, or one matrix, so a rank's shards have about `limit` elements.

A slice is a box: one range for each dimension of the parameter. Everything here is arithmetic with
shapes, alike on every rank, and needs no communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import heapreplace
from itertools import product
from typing import Any, NamedTuple, TypeAlias

Box: TypeAlias = tuple[range, ...]
Shape: TypeAlias = tuple[int, ...]


class Placement(NamedTuple):
    """How a mesh cuts a parameter.

    mesh: the mesh's shape.
    cuts: for each dimension of the mesh, the dimension of the parameter that it cuts, or None if it
    replicates.
    order: the dimensions of the mesh in the order in which they cut.
    """

    mesh: Shape
    cuts: tuple[int | None, ...]
    order: tuple[int, ...]

    def box(self, shape: Shape, at: Sequence[int]) -> Box:
        """The slice that the rank at these mesh coordinates holds. As in torch.chunk, the last
        ranks may hold less, or nothing."""
        box = [range(n) for n in shape]
        for d in self.order:
            if (cut := self.cuts[d]) is not None:
                size = -(-len(box[cut]) // self.mesh[d])
                box[cut] = box[cut][at[d] * size : (at[d] + 1) * size]
        return tuple(box)


@lru_cache(maxsize=1024)
def boxes(shape: Shape, placement: Placement) -> tuple[Box, ...]:
    """The slice of each of the S shards."""
    mesh = zip(placement.mesh, placement.cuts, strict=True)
    axes = [range(n if cut is not None else 1) for n, cut in mesh]
    return tuple(placement.box(shape, at) for at in product(*axes))


class Grid(NamedTuple):
    """R x S ranks, and this rank's place (r, s) among them."""

    R: int
    S: int
    r: int
    s: int


class Matrix(NamedTuple):
    """A matrix to compute.

    param: the index of the parameter.
    box: the matrix's slice of it.
    flops: the work, up to a factor.
    holder: the shard that holds the whole matrix, or None.
    """

    param: int
    box: Box
    flops: int
    holder: int | None


class Piece(NamedTuple):
    """A slice of one of several tensors, by its index."""

    tensor: int
    at: tuple[slice, ...]
    size: int


class Round(NamedTuple):
    """The matrices that are computed together.

    travels: shards hold parts of the matrices, which travel to the owner. Otherwise the owner's
    shard has them whole.
    mine: the matrices of this rank.
    held: held[r][s] are the pieces of this rank's shards that rank (r, s) computes.
    made_of: made_of[s] are the pieces of `mine` that shard s holds.
    """

    travels: bool
    mine: list[Matrix]
    held: list[list[list[Piece]]]
    made_of: list[list[Piece]]

    @property
    def parts(self) -> list[int]:
        """The elements of this rank's shards that each replica computes."""
        return [sum(map(count, row)) for row in self.held]

    @property
    def is_even(self) -> bool:
        """Whether an all-gather among the replicas, which pads all parts to the longest, moves
        less than twice the elements. Else each replica broadcasts its part."""
        return max(self.parts) * len(self.parts) <= 2 * sum(self.parts)


class Plan(NamedTuple):
    """The rounds of a bucket, and the work of each rank r * S + s after them."""

    grid: Grid
    rounds: list[Round]
    loads: tuple[int, ...]

    @property
    def computed(self) -> int:
        """The number of matrices that this rank computes."""
        return sum(len(r.mine) for r in self.rounds)

    def elements_received(self) -> tuple[int, int]:
        """The elements that this rank receives from other shards, and from other replicas with
        padding included."""
        S, r, s = self.grid[1:]
        shards = replicas = 0
        for n in self.rounds:
            if n.travels:
                others = [n.held[r][t] + n.made_of[t] for t in range(S) if t != s]
                shards += sum(map(count, others))
            parts = n.parts
            replicas += (len(parts) - 1) * max(parts) if n.is_even else sum(parts) - parts[r]
        return shards, replicas

    def elements_under_way(self) -> int:
        """The most elements of rounds that are in memory at once, while one round is sent, the
        round before it is computed, and the one before that returns."""
        R, r = self.grid.R, self.grid.r
        sent, computed, returned = list[int](), [0], [0, 0]  # a round comes to each one later
        for n in self.rounds:
            mine, parts = sum(_size(m.box) for m in n.mine), n.parts
            gathered = 0 if R == 1 else R * max(parts) if n.is_even else sum(parts)
            sent.append(n.travels * (parts[r] + mine))
            computed.append(2 * mine + n.travels * max(parts[r], mine))
            returned.append(n.travels * mine + parts[r] + gathered)
        return max(map(sum, zip([*sent, 0, 0], [*computed, 0], returned, strict=True)))


def count(pieces: list[Piece]) -> int:
    """The number of elements of pieces."""
    return sum(piece.size for piece in pieces)


def buckets(R: int, params: Sequence[tuple[Shape, Placement, int]], limit: int) -> list[list[int]]:
    """Cut a bucket into smaller ones, and return the indices of their parameters.

    A rank's shards of a bucket have at most the elements of eight rounds. If matrices are larger
    than a round, a bucket has two for each rank, so that no rank is idle and the second travels
    while the first is computed. Matrices of one shape are next to each other, because their owners
    compute them in batches.

    params: the shape and the placement of each parameter, and the number of its matrices.
    limit: the elements of a round, as in `plan`.
    """
    matrices = [math.prod(shape) // n for shape, _, n in params]
    found: list[list[int]] = []
    left = 0  # elements that still fit
    for j in sorted(range(len(params)), key=lambda j: (-matrices[j], params[j][0])):
        shape, placement, _ = params[j]
        largest_shard = _size(placement.box(shape, [0] * len(placement.mesh)))
        if not found or largest_shard > left:
            found.append([])
            left = max(8 * limit, 2 * R * matrices[j])
        found[-1].append(j)
        left -= largest_shard
    return found


@lru_cache(maxsize=1024)
def plan(
    grid: Grid,
    params: tuple[tuple[Shape, Placement, Any], ...],
    loads: tuple[int, ...],
    limit: int,
    together: int = 1,
) -> Plan:
    """Deal the matrices of parameters to ranks.

    params: the shape, the placement and the frame (see `geometry.views`) of each parameter.
    loads: the work that each rank r * S + s has already.
    limit: the elements of a rank's shards in a round. Each of R replicas computes its part of them.
    together: the number of consecutive matrices that go to one owner, in one round.
    """
    held = [boxes(shape, placement) for shape, placement, _ in params]
    matrices = [
        Matrix(j, box, _flops(f.o, f.i * f.taps), holder)
        for j, (shape, placement, f) in enumerate(params)
        for box, holder in zip(f.boxes(shape), _holders(shape, placement, f), strict=True)
    ]
    jobs = [matrices[j : j + together] for j in range(0, len(matrices), together)]
    balance, rounds = Balance(loads, grid.S), dict[tuple[bool, int], list[tuple[int, Matrix]]]()
    filled: dict[tuple[bool, int], tuple[int, int]] = {}
    for job in sorted(jobs, key=lambda job: (-sum(m.flops for m in job), job[0].param)):
        holders = {m.holder for m in job}
        holder = holders.pop() if len(holders) == 1 else None
        travels, size = holder is None, sum(_size(m.box) for m in job)
        owner = balance.add(sum(m.flops for m in job), holder)
        number, elements = filled.get((travels, owner), (0, 0))
        if elements and elements + size > limit // grid.R:
            number, elements = number + 1, 0
        filled[travels, owner] = number, elements + size
        rounds.setdefault((travels, number), []).extend((owner, m) for m in job)
    order = sorted(rounds, key=lambda key: (not key[0], key[1]))  # those that travel come first
    made = [_round(grid, travels, rounds[travels, n], held) for travels, n in order]
    return Plan(grid, made, tuple(balance.work))


class Balance:
    """The work of each rank r * S + s. A heap for all ranks and one for each s find the least."""

    def __init__(self, loads: Sequence[int], S: int) -> None:
        self.work = list(loads)
        ranks = [(work, rank) for rank, work in enumerate(loads)]
        self.heaps: dict[int | None, list[tuple[int, int]]] = {None: sorted(ranks)}
        self.heaps |= {s: sorted(ranks[s::S]) for s in range(S)}

    def add(self, flops: int, s: int | None) -> int:
        """Give work to the rank with the least, of all or of shard s, and return this rank."""
        heap = self.heaps[s]
        while heap[0][0] != self.work[heap[0][1]]:  # this rank has got work through another heap
            heapreplace(heap, (self.work[heap[0][1]], heap[0][1]))
        owner = heap[0][1]
        self.work[owner] += flops
        return owner


def _round(
    grid: Grid, travels: bool, dealt: list[tuple[int, Matrix]], shards: list[tuple[Box, ...]]
) -> Round:
    held: list[list[list[Piece]]] = [[[] for _ in range(grid.S)] for _ in range(grid.R)]
    made_of: list[list[Piece]] = [[] for _ in range(grid.S)]
    mine: list[Matrix] = []
    for owner, m in dealt:
        r, s = divmod(owner, grid.S)
        own = shards[m.param][grid.s]
        held[r][s] += _piece(m.param, m.box, own, own)
        if (r, s) == (grid.r, grid.s):
            for t in range(grid.S):
                made_of[t] += _piece(len(mine), m.box, shards[m.param][t], m.box)
            mine.append(m)
    return Round(travels, mine, held, made_of)


def _piece(index: int, a: Box, b: Box, inside: Box) -> Iterator[Piece]:
    """The common part of two boxes, if it is not empty, as a slice of the box `inside`."""
    both = [range(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True)]
    if all(both):
        at = [slice(x.start - y.start, x.stop - y.start) for x, y in zip(both, inside, strict=True)]
        yield Piece(index, tuple(at), _size(both))


def _flops(o: int, i: int) -> int:
    """The products of an o x i polar factor, up to a factor."""
    short, long = sorted((o, i))
    return short * short * (2 * long + short)


@lru_cache(maxsize=1024)
def _holders(shape: Shape, placement: Placement, frame: Any) -> list[int | None]:
    """The shard that holds each matrix of a parameter whole, or None if no shard does. Also None if
    some shards are empty: their ranks would have no work."""
    shards, matrices = boxes(shape, placement), frame.boxes(shape)
    if not all(map(_size, shards)):
        return [None for _ in matrices]
    return [next((s for s, b in enumerate(shards) if _within(m, b)), None) for m in matrices]


def _within(inner: Box, outer: Box) -> bool:
    return all(b.start <= a.start and a.stop <= b.stop for a, b in zip(inner, outer, strict=True))


def _size(box: Sequence[range]) -> int:
    return math.prod(map(len, box))
