"""Steps of a bucket by Triton kernels on a GPU.

A geometry names its kernel (`Geometry.kernel`). "polar" is two passes before the matrix products of
the Newton-Schulz iteration, and one after them. The other kernels take the whole step in one pass.

A step is planned once: tables tell the kernels where the tensors of each parameter are. At each
step the host reads the addresses of these tensors, and writes the tables again if one of them has
changed. The numbers of the step (coefficients, k) are one small tensor on the device.
"""

import math
import struct
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sodaopt import backends, rounding, schedules
from sodaopt.anchors import Source
from sodaopt.core.update import Bucket
from sodaopt.geometry.maps import ELEMENTWISE, State
from sodaopt.geometry.polar import SMALLEST
from sodaopt.parallel import sharded

WORKSPACE = 28 << 20
SHARE = 1 / 6
"""The matrices of one shape are multiplied in parts. The temporary memory of a part is at most that
of WORKSPACE elements of the parameters, or of SHARE times all elements of the bucket if that is
more."""
Run: TypeAlias = Callable[[Tensor], None]
"""A function that runs the kernels of a table, given the numbers of a step."""


def is_fusable(p: Tensor, state: State, kernel: str | None, z0: Source | None) -> bool:
    """Whether the kernel can read the parameter, its gradient, state and z0."""
    if p.dtype in rounding.HALVES and rounding.first_element(p) is None:
        return False
    if sharded.is_sharded(p) and (kernel == "polar" or not sharded.is_placed_like(p.grad, p)):
        return False
    if not isinstance(z0, Tensor | float | None):
        return False
    x, m, v, z, g = _tensors(p, state, z0)
    if not all(t is None or t.dtype == torch.float32 for t in (m, v)):
        return False
    found = [t for t in (x, m, v, z, g) if t is not None]
    return all(backends.readable(t) and (t.shape, t.device) == (x.shape, x.device) for t in found)


def _tensors(p: Tensor, state: State, z0: Source | None) -> list[Any]:
    """This rank's p, m, v, z0 and g, in the order of a row of a table. A missing one is None."""
    z = z0 if isinstance(z0, Tensor) else None
    every = p, state.get("m"), state.get("v"), z, p.grad
    return [None if t is None else sharded.local(t) for t in every]


class Fused:
    """One step of a bucket by kernels.

    written: the tensors that the kernels write to.
    pointers: functions that return the addresses of all p, then of all m, v and z0.
    """

    def __init__(self, b: Bucket) -> None:
        from sodaopt.backends.triton.tables import Table

        layout, plan = PLANS[b.method._kernel]
        every = [_tensors(*one) for one in zip(b.params, b.state, b.z0, strict=True)]
        p, m, v, z, _ = zip(*every, strict=True)
        self.device, self.addresses = p[0].device, list[int]()
        self.written = [t for t in (*p, *m, *v) if t is not None]
        self.pointers = _pointers([*p, *m, *v, *z])
        rows: dict[Any, list[tuple[int, tuple[int, ...]]]] = {}
        for j, tensors in enumerate(every):
            key, parts = layout(b, j)
            key = key, _constants(b, tensors, b.z0[j])
            rows.setdefault(key, []).extend((j, _row(b, j, tensors, *part)) for part in parts)
        self.tables, self.runs = list[Any](), list[Run]()
        for (key, constants), members in rows.items():
            self.tables.append(Table(self.device, *zip(*members, strict=True)))
            self.runs.append(plan(b, self.tables[-1], dict(constants), *key))

    def __call__(self, b: Bucket) -> None:
        from sodaopt.backends.triton.tables import uploaded

        grads: list[Any] = b.gradients() if b.is_sharded else [p.grad for p in b.params]
        addresses = [f() for f in self.pointers] + [g.data_ptr() for g in grads]
        with torch.cuda.device_of(self.written[0]):  # type: ignore[no-untyped-call]
            if not self._are_filled(addresses, b):
                columns = torch.tensor(addresses, device="cpu").view(5, -1)
                for table in self.tables:
                    table.fill(columns)
            values = _numbers(b)
            fixed = [0.0 if isinstance(v, Tensor) else float(v) for v in values]
            numbers = uploaded(torch.tensor(fixed, dtype=torch.float64, device="cpu"), self.device)
            _copy_tensors(values, numbers)
            for run in self.runs:
                run(numbers)
        torch.autograd.graph.increment_version(self.written)

    def _are_filled(self, addresses: list[int], b: Bucket) -> bool:
        """Whether the tables have these addresses. A captured graph fills them at each replay."""
        from sodaopt.backends.triton.tables import is_capturing

        if not is_capturing(self.device):
            before, self.addresses = self.addresses, addresses
            return before == addresses
        if not (isinstance(b.k, Tensor) and isinstance(b.lr, Tensor)):
            raise RuntimeError(
                "a graph that captures step() needs SODA(..., capturable=True) and an lr that is a "
                "tensor on the device: a graph would keep a number for all its steps"
            )
        self.addresses = []
        return False


def _pointers(tensors: list[Tensor | None]) -> list[Callable[[], int]]:
    """Functions that return the addresses of tensors, or 0 for None."""
    return [(lambda: 0) if t is None else t.data_ptr for t in tensors]


def _numbers(b: Bucket) -> list[schedules.Number]:
    """The numbers of this step, in the order that `backends.triton.tables` lists."""
    factor, rate, eps = b.method.geometry.kernel_numbers(b.k, b.lr)
    gamma = b.method._step_size(b.c) * factor
    factor_of_g, skip = _scaled(-1.0 if b.group["maximize"] else 1.0, b)
    return [b.c.alpha, b.c.alpha_bar, b.c.lam, gamma, rate, eps, b.k, factor_of_g, skip]


def _scaled(factor_of_g: schedules.Number, b: Bucket) -> tuple[schedules.Number, schedules.Number]:
    """The factor of the gradients, divided by GradScaler's scale, and whether to skip the step."""
    if b.grad_scale is not None:
        factor_of_g = factor_of_g / b.grad_scale.reshape(())
    return factor_of_g, 0.0 if b.found_inf is None else b.found_inf.reshape(())


def _copy_tensors(values: list[schedules.Number], numbers: Tensor) -> None:
    """Copy the values that are tensors on the device, without reading them on the host."""
    if on_device := {n: v for n, v in enumerate(values) if isinstance(v, Tensor)}:
        torch._foreach_copy_([numbers[n] for n in on_device], list(on_device.values()))


def _row(
    b: Bucket, j: int, tensors: list[Any], n: int, size: int, is_turned: int
) -> tuple[int, ...]:
    """A row of a table for the elements of parameter j from n on, with offsets for addresses.

    tensors: its p, m, v, z0 and g, or None.
    size: the number of elements, or the distance of two rows of a matrix in memory.
    is_turned: whether the long side of a matrix is stored first.
    """
    start = rounding.first_element(b.params[j]) or 0
    prefix = rounding.cached_prefix(b.group["seed"], b.indices[j])
    offsets = [0 if t is None else n * t.element_size() for t in tensors]
    number = b.z0[j] if isinstance(b.z0[j], float) else 0.0
    width = -b.method.geometry.kernel_width(b.shapes[j])
    reals = struct.unpack("<qq", struct.pack("<dd", width, number))
    return *offsets, size, start + n, prefix, *reals, is_turned


def _constants(b: Bucket, tensors: list[Any], z0: Source | None) -> tuple[tuple[str, Any], ...]:
    """The constants of the kernels for a parameter by name, with the dtypes of p, g and z0."""
    p, _, _, z, g = tensors
    kind = "number" if isinstance(z0, float) else "tensor"
    keeps_m = b.method._keeps_m
    return (
        ("P", p.dtype),
        ("G", g.dtype),
        ("Z", torch.float32 if z is None else z.dtype),
        ("CENTRE", b.method.centre if z0 is None else kind),
        ("MAP", b.method._kernel),
        ("MOMENTUM", keeps_m),
        ("OPTIMISM", keeps_m and b.method.alpha_bar != 0),
    )


# -- maps that act on each entry: one pass ---------------------------------------------------------


def _elements(b: Bucket, j: int) -> tuple[Any, Any]:
    """One row for a parameter. Sizes that 16 does not divide have a table with narrow loads."""
    size = sharded.local(b.params[j]).numel()
    return (size % 16 == 0,), [(0, size, 0)]


def _one_pass(b: Bucket, table: Any, constants: dict[str, Any], is_even: bool) -> Run:
    from sodaopt.backends.triton import elementwise, tables

    chunks = tables.chunks(tuple(table.offsets[:, 5].tolist()), table.device)
    launch = tables.Launch(elementwise.step, table.device, constants)

    def run(numbers: Tensor) -> None:
        launch((len(chunks), 1, 1), table.is_aligned, chunks, table.rows, numbers)

    return run


# -- polar factors: two passes before the matrix products, and one after them ----------------------


def _passes(b: Bucket, table: Any, constants: dict[str, Any], short: int, long: int) -> Run:
    from sodaopt.backends.triton.spectral import Matrices

    newton = b.method.geometry.kernel_polar
    dtype = newton.dtype_on(table.device, torch.float32)
    M = Matrices(table, short, long, dtype, newton.safety, SMALLEST, constants)
    parts = _parts(M.n, _bytes(short, long, dtype), _limit(b.params))

    def run(numbers: Tensor) -> None:
        squares = M.average_(numbers)
        for part in parts:  # X and U have no names here, so that they are freed early
            M.finish_(part, newton.products(M.normalised(part, squares, numbers)), numbers)

    return run


def _matrices(b: Bucket, j: int) -> tuple[Any, Any]:
    """The short and the long side of the matrices of a parameter, and one row for each matrix.

    Without products the shape of the matrices does not matter. Contiguous ones are then read in
    rows of at most 64 elements, because tiles are 64 wide.
    """
    geometry, shape = b.method.geometry, b.shapes[j]
    starts, rows, columns, pitch = geometry.kernel_frame(shape).stored(shape)
    if not geometry.kernel_polar.steps and pitch == columns:
        pitch = math.gcd(rows * columns, 64)
        rows, columns = rows * columns // pitch, pitch
    return tuple(sorted((rows, columns))), [(n, pitch, rows > columns) for n in starts]


def _bytes(short: int, long: int, dtype: torch.dtype) -> int:
    """The temporary memory of a matrix: X, U and one Gram matrix."""
    return short * (2 * long + short) * dtype.itemsize


def _limit(params: list[Tensor]) -> float:
    """The most bytes of temporary memory for these parameters."""
    return params[0].dtype.itemsize * max(WORKSPACE, SHARE * sum(p.numel() for p in params))


def _parts(n: int, bytes_each: int, limit: float) -> list[range]:
    """Cut range(n) into equal parts of at most `limit` bytes, or single matrices."""
    most = max(1, int(limit // bytes_each))
    size = -(-n // -(-n // most))
    return [range(begin, min(begin + size, n)) for begin in range(0, n, size)]


PLANS: dict[str | None, tuple[Callable[..., Any], Callable[..., Run]]] = {
    **dict.fromkeys(ELEMENTWISE, (_elements, _one_pass)),
    "polar": (_matrices, _passes),
}
"""For each kernel of a geometry, how its rows are laid out, and how its launches are planned.

The first function takes the bucket and the index of a parameter in it. It returns a key, and the
arguments (n, size, is_turned) of `_row` for each row of the parameter. Rows with the same key and
the same constants share a table. The second function takes the bucket, a table, its constants and
the members of its key. It returns a `Run`."""
