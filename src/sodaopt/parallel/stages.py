"""The matrices of a round travel to their owners, and the results back, in four stages:

    send     the pieces of the matrices travel to their owners    all-to-all among the S shards
    compute  the owners compute, and the results travel back      all-to-all among the S shards
    spread   the results travel to the other replicas             all-gather among the R replicas,
                                                                  or broadcasts if few have work
    finish   each rank steps its shards with the results

A round is some parameters whose matrices travel together. `deal.py` cuts the parameters into
rounds, and decides which rank owns which matrix. `order.py` has the order of all stages.

Each of the first three stages starts its collective, and the next stage waits for it. A round
larger than `ROUND` waits for its results within `compute`, which frees the tensor that was sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sodaopt.parallel.agree import waiting
from sodaopt.parallel.layout import Piece, Round, is_in_order, located
from sodaopt.parallel.sharded import local

if TYPE_CHECKING:
    from sodaopt.parallel.exchange import Shards

UNDER_WAY = 1 << 27
"""The most elements of all rounds under way on a rank. The temporary memory of a step is at most
UNDER_WAY elements and the largest matrix. Two larger numbers may count instead of UNDER_WAY: the
elements of a matrix, and twice the part of a stack of matrices that a rank has or computes, because
it is sent and received. If alpha_bar is not 0, this part counts three times, because its m_bar is a
new tensor."""

ROUND = UNDER_WAY // 8
"""The most elements of a round on a rank. Rounds that overlap have up to eight times as many in
memory: the shards and the matrices of a round that is sent, then the matrices, their batch and the
results of a round that is computed, then the results at the owner and at the shards of a round that
returns, and m_bar of one round."""

ALIGNED = 16
"""Copies of tensors in one tensor begin at multiples of this many elements: 64 bytes in fp32."""

STREAMS: dict[torch.device, Any] = {}
"""The stream of each device on which a rank that has replicas maps its matrices."""


@dataclass
class Exchange:
    """The exchange of one round's matrices.

    shards: this rank's shards of the round's parameters.
    map: `Geometry.mapped`, a function from a list of whole matrices to new tensors.
    tensors: a function that returns this rank's shards of all tensors. It is called when they are
    needed, so that temporary tensors do not live between stages.
    step: a function that steps the parameters with the results.
    dtype: the dtype of the tensors. They may travel in another one.
    is_alone: whether `step` does not communicate. Its error can then wait, see `Sharing.attempt`.
    arriving: a function that waits for the collective under way, and returns the tensor or the
    tensors that it fills.
    """

    shards: Shards
    round: Round
    map: Callable[[list[Tensor]], list[Tensor]]
    tensors: Callable[[], list[Tensor]]
    step: Callable[[], None]
    dtype: torch.dtype
    is_alone: bool
    arriving: Callable[[], Any] = lambda: None

    def send(self) -> None:
        """Start to send the pieces of the matrices to their owners, unless the owners have them."""
        if self.round.travels:
            packed = self._message(self._own, self._scaled())
            self._all_to_all(packed, self._own, self.round.made_of)

    def compute(self) -> None:
        """Compute this rank's matrices, and start to send the results back."""
        has_stream = self.shards.replica_group is not None and self.shards.device.type == "cuda"
        stream = _products_stream(self.shards.device) if has_stream else None
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            packed = self._message(self.round.made_of, self._mapped(self._matrices()))
            works = [stream.record_event()] if stream is not None else []
            self.arriving = lambda: self._waited(works, packed, packed)
            if self.round.travels:
                self._all_to_all(packed, self.round.made_of, self._own)
        if self.round.is_large and self.round.travels:  # wait: this frees the tensor that was sent
            results = self._arrived()
            self.arriving = lambda: results

    def spread(self) -> None:
        """Start to send this replica's results to the other replicas."""
        part = self._arrived()
        if self.round.grid.R == 1:
            self.arriving = lambda: [part]
        elif self.round.is_even:
            self._all_gather(part, self.round.parts)
        else:
            self._broadcast(part, self.round.parts)

    def finish(self) -> None:
        """Step the parameters with the results: this rank's shards of the mapped tensors."""
        finish = partial(self._finish, list(self._arrived()))
        if self.is_alone:
            self.shards.sharing.attempt(finish, lambda: None, self.shards.params)
        else:
            finish()
        self.shards.results = None

    def _finish(self, arrived: list[Tensor]) -> None:
        parts = [arrived.pop(0).to(self._shard_device, self.dtype) for _ in list(arrived)]
        self.shards.results = _unpacked(parts, self.round.held, self.round.shapes) or None
        del parts  # frees them if the results are copies
        self.step()

    @property
    def _own(self) -> list[Piece]:
        """The pieces of this rank's shards that ranks of its own replica compute."""
        return self.round.held[self.round.grid.r]

    @property
    def _message_dtype(self) -> torch.dtype:
        """The dtype in which the tensors travel: their own if a parameter has several tensors."""
        several = len(self.round.frames) > len(self.round.params)
        return self.dtype if several else self.shards.sharing.dtype or self.dtype

    @property
    def _shard_device(self) -> torch.device:
        """The device of this rank's shards, which may be offloaded to the host."""
        return local(self.shards.params[0]).device

    def _read(self) -> list[Tensor]:
        """This rank's shards of all tensors. They are zeros if `tensors` raises an error."""
        zero = partial(torch.zeros, dtype=self.dtype, device=self._shard_device)
        zeros = partial(map, zero, self.round.shapes)
        return list(self.shards.sharing.attempt(self.tensors, zeros, self.shards.params))

    def _scaled(self) -> list[Tensor]:
        """This rank's shards of all tensors, scaled if they travel in fp16."""
        tensors = self._read()
        if self._message_dtype == torch.float16:
            return self.shards.over_rms(tensors, self.round.frames)
        return tensors

    def _arrived(self) -> Any:
        """Wait for the collective under way, and free the tensor that was sent."""
        arriving, self.arriving = self.arriving, lambda: None
        return arriving()

    def _matrices(self) -> list[Tensor]:
        """The matrices that this rank computes, in the shapes of their slices, not folded."""
        round_ = self.round
        if round_.travels:
            arrived = self._arrived().to(self.dtype)
            return _unpacked([arrived], [round_.made_of], [shape for _, shape in round_.mine])
        tensors = self._read() if round_.mine else []
        return [tensors[p.tensor][p.at].to(self.shards.device) for p in self._own]

    def _mapped(self, X: list[Tensor]) -> list[Tensor]:
        """Return the results of the matrices X. They are zeros if the map raises an error."""
        round_ = self.round
        each = len(round_.frames) // len(round_.params)
        params = [self.shards.params[n // each] for n, _ in round_.mine]
        frames = [round_.frames[n].one() for n, _ in round_.mine]

        def mapped() -> list[Tensor]:
            U = self.map([f.fold(x)[0] for f, x in zip(frames, X, strict=True)]) if X else []
            return [f.unfold(u, x.shape) for f, u, x in zip(frames, U, X, strict=True)]

        def zeros() -> list[Tensor]:
            return [torch.zeros_like(x) for x in X]

        return self.shards.sharing.attempt(mapped, zeros, params)

    def _message(self, pieces: list[Piece], tensors: list[Tensor]) -> Tensor:
        """Pack the pieces of some tensors. The message is zeros if this raises an error."""

        def zeros() -> Tensor:
            tensors.clear()  # free them first, because the error may be a lack of memory
            n, dtype = sum(self._sizes(pieces)), self._message_dtype
            return torch.zeros(n, dtype=dtype, device=self.shards.device)

        packed = partial(self._packed, pieces, tensors)
        return self.shards.sharing.attempt(packed, zeros, self.shards.params)

    def _packed(self, pieces: list[Piece], tensors: Sequence[Tensor]) -> Tensor:
        """Return the pieces one after the other, on the device of the mesh, as one flat tensor.

        If the pieces are a single whole tensor, it is not copied.
        """
        device = self.shards.device
        if len(tensors) == 1 and is_in_order(located([pieces], 1)[0], tensors[0].shape):
            return tensors[0].reshape(-1).to(device, self._message_dtype)
        packed = torch.empty(sum(self._sizes(pieces)), dtype=self._message_dtype, device=device)
        slices = [tensors[p.tensor][p.at] for p in pieces]
        parts = torch.split(packed, [p.size for p in pieces])
        _copy([part.view(t.shape) for part, t in zip(parts, slices, strict=True)], slices)
        return packed

    # -- collectives --------------------------------------------------------------------------

    def _all_to_all(self, packed: Tensor, sent: list[Piece], received: list[Piece]) -> None:
        """Start to send each shard its packed pieces, and to receive the others' pieces."""
        import torch.distributed as dist

        to, from_ = self._sizes(sent), self._sizes(received)
        result, group = packed.new_empty(sum(from_)), self.shards.shard_group
        work = dist.all_to_all_single(result, packed, from_, to, group, async_op=True)
        self.arriving = lambda: self._waited([work], result, packed)

    def _sizes(self, pieces: list[Piece]) -> list[int]:
        """The elements that go to each shard, or come from it."""
        sizes = [0] * self.round.grid.S
        for p in pieces:
            sizes[p.shard] += p.size
        return sizes

    def _all_gather(self, part: Tensor, sizes: list[int]) -> None:
        """Start to send this replica's results to the others, padded to the same length."""
        import torch.distributed as dist

        padding = max(sizes) - len(part)
        padded = torch.nn.functional.pad(part, (0, padding)) if padding else part
        result = part.new_empty(len(sizes) * len(padded))
        # torch 2.13 has a new name for it
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = gather(result, padded, self.shards.replica_group, async_op=True)
        self.arriving = lambda: self._waited([work], result, padded).view(len(sizes), -1).unbind()

    def _broadcast(self, part: Tensor, sizes: list[int]) -> None:
        """Start to send this replica's results to the others without padding, one by one."""
        import torch.distributed as dist

        r, group = self.shards.grid.r, self.shards.replica_group
        parts = [part if n == r else part.new_empty(size) for n, size in enumerate(sizes)]
        works = [
            dist.broadcast(t, group=group, async_op=True, group_src=n)
            for n, t in enumerate(parts)
            if len(t)
        ]
        self.arriving = lambda: [self._waited(works, t, t) for t in parts]

    def _waited(self, works: Sequence[Any], result: Tensor, sent: Tensor) -> Tensor:
        """Wait for collectives or for products, then return the result.

        sent: the tensor that is sent. `arriving` holds it until they end.
        """
        with waiting(), torch.cuda.device_of(result):  # type: ignore[no-untyped-call]
            for work in works:
                work.wait()
        # a tensor of another stream would be freed, and its memory used again, too early
        for t in (result, sent) if result.is_cuda else ():
            t.record_stream(torch.cuda.current_stream(t.device))
        return result


def _products_stream(device: torch.device) -> Any:
    """Return the stream on which matrices are mapped. It waits for the current stream first.

    If the products ran on the current stream, the results of other replicas would wait for them.
    """
    if device not in STREAMS:
        STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    STREAMS[device].wait_stream(torch.cuda.current_stream(device))
    return STREAMS[device]


def _unpacked(
    packed: Sequence[Tensor], rows: Sequence[list[Piece]], shapes: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Return tensors of these shapes from their packed pieces.

    packed[r] has the pieces of rows[r] in their order. If the pieces of a tensor are packed in the
    tensor's own order, it is a view of them.
    """
    found, targets, sources = [], list[Tensor](), list[Tensor]()
    places = list(zip(located(rows, len(shapes)), shapes, strict=True))
    copied = [math.prod(shape) for pieces, shape in places if not is_in_order(pieces, shape)]
    # Copies share one tensor, so that matrices of one shape are a batch. Each is aligned like a
    # tensor of its own, because the rounding of products depends on it.
    copied = [-(-n // ALIGNED) * ALIGNED for n in copied]
    copies = iter(torch.split(packed[0].new_empty(sum(copied)), copied))
    for pieces, shape in places:
        if is_in_order(pieces, shape):
            r, begin, _ = pieces[0]
            found.append(packed[r][begin : begin + math.prod(shape)].view(shape))
            continue
        found.append(next(copies)[: math.prod(shape)].view(shape))
        targets += [found[-1][p.at] for *_, p in pieces]
        sources += [packed[r][begin : begin + p.size] for r, begin, p in pieces]
    _copy(targets, [t.view(at.shape) for t, at in zip(sources, targets, strict=True)])
    return found


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
