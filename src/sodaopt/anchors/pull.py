"""The pull x <- x + lam (z0 - x): one function, and an ordered table of implementations.

z0 comes as a `Source`: a tensor on any device and of any dtype, one number, or a seed. For each
pair of x and z0, the first entry of PULLS that handles it pulls it. No implementation makes a
second copy of all weights: a z0 of another dtype or device is cast or copied a slice at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from sodaopt import backends
from sodaopt.anchors.distributions import Seeded
from sodaopt.rounding import first_element

Source: TypeAlias = Tensor | float | Seeded
"""z0 of this rank's shard: a tensor, one number, or its seed."""

SLICES = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Elements of z0 that are made, cast or copied at a time: they fit a cache, or keep a GPU busy."""


class Implementation(NamedTuple):
    """An implementation of the pull.

    key: a function of x and z0. Pairs with the same key are pulled by one call of `run`. None: this
    implementation does not handle the pair.
    run: pulls, and yields after each operation that has moved some x.
    """

    name: str
    key: Callable[[Tensor, Any], Hashable | None]
    run: Callable[[list[Tensor], list[Any], float], Iterator[None]]


@backends.not_compiled
def pull_(xs: Sequence[Tensor], z0s: Sequence[Source], lam: float) -> None:
    """x <- x + lam (z0 - x) for each x, a rank's shard, in place.

    If it is interrupted, the weights that have moved are moved back, to rounding. With lam = 1, x
    is lost.

    >>> x = torch.tensor([1.0, 2.0])
    >>> anchors.pull_([x], [0.0], lam=0.5)
    >>> x
    tensor([0.5000, 1.0000])
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
    """The strength of the pull that undoes a pull: x = x1 + inverse (z0 - x1).

    >>> x = 1 + 0.2 * (5 - 1)  # a pull from 1 to 5
    >>> round(x + anchors.inverse(0.2) * (5 - x), 6)
    1.0
    """
    return lam / (lam - 1)


def _operations(xs: Sequence[Tensor], z0s: Sequence[Source], lam: float) -> Iterator[None]:
    """Pull the pairs that share an implementation and a key together."""
    calls: dict[Hashable, tuple[Implementation, list[Tensor], list[Any]]] = {}
    for x, z0 in zip(xs, z0s, strict=True):
        if not x.is_meta:
            chosen, key = _choose(x, z0)
            _, its_xs, its_z0s = calls.setdefault((chosen.name, key), (chosen, [], []))
            its_xs.append(x)
            its_z0s.append(z0)
    for chosen, its_xs, its_z0s in calls.values():
        yield from chosen.run(its_xs, its_z0s, lam)


def _choose(x: Tensor, z0: Source) -> tuple[Implementation, Hashable]:
    """Return the first implementation that handles the pair, and the key of the pair."""
    for one in PULLS:
        key = one.key(x, z0)
        if key is not None:
            return one, key
    raise AssertionError("the last implementation handles every pair")


def value(z0: Source, x: Tensor) -> Tensor:
    """z0 as a tensor with the dtype and device of x, without dimensions if it is a constant.

    >>> anchors.value(0.0, torch.ones(2))
    tensor(0.)
    """
    if isinstance(z0, Seeded):
        made = torch.zeros(x.shape, dtype=z0.p.dtype, device=x.device)
        pull_([made], [z0], 1.0)
        return made.to(x.dtype)
    if isinstance(z0, Tensor):
        return z0.to(x.device, x.dtype, non_blocking=x.is_cuda)  # the host must wait for a copy
    return x.new_full((), z0)


# -- the implementations --------------------------------------------------------------------------


def _is_alike(x: Tensor, z0: Source) -> Hashable | None:
    alike = isinstance(z0, Tensor) and z0.dtype == x.dtype and z0.device == x.device
    return True if alike else None


def _together(xs: list[Tensor], z0s: list[Tensor], lam: float) -> Iterator[None]:
    torch._foreach_lerp_(xs, z0s, lam)
    yield


def _number(x: Tensor, z0: Source) -> Hashable | None:
    """Zeros need one pass, so they have a key of their own."""
    return z0 == 0 if isinstance(z0, float) else None


def _to_numbers(xs: list[Tensor], numbers: list[float], lam: float) -> Iterator[None]:
    """Few calls however many tensors there are, and one pass if the numbers are zero."""
    if numbers[0] == 0:
        torch._foreach_add_(xs, xs, alpha=-lam)
    else:
        difference = torch._foreach_neg(xs)
        torch._foreach_add_(difference, numbers)
        torch._foreach_add_(xs, difference, alpha=lam)
    yield


def _kernel(x: Tensor, z0: Source) -> Hashable | None:
    if not (x.is_cuda and x.dtype == torch.float32 and isinstance(z0, Tensor)):
        return None
    same = z0.device == x.device and backends.readable(z0) and backends.readable(x)
    return (x.device, z0.dtype) if same and backends.usable(x.device) else None


def _by_kernel(xs: list[Tensor], z0s: list[Tensor], lam: float) -> Iterator[None]:
    from sodaopt.backends.triton import pull

    pull.pull_(xs, z0s, lam)
    yield


def _seed_kernel(x: Tensor, z0: Source) -> Hashable | None:
    if not (x.is_cuda and isinstance(z0, Seeded) and z0.spec.init.kind != "constant"):
        return None
    readable = backends.readable(x) and z0.p.dtype in backends.KERNEL_DTYPES
    if not readable or first_element(z0.p) is None or not backends.usable(x.device):
        return None
    return x.device, x.dtype, z0.spec.init.kind, z0.p.dtype


def _by_seed_kernel(xs: list[Tensor], z0s: list[Seeded], lam: float) -> Iterator[None]:
    from sodaopt.backends.triton import seeded

    streams = [
        seeded.Stream(first_element(p) or 0, s.stream, s.seed, s.init.a, s.init.spread)
        for s, p in z0s
    ]
    seeded.pull_(xs, streams, z0s[0].spec.init.kind, lam, z0s[0].p.dtype)
    yield


def _is_anything(x: Tensor, z0: Source) -> Hashable | None:
    return True


def _by_slices(xs: list[Tensor], z0s: list[Any], lam: float) -> Iterator[None]:
    for x, z0 in zip(xs, z0s, strict=True):
        for part, its_z0 in _slices(x, z0):
            part.lerp_(its_z0.to(x.device, x.dtype, non_blocking=x.is_cuda), lam)
            yield


def _slices(x: Tensor, z0: Tensor | Seeded) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of x with their z0. Tensors that memory holds in another order are not cut."""
    size = SLICES.get(x.device.type, SLICES["cpu"])
    is_small = x.numel() <= size
    if isinstance(z0, Tensor) and (is_small or not (x.is_contiguous() and z0.is_contiguous())):
        yield x, z0
    elif isinstance(z0, Tensor):
        flat = (torch.split(t.view(-1), size) for t in (x, z0))
        yield from zip(*flat, strict=True)
    elif not x.is_contiguous():  # channels_last, say
        yield x, z0.elements(0, x.numel()).view(x.shape)
    else:
        for begin in range(0, x.numel(), size):
            part = x.view(-1)[begin : begin + size]
            yield part, z0.elements(begin, begin + len(part))


PULLS = (  # the first that handles a pair pulls it
    Implementation("foreach", _is_alike, _together),
    Implementation("number", _number, _to_numbers),
    Implementation("triton", _kernel, _by_kernel),
    Implementation("triton seeded", _seed_kernel, _by_seed_kernel),
    Implementation("slices", _is_anything, _by_slices),
)
