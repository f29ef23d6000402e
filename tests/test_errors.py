"""Bad input is refused at construction, by name, with the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Embedding, Linear, Parameter

from sodaopt import SODA, Method, zoo
from sodaopt.geometry import (
    Ball,
    Clip,
    Diagonal,
    Euclidean,
    Kronecker,
    Sign,
    Spectral,
    conv,
)
from sodaopt.schedules import debias, fade, lr_weighted
from tests.support.tables import network

named = list(Linear(3, 2).named_parameters())
adam = zoo.adam()


def build(params: Any, lr: Any = 0.1, method: Any = adam, **kw: Any) -> Callable[[], Any]:
    return lambda: SODA(params() if callable(params) else params, lr, method, **kw)


def flattened() -> list[Parameter]:
    """A parameter as FullyShardedDataParallel makes it."""
    p = Parameter(torch.ones(12))
    p._fsdp_flattened = True  # type: ignore[attr-defined]
    return [p]


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "negative lr": (build(network, -1.0), ValueError, "negative, infinite or nan, got -1.0"),
    "nan lr": (build(network, float("nan")), ValueError, "negative, infinite or nan, got nan"),
    "method for lr": (build(network, adam), TypeError, r"SODA\(params, lr, method\)"),
    "lr as text": (build(network, "0.1"), TypeError, "lr must be a number"),
    "negative group lr": (
        build(lambda: [{"params": network(), "lr": -2}]),
        ValueError,
        "group 0: lr must not be negative",
    ),
    "no method": (build(network, method=None), ValueError, "group 0 has no method"),
    "method misspelt": (build(network, method="adan"), ValueError, "did you mean 'adam'"),
    "method a function": (build(network, method=zoo.adam), TypeError, r"such as zoo.adamw\(\)"),
    "empty list": (build([]), ValueError, "empty parameter list"),
    "no params key": (build([{"lr": 0.1}]), ValueError, "group 0 has no 'params'"),
    "a set": (build(lambda: [{"params": set(network())}]), TypeError, "set"),
    "no tensor": (build([[1.0]]), TypeError, "expected a tensor, got a list"),
    "named twice": (build([named[0], named[0]]), ValueError, r"weight \(2x3.* is in the optimizer"),
    "two groups": (
        build([{"params": [named[0]]}, {"params": [named[0]]}]),
        ValueError,
        "weight .* twice",
    ),
    "weight decay in a group": (
        build(lambda: [{"params": network(), "weight_decay": 0.1}]),
        ValueError,
        r"group 0 has weight_decay=0.1.*zoo.adamw\(weight_decay=0.1\)",
    ),
    "zero decay on a decaying row": (
        build(lambda: [{"params": network(), "weight_decay": 0}], method=zoo.adamw()),
        ValueError,
        "has weight_decay=0",
    ),
    "betas in a group": (
        build(lambda: [{"params": network()}, {"params": network(), "betas": (0.9, 0.99)}]),
        ValueError,
        r"group 1 has betas=\(0.9, 0.99\)",
    ),
    "spectral on a vector": (
        build(named, method=zoo.muon()),
        ValueError,
        r"bias \(2, float32\) cannot have the geometry of muon: expected a matrix",
    ),
    "spectral on a kernel": (
        build([Parameter(torch.ones(4, 3, 3, 3))], method=zoo.muon()),
        ValueError,
        "4x3x3x3.*view=conv",
    ),
    "conv view on a matrix": (
        build(network, method=Method(Ball(Spectral(view=conv)))),
        ValueError,
        "needs a kernel",
    ),
    "shampoo on a vector": (build(named, method=zoo.shampoo()), ValueError, "bias .* Kronecker"),
    "multinorm on a vector": (build(named, method=zoo.multinorm()), ValueError, "multinorm"),
    "complex": (
        build([Parameter(torch.ones(3, dtype=torch.complex64))]),
        ValueError,
        "complex64.*view_as_real",
    ),
    "flattened": (build(flattened), ValueError, r"parameter 0 .* flattened.*fully_shard"),
    "alpha over 1": (lambda: Method(Kronecker(), alpha=1.5), ValueError, r"alpha must be in \[0"),
    "lam under 0": (lambda: Method(Kronecker(), lam=-0.1), ValueError, "lam must be in"),
    "lam_bar nan": (
        lambda: Method(Kronecker(), lam_bar=float("nan")),
        ValueError,
        "lam_bar must be in",
    ),
    "gamma under 0": (lambda: Method(Kronecker(), gamma=-1.0), ValueError, "gamma must not be"),
    "coefficient function at k = 0": (
        build(network, method=Method(Ball(Sign()), alpha=lambda k, lr: 2.0)),
        ValueError,
        "alpha must be in .* at k = 0",
    ),
    "lr wd over 1": (build(network, 200.0, zoo.adamw()), ValueError, r"lr \* weight_decay"),
    "centre": (lambda: Method(Kronecker(), centre="orgin"), ValueError, "did you mean 'origin'"),
    "geometry": (lambda: Method(Sign()), TypeError, r"geometry such as Ball\(Sign\(\)\)"),
    "norm": (lambda: Ball(Kronecker()), TypeError, "needs a Norm"),
    "radius": (lambda: Clip(Euclidean(), -1), ValueError, "the radius must not be negative"),
    "radius as text": (lambda: Ball(Sign(), "50"), TypeError, "the radius must be a number"),
    "radius with a memory": (
        lambda: Ball(Sign(), lr_weighted()), ValueError, "radius must be a function of .* alone"),
    "rate with a memory": (
        lambda: Diagonal(lr_weighted()), ValueError, "rate must be a function of .* alone"),
    "alpha of numpy": (lambda: Method(Kronecker(), np.float32(1.5)), ValueError, "alpha must be"),
    "alpha a tensor": (lambda: Method(Kronecker(), torch.tensor(0.5)), TypeError, "alpha must be"),
    "alpha as text": (lambda: Method(Kronecker(), alpha="0.5"), TypeError, "must be a number"),
    "function of numpy": (
        build(network, method=Method(Ball(Sign()), alpha=lambda k, lr: np.float32(1.5))),
        ValueError,
        "alpha must be in",
    ),
    "rate": (lambda: Diagonal(1.5), ValueError, "rate must be in"),
    "eps": (lambda: zoo.adam(eps=-1), ValueError, "eps must not be negative"),
    "shampoo's eps": (lambda: zoo.shampoo(eps=-1), ValueError, "eps must be positive"),
    "iterations": (lambda: zoo.multinorm(0), ValueError, "iterations must be an integer of"),
    "scale by name": (lambda: zoo.muon(scale="rms"), TypeError, "such as geometry.rms"),
    "polar by name": (lambda: zoo.muon(polar="exact"), TypeError, "such as polar.EXACT"),
    "base by name": (lambda: zoo.schedule_free("adam"), TypeError, r"such as zoo.adam\(\)"),
    "beta of schedule_free": (lambda: zoo.schedule_free(beta=1.5), ValueError, "beta must be in"),
    "decayed average": (
        lambda: zoo.decayed(zoo.schedule_free(), 0.1), ValueError, "without decay or averaging"),
    "lr and lr_factor": (
        build(lambda: [{"params": network(), "lr": 0.1, "lr_factor": 2}]),
        ValueError,
        "both an lr and an lr_factor",
    ),
    "empty group": (build([{"params": []}]), ValueError, "empty parameter list"),
    "infinite lr": (build(network, float("inf")), ValueError, "negative, infinite or nan"),
    "misspelt group key": (
        build(lambda: [{"params": network(), "methd": adam}]), ValueError, "did you mean 'method'"),
    "misspelt decay": (
        build(lambda: [{"params": network(), "weight_deacy": 0.1}]),
        ValueError,
        "did you mean 'weight_decay'",
    ),
    "ademamix's alpha": (
        lambda: zoo.simplified_ademamix(alpha=-1), ValueError, "alpha must not be negative"),
    "beta": (lambda: zoo.signum(1.0), ValueError, "beta must be in"),
    "betas": (lambda: zoo.adam((0.9, 1.5)), ValueError, "beta in"),
    "lion": (lambda: zoo.lion((0.99, 0.9)), ValueError, r"betas\[0\] <= betas\[1\]"),
    "debias": (lambda: debias(1.0), ValueError, "beta in"),
    "fade": (lambda: fade(0.1, 5, 5), ValueError, "begin < end"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "error", "words"), WRONG.values(), ids=WRONG)
def test_refused(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_a_refused_group_leaves_no_trace() -> None:
    opt = SODA(network(), 0.1, zoo.muon())
    with pytest.raises(ValueError, match="cannot have the geometry"):
        opt.add_param_group({"params": [Parameter(torch.ones(3))]})
    assert len(opt.param_groups) == 1
    assert len(opt.state) == 4


def test_a_coefficient_that_leaves_its_range_later() -> None:
    weights = network()
    opt = SODA(weights, 0.1, Method(Ball(Sign()), alpha=lambda k, lr: 0.5 + 0.2 * k))
    for w in weights:
        w.grad = torch.ones_like(w)
    for _ in range(3):
        opt.step()
    with pytest.raises(ValueError, match=r"alpha must be in \[0, 1\], got 1.1.* at k = 3"):
        opt.step()


def test_sparse_gradients() -> None:
    table = Embedding(5, 3, sparse=True)
    opt = SODA(table.named_parameters(), 0.1, zoo.adam())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"weight of group 0 .* has a sparse gradient.*sparse=False"
    ):
        opt.step()


def test_zero_decay_from_a_framework_is_let_through() -> None:
    SODA([{"params": network(), "weight_decay": 0.0}], 0.1, zoo.adam())


@pytest.mark.parametrize("scheduler", ["OneCycleLR", "CyclicLR"])
def test_momentum_cycling_schedulers(scheduler: str) -> None:
    """torch refuses them by default: SODA has no momentum to cycle."""
    opt = SODA(network(), 0.1, zoo.adam())
    make = getattr(torch.optim.lr_scheduler, scheduler)
    kw: dict[str, Any] = (
        {"max_lr": 0.1, "total_steps": 10}
        if scheduler == "OneCycleLR"
        else {"base_lr": 0.01, "max_lr": 0.1}
    )
    with pytest.raises(ValueError, match="momentum"):
        make(opt, **kw)
    make(opt, cycle_momentum=False, **kw)
