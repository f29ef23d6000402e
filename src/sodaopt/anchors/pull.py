"""The pull x <- x + lam (z0 - x): one function, which chooses among five implementations.

z0 comes as a `Source`: a tensor on any device and of any dtype, one number, or a seed. A z0 of
another dtype or device is cast or copied a slice at a time. Only a pull toward a number that is not
zero, such as a gain of 1, needs a temporary copy of the parameters.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sodaopt import backends
from sodaopt.anchors.distributions import Seeded
from sodaopt.rounding import first_element

Source: TypeAlias = Tensor | float | Seeded
"""z0 of this rank's shard: a tensor, one number, or its seed."""

SLICES = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Elements of z0 that are made, cast or copied at a time. On a CPU they fit into a cache, and on a
GPU they are enough to keep it busy."""


@backends.not_compiled
def pull_(xs: Sequence[Tensor], z0s: Sequence[Source], lam: float) -> None:
    """x <- x + lam (z0 - x) for each x, in place.

    If an operation fails, the operations before it are undone, unless lam is 1.

    xs: the points, which are this rank's shards.
    z0s: a `Source` for each point.
    lam: strength of the pull, in [0, 1], or the `inverse` of one.

    >>> x = torch.tensor([1.0, 2.0])
    >>> anchors.pull_([x], [0.0], lam=0.5)
    >>> x
    tensor([0.5000, 1.0000])
    """
    done = 0
    try:
        for pull, its_xs, its_z0s in _operations(xs, z0s):
            pull(its_xs, its_z0s, lam)
            done += 1
    except BaseException:
        _undo(xs, z0s, lam, done)
        raise


def _undo(xs: Sequence[Tensor], z0s: Sequence[Source], lam: float, done: int) -> None:
    """Undo the first operations of a pull. A pull with lam = 1 has no inverse."""
    if lam != 1:
        for pull, its_xs, its_z0s in islice(_operations(xs, z0s), done):
            pull(its_xs, its_z0s, inverse(lam))


def inverse(lam: float) -> float:
    """Return lam/(lam - 1), the strength that undoes a pull of strength lam.

    lam: in [0, 1).

    >>> anchors.inverse(0.5)
    -1.0
    """
    return lam / (lam - 1)


Implementation: TypeAlias = Callable[[list[Tensor], list[Any], float], None]
"""A function of some x, their z0 and lam. It pulls all of these x, or raises and pulls none."""
Operation: TypeAlias = tuple[Implementation, list[Tensor], list[Any]]
"""An implementation, and the x and z0 to call it with."""


def _operations(xs: Sequence[Tensor], z0s: Sequence[Source]) -> Iterator[Operation]:
    """Yield the operations that pull all x: one for each slice, and one for each other choice."""
    calls: dict[tuple[Implementation, Hashable], list[tuple[Tensor, Source]]] = {}
    for x, z0 in zip(xs, z0s, strict=True):
        if x.is_meta:
            continue
        if choice := _choose(x, z0):
            calls.setdefault(choice, []).append((x, z0))
        else:
            yield from _slices(x, z0)
    for (pull, _), pairs in calls.items():
        yield pull, [x for x, _ in pairs], [z0 for _, z0 in pairs]


def _choose(x: Tensor, z0: Source) -> tuple[Implementation, Hashable] | None:
    """Return the implementation that pulls x and a key, or None if x is pulled in slices.

    One call pulls all x of an implementation with equal keys.
    """
    match z0:
        case float():
            return _to_numbers, z0 == 0  # zeros need one pass
        case Tensor(dtype=x.dtype, device=x.device):
            return torch._foreach_lerp_, None
        case Tensor(device=x.device) if x.dtype == torch.float32 and backends.run_on(x, z0):
            return _by_kernel, (x.device, z0.dtype)
        case Seeded() if _has_seed_kernel(x, z0):
            return _by_seed_kernel, (x.device, x.dtype, z0.spec.init.kind, z0.p.dtype)
    return None


def value(z0: Source, x: Tensor) -> Tensor:
    """Return z0 as a tensor with the dtype and device of x, without dimensions if it is a constant.

    z0: a `Source`.
    x: the tensor that is pulled.

    >>> anchors.value(0.0, torch.ones(2))
    tensor(0.)
    """
    if isinstance(z0, Seeded):
        made = torch.zeros(x.shape, dtype=z0.p.dtype, device=x.device)
        pull_([made], [z0], 1.0)
        return made.to(x.dtype)
    if isinstance(z0, Tensor):
        # non-blocking to a GPU alone: the host would read the result before the copy is done
        return z0.to(x.device, x.dtype, non_blocking=x.is_cuda)
    return x.new_full((), z0)


# -- the implementations --------------------------------------------------------------------------


def _to_numbers(xs: list[Tensor], numbers: list[float], lam: float) -> None:
    """Pull all tensors to their numbers together, and in one pass if the numbers are zero."""
    if numbers[0] == 0:
        torch._foreach_add_(xs, xs, alpha=-lam)
    else:
        difference = torch._foreach_neg(xs)
        torch._foreach_add_(difference, numbers)
        torch._foreach_add_(xs, difference, alpha=lam)


def _by_kernel(xs: list[Tensor], z0s: list[Tensor], lam: float) -> None:
    from sodaopt.backends.triton import pull

    pull.pull_(xs, z0s, lam)


def _has_seed_kernel(x: Tensor, z0: Seeded) -> bool:
    if not backends.run_on(x) or z0.p.dtype not in backends.KERNEL_DTYPES:
        return False
    return z0.spec.init.kind != "constant" and first_element(z0.p) is not None


def _by_seed_kernel(xs: list[Tensor], z0s: list[Seeded], lam: float) -> None:
    from sodaopt.backends.triton import seeded

    specs, starts = [z0.spec for z0 in z0s], [first_element(z0.p) or 0 for z0 in z0s]
    seeded.pull_(xs, specs, starts, lam, z0s[0].p.dtype)


def _slices(x: Tensor, z0: Any) -> Iterator[Operation]:
    """Yield a pull for each part of x along its first dimension. z0 is a tensor or a seed."""
    x = x if x.dim() else x.view(1)
    inner = max(1, x.shape[1:].numel())
    rows = max(1, SLICES.get(x.device.type, SLICES["cpu"]) // inner)
    for begin in range(0, len(x), rows):
        part = x[begin : begin + rows]
        if isinstance(z0, Seeded):
            its_z0 = z0.elements(begin * inner, begin * inner + part.numel()).view(part.shape)
        else:
            its_z0 = z0.view(x.shape)[begin : begin + rows]
        yield torch._foreach_lerp_, [part], [value(its_z0, x)]
