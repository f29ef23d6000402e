"""Build the optimizers of the lab from a name and the settings of a job. Some names:

muon   soda(muon)   soda_all(muon)   soda_tied(muon)   schedule_free(adamw)   gpa(soda(muon))
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sodaopt import _names as names
from sodaopt import schedules
from sodaopt._errors import unknown
from sodaopt._names import Name, every_name
from sodaopt.anchors import Anchor
from sodaopt.core.diagnostics import Watched
from sodaopt.core.method import Method
from sodaopt.core.optimizer import SODA
from sodaopt.factory import AVERAGED, LR, base_rules, check_pull, pulled_rules
from sodaopt.layers.plan import param_groups, plan
from sodaopt.layers.recipes import PULLED, RECIPES, Recipe, Rule, decayed
from sodaopt.layers.roles import MATRICES
from sodaopt.schedules import first
from sodaopt.wrappers.soda import SODAWrapper

from .cautious import CautiousWrapper


@dataclass(frozen=True)
class Base:
    """Settings of runs with a base optimizer. The library's recipes have its other settings."""

    lr: float
    activation: float = 1.0
    """Factor of the squared ReLU in the model."""
    warmup: float = 0.0
    """Fraction of the run over which the learning rate rises."""
    decays: bool = False
    """Whether the base optimizer accepts a weight decay, which acts on the hidden matrices."""


BASES = {
    "adamw": Base(LR["adamw"], warmup=0.05, decays=True),
    "muon": Base(LR["muon"], decays=True),
    "scion": Base(LR["scion"], activation=2.0),
    "uscion": Base(LR["uscion"], activation=2.0),
    "soda_dagger": Base(LR["soda_dagger"], activation=2.0),
    "lion": Base(LR["lion"], warmup=0.05, decays=True),
}
CAUTIOUS = {"cautious": MATRICES, "cautious_wd": MATRICES}
"""The roles that experimental pulls act on. These pulls exist as wrappers only."""
PULLS = PULLED | CAUTIOUS
_NAMES = every_name(BASES, PULLED, AVERAGED) | every_name(BASES, CAUTIOUS)
NAMES = [text for text, name in _NAMES.items() if not name.is_anchored_twice]


def parse(text: str) -> Name:
    """Parse a name. Optimizers that are equal in the lab get the same name.

    The job sets the weight decay, so adam is adamw. A pull replaces Scion's pull to the origin, so
    soda(scion) is soda(uscion).
    """
    name = names.parse(text, every_name(RECIPES, PULLS, AVERAGED))
    same = {"adam": "adamw", "scion": "uscion" if name.pull else "scion"}
    name = name._replace(base=same.get(name.base, name.base))
    if str(name) not in NAMES:
        raise ValueError(unknown("optimizer", text, NAMES))
    return name


def decays(name: Name) -> bool:
    """Whether the optimizer has a weight decay."""
    return BASES[name.base].decays and (not name.is_anchored or name.pull == "cautious_wd")


Z0: TypeAlias = Literal["init", "zero"]
Decay: TypeAlias = Literal["uniform", "coupled", "squared"]


@dataclass(frozen=True)
class Settings:
    """Settings of an optimizer, besides its name."""

    lr: float
    wd: float = 0.0
    warmup_steps: int = 0
    steps: int = 1
    alpha: float | None = None
    alpha_bar: float | None = None
    z0: Z0 = "init"
    fade: tuple[float, float] | None = None
    decay: Decay = "uniform"
    recipe: Recipe | None = None
    """Rules of the layer plan, instead of the base optimizer's."""


DECAYS: dict[Decay, schedules.Coef] = {
    "uniform": schedules.uniform,
    "coupled": schedules.coupled(schedules.uniform),
    "squared": schedules.coupled(schedules.coupled(schedules.uniform)),
}
"""Strengths of the pull, by their names."""


def check(name: Name, s: Settings) -> None:
    """Raise for settings that do not fit the optimizer, before any data is read."""
    if not 0 < s.lr < math.inf:
        raise ValueError(f"lr must be positive and finite, got {s.lr}")
    if not 0 <= s.wd < math.inf:
        raise ValueError(f"wd must be at least 0 and finite, got {s.wd}")
    if s.wd and not decays(name):
        why = "the pull replaces it" if name.is_anchored else "the learning rate decides its pull"
        raise ValueError(f"wd is {s.wd}, but {name} has no weight decay ({why}): leave out wd")
    if s.z0 not in get_args(Z0):
        raise ValueError(unknown("z0", s.z0, get_args(Z0)))
    if s.z0 != "init" and name.pull and name.average:
        raise ValueError(
            f"z0 is {s.z0}, but only soda_dagger and soda(...) can set z0, not {name}: leave out z0"
        )
    if s.decay not in DECAYS:
        raise ValueError(unknown("decay", s.decay, DECAYS))
    defaults = Settings(s.lr)
    pull = {key: getattr(s, key) for key in ("z0", "fade", "decay")}
    check_pull(name, **{k: None if v == getattr(defaults, k) else v for k, v in pull.items()})
    _check_momentum(name, s)
    if s.fade and not (len(s.fade) == 2 and 0 <= s.fade[0] < s.fade[1] <= 1):
        raise ValueError(f"fade must be two fractions of the run such as 0.67 0.9, got {s.fade}")


def _check_momentum(name: Name, s: Settings) -> None:
    given = {k: v for k, v in (("alpha", s.alpha), ("alpha_bar", s.alpha_bar)) if v is not None}
    for setting, value in given.items():
        if name.base not in SPECTRAL:
            raise ValueError(
                f"{setting} is {value}, but only {', '.join(SPECTRAL)} have alpha and alpha_bar, "
                f"not {name.base}: leave out {setting}"
            )
        if not 0 <= value <= 1:
            raise ValueError(f"{setting} must be between 0 and 1, got {value}")


SPECTRAL = ("muon", "scion", "uscion", "soda_dagger")


def build(name: Name, model: nn.Module, s: Settings, process_group: Any = None) -> Watched:
    """Build the optimizer for a model. A pull begins at the end of the warmup.

    process_group: the ranks that have the same plain parameters and share the work of a step
    """
    check(name, s)
    if name.pull and not name.average:
        return _wrapped(name, model, s, process_group)
    rules = pulled_rules(name, recipe(name, s), _pull(s), s.warmup_steps)
    opt = SODA(param_groups(model, rules), s.lr, process_group=process_group)
    return AVERAGED[name.average](opt) if name.average else opt


def _wrapped(name: Name, model: nn.Module, s: Settings, process_group: Any) -> SODAWrapper:
    """Build a base optimizer inside a wrapper that pulls, as in Algorithm 1 of the paper."""
    planned = plan(model, recipe(name, s))
    opt = SODA(planned.groups(), s.lr, process_group=process_group)
    pull: dict[str, Any] = {"decay": _pull(s), "start": s.warmup_steps}
    if name.pull == "cautious_wd":
        pull = {"decay": schedules.times(schedules.lr, s.wd)}
    if s.z0 == "zero" or name.pull == "cautious_wd":
        pull["anchor"] = Origin()
    roles = PULLS[name.pull or ""]
    wrapper = CautiousWrapper if name.pull in CAUTIOUS else SODAWrapper
    return wrapper(opt, only=[row.parameter for row in planned.rows if row.role in roles], **pull)


def _pull(s: Settings) -> schedules.Coef:
    """Return the schedule of the pull's strength."""
    pull = DECAYS[s.decay]
    if s.fade is None:
        return pull
    start, end = (round(part * s.steps) for part in s.fade)
    return schedules.fade(pull, start, max(end, start + 1))


def recipe(name: Name, s: Settings) -> dict[str, Rule]:
    """Return the rules of the layer plan, without the pull."""
    wd = 0.0 if name.is_anchored else s.wd  # an anchored optimizer's decay is its pull
    found = decayed(s.recipe, wd) if s.recipe else base_rules(name, wd)
    if name.base not in SPECTRAL:
        return found
    return {role: _tuned(rule, name, s) for role, rule in found.items()}


def _tuned(rule: Rule, name: Name, s: Settings) -> Rule:
    """Return the rule with the momentum and z0 of the settings. Muon's Adam layers keep theirs."""
    method: Method = rule.method
    if name.base == "muon" and method.name != "muon":
        return rule
    dagger = name.base == "soda_dagger"
    if s.alpha is not None:
        method = replace(method, alpha=first(s.alpha) if dagger else s.alpha)
    if s.alpha_bar is not None:
        method = replace(method, alpha_bar=s.alpha_bar)
    if dagger and s.z0 == "zero":  # the other bases get z0 from the wrapper
        method = replace(method, centre="origin")
    return rule._replace(method=method)


@dataclass(frozen=True)
class Origin(Anchor):
    """z0 = 0 for any initial weights: the paper's ablation."""

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
