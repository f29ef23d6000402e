"""The matrices of a round travel to their owners, and the results back, in four stages:

    send     the pieces of the matrices travel to their owners    all-to-all among the S shards
    compute  the owners compute, and the results travel back      all-to-all among the S shards
    spread   the results travel to the other replicas             all-gather among the R replicas,
                                                                  or broadcasts if few have work
    write    each rank writes its pieces

Round n + 1 is sent before round n is computed, so on a GPU communication and computation overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from sodaopt.parallel.layout import Piece, Round, count

if TYPE_CHECKING:
    from sodaopt.parallel.exchange import Shards

Compute: TypeAlias = Callable[[list[Tensor]], list[Tensor]]
Arrival: TypeAlias = Callable[[], Tensor]
Arrivals: TypeAlias = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Stages:
    """The four stages of a round. The first three start a collective, and return a function that
    waits for it, which the next stage calls.

    map: maps a list of matrices.
    ds, out: this rank's shards, and its results.
    frames: how each parameter is a batch of matrices.
    dtype: the dtype in which matrices travel.
    """

    shards: Shards
    map: Compute
    ds: list[Tensor]
    out: list[Tensor]
    frames: Sequence[Any]
    dtype: torch.dtype

    def run(self, rounds: Sequence[Round]) -> None:
        """Take all rounds through the stages, each of them one stage behind the round before it."""
        # A new round is sent first. Then the oldest one goes on, so that its results do not wait
        # for the computation of a later one.
        order = (0, self.send), (3, self.write), (2, self.spread), (1, self.compute)
        arriving: dict[int, Any] = {}
        for time in range(len(rounds) + 3):
            for age, stage in order:
                if 0 <= (j := time - age) < len(rounds):
                    arriving[j] = stage(rounds[j], arriving.pop(j, None))

    def send(self, n: Round, _: None) -> Arrival | None:
        """Start to send the pieces of the matrices to their owners, unless these have them."""
        pieces = n.held[self.shards.grid.r]
        if not n.travels:
            return None
        return self._all_to_all(self._packed(pieces, self.ds), pieces, n.made_of)

    def compute(self, n: Round, arrived: Arrival | None) -> Arrival:
        """Compute this rank's matrices, and start to send the results back."""
        X = self._matrices(n, arrived)
        del arrived  # frees its memory before the computation
        packed = self._packed(n.made_of, self._mapped(n, X))
        if not n.travels:
            return lambda: packed
        return self._all_to_all(packed, n.made_of, n.held[self.shards.grid.r])

    def spread(self, n: Round, arrived: Arrival) -> Arrivals:
        """Start to send this replica's results to the other replicas."""
        part = arrived()
        if self.shards.grid.R == 1:
            return lambda: [part]
        return (self._all_gather if n.is_even else self._broadcast)(part, n.parts)

    def write(self, n: Round, arrived: Arrivals) -> None:
        """Write the results of all replicas."""
        _unpack(n.held, arrived(), self.out)

    def _matrices(self, n: Round, arrived: Arrival | None) -> list[Tensor]:
        """This rank's matrices of a round, as slices of their parameters."""
        grid, device = self.shards.grid, self.shards.device
        if arrived is None:
            return [self.ds[p.tensor][p.at].to(device) for p in n.held[grid.r][grid.s]]
        empty = partial(torch.empty, dtype=self.ds[0].dtype, device=device)
        X = [empty([len(axis) for axis in m.box]) for m in n.mine]
        _unpack([n.made_of], [arrived()], X)
        return X

    def _mapped(self, n: Round, X: list[Tensor]) -> list[Tensor]:
        """The results, or zeros after an error, because the other ranks wait for results. The error
        is raised on all ranks at the end of the step."""
        frames = [self.frames[m.param].one() for m in n.mine]
        try:
            U = self.map([f.fold(x)[0] for f, x in zip(frames, X, strict=True)]) if X else []
            return [f.unfold(u, x.shape) for f, u, x in zip(frames, U, X, strict=True)]
        except Exception as e:
            sharing, params = self.shards.sharing, self.shards.params
            together = len(self.ds) // len(params)
            names = dict.fromkeys(sharing.label(params[m.param // together]) for m in n.mine)
            sharing.failure = RuntimeError(f"{', '.join(names)}: {e}")
            sharing.failure.__cause__ = e
            return [torch.zeros_like(x) for x in X]

    def _packed(self, pieces: list[list[Piece]], tensors: Sequence[Tensor]) -> Tensor:
        """The pieces one after the other, on the device of the ranks' mesh."""
        flat = [tensors[p.tensor][p.at].reshape(-1) for one in pieces for p in one]
        empty = torch.empty(0, dtype=self.dtype, device=self.shards.device)
        return torch.cat(flat).to(empty) if flat else empty

    # -- collectives --------------------------------------------------------------------------

    def _all_to_all(
        self, packed: Tensor, sent: list[list[Piece]], received: list[list[Piece]]
    ) -> Arrival:
        """Start to send packed pieces to each shard, and to receive theirs."""
        import torch.distributed as dist

        to, from_ = list(map(count, sent)), list(map(count, received))
        result, group = packed.new_empty(sum(from_)), self.shards.shard_group
        work = dist.all_to_all_single(result, packed, from_, to, group, async_op=True)
        return lambda: self._waited([work], result, packed)

    def _all_gather(self, part: Tensor, sizes: list[int]) -> Arrivals:
        """Start to send this replica's results to the others, padded to the same length."""
        import torch.distributed as dist

        padded = torch.nn.functional.pad(part, (0, max(sizes) - len(part)))
        result = part.new_empty(len(sizes) * len(padded))
        # torch 2.13 has a new name for it
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = gather(result, padded, self.shards.replica_group, async_op=True)
        return lambda: self._waited([work], result, padded).view(len(sizes), -1).unbind()

    def _broadcast(self, part: Tensor, sizes: list[int]) -> Arrivals:
        """The same without padding, for parts of different lengths."""
        import torch.distributed as dist

        r, group = self.shards.grid.r, self.shards.replica_group
        parts = [part if n == r else part.new_empty(size) for n, size in enumerate(sizes)]
        works = [
            dist.broadcast(t, group=group, async_op=True, group_src=n)
            for n, t in enumerate(parts)
            if len(t)
        ]
        return lambda: [self._waited(works, t, t) for t in parts]

    def _waited(self, works: Sequence[Any], result: Tensor, sent: Tensor) -> Tensor:
        """Wait for collectives. `sent` is an argument so that its memory lives on."""
        try:
            for work in works:
                work.wait()
        except RuntimeError as e:
            names = ", ".join(map(self.shards.sharing.label, self.shards.params))
            raise RuntimeError(
                f"the exchange of {names} failed because another rank stopped or raised elsewhere: "
                "see the messages of the other ranks"
            ) from e
        return result


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
