"""The diagnostics of a step equal the same numbers by hand, and do not change the step."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from sodaopt import GPA, SODA, SODAWrapper, plan, zoo

NAMES = ("lr", "lam", "as_weight_decay", "weight", "distance", "gradient", "step", "update", "pull",
         "update_rms", "share", "angle")  # fmt: skip


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def feed(net, opt, steps):
    torch.manual_seed(1)
    for _ in range(steps):
        net(torch.randn(16, 6)).square().mean().backward()
        opt.step()
        opt.zero_grad(set_to_none=False)


MAKERS = {
    "wrapped AdamW": lambda ps: SODAWrapper(AdamW(ps, lr=0.1, weight_decay=0)),
    "wrapped SGD": lambda ps: SODAWrapper(SGD(ps, lr=0.1)),
    "anchored row": lambda ps: SODA(ps, 0.1, zoo.soda(zoo.adam())),
    "decayed row": lambda ps: SODA(ps, 0.1, zoo.adamw(weight_decay=0.5)),
    "plain row": lambda ps: SODA(ps, 0.1, zoo.adam()),
    "average": lambda ps: GPA(SODA(ps, 0.1, zoo.adam())),
}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def by_hand(opt, net, name):
    """Return one step's numbers from copies of everything."""
    ps = list(net.parameters())
    old = [p.detach().clone() for p in ps]
    key = "soda_z0" if "wrapped" in name else "z0"
    z0 = [opt.state[p].get(key, torch.zeros(())).clone() for p in ps]
    lam = {"decayed row": 0.05, "plain row": 0.0, "average": 0.0}.get(name, 1 / 6)
    feed(net, opt, 1)
    cat = lambda ts: torch.cat([t.flatten() for t in ts])  # noqa: E731
    x, step = cat(old), cat([p.detach() - o for p, o in zip(ps, old, strict=True)])
    pull = lam * (cat([z.expand_as(o) for z, o in zip(z0, old, strict=True)]) - x)
    update = step - pull
    cosine = (update @ pull / update.norm() / pull.norm()).item() if lam else math.nan
    return {
        "step": step.norm(), "pull": pull.norm(), "update": update.norm(),
        "update_rms": update.square().mean().sqrt(), "share": pull.norm() / step.norm(),
        "weight": cat([p.detach() for p in ps]).norm(),
        "angle": math.degrees(math.acos(cosine)) if lam else math.nan,
    }  # fmt: skip


@pytest.mark.parametrize("name", MAKERS)
def test_the_numbers_of_a_step(name):
    net = model()
    opt = MAKERS[name](net.parameters())
    feed(net, opt, 4)
    opt.watch()
    want = by_hand(opt, net, name)
    grads = torch.cat([p.grad.flatten() for p in net.parameters()])
    assert not grads.any(), "the gradients are cleared, and were measured before"
    [row] = opt.diagnostics()
    assert set(NAMES) <= set(row)
    for number, value in want.items():
        assert row[number] == pytest.approx(float(value), rel=1e-4, nan_ok=True), number
    assert row["gradient"] > 0
    assert (row["pull"] > 0) == (name not in ("plain row", "average"))


def test_parts_add_up():
    """The squares of the parameters, and those of the roles, add up to those of all."""
    net = model()
    opt = SODAWrapper(AdamW(net.named_parameters(), lr=0.1, weight_decay=0))
    opt.watch()
    feed(net, opt, 3)
    [whole] = opt.diagnostics()
    each = opt.diagnostics("parameter")
    assert list(each) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    roles = opt.diagnostics({row.parameter: row.role for row in plan(net).rows})
    assert len(roles) > 1
    for parts in (each, roles):
        for name in ("gradient", "step", "update", "pull", "distance", "weight"):
            total = math.sqrt(sum(part[name] ** 2 for part in parts.values()))
            assert total == pytest.approx(whole[name], rel=1e-5), name


@makers
def test_the_weights_are_the_same_with_and_without(make):
    nets = [model(), model()]
    for net, on in zip(nets, (False, True), strict=True):
        opt = make(net.parameters())
        opt.watch(on)
        feed(net, opt, 5)
    for a, b in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(a, b)


def test_watching_can_end():
    net = model()
    opt = SODAWrapper(SGD(net.parameters(), lr=0.1))
    opt.watch()
    opt.watch(False)
    feed(net, opt, 2)
    [row] = opt.diagnostics()
    assert "step" not in row
    assert row["distance"] > 0


@pytest.mark.parametrize("steps", ["wrapper", "base"])
@pytest.mark.parametrize("watched", ["wrapper", "base"])
def test_a_wrapper_and_its_base_are_watched_separately(watched, steps):
    """They share their hooks, and either of them may step."""
    net = model()
    base = SODA(net.parameters(), 0.1, zoo.adam())
    both = {"wrapper": SODAWrapper(base), "base": base}
    opt = both.pop(watched)
    opt.watch()
    feed(net, {"wrapper": opt, "base": opt, **both}[steps], 2)
    assert opt.diagnostics()[0]["step"] > 0
    [other] = both.values()
    assert "step" not in other.diagnostics()[0]


def test_a_bare_base_steps_under_a_watched_wrapper():
    net = model()
    opt = SODAWrapper(SGD(net.parameters(), lr=0.1))
    opt.watch()
    feed(net, opt.base, 1)
    assert opt.diagnostics()[0]["step"] > 0


@pytest.mark.parametrize("how", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))])
@makers
def test_a_copy_is_not_watched(make, how):
    net = model()
    opt = make(net.parameters())
    opt.watch()
    feed(net, opt, 1)
    before = opt.diagnostics()[0]["step"]
    other = how(opt)
    for group in other.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    other.step()
    assert "step" not in other.diagnostics()[0]
    assert opt.diagnostics()[0]["step"] == before > 0


def test_a_parameter_without_a_gradient_has_a_step_of_0():
    net = model()
    opt = SODAWrapper(SGD(net.parameters(), lr=0.1))
    net[0].requires_grad_(False)
    opt.watch()
    feed(net, opt, 2)
    rows = opt.diagnostics("parameter")
    assert (rows["0.0"]["step"], rows["0.0"]["pull"], rows["0.0"]["gradient"]) == (0, 0, 0)
    assert rows["0.2"]["step"] > 0
    assert opt.diagnostics()[0]["step"] > 0
