"""The pull x <- x + lam (z0 - x): one function, and an ordered table of implementations.

z0 comes as a `Source`: a tensor on any device and of any dtype, one number, or a seed. For each
pair of x and z0, the first entry of PULLS that wants it pulls it. No implementation makes a second
copy of all weights: a z0 of another dtype or device is cast or copied a bucket at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from sodaopt import backends
from sodaopt.anchors.distributions import Seeded
from sodaopt.rounding import first_element

Source: TypeAlias = Tensor | float | Seeded
"""z0 of this rank's shard: a tensor, one number, or its seed."""
Pairs: TypeAlias = list[tuple[Tensor, Any]]

BUCKETS = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Bytes of z0 that are cast or copied at a time: they fit a cache, or keep a GPU busy."""


class Pull(NamedTuple):
    """An implementation. wants(x, z0) tells whether it handles the pair.

    run: pulls, and yields after each operation that has moved some x.
    """

    name: str
    wants: Callable[[Tensor, Source], bool]
    run: Callable[[Pairs, float], Iterator[None]]


@backends.not_compiled
def pull_(xs: Sequence[Tensor], z0s: Sequence[Source], lam: float) -> None:
    """x <- x + lam (z0 - x) for each x, a rank's shard, in place.

    If it is interrupted, what has moved is moved back, to rounding. With lam = 1, x is lost.
    """
    done = 0
    try:
        for _ in _operations(xs, z0s, lam):
            done += 1
    except BaseException:
        if lam != 1:
            for _ in islice(_operations(xs, z0s, inverse(lam)), done):
                pass
        raise


def inverse(lam: float) -> float:
    """The strength of the pull that undoes a pull: x = x1 + inverse (z0 - x1)."""
    return lam / (lam - 1)


def _operations(xs: Sequence[Tensor], z0s: Sequence[Source], lam: float) -> Iterator[None]:
    """Pull each x by the first implementation that wants it."""
    work: dict[int, Pairs] = {}
    for x, z0 in zip(xs, z0s, strict=True):
        if not x.is_meta:
            number = next(n for n, pull in enumerate(PULLS) if pull.wants(x, z0))
            work.setdefault(number, []).append((x, z0))
    for number, pairs in work.items():
        yield from PULLS[number].run(pairs, lam)


def value(z0: Source, x: Tensor) -> Tensor:
    """z0 as a tensor with the dtype and device of x, without dimensions if it is a constant."""
    if isinstance(z0, Seeded):
        made = torch.zeros(x.shape, dtype=z0.p.dtype, device=x.device)
        pull_([made], [z0], 1.0)
        return made.to(x.dtype)
    if isinstance(z0, Tensor):
        return z0.to(x.device, x.dtype, non_blocking=True)
    return x.new_full((), z0)


def _columns(pairs: Pairs) -> tuple[list[Tensor], list[Any]]:
    return [x for x, _ in pairs], [z0 for _, z0 in pairs]


# -- the implementations --------------------------------------------------------------------------


def _is_alike(x: Tensor, z0: Source) -> bool:
    return isinstance(z0, Tensor) and z0.dtype == x.dtype and z0.device == x.device


def _together(pairs: Pairs, lam: float) -> Iterator[None]:
    torch._foreach_lerp_(*_columns(pairs), lam)
    yield


def _is_number(x: Tensor, z0: Source) -> bool:
    return isinstance(z0, float)


def _to_numbers(pairs: Pairs, lam: float) -> Iterator[None]:
    """Few calls however many tensors there are, and one pass if the number is zero."""
    if zero := [x for x, z0 in pairs if z0 == 0]:
        torch._foreach_add_(zero, zero, alpha=-lam)
        yield
    if others := [(x, z0) for x, z0 in pairs if z0 != 0]:
        xs, numbers = _columns(others)
        difference = torch._foreach_neg(xs)
        torch._foreach_add_(difference, numbers)
        torch._foreach_add_(xs, difference, alpha=lam)
        yield


def _has_kernel(x: Tensor, z0: Source) -> bool:
    if not (x.is_cuda and x.dtype == torch.float32 and isinstance(z0, Tensor)):
        return False
    same = z0.device == x.device and backends.readable(z0) and backends.readable(x)
    return same and backends.usable(x.device)


def _by_kernel(pairs: Pairs, lam: float) -> Iterator[None]:
    from sodaopt.backends.triton import pull

    launches: dict[Any, Pairs] = {}
    for x, z0 in pairs:
        launches.setdefault((x.device, z0.dtype), []).append((x, z0))
    for launch in launches.values():
        pull.pull_(*_columns(launch), lam)
        yield


def _has_seed_kernel(x: Tensor, z0: Source) -> bool:
    if not (x.is_cuda and isinstance(z0, Seeded) and z0.spec.init.kind != "constant"):
        return False
    readable = backends.readable(x) and z0.p.dtype in backends.KERNEL_DTYPES
    return readable and first_element(z0.p) is not None and backends.usable(x.device)


def _by_seed_kernel(pairs: Pairs, lam: float) -> Iterator[None]:
    from sodaopt.backends.triton import seeded

    launches: dict[Any, list[tuple[Tensor, seeded.Stream]]] = {}
    for x, (spec, p) in pairs:
        start, init = first_element(p) or 0, spec.init
        stream = seeded.Stream(start, spec.stream, spec.seed, init.a, init.spread)
        launches.setdefault((x.device, x.dtype, init.kind, p.dtype), []).append((x, stream))
    for (*_, kind, dtype), launch in launches.items():
        seeded.pull_(*_columns(launch), kind, lam, dtype)
        yield


def _is_seeded(x: Tensor, z0: Source) -> bool:
    return isinstance(z0, Seeded)


def _by_slices(pairs: Pairs, lam: float) -> Iterator[None]:
    for x, z0 in pairs:
        if x.is_contiguous():
            flat = x.view(-1)
            for at, part in z0.slices(flat.numel()):
                flat[at].lerp_(part.to(x.dtype), lam)
                yield
        else:  # channels_last, say: elements are stored in another order than they are numbered
            parts = [part for _, part in z0.slices(x.numel())]
            x.lerp_(torch.cat(parts).view(x.shape).to(x.dtype), lam)
            yield


def _is_anything(x: Tensor, z0: Source) -> bool:
    return True


def _in_buckets(pairs: Pairs, lam: float) -> Iterator[None]:
    """Pull toward a z0 of another dtype or on another device, a bucket at a time."""
    sides: dict[tuple[torch.device, bool], Pairs] = {}
    for x, z0 in pairs:
        sides.setdefault((x.device, x.is_cuda and not z0.is_cuda), []).append((x, z0))
    for (device, from_host), side in sides.items():
        buckets = _buckets(side, BUCKETS.get(device.type, BUCKETS["cpu"]))
        for bucket in _prefetched(buckets, device) if from_host else buckets:
            yield from _together([(x, z0.to(x.device, x.dtype)) for x, z0 in bucket], lam)


PULLS = (  # the first that wants a pair pulls it
    Pull("foreach", _is_alike, _together),
    Pull("number", _is_number, _to_numbers),
    Pull("triton", _has_kernel, _by_kernel),
    Pull("triton seeded", _has_seed_kernel, _by_seed_kernel),
    Pull("seeded slices", _is_seeded, _by_slices),
    Pull("buckets", _is_anything, _in_buckets),
)


# -- buckets --------------------------------------------------------------------------------------


def _buckets(pairs: Pairs, size: int) -> Iterator[Pairs]:
    """The pairs in lists of at most `size` bytes of z0. Large contiguous tensors are cut."""
    bucket: Pairs = []
    used = 0
    for x, z0 in pairs:
        elements = size // z0.element_size()
        if x.numel() > elements and x.is_contiguous() and z0.is_contiguous():
            pieces = list(zip(*(torch.split(t.view(-1), elements) for t in (x, z0)), strict=True))
        else:
            pieces = [(x, z0)]
        for piece in pieces:
            n = _padded(piece[1])
            if bucket and used + n > size:
                yield bucket
                bucket, used = [], 0
            bucket.append(piece)
            used += n
    if bucket:
        yield bucket


def _padded(t: Tensor) -> int:
    """The tensor's bytes, rounded up to a multiple of 16 so that wide loads stay aligned."""
    return -(-t.nbytes // 16) * 16


def _prefetched(buckets: Iterator[Pairs], device: torch.device) -> Iterator[Pairs]:
    """The buckets with z0 copied from the host, each while the bucket before it is in use.

    The copies run on their own stream and alternate between two buffers. Fresh memory for each
    bucket would soon be as large as all of z0, because the host runs ahead of the device.
    """
    main, side = torch.cuda.current_stream(device), _side_stream(device)
    buffers: list[Tensor | None] = [None, None]
    released: list[torch.cuda.Event | None] = [None, None]  # when main was done with a buffer

    def send(n: int, bucket: Pairs) -> tuple[Pairs, torch.cuda.Event]:
        size, begin, copies = sum(_padded(z0) for _, z0 in bucket), 0, []
        with torch.cuda.stream(side):
            buffer, event = buffers[n % 2], released[n % 2]
            if event is not None:
                side.wait_event(event)
            if buffer is None or buffer.nbytes < size:
                if buffer is not None:
                    buffer.record_stream(main)
                most = max(size, BUCKETS["cuda"])
                buffer = buffers[n % 2] = torch.empty(most, dtype=torch.uint8, device=device)
            for x, z0 in bucket:
                copy = buffer[begin : begin + z0.nbytes].view(z0.dtype).view(z0.shape)
                copies.append((x, copy.copy_(z0, non_blocking=True)))
                begin += _padded(z0)
            return copies, side.record_event()

    sent = None
    try:
        for n, bucket in enumerate(chain(buckets, [None])):
            following = send(n, bucket) if bucket is not None else None
            if sent is not None:
                main.wait_event(sent[1])
                yield sent[0]
                released[(n - 1) % 2] = main.record_event()
            sent = following
    finally:
        for buffer in buffers:
            if buffer is not None:
                buffer.record_stream(main)  # it belongs to the side stream, and main has read it


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
