"""A step that repeats the buckets of the last step equals a step that makes new ones."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from sodaopt import SODA

Act = Callable[[SODA, Parameter, dict[str, Any], float], Any]


def load(opt: SODA, more: float) -> None:
    saved = copy.deepcopy(opt.state_dict())
    for s in saved["state"].values():
        s["step"] += more
    opt.load_state_dict(saved)


def replace_state(opt: SODA, p: Parameter) -> None:
    opt.state[p] = {name: t.clone() for name, t in opt.state[p].items()}


def change(opt: SODA, p: Parameter, name: str, value: float) -> None:
    if name in opt.state.get(p, {}):
        opt.state[p][name].fill_(value)


def replace_z0(opt: SODA, p: Parameter, value: float) -> None:
    if "z0" in opt.state.get(p, {}):
        opt.state[p]["z0"] = torch.full_like(opt.state[p]["z0"], value)


ACTS: dict[str, Act] = {
    "nothing": lambda opt, p, group, u: None,
    "no gradient": lambda opt, p, group, u: setattr(p, "grad", None),
    "new memory": lambda opt, p, group, u: setattr(p, "data", p.data.clone() + u),
    "transposed": lambda opt, p, group, u: setattr(
        p, "data", p.data.mT.contiguous().mT if p.dim() > 1 else p.data
    ),
    "freeze or thaw": lambda opt, p, group, u: p.requires_grad_(not p.requires_grad),
    "lr": lambda opt, p, group, u: group.update(lr=u / 10),
    "maximize": lambda opt, p, group, u: group.update(maximize=not group["maximize"]),
    "seed": lambda opt, p, group, u: group.update(seed=int(9 * u)),
    "load": lambda opt, p, group, u: load(opt, round(u)),
    "step": lambda opt, p, group, u: change(opt, p, "step", int(4 * u)),
    "z0": lambda opt, p, group, u: replace_z0(opt, p, u),
    "state": lambda opt, p, group, u: replace_state(opt, p),
    "new group": lambda opt, p, group, u: opt.add_param_group({"params": [torch.full((2,), u)]}),
}


def walk(method: str, seed: int, keeps: bool) -> list[Tensor]:
    """Return the weights after each step. A random act comes before each step."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    initial = torch.ones(3, 4), torch.randn(4, 2), torch.ones(5)
    weights = [Parameter(t.bfloat16()) for t in initial]
    opt = SODA([{"params": weights[:2]}, {"params": weights[2:]}], 0.01, method, anchor="auto")
    seen = []
    for _ in range(12):
        for group in opt.param_groups:
            for p in group["params"]:
                p.grad = torch.randn_like(p)
        group = rng.choice(opt.param_groups)
        ACTS[rng.choice([*ACTS])](opt, rng.choice(weights), group, rng.random())
        opt._repeatable = opt._repeatable if keeps else None
        opt.step()
        seen += [p.detach().clone() for group in opt.param_groups for p in group["params"]]
    return seen


@pytest.mark.parametrize("method", ["soda(lion)", "schedule_free"])
def test_kept_buckets(method: str) -> None:
    for seed in range(40):
        kept, anew = (walk(method, seed, keeps) for keeps in (True, False))
        for a, b in zip(kept, anew, strict=True):
            assert torch.equal(a, b)


def test_an_empty_parameter() -> None:
    """An empty parameter is never stepped, and the buckets of the others are kept."""
    weights = [Parameter(torch.ones(3, 4)), Parameter(torch.empty(0, 4))]
    opt = SODA(weights, 0.01, "soda(lion)")
    for p in weights:
        p.grad = torch.ones_like(p)
    opt.step()
    buckets = opt._repeatable[1]
    opt.step()
    assert [id(b) for b in opt._repeatable[1]] == [id(b) for b in buckets]
