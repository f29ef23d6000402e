"""SODAWrapper: any torch optimizer, pulled toward its initial weights (the paper's Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sodaopt import anchors, schedules
from sodaopt._errors import unknown
from sodaopt.anchors import Source, pull_, value
from sodaopt.backends import not_compiled
from sodaopt.core.diagnostics import Pull
from sodaopt.core.optimizer import SODA
from sodaopt.parallel import sharded
from sodaopt.schedules import Coef
from sodaopt.wrappers.base import GroupStep, Wrapper, decays
from sodaopt.wrappers.known_bases import DECAYS, check_base
from sodaopt.wrappers.live import Group

AT_START = ("keep", "restart", "reanchor")


@dataclass
class _Pull:
    """The pull of one group during a step.

    pulled: the points to pull and their z0.
    added_later: the points, and the pull to add to them after the base's step.
    captured: newly captured z0 by parameter, kept after the base's step.
    provisional: the captured z0 may be replaced, see `_is_dry`.
    """

    lam: float
    pulled: list[tuple[Tensor, Source]] = field(default_factory=list)
    added_later: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))
    captured: dict[Tensor, Tensor] = field(default_factory=dict)
    provisional: bool = False


class SODAWrapper(Wrapper):
    """x <- (1 - lam) x + lam z0 + BaseUpdate(g), lam = 1/(k+2), z0 the initial weights.

        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
        opt = SODAWrapper(adamw, only=hidden(model))

    This replaces weight decay, so the base's must be 0. (The paper's Algorithm 1.)

    only: the pulled parameters: groups, parameters, or a predicate of a parameter. None: all.
    start: steps before the pull begins (a warmup).
    at_start: "keep" counting k from the beginning, "restart" k at `start`, or "reanchor": restart k
    and use the weights of that moment as z0.
    decay: lam as a function of (k, lr). schedules.uniform is the paper's.
    anchor: where z0 lives, see `sodaopt.anchors`: "clone", "bf16", "cpu", "constant", "auto" (one
    number if that is enough, else a clone), or the seeds of `sodaopt.init.seeded_`.
    seed: selects the rounding bits of 16-bit parameters. The base steps them in fp32, with its
    state in fp32, and they are rounded once.
    """

    prefix = "soda"

    def __init__(
        self,
        base: Optimizer,
        *,
        only: Iterable[Any] | Callable[[Tensor], bool] | None = None,
        start: int = 0,
        at_start: str = "keep",
        decay: Coef = schedules.uniform,
        anchor: Any = "auto",
        seed: int = 0,
    ) -> None:
        if at_start not in AT_START:
            raise ValueError(unknown("at_start", at_start, AT_START))
        if not (isinstance(start, int) and start >= 0) or isinstance(start, bool):
            raise ValueError(f"start counts steps and must not be negative, got {start!r}")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(f"seed must be an integer, got {seed!r}")
        if not (callable(decay) or isinstance(decay, int | float)):
            raise TypeError(f"decay is a number or a function of (k, lr), got {decay!r}")
        self.start, self.at_start, self.decay, self.seed = start, at_start, decay, seed
        self.anchor = anchors.anchor(anchor)
        if at_start == "reanchor" and not self.anchor.writable:
            raise ValueError("reanchor needs a z0 that can be written: anchor='clone' or 'cpu'")
        self.provisional: set[Tensor] = set()  # their z0 was captured in a dry step
        check_base(base, "SODAWrapper")
        only = only if only is None or callable(only) else list(only)
        self.only = only if callable(only) else None
        chosen = None if only is None else _select(base, only)
        for j, group in enumerate(base.param_groups):
            group["soda_only"] = True if chosen is None else chosen[j]
        base.defaults["soda_only"] = only is None
        super().__init__(base)
        for group in base.param_groups:
            self.lam(group | {"soda_k": self.start})  # raise now if it is out of range

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to the base. A predicate for `only` also selects among the new parameters.

        If `only` lists groups or parameters, a new group is not pulled.
        """
        group = dict(param_group)
        if callable(self.only):
            params = group["params"]
            group["params"] = params = [params] if isinstance(params, Tensor) else list(params)
            plain = [p[1] if isinstance(p, tuple) else p for p in params]
            group["soda_only"] = _selection([self.only(p) for p in plain])
        super().add_param_group(group)

    def _group_keys(self) -> Group:
        memory = schedules.start(self.decay)
        return {"soda_k": 0, "soda_only": True, **{f"soda_{n}": v for n, v in memory.items()}}

    def _constructor_keys(self) -> list[str]:
        return ["soda_only"]

    def _check_groups(self, groups: list[Group]) -> None:
        for j, group in enumerate(groups):
            if group["soda_only"] is not False and group["soda_only"] != []:
                _check_decay(self.base, group, j)

    # -- the pull -----------------------------------------------------------------------------

    def lam(self, group: Group) -> float:
        """The strength of the pull at the coming step."""
        k, lr = group["soda_k"], group.get("lr", 0.0)  # a few bases have no lr
        if k < self.start:
            return 0.0
        lam = float(schedules.value(self.decay, k - self._first(), lr, self._memory(group)))
        if not 0 <= lam <= 1:
            raise ValueError(f"decay must be in [0, 1], got {lam} at k = {k}, lr = {lr}")
        return lam

    def _first(self) -> int:
        """The step at which the schedule of the pull begins to count."""
        return 0 if self.at_start == "keep" else self.start

    def _memory(self, group: Group) -> dict[str, Any]:
        """The memory of the schedule at the coming step."""
        past = {n: group[f"soda_{n}"] for n in schedules.start(self.decay)}
        k = group["soda_k"] - self._first()
        return past if k < 0 else schedules.advance(self.decay, past, k, group.get("lr", 0.0))

    def _before(self, step: GroupStep) -> _Pull:
        group, pull = step.group, _Pull(self.lam(step.group))
        chosen = _chosen(step)
        reanchors = self.at_start == "reanchor" and group["soda_k"] == self.start
        if reanchors:
            self._reanchor(group)
        z0 = self._z0(group, [p for p, _ in chosen], pull)
        if self.anchor.rounds_weights and (reanchors or pull.captured):
            step.read()  # the points were made before the anchor rounded the parameters
        pairs = [(x, z0[p]) for p, x in chosen if p in z0]
        pull.pulled = pairs
        if pairs and pull.lam:
            points, sources = [x for x, _ in pairs], [source for _, source in pairs]
            if self.reads:  # the base must see the weights as they are
                pulled = [x.clone() for x in points]
                pull_(pulled, sources, pull.lam)
                torch._foreach_sub_(pulled, points)
                pull.added_later = points, pulled
            else:
                pull_(points, sources, pull.lam)
        return pull

    def _reanchor(self, group: Group) -> None:
        for p in group["params"]:
            if "z0" in self._own(p):
                self._keep(p, z0=self.anchor.capture(p, True))

    @not_compiled  # it reads values
    def _z0(self, group: Group, params: list[Tensor], pull: _Pull) -> dict[Tensor, Source]:
        """Where z0 of each parameter is. A z0 that is missing or provisional is captured.

        A newly captured z0 is left out, because it equals the weights, unless `anchor.differs`.
        """
        state = self.base.state
        kept = {p: state[p].get("soda_z0") if p in state else None for p in params}
        new = [p for p, t in kept.items() if t is None or p in self.provisional]
        if new:
            self._capture(group, kept, new, pull)
            ready = self.anchor.differs and not pull.provisional
            kept = {p: t for p, t in kept.items() if p not in pull.captured}
            kept |= pull.captured if ready else {}
        return {p: self.anchor.source(p, t) for p, t in kept.items() if t is not None}

    def _capture(
        self, group: Group, kept: dict[Tensor, Any], new: list[Tensor], pull: _Pull
    ) -> None:
        pull.provisional = _is_dry(group, new)
        wanted = [p for p in new if kept[p] is None or not pull.provisional]
        pull.captured = {p: self.anchor.capture(p, not pull.provisional) for p in wanted}

    def _after(self, step: GroupStep) -> None:
        pull: _Pull = step.held
        if pull.added_later[0]:
            torch._foreach_add_(*pull.added_later)
        step.write(self.seed, step.group["soda_k"])
        for p, z0 in pull.captured.items():
            self._keep(p, z0=z0)
            (self.provisional.add if pull.provisional else self.provisional.discard)(p)
        step.group |= {f"soda_{name}": v for name, v in self._memory(step.group).items()}

    def _undo(self, step: GroupStep) -> None:
        """Invert the pull, up to rounding. Points of 16-bit parameters are copies."""
        pull: _Pull = step.held
        if pull.lam < 1 and not pull.added_later[0]:
            copies = {id(step.points[j]) for j in step.low()}
            for x, z0 in pull.pulled:
                if id(x) not in copies:
                    x.sub_(value(z0, x) * pull.lam).div_(1 - pull.lam)

    def _restored(self, p: Tensor, name: str, t: Tensor) -> Tensor:
        return self.anchor.restore(t, p) if name == "z0" else super()._restored(p, name, t)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the base's state, and z0 as the anchor keeps it."""
        super().load_state_dict(state_dict)
        self.provisional.clear()

    def _saved(self, p: Tensor, name: str, t: Tensor) -> Tensor:
        return self.anchor.saved(t, p) if name == "z0" else t

    # -- diagnostics --------------------------------------------------------------------------

    def pulls(self) -> dict[Tensor, Pull]:
        """Return the pull of the coming step. A parameter is pulled once its z0 is captured."""
        found = {}
        for group in self.base.param_groups:
            lam = self.lam(group)
            for p in group["params"]:
                if "z0" in (own := self._own(p)):
                    found[p] = Pull(lam, self.anchor.source(p, own["z0"]))
        return found

    def _counters(self, group: Group) -> dict[str, float]:
        return {"k": group["soda_k"]}


def _chosen(step: GroupStep) -> list[tuple[Tensor, Tensor]]:
    """The parameters that `only` selects, with their points."""
    only, both = step.group["soda_only"], list(zip(step.params, step.points, strict=True))
    if not isinstance(only, list):
        return both if only else []
    chosen = {id(step.group["params"][j]) for j in only}
    return [(p, x) for p, x in both if id(p) in chosen]


def _is_dry(group: Group, params: list[Tensor]) -> bool:
    """Whether a framework only allocates state, with a step at lr = 0 and zero gradients.

    Weights may be loaded before or after it. A z0 captured then is provisional: it is captured
    again at the first real step, and until then nothing is rounded, checked or pulled.
    """
    if float(group.get("lr", 0.0)) != 0:
        return False
    grads = [sharded.local(p.grad) for p in params]
    return all(g.layout == torch.strided and not g.is_meta and not g.any() for g in grads)


def _select(base: Optimizer, only: Any) -> list[bool | list[int]]:
    """For each group: True for all, False for none, or the positions of the chosen parameters."""
    params = {p for g in base.param_groups for p in g["params"]}
    if callable(only):
        chosen = {p for p in params if only(p)}
    else:
        groups = [g for g in only if isinstance(g, dict)]
        chosen = {p for p in only if isinstance(p, Tensor)}
        known = all(any(g is b for b in base.param_groups) for g in groups)
        if chosen - params or not known or len(groups) + len(chosen) < len(set(map(id, only))):
            raise ValueError(
                "only= takes parameters or groups of the base optimizer (its param_groups), or a "
                "predicate of a parameter; one of its entries is something else"
            )
        chosen |= {p for g in groups for p in g["params"]}
    if not chosen:
        raise ValueError("only= selects no parameter of the base optimizer")
    return [_selection([p in chosen for p in g["params"]]) for g in base.param_groups]


def _selection(chosen: list[bool]) -> bool | list[int]:
    if all(chosen) or not any(chosen):
        return bool(chosen) and all(chosen)
    return [j for j, is_chosen in enumerate(chosen) if is_chosen]


def _check_decay(base: Optimizer, group: Group, j: int) -> None:
    """Raise if the base decays the weights of a pulled group: the pull replaces weight decay."""
    where, name = f"group {j} of {type(base).__name__}", type(base).__name__
    for key in decays(base, group):
        if key != "method":
            number, off = group[key], DECAYS[key]
            raise ValueError(
                f"{where} has {key}={number!r}, and the pull takes the place of weight decay: "
                f"write {name}(..., {key}={off!r}), also in a framework or checkpoint that sets it"
            )
    if isinstance(base, SODA) and group.get("method") in base.methods:
        method = base.methods[group["method"]]
        if method.centre != "last" or method.lam != 1:
            raise ValueError(
                f"{where} runs {method.name}, which decays or averages by itself (centre "
                f"{method.centre!r}): use the row without weight_decay, or zoo.soda(row) in SODA"
            )
