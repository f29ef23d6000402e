"""Tables of methods and geometries that tests run over, and a problem to train on."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor
from torch.nn import Parameter

from sodaopt import Method, zoo
from sodaopt.geometry import (
    Ball,
    BiasRMS,
    Clip,
    ColNorm,
    Diagonal,
    Euclidean,
    Geometry,
    RowNorm,
    Sharp,
    Sign,
    Spectral,
    unit,
)
from sodaopt.geometry.polar import EXACT
from sodaopt.schedules import uniform


def anchored(method: Method) -> bool:
    """Whether zoo.soda takes the method."""
    return method.centre == "last" and method.lam == 1


ROWS = {name: row() for name, row in zoo.ROWS.items()}
SODAS = {m.name: m for m in map(zoo.soda, filter(anchored, ROWS.values()))}

# Every way in which x, y and z can coincide or must be kept.
GRID = {
    f"{centre},lam={getattr(lam, '__name__', lam)},lam_bar={lam_bar}": Method(
        Ball(Sign(unit)), 0.2, 0.1, lam, lam_bar, 0.05, centre
    )
    for centre, lam, lam_bar in product(
        ("origin", "init", "last"), (1.0, 0.3, uniform), (0.0, 0.2, 1.0)
    )
}

GEOMETRIES: dict[str, Geometry] = {
    **{
        f"{m.__name__}({type(n).__name__})": m(n, 1.5)
        for m in (Ball, Sharp, Clip)
        for n in (
            Sign(),
            Spectral(polar=EXACT),
            Spectral(),
            ColNorm(),
            RowNorm(),
            BiasRMS(),
            Euclidean(),
        )
    },
    "Diagonal(0.1)": Diagonal(0.1),
}
MAPS = {
    f"{centre},{name}": Method(geometry, 0.2, 0.1, lam, lam_bar, 0.05, centre)
    for name, geometry in GEOMETRIES.items()
    for centre, lam, lam_bar in (("init", uniform, 0.0), ("last", 0.3, 0.2), ("last", 1.0, 0.0))
}

METHODS: dict[str, Method] = {**ROWS, **SODAS, **GRID, **MAPS}
AVERAGED = {name: m for name, m in METHODS.items() if m._keeps_x}
FEW = {
    name: METHODS[name]
    for name in (
        "adamw",
        "torch_nadam",
        "muon",
        "soda_dagger",
        "schedule_free",
        "shampoo",
        "soda(lion)",
        "last,lam=0.3,lam_bar=0.0",
        "oda",
    )
}


def network(dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Parameter]:
    """Return the weights of a tanh network without biases. Two of them have the same shape."""
    rng = torch.Generator().manual_seed(seed)
    shapes = ((6, 5), (6, 6), (6, 6), (3, 6))
    return [
        Parameter((torch.randn(s, generator=rng, dtype=torch.float64) * 0.4).to(dtype))
        for s in shapes
    ]


def loss(weights: list[Tensor]) -> Tensor:
    """Return the mean squared error on fixed data."""
    rng = torch.Generator().manual_seed(1)
    h = torch.randn(5, 32, generator=rng, dtype=torch.float64)
    t = torch.randn(3, 32, generator=rng, dtype=torch.float64)
    for w in weights[:-1]:
        h = torch.tanh(w.double() @ h)
    return (weights[-1].double() @ h - t).square().mean()


def backward(weights: list[Parameter]) -> float:
    for w in weights:
        w.grad = None
    value = loss(list(weights))
    value.backward()
    return float(value.detach())
