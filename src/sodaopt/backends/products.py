"""The matrix products of polar factors, and the choice of the fastest one for a shape.

`python -m benchmarks.products` measures them and writes `products.json`. Nothing is measured at run
time, because a resumed run would then not repeat the bits of an uninterrupted one.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

TABLE = Path(__file__).with_name("products.json")


Symmetric: TypeAlias = Callable[..., Tensor]
"""A function of (A, B, C, alpha, beta, diagonal) for batches of matrices: alpha A B + beta C +
diagonal I, or A B without C, or A A^T without B. B and the result are symmetric."""


def dense(
    A: Tensor, B: Tensor | None = None, C: Tensor | None = None, alpha: float = 1, beta: float = 1,
    diagonal: float = 0,
) -> Tensor:  # fmt: skip
    """A product that computes both triangles, by torch. See `Symmetric`."""
    B = A.mT if B is None else B
    out = torch.bmm(A, B) if C is None else torch.baddbmm(C, A, B, alpha=alpha, beta=beta)
    if diagonal:
        out.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return out


def _triangle() -> Symmetric:
    """A product that computes one triangle and mirrors it, by a Triton kernel."""
    from sodaopt.backends.triton.spectral import product

    return product


def _hopper() -> Symmetric:
    """A product that computes one triangle, by quack-kernels (`pip install sodaopt[hopper]`)."""
    from quack.gemm_interface import gemm_symmetric

    def product(
        A: Tensor, B: Tensor | None = None, C: Tensor | None = None, alpha: float = 1,
        beta: float = 1, diagonal: float = 0,
    ) -> Tensor:  # fmt: skip
        B = A.mT if B is None else B
        out: Tensor = gemm_symmetric(A, B, C=C, alpha=float(alpha), beta=float(beta))
        if diagonal:
            out.diagonal(dim1=-2, dim2=-1).add_(diagonal)
        return out

    return product


PRODUCTS: dict[str, Callable[[], Symmetric]] = {
    "dense": lambda: dense, "triangle": _triangle, "hopper": _hopper,
}  # fmt: skip
"""Functions that import a product and return it, once for each shape: an import at each call would
take longer than the launch of a kernel."""


def choice(X: Tensor) -> tuple[str, Symmetric]:
    """Return (form, product) for normalised matrices (n, short side, long side).

    form: "plain" or "gram", see `sodaopt.geometry.polar`.
    """
    if not X.is_cuda or X.dtype != torch.float16:  # other dtypes are for accuracy, not for speed
        return "plain", dense
    return chosen(X.shape[-2], X.shape[-1])


@cache
def chosen(short: int, long: int) -> tuple[str, Symmetric]:
    """The choice for fp16 matrices, from the first row of the table that applies to them.

    A row applies if the short side is at least "short", and long / short at least "aspect".
    """
    for row in json.loads(TABLE.read_text())["rows"]:
        if short >= row["short"] and long >= row["aspect"] * short:
            best = row.get("with_hopper", row) if has_hopper() else row
            return best["form"], PRODUCTS[best["product"]]()
    return "plain", dense


@cache
def has_hopper() -> bool:
    """Whether quack-kernels is installed and runs on this GPU."""
    installed = find_spec("quack") is not None
    return installed and torch.cuda.get_device_capability()[0] in (9, 10)


@contextmanager
def full_sums(is_cuda: bool) -> Iterator[None]:
    """Return a context in which fp16 products are summed in fp32. By default torch allows cuBLAS to
    add parts of long sums in fp16."""
    if not is_cuda:
        yield
        return
    settings = torch.backends.cuda.matmul
    before = settings.allow_fp16_reduced_precision_reduction
    settings.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        settings.allow_fp16_reduced_precision_reduction = before
