"""SODAWrapper: any torch optimizer, pulled toward its initial weights (the paper's Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from sodaopt import anchors, rounding, schedules
from sodaopt._errors import unknown
from sodaopt.core.optimizer import SODA
from sodaopt.layers.plan import hidden
from sodaopt.parallel import sharded
from sodaopt.schedules import Coef
from sodaopt.wrappers.base import Group, Pair, Wrapper, check_base, decays
from sodaopt.wrappers.known_bases import DECAYS
from sodaopt.wrappers.low_precision import in_fp32


class _Held(NamedTuple):
    """What one group holds between `before` and `after`."""

    lam: Any
    z0: list[tuple[Tensor, Tensor]]
    """What is pulled, and what is kept of its z0. (A list: tensors are slow to look up.)"""
    fresh: dict[Tensor, Tensor]
    dry: bool
    old: dict[Tensor, Tensor]
    low: list[tuple[int, Tensor, Tensor]]
    """16-bit parameters: number, parameter, and the point in fp32 that the base steps."""
    pull: list[tuple[list[Tensor], list[Tensor]]]
    pulled: list[tuple[Tensor, Tensor]]


class SODAWrapper(Wrapper):
    """x <- (1 - lam) x + lam z0 + BaseUpdate(g), lam = 1/(k+2), z0 the initial weights.

        opt = SODAWrapper(torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0))

    One line of change; no weight decay to tune, so the base's must be 0. The paper's Algorithm 1.

    only: which parameters are pulled: groups, parameters, or a predicate of a parameter; None: all.
    start: steps before the pull begins (a warmup). at_start: "keep" counting k from the beginning,
    "restart" k there, or "reanchor": restart k and take the weights of that moment for z0.
    decay: lam as a function of (k, lr); schedules.uniform is the paper's.
    anchor: where z0 lives, see `sodaopt.anchors`: "clone", "bf16", "cpu", "constant", "auto" (one
    number where that is enough, else a clone), or the seeds of `sodaopt.init.seeded_`.
    seed: of the rounding bits for 16-bit parameters, which the base steps in fp32, its own state of
    them in fp32 too, and which are then rounded once.
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
        if not (callable(decay) or isinstance(decay, int | float)):
            raise TypeError(f"decay is a number or a function of (k, lr), got {decay!r}")
        self.start, self.at_start, self.decay, self.seed = start, at_start, decay, seed
        self.anchor = anchors.anchor(anchor)
        if at_start == "reanchor" and isinstance(self.anchor, anchors.Elsewhere):
            raise ValueError("reanchor needs a z0 that can be written: anchor='clone' or 'cpu'")
        self.tentative: set[Tensor] = set()  # z0 was taken in a dry step: see `_is_dry`
        self.watching = False
        self.seen: dict[int, dict[str, float]] = {}
        check_base(base, "SODAWrapper")
        only = only if only is None or callable(only) else list(only)
        self.only = only if callable(only) else None
        chosen = None if only is None else _select(base, only)
        for j, group in enumerate(base.param_groups):
            group["soda_only"] = True if chosen is None else chosen[j]
        base.defaults["soda_only"] = only is None
        super().__init__(base)
        for group in base.param_groups:
            self.lam(group | {"soda_k": self.start})  # out of range is an error now, not later

    @classmethod
    def hidden(cls, base: Optimizer, model: torch.nn.Module, **options: Any) -> Self:
        """Pull what the layer plan calls hidden, and nothing else: the paper's choice."""
        known = {p for g in base.param_groups for p in g["params"]}
        return cls(base, only=[p for p in hidden(model) if p in known], **options)

    def marks(self) -> Group:
        memory = schedules.start(self.decay)
        return {"soda_k": 0, "soda_only": True, **{f"soda_{n}": v for n, v in memory.items()}}

    def chosen(self) -> list[str]:
        return ["soda_only"]

    def check_groups(self, groups: list[Group]) -> None:
        for j, group in enumerate(groups):
            if group["soda_only"] is not False and group["soda_only"] != []:
                _check_decay(self.base, group, j)

    def add_param_group(self, param_group: Group) -> None:
        """Through the base. A predicate for `only` chooses among the new parameters too; where
        groups or parameters were listed, a new group is not pulled."""
        group = dict(param_group)
        if callable(self.only):
            group["params"] = params = _as_list(group["params"])
            plain = [p[1] if isinstance(p, tuple) else p for p in params]
            group["soda_only"] = _places([j for j, p in enumerate(plain) if self.only(p)], plain)
        super().add_param_group(group)

    def lam(self, group: Group) -> float:
        """The pull of the coming step."""
        k, lr = group["soda_k"], group.get("lr", 0.0)  # a few bases have none
        if k < self.start:
            return 0.0
        lam = schedules.value(self.decay, k - self._zero(), lr, self._past(group))
        if isinstance(lam, int | float) and not 0 <= lam <= 1:
            raise ValueError(f"decay must be in [0, 1], got {lam} at k = {k}, lr = {lr}")
        return lam  # type: ignore[no-any-return]

    def _zero(self) -> int:
        return 0 if self.at_start == "keep" else self.start

    def _past(self, group: Group) -> dict[str, Any]:
        past = {n: group[f"soda_{n}"] for n in schedules.start(self.decay)}
        k = group["soda_k"] - self._zero()
        return past if k < 0 else schedules.advance(self.decay, past, k, group.get("lr", 0.0))

    def before(self, group: Group, pairs: list[Pair]) -> _Held:
        lam, reads, everything = self.lam(group), self.reads, pairs
        pairs = _pulled(group, pairs)
        if self.at_start == "reanchor" and group["soda_k"] == self.start:
            for p in group["params"]:
                if "z0" in self.own(p):
                    self.keep(p, z0=self.anchor.take(p, True))
        key, state = self.key("z0"), self.base.state
        z0 = [(p, state.get(p, NOTHING).get(key)) for _, p in pairs]
        new = {p: t for p, t in z0 if t is None or (self.tentative and p in self.tentative)}
        fresh, dry = self._take(group, new) if new else ({}, False)
        if new:
            z0 = [(p, t) for p, t in z0 if t is not None and p not in fresh]
        if fresh and self.anchor.apart and not dry:  # elsewhere x is z0 there: nothing to pull
            z0 += fresh.items()
        old = {p: p.detach().clone() for _, p in pairs} if self.watching else {}
        narrow = [(n, p) for n, p in everything if p.dtype in rounding.HALVES]
        points = in_fp32([sharded.local(p) for _, p in narrow])
        low = [(n, p, x) for (n, p), x in zip(narrow, points, strict=True)]
        held = _Held(lam, z0, fresh, dry, old, low, [], [])
        if z0 and not (isinstance(lam, float) and lam == 0):
            wide = {id(p): x for _, p, x in held.low}
            rows = [(p, wide[id(p)] if id(p) in wide else sharded.local(p), kept) for p, kept in z0]
            params, x, kept = (list(column) for column in zip(*rows, strict=True))
            if reads:
                pulled = [t.clone() for t in x]
                self.anchor.pull_(params, pulled, kept, lam)
                torch._foreach_sub_(pulled, x)
                held.pull.append((x, pulled))
            else:
                self.anchor.pull_(params, x, kept, lam)
                held.pulled.extend((p, t) for p, t in z0 if id(p) not in wide)
        return held

    @torch._disable_dynamo  # type: ignore[attr-defined]  # once, and it looks at values
    def _take(
        self, group: Group, new: dict[Tensor, Tensor | None]
    ) -> tuple[dict[Tensor, Tensor], bool]:
        """What to keep of parameters without a z0, or with a tentative one; whether the step is
        dry, so that this is tentative too."""
        dry = _is_dry(group, list(new))
        wanted = [p for p, kept in new.items() if kept is None or not dry]
        return {p: self.anchor.take(p, not dry) for p in wanted}, dry

    def after(self, group: Group, pairs: list[Pair], held: _Held) -> None:
        for xs, pulls in held.pull:
            torch._foreach_add_(xs, pulls)
        if held.low:
            numbers, params, points = (list(column) for column in zip(*held.low, strict=True))
            rounding.write_(params, points, numbers, self.seed, group["soda_k"])
        for p, z0 in held.fresh.items():
            self.keep(p, z0=z0)
            (self.tentative.add if held.dry else self.tentative.discard)(p)
        group |= {f"soda_{name}": v for name, v in self._past(group).items()}
        if self.watching:
            self._look(group, held)

    def undo(self, group: Group, pairs: list[Pair], held: _Held) -> None:
        """Back to where each parameter was, but for rounding."""
        for p, kept in held.pulled:
            if held.lam < 1:
                x, z0 = sharded.local(p), self.anchor.give(p, kept)
                x.sub_(z0.to(x.dtype) * held.lam).div_(1 - held.lam)

    def points(self, pairs: list[Pair], held: _Held) -> list[tuple[Tensor, Tensor]]:
        return [(p, x) for _, p, x in held.low]

    def place(self, p: Tensor, name: str, t: Tensor) -> Tensor:
        self.tentative.discard(p)
        return self.anchor.place(t, p) if name == "z0" else super().place(p, name, t)

    def written(self, p: Tensor, name: str, t: Tensor) -> Tensor:
        return self.anchor.written(t, p) if name == "z0" else t

    # -- diagnostics --------------------------------------------------------------------------

    def diagnostics(self) -> list[dict[str, float]]:
        """For each group: k, the coming lam, the weight decay that would pull as hard (lam/lr),
        ||x - z0||, and after `watch()` the pull's share of the last step."""
        rows = []
        for j, group in enumerate(self.base.param_groups):
            kept = {p: self.own(p)["z0"] for p in group["params"] if "z0" in self.own(p)}
            lam, lr = float(self.lam(group)), float(group.get("lr", 0.0))
            row = {"k": group["soda_k"], "lam": lam, "as_weight_decay": lam / lr if lr else 0.0}
            apart = [sharded.local(p.detach()) - self.anchor.give(p, t) for p, t in kept.items()]
            row["distance"] = _length(apart)
            rows.append(row | self.seen.get(j, {}))
        return rows

    def watch(self, on: bool = True) -> None:
        """Measure the pull's share of each step from now on; it costs a copy of the weights."""
        self.watching = on

    def _look(self, group: Group, held: _Held) -> None:
        old = {p: sharded.local(x) for p, x in held.old.items()}
        z0 = {p: self.anchor.give(p, kept) for p, kept in held.z0}
        pull = _length([(z0[p] - x) * held.lam for p, x in old.items() if p in z0])
        step = _length([sharded.local(p.detach()) - x for p, x in old.items()])
        j = next(j for j, g in enumerate(self.base.param_groups) if g is group)
        self.seen[j] = {"pull": pull, "step": step, "share": pull / step if step else 0.0}


def _pulled(group: Group, pairs: list[Pair]) -> list[Pair]:
    only = group["soda_only"]
    if not isinstance(only, list):
        return pairs if only else []
    chosen = {id(group["params"][j]) for j in only}
    return [(n, p) for n, p in pairs if id(p) in chosen]


NOTHING: dict[str, Any] = {}
AT_START = ("keep", "restart", "reanchor")


def _is_dry(group: Group, params: list[Tensor]) -> bool:
    """A first step without learning rate and gradients, by which a framework makes the state that
    it then loads into. The weights may be loaded already, or still be: what is taken for z0 then is
    taken again at the first real step, and nothing is rounded, checked or pulled before."""
    if float(group.get("lr", 0.0)) != 0:
        return False
    grads = [sharded.local(p.grad) for p in params]
    return all(g.layout == torch.strided and not g.is_meta and not g.any() for g in grads)


def _length(ts: list[Tensor]) -> float:
    return float(sum((t.float().norm() ** 2 for t in ts), torch.tensor(0.0)) ** 0.5)


def _select(base: Optimizer, only: Any) -> list[bool | list[int]]:
    """For each group: all of it, none of it, or the places of the chosen parameters."""
    if callable(only):
        chosen = {p for g in base.param_groups for p in g["params"] if only(p)}
    else:
        items = list(only)
        groups = [g for g in items if isinstance(g, dict)]
        chosen = {p for p in items if isinstance(p, Tensor)}
        strangers = chosen - {p for g in base.param_groups for p in g["params"]}
        known = [any(g is b for b in base.param_groups) for g in groups]
        if strangers or not all(known) or len(groups) + len(chosen) < len(set(map(id, items))):
            raise ValueError(
                "only= takes parameters or groups of the base optimizer (its param_groups), or a "
                "predicate of a parameter; something in it is none of these"
            )
        chosen |= {p for g in groups for p in g["params"]}
    if not chosen:
        raise ValueError("only= selects no parameter of the base optimizer")
    return [
        _places([j for j, p in enumerate(g["params"]) if p in chosen], g["params"])
        for g in base.param_groups
    ]


def _places(at: list[int], params: list[Any]) -> bool | list[int]:
    return bool(at) if len(at) in (0, len(params)) else at


def _as_list(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def _check_decay(base: Optimizer, group: Group, j: int) -> None:
    """The base must not decay what is pulled: the pull takes weight decay's place."""
    where, name = f"group {j} of {type(base).__name__}", type(base).__name__
    for key in decays(base, group):
        if key != "method":
            value, off = group[key], DECAYS[key]
            raise ValueError(
                f"{where} has {key}={value!r}, and the pull takes the place of weight decay: write "
                f"{name}(..., {key}={off!r}); in a framework that sets it, or a checkpoint that "
                f"brings it back, set {key}={off!r} there"
            )
    if isinstance(base, SODA) and group.get("method") in base.methods:
        method = base.methods[group["method"]]
        if method.centre != "last" or method.lam != 1:
            raise ValueError(
                f"{where} runs {method.name}, which decays or averages by itself (centre "
                f"{method.centre!r}): use the row without weight_decay, or SODA with "
                f"zoo.soda(row) alone"
            )
