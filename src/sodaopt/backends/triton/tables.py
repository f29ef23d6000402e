"""Tables of addresses on the device, and launches of the kernels that read them.

A kernel of a step reads two tensors: a table with a row for each parameter (or for each of its
matrices), and the numbers of this step. So a launch has the same arguments at each step.

    row        0-4  addresses of p, m, v, z0 and g
               5    the number of elements (elementwise), or the distance of two rows in memory
               6    the index of the first element in the whole parameter
               7    the prefix of the rounding key
               8    minus the width factor, as float64 bits
               9    a z0 that is one number, as float64 bits
               10   whether the long side of a matrix is stored first
    numbers    0-2  alpha, alpha_bar, lam
               3-5  gamma, rate, eps
               6    k
               7    the factor of the gradients
               8    whether to skip the step

The numbers are float64.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

CHUNK = tl.constexpr(1 << 12)
"""Elements that one program of an elementwise kernel handles."""
COLUMNS = tl.constexpr(11)
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
Rows: TypeAlias = tuple[tuple[int, ...], ...]


# -- the kernels of a step ------------------------------------------------------------------------


class Table:
    """The rows of one launch on a device.

    owners: the index of the parameter that each row belongs to.
    offsets: the rows without addresses. `fill` adds the parameter's addresses to the first five.
    is_aligned: whether loads may be wide: all addresses and column 5 are multiples of 16.
    """

    rows: Tensor
    is_aligned: bool

    def __init__(self, device: torch.device, owners: Sequence[int], offsets: Sequence[Any]) -> None:
        self.device = device
        self.owners = torch.tensor(owners, device="cpu")
        self.offsets = torch.tensor(offsets, device="cpu")

    def fill(self, addresses: Tensor) -> None:
        """Write the rows. addresses: (5, parameters), as in a row."""
        own = addresses[:, self.owners]
        if not own[[0, 4]].all():
            raise RuntimeError("a parameter or gradient has no memory: its storage was freed")
        rows = self.offsets.clone()
        rows[:, :5] += own.T
        self.is_aligned = not (rows[:, :6] % 16).any()
        self.rows = uploaded(rows, self.device)


class Launch:
    """A kernel with its constants, which are its last arguments.

    constants: dtypes are torch's. Names that the kernel does not have are ignored.

    A call sets the constant ALIGNED to `is_aligned`. The first call with each value compiles the
    kernel. Later calls launch the compiled kernel directly, because Triton's look-up takes longer
    than the launch. So calls with the same value must pass arguments of the same types and
    alignment.
    """

    def __init__(
        self, kernel: Any, device: torch.device, constants: dict[str, Any], **options: Any
    ) -> None:
        names = [name for name in kernel.arg_names if name in constants]
        self.constants = {name: DTYPES.get(constants[name], constants[name]) for name in names}
        self.kernel, self.index, self.options = kernel, device.index, options
        self.compiled: dict[bool, tuple[Any, ...]] = {}

    def __call__(self, grid: tuple[int, int, int], is_aligned: bool, *args: Any) -> None:
        if is_aligned not in self.compiled:
            constants = self.constants | {"ALIGNED": is_aligned}
            compiled = self.kernel[grid](*args, **constants, **self.options)
            if compiled is not None:  # the interpreter compiles nothing
                last = [constants[name] for name in self.kernel.arg_names[len(args) :]]
                function = compiled.function, compiled.packed_metadata, None, None, None
                self.compiled[is_aligned] = compiled.run, function, last
            return
        # as JITFunction.run calls it. If that changes, call self.kernel[grid] at each step.
        run, function, last = self.compiled[is_aligned]
        run(*grid, driver.active.get_current_stream(self.index), *function, *args, *last)


@triton.jit
def number(numbers, n: tl.constexpr):
    """Number n of the step."""
    return tl.load(numbers + n).to(tl.float32)


@triton.jit
def pointer(row, column: tl.constexpr, T: tl.constexpr, ALIGNED: tl.constexpr):
    """The address in a column, of elements of type T."""
    found = tl.load(row + column).to(tl.pointer_type(T))
    if ALIGNED:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def scale(row, numbers):
    """gamma times minus the width factor: the number that multiplies the direction."""
    return (tl.load(row + 8).to(tl.float64, bitcast=True) * tl.load(numbers + 3)).to(tl.float32)


@triton.jit
def constant(row):
    """A z0 that is one number."""
    return tl.load(row + 9).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def chunk(chunks, rows, COLUMNS: tl.constexpr, SIZE: tl.constexpr, ALIGNED: tl.constexpr):
    """This program's row, the first element of its chunk, and the number of elements.

    SIZE: the column with the number of elements of the tensor.
    """
    chunks += tl.program_id(0).to(tl.int64) * 2
    row = rows + tl.load(chunks) * COLUMNS
    first = tl.load(chunks + 1).to(tl.int64) * CHUNK
    n = tl.minimum(tl.load(row + SIZE) - first, CHUNK).to(tl.int32)
    if ALIGNED:
        n = tl.multiple_of(n, 16)  # otherwise the masks make all loads narrow
    return row, first, n


# -- kernels with tables of their own -------------------------------------------------------------


def launch(kernel: Any, rows: Rows, written: list[Tensor], *args: Any, **constants: Any) -> None:
    """Run a kernel with one program for each chunk of each tensor.

    rows: a row for each tensor: two addresses, the number of elements, and other 64-bit numbers
    that the kernel reads. Loads are wide if the first three are multiples of 16.
    written: the tensors that the kernel writes to, all on one device.
    """
    device = written[0].device
    with torch.cuda.device_of(written[0]):  # type: ignore[no-untyped-call]
        for is_aligned in (True, False):  # wide loads, or narrow ones
            some = tuple(r for r in rows if ((r[0] | r[1] | r[2]) % 16 == 0) == is_aligned)
            if some:
                programs = chunks(tuple(row[2] for row in some), device)
                columns = _on_device(device, _columns, some)
                kernel[(len(programs),)](programs, columns, *args, ALIGNED=is_aligned, **constants)
    torch.autograd.graph.increment_version(written)


def chunks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """For each program: the index of its row, and the index of its chunk in the tensor."""
    return _on_device(device, _chunks, sizes)


def address(t: Tensor) -> int:
    """The address of the tensor's first element."""
    found = t.data_ptr()
    if not found and t.numel():
        raise RuntimeError("a tensor has no memory: its storage was freed")
    return found


def _chunks(sizes: tuple[int, ...]) -> Tensor:
    pairs = [(j, k) for j, n in enumerate(sizes) for k in range(-(-n // CHUNK.value))]
    return torch.tensor(pairs, dtype=torch.int32, device="cpu").view(-1, 2)


def _columns(rows: Rows) -> Tensor:
    low_bits = [[value % (1 << 64) for value in row] for row in rows]
    return torch.tensor(low_bits, dtype=torch.uint64, device="cpu").view(torch.int64)


# -- copies to the device -------------------------------------------------------------------------


def uploaded(host: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device. The host does not wait, because it copies from pinned memory.

    A captured graph repeats the copy at each replay, so both tensors are kept alive.
    """
    if device.type != "cuda":  # Triton's interpreter
        return host
    pinned = host.pin_memory()
    there = pinned.to(device, non_blocking=True)
    if is_capturing(device):
        _CAPTURED.append((there, pinned))
    return there


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream records a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_CAPTURED: list[tuple[Tensor, Tensor]] = []
"""The tensors that captured graphs copy."""


def _on_device(device: torch.device, make: Callable[[Any], Tensor], key: Any) -> Tensor:
    """Return make(key) on the device, from a cache unless a graph is captured."""
    if is_capturing(device):
        return uploaded(make(key), device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _cached(device, stream, make, key)


@lru_cache(maxsize=512)
def _cached(device: torch.device, stream: int, make: Callable[[Any], Tensor], key: Any) -> Tensor:
    """One table for each stream: another stream would not wait for the copy."""
    return uploaded(make(key), device)
