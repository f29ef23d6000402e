"""Which rank holds which slice of a matrix, and the rounds in which matrices travel.

The ranks that share a parameter form a grid of R x S ranks: R replicas of the parameter, each cut
into S shards. The rank with the number r * S + s in this grid holds shard s of replica r:

    FSDP, tensor parallel, FSDP x TP    R = 1
    HSDP                                R replicas of S shards
    DDP                                 S = 1

A slice is a box: one range for each dimension of the parameter. The part of a matrix that one shard
holds is a piece. The rank that computes a matrix is its owner, see `deal.py`. All of this follows
from shapes and placements, without communication.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
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
    """The slice of each of the S shards, in the order of their ranks."""
    mesh = zip(placement.mesh, placement.cuts, strict=True)
    axes = [range(n if cut is not None else 1) for n, cut in mesh]
    return tuple(placement.box(shape, at) for at in product(*axes))


class Grid(NamedTuple):
    """R x S ranks, and the coordinates (r, s) of this rank."""

    R: int
    S: int
    r: int
    s: int


class Kind(NamedTuple):
    """The kind of a parameter. All parameters of a round have the same kind.

    number: see `Param`.
    has_tasks: whether matrices of the parameter are computed.
    travels: whether they travel, because some owner does not have its matrix whole.
    """

    number: int
    has_tasks: bool
    travels: bool


class Param(NamedTuple):
    """A parameter that ranks share.

    number: the index of its bucket, or in a prediction of its group. A round has one number only.
    shape, placement: the whole shape, and how the mesh cuts it.
    tensors: the shape and the frame (see `geometry.views`) of each tensor whose matrices are
    mapped. The mesh cuts them like the parameter.
    """

    number: int
    shape: Shape
    placement: Placement
    tensors: tuple[tuple[Shape, Any], ...]

    @property
    def shard_size(self) -> int:
        """The elements of the largest shard: of all tensors, or of the parameter if it has none."""
        shapes, first = [t[0] for t in self.tensors] or [self.shape], [0] * len(self.placement.mesh)
        return sum(_size(self.placement.box(shape, first)) for shape in shapes)

    @property
    def tasks(self) -> list["Task"]:
        return _tasks(self.placement, self.tensors)

    @property
    def largest(self) -> int:
        """The elements of the largest task."""
        return max((task.size for task in self.tasks), default=0)


class Task(NamedTuple):
    """Matrices that are mapped together: one of each tensor of a parameter.

    boxes: the slice of each tensor.
    size: the number of elements of the matrices.
    flops: the work, up to a constant factor.
    holder: the index of the shard that has the matrices whole, or None.
    """

    boxes: tuple[Box, ...]
    size: int
    flops: int
    holder: int | None


class Piece(NamedTuple):
    """The part of a matrix that one shard holds, as a slice of one of several tensors.

    tensor: the index of the tensor.
    at, size: the slice, and its number of elements.
    shard: the index of the shard that the piece goes to or comes from.
    """

    tensor: int
    at: tuple[slice, ...]
    size: int
    shard: int


@dataclass
class Round:
    """Parameters whose matrices travel and are computed together.

    limit: the most elements that a rank holds, and that it computes, unless the round is large.
    capacity: the limit that `fits` checks, which is larger if the first parameter needs more.
    params: the indices of the parameters.
    shard_size: the most elements that a rank holds.
    owned: the elements of the matrices that each rank r * S + s computes.
    work: the flops of each rank r * S + s.
    largest: the elements of the largest task.
    frames, shapes: the frame of each tensor, and the shape of this rank's shard of it.
    held: held[r] are the pieces of this rank's shards that replica r computes, sorted by the shard
    of their owner.
    parts: the elements of each held[r], set by `close`.
    mine: the index of the tensor and the shape of each matrix that this rank computes.
    made_of: the pieces of these matrices, sorted by the shard that holds them.
    """

    grid: Grid
    kind: Kind
    limit: int
    capacity: int
    largest: int
    params: list[int] = field(default_factory=list)
    shard_size: int = 0
    owned: Counter[int] = field(default_factory=Counter)
    work: Counter[int] = field(default_factory=Counter)
    frames: list[Any] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)
    held: list[list[Piece]] = field(default_factory=list)
    mine: list[tuple[int, Shape]] = field(default_factory=list)
    made_of: list[Piece] = field(default_factory=list)

    def fits(self, kind: Kind, p: Param, owners: list[int]) -> bool:
        """Whether the parameter has the round's kind, and adding it does not exceed `capacity`."""
        added = Counter[int]()
        for owner, task in zip(owners, p.tasks, strict=True):
            added[owner] += task.size
        most = max([self.shard_size + p.shard_size, *(self.owned[o] + n for o, n in added.items())])
        return kind == self.kind and most <= self.capacity

    def add(self, j: int, p: Param, owners: list[int]) -> None:
        """Add the parameter with index j. owners: the rank that computes each of its tasks."""
        _, S, r, s = self.grid
        tensors, first = [boxes(shape, p.placement) for shape, _ in p.tensors], len(self.frames)
        self.params.append(j)
        self.shard_size += p.shard_size
        self.frames += [frame for _, frame in p.tensors]
        self.shapes += [tuple(map(len, shards[s])) for shards in tensors]
        for owner, task in zip(owners, p.tasks, strict=True):
            self.owned[owner] += task.size
            self.work[owner] += task.flops
            for n, (box, shards) in enumerate(zip(task.boxes, tensors, strict=True), first):
                self.held[owner // S] += _piece(n, box, shards[s], shards[s], owner % S)
                if owner == r * S + s:
                    for t, shard in enumerate(shards):
                        self.made_of += _piece(len(self.mine), box, shard, box, t)
                    self.mine.append((n, tuple(map(len, box))))

    def close(self) -> "Round":
        """Sort the pieces as they are packed."""
        for pieces in (*self.held, self.made_of):
            pieces.sort(key=lambda p: p.shard)
        self.parts = [sum(p.size for p in pieces) for pieces in self.held]
        return self

    @property
    def size(self) -> int:
        """The most elements that a rank holds or computes."""
        return max([self.shard_size, *self.owned.values()])

    @property
    def travels(self) -> bool:
        """Whether this replica's matrices travel between its shards and the owners."""
        return self.kind.travels and any(owner // self.grid.S == self.grid.r for owner in self.work)

    @property
    def is_large(self) -> bool:
        """Whether a rank holds or computes more than `limit`, because of a large parameter."""
        return self.size > self.limit

    @property
    def is_even(self) -> bool:
        """Whether the results go to the other replicas by one all-gather instead of broadcasts.

        An all-gather pads all parts to the longest, which must not double the elements. A large
        round has no memory for padding.
        """
        padded = max(self.parts) * len(self.parts)
        return padded == sum(self.parts) if self.is_large else padded < 2 * sum(self.parts)


def located(rows: Sequence[list[Piece]], n: int) -> list[list[tuple[int, int, Piece]]]:
    """The pieces of each of n tensors, each as (row, offset of the piece in this row, piece).

    rows: lists of pieces that are packed one after the other.
    """
    found: list[list[tuple[int, int, Piece]]] = [[] for _ in range(n)]
    for r, row in enumerate(rows):
        begin = 0
        for p in row:
            found[p.tensor].append((r, begin, p))
            begin += p.size
    return found


def is_in_order(pieces: list[tuple[int, int, Piece]], shape: Sequence[int]) -> bool:
    """Whether a tensor's located pieces are packed in one row, in the tensor's own order."""
    if sum(p.size for *_, p in pieces) != math.prod(shape) or not pieces or not shape:
        return False
    (row, first, _), inner = pieces[0], math.prod(shape[1:])
    return all(r == row and begin - first == p.at[0].start * inner for r, begin, p in pieces)


def _piece(index: int, a: Box, b: Box, inside: Box, shard: int) -> Iterator[Piece]:
    """The common part of two boxes, if it is not empty, as a slice of the box `inside`."""
    both = [range(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True)]
    if all(both):
        at = [slice(x.start - y.start, x.stop - y.start) for x, y in zip(both, inside, strict=True)]
        yield Piece(index, tuple(at), _size(both), shard)


def _flops(o: int, i: int) -> int:
    """The work of the products of an o x i polar factor, up to a constant factor."""
    short, long = sorted((o, i))
    return short * short * (2 * long + short)


@lru_cache(maxsize=1024)
def _tasks(placement: Placement, tensors: tuple[tuple[Shape, Any], ...]) -> list[Task]:
    """The tasks of a parameter."""
    shards = list(zip(*(boxes(shape, placement) for shape, _ in tensors), strict=True))
    slices = list(zip(*(f.boxes(shape) for shape, f in tensors), strict=True))
    holders = [next((s for s, held in enumerate(shards) if _within(m, held)), None) for m in slices]
    flops = sum(_flops(f.o, f.i * f.taps) for _, f in tensors)
    return [
        Task(m, sum(map(_size, m)), flops, holder)
        for m, holder in zip(slices, holders, strict=True)
    ]


def _within(inner: Sequence[Box], outer: Sequence[Box]) -> bool:
    """Whether each inner box is part of the outer box with the same index."""
    return all(
        b.start <= a.start and a.stop <= b.stop
        for x, y in zip(inner, outer, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def _size(box: Sequence[range]) -> int:
    return math.prod(map(len, box))
