"""The polar factor U V^T of a batch of matrices, behind one signature: (n, o, i) -> (n, o, i).

`EXACT` is the SVD. The others are Newton-Schulz iterations X <- a X + b (X X^T) X + c (X X^T)^2 X
with their coefficients as data. A polynomial does not return U V^T: five steps of KELLER leave the
singular values spread over about 0.7 to 1.1. All of them map zero to zero and NaN to NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

Triple: TypeAlias = tuple[float, float, float]


class Polar(Protocol):
    """A backend: a batch of matrices (n, o, i) to their polar factors, same shape and dtype."""

    def __call__(self, X: Tensor) -> Tensor: ...


def raw(polar: Polar, X: Tensor) -> Tensor:
    """The polar factors in the dtype that the backend computes them in: no pass for a cast."""
    return getattr(polar, "raw", polar)(X)


@dataclass(frozen=True)
class Newton:
    """An odd quintic a step, after division by `safety` times the Frobenius norm.

    dtype None means bf16 on an accelerator and at least fp32 on a CPU, where bf16 products are
    16 to 90 times slower.
    """

    name: str
    steps: tuple[Triple, ...]
    source: str
    safety: float = 1.0
    dtype: torch.dtype | None = None

    def __call__(self, X: Tensor) -> Tensor:
        return self.raw(X).to(X.dtype)

    def raw(self, X: Tensor) -> Tensor:
        """The polar factors in the dtype of the products, contiguous in the layout of X."""
        tall = X.shape[-2] > X.shape[-1]
        Y = X.mT if tall else X  # the short side first: the Gram matrix is the smaller one
        Y = Y.float() if Y.dtype.itemsize < 4 else Y
        length = Y.norm(dim=(-2, -1), keepdim=True) * self.safety
        # The clamp prevents 0/0 and is far below any gradient, so the map ignores scale. An
        # overflowed length becomes NaN, because a division by infinity would look like a zero
        # gradient.
        Y = Y / (length.clamp(min=1e-15) + length * 0)
        Y = Y.to(self.dtype_of(Y))
        for n, (a, b, c) in enumerate(self.steps, 1):
            A = Y @ Y.mT
            B = torch.baddbmm(A, A, A, beta=b, alpha=c) if c else b * A
            if tall and n == len(self.steps):  # B is symmetric, so this is the layout of X
                return torch.baddbmm(Y.mT, Y.mT, B, beta=a)
            Y = torch.baddbmm(Y, B, Y, beta=a)
        return Y.mT if tall else Y

    def dtype_of(self, X: Tensor) -> torch.dtype:
        """The dtype of the products."""
        if self.dtype is not None:
            return self.dtype
        return torch.bfloat16 if X.is_cuda and X.dtype == torch.float32 else X.dtype


@dataclass(frozen=True)
class Exact:
    """U V^T by the SVD. Singular values at rounding level count as zero, since sign(0) = 0."""

    name: str = "exact"

    def __call__(self, X: Tensor) -> Tensor:
        W = X.float() if X.dtype.itemsize < 4 else X
        poison = (W * 0).sum((-2, -1), keepdim=True)  # NaN if a matrix has NaN or inf, else 0
        U, s, Vh = torch.linalg.svd(W.nan_to_num(0.0, 0.0, 0.0), full_matrices=False)
        tol = s.amax(-1, keepdim=True) * max(W.shape[-2:]) * torch.finfo(W.dtype).eps
        poison = poison + s.amax(-1)[..., None, None] * 0  # likewise if it overflowed
        UVh: Tensor = (U * (s > tol).to(U.dtype).unsqueeze(-2)) @ Vh + poison
        return UVh.to(X.dtype)


EXACT = Exact()

KELLER = Newton(
    "keller",
    ((3.4445, -4.7750, 2.0315),) * 5,
    "Jordan et al. 2024, Muon: https://kellerjordan.github.io/posts/muon",
)
YOU = Newton(
    "you",
    (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "You Jiacheng 2025: https://x.com/YouJiacheng/status/1905861218138804534",
)
_POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
POLAR_EXPRESS = Newton(
    "polar_express",
    tuple((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in _POLAR_EXPRESS[:5]),
    "Amsel et al. 2025, arXiv:2505.16932, algorithm 1: the first five steps, safety factor 1.01",
    safety=1.01,
)
CUBIC = Newton(
    "cubic",
    ((1.5, -0.5, 0.0),) * 15,
    "the classical Newton-Schulz iteration (Higham 2008, Functions of Matrices, section 8.3)",
)

BACKENDS: dict[str, Polar] = {
    "exact": EXACT,
    **{n.name: n for n in (KELLER, YOU, POLAR_EXPRESS, CUBIC)},
}
