"""Measure the steps of an optimizer: how far the weights move, and how much of it is the pull.

A step is x <- x + pull + update, with pull = lam (z0 - x). Squares are summed by parameter, on its
device, and the sums can be added up over a group, a role or the model. Nothing is read from the
device until `diagnostics` is called, and the weights are not changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from sodaopt.anchors import Source, value
from sodaopt.parallel import sharded

SUMS = ("weight", "distance", "gradient", "step", "update", "pull", "product")
"""Squared lengths, and the scalar product of update and pull."""
Labels: TypeAlias = "Literal['group', 'parameter'] | Mapping[Tensor, str]"


class Pull(NamedTuple):
    """The pull of the coming step of a parameter: its strength, and where z0 is."""

    lam: float
    z0: Source


NONE = Pull(0.0, 0.0)


@dataclass(frozen=True)
class Measured:
    """Sums of several parameters, still on the device, with the numbers that the host knows."""

    sums: Tensor
    count: int
    lr: float
    lam: float | None = None
    """Strength of the pull, or None without one."""

    def numbers(self, sums: Iterable[float]) -> dict[str, float]:
        """Return the diagnostics.

        sums: the values of `self.sums` on the host
        """
        found = dict(zip(SUMS, sums, strict=False))
        length = {name: math.sqrt(max(0.0, x)) for name, x in found.items() if name != "product"}
        lam = self.lam or 0.0
        row = {"lr": self.lr, "lam": lam, "as_weight_decay": ratio(lam, self.lr)} | length
        if self.lam is None:
            row["distance"] = math.nan  # there is no z0
        if "step" in found:
            row["update_rms"] = length["update"] / math.sqrt(self.count)
            row["share"] = ratio(length["pull"], length["step"])
            row["angle"] = _angle(found["product"], length["update"] * length["pull"])
        return row


def joined(parts: Sequence[Measured]) -> Measured:
    """Add up the sums. lr is a mean over the parameters, and lam over those that are pulled."""
    size, device = max(len(part.sums) for part in parts), parts[0].sums.device
    # parameters that were not stepped have no sums of a step
    sums = [pad(part.sums.to(device), (0, size - len(part.sums))) for part in parts]
    pulled = [(part.lam, part.count) for part in parts if part.lam is not None]
    lr = _mean([(part.lr, part.count) for part in parts])
    count = sum(part.count for part in parts)
    return Measured(torch.stack(sums).sum(0), count, lr, _mean(pulled) if pulled else None)


def _mean(pairs: Sequence[tuple[float, int]]) -> float:
    """Return the weighted mean, exactly if all values are equal."""
    first = pairs[0][0]
    if all(x == first for x, _ in pairs):
        return first
    return sum(x * n for x, n in pairs) / sum(n for _, n in pairs)


def read(part: Measured) -> dict[str, float]:
    """Return the diagnostics. This waits for the device."""
    return part.numbers(part.sums.tolist())


def ratio(a: float, b: float) -> float:
    return a / b if b else math.inf if a else 0.0


def _angle(product: float, lengths: float) -> float:
    """Return the angle in degrees, or nan if one of the two is zero."""
    return math.degrees(math.acos(max(-1.0, min(1.0, product / lengths)))) if lengths else math.nan


def _moved(p: Tensor, x: Tensor, pull: Pull) -> Tensor:
    """Return the sums of a step of this rank's shard, which was x before it."""
    assert p.grad is not None
    x = x.float()
    step = sharded.local(p).detach().float() - x
    gradient = sharded.local_like(p.grad, p).float()
    pulled = (value(pull.z0, x) - x) * pull.lam
    update = step - pulled
    product = (update * pulled).sum()
    lengths = [_square(t) for t in (gradient, step, update, pulled)]
    return torch.stack([*lengths, product])


def _square(t: Tensor) -> Tensor:
    return t.square().sum()


class Watched(Optimizer):
    """An optimizer with diagnostics. A subclass overrides `_pulls`.

    _measures: whether the coming step is measured, after `watch()`.
    _before: the weights and the pull of each parameter before this step.
    _sums: the sums of each parameter in the last step that was measured.
    """

    _hooks: tuple[RemovableHandle, ...] = ()
    _measures: bool = True
    _before: Mapping[Tensor, tuple[Tensor, Pull]] = MappingProxyType({})
    _sums: Mapping[Tensor, Tensor] = MappingProxyType({})

    def _pulls(self) -> dict[Tensor, Pull]:
        """Return the pull of the coming step by parameter. Others are not pulled."""
        return {}

    def _counters(self, group: dict[str, Any]) -> dict[str, float]:
        """Return counters of a group, such as k."""
        return {}

    def watch(self, on: bool = True) -> None:
        """Measure the steps from now on. A step needs a copy of the weights while it runs."""
        for hook in self._hooks:
            hook.remove()
        begin, end = self.register_step_pre_hook, self.register_step_post_hook
        self._hooks = (begin(self._keep_weights), end(self._measure)) if on else ()
        self._measures, self._before, self._sums = True, {}, {}

    # A wrapper and its base share their hooks, and torch passes the one that steps. The hooks
    # measure the watched one, so they ignore the argument.

    @torch.no_grad()
    def _keep_weights(self, *_: Any) -> None:
        """Copy the weights before a step."""
        if self._measures:
            pulls = self._pulls()
            params = (p for group in self.param_groups for p in group["params"])
            self._before = {
                p: (sharded.local(p).detach().clone(), pulls.get(p, NONE)) for p in params
            }

    @torch.no_grad()
    def _measure(self, *_: Any) -> None:
        """Measure the step after it."""
        before, self._before = self._before, {}
        if before:
            self._sums = {p: _moved(p, *kept) for p, kept in before.items() if p.grad is not None}

    def diagnostics(self, by: Labels = "group") -> Any:
        """Return the diagnostics of each group, parameter or label. All ranks must call it.

        k: the steps of the group so far. Only SODAWrapper has it, with by="group".
        lr, lam: the learning rate, and the strength of the coming pull.
        as_weight_decay: the weight decay that would pull as hard, lam/lr.
        weight, distance: ||x|| and ||x - z0||, which is nan without a z0.

        After `watch()`, also of the last step:

        gradient, update, pull, step: their lengths. The step is the sum of update and pull.
        update_rms: root mean square of the update.
        share: length of the pull over that of the step.
        angle: between pull and update, in degrees. Above 90, the pull works against the update.

        by: "group" gives a list, "parameter" a dict by name, and a mapping of parameters to labels
        a dict by label, such as `{row.parameter: row.role for row in plan(model).rows}`
        """
        if by == "group":
            parts = measured(self, lambda j, p: j)
            return [self._counters(self.param_groups[j]) | read(part) for j, part in parts.items()]
        names = _names(self.param_groups) if by == "parameter" else by
        assert not isinstance(names, str)
        parts = measured(self, lambda j, p: names.get(p, "other"))
        return {str(name): read(part) for name, part in parts.items()}


@torch.no_grad()
def measured(opt: Watched, label: Callable[[int, Tensor], Any]) -> dict[Any, Measured]:
    """Return the sums by label, on the device, for `read`.

    label: a function of the index of the group and the parameter
    """
    pulls, found = opt._pulls(), dict[Any, list[Measured]]()
    for j, group in enumerate(opt.param_groups):
        for p in group["params"]:
            part = _part(p, pulls.get(p), float(group.get("lr", 0.0)), opt._sums.get(p))
            found.setdefault(label(j, p), []).append(part)
    return {name: joined(parts) for name, parts in found.items()}


def _part(p: Tensor, pull: Pull | None, lr: float, stepped: Tensor | None) -> Measured:
    """Return the sums of one parameter.

    stepped: the sums of its last step, if that was measured
    """
    x = sharded.local(p).detach().float()
    away = _square(x - value(pull.z0, x)) if pull else x.new_zeros(())
    sums = torch.stack([_square(x), away])
    sums = sharded.total(sums if stepped is None else torch.cat([sums, stepped]), p)
    return Measured(sums, max(1, p.numel()), lr, pull.lam if pull else None)


def _names(groups: Sequence[dict[str, Any]]) -> dict[Tensor, str]:
    """Return the names of the parameters, or the positions of the group and in the group."""
    found: dict[Tensor, str] = {}
    for j, group in enumerate(groups):
        names = group.get("param_names") or [f"{j}.{n}" for n in range(len(group["params"]))]
        found |= dict(zip(group["params"], names, strict=True))
    return found
