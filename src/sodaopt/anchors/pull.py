"""x <- x + lam (z0 - x) for z0 wherever it lies: in place, or a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, compress
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sodaopt import backends as kernels
from sodaopt import native
from sodaopt._bare import is_bare
from sodaopt.rounding import HALVES

Piece: TypeAlias = tuple[Tensor, Tensor, torch.dtype]
"""An x, its z0 wherever that is, and the dtype in which z0 counts."""

BELOW_HALF = 0.5 - 2**-25
"""Here lerp_ has the form x + lam (z - x), also where lam is rounded to fp32."""
FUSED = frozenset((torch.float32, torch.float64))
LARGE = 1 << 15
"""Elements from which on `native` is faster than torch."""
BUCKETS = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Bytes of z0 that are cast or brought over at a time: what stays in a cache, and costs little."""


@torch._disable_dynamo  # type: ignore[attr-defined]  # streams, and as many calls as buckets
def pull_in_buckets_(far: list[Piece], lam: Any) -> None:
    far = _pull_as_they_are_(far, lam)
    sides: dict[tuple[torch.device, torch.dtype, bool], list[Piece]] = {}
    for x, z, dtype in far:
        over = x.is_cuda and not z.is_cuda
        sides.setdefault((x.device, x.dtype, over), []).append((x, z, dtype))
    for (device, dtype, over), pieces in sides.items():
        buckets = _buckets(pieces, BUCKETS.get(device.type, BUCKETS["cpu"]))
        room = torch.empty(0, dtype=dtype, device=device)
        for bucket in _ahead(buckets, device) if over else buckets:
            n = sum(_rounded(x.numel()) for x, _, its in bucket if its != dtype)
            room = room if room.numel() >= n else torch.empty(n, dtype=dtype, device=device)
            lerp_([x for x, _, _ in bucket], _cast(bucket, room), lam)


def _pull_as_they_are_(far: list[Piece], lam: Any) -> list[Piece]:
    """Pull toward a z0 of another dtype on x's own device, where there is a pass that widens it on
    the way. Returns the others."""
    rest, here = [], []
    launches: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for x, z, dtype in far:
        if dtype not in (x.dtype, z.dtype):
            rest.append((x, z, dtype))
        elif _is_fast(lam) and _is_native(x, z):
            here.append((x, z))
        elif isinstance(lam, float) and _is_for_triton(x, z):
            launch = launches.setdefault((x.device, x.dtype, z.dtype), ([], []))
            launch[0].append(x)
            launch[1].append(z)
        else:
            rest.append((x, z, dtype))
    if here:
        native.pull_([x for x, _ in here], [z for _, z in here], lam)
    for launch in launches.values():
        from sodaopt.backends.triton import pull

        pull.pull_(*launch, lam)
    return rest


def _cast(bucket: list[Piece], room: Tensor) -> list[Tensor]:
    """Each z0 in its x's dtype, written into the room: new memory for each bucket is slower, and so
    is a copy at a time."""
    at, out = 0, []
    guests: tuple[list[Tensor], list[Tensor]] = [], []
    for x, z, dtype in bucket:
        z = z.to(x.device).to(dtype)
        if z.dtype != x.dtype:
            guests[0].append(room[at : at + z.numel()].view(z.shape))
            guests[1].append(z)
            at += _rounded(z.numel())
            z = guests[0][-1]
        out.append(z)
    if guests[0]:
        torch._foreach_copy_(*guests)
    return out


def _buckets(pieces: list[Piece], room: int) -> Iterator[list[Piece]]:
    """The same in lists of at most `room` bytes, for which large tensors are cut."""
    bucket: list[Piece] = []
    used = 0
    for x, z, dtype in pieces:
        flat = x.is_contiguous() and z.is_contiguous()  # else, such as channels_last, in one piece
        for x_, z_ in zip(*(_cut(t, room // z.element_size(), flat) for t in (x, z)), strict=True):
            if bucket and used + _aligned(z_) > room:
                yield bucket
                bucket, used = [], 0
            bucket.append((x_, z_, dtype))
            used += _aligned(z_)
    if bucket:
        yield bucket


def _cut(t: Tensor, elements: int, flat: bool) -> Sequence[Tensor]:
    return torch.split(t.view(-1), elements) if flat and t.numel() > elements else (t,)


def _aligned(t: Tensor) -> int:
    return _rounded(t.nbytes)


def _rounded(n: int) -> int:
    """Up to a multiple of 16, where wide loads begin."""
    return -(-n // 16) * 16


def _ahead(buckets: Iterator[list[Piece]], device: torch.device) -> Iterator[list[Piece]]:
    """The buckets with their z0 brought from the host, each on its way while the one before it is
    in use. The copies run on a stream of their own, which does not wait for what the device still
    has to do, and go into two rooms in turn: fresh memory for each bucket would, since the host
    runs ahead of the device, soon be as large as z0."""
    main, side = torch.cuda.current_stream(device), _side_stream(device)
    rooms: list[Tensor | None] = [None, None]
    left: list[torch.cuda.Event | None] = [None, None]  # when the last guest of a room was used

    def send(n: int, bucket: list[Piece]) -> tuple[list[Piece], torch.cuda.Event]:
        size, at, there = sum(_aligned(z) for _, z, _ in bucket), 0, []
        with torch.cuda.stream(side):
            room, event = rooms[n % 2], left[n % 2]
            if event is not None:
                side.wait_event(event)
            if room is None or room.nbytes < size:
                if room is not None:
                    room.record_stream(main)
                most = max(size, BUCKETS["cuda"])
                room = rooms[n % 2] = torch.empty(most, dtype=torch.uint8, device=device)
            for x, z, dtype in bucket:
                guest = room[at : at + z.nbytes].view(z.dtype).view(z.shape)
                there.append((x, guest.copy_(z, non_blocking=True), dtype))
                at += _aligned(z)
            return there, side.record_event()

    sent = None
    try:
        for n, bucket in enumerate(chain(buckets, [None])):
            next_ = send(n, bucket) if bucket is not None else None
            if sent is not None:
                main.wait_event(sent[1])
                yield sent[0]
                left[(n - 1) % 2] = main.record_event()
            sent = next_
    finally:
        for room in rooms:
            if room is not None:
                room.record_stream(main)  # its memory is the side stream's, and main has read it


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def lerp_(xs: list[Tensor], zs: list[Tensor], lam: Any) -> None:
    """x <- x + lam (z - x), each z of its x's shape and dtype.

    Plain tensors on the CPU go through `native` where they are large and that was built, else
    through fused SGD with the gradient z and the weight decay -1: the same to the bit below 1/2,
    where lerp_ has this form too, and a tenth faster. Both read memory from end to end, so what is
    not contiguous must not get there.
    """
    if not (_is_fast(lam) and all(map(_is_plain, xs)) and all(map(_is_plain, zs))):
        torch._foreach_lerp_(xs, zs, lam)
        return
    large = [x.numel() >= LARGE and (x.dtype, x.dtype) in native.PULLS for x in xs]
    if any(large):
        native.pull_(list(compress(xs, large)), list(compress(zs, large)), lam)
    if not all(large):
        small = [not is_large for is_large in large]
        xs, zs = list(compress(xs, small)), list(compress(zs, small))
        torch._fused_sgd_(
            xs, zs, [], weight_decay=-1.0, momentum=0.0, lr=-lam, dampening=0.0,
            nesterov=False, maximize=False, is_first_step=True,
        )  # fmt: skip
        torch.autograd.graph.increment_version(xs)  # which it does not do


def lerp_to_numbers_(xs: list[Tensor], zs: list[float], lam: Any) -> None:
    """x <- x + lam (z - x) for a number z each: one pass over x where that is zero or x is large,
    and few calls however many small ones there are."""
    if not _is_fast(lam):
        for x, z in zip(xs, zs, strict=True):
            x.lerp_(x.new_full((), z), lam)
        return
    if zero := [x for x, z in zip(xs, zs, strict=True) if z == 0]:
        torch._foreach_add_(zero, zero, alpha=-lam)
    small: tuple[list[Tensor], list[float]] = [], []
    for x, z in zip(xs, zs, strict=True):
        if z != 0 and x.numel() >= LARGE:  # without a copy
            x.lerp_(x.new_full((), z), lam)
        elif z != 0:
            small[0].append(x)
            small[1].append(z)
    if small[0]:
        way = torch._foreach_neg(small[0])
        torch._foreach_add_(way, small[1])
        torch._foreach_add_(small[0], way, alpha=lam)


def _is_fast(lam: Any) -> bool:
    """Whether the other forms of a lerp are the same bits, in fp32 and fp64. (Compiled, each lam
    would be another program.)"""
    return isinstance(lam, float) and lam < BELOW_HALF and not torch.compiler.is_compiling()


def _is_plain(t: Tensor) -> bool:
    return t.dtype in FUSED and t.is_cpu and is_bare(t)


def _is_native(x: Tensor, z: Tensor) -> bool:
    return (
        (x.dtype, z.dtype) in native.PULLS and x.is_cpu and z.is_cpu and is_bare(x) and is_bare(z)
    )


def _is_for_triton(x: Tensor, z: Tensor) -> bool:
    return (
        x.is_cuda
        and x.device == z.device
        and x.dtype == torch.float32
        and z.dtype in HALVES
        and is_bare(x)
        and is_bare(z)
        and kernels.usable("pull", x.device)
    )
