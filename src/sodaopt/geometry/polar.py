"""The polar factor U V^T of a batch of matrices, behind one signature: (n, o, i) -> (n, o, i).

`EXACT` is the SVD. The others are Newton-Schulz iterations X <- a X + b (X X^T) X + c (X X^T)^2 X
with their coefficients as data. A polynomial does not return U V^T: five steps of KELLER leave the
singular values spread over about 0.7 to 1.1. All of them map zero to zero and NaN to NaN.

    EXACT          the SVD
    KELLER         five steps with (a, b, c) = (3.4445, -4.7750, 2.0315), Muon's
    YOU            five steps, each with coefficients of its own
    POLAR_EXPRESS  five steps that are optimal in turn, with safety 1.01
    CUBIC          15 steps with (1.5, -0.5, 0), the classical iteration
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from sodaopt.backends.products import Symmetric, choice, full_sums

__all__ = [
    "BACKENDS", "CUBIC", "EXACT", "KELLER", "POLAR_EXPRESS", "YOU", "Exact", "Newton", "Polar",
]  # fmt: skip

Triple: TypeAlias = tuple[float, float, float]
SMALLEST = 1e-15
"""The smallest number that a matrix is divided by. A zero matrix then stays zero. The norm of a
gradient is far above it, so the polar factor does not depend on the scale of the gradient."""


def lengths(X: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The Euclidean lengths along some dimensions, in float64: squares of 1e20 overflow in fp32."""
    found: Tensor = torch.linalg.vector_norm(X, dim=dims, keepdim=True, dtype=torch.float64)
    return found


def divisor(length: Tensor, dtype: torch.dtype) -> Tensor:
    """The length to divide by, at least SMALLEST.

    A length that overflows the dtype becomes NaN. A division by infinity would look like a zero
    gradient.
    """
    length = length.to(dtype)
    return length.clamp(min=SMALLEST) + length * 0


class Polar(Protocol):
    """A function from a batch of matrices (n, o, i) to their polar factors, same shape and dtype.

    >>> X = geometry.polar.KELLER(torch.randn(1, 4, 8))  # one matrix
    >>> X.shape
    torch.Size([1, 4, 8])
    """

    def __call__(self, X: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Newton:
    """X <- X/(safety ||X||_F), then X <- a X + b (X X^T) X + c (X X^T)^2 X for each of `steps`.

    name: its name in BACKENDS.
    steps: the coefficients (a, b, c) of each step.
    safety: at least 1. It keeps singular values below 1 if rounding raises them.
    dtype: the dtype of the products. None means fp16 on a CUDA GPU, except for float64 matrices:
    after normalisation it is eight times as accurate as bf16. Otherwise it is the dtype of the
    input, at least fp32, because on a CPU 16-bit products are 16 to 90 times slower.
    restarts: the steps before which the Gram form computes X X^T again, see `factor`. Without
    restarts, the iteration has the plain form alone.

    >>> len(geometry.polar.KELLER.steps)
    5
    """

    name: str
    steps: tuple[Triple, ...]
    safety: float = 1.0
    dtype: torch.dtype | None = None
    restarts: tuple[int, ...] = ()

    def __call__(self, X: Tensor) -> Tensor:
        tall = X.shape[-2] > X.shape[-1]
        Y = X.mT if tall else X  # the short side first: the Gram matrix is the smaller one
        Y = Y.float() if Y.dtype.itemsize < 4 else Y
        Y = Y / divisor(lengths(Y, (-2, -1)) * self.safety, Y.dtype)
        Y = self.products(Y.to(self.dtype_on(Y.device, Y.dtype)))
        return (Y.mT if tall else Y).to(X.dtype)

    def products(self, X: Tensor) -> Tensor:
        """Apply the polynomial to normalised matrices (n, short side, long side), in their dtype.

        The plain form multiplies X at each step. The Gram form multiplies it only at `restarts`
        and at the end, see `factor`.
        """
        X = X.contiguous() if X.is_cuda else X  # kernels read whole rows, also of tall matrices
        form, product = choice(X)
        is_gram = form == "gram" and self.restarts
        blocks = self._gram_blocks() if is_gram else [(step,) for step in self.steps]
        with full_sums(X.is_cuda):
            for steps in blocks:  # nothing but X is alive between two blocks
                X = torch.bmm(factor(X, steps, product), X)
        return X

    def _gram_blocks(self) -> list[tuple[Triple, ...]]:
        """The steps in blocks. X is multiplied after each block."""
        begins, ends = (0, *self.restarts), (*self.restarts, len(self.steps))
        return [self.steps[begin:end] for begin, end in zip(begins, ends, strict=True)]

    def dtype_on(self, device: torch.device, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the products for matrices on a device in fp32 or float64."""
        fastest = torch.float16 if device.type == "cuda" and dtype == torch.float32 else dtype
        return self.dtype or fastest


def factor(X: Tensor, steps: tuple[Triple, ...], product: Symmetric) -> Tensor:
    """Return Q such that the steps take X to Q X. All products have the size of R = X X^T.

    A step is X <- W X with W = a + b R + c R^2. After it the Gram matrix is W R W, so the next W
    needs no product with X, and Q is the product of all W. Every W is a polynomial of R, so in
    exact arithmetic they commute and are symmetric. Rounded products must keep one of these
    properties: `dense` keeps the first, because all factors are polynomials of the same rounded R,
    and `triangle` keeps the second. Products A B^T instead of A B keep neither, and are ten times
    less accurate.

    Rounding moves the eigenvalues of R by about eps, the unit roundoff, so some become negative. A
    step multiplies small eigenvalues and their errors by a^2. If a negative eigenvalue reaches
    order 1, the polynomial diverges. In fp16 with a = 3.4 the error is 0.07 after two steps and 0.8
    after three. So the steps are cut into blocks of at most three (`Newton.restarts`), and R is
    computed from X again for each block.
    """
    R = product(X)
    Q = W = _polynomial(R, steps[0], product)
    for step in steps[1:]:
        R = product(R, W)
        R = product(R, W)
        W = _polynomial(R, step, product)
        Q = product(Q, W)
    return Q


def _polynomial(R: Tensor, step: Triple, product: Symmetric) -> Tensor:
    a, b, c = step
    if c:
        return product(R, R, R, c, b, a)
    # a cubic needs no product, and torch.baddbmm with alpha = 0 is wrong in bf16 on a CPU (2.13)
    W = b * R
    W.diagonal(dim1=-2, dim2=-1).add_(a)
    return W


@dataclass(frozen=True)
class Exact:
    """U V^T by the SVD. Singular values at rounding level count as zero, since sign(0) = 0.

    name: its name in BACKENDS.

    >>> X = geometry.polar.EXACT(torch.randn(1, 4, 8))
    >>> torch.allclose(X @ X.mT, torch.eye(4), atol=1e-5)
    True
    """

    name: str = "exact"

    def __call__(self, X: Tensor) -> Tensor:
        W = X.float() if X.dtype.itemsize < 4 else X
        U, s, Vh = torch.linalg.svd(W.nan_to_num(0.0, 0.0, 0.0), full_matrices=False)
        tol = s.amax(-1, keepdim=True) * max(W.shape[-2:]) * torch.finfo(W.dtype).eps
        # NaN if a matrix has NaN or inf, or if its SVD overflowed, else 0
        poison = (W * 0).sum((-2, -1), keepdim=True) + s.amax(-1)[..., None, None] * 0
        UVh: Tensor = poison + (U * (s > tol).to(U.dtype).unsqueeze(-2)) @ Vh
        return UVh.to(X.dtype)


EXACT = Exact()

DIRECTION = Newton("direction", (), dtype=torch.float32)
"""The polar factor of a vector: d / ||d||, without products."""
KELLER = Newton("keller", ((3.4445, -4.7750, 2.0315),) * 5, restarts=(3,))
"""Jordan et al. 2024, Muon: https://kellerjordan.github.io/posts/muon"""
YOU = Newton(
    "you",
    (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    restarts=(3,),
)
"""You Jiacheng 2025: https://x.com/YouJiacheng/status/1905861218138804534"""
_POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
POLAR_EXPRESS = Newton(
    "polar_express",
    tuple((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in _POLAR_EXPRESS),
    safety=1.01,
    restarts=(3,),
)
"""Amsel et al. 2025, arXiv:2505.16932, algorithm 1: the first five steps, safety factor 1.01"""
CUBIC = Newton("cubic", ((1.5, -0.5, 0.0),) * 15)
"""The classical Newton-Schulz iteration (Higham 2008, Functions of Matrices, section 8.3)."""
BACKENDS: dict[str, Polar] = {b.name: b for b in (EXACT, KELLER, YOU, POLAR_EXPRESS, CUBIC)}
