"""Scales: the width factors of a norm's ball, as named functions of the shape."""

import math
from collections.abc import Callable
from typing import TypeAlias

from sodaopt.geometry.views import Frame

Factor: TypeAlias = Callable[[int, int], float]
Scale: TypeAlias = Callable[[Factor, Frame], float]
"""A function of the norm's own factor and the frame of the parameter."""


def dense(factor: Factor, f: Frame) -> float:
    """factor(d_out, d_in)/taps: the paper's c for hidden, last and image-input layers.

    >>> geometry.Spectral(geometry.dense).width((64, 16))  # sqrt(d_out/d_in)
    2.0
    """
    return factor(f.o, f.i) / f.taps


def one_hot(factor: Factor, f: Frame) -> float:
    """factor(d_out, 1)/taps: the paper's c for a one-hot (token) first layer.

    >>> geometry.Sign(geometry.one_hot).width((64, 16))
    1.0
    """
    return factor(f.o, 1) / f.taps


def unit(factor: Factor, f: Frame) -> float:
    """1: the plain norm (Lion, Signum, SSD).

    >>> zoo.lion().geometry.norm.scale is geometry.unit
    True
    """
    return 1.0


def original(factor: Factor, f: Frame) -> float:
    """sqrt(max(1, d_out/(d_in taps))): Muon as first published, torch's "original".

    >>> zoo.muon().geometry.norm.width((64, 16))
    2.0
    """
    return math.sqrt(max(1.0, f.o / (f.i * f.taps)))


def rms(factor: Factor, f: Frame) -> float:
    """sqrt(max(d_out, d_in taps)): an orthogonal update of unit RMS, the paper's Muon baseline.

    >>> zoo.muon(scale=geometry.rms).geometry.norm.width((64, 16))
    8.0
    """
    return math.sqrt(max(f.o, f.i * f.taps))


def adamw(factor: Factor, f: Frame) -> float:
    """0.2 sqrt(max(d_out, d_in taps)): Moonlight, torch's "match_rms_adamw".

    >>> zoo.muon(scale=geometry.adamw).geometry.norm.width((64, 16))
    1.6
    """
    return 0.2 * rms(factor, f)


SCALES: dict[str, Scale] = {s.__name__: s for s in (dense, one_hot, unit, original, rms, adamw)}
"""The scales by name."""
