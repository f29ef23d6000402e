"""The cautious pull equals its definition element by element."""

from __future__ import annotations

import pytest
import torch

from sodaopt import schedules
from sodaopt.lab.cautious import CautiousWrapper
from sodaopt.lab.job import Job, resolve
from sodaopt.lab.model import GPT
from sodaopt.lab.optimizers import Origin, build


@pytest.mark.parametrize("origin", [False, True])
def test_the_pull_moves_only_elements_whose_update_agrees(origin: bool) -> None:
    """x <- x - lr g + lam (z0 - x) for elements whose update and pull have the same sign."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(50, dtype=torch.float64))
    z0 = torch.zeros(50, dtype=torch.float64) if origin else p.detach().clone()
    anchor = Origin() if origin else "clone"
    opt = CautiousWrapper(torch.optim.SGD([p], lr=0.1), decay=0.25, anchor=anchor)
    expected = p.detach().clone()
    agreed = []
    for _ in range(5):
        p.grad = torch.randn(50, dtype=torch.float64)
        pull, update = z0 - expected, -0.1 * p.grad
        agreed.append(int((pull.sign() == update.sign()).sum()))
        expected = torch.where(
            pull.sign() == update.sign(), expected + update + 0.25 * pull, expected + update
        )
        opt.step()
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-12)
    assert 0 < agreed[-1] < 50


@pytest.mark.parametrize("name", ["cautious(muon)", "cautious_wd(adamw)"])
def test_by_name(name: str) -> None:
    wd = {"wd": 2.0} if "wd" in name else {"decay": "coupled"}
    job = resolve(Job(preset="nano", optimizer=name, warmup=0.0, **wd), 1024)
    opt = build(job.name, GPT(job.shape), job.settings)
    assert isinstance(opt, CautiousWrapper)
    pulled = [group for group in opt.param_groups if group["soda_only"]]
    assert pulled
    lr = job.settings.lr
    lam = lr * 2.0 if "wd" in name else 0.5
    assert all(opt._lam(group, opt._memory(group)) == pytest.approx(lam) for group in pulled)


def test_the_squared_ratio_is_a_coupled_pull_twice() -> None:
    squared = schedules.coupled(schedules.coupled())
    past = squared.advance(squared.advance(squared.start(), 0, 1.0), 1, 0.5)
    assert squared(1, 0.5, past) == 0.25 / 3
