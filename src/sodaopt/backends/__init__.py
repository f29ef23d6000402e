"""Fast forms of plain torch operations: Triton kernels on a GPU.

Everything works without them, and results differ by rounding only. The modules under `triton/`
import torch and triton alone. They are imported when a tensor on a GPU first needs them.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

PLAIN = frozenset((Tensor, nn.Parameter))
"""The types of plain tensors. A DTensor, for example, is not one of them."""
KERNEL_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
"""The dtypes that kernels read and write."""


F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(f: F) -> F:
    """Exclude a function from torch.compile.

    `torch.compiler.disable` imports torch._dynamo at once, which adds a second to `import sodaopt`.
    If the private form goes, use the public one.
    """
    return cast(F, torch._disable_dynamo(f))  # type: ignore[attr-defined]


def readable(t: Tensor) -> bool:
    """Whether a kernel may read the tensor's memory from end to end."""
    return type(t) in PLAIN and t.dtype in KERNEL_DTYPES and t.is_contiguous() and not t.is_neg()


def run_on(*tensors: Tensor) -> bool:
    """Whether kernels run on the GPU of the first tensor, and may read all of these tensors."""
    return tensors[0].is_cuda and all(map(readable, tensors)) and usable(tensors[0].device)


@cache
def usable(device: torch.device) -> bool:
    """Whether Triton kernels run on this GPU.

    One small kernel is compiled as a test. Without Triton or a C compiler, or on an old GPU, no
    kernel works.
    """
    try:
        from sodaopt.backends.triton.pull import pull_

        x = torch.zeros(1, dtype=torch.float32, device=device)
        pull_([x], [torch.ones_like(x)], 0.5)
    except Exception as error:
        warnings.warn(
            f"Triton kernels do not run on {device}; falling back to slower PyTorch "
            f"operations: {type(error).__name__}: {error}",
            stacklevel=2,
        )
        return False
    return True
