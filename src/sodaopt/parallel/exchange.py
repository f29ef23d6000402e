"""The ranks that share parameters, and this rank's shards of these parameters.

`Sharing` says which ranks share a parameter. A map that needs whole matrices computes each of them
on one rank, its owner. `deal.py` decides which one, and `stages.py` sends the matrices to their
owners and the results back. A map that needs the lengths of rows or columns completes its sums over
shards by `Shards.sum`, in one reduction.
"""

import math
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from sodaopt._errors import times
from sodaopt.parallel import stages
from sodaopt.parallel.agree import Failure, host, publish, published, waiting
from sodaopt.parallel.deal import deal
from sodaopt.parallel.layout import Grid, Param, Placement, Round, boxes
from sodaopt.parallel.sharded import is_sharded, placement_of

T = TypeVar("T")
WHOLE = Placement((), (), ())
"""The placement of a plain parameter: no mesh cuts it."""


class Sharing:
    """The ranks that share parameters.

    process_group: the ranks that have the same plain parameters. None: every rank computes all
    plain parameters.
    dtype: the dtype in which matrices travel. None: their own dtype.
    label: a function that names a parameter in an error.
    failure: the first error of this step. The ranks compare it at the end of the step.
    every: the meshes and process groups that take part in this step.
    done: the meshes and process groups of the last step. It is empty during a step, and after a
    step that failed.
    verified: by mesh or process group, the number of parameters that its ranks have compared.
    silent: the groups whose ranks need not compare again, because all maps are elementwise.
    wrapper: the settings of the wrapper around the optimizer.
    fixed: (key, texts), a cache. texts are the settings that the ranks compare at each step, by
    mesh or process group. They are made again if the key, which identifies the groups, changes.
    """

    def __init__(self, process_group: Any = None, dtype: torch.dtype | None = None) -> None:
        self.process_group, self.dtype = process_group, dtype
        self.verified: dict[Any, int] = {}
        self.silent: Any = None
        self.wrapper = "no wrapper"
        self.fixed: tuple[Any, dict[Any, str]] = None, {}
        self.begin(lambda p: times(p.shape))

    def begin(self, label: Callable[[Tensor], str]) -> None:
        """Begin a step. At its end the ranks compare their failures."""
        self.label = label
        self.failure: Failure | None = None
        self.every: list[Any] = []
        self.done: list[Any] = []

    def publishing(self, work: Callable[[], T]) -> T:
        """Return work(). If it fails, show its error to the ranks that wait in their next step.

        Before the first shared step, no rank learns of it.
        """
        try:
            return work()
        except BaseException as e:
            with suppress(Exception):  # torch.distributed may have ended
                publish(self.done, str(self._failure(e, (), "prepare")))
            raise

    def attempt(
        self,
        work: Callable[[], T],
        instead: Callable[[], T],
        params: Sequence[Tensor] = (),
        doing: str = "compute",
    ) -> T:
        """Return work(). If it raises an error, keep the error and return instead().

        The other ranks wait for the messages of this rank, so it must go on until the end of the
        step. Then all ranks raise the error. If `work` fails before a collective of its own, the
        other ranks wait in this collective until the time-out.

        params: the parameters that the error names.
        doing: the verb of the error: a rank could not "compute" the step.
        """
        try:
            return work()
        except Exception as e:
            self.failure = self.failure or self._failure(e, params, doing)
            traceback.clear_frames(e.__traceback__)  # frees the tensors of the work
            return instead()

    def explained(self, e: BaseException, params: Sequence[Tensor] = ()) -> Failure:
        """Return the error that this rank raises alone because of an error e outside `attempt`.

        The cause may be an earlier error of this rank, or an error of another rank.
        """
        if isinstance(e, Failure):
            return e
        return self.failure or published(self.every) or self._failure(e, params, "compute")

    def _failure(self, e: BaseException, params: Sequence[Tensor], doing: str) -> Failure:
        import torch.distributed as dist

        names = [self.label(p) for p in dict.fromkeys(params)]
        names = names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"]
        cause = repr(e) if isinstance(e, KeyError) else str(e) or type(e).__name__
        who = f"rank {dist.get_rank()} could not {doing} the step"
        failure = Failure(": ".join(filter(None, (who, ", ".join(names), cause))))
        failure.__cause__ = e
        return failure

    def key(self, p: Any, has_work: bool = True) -> Any:
        """Return (ranks, replicated), or None if p is not shared.

        ranks: the mesh or process group. replicated: for each dimension of the mesh, whether it
        replicates p. Parameters with the same key have the same `Grid`.

        has_work: the ranks share work on p. Raise on all ranks of the mesh if they cannot.
        """
        if is_sharded(p):
            if not is_on_mesh(p):
                raise ValueError(
                    f"{self.label(p)} is on a mesh without this rank: on this rank, leave it out "
                    "of the optimizer"
                )
            key = p.device_mesh, tuple(cut is None for cut in placement_of(p).cuts)
            if has_work and (ranks := _unsorted(*key)):
                raise ValueError(
                    f"{self.label(p)} is on a mesh with the ranks {ranks}, which share its work: "
                    "sort them in ascending order"
                )
            return key
        return None if self.process_group is None else (self.process_group, ())


class Shards:
    """This rank's shards of parameters with one key (`Sharing.key`).

    shapes: the shapes of the whole parameters.
    placements: how the mesh cuts each of them.
    results: this rank's shards of the mapped tensors, after they have arrived.
    """

    results: list[Tensor] | None = None

    def __init__(self, sharing: Sharing, params: Sequence[Any]) -> None:
        import torch.distributed as dist

        self.sharing, self.params = sharing, params
        self.shapes = [p.shape for p in params]
        if is_sharded(params[0]):
            self.placements = [placement_of(p) for p in params]
            self.shard_group, self.replica_group = _groups(
                *sharing.key(params[0]), dist.group.WORLD
            )
            self.device = _device(params[0])
        else:
            self.placements = [WHOLE for _ in params]
            self.shard_group, self.replica_group = None, sharing.process_group
            self.device = params[0].device
        (R, r), (S, s) = map(_size_and_rank, (self.replica_group, self.shard_group))
        self.grid = Grid(R, S, r, s)

    def deal(self, numbers: Sequence[int], tensors: Sequence[Any]) -> list[Round]:
        """Deal the matrices to ranks, and cut the parameters into rounds.

        numbers: the index of each parameter's bucket, see `Param`.
        tensors: `Geometry.exchanged` of each parameter.
        """
        params = zip(numbers, map(tuple, self.shapes), self.placements, tensors, strict=True)
        return deal(self.grid, tuple(Param(*entry) for entry in params), stages.ROUND)

    def sum(self, parts: list[Tensor], dims: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return this rank's shards of sums over dims[j] of each parameter j.

        parts: the same sums over this rank's shard alone. The summed dimensions have length 1.
        Nothing travels if no mesh dimension cuts a summed one.
        """
        import torch.distributed as dist

        pairs = zip(self.placements, dims, strict=True)
        crosses = [{*placement.cuts} & {*summed} for placement, summed in pairs]
        if self.shard_group is None or not any(crosses):
            return parts
        shapes = [
            [1 if d in summed else n for d, n in enumerate(shape)]
            for shape, summed in zip(self.shapes, dims, strict=True)
        ]
        sizes = list(map(math.prod, shapes))
        flat = torch.zeros(sum(sizes), dtype=torch.float64, device=self.device)
        own = [
            view.view(shape)[self._own(j, dims[j])]
            for j, (view, shape) in enumerate(zip(torch.split(flat, sizes), shapes, strict=True))
        ]
        torch._foreach_copy_(own, parts)
        with waiting():
            dist.all_reduce(flat, group=self.shard_group)
        return [mine.to(part) for mine, part in zip(own, parts, strict=True)]

    def _own(self, j: int, summed: Sequence[int]) -> tuple[slice, ...]:
        """This rank's slice of the sums of parameter j."""
        box = boxes(tuple(self.shapes[j]), self.placements[j])[self.grid.s]
        return tuple(
            slice(0, 1) if d in summed else slice(axis.start, axis.stop)
            for d, axis in enumerate(box)
        )

    def over_rms(self, ds: list[Tensor], frames: Sequence[Any]) -> list[Tensor]:
        """Divide each matrix by its root mean square.

        An entry is then at most the root of the number of entries. fp16, whose largest number is
        65504, can therefore hold a matrix with 4e9 entries. The blocks of a fused layer are
        divided by the root mean square of all of them.
        """
        dims = [f.dims for f in frames]
        norm = partial(torch.linalg.vector_norm, keepdim=True, dtype=torch.float64)
        squares = [norm(d, dim=n).square() for d, n in zip(ds, dims, strict=True)]
        sums = self.sum(squares, dims)
        sizes = [math.prod(shape[d] for d in n) for shape, n in zip(self.shapes, dims, strict=True)]
        rms = [(x / size).sqrt().clamp(min=1e-30) for x, size in zip(sums, sizes, strict=True)]
        return [d / x.to(d) for d, x in zip(ds, rms, strict=True)]


def is_on_mesh(p: Any) -> bool:
    """Whether the mesh of p has this rank. True if p is not sharded."""
    return not is_sharded(p) or p.device_mesh.get_coordinate() is not None


def _device(p: Any) -> torch.device:
    """The device on which the mesh of p communicates. p may be offloaded to the host."""
    kind: str = p.device_mesh.device_type
    return p.to_local().device if p.device.type == kind else torch.device(kind)


@lru_cache(maxsize=64)
def _unsorted(mesh: Any, replicated: tuple[bool, ...]) -> list[int]:
    """Return the first unsorted group that `_groups` makes on any rank of the mesh, or [].

    The ranks of a group number shards or replicas in the group's order, which is ascending.
    """
    cut, same = _dims(replicated)
    for others, dims in ((same, cut), (cut, same)):
        number = math.prod(mesh.shape[d] for d in others)
        for ranks in mesh.mesh.permute(others + dims).reshape(number, -1).tolist():
            if ranks != sorted(ranks):
                return list(ranks)
    return []


@lru_cache(maxsize=64)
def _groups(mesh: Any, replicated: tuple[bool, ...], world: Any) -> tuple[Any, Any]:
    """The group of the S ranks with different shards, and the group of the R replicas.

    replicated: for each dimension of the mesh, whether it replicates.
    world: the default group, only a key of the cache. After a restart of torch.distributed within
    the process, the groups must be made again.
    """
    cut, same = _dims(replicated)
    return _group(mesh, cut), _group(mesh, same)


def _dims(replicated: tuple[bool, ...]) -> tuple[list[int], list[int]]:
    """The dimensions of a mesh that cut parameters, and those that replicate them."""
    dims = range(len(replicated))
    return [d for d in dims if not replicated[d]], [d for d in dims if replicated[d]]


def _size_and_rank(group: Any) -> tuple[int, int]:
    return (1, 0) if group is None else (group.size(), group.rank())


def _group(mesh: Any, dims: list[int]) -> Any:
    """The group of the ranks whose coordinates differ from this one's in these dimensions only.

    None: this rank is the only one.
    """
    import torch.distributed as dist

    dims = [d for d in dims if mesh.shape[d] > 1]
    if not dims:
        return None
    at = tuple(slice(None) if d in dims else n for d, n in enumerate(mesh.get_coordinate()))
    ranks = mesh.mesh[at].flatten().tolist()
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    if ranks == list(range(dist.get_world_size())):
        return dist.group.WORLD
    _join_as_many_groups(mesh)
    return dist.new_group(ranks, use_local_synchronization=True)


def _join_as_many_groups(mesh: Any) -> None:
    """Put this rank into groups of its own, until all ranks of the mesh are in as many groups.

    torch names a new group by the number of groups that a rank is in, and ranks find each other by
    this name. The number is private in torch. If torch renames it, ranks that are in fewer groups
    than others wait for ever.
    """
    import torch.distributed as dist

    count = len(dist.distributed_c10d._world.pg_names)
    (most,) = host(mesh).least(-count)
    for _ in range(-most - count):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
