"""SODAWrapper: any torch optimizer, pulled toward its initial weights (the paper's Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from sodaopt import anchors, schedules
from sodaopt._errors import count, unknown
from sodaopt.anchors import AnchorName, Source, inverse, pull_
from sodaopt.backends import not_compiled
from sodaopt.core.diagnostics import Pull
from sodaopt.core.optimizer import SODA
from sodaopt.core.validation import check_seed
from sodaopt.parallel import sharded
from sodaopt.schedules import Coef
from sodaopt.wrappers.base import GroupStep, Wrapper
from sodaopt.wrappers.known_bases import DECAYS, NON_READERS, check_base
from sodaopt.wrappers.live import Group

AtStart: TypeAlias = Literal["keep", "restart", "reanchor"]
AT_START = get_args(AtStart)


class SODAWrapper(Wrapper):
    """x <- (1 - lam) x + lam z0 + BaseUpdate(g), lam = 1/(k+2), z0 the initial weights.

    >>> adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    >>> opt = SODAWrapper(adamw, only=hidden(model))

    This replaces weight decay, so the base's must be 0. (The paper's Algorithm 1.)

    only: the pulled parameters: groups, parameters, or a predicate of a parameter. None: all.
    start: steps before the pull begins (a warmup).
    at_start: "keep" counting k from the beginning, "restart" k at `start`, or "reanchor": restart k
    and use the weights of that moment as z0.
    decay: lam as a function of (k, lr). schedules.uniform is the paper's.
    anchor: where z0 lives, see `sodaopt.anchors`: "auto" (one number if all elements
    are equal, else a clone), "clone", "bf16", "cpu", an Anchor such as FromFile, or the seeds of
    `sodaopt.init.seeded_`.
    seed: selects the rounding bits of 16-bit parameters. The base steps them in fp32, with its
    state in fp32, and they are rounded once.
    """

    _prefix = "soda"
    _constructor_keys = ("soda_only",)

    def __init__(
        self,
        base: Optimizer,
        *,
        only: Iterable[Any] | Callable[[Tensor], bool] | None = None,
        start: int = 0,
        at_start: AtStart = "keep",
        decay: Coef = schedules.uniform,
        anchor: AnchorName | anchors.Anchor = "auto",
        seed: int = 0,
    ) -> None:
        if at_start not in AT_START:
            raise ValueError(unknown("at_start", at_start, AT_START))
        check_seed(seed)
        if isinstance(decay, type) or not (callable(decay) or isinstance(decay, int | float)):
            raise TypeError(
                f"decay is a number or a function of (k, lr), as schedules.coupled(), got {decay!r}"
            )
        self.start, self.at_start = count("start", start, 0), at_start
        self.decay, self.seed = decay, seed
        self.anchor = anchors.anchor(anchor)
        if at_start == "reanchor" and not self.anchor.writable:
            raise ValueError("reanchor needs a z0 that can be written: anchor='clone' or 'cpu'")
        self._provisional: set[Tensor] = set()  # their z0 was captured in a dry step
        check_base(base, "SODAWrapper")
        self.only = only if callable(only) else None
        for group, chosen in zip(base.param_groups, _select(base, only), strict=True):
            group["soda_only"] = chosen
        base.defaults["soda_only"] = only is None
        for group in base.param_groups:  # raise now if lam is out of range
            self._lam(self._group_keys() | group | {"soda_k": self.start})
        super().__init__(base)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to the base. A predicate for `only` also selects among the new parameters.

        If `only` lists groups or parameters, a new group is not pulled.
        """
        group = dict(param_group)
        if callable(self.only):
            params = group["params"]
            group["params"] = params = [params] if isinstance(params, Tensor) else list(params)
            group["soda_only"] = _positions(
                [p[-1] if isinstance(p, tuple) else p for p in params], self.only
            )
        super().add_param_group(group)

    def _group_keys(self) -> Group:
        return super()._group_keys() | {"soda_only": True}

    def _check_groups(self, groups: list[Group]) -> None:
        for j, group in enumerate(groups):
            if group["soda_only"]:
                _check_decay(self.base, group, j)

    @property
    def _reads(self) -> bool:
        """Whether the base's update may depend on the weights, apart from a weight decay."""
        return f"{type(self.base).__module__}.{type(self.base).__qualname__}" not in NON_READERS

    @property
    def _coef(self) -> Coef:
        return self.decay

    # -- the pull -----------------------------------------------------------------------------

    def _lam(self, group: Group) -> float:
        """The strength of the pull at the coming step."""
        k, lr = self._k(group), group.get("lr", 1.0)  # a few bases have no lr
        if group["soda_k"] < self.start:
            return 0.0
        lam = float(schedules.value(self.decay, k, lr, self._memory(group, k)))
        if not 0 <= lam <= 1:
            raise ValueError(f"decay must be in [0, 1], got {lam} at k = {k}, lr = {lr}")
        return lam

    def _k(self, group: Group) -> int:
        """The step of the schedule of the pull."""
        k: int = group["soda_k"] - (0 if self.at_start == "keep" else self.start)
        return k

    def _before(self, step: GroupStep) -> None:
        group, lam = step.group, self._lam(step.group)
        chosen = _chosen(step)
        z0 = self._z0(step, [p for p, _ in chosen])
        pairs = [(x, z0[p]) for p, x in chosen if p in z0]
        if pairs and lam:
            self._pull(step, [x for x, _ in pairs], [source for _, source in pairs], lam)
        step.finish.append(partial(step.write, self.seed, group["soda_k"]))
        step.finish.append(self._count(step, **self._memory(group, self._k(group))))

    def _pull(self, step: GroupStep, xs: list[Tensor], z0: list[Source], lam: float) -> None:
        """Pull the points before the base steps, or compute the pull and add it afterwards."""
        if self._reads or lam == 1:  # the base must see x, or the pull has no inverse
            pulled = [x.clone() for x in xs]
            pull_(pulled, z0, lam)
            torch._foreach_sub_(pulled, xs)
            step.finish.append(partial(torch._foreach_add_, xs, pulled))
        else:
            pull_(xs, z0, lam)
            step.undo.append(partial(pull_, xs, z0, inverse(lam)))

    @not_compiled  # it reads values
    def _z0(self, step: GroupStep, params: list[Tensor]) -> dict[Tensor, Source]:
        """Where z0 of each parameter is. A z0 that is missing or provisional is captured.

        A newly captured z0 equals the weights, so it is left out, unless `anchor.differs`.
        """
        group, state = step.group, self.base.state
        kept = {p: state[p].get("soda_z0") if p in state else None for p in params}
        new = [p for p, t in kept.items() if t is None or p in self._provisional]
        reanchors = self.at_start == "reanchor" and 0 < self.start == group["soda_k"]
        if reanchors:
            new = [*params, *(p for p in group["params"] if "z0" in self._own(p))]
        if new:
            dry = not reanchors and _is_dry(group, new)
            wanted = [p for p in new if kept.get(p) is None or not dry]
            captured = {p: self.anchor.capture(p, not dry) for p in wanted}
            step.finish.append(partial(self._keep_z0, step, captured, dry))
            step.read()  # an anchor may have rounded the parameters
            kept = {p: t for p, t in kept.items() if p not in captured}
            kept |= captured if self.anchor.differs and not dry else {}
        return {p: self.anchor.source(p, t) for p, t in kept.items() if t is not None}

    def _keep_z0(self, step: GroupStep, captured: dict[Tensor, Tensor], provisional: bool) -> None:
        self._keep(step, {p: {"z0": z0} for p, z0 in captured.items()})
        change = self._provisional.update if provisional else self._provisional.difference_update
        change(captured)

    def _restored(self, p: Tensor, name: str, t: Tensor) -> Tensor:
        return self.anchor.restore(t, p) if name == "z0" else super()._restored(p, name, t)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the base's state, and z0 as the anchor keeps it."""
        super().load_state_dict(state_dict)
        self._provisional.clear()

    def _saved(self, p: Tensor, name: str, t: Tensor) -> Tensor:
        return self.anchor.saved(t, p) if name == "z0" else t

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_provisional": self._provisional}

    # -- diagnostics --------------------------------------------------------------------------

    def _pulls(self) -> dict[Tensor, Pull]:
        """Return the pull of the coming step. A parameter is pulled once its z0 is captured."""
        found = {}
        for group in self.base.param_groups:
            lam = self._lam(group)
            for p in group["params"]:
                if "z0" in (own := self._own(p)):
                    found[p] = Pull(lam, self.anchor.source(p, own["z0"]))
        return found

    def _counters(self, group: Group) -> dict[str, float]:
        return {"k": group["soda_k"]}


def _chosen(step: GroupStep) -> list[tuple[Tensor, Tensor]]:
    """The parameters that `only` selects, with their points."""
    only, both = step.group["soda_only"], list(zip(step.params, step.points, strict=True))
    if only is True:
        return both
    chosen = {id(step.group["params"][j]) for j in only or ()}
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
    """For each group, the positions of the chosen parameters, or True for all of them."""
    if only is None:
        return [True] * len(base.param_groups)
    if not callable(only):
        entries = [entry["params"] if isinstance(entry, dict) else [entry] for entry in only]
        chosen = {p for entry in entries for p in entry}
        if chosen - {p for g in base.param_groups for p in g["params"]}:
            raise ValueError(
                "an entry of only= is neither a parameter nor a group of the base optimizer: "
                "pass its parameters, its param_groups, or a predicate of a parameter"
            )
        only = chosen.__contains__
    selected = [_positions(g["params"], only) for g in base.param_groups]
    if not any(selected):
        raise ValueError("only= selects no parameter of the base optimizer")
    return list(selected)


def _positions(params: list[Tensor], only: Callable[[Tensor], bool]) -> list[int]:
    return [j for j, p in enumerate(params) if only(p)]


def _check_decay(base: Optimizer, group: Group, j: int) -> None:
    """Raise if the base decays the weights of group j, because the pull replaces weight decay."""
    name = type(base).__name__
    where = f"group {j} of {name}"
    for key, off in DECAYS.items():
        if key in group and _is_on(group[key], off):
            raise ValueError(
                f"{where} has {key}={group[key]!r}, and the pull takes the place of weight decay: "
                f"write {name}(..., {key}={off!r}), also in a framework or checkpoint that sets it"
            )
    method = base.methods.get(group.get("method", "")) if isinstance(base, SODA) else None
    if method is not None and (method.centre != "last" or method.lam != 1):
        raise ValueError(
            f"{where} runs {method.name}, which decays or averages by itself (centre "
            f"{method.centre!r}): use the row without weight_decay, or zoo.soda(row) in SODA"
        )


def _is_on(value: Any, off: Any) -> bool:
    if isinstance(value, Tensor) and value.is_cuda:
        return True  # reading it would synchronise the device
    return bool(value != off)
