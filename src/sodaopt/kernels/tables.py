"""Many tensors in one launch: each program does a chunk of one of them, which tables on the device
name. They are kept from step to step; where tensors move, only the small one is made again."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

CHUNK = 1 << 12
"""Elements that one program does."""
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@lru_cache(maxsize=256)
def chunks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """For each program: which tensor, and which of its chunks."""
    pairs = [(j, k) for j, n in enumerate(sizes) for k in range(-(-n // CHUNK))]
    return torch.tensor(pairs, dtype=torch.int32, device="cpu").view(-1, 2).to(device)


@lru_cache(maxsize=256)
def columns(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """For each tensor what a kernel wants to know of it, as int64. Where tensors are temporary this
    is made at each step, so the host must not wait for the copy."""
    on_gpu = device.type == "cuda"
    table = torch.tensor(
        [[_signed(v) for v in row] for row in rows], device="cpu", pin_memory=on_gpu
    )
    return table.to(device, non_blocking=True)


def _signed(value: int) -> int:
    """The low 64 bits as a signed number."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
