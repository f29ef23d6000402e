"""Many tensors in one launch: a table on the device with a row for each chunk of each of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch
import triton.language as tl
from torch import Tensor

CHUNK = 1 << 12
"""Elements of a row, which one program does."""
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""What kernels compute with in fp32."""

Column: TypeAlias = tuple[int, int]
"""A value of a tensor's first chunk, and by how much it grows from one chunk to the next."""


def table(tensors: Iterable[tuple[int, tuple[Column, ...]]], device: torch.device) -> Tensor:
    """Rows of int64: how many elements, then the columns. Each tensor: its elements, and columns.

    Whoever asks for it keeps it: from step to step most tensors stay where they are.
    """
    rows = []
    for n, columns in tensors:
        k = torch.arange(-(-n // CHUNK), dtype=torch.int64)
        sizes = (n - k * CHUNK).clamp(max=CHUNK)
        rows.append(torch.stack([sizes, *(signed(v) + step * k for v, step in columns)], 1))
    return torch.cat(rows).to(device)


def signed(value: int) -> int:
    """The low 64 bits as a signed number."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
