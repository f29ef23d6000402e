"""Launch one kernel over many tensors: each program handles one chunk of one tensor.

Two tables on the device tell a program its chunk and the tensor's row of numbers (size, addresses).
Both are cached from step to step. Run one step before capturing a CUDA graph, so that the kernels
are compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

import torch
import triton.language as tl
from torch import Tensor

CHUNK = 1 << 12
"""Elements that one program handles."""
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
Rows: TypeAlias = tuple[tuple[int, ...], ...]


def launch(kernel: Any, rows: Rows, written: list[Tensor], *args: Any, **options: Any) -> None:
    """Run the kernel with one program for each chunk of each tensor.

    rows: for each tensor its number of elements, then the 64-bit numbers that the kernel reads.
    written: the tensors that the kernel writes to, all on one device.
    """
    device = written[0].device
    programs = _on_device(device, _chunks, tuple(n for n, *_ in rows))
    with torch.cuda.device_of(written[0]):  # type: ignore[no-untyped-call]
        columns = table(rows, device)
        kernel[(len(programs),)](programs, columns, *args, CHUNK=CHUNK, **options)
    torch.autograd.graph.increment_version(written)


def table(rows: Rows, device: torch.device) -> Tensor:
    """The rows on the device. A table that was used lately is used again."""
    return _on_device(device, _columns, rows)


def address(t: Tensor) -> int:
    """The address of the tensor's first element."""
    pointer = t.data_ptr()
    if not pointer and t.numel():
        raise RuntimeError("a tensor has no memory: its storage was freed")
    return pointer


def aligned(*addresses: int) -> bool:
    """Whether wide loads may be used: all addresses are multiples of 16 bytes."""
    bits = 0
    for a in addresses:
        bits |= a
    return bits % 16 == 0


def _chunks(sizes: tuple[int, ...]) -> Tensor:
    """For each program: the tensor's number and the chunk's number in it."""
    pairs = [(j, k) for j, n in enumerate(sizes) for k in range(-(-n // CHUNK))]
    return torch.tensor(pairs, dtype=torch.int32, device="cpu").view(-1, 2)


def _columns(rows: Rows) -> Tensor:
    return torch.tensor([[_signed(v) for v in row] for row in rows], device="cpu")


def _signed(value: int) -> int:
    """The low 64 bits as a signed number."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _on_device(device: torch.device, make: Callable[[Any], Tensor], key: Any) -> Tensor:
    if device.type != "cuda":  # Triton's interpreter
        return make(key)
    if torch.cuda.is_current_stream_capturing():
        _CAPTURED.append(_copied(device, make, key))
        return _CAPTURED[-1][0]
    return _cached(device, torch.cuda.current_stream(device).cuda_stream, make, key)[0]


_CAPTURED: list[tuple[Tensor, Tensor]] = []
"""Tables that captured graphs read and copy at each replay, so they must live as long."""


@lru_cache(maxsize=512)
def _cached(
    device: torch.device, stream: int, make: Callable[[Any], Tensor], key: Any
) -> tuple[Tensor, Tensor]:
    """One table for each stream: another stream would not wait for the copy."""
    return _copied(device, make, key)


def _copied(device: torch.device, make: Callable[[Any], Tensor], key: Any) -> tuple[Tensor, Tensor]:
    """The table on the device, and its pinned source, which lets the host go on at once."""
    here = make(key).pin_memory()
    return here.to(device, non_blocking=True), here
