"""Build optimizers by name: a base with the paper's hyperparameters, alone or in a wrapper.

muon   soda(muon)   soda_all(muon)   soda_tied(muon)   schedule_free(adamw)   gpa(soda(muon))
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sodaopt import schedules, zoo
from sodaopt._errors import unknown
from sodaopt.anchors import Anchor
from sodaopt.core.diagnostics import Watched
from sodaopt.core.method import Method
from sodaopt.core.optimizer import SODA
from sodaopt.layers.plan import param_groups, plan
from sodaopt.layers.recipes import Recipe, Rule, rule_of, rules, soda
from sodaopt.layers.roles import MATRICES, ROLES
from sodaopt.schedules import first
from sodaopt.wrappers.averages import GPA, SNOO, Lookahead, ScheduleFree
from sodaopt.wrappers.soda import SODAWrapper

from .cautious import CautiousWrapper


@dataclass(frozen=True)
class Base:
    """A recipe of the layer plan with the paper's settings."""

    recipe: str
    lr: float
    activation: float = 1.0
    """Factor of the squared ReLU in the model."""
    warmup: float = 0.0
    """Fraction of the run over which the learning rate rises."""
    decays: bool = False
    """Whether it accepts a weight decay, which acts on the hidden matrices."""


BASES = {
    "adamw": Base("adam", 2**-9, warmup=0.05, decays=True),
    "muon": Base("muon", 2**-11, decays=True),
    "scion": Base("scion", 2**-12, activation=2.0),
    "uscion": Base("uscion", 2**-12, activation=2.0),
    "soda_dagger": Base("soda_dagger", 2**-12, activation=2.0),
    "lion": Base("lion", 2**-12, warmup=0.05, decays=True),
}
ALIASES = {"adam": "adamw", "sf": "schedule_free"}
INSIDE = {"soda": MATRICES, "soda_all": tuple(ROLES), "soda_tied": ("tied",)}
"""The roles that each pull acts on. These pulls can also be inside an average."""
CAUTIOUS = {"cautious": MATRICES, "cautious_wd": MATRICES}
"""Experimental pulls, which are wrappers only."""
ANCHORED = INSIDE | CAUTIOUS
AVERAGED: dict[str, Callable[[Optimizer], Watched]] = {
    "schedule_free": ScheduleFree,
    "gpa": GPA,
    "lookahead": Lookahead,
    "snoo": SNOO,
}
_FREE = [base for base in BASES if base != "soda_dagger"]
_PULLED = (*BASES, *(f"{pull}({base})" for pull in INSIDE for base in _FREE))
_AVERAGES = [f"{average}({inner})" for average in AVERAGED for inner in _PULLED]
NAMES = (*_PULLED, *(f"{pull}({base})" for pull in CAUTIOUS for base in _FREE), *_AVERAGES)


class Name(NamedTuple):
    """A parsed name.

    soda(muon) is ("soda", None, "muon"), and gpa(soda(muon)) is ("gpa", "soda", "muon"). Wrappers
    do not nest: inside an average, the pull is part of the methods of the base (zoo.soda).
    """

    wrapper: str | None
    pull: str | None
    base: str

    @property
    def spec(self) -> Base:
        return BASES[self.base]

    @property
    def warmup(self) -> float:
        """Fraction of the run over which the learning rate rises.

        It is 0 for a pull inside an average, which cannot wait for the end of a warmup.
        """
        return 0.0 if self.pull else self.spec.warmup

    @property
    def anchored(self) -> bool:
        return self.wrapper in ANCHORED or bool(self.pull) or self.base == "soda_dagger"

    @property
    def decays(self) -> bool:
        """Whether it has a weight decay."""
        return self.spec.decays and (not self.anchored or self.wrapper == "cautious_wd")

    def __str__(self) -> str:
        inner = f"{self.pull}({self.base})" if self.pull else self.base
        return f"{self.wrapper}({inner})" if self.wrapper else inner


def parse(text: str) -> Name:
    """Parse a name. SODA(Muon) and soda(muon) are equal."""
    plain = re.sub(r"\s+", "", text.lower()).replace("-", "_")
    *outer, base = (ALIASES.get(part, part) for part in plain.rstrip(")").split("("))
    if base == "scion" and outer and outer[-1] in ANCHORED:
        base = "uscion"  # Scion without its pull to the origin, which the wrapper's pull replaces
    name = Name(outer[0] if outer else None, outer[1] if len(outer) > 1 else None, base)
    whole = all(outer) and plain.endswith(")" * len(outer)) and plain.count(")") == len(outer) < 3
    if not whole or str(name) not in NAMES:
        raise ValueError(unknown("optimizer", text, ("adam", *NAMES)))
    return name


@dataclass(frozen=True)
class Settings:
    """Settings of an optimizer, besides its name."""

    lr: float
    wd: float = 0.0
    warmup_steps: int = 0
    steps: int = 1
    alpha: float | None = None
    alpha_bar: float | None = None
    z0: str = "init"
    fade: tuple[float, float] | None = None
    decay: str = "uniform"
    recipe: Recipe | None = None
    """Rules of the layer plan instead of the base's."""


DECAYS: dict[str, schedules.Coef] = {
    "uniform": schedules.uniform,
    "coupled": schedules.coupled(schedules.uniform),
    "squared": schedules.coupled(schedules.coupled(schedules.uniform)),
}
"""Strengths of the wrapper's pull."""


def check(name: Name, s: Settings) -> None:
    """Raise for settings that do not fit the optimizer, before any data is read."""
    if not 0 < s.lr < math.inf:
        raise ValueError(f"lr must be positive, got {s.lr}")
    if not 0 <= s.wd < math.inf:
        raise ValueError(f"wd must not be negative, got {s.wd}")
    if s.wd and not name.decays:
        why = "the pull replaces it" if name.anchored else "the learning rate decides its pull"
        raise ValueError(f"wd is {s.wd}, but {name} has no weight decay ({why}): leave out wd")
    if s.z0 not in ("init", "zero"):
        raise ValueError(unknown("z0", s.z0, ("init", "zero")))
    if s.z0 != "init" and (name.pull or not name.anchored):
        raise ValueError(f"z0 is {s.z0}: only soda_dagger and soda(...) have it, not {name}")
    if name.pull and s.warmup_steps:
        raise ValueError(f"the pull in {name} begins with the first step: use warmup 0")
    if s.decay not in DECAYS:
        raise ValueError(unknown("decay", s.decay, DECAYS))
    for setting, value in (("fade", s.fade), ("decay", s.decay)):
        if value not in (None, "uniform") and not name.anchored:
            raise ValueError(
                f"{setting} is {value}: only soda_dagger and soda(...) have it, not {name}"
            )
    _check_momentum(name, s)
    if s.fade and not (len(s.fade) == 2 and 0 <= s.fade[0] < s.fade[1] <= 1):
        raise ValueError(f"fade must be two fractions of the run such as 0.67 0.9, got {s.fade}")


def _check_momentum(name: Name, s: Settings) -> None:
    given = {k: v for k, v in (("alpha", s.alpha), ("alpha_bar", s.alpha_bar)) if v is not None}
    if given and name.base not in SPECTRAL:
        raise ValueError(f"only {', '.join(SPECTRAL)} have alpha and alpha_bar, not {name.base}")
    for setting, value in given.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{setting} must be between 0 and 1, got {value}")


SPECTRAL = ("muon", "scion", "uscion", "soda_dagger")


def build(name: Name, model: nn.Module, s: Settings) -> Watched:
    """Build the optimizer for a model."""
    check(name, s)
    opt = SODA(param_groups(model, recipe(name, s)), s.lr)
    if name.wrapper in AVERAGED:
        return AVERAGED[name.wrapper](opt)
    if name.wrapper is None:
        return opt
    options: dict[str, Any] = {"start": s.warmup_steps, "decay": _pull(s)}
    options["anchor"] = "auto" if s.z0 == "init" else Origin()
    if name.wrapper == "cautious_wd":
        options = {"decay": schedules.times(schedules.lr, s.wd), "anchor": Origin()}
    kind = CautiousWrapper if name.wrapper in CAUTIOUS else SODAWrapper
    return kind(opt, only=_pulled(model, ANCHORED[name.wrapper]), **options)


def _pulled(model: nn.Module, roles: tuple[str, ...]) -> list[nn.Parameter]:
    """Return the trainable parameters that have one of these roles."""
    found = [row.parameter for row in plan(model).rows if row.role in roles]
    if not found:
        raise ValueError(f"the model has no parameter to pull: no role is one of {roles}")
    return found


def _pull(s: Settings) -> schedules.Coef:
    pull = DECAYS[s.decay]
    if s.fade is None:
        return pull
    start, end = (round(part * s.steps) for part in s.fade)
    return schedules.fade(pull, start, max(end, start + 1))


def recipe(name: Name, s: Settings) -> dict[str, Rule]:
    """Return the rules of the layer plan, without the pull of a wrapper."""
    found = rules(s.recipe or name.spec.recipe)
    if name.base in SPECTRAL:
        found = {role: _tuned(rule, name, s) for role, rule in found.items()}
    dense = {role: rule for role in MATRICES if (rule := rule_of(found, role)) is not None}
    if not name.anchored:  # an anchored optimizer's decay is its pull
        found |= {role: _decayed(rule, s.wd) for role, rule in dense.items()}
    return soda(found, ANCHORED[name.pull], _pull(s)) if name.pull else found


def _decayed(rule: Rule, wd: float) -> Rule:
    return rule._replace(method=zoo.decayed(rule.method, wd)) if wd else rule


def _tuned(rule: Rule, name: Name, s: Settings) -> Rule:
    """Return the rule with another momentum or centre. Muon's Adam layers keep theirs."""
    method: Method = rule.method
    if name.base == "muon" and method.name != "muon":
        return rule
    dagger = name.base == "soda_dagger"
    if s.alpha is not None:
        method = replace(method, alpha=first(s.alpha) if dagger else s.alpha)
    if s.alpha_bar is not None:
        method = replace(method, alpha_bar=s.alpha_bar)
    if dagger:
        method = replace(method, lam=_pull(s))
    if dagger and s.z0 == "zero":  # the other bases get z0 from the wrapper
        method = replace(method, centre="origin")
    return rule._replace(method=method)


@dataclass(frozen=True)
class Origin(Anchor):
    """z0 = 0 for any initial weights: the paper's ablation."""

    differs: ClassVar[bool] = True

    def capture(self, p: Tensor, first: bool) -> Tensor:
        return torch.zeros((), dtype=p.dtype, device="meta" if p.is_meta else "cpu")

    def source(self, p: Tensor, kept: Tensor) -> float:
        return 0.0

    def restore(self, kept: Tensor, p: Tensor) -> Tensor:
        return self.capture(p, first=False)


@contextmanager
def averaged(opt: Optimizer) -> Iterator[None]:
    """Let the parameters hold the output x of the method. Restore y on exit."""
    opt.eval()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        opt.train()  # type: ignore[attr-defined]


def state_bytes(opt: Optimizer) -> int:
    """Return the bytes of all tensors in the optimizer's state."""
    tensors = [t for s in opt.state.values() for t in s.values() if isinstance(t, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)
