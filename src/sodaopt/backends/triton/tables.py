"""Many tensors in one launch: each program does a chunk of one of them, which tables on the device
name. They are kept from step to step; where tensors move, only the small one is made again."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

CHUNK = 1 << 12
"""Elements that one program does."""
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def launch(
    kernel: Any, rows: tuple[tuple[int, ...], ...], written: list[Tensor], *args: Any, **how: Any
) -> None:
    """A program for each chunk of each tensor. rows: for each how many elements, and what else the
    kernel wants to know of it, as 64-bit numbers; written: what it writes to, on one device."""
    device = written[0].device
    programs = chunks(tuple(n for n, *_ in rows), device)
    with torch.cuda.device_of(written[0]):  # type: ignore[no-untyped-call]
        kernel[(len(programs),)](programs, columns(rows, device), *args, CHUNK=CHUNK, **how)
    torch.autograd.graph.increment_version(written)


def chunks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """For each program: which tensor, and which of its chunks."""
    return _on(device, _chunks, sizes)


def columns(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """For each tensor what a kernel wants to know of it, as int64."""
    return _on(device, _columns, rows)


def _chunks(sizes: tuple[int, ...]) -> Tensor:
    pairs = [(j, k) for j, n in enumerate(sizes) for k in range(-(-n // CHUNK))]
    return torch.tensor(pairs, dtype=torch.int32, device="cpu").view(-1, 2)


def _columns(rows: tuple[tuple[int, ...], ...]) -> Tensor:
    return torch.tensor([[_signed(v) for v in row] for row in rows], device="cpu")


def _on(device: torch.device, make: Callable[[Any], Tensor], key: Any) -> Tensor:
    if device.type != "cuda":
        return make(key)
    if torch.cuda.is_current_stream_capturing():  # a copy that only the graph's replays make
        _CAPTURED.append(_copied(device, make, key))
        return _CAPTURED[-1][0]
    return _cached(device, torch.cuda.current_stream(device).cuda_stream, make, key)[0]


@lru_cache(maxsize=512)
def _cached(
    device: torch.device, stream: int, make: Callable[[Any], Tensor], key: Any
) -> tuple[Tensor, Tensor]:
    """For each stream its own: another would not wait for the copy."""
    return _copied(device, make, key)


def _copied(device: torch.device, make: Callable[[Any], Tensor], key: Any) -> tuple[Tensor, Tensor]:
    """There and here. Where tensors are temporary this is done at each step, so the host must not
    wait for the copy."""
    here = make(key).pin_memory()
    return here.to(device, non_blocking=True), here


_CAPTURED: list[tuple[Tensor, Tensor]] = []
"""What graphs read, and copy, at each replay."""


def _signed(value: int) -> int:
    """The low 64 bits as a signed number."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
