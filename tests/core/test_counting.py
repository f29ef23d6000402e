"""After steps without a gradient, k is the parameter's own count or its group's count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD

from sodaopt import SODA, ScheduleFree, SODAWrapper, zoo

STEPS = 12
PRESENT: dict[str, Callable[[int], bool]] = {
    "late": lambda k: k >= 5,
    "missing in between": lambda k: k % 3 != 1,
    "once": lambda k: k == 4,
}


def weights() -> list[Parameter]:
    rng = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(3, 2, generator=rng, dtype=torch.float64)) for _ in range(2)]


def gradient(k: int, p: Tensor) -> Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(k), dtype=p.dtype)


def train(opt: Any, ps: list[Parameter], present: Callable[[int], bool]) -> list[Tensor]:
    """The first parameter always has a gradient, and the second one at times."""
    for k in range(STEPS):
        ps[0].grad = gradient(k, ps[0])
        ps[1].grad = gradient(100 + k, ps[1]) + 0.1 * ps[1].detach() if present(k) else None
        opt.step()
    return [p.detach().clone() for p in ps]


def adam(ps: list[Parameter]) -> Any:
    return SODA(ps, 0.1, zoo.schedule_free(zoo.adam((0.0, 0.999)), r=0.5))


SCHEDULE_FREE: dict[str, tuple[Any, str, list[str]]] = {
    "sgd row": (lambda ps: SODA(ps, 0.1, zoo.schedule_free(r=0.5)), "SGD", [*PRESENT]),
    "SGD wrapped": (lambda ps: ScheduleFree(SGD(ps, 0.1), r=0.5), "SGD", [*PRESENT]),
    # between gradients, the official one corrects the bias of a v that has not moved
    "adam row": (adam, "AdamW", ["late", "once"]),
}
OFFICIAL = {
    f"{row}, {when}": (make, name, PRESENT[when])
    for row, (make, name, whens) in SCHEDULE_FREE.items()
    for when in whens
}


@pytest.mark.parametrize(("make", "name", "present"), OFFICIAL.values(), ids=OFFICIAL)
def test_schedule_free_counts_as_the_official_one(
    make: Any, name: str, present: Callable[[int], bool]
) -> None:
    schedulefree = pytest.importorskip("schedulefree")
    ours, theirs = weights(), weights()
    official = getattr(schedulefree, f"{name}ScheduleFree")(theirs, lr=0.1, r=0.5)
    official.train()
    found, wanted = train(make(ours), ours, present), train(official, theirs, present)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def algorithm_1(z0: Tensor, present: Callable[[int], bool], by_group: bool) -> Tensor:
    """x <- (1 - lam) x + lam z0 - lr g, lam = 1/(k+2), with k of the group or of the parameter.

    z0 is the weight at the first gradient, so the pull of that step is zero.
    """
    x, own = z0.clone(), 0
    for k in range(STEPS):
        if present(k):
            lam = 1 / ((k if by_group else own) + 2)
            x = x + lam * (z0 - x) - 0.1 * (gradient(100 + k, x) + 0.1 * x)
            own += 1
    return x


RULES: dict[str, tuple[Any, bool]] = {
    "row": (lambda ps: SODA(ps, 0.1, zoo.soda(zoo.sgd())), False),
    "wrapper": (lambda ps: SODAWrapper(SGD(ps, 0.1)), True),
}


@pytest.mark.parametrize("present", PRESENT.values(), ids=PRESENT)
@pytest.mark.parametrize(("make", "by_group"), RULES.values(), ids=RULES)
def test_the_pull_counts(make: Any, by_group: bool, present: Callable[[int], bool]) -> None:
    """A row counts the steps of each parameter, and a wrapper those of a group."""
    ps = weights()
    z0 = ps[1].detach().clone()
    _, found = train(make(ps), ps, present)
    torch.testing.assert_close(found, algorithm_1(z0, present, by_group), rtol=1e-12, atol=1e-12)
