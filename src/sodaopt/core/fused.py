"""Steps of a bucket by Triton kernels on a GPU.

A geometry names its kernel (`Geometry.kernel`). "polar" is two passes before the products and one
after them. The other kernels take the whole step in one pass.

A step is planned once: tables tell the kernels where the tensors of each parameter are. At each
step the addresses are read again, and the tables are written again if one has changed. The numbers
of the step (coefficients, k) are one small tensor on the device.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sodaopt import backends, rounding, schedules
from sodaopt.anchors import Source
from sodaopt.core.update import Bucket
from sodaopt.geometry.polar import SMALLEST, Newton
from sodaopt.geometry.views import Shape, View
from sodaopt.parallel import sharded
from sodaopt.schedules import Number

WORKSPACE = 112 << 20
SHARE = 1 / 8
"""The matrices of one shape are multiplied in parts. A part takes at most WORKSPACE bytes, or this
share of the bucket's parameters if that is more."""


def is_fusable(p: Tensor, state: dict[str, Any], kernel: str, z0: Source | None) -> bool:
    """Whether the kernel can read the parameter, its gradient, state and z0."""
    if p.dtype in rounding.HALVES and rounding.first_element(p) is None:
        return False
    moments = [state[name] for name in ("m", "v") if name in state]
    if any(t.dtype != torch.float32 for t in moments):
        return False
    tensors: list[Any] = [p, p.grad, *moments]
    if type(p) not in backends.PLAIN:
        if kernel == "polar" or not sharded.is_placed_like(p.grad, p):
            return False
        tensors = [sharded.local(t) for t in tensors]
    if isinstance(z0, Tensor):
        tensors.append(z0)
    elif z0 is not None and not isinstance(z0, float):
        return False
    return backends.readable_together(tensors)


class Fused:
    """One step of a bucket by kernels. A subclass writes `_rows`, `_launch` and `_run`.

    written: the tensors that the kernels write to.
    pointers: functions that return the addresses of all p, then of all m, v and z0.
    coefs: see `Geometry.kernel_coefs`.
    """

    def __init__(self, b: Bucket) -> None:
        from sodaopt.backends.triton.tables import Table

        shards = [sharded.local(p) for p in b.params]
        moments = [[_local(s.get(name)) for s in b.state] for name in ("m", "v")]
        z0 = [_local(z) if isinstance(z, Tensor) else None for z in b.z0 or [0.0] * len(shards)]
        self.device = shards[0].device
        self.written = shards + [t for ts in moments for t in ts if t is not None]
        kept = [*shards, *moments[0], *moments[1], *z0]
        self.pointers = [_nowhere if t is None else t.data_ptr for t in kept]
        self.addresses: list[int] = []
        self.coefs = b.method.geometry.kernel_coefs
        rows: dict[Any, list[tuple[int, tuple[int, ...]]]] = {}
        for j in range(len(shards)):
            key, its = self._rows(b, j)
            rows.setdefault(key, []).extend((j, row) for row in its)
        self.tables = {
            key: Table(key[-2] is not None, *zip(*its, strict=True)) for key, its in rows.items()
        }
        self.launches = [self._launch(b, table, *key) for key, table in self.tables.items()]

    def __call__(self, b: Bucket) -> None:
        from sodaopt.backends.triton.tables import is_capturing, uploaded

        capturing = is_capturing(self.device)
        if capturing and not (isinstance(b.k, Tensor) and isinstance(b.lr, Tensor)):
            raise RuntimeError(
                "a graph that captures step() needs SODA(..., capturable=True) and an lr that is a "
                "tensor on the device: a graph would keep a number for all its steps"
            )
        gradients: list[Any] = b.gradients() if b.is_sharded else [p.grad for p in b.params]
        addresses = [f() for f in self.pointers] + [g.data_ptr() for g in gradients]
        with torch.cuda.device_of(self.written[0]):  # type: ignore[no-untyped-call]
            if capturing or addresses != self.addresses:
                self._fill(addresses)
                # a graph fills the tables when it is replayed, not now
                self.addresses = [] if capturing else addresses
            values = self._numbers(b)
            fixed = [0.0 if isinstance(v, Tensor) else float(v) for v in values]
            numbers = uploaded(torch.tensor(fixed, dtype=torch.float64, device="cpu"), self.device)
            if on_device := {n: v for n, v in enumerate(values) if isinstance(v, Tensor)}:
                torch._foreach_copy_([numbers[n] for n in on_device], list(on_device.values()))
            for launch in self.launches:
                self._run(b, launch, numbers)
        torch.autograd.graph.increment_version(self.written)

    def _numbers(self, b: Bucket) -> list[Number]:
        """The numbers of this step, as `backends.triton.tables` lists them."""
        factor, rate, eps = (schedules.value(c, b.k, b.lr) for c in self.coefs)
        gamma = b.method.step_size(b.c) * factor
        factor_of_g: Number = -1.0 if b.group["maximize"] else 1.0
        if b.grad_scale is not None:
            factor_of_g = factor_of_g / b.grad_scale.reshape(())
        skip = 0.0 if b.found_inf is None else b.found_inf.reshape(())
        return [*b.c[:3], gamma, rate, eps, b.k, factor_of_g, skip]

    def _fill(self, addresses: list[int]) -> None:
        n = len(addresses) // 5
        if not all(addresses[:n] + addresses[4 * n :]):
            raise RuntimeError("a parameter or gradient has no memory: its storage was freed")
        all_ = torch.tensor(addresses, device="cpu").view(5, n)
        for table in self.tables.values():
            table.fill(all_, self.device)

    def _row(self, b: Bucket, j: int, n: int, last: tuple[int, int]) -> tuple[int, ...]:
        """A row of a table, without addresses, for the elements of parameter j from n on."""
        p, z = b.params[j], b.z0[j] if b.z0 else None
        start, prefix = 0, 0
        if p.dtype in rounding.HALVES:
            start = rounding.first_element(p) or 0
            prefix = rounding.cached_prefix(b.group["seed"], b.indices[j])
        z_offset = n * z.element_size() if isinstance(z, Tensor) else _bits("<i", "<f", z or 0.0)
        g: Any = p.grad
        offsets = n * p.element_size(), 4 * n, 4 * n, z_offset, n * g.element_size()
        width = _bits("<q", "<d", -b.method.geometry.kernel_width(b.shapes[j]))
        return (*offsets, start + n, prefix, width, *last)

    def _rows(self, b: Bucket, j: int) -> tuple[Any, list[tuple[int, ...]]]:
        """The rows of parameter j, and the key of their launch."""
        raise NotImplementedError

    def _launch(self, b: Bucket, table: Any, *key: Any) -> Any:
        """The kernels for the rows with this key."""
        raise NotImplementedError

    def _run(self, b: Bucket, launch: Any, numbers: Tensor) -> None:
        raise NotImplementedError


def _constants(b: Bucket, j: int) -> tuple[Any, ...]:
    """The dtypes of parameter j, its gradient and z0 (None unless a tensor), and its centre."""
    z, g = b.z0[j] if b.z0 else None, b.params[j].grad
    dtype = z.dtype if isinstance(z, Tensor) else None
    centre = b.method.centre if z is None else "tensor" if dtype else "number"
    return b.params[j].dtype, g.dtype, dtype, centre  # type: ignore[union-attr]


def _options(b: Bucket) -> dict[str, Any]:
    keeps_m = b.method.keeps_m
    return {"MOMENTUM": keeps_m, "OPTIMISM": keeps_m and b.method.alpha_bar != 0}


def _local(t: Tensor | None) -> Tensor | None:
    return None if t is None else sharded.local(t)


def _nowhere() -> int:
    return 0


@lru_cache
def _bits(integer: str, real: str, number: float) -> int:
    """The bits of a number."""
    return int(struct.unpack(integer, struct.pack(real, number))[0])


class Elementwise(Fused):
    """Maps that act on each entry: one launch for each dtype of the gradients and kind of z0.

    Parameters whose size is not a multiple of 16 have a launch of their own, with narrow loads.
    """

    def _rows(self, b: Bucket, j: int) -> tuple[Any, list[tuple[int, ...]]]:
        size = sharded.local(b.params[j]).numel()
        return (size % 16 == 0, *_constants(b, j)), [self._row(b, j, 0, (size, 0))]

    def _launch(self, b: Bucket, table: Any, *key: Any) -> Any:
        from sodaopt.backends.triton.elementwise import Elements

        return Elements(table, self.device, *key, MAP=b.kernel, **_options(b))

    def _run(self, b: Bucket, launch: Any, numbers: Tensor) -> None:
        launch.step_(numbers)


class Polar(Fused):
    """Polar factors: two passes before the products, and one after them."""

    def __init__(self, b: Bucket) -> None:
        self.polar: Newton = b.method.geometry.norm.polar  # type: ignore[attr-defined]
        self.dtype = self.polar.dtype_on(b.params[0].device, torch.float32)
        self.limit = max(WORKSPACE, SHARE * sum(p.nbytes for p in b.params))
        super().__init__(b)

    def _rows(self, b: Bucket, j: int) -> tuple[Any, list[tuple[int, ...]]]:
        view: View = b.method.geometry.norm.view  # type: ignore[attr-defined]
        short, long, is_turned, pitch, starts = _layout(view, b.shapes[j], not self.polar.steps)
        rows = [self._row(b, j, n, (pitch, is_turned)) for n in starts]
        return (short, long, *_constants(b, j)), rows

    def _launch(self, b: Bucket, table: Any, short: int, long: int, *key: Any) -> Any:
        from sodaopt.backends.triton.spectral import Matrices

        M = Matrices(table, self.device, short, long, *key, **_options(b))
        # X, U and one Gram matrix
        return M, _parts(M.n, short * (2 * long + short) * self.dtype.itemsize, self.limit)

    def _run(self, b: Bucket, launch: Any, numbers: Tensor) -> None:
        M, parts = launch
        squares = M.average_(numbers)
        divisor = self.polar.safety, SMALLEST
        for part in parts:  # X and U have no names here, so that they are freed early
            M.finish_(
                part,
                self.polar.products(M.normalised(part, squares, numbers, *divisor, self.dtype)),
                numbers,
            )


def _layout(view: View, shape: Shape, is_free: bool) -> tuple[int, int, int, int, list[int]]:
    """The short and the long side of the matrices of a parameter, and where they are in memory.

    is_free: no product follows, so the elements may be read as a matrix of another shape, with
    rows of at most 64. Tiles are 64 wide.
    """
    starts, rows, columns, pitch = view(shape).stored(shape)
    if is_free and pitch == columns:
        pitch = math.gcd(rows * columns, 64)
        rows, columns = rows * columns // pitch, pitch
    short, long = sorted((rows, columns))
    return short, long, int(rows > columns), pitch, list(starts)


def _parts(n: int, bytes_each: int, limit: float) -> list[range]:
    """Cut range(n) into equal parts of at most `limit` bytes, or single matrices."""
    most = max(1, int(limit // bytes_each))
    size = -(-n // -(-n // most))
    return [range(begin, min(begin + size, n)) for begin in range(0, n, size)]
