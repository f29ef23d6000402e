"""Random tensors, metrics and strongly convex geometries for the tests of the theory."""

import torch
from hypothesis import strategies as st

from sodaopt import zoo
from sodaopt.geometry import Ball, Clip, Context, Euclidean, Sharp, Sign, Spectral, unit
from sodaopt.geometry.polar import EXACT
from sodaopt.geometry.views import matrix
from sodaopt.theory.regularisers import FixedMetric, PNorm, Smoothed, clip

SHAPE = (4, 3)
SEEDS = st.integers(0, 2**31)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def metric(seed: int, d: int = SHAPE[0]) -> torch.Tensor:
    """Return a positive definite matrix that is symmetric up to rounding."""
    A = normal(seed, d, d)
    return A @ A.mT + 0.1 * torch.eye(d, dtype=torch.float64)


def mirror(geometry, m_bar, gamma):
    """Return the geometry's map of one tensor."""
    return geometry([m_bar], gamma, Context([m_bar.shape], [m_bar], 0, 1.0, [{}]))[0]


SPECTRAL = Spectral(unit, polar=EXACT)
STRONGLY_CONVEX = {
    "Euclidean": zoo.GD,
    "Euclidean, radius 2": Sharp(Euclidean(), 2.0),
    "clip": clip(1.5),
    "metric": FixedMetric(metric(0)),
    "p = 2": PNorm(2.0),
    "p = 1.5": PNorm(1.5),
    "p = 1.1": PNorm(1.1),
    "sign ball": Smoothed(Ball(Sign(unit)), 0.7),
    "sign sharp": Smoothed(Sharp(Sign(unit)), 0.7),
    "sign clip": Smoothed(Clip(Sign(unit), 1.5), 0.3),
    "sign ball with width": Smoothed(Ball(Sign(), 3.0), 0.7),
    "spectral ball": Smoothed(Ball(SPECTRAL), 0.7),
    "spectral sharp": Smoothed(Sharp(SPECTRAL, 2.0), 0.7),
    "spectral clip": Smoothed(Clip(SPECTRAL), 0.3),
    "Euclidean ball": Smoothed(Ball(Euclidean(view=matrix), 2.0), 0.5),
}
