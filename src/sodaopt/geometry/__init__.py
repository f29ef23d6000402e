"""How a step looks: norms and their maps, views of a parameter, width factors, polar factors."""

from sodaopt.geometry.kronecker import Kronecker
from sodaopt.geometry.maps import (
    Ball,
    Clip,
    Context,
    Diagonal,
    Geometry,
    MultiNorm,
    Sharp,
    State,
)
from sodaopt.geometry.norms import BiasRMS, ColNorm, Euclidean, Norm, RowNorm, Sign, Spectral
from sodaopt.geometry.scales import SCALES, Scale, adamw, dense, one_hot, original, rms, unit
from sodaopt.geometry.views import Frame, Shape, View, conv, elements, matrix, transposed, whole

__all__ = [
    "SCALES", "Ball", "BiasRMS", "Clip", "ColNorm", "Context", "Diagonal", "Euclidean", "Frame",
    "Geometry", "Kronecker", "MultiNorm", "Norm", "RowNorm", "Scale", "Shape", "Sharp", "Sign",
    "Spectral", "State", "View", "adamw", "conv", "dense", "elements", "matrix", "one_hot",
    "original", "rms", "transposed", "unit", "whole",
]  # fmt: skip
