"""SODAWrapper: any torch optimizer, pulled toward its initial weights (the paper's Algorithm 1)."""

from collections.abc import Callable, Generator, Iterable
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from sodaopt import anchors, schedules
from sodaopt._errors import count, unknown
from sodaopt.backends import not_compiled
from sodaopt.core.diagnostics import Pull
from sodaopt.core.optimizer import SODA
from sodaopt.core.validation import check_seed
from sodaopt.wrappers import refusals
from sodaopt.wrappers.base import GroupStep, Tensors, Wrapper
from sodaopt.wrappers.known_bases import DECAYS, NON_READERS, check_base
from sodaopt.wrappers.live import Group

AtStart: TypeAlias = Literal["keep", "restart", "reanchor"]


class SODAWrapper(Wrapper):
    """Pull the weights of any optimizer toward the initial weights z0. (The paper's Algorithm 1.)

        x <- (1 - lam) x + lam z0 + BaseUpdate(g),  lam = 1/(k+2)

    >>> adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    >>> opt = SODAWrapper(adamw, only=hidden(model))

    The pull replaces weight decay, so the base's weight decay must be 0.

    base: the optimizer to wrap. Use the wrapper in its place.
    only: the parameters to pull: parameters, groups, or a function of a parameter that returns
    whether to pull it. None: all. In a group that is added later, a function selects parameters
    too, and a list selects none.
    start: steps before the pull begins (a warmup), at least 0.
    at_start: "keep": k counts from the first step. "restart": k counts from step `start`.
    "reanchor": as "restart", and the weights at step `start` become z0.
    decay: lam, a number in [0, 1] or a function of (k, lr). The paper has schedules.uniform.
    anchor: where z0 is kept, see `sodaopt.anchors`: "auto" (one number if all elements are equal,
    else a clone), "clone", "bf16", "cpu", an Anchor such as FromFile, or the seeds of
    `sodaopt.init.seeded_`.
    seed: selects the rounding bits of 16-bit parameters. The base steps them in fp32, with its
    state in fp32, and they are rounded once.
    """

    _prefix = "soda_"

    def __init__(
        self,
        base: Optimizer,
        *,
        only: Iterable[Any] | Callable[[Tensor], bool] | None = None,
        start: int = 0,
        at_start: AtStart = "keep",
        decay: schedules.Coef = schedules.uniform,
        anchor: anchors.AnchorName | anchors.Anchor = "auto",
        seed: int = 0,
    ) -> None:
        if at_start not in get_args(AtStart):
            raise ValueError(unknown("at_start", at_start, get_args(AtStart)))
        check_seed(seed)
        self.start, self.at_start = count("start", start, 0), at_start
        self.decay, self.seed = decay, seed
        self.anchor = anchors.anchor(anchor)
        if at_start == "reanchor" and not self.anchor.writable:
            raise ValueError("at_start='reanchor' needs an anchor that stores z0, such as 'clone'")
        check_base(base, "SODAWrapper")
        refusals.check_only(only)
        self.only = only if only is None or callable(only) else _listed(base, only)
        if not any(self._selected(group["params"]) for group in base.param_groups):
            raise ValueError("only= selects no parameter of the base optimizer: select some")
        try:  # raise now if lam is out of range
            for group in base.param_groups:
                first = self._group_keys() | group | {"soda_k": self.start}
                self._lam(first, self._memory(first))
        except TypeError as e:  # decay=schedules.over, say, returns a schedule and not a number
            raise TypeError(
                f"decay must be a number or a function such as schedules.coupled(), got {decay!r}"
            ) from e
        with refusals.unchanged(base):
            for group in base.param_groups:
                group["soda_only"] = self._selected(group["params"])
            super().__init__(base)
        if not (only is None or callable(only)):  # the groups have the positions
            self.only = frozenset().__contains__  # selects nothing in a group that is added later

    def _selected(self, params: list[Tensor]) -> bool | list[int]:
        """The positions of the pulled parameters, or True for all of them."""
        return self.only is None or [j for j, p in enumerate(params) if self.only(p)]

    def _group_keys(self) -> Group:
        return super()._group_keys() | {"soda_dry": False}

    def _check_groups(self, groups: list[Group]) -> None:
        for j, (group, live) in enumerate(zip(groups, self.base.param_groups, strict=True)):
            if "soda_only" not in live:  # the group was added
                live["soda_only"] = self._selected(live["params"])
            group["soda_only"] = live["soda_only"]  # not the one of a checkpoint
            if group["soda_only"]:
                _check_decay(self.base, group, j)

    def _coef(self) -> schedules.Coef:
        return self.decay

    # -- the pull -----------------------------------------------------------------------------

    def _k(self, group: Group) -> int:
        return super()._k(group) - (0 if self.at_start == "keep" else self.start)

    def _lam(self, group: Group, memory: dict[str, Any]) -> float:
        if group["soda_k"] < self.start:
            return 0.0
        lam = super()._lam(group, memory)
        if not 0 <= lam <= 1:
            at = f"k = {self._k(group)}, lr = {group.get('lr')}"
            raise ValueError(f"decay must be in [0, 1], got {lam} at {at}")
        return lam

    def _around(self, step: GroupStep, kept: Tensors, lam: float) -> Generator[None]:
        group, is_dry = step.group, self._is_dry(step.group)
        pulled = [(p, x) for p, x in zip(step.params, step.points, strict=True) if p in kept]
        if lam and pulled and not is_dry:
            z0 = [self.anchor.source(p, kept[p]["z0"]) for p, _ in pulled]
            yield from self._pull([x for _, x in pulled], z0, lam)
        else:
            yield
        step.write(self.seed, group["soda_k"])
        group["soda_dry"] = is_dry

    def _pull(self, xs: list[Tensor], z0: list[anchors.Source], lam: float) -> Generator[None]:
        """Pull the points before the base steps, or compute the pull and add it afterwards."""
        name = f"{type(self.base).__module__}.{type(self.base).__qualname__}"
        if name not in NON_READERS or lam == 1:  # the base may read x, or the pull has no inverse
            pulls = [x.clone() for x in xs]
            anchors.pull_(pulls, z0, lam)
            torch._foreach_sub_(pulls, xs)
            yield
            torch._foreach_add_(xs, pulls)
        else:
            anchors.pull_(xs, z0, lam)
            try:
                yield
            except GeneratorExit:  # the base's step does not begin
                anchors.pull_(xs, z0, anchors.inverse(lam))
                raise

    def _is_dry(self, group: Group) -> bool:
        """Whether lr was 0 at all steps of this group so far, and is 0 at the coming one.

        Frameworks allocate state with such a step, and weights may be loaded before or after it. A
        z0 captured then is provisional: the next step captures it again. Until then, no parameter
        is pulled, rounded for its anchor, or compared with a z0 from elsewhere.
        """
        return (group["soda_k"] == 0 or group["soda_dry"]) and float(group.get("lr", 1.0)) == 0

    @not_compiled  # capturing reads values
    def _kept(self, step: GroupStep) -> Tensors:
        """Return z0 of each pulled parameter.

        z0 is captured if there is none, if it is provisional, or if this step reanchors.
        """
        group, state, stepped = step.group, self.base.state, set(step.params)
        found = Tensors()
        reanchors = self.at_start == "reanchor" and 0 < self.start == group["soda_k"]
        is_renewed = reanchors or group["soda_dry"]
        for p in self._members(group):
            is_kept = p in state and p not in self._provisional
            z0 = state[p].get("soda_z0") if is_kept else None
            if (z0 is None and p in stepped) or (z0 is not None and is_renewed):
                z0 = self.anchor.capture(p, not self._is_dry(group))
            if z0 is not None:
                found[p] = {"z0": z0}
        return found

    def _members(self, group: Group) -> list[Tensor]:
        params: list[Tensor] = group["params"]
        only = group.get("soda_only", [])  # a group that was just added has none
        return params if only is True else [params[j] for j in only]

    def _first(self, p: Tensor) -> dict[str, Tensor]:
        return {"z0": self.anchor.capture(p, False)}

    def _restored(self, p: Tensor, own: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"z0": self.anchor.restore(own["z0"], p)}

    def _saved(self, p: Tensor, own: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"z0": self.anchor.saved(own["z0"], p)}

    # -- diagnostics --------------------------------------------------------------------------

    def _pulls(self) -> dict[Tensor, Pull]:
        """Return the pull of the coming step. A parameter is pulled once its z0 is captured."""
        found = {}
        for group in self.base.param_groups:
            lam = self._lam(group, self._memory(group))
            for p in group["params"]:
                if "z0" in (own := self._own(p)):
                    found[p] = Pull(lam, self.anchor.source(p, own["z0"]))
        return found

    def _counters(self, group: Group) -> dict[str, float]:
        return {"k": group["soda_k"]}


def _listed(base: Optimizer, only: Iterable[Any]) -> Callable[[Tensor], bool]:
    """Return a function of a parameter that returns whether only= lists it."""
    chosen = {p for e in only for p in (e["params"] if isinstance(e, dict) else [e])}
    if chosen - {p for g in base.param_groups for p in g["params"]}:
        raise ValueError(
            "an entry of only= is neither a parameter nor a group of the base optimizer: "
            "pass its parameters, its param_groups, or a function of a parameter"
        )
    return chosen.__contains__


def _check_decay(base: Optimizer, group: Group, j: int) -> None:
    """Raise if the base decays the weights of group j, because the pull replaces weight decay."""
    name = type(base).__name__
    where = f"group {j} of {name}"
    for key, off in DECAYS.items():
        if key in group and group[key] != off:
            raise ValueError(
                f"{where} has {key}={group[key]!r}, and the pull takes the place of weight decay: "
                f"write {name}(..., {key}={off!r}), also in a framework or checkpoint that sets it"
            )
    method = base.methods.get(group.get("method", "")) if isinstance(base, SODA) else None
    if method is not None and (method.centre != "last" or method.lam != 1):
        raise ValueError(
            f"{where} runs {method.name}, which decays, pulls or averages by itself (centre "
            f"{method.centre!r}): use a row that does not, or zoo.soda(row) in SODA and no wrapper"
        )
