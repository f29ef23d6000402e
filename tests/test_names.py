"""One name means one thing: in `optimizer`, `param_groups`, `SODA(method=)` and the lab."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import sodaopt
from sodaopt import SODA, SODAWrapper, anchors, hidden, param_groups, plan, schedules, zoo
from sodaopt._names import Name
from sodaopt.factory import AVERAGED, LR, parse_name
from sodaopt.lab.optimizers import NAMES as LAB
from sodaopt.layers.recipes import PULLED, RECIPES

STEPS = 4


class Tied(nn.Module):
    """A model with a tied embedding, a hidden layer and a bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mid, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.mid(self.embed(x)).tanh())
        return out


def weights(model: nn.Module, opt: Optimizer, steps: int = STEPS) -> list[torch.Tensor]:
    """The weights after some steps."""
    for k in range(steps):
        x = torch.arange(6) + k
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), (x * 5) % 12).backward()
        opt.step()
    return [p.detach().clone() for p in model.parameters()]


def close(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.allclose(x, y, rtol=1e-5, atol=1e-7) for x, y in zip(a, b, strict=True))


def by_hand(name: Name) -> tuple[nn.Module, Optimizer]:
    """The optimizer by its parts. The pull is a wrapper, unless the name has an average."""
    model = Tied()
    if name.average:
        inner = str(name._replace(average=None))
        return model, AVERAGED[name.average](SODA(param_groups(model, inner), LR[name.base]))
    opt = SODA(param_groups(model, name.undecayed), LR[name.base])
    if name.pull is None:
        return model, opt
    pulled = [row.parameter for row in plan(model).rows if row.role in PULLED[name.pull]]
    return model, SODAWrapper(opt, only=pulled)


@pytest.mark.parametrize("name", sodaopt.names())
def test_every_name_is_its_parts(name: str) -> None:
    model = Tied()
    ours = weights(model, sodaopt.optimizer(model, name))
    assert close(ours, weights(*by_hand(parse_name(name))))


def test_names_of_the_lab_are_names_of_the_library() -> None:
    """The lab adds experimental pulls. It has no adam, because the weight decay is a setting."""
    ours = {name for name in sodaopt.names() if parse_name(name).base != "adam"}
    assert ours == {name for name in LAB if not name.startswith("cautious")}
    assert set(LR) == set(RECIPES)


@pytest.mark.parametrize("row", ["adam", "adamw", "lion", "muon", "scion", "uscion"])
def test_a_list_of_parameters_is_pulled_as_a_whole(row: str) -> None:
    """A row has no roles: soda(row) pulls every parameter, in place of the row's weight decay."""
    plain = {"adamw": zoo.adam(), "scion": zoo.uscion()}.get(row) or zoo.ROWS[row]()
    a, b = Tied(), Tied()
    named = SODA([a.embed.weight, a.mid.weight], 1e-2, f"SODA({row})")
    assert close(
        weights(a, named), weights(b, SODA([b.embed.weight, b.mid.weight], 1e-2, zoo.soda(plain)))
    )


PARSED = {
    "muon": Name("muon"),
    "SODA( Muon )": Name("muon", "soda"),
    "soda-dagger": Name("soda_dagger"),
    "Schedule-Free(adamw)": Name("adamw", None, "schedule_free"),
    "gpa(soda_all(lion))": Name("lion", "soda_all", "gpa"),
}


@pytest.mark.parametrize("text", PARSED)
def test_grammar(text: str) -> None:
    assert parse_name(text) == PARSED[text]
    assert parse_name(str(PARSED[text])) == PARSED[text]


MODEL = Tied()
WRONG: dict[str, tuple[Any, str]] = {
    "misspelt": (lambda: sodaopt.optimizer(MODEL, "soda(muno)"), r"did you mean 'soda\(muon\)'"),
    "far": (
        lambda: sodaopt.optimizer(MODEL, "xyz"),
        r"known: .*gpa\(\.\.\.\).* muon.*, soda\(\.\.\.\)",
    ),
    "open": (lambda: sodaopt.optimizer(MODEL, "soda(muon"), "unknown optimizer"),
    "closed": (lambda: sodaopt.optimizer(MODEL, "soda(muon))"), "unknown optimizer"),
    "inside out": (lambda: sodaopt.optimizer(MODEL, "soda(gpa(muon))"), "unknown optimizer"),
    "twice": (lambda: sodaopt.optimizer(MODEL, "soda(soda_dagger)"), "anchored already"),
    "recipe": (lambda: param_groups(MODEL, "gpa(muon)"), r"unknown recipe 'gpa\(muon\)'"),
    "method": (lambda: SODA(MODEL.parameters(), 1.0, "gpa(lion)"), "unknown method"),
    "no pull": (
        lambda: sodaopt.optimizer(MODEL, "muon", start=3),
        "muon has no pull",
    ),
    "two decays": (
        lambda: sodaopt.optimizer(MODEL, "soda(muon)", weight_decay=0.1),
        "without decay or averaging",
    ),
    "no decay": (lambda: sodaopt.optimizer(MODEL, "scion", weight_decay=0.1), "uscion for scion"),
    "pattern": (lambda: sodaopt.optimizer(MODEL, "soda(muon)", strat=3), "or pattern 'strat'"),
    "tied": (
        lambda: sodaopt.optimizer(nn.Sequential(nn.Linear(2, 2)), "soda_tied(muon)"),
        "no parameter to pull",
    ),
    "a method": (lambda: sodaopt.optimizer(MODEL, zoo.muon()), "must be text such as"),  # type: ignore[arg-type]
    "a method as recipe": (lambda: param_groups(MODEL, zoo.muon()), "a recipe is a name"),  # type: ignore[arg-type]
    "no model": (
        lambda: sodaopt.optimizer(MODEL.parameters(), "muon"),  # type: ignore[arg-type]
        "got a generator: pass the nn.Module",
    ),
    "negative start": (lambda: sodaopt.optimizer(MODEL, "gpa(soda(muon))", start=-1), "at least 0"),
    "start as text": (lambda: sodaopt.optimizer(MODEL, "soda_dagger", start="3"), "an integer"),  # type: ignore[arg-type]
    "lr as text": (lambda: sodaopt.optimizer(MODEL, "muon", "1", show=True), "lr must be a number"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_names_and_settings(case: str) -> None:
    build, match = WRONG[case]
    with pytest.raises((TypeError, ValueError), match=match):
        build()


def test_settings_arrive(capsys: pytest.CaptureFixture[str]) -> None:
    model, decay = Tied(), schedules.coupled()
    opt = sodaopt.optimizer(
        model, "soda(muon)", decay=decay, start=7, anchor="bf16", show=True, bias=0.5
    )
    assert opt.anchor == anchors.anchor("bf16")
    (pulled,) = [g for g in opt.param_groups if opt.methods[g["method"]].centre == "init"]
    assert pulled["params"] == hidden(model)
    assert opt.methods[pulled["method"]].lam == schedules.after(decay, 7)
    assert LR["muon"] / 2 in [group["lr"] for group in opt.param_groups]
    said = capsys.readouterr().out
    assert said.startswith(f"soda(muon) with lr {2**-11:g} for Tied\n")
    assert "soda(muon)" in said.split("\n", 1)[1]


@pytest.mark.parametrize("name", ["soda(muon)", "gpa(soda(muon))", "soda_dagger"])
def test_the_pull_waits_for_its_start(name: str) -> None:
    """Three steps without a pull, then one whose pull is not zero."""
    runs = [Tied(), Tied(), Tied()]
    late = sodaopt.optimizer(runs[0], name, start=3)
    never = sodaopt.optimizer(runs[1], name, decay=0.0)
    assert close(weights(runs[0], late, 3), weights(runs[1], never, 3))
    assert not close(weights(runs[0], late, 1), weights(runs[1], never, 1))


@pytest.mark.parametrize("name", ["adamw", "muon", "lion"])
def test_weight_decay_acts_on_hidden_layers(name: str) -> None:
    lr, wd = 1e-2, 0.3
    runs = [Tied(), Tied()]
    before = runs[0].mid.weight.detach().clone()
    plain, decayed = (
        weights(m, sodaopt.optimizer(m, name, lr, weight_decay=w), 1)
        for m, w in zip(runs, (0.0, wd), strict=True)
    )
    for (who, _), x, y in zip(runs[0].named_parameters(), plain, decayed, strict=True):
        expected = x - lr * wd * before if who == "mid.weight" else x
        assert torch.allclose(y, expected, atol=1e-6), who
    assert not math.isclose(plain[1].norm(), decayed[1].norm())


def test_types_list_the_choices() -> None:
    assert set(get_args(anchors.AnchorName)) == set(anchors.ANCHORS)
