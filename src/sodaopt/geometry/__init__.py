"""The mirror map u = argmin_u gamma (m_bar . u) + psi(u), in the paper's sign: u points downhill.

Three regularisers turn any norm into a map. D is the norm's unit ball, rho the layer's radius:

    Ball   psi = indicator of gamma rho D  u = gamma rho lmo(m_bar)
    Sharp  psi = 1/2 ||u||^2               u = gamma rho^2 dual(m_bar) lmo(m_bar)
    Clip   psi = both, on rho D            u = rho min(1, gamma rho dual(m_bar)) lmo(m_bar)

A norm has a linear minimisation oracle, lmo(d) = argmin d . x over D, and a dual norm,
dual(d) = -d . lmo(d). A view says how the parameter is a batch of matrices X (o x i), and a scale
gives the width factor c. The lmo is c times the minimiser, and the norm is the size over c:

    norm       c, dense   c, one-hot  minimiser         size
    Spectral   sqrt(o/i)  sqrt(o)     -U V^T            the largest singular value
    ColNorm    sqrt(o)/i  sqrt(o)     -column / length  the longest column
    RowNorm    1/sqrt(i)  1           -row / length     the longest row
    Sign       1/i        1           -sign(X)          the largest entry
    BiasRMS    sqrt(n)                -X / length       the length, for n entries
    Euclidean  1                      -X / length       the length

`Diagonal`, `Kronecker` and `MultiNorm` are maps without a norm of this table. A geometry is a value
without memory: it declares the tensors that it needs between steps by `state`, and the optimizer
keeps them.

norm: the norm of the layer.
radius: rho >= 0, a number or a function of (k, lr).
scale: the width factor c, a function of `factor` and `f`.
view: how the parameter is a batch of matrices, a function from `shape` to a `Frame`.
factor: the norm's own c, a function of (d_out, d_in).
f: the frame of the parameter: d_out = f.o, d_in = f.i, and f.taps positions of a kernel.
shape: the shape of the parameter.
"""

from sodaopt.geometry.kronecker import Kronecker
from sodaopt.geometry.maps import Ball, Clip, Context, Diagonal, Geometry, MultiNorm, Sharp, State
from sodaopt.geometry.norms import BiasRMS, ColNorm, Euclidean, Norm, RowNorm, Sign, Spectral
from sodaopt.geometry.scales import SCALES, Scale, adamw, dense, one_hot, original, rms, unit
from sodaopt.geometry.views import Frame, Shape, View, conv, elements, matrix, transposed, whole

__all__ = [
    "SCALES", "Ball", "BiasRMS", "Clip", "ColNorm", "Context", "Diagonal", "Euclidean", "Frame",
    "Geometry", "Kronecker", "MultiNorm", "Norm", "RowNorm", "Scale", "Shape", "Sharp", "Sign",
    "Spectral", "State", "View", "adamw", "conv", "dense", "elements", "matrix", "one_hot",
    "original", "rms", "transposed", "unit", "whole",
]  # fmt: skip
