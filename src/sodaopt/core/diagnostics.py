"""Measure the steps of an optimizer: how far the weights move, and how much of it is the pull.

A step is x <- x + pull + update, with pull = lam (z0 - x). Squares are summed by parameter, on its
device, and the sums can be added up over a group, a role or the model. Nothing is read from the
device until `diagnostics` is called, except a lam that is a tensor there. The weights are not
changed.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from sodaopt.anchors import Source, value
from sodaopt.parallel import sharded

SUMS = ("weight", "distance", "step", "pull", "gradient", "update", "product")
"""The sums of a step: squared lengths, and "product", the scalar product of update and pull."""
Labels: TypeAlias = "Literal['group', 'parameter'] | Mapping[Tensor, str]"


class Pull(NamedTuple):
    """The pull of the coming step of a parameter: its strength, and where z0 is."""

    lam: float = 0.0
    z0: Source = 0.0


@dataclass
class Measured:
    """Sums of some parameters, still on the device, with the numbers that the host knows.

    sums: the sums of each parameter, in the order of SUMS. If no step was measured, they are only
    the first two.
    params: (number of elements, lr, lam) of each parameter. lam is None without a pull.
    """

    sums: list[Tensor] = field(default_factory=list)
    params: list[tuple[int, float, float | None]] = field(default_factory=list)

    def total(self) -> Tensor:
        """Add up the sums of the parameters."""
        device = self.sums[0].device
        return torch.stack([t.to(device) for t in self.sums]).sum(0)

    def numbers(self, total: Sequence[float]) -> dict[str, float]:
        """Return the diagnostics. lr is a mean over all parameters, lam over the pulled ones.

        total: the values of `self.total()` on the host.
        """
        found = dict(zip(SUMS, total, strict=False))
        length = {name: math.sqrt(x) for name, x in found.items() if name != "product"}
        pulled = [(lam, n) for n, _, lam in self.params if lam is not None]
        lr, lam = _mean([(lr, n) for n, lr, _ in self.params]), _mean(pulled)
        row = {"lr": lr, "lam": lam, "as_weight_decay": ratio(lam, lr)} | length
        if not pulled:
            row["distance"] = math.nan  # without a pull, z0 does not exist
        if "step" in found:
            row["share"] = ratio(length["pull"], length["step"])
            row |= self._of_update(found, length)
        return row

    def _of_update(self, found: dict[str, float], length: dict[str, float]) -> dict[str, float]:
        """Return the root mean square of the update, and its angle to the pull in degrees.

        The angle is nan if one of the two is zero.
        """
        rms = length["update"] / math.sqrt(sum(n for n, *_ in self.params))
        lengths = length["update"] * length["pull"]
        cosine = max(-1.0, min(1.0, found["product"] / lengths)) if lengths else math.nan
        return {"update_rms": rms, "angle": math.degrees(math.acos(cosine))}


def _mean(pairs: Sequence[tuple[float, int]]) -> float:
    """Return the weighted mean, exactly if all values are equal. It is 0 without any."""
    values = {x for x, _ in pairs} or {0.0}
    if len(values) == 1:
        return values.pop()
    return sum(x * n for x, n in pairs) / sum(n for _, n in pairs)


def ratio(a: float, b: float) -> float:
    """Return a / b for numbers that are not negative, with 0/0 = 0 and a/0 = inf."""
    return a / b if b else math.inf if a else 0.0


def _step_sums(p: Tensor, x: Tensor, pull: Pull) -> Tensor:
    """Return the sums of a step of p, from the third on, over this rank's shard.

    x: the shard before the step.
    """
    x = x.float()
    step = sharded.local(p).detach().float() - x
    pulled = (value(pull.z0, x) - x) * pull.lam
    return torch.stack([_square(step), _square(pulled), *_update_sums(p, step, pulled)])


def _update_sums(p: Tensor, step: Tensor, pulled: Tensor) -> list[Tensor]:
    gradient, update = sharded.local_like(p.grad, p).float(), step - pulled
    return [_square(gradient), _square(update), (update * pulled).sum()]


def _square(t: Tensor) -> Tensor:
    return t.square().sum()


class Watched(Optimizer):
    """An optimizer with diagnostics, `train` and `eval`. A subclass overrides `_pulls`.

    _switch: lets the parameters hold the point of training, or the output.
    _is_watched: whether steps are measured. None: the hooks are not registered yet.
    _before: the weights and the pull of each parameter before this step.
    _sums: the sums of the last step, by parameter with a gradient.
    """

    _switch: Callable[[bool], None]
    _is_watched: bool | None = None
    _before: dict[Tensor, tuple[Tensor, Pull]]
    _sums: Mapping[Tensor, Tensor] = MappingProxyType({})

    def train(self) -> None:
        """Let the parameters hold y, where gradients are taken."""
        self._switch(True)

    def eval(self) -> None:
        """Let the parameters hold x, the method's output. Call train() before the next step()."""
        self._switch(False)

    def _pulls(self) -> dict[Tensor, Pull]:
        """Return the pull of the coming step by parameter, for each pulled parameter."""
        return {}

    def _counters(self, group: dict[str, Any]) -> dict[str, float]:
        """Return counters of a group, such as k."""
        return {}

    def watch(self, on: bool = True) -> None:
        """Measure the steps from now on. A step needs a copy of the weights while it runs."""
        if self._is_watched is None:
            self.register_step_pre_hook(self._keep_weights)
            self.register_step_post_hook(self._measure)
        self._is_watched, self._before, self._sums = on, {}, {}

    # A wrapper and its base share their hooks, and torch passes them the optimizer that steps. It
    # may be the base, so the hooks ignore the argument and measure `self`.

    @torch.no_grad()
    def _keep_weights(self, *_: Any) -> None:
        """Copy the weights before a step."""
        if self._is_watched:
            pulls = self._pulls()
            for p in (p for group in self.param_groups for p in group["params"]):
                self._before[p] = sharded.local(p).detach().clone(), pulls.get(p, Pull())

    @torch.no_grad()
    def _measure(self, *_: Any) -> None:
        """Measure the step after it."""
        before, self._before = self._before, {}
        self._sums = {p: _step_sums(p, *kept) for p, kept in before.items() if p.grad is not None}

    def diagnostics(self, by: Labels = "group") -> Any:
        """Return the diagnostics of each group, parameter or label. All ranks must call it.

        k: the steps of the group so far. Only SODAWrapper has it, with by="group".
        lr, lam: the learning rate, and the strength of the coming pull.
        as_weight_decay: the weight decay that would pull as hard, lam/lr.
        weight, distance: ||x|| and ||x - z0||, which is nan without a z0.

        After `watch()`, also numbers of the last step, which are 0 without a gradient:

        gradient, update, pull, step: the lengths of these vectors. step is update + pull.
        update_rms: root mean square of the update.
        share: length of the pull over that of the step.
        angle: between pull and update, in degrees. Above 90, the pull works against the update.

        by: "group" returns a list, and "parameter" a dict by name. A mapping of parameters to
        labels, such as `{row.parameter: row.role for row in plan(model).rows}`, returns a dict by
        label.
        """
        if by == "group":
            indices = {p: j for j, group in enumerate(self.param_groups) for p in group["params"]}
            rows = self._rows(indices)
            return [self._counters(self.param_groups[j]) | row for j, row in rows.items()]
        return self._rows(_names(self.param_groups) if by == "parameter" else by)

    def _rows(self, labels: Mapping[Tensor, Any]) -> dict[Any, dict[str, float]]:
        """Return the diagnostics of each label. This waits for the device."""
        parts = measured(self, labels)
        return {label: part.numbers(part.total().tolist()) for label, part in parts.items()}


@torch.no_grad()
def measured(opt: Watched, labels: Mapping[Tensor, Any]) -> dict[Any, Measured]:
    """Return the sums of each label. Parameters without a label are "other"."""
    pulls, found = opt._pulls(), defaultdict[Any, Measured](Measured)
    size = len(SUMS) - 2 if opt._sums else 0  # a parameter without a gradient has a step of 0
    for group in opt.param_groups:
        for p in group["params"]:
            x, pull = sharded.local(p).detach().float(), pulls.get(p)
            away = x - value(pull.z0, x) if pull else torch.zeros_like(x)
            step = opt._sums.get(p, x.new_zeros(size))
            sums = torch.stack([_square(x), _square(away), *step])
            part = found[labels.get(p, "other")]
            part.sums.append(sharded.total(sums, p))
            part.params.append((max(1, p.numel()), float(group.get("lr", 0.0)), pull and pull.lam))
    return found


def _names(groups: Sequence[dict[str, Any]]) -> dict[Tensor, str]:
    """Return the name of each parameter, or "group.position" without names."""
    found: dict[Tensor, str] = {}
    for j, group in enumerate(groups):
        names = group.get("param_names") or [f"{j}.{n}" for n in range(len(group["params"]))]
        found |= dict(zip(group["params"], names, strict=True))
    return found
