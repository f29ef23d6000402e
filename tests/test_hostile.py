"""Uses that version 0.1 accepted and got wrong, or refused without a way out."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from sodaopt import GPA, SNOO, SODA, Lookahead, ScheduleFree, SODAWrapper, plan, schedules, zoo
from sodaopt.core import optimizer


def params(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(s).to(dtype)) for s in shapes or ((4, 3), (5,))]


def feed(opt: Any, steps: int = 3) -> None:
    for k in range(steps):
        for group in opt.param_groups:
            for p in group["params"]:
                p.grad = torch.full_like(p, 0.1 * (k + 1))
        opt.step()


def adamw(ps: list[nn.Parameter], **more: Any) -> AdamW:
    return AdamW(ps, lr=0.01, weight_decay=0, **more)


def snapshot(opt: Any) -> dict[str, Any]:
    return copy.deepcopy(opt.state_dict())


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


# -- loading --------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "SODA": lambda ps: SODA(ps, 0.01, zoo.soda(zoo.adam())),
    "SODAWrapper": lambda ps: SODAWrapper(adamw(ps)),
    "SODAWrapper(SGD)": lambda ps: SODAWrapper(SGD(ps, 0.01, momentum=0.9)),
    "ScheduleFree": lambda ps: ScheduleFree(adamw(ps)),
    "GPA": lambda ps: GPA(adamw(ps)),
    "Lookahead": lambda ps: Lookahead(adamw(ps)),
    "SNOO": lambda ps: SNOO(adamw(ps)),
}


def saved(name: str, *shapes: tuple[int, ...]) -> dict[str, Any]:
    opt = (MAKERS | {"AdamW": adamw})[name](params(*shapes))
    feed(opt)
    return snapshot(opt)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = (
    {
        f"{new} reads {old}": (new, saved(old), "written by|was written")
        for old, new in [
            ("SODAWrapper", "GPA"),
            ("GPA", "SODAWrapper"),
            ("ScheduleFree", "GPA"),
            ("Lookahead", "SNOO"),
            ("SODA", "SODAWrapper"),
            ("SODAWrapper(SGD)", "SODAWrapper"),
        ]
    }
    | {
        f"{name} reads another model": (name, saved(name, (3, 4), (5,)), "model that wrote it")
        for name in MAKERS
    }
    | {
        f"{name} reads AdamW of another model": (
            name,
            saved("AdamW", (3, 4), (5,)),
            "exp_avg of shape 3x4.*of the model that wrote it",
        )
        for name in ("SODAWrapper", "GPA")
    }
    | {
        f"{name} reads fewer parameters": (name, saved(name, (4, 3)), "parameter")
        for name in MAKERS
    }
)


@pytest.mark.parametrize(("name", "state", "words"), REFUSED.values(), ids=REFUSED)
def test_a_refused_load_changes_nothing(name: str, state: dict[str, Any], words: str) -> None:
    opt = MAKERS[name](params())
    feed(opt)
    before = snapshot(opt)
    with pytest.raises(ValueError, match=words):
        opt.load_state_dict(state)
    assert same(snapshot(opt), before)
    feed(opt)


def test_settings_of_the_method_are_compared() -> None:
    one, other = SODA(params(), 0.01, zoo.adam()), SODA(params(), 0.01, zoo.adam(betas=(0.5, 0.9)))
    with pytest.raises(ValueError, match="build the optimizer with the settings of the checkpoint"):
        other.load_state_dict(one.state_dict())
    old = one.state_dict()
    for group in old["param_groups"]:
        del group["settings"]
    with pytest.warns(UserWarning, match="has no settings of its method"):
        one.load_state_dict(old)
    other = SODA(params(), 0.01, zoo.adam())
    other.load_state_dict(one.state_dict())  # saved again, it has them
    one.load_state_dict(other.state_dict())


@pytest.mark.parametrize("name", sorted(zoo.ROWS))
def test_settings_do_not_depend_on_the_process(name: str) -> None:
    """No address of a function is in them."""
    settings = repr(zoo.ROWS[name]())
    assert "0x" not in settings
    assert settings.startswith(f"Method({name}: geometry=")


def test_state_of_the_user_stays() -> None:
    """torch keeps state entries that do not belong to a parameter."""
    opt = SODA(params(), 0.01, zoo.adam())
    opt.state["note"] = {"epoch": 3}
    feed(opt)
    state = snapshot(opt)
    assert state["state"]["note"] == {"epoch": 3}
    other = SODA(params(), 0.01, zoo.adam())
    other.load_state_dict(state)
    assert other.state["note"] == {"epoch": 3}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [n for n in MAKERS if n != "SODA"])
def test_an_empty_16_bit_parameter_after_loading(name: str, dtype: torch.dtype) -> None:
    one, two = (MAKERS[name](params((4, 3), (0, 3), dtype=dtype)) for _ in range(2))
    feed(one)
    two.load_state_dict(snapshot(one))
    feed(two)


def test_the_step_counts_beyond_2_to_the_24() -> None:
    opt = SODA(params(), 0.01, zoo.soda(zoo.adam()))
    feed(opt, 1)
    for s in opt.state.values():
        s["step"].fill_(2.0**24)
    other = SODA(params(), 0.01, zoo.soda(zoo.adam()))
    feed(opt, 1)
    other.load_state_dict(snapshot(opt))
    feed(other, 1)
    assert {int(s["step"]) for s in other.state.values()} == {2**24 + 2}


# -- pickles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"start": 2}], ids=str)
def test_a_class_form_pickles(options: dict[str, Any]) -> None:
    cls = SODAWrapper.of(AdamW, **options)
    assert pickle.loads(pickle.dumps(cls)) is cls
    opt = cls(params(), lr=0.01)
    feed(opt)
    assert isinstance(pickle.loads(pickle.dumps(opt)), cls)
    assert SODAWrapper.of(AdamW, start=7) is not cls


# -- arguments ------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "SNOO lr nan": (lambda: SNOO(adamw(params()), lr=math.nan), ValueError, "lr must not be"),
    "SNOO lr negative": (lambda: SNOO(adamw(params()), lr=-1), ValueError, "lr must not be"),
    "decay at y negative": (
        lambda: ScheduleFree(adamw(params()), weight_decay_at_y=-1), ValueError, "y must not be"),
    "decay at y nan": (
        lambda: ScheduleFree(adamw(params()), weight_decay_at_y=math.nan), ValueError, "infinite"),
    "decay at y text": (
        lambda: ScheduleFree(adamw(params()), weight_decay_at_y="x"), TypeError, "a number"),  # type: ignore[arg-type]
    "Lookahead every True": (lambda: Lookahead(adamw(params()), every=True), ValueError, "every"),
    "GPA lam text": (lambda: GPA(adamw(params()), lam="x"), TypeError, "lam must be a number"),  # type: ignore[arg-type]
    "SODA of a set": (lambda: SODA(set(params()), 0.1, zoo.adam()), TypeError, "pass a list"),
    "SODA seed text": (lambda: SODA(params(), 0.1, zoo.adam(), seed="x"), TypeError, "seed"),  # type: ignore[arg-type]
    "wrapper seed text": (lambda: SODAWrapper(adamw(params()), seed="x"), TypeError, "seed"),  # type: ignore[arg-type]
    "coupled without ()": (
        lambda: SODAWrapper(adamw(params()), decay=schedules.coupled),
        TypeError, r"as schedules.coupled\(\), got <function coupled"),
    "a class as decay": (
        lambda: SODAWrapper(adamw(params()), decay=schedules.fade),
        TypeError, r"as schedules.coupled\(\), got <class"),
    "SparseAdam": (
        lambda: SODAWrapper(torch.optim.SparseAdam(params())), TypeError, "dense gradients"),
    "differentiable": (
        lambda: SODAWrapper(Adam(params(), differentiable=True)), ValueError, "differentiable"),
    "twice": (lambda: SODA(params()[:1] * 2, 0.1, zoo.adam()), ValueError, "twice: remove one"),
    "complex": (
        lambda: SODA([nn.Parameter(torch.ones(2, dtype=torch.complex64))], 0.1, zoo.adam()),
        ValueError, "view_as_real"),
    "soda of soda_dagger": (
        lambda: zoo.soda(zoo.soda_dagger()), ValueError, "anchored already, use it as it is"),
    "soda of an average": (
        lambda: zoo.soda(zoo.gpa()), ValueError, "averages, pass the method inside it"),
    "recipe of an anchored recipe": (
        lambda: plan(nn.Linear(3, 2), "soda(soda_dagger)"), ValueError, "anchored already"),
    "no lr": (lambda: SODA(params(), method=zoo.adam()), ValueError, "group 0 has no lr"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "error", "words"), WRONG.values(), ids=WRONG)
def test_refused(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_lr_may_be_in_the_groups() -> None:
    a, b = params()
    opt = SODA([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.2}], method=zoo.adam())
    assert [g["lr"] for g in opt.param_groups] == [0.1, 0.2]
    feed(opt)


def test_a_zero_weight_decay_may_be_a_tensor() -> None:
    feed(SODAWrapper(AdamW(params(), weight_decay=torch.tensor(0.0))))
    with pytest.raises(ValueError, match="weight_decay"):
        SODAWrapper(AdamW(params(), weight_decay=torch.tensor(0.1)))


def test_diagnostics_at_lr_zero() -> None:
    """The pull acts although lr is 0: no weight decay would be as strong."""
    opt = SODAWrapper(adamw(params()))
    feed(opt)
    opt.param_groups[0]["lr"] = 0.0
    assert opt.diagnostics()[0]["as_weight_decay"] == math.inf


# -- set later ------------------------------------------------------------------------------------

LATER: dict[str, tuple[Callable[[], Any], str]] = {
    "SODA": (lambda: SODA(params(), 0.01, zoo.adam()), "zoo.adamw"),
    "SODA decayed": (lambda: SODA(params(), 0.01, zoo.adamw()), "zoo.adamw"),
    "SODAWrapper": (lambda: SODAWrapper(adamw(params())), "the pull takes the place"),
    "SODAWrapper(SODA)": (
        lambda: SODAWrapper(SODA(params(), 0.01, zoo.adam())), "the pull takes the place"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "words"), LATER.values(), ids=LATER)
def test_a_weight_decay_that_is_set_later_is_refused(make: Callable[[], Any], words: str) -> None:
    opt = make()
    feed(opt)
    opt.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(ValueError, match=words):
        feed(opt)
    del opt.param_groups[0]["weight_decay"]
    if not isinstance(getattr(opt, "base", opt), SODA):
        opt.param_groups[0]["weight_decay"] = 0
    feed(opt)


def test_a_weight_decay_of_a_wrapped_average_is_the_bases() -> None:
    """It acts at z from the next step on."""
    found = []
    for decay in (0.0, 0.5):
        ps = params()
        opt = ScheduleFree(adamw(ps))
        opt.param_groups[0]["weight_decay"] = decay
        feed(opt)
        found.append(ps[0].detach().norm())
    assert found[1] < found[0]


# -- one base, one wrapper ------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [SODAWrapper, GPA, Lookahead])
def test_a_base_has_one_wrapper(wrap: Any) -> None:
    base = adamw(params())
    first: Any = SODAWrapper(base)
    with pytest.raises(ValueError, match=r"already in a SODAWrapper.*one AdamW for each"):
        wrap(base)
    clone = copy.deepcopy(first)
    with pytest.raises(ValueError, match="already in a SODAWrapper"):
        wrap(clone.base)
    del first
    feed(wrap(base))
    with pytest.raises(ValueError, match="decay must be"):
        SODAWrapper(other := adamw(params()), decay=5.0)
    feed(wrap(other))


# -- sparse gradients -----------------------------------------------------------------------------


def test_a_sparse_gradient_at_the_first_step_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error comes before the first bucket has stepped, also if kernels start early."""
    monkeypatch.setattr(optimizer, "runs_kernels", lambda p: True)
    monkeypatch.setattr(optimizer.fused, "is_fusable", lambda *_: True)
    monkeypatch.setattr(optimizer, "STEPS", optimizer.STEPS[-1:])
    dense, table = params(*[(2, 2)] * 20), nn.Embedding(4, 2, sparse=True)
    opt = SODA([*dense, table.weight], 0.1, zoo.lion())
    before = [p.detach().clone() for p in dense]
    for p in dense:
        p.grad = torch.ones_like(p)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        opt.step()
    assert all(map(torch.equal, dense, before))
