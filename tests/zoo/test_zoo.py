"""Every row is a method that trains, prints, has a documented source, and checks its arguments."""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sodaopt
from sodaopt import SODA, Method, SODAWrapper, zoo
from sodaopt.geometry import Ball, Clip, Sign, unit
from sodaopt.schedules import Coef, after, coupled, fade, over, uniform
from tests.support.reference import iterates
from tests.support.tables import METHODS, ROWS, SODAS, backward, network

# the public rows, as users were promised them
PROMISED = [
    "adam", "adamw", "nadam", "torch_nadam", "signsgd", "ssd", "signum", "lion", "muon", "scion",
    "uscion", "shampoo", "multinorm", "simplified_ademamix", "schedule_free", "dual_averaging",
    "double_averaging", "oda", "moda", "frank_wolfe", "accelerated", "soda_dagger", "sgd",
    "nesterov", "gpa", "amuse",
]  # fmt: skip


class NoReads(TorchDispatchMode):
    """Fails if a number is read from a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a tensor was read"
        return func(*args, **(kwargs or {}))


def test_all_promised_rows_are_there() -> None:
    assert set(PROMISED) <= set(zoo.ROWS)
    assert all(getattr(zoo, name) is zoo.ROWS[name] for name in zoo.ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("method", {**ROWS, **SODAS}.values(), ids={**ROWS, **SODAS})
def test_trains(method: Method) -> None:
    """At some learning rate of a coarse grid, 60 steps lower the loss by a tenth at least."""
    for lr in (0.03, 0.1, 0.3, 0.01, 0.001):
        weights = network(torch.float32)
        first = backward(weights)
        opt = SODA(weights, lr, method)
        for _ in range(60):
            backward(weights)
            opt.step()
        opt.eval()
        if backward(weights) < 0.9 * first:
            return
    pytest.fail("no learning rate lowers the loss")


@pytest.mark.parametrize("method", {**ROWS, **SODAS}.values(), ids={**ROWS, **SODAS})
def test_coefficients_of_tensors_read_no_value(method: Method) -> None:
    """A CUDA graph of the step computes them on the device, and reading one would end it."""
    k, lr = torch.ones((), dtype=torch.float64), torch.ones(())
    past = {name: torch.ones((), dtype=torch.float64) for name in method.memory}
    with NoReads():
        method.coefs(k, lr, method.advance(past, k, lr))


@pytest.mark.parametrize("name", zoo.ROWS)
def test_is_documented_and_named(name: str) -> None:
    row = zoo.ROWS[name]
    if name in PROMISED:
        doc = inspect.getdoc(row) or ""
        assert "(" in doc.splitlines()[-1] or "Scion" in doc or "paper" in doc  # its source
    assert row().name == name
    assert name in repr(row())
    assert row() == row()
    assert all(p.default is not p.empty for p in inspect.signature(row).parameters.values())


@pytest.mark.parametrize("name", SODAS)
def test_anchored_form(name: str) -> None:
    """It is the paper's: the template with z = z0 + (k+2) u and lam = 1/(k+2)."""
    method, base = SODAS[name], ROWS[name[5:-1]]
    paper = replace(base, lam=uniform, gamma=over(base.gamma, uniform), centre="init")
    # A square matrix: the zero eigenvalue of a tall one makes Shampoo's root a matter of rounding.
    x0 = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours, theirs = (iterates(m, x0, lambda y: y + x0.sin(), 0.01) for m in (method, paper))
    for a, b in islice(zip(ours, theirs, strict=True), 8):
        torch.testing.assert_close(a.y, b.y, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="without decay or averaging"):
        zoo.soda(method)


DECAYS = {
    "coupled": coupled(uniform),
    "fade": fade(uniform, 3, 8),
    "after": after(uniform, 4),
    "constant": 0.1,
    "none": 0.0,
}


@pytest.mark.parametrize("decay", DECAYS.values(), ids=DECAYS)
@pytest.mark.parametrize("name", SODAS)
def test_a_decay_changes_the_pull_alone(name: str, decay: Coef) -> None:
    """Also at lr = 0, where the coupled pull ends, and if lam is replaced later."""
    base = ROWS[name[5:-1]]
    rows = (zoo.soda(base, decay), replace(zoo.soda(base), lam=decay))
    weights = [network() for _ in range(3)]
    wrapped = SODAWrapper(SODA(weights[2], 0.01, base), decay=decay)
    opts = [*(SODA(w, 0.01, row) for w, row in zip(weights, rows, strict=False)), wrapped]
    for k in range(10):
        for opt, w in zip(opts, weights, strict=True):
            opt.param_groups[0]["lr"] = 0.01 * (1 - k / 9)
            backward(w)
            opt.step()
    for a, b, c in zip(*weights, strict=True):
        torch.testing.assert_close(a, c, rtol=1e-9, atol=1e-9)
        assert torch.equal(a, b)


@pytest.mark.parametrize("slots", [{"centre": "last"}, {"centre": "init", "lam_bar": 0.5}])
def test_a_full_step_needs_a_centre_and_no_extrapolation(slots: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="full_step needs the centre"):
        Method(Ball(Sign(unit)), lam=0.1, full_step=True, **slots)


def test_weight_decay_zero_is_centre_last() -> None:
    rows = zoo.ROWS
    decayed = [n for n in rows if "weight_decay" in inspect.signature(rows[n]).parameters]
    assert {"adamw", "lion", "muon"} <= set(decayed)
    for name in decayed:
        assert rows[name](weight_decay=0).centre == "last", name
        assert rows[name](weight_decay=0.1).centre == "origin", name
        with pytest.raises(ValueError, match="weight_decay must not be negative"):
            rows[name](weight_decay=-0.1)


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.centre == "origin"])
def test_decay_and_anchor_do_not_mix(name: str) -> None:
    with pytest.raises(ValueError, match="without decay or averaging"):
        zoo.soda(METHODS[name])


def test_a_newcomers_row_in_one_line() -> None:
    """Signum with clip: registered by its decorator, found by name, covered by the tables."""

    @zoo.row
    def newcomer(beta: float = 0.9) -> Method:
        return replace(zoo.signum(beta), geometry=Clip(Sign(unit)))

    try:
        weights = network()
        first = backward(weights)
        opt = SODA(weights, 0.05, "newcomer")
        for _ in range(50):
            backward(weights)
            opt.step()
        assert backward(weights) < first
    finally:
        del zoo.ROWS["newcomer"]


def test_clip_is_anchored_with_its_own_step() -> None:
    """u is the clipped step itself and not a clip of the enlarged step."""
    base = replace(zoo.signum(0.5), geometry=Clip(Sign(unit), 0.2))
    w = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    x, m = w.detach().clone(), torch.zeros_like(w)
    z0 = x.clone()
    opt = SODA([w], 0.7, zoo.soda(base))
    for k in range(20):
        w.grad = torch.randn_like(w) * 10 ** (k % 3 - 2)
        m = 0.5 * m + 0.5 * w.grad
        u = -0.2 * min(1.0, 0.7 * 0.2 * float(m.abs().sum())) * m.sign()
        x = x + (z0 - x) / (k + 2) + u
        opt.step()
        torch.testing.assert_close(w.detach(), x, rtol=1e-12, atol=1e-12)


def test_unknown_rows_suggest_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'lion'"):
        SODA(network(), 0.1, "lino")


def test_public_names() -> None:
    for name in ("SODA", "Method", "zoo", "schedules", "geometry"):
        assert name in sodaopt.__all__
        assert hasattr(sodaopt, name)
    assert Ball(Sign()) == Ball(Sign())
