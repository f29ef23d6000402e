"""SODAWrapper is Algorithm 1 around every optimizer, in all the ways that optimizers are used."""

from __future__ import annotations

import ast
import copy
import gc
import io
import pickle
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from sodaopt import (
    GPA,
    SNOO,
    SODA,
    Lookahead,
    ScheduleFree,
    SODAWrapper,
    anchors,
    hidden,
    init,
    rounding,
    schedules,
    zoo,
)
from sodaopt.theory.weights import weights as weights_of
from sodaopt.wrappers.base import GroupStep, _check_capture
from sodaopt.wrappers.known_bases import NON_READERS
from sodaopt.wrappers.low_precision import fp32_copies
from tests.support.reference import rounded
from tests.support.tables import ROWS, anchored, backward, network
from tools import known_bases as bases

Make = Callable[[list[Parameter]], Optimizer]


def adamw(ps: Any, **kw: Any) -> AdamW:
    return AdamW(ps, **{"lr": 0.01, "weight_decay": 0, **kw})


def momentum(ps: Any) -> SGD:
    return SGD(ps, lr=0.02, momentum=0.9)


def adafactor(ps: Any) -> Optimizer:
    return torch.optim.Adafactor(ps, lr=0.01, weight_decay=0)


MAKERS: dict[str, Make] = {
    "AdamW": adamw,
    "AdamW fused": lambda ps: adamw(ps, fused=True),
    "SGD": momentum,
    "Adafactor (reads x)": adafactor,
    "SODA(lion)": lambda ps: SODA(ps, 0.01, zoo.lion()),
}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def feed(opt: Optimizer, weights: list[Parameter], steps: range) -> None:
    for k in steps:
        rng = torch.Generator().manual_seed(k)
        for w in weights:
            g = torch.randn(w.shape, generator=rng, dtype=torch.float64)
            w.grad = torch.empty_like(w).copy_(g)  # laid out as a backward pass would
        opt.step()


def bits(weights: list[Parameter]) -> list[Tensor]:
    return [w.detach().clone() for w in weights]


def assert_bitwise(a: Any, b: Any) -> None:
    for s, t in zip(a, b, strict=True):
        assert torch.equal(s, t)


# -- Algorithm 1 ----------------------------------------------------------------------------------


def every_class() -> Iterator[Any]:
    """The classes of pytorch_optimizer are many, and together they take some seconds."""
    for name, cls in bases.installed().items():
        marks = [pytest.mark.slow] if name.startswith("pytorch_optimizer") else []
        yield pytest.param(cls, id=name, marks=marks)


classes = pytest.mark.parametrize("cls", list(every_class()))


# docs/bases.md has more steps. Some classes act differently at each tenth step, and none later.
STEPS = 13


@cache
def verdict(cls: type[Optimizer]) -> str:
    return bases.verdict(cls, STEPS)


@classes
def test_algorithm_1(cls: type[Optimizer], monkeypatch: pytest.MonkeyPatch) -> None:
    """x <- (1 - 1/(k+2)) x + z0/(k+2) + BaseUpdate, with the base run apart at the same x."""
    monkeypatch.setattr(bases, "deltas", partial(bases.deltas, steps=STEPS))
    assert (bases.name(cls) in NON_READERS) == (bases.probe(cls) is False)
    found = verdict(cls)
    if found.startswith("not run"):
        pytest.skip(found)
    assert found.startswith("refused") or float(found.split()[-1]) <= 1e-12, found


def page_versions() -> dict[str, str]:
    """The versions that docs/bases.md was written with."""
    text = re.search(r"^Versions: `(.*)`$", bases.PAGE.read_text(), re.MULTILINE)
    assert text is not None
    return ast.literal_eval(text[1])


@classes
def test_the_page_of_bases(cls: type[Optimizer]) -> None:
    package = next(p for p in bases.PACKAGES if bases.name(cls).startswith(p))
    here, there = bases.versions(), page_versions()
    for p in (package, "torch.optim"):  # the page has error messages of torch too
        if here[p] != there[p]:
            pytest.skip(f"docs/bases.md is about {p} {there[p]}, and {here[p]} is installed")
    row = bases.line(cls, verdict(cls)).rpartition(" | ")[0]  # without the difference's digits
    assert row in bases.PAGE.read_text()


def test_the_page_of_bases_is_about_the_pinned_torch() -> None:
    pinned = Path(__file__).parents[2] / "constraints.txt"
    assert f"torch=={page_versions()['torch.optim']}" in pinned.read_text().splitlines()


def test_the_table_of_bases() -> None:
    assert set(bases.table()) <= NON_READERS
    for n in ("torch.optim.asgd.ASGD", "torch.optim.Adafactor"):
        assert n not in NON_READERS


@pytest.mark.parametrize("name", [n for n, m in ROWS.items() if anchored(m)])
def test_around_a_row_it_is_the_anchored_row(name: str) -> None:
    a, b = network(), network()
    wrapped = SODAWrapper(SODA(a, 0.01, ROWS[name]))
    row = SODA(b, 0.01, zoo.soda(ROWS[name]))
    feed(wrapped, a, range(30))
    feed(row, b, range(30))
    for u, v in zip(a, b, strict=True):
        torch.testing.assert_close(u, v, rtol=1e-12, atol=1e-12)


@makers
def test_no_state_before_the_first_step_and_only_z0_after(make: Make) -> None:
    """Only a base that makes its state in the constructor, as SODA does, has a z0 before."""
    weights, plain = network(), network()
    opt, base = SODAWrapper(make(weights)), make(plain)
    for w, v in zip(weights, plain, strict=True):
        assert bool(opt.state.get(w)) == bool(base.state.get(v))
    z0 = bits(weights)
    feed(opt, weights, range(3))
    feed(base, plain, range(3))
    for w, v, z in zip(weights, plain, z0, strict=True):
        assert set(opt.state[w]) - set(base.state[v]) == {"soda_z0"}
        assert torch.equal(opt.state[w]["soda_z0"], z)


# -- saving ---------------------------------------------------------------------------------------


@makers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resume_is_bitwise(make: Make, dtype: torch.dtype) -> None:
    there, back = network(dtype), network(dtype, seed=4)
    opt = SODAWrapper(make(there))
    feed(opt, there, range(7))
    file = io.BytesIO()
    torch.save({"w": there, "opt": opt.state_dict()}, file)
    feed(opt, there, range(7, 12))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for w, v in zip(back, saved["w"], strict=True):
        w.data.copy_(v)
    fresh = SODAWrapper(make(back))
    fresh.load_state_dict(saved["opt"])
    assert fresh.param_groups[0]["soda_k"] == 7
    feed(fresh, back, range(7, 12))
    assert_bitwise(there, back)


@pytest.mark.parametrize("anchor", anchors.ANCHORS)
def test_a_loaded_z0_shares_no_memory(anchor: str) -> None:
    weights, new = network(), network()
    opt, fresh = (SODAWrapper(adamw(ws), anchor=anchor) for ws in (weights, new))
    feed(opt, weights, range(3))
    loaded = copy.deepcopy(opt.state_dict())
    fresh.load_state_dict(loaded)
    theirs, ours = loaded["state"], fresh.state_dict()["state"]
    for n, s in theirs.items():
        assert torch.equal(ours[n]["soda_z0"], s["soda_z0"])
        assert ours[n]["soda_z0"].data_ptr() != s["soda_z0"].data_ptr()


@makers
@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies(make: Make, how: Callable[[Any], Any]) -> None:
    weights = network()
    opt = SODAWrapper(make(weights), decay=schedules.fade(schedules.uniform, 3, 20))
    feed(opt, weights, range(4))
    other = how(opt)
    others = other.param_groups[0]["params"]
    feed(opt, weights, range(4, 8))
    feed(other, others, range(4, 8))
    assert_bitwise(weights, others)
    assert isinstance(other, SODAWrapper)


def test_a_plain_checkpoint_of_the_base_loads() -> None:
    """The wrapper then anchors at the weights that the model has."""
    plain, weights = network(), network(seed=1)
    base = adamw(plain)
    feed(base, plain, range(3))
    opt = SODAWrapper(adamw(weights))
    opt.load_state_dict(base.state_dict())
    for w, v in zip(weights, plain, strict=True):
        w.data.copy_(v)
    z0 = bits(weights)
    feed(opt, weights, range(3, 5))
    assert_bitwise([opt.state[w]["soda_z0"] for w in weights], z0)
    assert opt.param_groups[0]["soda_k"] == 2
    assert opt.state[weights[0]]["step"] == 5


def test_the_choice_is_the_constructors_not_the_checkpoints() -> None:
    a, b = network(), network()
    one = SODAWrapper(adamw(a), only=a[:1])
    two = SODAWrapper(adamw(b), only=b[1:3])
    two.load_state_dict(one.state_dict())
    assert two.param_groups[0]["soda_only"] == [1, 2]


# -- options --------------------------------------------------------------------------------------


def closed_form(z0: Tensor, xs: Tensor, us: list[Tensor], s: int) -> Tensor:
    """The weights after the updates us, from xs on, if k = s at the first of them."""
    k = s + len(us)
    total = sum(((j + 2) * u for j, u in enumerate(us, s)), torch.zeros_like(z0))
    return z0 + (s + 1) / (k + 1) * (xs - z0) + total / (k + 1)


@pytest.mark.parametrize("at_start", ["keep", "restart", "reanchor"])
def test_start(at_start: str) -> None:
    s, n = 5, 12
    w = Parameter(torch.randn(3, 4, dtype=torch.float64))
    z0 = w.detach().clone()
    opt = SODAWrapper(SGD([w], lr=0.1), start=s, at_start=at_start)
    x, us = z0.clone(), []
    for k in range(n):
        w.grad = torch.randn_like(w)
        if k < s:
            x = x - 0.1 * w.grad
        else:
            us.append(-0.1 * w.grad)
        opt.step()
    expected = {
        "keep": closed_form(z0, x, us, s),
        "restart": closed_form(z0, x, us, 0),
        "reanchor": closed_form(x, x, us, 0),
    }[at_start]
    torch.testing.assert_close(w.detach(), expected, rtol=1e-12, atol=1e-12)


SCHEDULES: dict[str, Any] = {
    "accelerated": schedules.accelerated,
    "constant": 0.01,
    "log-time": schedules.log_time(3.0),
    "fade": schedules.fade(schedules.uniform, 2, 8),
    "faded constant": schedules.fade(0.1, 0, 10),
    "coupled to lr": schedules.coupled(schedules.uniform),
    "with a memory": weights_of(float).next,
    "a function": lambda k, lr: lr / (k + 1),
}


@pytest.mark.parametrize("decay", SCHEDULES.values(), ids=SCHEDULES)
def test_any_schedule(decay: Any) -> None:
    w = Parameter(torch.randn(3, 4, dtype=torch.float64))
    opt = SODAWrapper(SGD([w], lr=0.3), decay=decay)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    x = z0 = w.detach().clone()
    past = schedules.start(decay)
    for k in range(12):
        w.grad = torch.randn_like(w)
        lr = 0.3 * 0.9**k
        past = schedules.advance(decay, past, k, lr)
        lam = schedules.value(decay, k, lr, past)
        x = x + lam * (z0 - x) - lr * w.grad
        opt.step()
        scheduler.step()
    torch.testing.assert_close(w.detach(), x, rtol=1e-12, atol=1e-12)


ONLY: dict[str, Callable[[list[Parameter], Optimizer], Any]] = {
    "parameters": lambda ws, base: ws[:2],
    "groups": lambda ws, base: base.param_groups[:1],
    "a predicate": lambda ws, base: lambda p: p is ws[0] or p is ws[1],
    "a generator": lambda ws, base: (w for w in ws[:2]),
}


@pytest.mark.parametrize("only", ONLY.values(), ids=ONLY)
def test_only(only: Any) -> None:
    weights, all_, none = network(), network(), network()
    base = adamw([{"params": weights[:2]}, {"params": weights[2:]}])
    opt = SODAWrapper(base, only=only(weights, base))
    feed(opt, weights, range(6))
    feed(SODAWrapper(adamw(all_)), all_, range(6))
    feed(adamw(none), none, range(6))
    assert_bitwise(weights, all_[:2] + none[2:])
    assert all("soda_z0" not in opt.state[w] for w in weights[2:])


def test_unwrapped_groups_may_decay() -> None:
    ws, pulled, decayed = network(), network(), network()
    base = adamw([{"params": ws[:2]}, {"params": ws[2:], "weight_decay": 0.1}])
    feed(SODAWrapper(base, only=[base.param_groups[0]]), ws, range(6))
    feed(SODAWrapper(adamw(pulled)), pulled, range(6))
    feed(adamw(decayed, weight_decay=0.1), decayed, range(6))
    assert_bitwise(ws, pulled[:2] + decayed[2:])


def test_hidden_layers_only() -> None:
    net = torch.nn.Sequential(
        torch.nn.Embedding(9, 4),
        torch.nn.Linear(4, 4),
        torch.nn.Linear(4, 4),
        torch.nn.Linear(4, 9),
    )
    opt = SODAWrapper(adamw(net.parameters()), only=hidden(net))
    net(torch.tensor([1, 2])).sum().backward()
    opt.step()
    pulled = {n for n, p in net.named_parameters() if "soda_z0" in opt.state[p]}
    assert pulled == {"1.weight", "2.weight"}


def test_a_group_counts_the_steps_it_takes() -> None:
    ws = network()
    opt = SODAWrapper(adamw([{"params": ws[:2]}, {"params": ws[2:]}]))
    feed(opt, ws, range(3))
    for w in ws[2:]:
        w.grad = None
    opt.step()
    assert [g["soda_k"] for g in opt.param_groups] == [4, 3]


@makers
def test_without_gradient_there_is_no_pull(make: Make) -> None:
    weights = network()
    opt = SODAWrapper(make(weights))
    feed(opt, weights, range(4))
    before = weights[0].detach().clone()
    weights[0].grad = None
    opt.step()
    assert torch.equal(weights[0], before)


# -- refusals -------------------------------------------------------------------------------------


def scion_like(**kw: Any) -> Optimizer:
    class Scion(Optimizer):
        def step(self, closure: Any = None) -> None: ...

    return Scion(network(), {"lr": 0.1, **kw})


class NeedsLoss(SGD):
    def step(self, loss_fn: Any) -> None:  # type: ignore[override]
        super().step(loss_fn)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "AdamW's default decay": (lambda: AdamW(network()), r"weight_decay=0.01.*AdamW\(..., weight_"),
    "Muon's default decay": (lambda: torch.optim.Muon(network()), "weight_decay=0.1"),
    "decay in one group": (
        lambda: AdamW([{"params": network()}, {"params": network(), "weight_decay": 1}],
                      weight_decay=0),
        "group 1 of AdamW has weight_decay=1",
    ),
    "decay by another name": (lambda: scion_like(wd=0.1), "wd=0.1"),
    "decay of vectors": (lambda: scion_like(weight_decay_1d=0.1), "weight_decay_1d=0.1"),
    "constrained Scion": (lambda: scion_like(unconstrained=False), "unconstrained=False"),
    "constrained SCION": (lambda: scion_like(constraint=True), "constraint=True"),
    "a decayed row": (lambda: SODA(network(), 0.1, zoo.adamw()), "runs adamw.*centre 'origin'"),
    "scion": (lambda: SODA(network(), 0.1, zoo.scion()), "runs scion"),
    "an anchored row": (lambda: SODA(network(), 0.1, zoo.soda(zoo.adam())), "centre 'init'"),
    "LBFGS": (lambda: torch.optim.LBFGS(network()), "LBFGS: it evaluates the loss at several"),
    "a closure by another name": (lambda: NeedsLoss(network()), "evaluates the loss at several"),
    "a wrapper": (lambda: SODAWrapper(adamw(network())), "or is a wrapper itself"),
    "a class": (lambda: AdamW, r"SODAWrapper.of\(AdamW\)"),
    "no optimizer": (lambda: network(), "wraps a torch.optim.Optimizer, got list"),
}  # fmt: skip


@pytest.mark.parametrize(("base", "words"), WRONG.values(), ids=WRONG)
def test_refused(base: Callable[[], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        SODAWrapper(base())


OPTIONS = {
    "at_start": ({"at_start": "restrat"}, "did you mean 'restart'"),
    "start": ({"start": -1}, "start must be an integer of at least 0"),
    "only nothing": ({"only": []}, "selects no parameter"),
    "only strangers": ({"only": network()}, "neither a parameter nor a group"),
    "only a name": ({"only": ["weight"]}, "neither a parameter nor a group"),
    "only a module": ({"only": nn.Linear(2, 2)}, r"only= is a Linear: write only=hidden\(model\)"),
}


@pytest.mark.parametrize(("options", "words"), OPTIONS.values(), ids=OPTIONS)
def test_wrong_options(options: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        SODAWrapper(adamw(network()), **options)


def test_decay_that_comes_later() -> None:
    """From a framework that writes into groups, a checkpoint, or a new group."""
    weights = network()
    opt = SODAWrapper(adamw(weights))
    opt.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(ValueError, match=r"group 0 of AdamW has weight_decay=0.1"):
        opt.step()
    opt.param_groups[0]["weight_decay"] = 0
    opt.step()
    with pytest.raises(ValueError, match="framework or checkpoint that sets it"):
        opt.load_state_dict(AdamW(network()).state_dict())
    opt = SODAWrapper(adamw(network()))
    with pytest.raises(ValueError, match="group 1"):
        opt.add_param_group({"params": network(), "weight_decay": 0.1})


def test_an_interrupted_step_leaves_weights() -> None:
    class Broken(SGD):
        def step(self, closure: Any = None) -> None:
            raise KeyboardInterrupt

    weights = network(torch.bfloat16)
    before = bits(weights)
    opt = SODAWrapper(Broken(weights, lr=0.1))
    with pytest.raises(KeyboardInterrupt):
        feed(opt, weights, range(1))
    assert_bitwise(weights, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("make", [SGD, torch.optim.Adafactor], ids=["SGD", "reads"])
def test_an_interrupted_later_step_is_undone(make: Any, dtype: torch.dtype) -> None:
    """Weights that are pulled before the base steps do not stay pulled, also after three errors."""
    weights = network(dtype)
    base = make(weights, lr=0.1)
    opt = SODAWrapper(base)
    feed(opt, weights, range(3))
    before = [w.detach().clone() for w in weights]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    base.register_step_pre_hook(interrupt)
    for k in range(3):
        with pytest.raises(KeyboardInterrupt):
            feed(opt, weights, range(k, k + 1))
    for w, old in zip(weights, before, strict=True):
        assert torch.allclose(w.float(), old.float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


# -- 16 bits --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda ps: adamw(ps, lr=1e-3, fused=True),
        lambda ps: torch.optim.Adafactor(ps, lr=1e-3),
    ],
    ids=["AdamW", "reads"],
)
def test_16_bit_parameters_land_where_fp32_does(make: Make) -> None:
    """After 500 steps the displacement is within 3 % of fp32's. A 16-bit pull would lose most.

    AdamW has its default betas: its second moment would stall in bf16, and be zero in fp16.
    """
    n, steps = 2048, 500
    gradients = [(1, 0), (3e-4, 1e-3)]  # mean and deviation
    cases = [(d, *g) for d in (torch.bfloat16, torch.float16) for g in gradients]
    rng = torch.Generator().manual_seed(0)
    starts = [(max(g) * (1 + torch.rand(n, generator=rng))).to(dtype) for dtype, *g in cases]
    low, high = [Parameter(s.clone()) for s in starts], [Parameter(s.float()) for s in starts]
    one, two = SODAWrapper(make(low)), SODAWrapper(make(high))
    for _ in range(steps):
        for a, b, (dtype, mean, std) in zip(low, high, cases, strict=True):
            a.grad = (mean + std * torch.randn(n, generator=rng)).to(dtype)
            b.grad = a.grad.float()
        one.step()
        two.step()
    for a, b, start, case in zip(low, high, starts, cases, strict=True):
        moved, wanted = ((p.detach().float() - start.float()).mean().item() for p in (a, b))
        assert moved == pytest.approx(wanted, rel=0.03), case


def follow(opt: Optimizer, low: list[Parameter], high: list[Parameter]) -> None:
    """Step the parameters `high` with the gradients of the parameters `low`."""
    for a, b in zip(low, high, strict=True):
        assert a.grad is not None
        b.grad = a.grad.float()
    opt.step()


def both(
    one: SODAWrapper, low: list[Parameter], two: SODAWrapper, high: list[Parameter], steps: int
) -> Iterator[tuple[Parameter, Parameter]]:
    """Step 16-bit parameters, and fp32 ones from the same values. Yield them in pairs.

    The 16-bit parameter must be the rounded fp32 one.
    """
    for k in range(steps):
        for a, b in zip(low, high, strict=True):
            b.data.copy_(a.data)
        feed(one, low, range(k, k + 1))
        follow(two, low, high)
        for n, (a, b) in enumerate(zip(low, high, strict=True)):
            key = rounding.key(one.seed, n, k)
            assert torch.equal(a.detach(), rounded(b.detach(), a.dtype, key))
            yield a, b


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@makers
def test_a_16_bit_step_is_the_fp32_step_rounded_once(make: Make, dtype: torch.dtype) -> None:
    check_rounded_once(make, dtype, "cpu")


def check_rounded_once(make: Make, dtype: torch.dtype, device: str) -> None:
    """The base's state has the bits of a step in fp32, also for channels_last parameters."""
    image = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0), dtype=dtype)
    low = [*network(dtype), Parameter(image.to(memory_format=torch.channels_last))]
    low = [Parameter(p.detach().to(device)) for p in low]
    high = [Parameter(p.detach().float()) for p in low]
    one, two = SODAWrapper(make(low), seed=3), SODAWrapper(make(high))
    for a, b in both(one, low, two, high, 8):
        mine, theirs = one.base.state[a], two.base.state[b]
        assert mine.keys() == theirs.keys()
        for key in mine.keys() - {"soda_z0"}:
            assert_bitwise([mine[key]], [theirs[key]])


def test_fp32_copies_live_no_longer_than_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for Python's collector, which may take many steps."""
    made: list[Any] = []

    def copies(tensors: list[Tensor]) -> list[Tensor]:
        found = fp32_copies(tensors)
        made.extend(map(weakref.ref, found))
        return found

    monkeypatch.setattr("sodaopt.wrappers.base.fp32_copies", copies)
    weights = network(torch.bfloat16)
    opt = SODAWrapper(adamw(weights))
    gc.disable()
    try:
        feed(opt, weights, range(3))
        assert made
        assert not [copy for copy in made if copy() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp32_state_of_16_bit_parameters_is_saved_and_loaded(dtype: torch.dtype) -> None:
    weights, others = network(dtype), network(dtype)
    opt, other = SODAWrapper(adamw(weights)), SODAWrapper(adamw(others))
    feed(opt, weights, range(3))
    stored = io.BytesIO()
    torch.save(opt.state_dict(), stored)
    stored.seek(0)
    other.load_state_dict(torch.load(stored, weights_only=True))
    for w, v in zip(weights, others, strict=True):
        v.data.copy_(w.data)
        assert other.state[v]["exp_avg_sq"].dtype == torch.float32
        assert other.state[v]["soda_z0"].dtype == dtype
        assert_bitwise([other.state[v]["exp_avg_sq"]], [opt.state[w]["exp_avg_sq"]])
    for its, ws in ((opt, weights), (other, others)):
        feed(its, ws, range(3, 6))
    assert_bitwise(others, bits(weights))


@pytest.mark.parametrize("how", ["loaded", "wrapped late"])
@pytest.mark.parametrize("fused", [False, True])
def test_16_bit_state_of_the_bare_base_goes_on_in_fp32(how: str, fused: bool) -> None:
    weights = network(torch.bfloat16)
    bare = adamw(weights, fused=fused)
    feed(bare, weights, range(3))
    opt = SODAWrapper(bare if how == "wrapped late" else adamw(weights, fused=fused))
    if how == "loaded":
        opt.load_state_dict(bare.state_dict())
    moments = [opt.state[w]["exp_avg_sq"].float().clone() for w in weights]
    high = [Parameter(w.detach().float()) for w in weights]
    two = SODAWrapper(adamw(high, fused=fused))
    two.load_state_dict(bare.state_dict())
    feed(opt, weights, range(3, 4))
    follow(two, weights, high)
    for w, v, before in zip(weights, high, moments, strict=True):
        assert opt.state[w]["exp_avg_sq"].dtype == torch.float32
        assert not torch.equal(opt.state[w]["exp_avg_sq"], before)
        assert_bitwise([opt.state[w]["exp_avg_sq"]], [two.state[v]["exp_avg_sq"]])
    feed(opt, weights, range(4, 6))


@makers
def test_a_step_keeps_the_hooks_of_gradient_accumulation(make: Make) -> None:
    """DDP averages gradients in such hooks. torch drops them if a parameter's dtype changes."""
    weights = network(torch.bfloat16)
    opt, calls = SODAWrapper(make(weights)), list[int]()
    nodes: list[Any] = [w.view_as(w).grad_fn for w in weights]
    accumulators = [node.next_functions[0][0] for node in nodes]
    for accumulator in accumulators:
        accumulator.register_hook(lambda *_: calls.append(1))
    for n in (1, 2):
        backward(weights)
        assert len(calls) == n * len(weights)
        opt.step()


def test_a_base_that_replaces_the_memory_of_a_parameter() -> None:
    class Swaps(SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.data = p.data - 0.1 * p.grad

    found = []
    for base in (SGD, Swaps):
        weights = network(torch.bfloat16)
        opt = SODAWrapper(base(weights, lr=0.1))
        feed(opt, weights, range(4))
        found.append([w.detach().float() for w in weights])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("lr", [0.1, 0.0], ids=["at once", "in a warmup"])
@pytest.mark.parametrize("wrap", [SODAWrapper, ScheduleFree, GPA, Lookahead, SNOO])
def test_a_base_with_its_parameters_elsewhere(wrap: Any, lr: float) -> None:
    """A step of parameters outside the base's groups would be lost without an error."""

    class Elsewhere(SGD):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr)
            self.inner = SGD(params, lr)

        def step(self, closure: Any = None) -> None:
            self.inner.step()

    weights = network(torch.bfloat16)
    opt = wrap(Elsewhere(weights, lr))
    with pytest.raises(
        RuntimeError, match=rf"wrapped optimizer to Elsewhere, such as {wrap.__name__}"
    ):
        feed(opt, weights, range(1))


def test_16_bit_parameters_that_are_not_pulled() -> None:
    """The base steps them in fp32 as well, without a pull."""
    low = network(torch.bfloat16)
    high = [Parameter(w.detach().float()) for w in low]
    one = SODAWrapper(adamw([{"params": low[:2]}, {"params": low[2:]}]), only=[low[0]], seed=3)
    two = SODAWrapper(adamw(high), only=[high[0]])
    for a, b in both(one, low, two, high, 4):
        assert_bitwise([one.state[a]["exp_avg_sq"]], [two.state[b]["exp_avg_sq"]])
    assert [("soda_z0" in one.state[w]) for w in low] == [True] + [False] * (len(low) - 1)


@pytest.mark.parametrize("fewer", [True, False])
def test_16_bits_with_another_choice_of_pulled_parameters(fewer: bool) -> None:
    weights = network(torch.bfloat16)
    some, everything = {"only": [weights[0]]}, {}
    before, after = (everything, some) if fewer else (some, everything)
    opt = SODAWrapper(adamw(weights), **before)
    feed(opt, weights, range(2))
    new = SODAWrapper(adamw(weights), **after)
    new.load_state_dict(opt.state_dict())
    for w in weights:
        assert_bitwise([new.state[w]["exp_avg_sq"]], [opt.state[w]["exp_avg_sq"]])
    feed(new, weights, range(2, 4))
    for w in weights:
        assert new.state[w]["exp_avg_sq"].dtype == torch.float32
        assert new.state[w]["step"] == 4


class Remembers(SGD):
    """Steps along its last two gradients. Its state has a list and a tuple."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            s = self.state[p]
            if not s:
                s |= {"last": [torch.zeros_like(p)] * 2, "seen": (p.sign(), 3)}
            s["last"] = [s["last"][1], p.grad.clone()]
            p.add_(s["last"][0].lerp(s["last"][1], 0.5) + s["seen"][0], alpha=-0.1)


def test_fp32_copies_have_the_attributes_of_their_parameters() -> None:
    """Some bases read a setting of each parameter there."""

    class Labelled(SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.add_(p.grad, alpha=-0.1 * p.rate)

    low = network(torch.bfloat16)
    high = [Parameter(w.detach().float()) for w in low]
    for n, pair in enumerate(zip(low, high, strict=True)):
        for p in pair:
            p.rate = n  # type: ignore[attr-defined]
    one, two = SODAWrapper(Labelled(low, 0.1)), SODAWrapper(Labelled(high, 0.1))
    assert len(list(both(one, low, two, high, 3))) == 3 * len(low)


def test_nested_16_bit_state_is_cast() -> None:
    """As far as torch's load_state_dict casts it: dicts, lists and tuples."""
    [w, *_] = network(torch.bfloat16)
    half = torch.ones(2, dtype=torch.bfloat16)
    base = SGD([w], 0.1)
    base.state[w] = {"d": {"x": [half]}, "p": (half, 3)}
    state = SODAWrapper(base).state[w]
    assert state["p"][0].dtype == state["d"]["x"][0].dtype == torch.float32
    assert state["p"][1] == 3


def test_16_bits_resume_with_state_of_any_form() -> None:
    weights, others = network(torch.bfloat16), network(torch.bfloat16)
    opt, new = SODAWrapper(Remembers(weights, 0.1)), SODAWrapper(Remembers(others, 0.1))
    feed(opt, weights, range(3))
    new.load_state_dict(copy.deepcopy(opt.state_dict()))
    for w, v in zip(weights, others, strict=True):
        v.data.copy_(w.data)
    feed(opt, weights, range(3, 6))
    feed(new, others, range(3, 6))
    assert_bitwise(others, bits(weights))


@pytest.mark.parametrize("through", ["parameters", "groups", "new ones"])
def test_hooks_of_the_base_change_16_bit_gradients(through: str) -> None:
    weights = network(torch.bfloat16)
    base = SGD(weights, lr=1.0)
    opt = SODAWrapper(base, decay=0.0)
    before = bits(weights)

    def hook(*_: Any) -> None:
        for w in base.param_groups[0]["params"] if through == "groups" else weights:
            assert w.grad is not None
            w.grad = w.grad * 0 if through == "new ones" else w.grad.zero_()

    base.register_step_pre_hook(hook)
    feed(opt, weights, range(2))
    assert_bitwise(weights, before)
    assert len(base._optimizer_step_pre_hooks) == 1


@pytest.mark.parametrize("wrap", [SODAWrapper, Lookahead, SNOO])
@pytest.mark.parametrize("through", ["parameters", "groups"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_hooks_of_the_base_change_the_weights(wrap: Any, through: str, dtype: torch.dtype) -> None:
    """A mask, as for pruning, holds weights at zero.

    ScheduleFree and GPA make the weights from x and z at each step, so a mask does not last.
    """
    weights = network(dtype)
    base = SGD(weights, lr=0.1)

    def hook(*_: Any) -> None:
        for w in base.param_groups[0]["params"] if through == "groups" else weights:
            w.data[0] = 0

    hook()
    opt = wrap(base)
    base.register_step_post_hook(hook)
    feed(opt, weights, range(4))
    for w in weights:
        assert torch.equal(w[0], torch.zeros_like(w[0]))
        assert w[1:].any()


class Nested(Optimizer):
    """An optimizer around another one whose groups it shares, as Lookahead of several packages."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.state, self.defaults = inner, defaultdict(dict), inner.defaults
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Caches(SGD):
    """Collects its parameters once."""

    found: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.found = self.found or [p for g in self.param_groups for p in g["params"]]
        for p in self.found:
            p.add_(p.grad, alpha=-0.1)


class ByIdentity(SGD):
    """Keeps momentum in a dict of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.own: dict[int, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            m = self.own.setdefault(id(p), torch.zeros_like(p))
            p.add_(m.mul_(0.9).add_(p.grad), alpha=-0.1)


@pytest.mark.parametrize(
    "make",
    [lambda ps: Nested(adamw(ps)), lambda ps: Caches(ps, 0.1), lambda ps: ByIdentity(ps, 0.1)],
    ids=["nested", "caches", "by identity"],
)
def test_bases_that_remember_16_bit_parameters(make: Make) -> None:
    low = network(torch.bfloat16)
    high = [Parameter(w.detach().float()) for w in low]
    bases = make(low), make(high)
    one, two = map(SODAWrapper, bases)
    assert len(list(both(one, low, two, high, 12))) == 12 * len(low)
    if isinstance(bases[0], Nested):
        assert {id(p) for p in bases[0].inner.state} == set(map(id, low))
    if isinstance(bases[0], ByIdentity):
        assert len(bases[0].own) == len(low)


def test_nothing_is_left_of_a_16_bit_step() -> None:
    """Keep neither the memory of fp32 copies nor a deleted parameter."""
    weights = network(torch.bfloat16)
    opt = SODAWrapper(SGD(weights, lr=0.1))
    feed(opt, weights, range(2))
    copies = list(opt._fp32_step.kept.values())
    assert len(copies) == len(weights)
    assert all(c.numel() == 0 and c.grad is None for c in copies)
    assert not any(hasattr(c, "fp32_copy_of") for c in copies)
    gone = weakref.ref(weights[0])
    opt.state.clear()
    opt.param_groups[0]["params"] = weights[1:]
    del weights[0], copies
    gc.collect()
    assert gone() is None
    assert len(opt._fp32_step.kept) == len(weights)


@pytest.mark.parametrize("wrap", [SODAWrapper, ScheduleFree, GPA, Lookahead, SNOO])
@pytest.mark.parametrize("route", ["plain and back", "16-bit moments", "fp32", "fp16"])
def test_16_bit_state_by_many_routes(wrap: Any, route: str) -> None:
    """Loaded state of any width continues in the dtypes that this optimizer gives it."""
    weights = network(torch.bfloat16)
    opt = wrap(adamw(weights))
    feed(opt, weights, range(3))
    saved = copy.deepcopy(opt.state_dict())
    if route == "plain and back":
        plain = adamw(weights)
        plain.load_state_dict(saved)
        feed(plain, weights, range(3, 4))
        saved = copy.deepcopy(plain.state_dict())
    elif route == "16-bit moments":
        for state in saved["state"].values():
            state |= {k: state[k].bfloat16() for k in ("exp_avg", "exp_avg_sq")}
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(route, torch.bfloat16)
    others, fresh = network(dtype), network(dtype)
    new, unloaded = wrap(adamw(others)), wrap(adamw(fresh))
    new.load_state_dict(saved)
    feed(new, others, range(3, 6))
    feed(unloaded, fresh, range(3, 6))
    for v, f in zip(others, fresh, strict=True):
        assert new.state[v].keys() == unloaded.state[f].keys()
        for key in new.state[v].keys() - {"soda_z0"}:
            assert new.state[v][key].dtype == unloaded.state[f][key].dtype, key
        assert v.isfinite().all()


@pytest.mark.parametrize("anchor", ["seeds", "file", "clone", "auto"])
@pytest.mark.parametrize("wrap", [ScheduleFree, GPA, Lookahead, SNOO])
def test_a_row_with_an_anchor_in_16_bits(wrap: Any, anchor: str, tmp_path: Path) -> None:
    """The anchor knows the 16-bit parameters, and the base steps their fp32 copies."""
    net = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4)).bfloat16()
    seeds = init.seeded_(net)
    save_file(dict(net.state_dict()), tmp_path / "z0.safetensors")
    z0 = {"seeds": seeds, "file": anchors.FromFile(tmp_path / "z0.safetensors", net)}
    weights = list(net.parameters())
    opt = wrap(SODA(weights, 0.01, zoo.soda(zoo.lion()), anchor=z0.get(anchor, anchor)))
    high = [Parameter(w.detach().float()) for w in weights]
    two = wrap(SODA(high, 0.01, zoo.soda(zoo.lion())))
    for k in range(4):
        feed(opt, weights, range(k, k + 1))
        follow(two, weights, high)
    for w, v in zip(weights, high, strict=True):
        torch.testing.assert_close(w.float(), v, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("sizes", [[8, 4], [1, 8, 7, 12], [3], [8, 4, 8, 8, 4]], ids=str)
def test_fp32_copies(sizes: list[int]) -> None:
    parts = [torch.randn(n).bfloat16() for n in sizes]
    parts.append(torch.randn(2, 3, 4, 4).half().to(memory_format=torch.channels_last))
    copies = fp32_copies(parts)
    for part, wide in zip(parts, copies, strict=True):
        assert wide.dtype == torch.float32
        assert torch.equal(wide, part.float())
        assert wide.stride() == part.stride()
        assert wide.data_ptr() % 16 == 0


REFUSALS: dict[str, tuple[float, Any, str]] = {
    "decay": (0.0, {"decay": "uniform"}, "decay must be a number or a function"),
    "weight decay": (0.1, {}, "group 1 of AdamW has weight_decay=0.1"),
}


@pytest.mark.parametrize(("weight_decay", "options", "words"), REFUSALS.values(), ids=REFUSALS)
def test_a_refused_base_stays_as_it_was(weight_decay: float, options: Any, words: str) -> None:
    """It can be wrapped as soon as the cause is fixed, also while the error is handled."""
    one, two = Parameter(torch.zeros(4)), Parameter(torch.zeros(4))
    base = adamw([{"params": [one]}, {"params": [two], "weight_decay": weight_decay}])
    before = base.state_dict(), dict(base.defaults)
    with pytest.raises((TypeError, ValueError), match=words) as error:
        SODAWrapper(base, **options)
    assert (base.state_dict(), base.defaults) == before
    base.param_groups[1]["weight_decay"] = 0
    feed(SODAWrapper(base), [one, two], range(1))
    assert error.tb is not None


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_failed_16_bit_step_leaves_groups_and_state(when: str) -> None:
    class Broken(AdamW):
        broken = False

        def step(self, closure: Any = None) -> None:
            super().step()
            if self.broken:
                raise RuntimeError("no")

    weights = network(torch.bfloat16)
    base = Broken(weights, lr=0.1, weight_decay=0)
    opt = SODAWrapper(base)
    if when == "later":
        feed(opt, weights, range(2))
    base.broken = True
    with pytest.raises(RuntimeError, match="no"):
        feed(opt, weights, range(2, 3))
    assert all(p is w for p, w in zip(opt.param_groups[0]["params"], weights, strict=True))
    assert {id(p) for p in opt.state} == set(map(id, weights))
    copies = opt._fp32_step.kept.values()
    assert all(c.numel() == 0 and c.grad is None for c in copies)
    assert not any(hasattr(c, "fp32_copy_of") for c in copies)


@pytest.mark.parametrize("at_start", ["keep", "reanchor"])
def test_an_anchor_that_rounds_fp16_weights(at_start: str) -> None:
    """The base starts from the rounded weights, which z0 holds exactly."""
    weights, start = network(torch.float16), 2 if at_start == "reanchor" else 0
    opt = SODAWrapper(SGD(weights, lr=0.1), anchor="bf16", start=start, at_start=at_start)
    feed(opt, weights, range(start))
    opt.param_groups[0]["lr"] = 1e-30
    feed(opt, weights, range(start, start + 1))
    for w in weights:
        assert torch.equal(w.detach(), w.detach().bfloat16().half())


@pytest.mark.parametrize("make", [adamw, lambda ps: adamw(ps, fused=True)])
def test_an_empty_16_bit_parameter_is_loaded(make: Make) -> None:
    """It has no fp32 copy, so its state must keep its dtype."""
    weights = [*network(torch.bfloat16), Parameter(torch.zeros(0, 4, dtype=torch.bfloat16))]
    opt = SODAWrapper(make(weights))
    feed(opt, weights, range(2))
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    feed(opt, weights, range(2, 4))
    assert opt.state[weights[-1]]["exp_avg"].dtype == torch.bfloat16
    assert opt.state[weights[0]]["exp_avg"].dtype == torch.float32


# -- as frameworks see it -------------------------------------------------------------------------


def test_the_base_is_live() -> None:
    weights = network()
    base = adamw(weights)
    opt = SODAWrapper(base)
    assert opt.param_groups is base.param_groups
    assert opt.state is base.state
    assert opt.defaults is base.defaults
    for target in (opt, base):
        scheduler = torch.optim.lr_scheduler.StepLR(target, 1, 0.5)
        feed(opt, weights, range(1))
        scheduler.step()
    opt.load_state_dict(opt.state_dict())
    assert opt.param_groups is base.param_groups
    assert opt.param_groups[0]["lr"] == base.param_groups[0]["lr"] != 0.01
    opt.zero_grad()
    assert all(w.grad is None for w in weights)
    assert "SODAWrapper" in repr(opt)
    assert "AdamW" in repr(opt)
    assert not hasattr(opt, "_step_supports_amp_scaling")


@pytest.mark.parametrize("wrap", [SODAWrapper, GPA])
def test_the_base_resets_its_gradients(wrap: Any) -> None:
    class Counts(SGD):
        calls: tuple[bool, ...] = ()

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.calls += (set_to_none,)

    opt = wrap(Counts(network(), 0.1))
    opt.zero_grad()
    opt.zero_grad(set_to_none=False)
    assert opt.base.calls == (True, False)


def test_hooks_fire_once() -> None:
    weights = network()
    opt = SODAWrapper(adamw(weights))
    seen: list[str] = []
    opt.register_step_pre_hook(lambda *_: seen.append("pre"))
    opt.register_step_post_hook(lambda *_: seen.append("post"))
    opt.register_state_dict_pre_hook(lambda *_: seen.append("saving"))
    opt.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    opt.register_load_state_dict_pre_hook(lambda *_: seen.append("loading"))
    opt.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    feed(opt, weights, range(2))
    opt.load_state_dict(opt.state_dict())
    assert seen == ["pre", "post"] * 2 + ["saving", "saved", "loading", "loaded"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wrap", [SODAWrapper, ScheduleFree, SNOO])
def test_global_hooks_fire_once(wrap: Any, dtype: torch.dtype) -> None:
    """As for a bare optimizer, around the hooks that wrapper and base share."""
    weights = network(dtype)
    base = adamw(weights)
    opt = wrap(base)
    seen: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda o, *_: seen.append(f"global {type(o).__name__}")),
        register_optimizer_step_post_hook(lambda o, *_: seen.append(f"global {type(o).__name__}")),
    ]
    base.register_step_pre_hook(lambda o, *_: seen.append(f"base {type(o).__name__}"))
    base.register_step_post_hook(lambda o, *_: seen.append(f"base {type(o).__name__}"))
    name = wrap.__name__
    try:
        feed(opt, weights, range(2))
        assert seen == [f"global {name}", f"base {name}", f"base {name}", f"global {name}"] * 2
        seen.clear()
        opt.zero_grad()
        base.step()  # by itself it still has them
        assert seen == ["global AdamW", "base AdamW", "base AdamW", "global AdamW"]
    finally:
        for handle in handles:
            handle.remove()


def test_closure() -> None:
    a, b = network(), network()
    one, two = SODAWrapper(adamw(a)), SODAWrapper(adamw(b))
    for _ in range(5):
        backward(a)
        one.step()
        value = backward(b)
        for w in b:
            w.grad = None
        assert two.step(lambda: backward(b)) == value
    assert_bitwise(a, b)


def test_class_form() -> None:
    cls = SODAWrapper.of(AdamW, start=2)
    assert issubclass(cls, Optimizer)
    a, b = network(), network()
    one, two = cls(a, lr=0.01), SODAWrapper(adamw(b), start=2)
    assert one.param_groups[0]["weight_decay"] == 0
    feed(one, a, range(5))
    feed(two, b, range(5))
    assert_bitwise(a, b)
    other = pickle.loads(pickle.dumps(one))
    assert type(other).__name__ == "SODAWrapper_AdamW"
    others = other.param_groups[0]["params"]
    feed(other, others, range(5, 7))
    feed(one, a, range(5, 7))
    assert_bitwise(a, others)
    with pytest.raises(ValueError, match=r"weight_decay=0\.1"):
        cls(network(), lr=0.01, weight_decay=0.1)


def test_class_form_of_listed_parameters() -> None:
    """A class is made once for equal options. A list counts as a tuple, which is hashable."""
    weights = network()
    cls = SODAWrapper.of(AdamW, only=weights[:1])
    assert cls is SODAWrapper.of(AdamW, only=tuple(weights[:1]))
    assert cls(weights).param_groups[0]["soda_only"] == [0]


@pytest.mark.slow
def test_compiled_without_recompiling() -> None:
    """k and lr change at each step. After five steps nothing is compiled again."""
    a, b = network(torch.float32), network(torch.float32)
    one = SODAWrapper(Adam(a, lr=0.01))
    two = SODAWrapper(Adam(b, lr=torch.tensor(0.01), capturable=False))
    compiled = torch.compile(two.step, backend="eager")
    for k in range(12):
        one.param_groups[0]["lr"] = 0.01 / (k + 1)
        two.param_groups[0]["lr"].fill_(0.01 / (k + 1))
        rng = torch.Generator().manual_seed(k)
        for u, v in zip(a, b, strict=True):
            u.grad = torch.randn(u.shape, generator=rng)
            v.grad = u.grad.clone()
        one.step()
        if k == 4:
            torch._dynamo.config.error_on_recompile = True
        try:
            compiled()
        finally:
            torch._dynamo.config.error_on_recompile = False
    for u, v in zip(a, b, strict=True):
        torch.testing.assert_close(u, v, rtol=1e-5, atol=1e-6)
    assert two.param_groups[0]["soda_k"] == 12


def test_diagnostics() -> None:
    weights = network()
    opt = SODAWrapper(SGD(weights, lr=0.1))
    feed(opt, weights, range(5))
    z0 = [opt.state[w]["soda_z0"] for w in weights]
    [row] = opt.diagnostics()
    squares = [(w - z).square().sum() for w, z in zip(weights, z0, strict=True)]
    assert row["distance"] == pytest.approx(sum(squares).sqrt().item(), rel=1e-6)  # type: ignore[union-attr]
    assert row["k"] == 5
    assert row["lam"] == 1 / 7
    assert row["as_weight_decay"] == pytest.approx(10 / 7)
    before = bits(weights)
    opt.param_groups[0]["lr"] = 0.0
    feed(opt, weights, range(1))
    moved = [(w - x).square().sum() for w, x in zip(weights, before, strict=True)]
    assert row["lam"] * row["distance"] == pytest.approx(sum(moved).sqrt().item(), rel=1e-6)  # type: ignore[union-attr]


# -- found by trying to break it ------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [SODAWrapper, ScheduleFree, GPA, Lookahead, SNOO])
@makers
def test_loading_into_a_run_that_has_stepped(wrap: Any, make: Make) -> None:
    weights = network()
    opt = wrap(make(weights))
    feed(opt, weights, range(3))
    saved = copy.deepcopy((opt.state_dict(), bits(weights)))
    feed(opt, weights, range(3, 6))
    there = bits(weights)
    opt.load_state_dict(saved[0])
    for w, v in zip(weights, saved[1], strict=True):
        w.data.copy_(v)
    feed(opt, weights, range(3, 6))
    assert_bitwise(weights, there)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wrap", [ScheduleFree, GPA])
def test_a_decaying_base_decays_in_16_bits_too(wrap: Any, dtype: torch.dtype) -> None:
    found = []
    for kind in (torch.float32, dtype):
        p = Parameter(torch.ones(500, dtype=kind))
        opt = wrap(SGD([p], 0.01, weight_decay=10.0))
        for _ in range(20):
            p.grad = torch.zeros_like(p)
            opt.step()
        opt.eval()
        found.append(p.float().mean().item())
    assert found[1] == pytest.approx(found[0], rel=0.02)


@pytest.mark.parametrize("decay", [0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("late", [False, True])
def test_an_error_on_the_way_leaves_the_weights(
    late: bool, dtype: torch.dtype, decay: float
) -> None:
    """Groups before the one with the error are pulled already. A pull of 1 has no inverse."""

    class Picky(anchors.Clone):
        def source(self, p: Tensor, kept: Tensor) -> Any:
            if is_broken and p.shape == (3, 6):
                raise ValueError("no")
            return super().source(p, kept)

    is_broken, weights = not late, network(dtype)
    groups = [{"params": [w]} for w in weights]
    opt = SODAWrapper(SGD(groups, lr=0.1), anchor=Picky(), decay=decay)
    if late:
        feed(opt, weights, range(2))
    before, is_broken = bits(weights), True
    with pytest.raises(ValueError, match="no"):
        feed(opt, weights, range(2, 3))
    torch.testing.assert_close([w.detach() for w in weights], before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_whose_base_fails_counts(dtype: torch.dtype) -> None:
    """It is the step without the base's update: the pull alone."""

    class Moody(SGD):
        broken = False

        def step(self, closure: Any = None) -> None:
            if self.broken:
                raise RuntimeError("out of memory")
            super().step()

    found = []
    for broken in (True, False):
        weights = network(dtype)
        base = Moody(weights, lr=0.1)
        opt = SODAWrapper(base)
        feed(opt, weights, range(3))
        base.broken, base.param_groups[0]["lr"] = broken, 0.0
        with pytest.raises(RuntimeError, match="out of memory") if broken else nullcontext():
            opt.step()
        assert opt.param_groups[0]["soda_k"] == 4
        found.append(bits(weights))
    assert_bitwise(*found)


def test_only_in_groups_that_come_later() -> None:
    matrix, bias, more = (Parameter(torch.ones(s)) for s in ((2, 3), (3,), (4, 2)))
    opt = SODAWrapper(SGD([matrix], 0.1), only=lambda p: p.ndim == 2)
    opt.add_param_group({"params": [bias, more]})
    assert opt.param_groups[1]["soda_only"] == [1]
    opt = SODAWrapper(SGD([matrix], 0.1), only=[matrix])
    opt.add_param_group({"params": [bias]})
    assert opt.param_groups[1]["soda_only"] == []


@pytest.mark.parametrize("then", ["step", "load"])
def test_a_group_that_is_added_to_the_base(then: str) -> None:
    matrix, bias, more = (Parameter(torch.ones(s)) for s in ((2, 3), (3,), (4, 2)))
    opt = SODAWrapper(SGD([matrix], 0.1), only=lambda p: p.ndim == 2)
    opt.base.add_param_group({"params": [bias, more]})
    if then == "load":
        opt.load_state_dict(opt.state_dict())
    feed(opt, [matrix, bias, more], range(1))
    assert opt.param_groups[1]["soda_only"] == [1]
    assert [("soda_z0" in opt.state[p]) for p in (matrix, bias, more)] == [True, False, True]


@pytest.mark.parametrize("how", [lambda opt: opt, copy.deepcopy], ids=["itself", "a copy"])
def test_a_list_of_parameters_is_not_kept(how: Callable[[Any], Any]) -> None:
    listed, other, late = network(), network(), network()
    opt = how(SODAWrapper(SGD([{"params": listed}, {"params": other}], 0.1), only=listed))
    kept = weakref.ref(listed[0])
    del opt.param_groups[0], listed
    gc.collect()
    assert kept() is None
    opt.add_param_group({"params": late})
    assert opt.param_groups[1]["soda_only"] == []


def test_refusals_change_nothing() -> None:
    opt = SODAWrapper(adamw(network()))
    late = network()
    with pytest.raises(ValueError, match="group 1"):
        opt.add_param_group({"params": late, "weight_decay": 0.1})
    opt.add_param_group({"params": late, "weight_decay": 0})
    opt = SODAWrapper(adamw(network()))
    with pytest.raises(ValueError, match="weight_decay"):
        opt.load_state_dict(AdamW(network(), lr=7.0).state_dict())
    assert opt.param_groups[0]["lr"] == 0.01


def test_reanchor_takes_parameters_without_a_gradient_along() -> None:
    a, b = Parameter(torch.zeros(2)), Parameter(torch.zeros(2))
    opt = SODAWrapper(SGD([a, b], 1.0), start=2, at_start="reanchor")
    for k in range(3):
        a.grad = torch.ones(2)
        b.grad = None if k == 2 else torch.ones(2)
        opt.step()
    assert torch.equal(opt.state_dict()["state"][1]["soda_z0"], torch.full((2,), -2.0))


DECAYS_WRONG = {"above": 5.0, "below": -1.0, "nan": float("nan"), "late": lambda k, lr: 3.0}


@pytest.mark.parametrize("decay", DECAYS_WRONG.values(), ids=DECAYS_WRONG)
def test_decay_out_of_range(decay: Any) -> None:
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\]"):
        SODAWrapper(adamw(network()), decay=decay)


def test_a_schedule_advances_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    opt = SODAWrapper(SGD(weights := network(), 0.1))
    advance, ks = schedules.advance, list[Any]()
    monkeypatch.setattr(
        schedules, "advance", lambda c, past, k, lr: ks.append(k) or advance(c, past, k, lr)
    )
    feed(opt, weights, range(3))
    assert ks == [0, 1, 2]


def test_a_memory_waits_for_its_start() -> None:
    weights = network()
    decay = weights_of(lambda k: k + 1).next
    opt = SODAWrapper(SGD(weights, 0.1), decay=decay, start=3, at_start="restart")
    feed(opt, weights, range(3))
    assert opt.param_groups[0]["soda_A"] == 0
    feed(opt, weights, range(3, 6))
    assert opt.param_groups[0]["soda_A"] == 1 + 2 + 3


def test_an_averaging_row_is_refused() -> None:
    with pytest.raises(TypeError, match="averages its iterates"):
        Lookahead(SODA(network(), 0.1, zoo.schedule_free()))


@pytest.mark.parametrize("wrap", [SODAWrapper, GPA])
def test_a_wrapper_is_not_captured(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph would replay the pull of one step, because k is on the host."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    opt = wrap(adamw(weights := network()))
    backward(weights)
    opt.step()  # a CPU step does not ask
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    with pytest.raises(RuntimeError, match=r"CUDA graph of .*capturable=True"):
        _check_capture(opt, [GroupStep({}, [0], [on_gpu])])
