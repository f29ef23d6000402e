"""The averaging wrappers equal their published references, resume, and switch exactly."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from sodaopt import GPA, SNOO, SODA, Lookahead, ScheduleFree, zoo
from tests.support.tables import network

Wrap = Callable[[Optimizer], Any]
WRAPS: dict[str, Wrap] = {
    "ScheduleFree": lambda b: ScheduleFree(b, weight_decay_at_y=0.1),
    "GPA": lambda b: GPA(b, lam=0.05),
    "Lookahead": lambda b: Lookahead(b, every=3),
    "SNOO": lambda b: SNOO(b, every=3),
}
BASES: dict[str, Callable[[list[Parameter]], Optimizer]] = {
    "AdamW": lambda ps: AdamW(ps, lr=0.01, weight_decay=0.1),
    "SGD": lambda ps: SGD(ps, lr=0.05, momentum=0.9),
    "SODA": lambda ps: SODA(ps, 0.01, zoo.lion()),
}
wraps = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
bases = pytest.mark.parametrize("base", BASES.values(), ids=BASES)
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)


def noise(k: int, p: Tensor) -> Tensor:
    g = torch.randn(p.shape, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
    return g.to(p.dtype)


def feed(opt: Any, ps: list[Parameter], steps: range, pull: float = 0.3) -> None:
    """Step with the gradients of a noisy quadratic at the point that the parameters hold."""
    for k in steps:
        for p in ps:
            p.grad = noise(k, p) + pull * p.detach()
        opt.step()


def close(a: list[Any], b: list[Any]) -> None:
    for s, t in zip(a, b, strict=True):
        torch.testing.assert_close(s.detach(), t.detach(), rtol=1e-12, atol=1e-12)


def bitwise(a: list[Any], b: list[Any]) -> None:
    assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


# -- references -----------------------------------------------------------------------------------


def sf_sgd(ps: list[Parameter], **kw: Any) -> Any:
    return pytest.importorskip("schedulefree").SGDScheduleFree(ps, lr=0.05, **kw)


def sf_adamw(ps: list[Parameter], **kw: Any) -> Any:
    return pytest.importorskip("schedulefree").AdamWScheduleFree(ps, lr=0.02, **kw)


SF: dict[str, tuple[Any, Any]] = {
    "SGD": (lambda ps: SGD(ps, lr=0.05), sf_sgd),
    "AdamW": (lambda ps: Adam(ps, lr=0.02, betas=(0.0, 0.999)), sf_adamw),
}
SF_OPTIONS: dict[str, dict[str, Any]] = {
    "constant": {},
    "warmup": {"warmup_steps": 7},
    "decay at y": {"weight_decay": 0.2},
    "all": {"warmup_steps": 5, "weight_decay": 0.1, "r": 0.7, "weight_lr_power": 1.5},
}


@pytest.mark.parametrize(("base", "reference"), SF.values(), ids=SF)
@pytest.mark.parametrize("options", SF_OPTIONS.values(), ids=SF_OPTIONS)
def test_schedule_free(base: Any, reference: Any, options: dict[str, Any]) -> None:
    ours, theirs = network(), network()
    ref = reference(theirs, **options)
    ref.train()
    opt = ScheduleFree(
        base(ours),
        weight_decay_at_y=options.get("weight_decay", 0.0),
        **{k: v for k, v in options.items() if k in ("r", "weight_lr_power")},
    )
    lr, warmup = opt.param_groups[0]["lr"], options.get("warmup_steps", 0)
    for k in range(30):
        opt.param_groups[0]["lr"] = lr * min(1, (k + 1) / warmup) if warmup else lr
        feed(opt, ours, range(k, k + 1))
        feed(ref, theirs, range(k, k + 1))
        close(ours, theirs)
    opt.eval()
    ref.eval()
    close(ours, theirs)


def rise_and_fall(k: int) -> float:
    """A warmup over five steps, then a decay to a twentieth of the peak."""
    return min((k + 1) / 5, 1.0) * (1 - 0.95 * max(k - 5, 0) / 24)


@pytest.mark.parametrize("loads", [False, True], ids=["one run", "loaded after the peak"])
@pytest.mark.parametrize(("base", "reference"), SF.values(), ids=SF)
def test_schedule_free_weights_by_the_largest_lr(base: Any, reference: Any, loads: bool) -> None:
    """After the peak every step weighs as much as the peak, also in a loaded run."""
    ours, theirs = network(), network()
    opt, ref = ScheduleFree(base(ours), r=0.5), reference(theirs, r=0.5)
    ref.train()
    lr = opt.param_groups[0]["lr"]
    for k in range(30):
        if loads and k in (7, 20):
            saved = opt.state_dict()
            opt = ScheduleFree(base(ours), r=0.5)
            opt.load_state_dict(copy.deepcopy(saved))
        opt.param_groups[0]["lr"] = ref.param_groups[0]["lr"] = lr * rise_and_fall(k)
        feed(opt, ours, range(k, k + 1))
        feed(ref, theirs, range(k, k + 1))
        close(ours, theirs)
    assert opt.param_groups[0]["sf_lr_max"] == lr
    opt.eval()
    ref.eval()
    close(ours, theirs)


def test_schedule_free_from_a_learning_rate_of_zero() -> None:
    weights = network()
    opt = ScheduleFree(SGD(weights, lr=0.0))
    before = [w.detach().clone() for w in weights]
    feed(opt, weights, range(1))
    bitwise(weights, before)
    opt.param_groups[0]["lr"] = 0.1
    feed(opt, weights, range(1, 3))
    assert all(w.isfinite().all() for w in weights)


def test_gpa() -> None:
    """z <- (1 - lr wd) z + u, x <- (1-lam) x + lam z, y = (1-lam_bar) x + lam_bar z."""
    p = Parameter(torch.randn(4, 3, dtype=torch.float64))
    x = z = y = p.detach().clone()
    opt = GPA(SGD([p], lr=0.1), lam=0.2, lam_bar=0.3)
    decayed = Parameter(p.detach().clone())
    xd = zd = yd = x
    opt2 = GPA(AdamW([decayed], lr=0.1, weight_decay=0.5, betas=(0.0, 0.0)), lam=0.2, lam_bar=0.3)
    for k in range(20):
        g, gd = noise(k, p) + 0.3 * y, noise(k, p) + 0.3 * yd
        z = z - 0.1 * g
        zd = (1 - 0.1 * 0.5) * zd - 0.1 * gd / (gd.abs() + 1e-8)
        x, xd = 0.8 * x + 0.2 * z, 0.8 * xd + 0.2 * zd
        y, yd = 0.7 * x + 0.3 * z, 0.7 * xd + 0.3 * zd
        feed(opt, [p], range(k, k + 1))
        feed(opt2, [decayed], range(k, k + 1))
        close([p, decayed], [y, yd])
    opt.eval()
    opt2.eval()
    close([p, decayed], [x, xd])


def test_gpa_defaults() -> None:
    """1 - lam_bar = 0.9 and 1 - lam = 0.9^(1/32), to the four digits of the paper."""
    p = Parameter(torch.randn(4, 3, dtype=torch.float64))
    x = z = y = p.detach().clone()
    opt = GPA(SGD([p], lr=0.1))
    for k in range(20):
        z = z - 0.1 * (noise(k, p) + 0.3 * y)
        x = (1 - 0.003287) * x + 0.003287 * z
        y = 0.9 * x + 0.1 * z
        feed(opt, [p], range(k, k + 1))
        close([p], [y])
    opt.eval()
    close([p], [x])
    assert pytest.approx(0.9, abs=1e-4) == (1 - 0.003287) ** 32


@bases
def test_lookahead(base: Any) -> None:
    reference = pytest.importorskip("pytorch_optimizer").Lookahead
    ours, theirs = network(), network()
    opt, ref = Lookahead(base(ours)), reference(base(theirs), k=5, alpha=0.5)
    for k in range(23):
        feed(opt, ours, range(k, k + 1))
        feed(ref, theirs, range(k, k + 1))
        close(ours, theirs)


def test_snoo() -> None:
    """Every third step: s = x - z, b <- mu b + s, x <- x - lr (s + mu b), z <- x."""
    p = Parameter(torch.randn(4, 3, dtype=torch.float64))
    x = z = p.detach().clone()
    b = torch.zeros_like(z)
    opt = SNOO(SGD([p], lr=0.1), every=3, lr=0.6, momentum=0.8)
    outer = torch.optim.SGD([Parameter(x.clone())], lr=0.6, momentum=0.8, nesterov=True)
    slow = outer.param_groups[0]["params"][0]
    for k in range(20):
        z = z - 0.1 * (noise(k, p) + 0.3 * z)
        if k % 3 == 2:
            s = x - z
            b = 0.8 * b + s
            slow.grad = slow.detach() - z
            outer.step()
            x = z = x - 0.6 * (s + 0.8 * b)
            close([slow], [x])
        feed(opt, [p], range(k, k + 1))
        close([p], [z])
    opt.eval()
    close([p], [x])


# -- all of them ----------------------------------------------------------------------------------


@wraps
@bases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resume_is_bitwise(wrap: Wrap, base: Any, dtype: torch.dtype) -> None:
    there, back = network(dtype), network(dtype, seed=4)
    opt = wrap(base(there))
    feed(opt, there, range(7))
    file = io.BytesIO()
    torch.save({"w": there, "opt": opt.state_dict()}, file)
    feed(opt, there, range(7, 14))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for w, v in zip(back, saved["w"], strict=True):
        w.data.copy_(v)
    fresh = wrap(base(back))
    fresh.load_state_dict(saved["opt"])
    feed(fresh, back, range(7, 14))
    bitwise(there, back)


@wraps
@bases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_leaves_a_loaded_checkpoint_alone(
    wrap: Wrap, base: Any, dtype: torch.dtype
) -> None:
    """The wrapper copies its tensors from the checkpoint. (torch itself shares the base's.)"""
    weights, new = network(dtype), network(dtype)
    opt, fresh = wrap(base(weights)), wrap(base(new))
    feed(opt, weights, range(4))
    loaded = copy.deepcopy(opt.state_dict())
    fresh.load_state_dict(loaded)
    mine = [(n, k) for n, s in loaded["state"].items() for k in s if k.startswith(opt._prefix)]
    before = copy.deepcopy(loaded)
    feed(fresh, new, range(4, 8))
    fresh.eval()
    assert len(mine) >= len(weights)
    for n, k in mine:
        assert torch.equal(loaded["state"][n][k], before["state"][n][k]), k
        assert not torch.equal(fresh.state_dict()["state"][n][k], before["state"][n][k]), k
    assert loaded["param_groups"] == before["param_groups"]


@wraps
@bases
@dtypes
def test_switching_is_exact(wrap: Wrap, base: Any, dtype: torch.dtype) -> None:
    weights, other = network(dtype), network(dtype)
    opt, calm = wrap(base(weights)), wrap(base(other))
    for k in range(7):
        feed(opt, weights, range(k, k + 1))
        feed(calm, other, range(k, k + 1))
        y = [w.detach().clone() for w in weights]
        for _ in range(3):
            opt.eval()
            opt.eval()
            opt.train()
            bitwise(weights, y)
    bitwise(weights, other)
    opt.eval()
    assert not all(torch.equal(a, b) for a, b in zip(weights, y, strict=True))
    with pytest.raises(RuntimeError, match=r"call train\(\) first"):
        opt.step()


@pytest.mark.parametrize("make", [SGD, AdamW])
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_bf16_averages_follow_fp32(wrap: Wrap, make: Any) -> None:
    """Each step alone is too small for 16 bits, in which AdamW's moments would stall too."""
    start = torch.ones(2000).bfloat16()
    low, high = Parameter(start.clone()), Parameter(start.float())
    one, two = (wrap(make([p], lr=1e-3, weight_decay=0)) for p in (low, high))
    for _ in range(300):
        low.grad, high.grad = torch.ones_like(low), torch.ones_like(high)
        one.step()
        two.step()
    one.eval()
    two.eval()
    moved, wanted = 1 - low.float().mean(), 1 - high.mean()
    assert abs(moved - wanted) < 0.03 * wanted


WRONG = {
    "beta": (lambda: ScheduleFree(SGD(network()), beta=1.5), "beta must be in"),
    "lam": (lambda: GPA(SGD(network()), lam=-1), "lam must be in"),
    "every": (
        lambda: Lookahead(SGD(network()), every=0),
        "every must be an integer of at least 1, got 0",
    ),
    "momentum": (lambda: SNOO(SGD(network()), momentum=2), "momentum must be in"),
    "nested": (
        lambda: GPA(Lookahead(SGD(network()))),
        "or is a wrapper itself",
    ),
    "LBFGS": (
        lambda: Lookahead(torch.optim.LBFGS(network())),
        "evaluates the loss at several points",
    ),
}


@pytest.mark.parametrize(("make", "words"), WRONG.values(), ids=WRONG)
def test_refused(make: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make()
