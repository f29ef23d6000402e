"""Maps that need whole matrices or whole rows, on parameters that several ranks share.

`Shards.deal` sends the matrices of a bucket to their owners, computes them there in batches, and
sends the results back. A round goes through four stages, and four rounds are under way at once:

    1  the pieces of the matrices travel to their owners      all-to-all among the S shards
    2  the owners compute, and the results travel back         all-to-all among the S shards
    3  the results travel to the other replicas                all-gather among the R replicas, or
                                                               broadcasts if few of them have work
    4  each rank writes its pieces

Round n + 1 starts to travel before round n is computed, so on a GPU communication and computation
overlap. `Shards.sum` adds numbers over shards in one reduction, for the lengths of rows and
columns. `layout.py` decides who computes what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sodaopt._errors import times
from sodaopt.parallel.layout import Grid, Piece, Placement, Plan, Round, boxes, count, plan
from sodaopt.parallel.sharded import is_sharded, placement_of

Compute: TypeAlias = Callable[[list[Tensor]], list[Tensor]]

ROUND_ELEMENTS = 1 << 24
"""Elements that an owner receives in a round, unless one matrix has more."""


class Sharing:
    """The ranks that share parameters, and the work that each has been dealt in this step.

    process_group: the ranks that have the same plain parameters, or None: plain parameters are
    then computed on every rank.
    dtype: the dtype in which matrices travel. None: their own dtype.
    label: names a parameter in an error.
    failure: the error of a computation on this rank. The ranks compare it at the end of a step.
    """

    def __init__(self, process_group: Any = None, dtype: torch.dtype | None = None) -> None:
        self.process_group, self.dtype = process_group, dtype
        self.begin(lambda p: times(p.shape), is_checked=False)

    def begin(self, label: Callable[[Tensor], str], is_checked: bool) -> None:
        """Begin a step.

        is_checked: the ranks compare their failures at its end. Otherwise they raise at once.
        """
        self.label, self.is_checked = label, is_checked
        self.failure: Exception | None = None
        self.loads: dict[Any, tuple[int, ...]] = {}

    def key(self, p: Any) -> Any:
        """Parameters with the same key share a grid of ranks. None: p is not shared."""
        if is_sharded(p):
            return p.device_mesh, tuple(cut is None for cut in placement_of(p).cuts)
        return self.process_group

    def shards(self, params: Sequence[Tensor]) -> Shards:
        """The shards of parameters with one key."""
        return Shards(self, params)


class Shards:
    """This rank's shards of parameters, and their exchange with other ranks.

    shapes: the shapes of the whole parameters.
    """

    def __init__(self, sharing: Sharing, params: Sequence[Any]) -> None:
        import torch.distributed as dist

        self.sharing, self.key, self.params = sharing, sharing.key(params[0]), params
        self.shapes = [p.shape for p in params]
        first = params[0]
        if is_sharded(first):
            self.cuts = [placement_of(p) for p in params]
            self.shard_group, self.replica_group, self.grid = _groups(*self.key, dist.group.WORLD)
            self.device = _device(first)
        else:
            group = self.replica_group = sharing.process_group
            self.grid = Grid(dist.get_world_size(group), 1, dist.get_rank(group), 0)
            one = Placement((self.grid.R,), (None,), (0,))
            self.cuts = [one for _ in params]
            self.shard_group, self.device = None, first.device

    # -- matrices -----------------------------------------------------------------------------

    def deal(
        self, compute: Compute, ds: list[Tensor], view: Callable[..., Any],
        shapes: Sequence[Sequence[int]] | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Apply compute, which maps a list of matrices, to the matrices of all parameters.

        ds: this rank's shards. The results are the same shards of the mapped parameters.
        view: how a parameter is a batch of matrices, see `sodaopt.geometry.views`.
        shapes: the shapes of the whole tensors, if ds has several matrices for each parameter. They
        are cut like the parameter, go to one owner, and travel in their own dtype.
        """
        shapes = self.shapes if shapes is None else shapes
        together = len(ds) // len(self.params)
        frames = [view(shape) for shape in shapes]
        out = [torch.empty_like(d, memory_format=torch.contiguous_format) for d in ds]
        rounds = self.plan(shapes, frames, together).rounds
        dtype = ds[0].dtype if together > 1 else self.sharing.dtype or ds[0].dtype
        _stagger([self._stages(n, compute, ds, frames, out, dtype) for n in rounds])
        return out

    def plan(self, shapes: Sequence[Sequence[int]], frames: Sequence[Any], together: int) -> Plan:
        """Deal the matrices to ranks, and add their work to the ranks' loads."""
        cuts = [cut for cut in self.cuts for _ in range(together)]
        params = tuple(zip(map(tuple, shapes), cuts, frames, strict=True))
        loads = self.sharing.loads.get(self.key) or (0,) * (self.grid.R * self.grid.S)
        made = plan(self.grid, params, loads, ROUND_ELEMENTS, together)
        self.sharing.loads[self.key] = made.loads
        return made

    def _stages(
        self, n: Round, compute: Compute, ds: list[Tensor], frames: Sequence[Any],
        out: list[Tensor], dtype: torch.dtype,
    ) -> Iterator[None]:  # fmt: skip
        mine = n.held[self.grid.r]
        wait: Callable[[], Tensor] | None = None
        if n.travels:
            wait = self._all_to_all(_packed(mine, ds, dtype, self.device), mine, n.made_of)
        yield
        X = self._matrices(n, ds, wait)
        folded = [frames[m.param].one().fold(x)[0] for m, x in zip(n.mine, X, strict=True)]
        results = self._computed(n, compute, folded, len(ds) // len(self.params))
        U = [
            frames[m.param].one().unfold(u, x.shape)
            for m, x, u in zip(n.mine, X, results, strict=True)
        ]
        packed = _packed(n.made_of, U, dtype, self.device)
        wait = self._all_to_all(packed, n.made_of, mine) if n.travels else lambda: packed
        yield
        spread = self._all_gather if n.is_even else self._broadcast
        parts = spread(wait(), n.parts)
        yield
        _unpack(n.held, parts(), out)

    def _computed(
        self, n: Round, compute: Compute, folded: list[Tensor], together: int
    ) -> list[Tensor]:
        """The results, or zeros after an error, because the other ranks wait for results. The error
        is raised on all ranks at the end of the step."""
        try:
            return compute(folded) if folded else []
        except Exception as e:
            if not self.sharing.is_checked:
                raise
            names = dict.fromkeys(
                self.sharing.label(self.params[m.param // together]) for m in n.mine
            )
            failure = RuntimeError(f"{', '.join(names)}: {e}")
            failure.__cause__ = e
            self.sharing.failure = failure
            return [torch.zeros_like(x) for x in folded]

    def _matrices(
        self, n: Round, ds: list[Tensor], wait: Callable[[], Tensor] | None
    ) -> list[Tensor]:
        """This rank's matrices of a round, as slices of their parameters."""
        if wait is None:
            own = n.held[self.grid.r][self.grid.s]
            return [ds[p.tensor][p.at].to(self.device) for p in own]
        empty = partial(torch.empty, dtype=ds[0].dtype, device=self.device)
        X = [empty([len(axis) for axis in m.box]) for m in n.mine]
        _unpack([n.made_of], [wait()], X)
        return X

    def _all_to_all(
        self, packed: Tensor, sent: list[list[Piece]], received: list[list[Piece]]
    ) -> Callable[[], Tensor]:
        """Start to send packed pieces to each shard. Return the function that waits for theirs."""
        import torch.distributed as dist

        to, from_ = list(map(count, sent)), list(map(count, received))
        result = packed.new_empty(sum(from_))
        work = dist.all_to_all_single(result, packed, from_, to, self.shard_group, async_op=True)
        return lambda: self._waited(work, result, packed)

    def _all_gather(self, part: Tensor, sizes: list[int]) -> Callable[[], Sequence[Tensor]]:
        """Start to send this replica's results to the others, padded to the same length."""
        import torch.distributed as dist

        if self.grid.R == 1:
            return lambda: [part]
        padded = torch.nn.functional.pad(part, (0, max(sizes) - len(part)))
        result = part.new_empty(self.grid.R * len(padded))
        # torch 2.13 has a new name for it
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = gather(result, padded, self.replica_group, async_op=True)
        return lambda: self._waited(work, result, padded).view(self.grid.R, -1).unbind()

    def _broadcast(self, part: Tensor, sizes: list[int]) -> Callable[[], Sequence[Tensor]]:
        """The same without padding, for parts of different lengths."""
        import torch.distributed as dist

        parts = [part if r == self.grid.r else part.new_empty(n) for r, n in enumerate(sizes)]
        works = [
            dist.broadcast(t, group=self.replica_group, async_op=True, group_src=r)
            for r, t in enumerate(parts)
            if len(t)
        ]
        return lambda: [self._waited(works, t, t) for t in parts]

    def _waited(self, work: Any, result: Tensor, sent: Tensor) -> Tensor:
        """Wait for one or more collectives. `sent` is an argument so that its memory lives on."""
        try:
            for one in work if isinstance(work, list) else [work]:
                one.wait()
        except RuntimeError as e:
            names = ", ".join(map(self.sharing.label, self.params))
            raise RuntimeError(
                f"the exchange of {names} failed because another rank stopped or raised elsewhere: "
                "see the messages of the other ranks"
            ) from e
        return result

    # -- numbers ------------------------------------------------------------------------------

    def sum(self, parts: list[Tensor], dims: Sequence[Sequence[int]]) -> list[Tensor]:
        """Complete sums over dims[j] of each parameter, from the sums over this rank's shard.

        Those dimensions must be kept, with length 1. Nothing travels if no sum crosses shards.
        """
        import torch.distributed as dist

        whole: dict[int, Tensor] = {}
        crossing = [
            j for j, p in enumerate(self.cuts) if self.shard_group and {*p.cuts} & {*dims[j]}
        ]
        shapes = {
            j: [1 if d in dims[j] else n for d, n in enumerate(self.shapes[j])] for j in crossing
        }
        sizes = [torch.Size(shapes[j]).numel() for j in crossing]
        flat = torch.zeros(sum(sizes), dtype=torch.float64, device=self.device)
        for j, view in zip(crossing, torch.split(flat, sizes), strict=True):
            whole[j] = view.view(shapes[j])[self._own(j, dims[j])]
            whole[j].copy_(parts[j])
        if crossing:
            dist.all_reduce(flat, group=self.shard_group)
        return [whole[j].to(t) if j in whole else t for j, t in enumerate(parts)]

    def _own(self, j: int, summed: Sequence[int]) -> tuple[slice, ...]:
        """This rank's slice of a parameter's sums."""
        box = boxes(tuple(self.shapes[j]), self.cuts[j])[self.grid.s]
        return tuple(
            slice(0, 1) if d in summed else slice(axis.start, axis.stop)
            for d, axis in enumerate(box)
        )


def _stagger(rounds: list[Iterator[None]]) -> None:
    """Run the stages of all rounds, one stage behind each other. The oldest round goes first, so
    that its results do not wait for a later round's computation."""
    running: list[Iterator[None]] = []
    for n in range(len(rounds) + 4):
        if n < len(rounds):
            next(rounds[n])
        running = [r for r in running if next(r, running) is not running]
        running += rounds[n : n + 1]


def _packed(
    pieces: list[list[Piece]], tensors: Sequence[Tensor], dtype: torch.dtype, device: Any
) -> Tensor:
    """The pieces one after the other, on the device of the ranks' mesh."""
    flat = [tensors[p.tensor][p.at].reshape(-1) for one in pieces for p in one]
    return torch.cat(flat).to(device, dtype) if flat else torch.empty(0, dtype=dtype, device=device)


def _unpack(
    pieces: list[list[list[Piece]]], packed: Sequence[Tensor], tensors: Sequence[Tensor]
) -> None:
    """Copy packed pieces to their places. packed[r] holds pieces[r], and then padding."""
    for row, part in zip(pieces, packed, strict=True):
        begin = 0
        for p in [p for one in row for p in one]:
            target = tensors[p.tensor][p.at]
            target.copy_(part[begin : begin + p.size].view(target.shape))
            begin += p.size


def _device(p: Any) -> torch.device:
    """Where the mesh of a DTensor communicates. Its shards may be offloaded to the host."""
    kind: str = p.device_mesh.device_type
    return p.to_local().device if p.device.type == kind else torch.device(kind)


@lru_cache(maxsize=64)
def _groups(mesh: Any, replicated: tuple[bool, ...], world: Any) -> tuple[Any, Any, Grid]:
    """The group of the S shards, the group of the R replicas, and the grid.

    world: the default group. After a restart within the process, groups must be made again.
    """
    at = mesh.get_coordinate()
    cut = [d for d, same in enumerate(replicated) if not same]
    same = [d for d, same in enumerate(replicated) if same]
    S, s = _flat_index(mesh.shape, at, cut)
    R, r = _flat_index(mesh.shape, at, same)
    return _group(mesh, cut), _group(mesh, same), Grid(R, S, r, s)


def _flat_index(shape: Sequence[int], at: Sequence[int], dims: list[int]) -> tuple[int, int]:
    """The number of coordinates along some dimensions of a mesh, and the index of this rank's."""
    size, index = 1, 0
    for d in dims:
        size, index = size * shape[d], index * shape[d] + at[d]
    return size, index


def _group(mesh: Any, dims: list[int]) -> Any:
    """The ranks that differ from this one along these dimensions of the mesh, or None if alone."""
    import torch.distributed as dist

    dims = [d for d in dims if mesh.shape[d] > 1]
    if not dims:
        return None
    at = tuple(slice(None) if d in dims else n for d, n in enumerate(mesh.get_coordinate()))
    ranks = mesh.mesh[at].flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(f"the ranks of the mesh are not in order ({ranks}): sort them")
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    if ranks == list(range(dist.get_world_size())):
        return dist.group.WORLD
    # torch names the group by the number of groups that a rank is in: it must be the same
    return dist.new_group(ranks, use_local_synchronization=True)
