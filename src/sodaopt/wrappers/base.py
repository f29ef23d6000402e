"""The step that all wrappers share: move the points, step the base optimizer, use its points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from sodaopt import rounding
from sodaopt.backends import PLAIN
from sodaopt.core.diagnostics import Watched
from sodaopt.core.optimizer import SODA
from sodaopt.parallel import sharded
from sodaopt.wrappers.known_bases import DECAYS, NON_READERS
from sodaopt.wrappers.live import Group, LiveOptimizer
from sodaopt.wrappers.low_precision import fp32_copies


@dataclass
class GroupStep:
    """One step of a group's parameters that have a gradient.

    indices: the index of each parameter in the optimizer.
    points: this rank's shard of each parameter that the base steps: the parameter's own memory, or
    an fp32 copy if the parameter has 16 bits.
    held: whatever the wrapper's `_before` returned.
    """

    group: Group
    indices: list[int]
    params: list[Tensor]
    points: list[Tensor]
    held: Any = None

    def low(self) -> list[int]:
        """The positions of the 16-bit parameters."""
        return [j for j, p in enumerate(self.params) if p.dtype in rounding.HALVES]

    def read(self) -> None:
        """Copy the 16-bit parameters into their points again."""
        for j in self.low():
            self.points[j].copy_(sharded.local(self.params[j]))

    def write(self, seed: int, k: int) -> None:
        """Round the points into the 16-bit parameters. The other points are the parameters."""
        if low := self.low():
            params, points = [self.params[j] for j in low], [self.points[j] for j in low]
            rounding.write_(params, points, [self.indices[j] for j in low], seed, k)


class Wrapper(Watched, LiveOptimizer):
    """A subclass writes `_before` and `_after` the base's step, and `_undo` for a failed one."""

    def _before(self, step: GroupStep) -> Any:
        """Move the points to where the base must step from."""

    def _after(self, step: GroupStep) -> None:
        """Use the points that the base has stepped, and write the parameters."""

    def _undo(self, step: GroupStep) -> None:
        """Restore the weights if the base's step raised."""

    def _group_keys(self) -> Group:
        mode = {self._key("train_mode"): True} if self._output else {}
        return super()._group_keys() | mode

    # -- the step -----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure at the current parameters, then move them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_groups(self.base.param_groups)
        if self._output and not all(g[self._key("train_mode")] for g in self.base.param_groups):
            raise RuntimeError("step() in eval mode would move the output: call train() first")
        steps, begun = self._group_steps(), []
        try:
            for step in steps:
                step.held = self._before(step)
                begun.append(step)
            self._step_base(steps)
            while begun:
                self._after(begun[0])
                begun.pop(0).group[f"{self.prefix}_k"] += 1
        except BaseException:  # Ctrl-C too: the caller may catch it and save the weights
            for step in begun:
                self._undo(step)
            raise
        return loss

    def _group_steps(self) -> list[GroupStep]:
        steps, index = [], 0
        for group in self.base.param_groups:
            found = [
                (j, p)
                for j, p in enumerate(group["params"], index)
                if p.grad is not None and p.numel()
            ]
            index += len(group["params"])
            if found:
                params = [p for _, p in found]
                steps.append(GroupStep(group, [j for j, _ in found], params, _points(params)))
        return steps

    def _step_base(self, steps: list[GroupStep]) -> None:
        low = [(s.params[j], s.points[j]) for s in steps for j in s.low()]
        if low:
            self._fp32_step.step([p for p, _ in low], [x for _, x in low])
        else:
            self.base.step()  # without a closure: some bases take none

    @property
    def reads(self) -> bool:
        """Whether the base's update may depend on the weights."""
        return reads_weights(self.base)

    # -- which point the parameters hold ------------------------------------------------------

    _output: ClassVar[str | None] = None
    """The name of the tensor that holds the method's output, if the parameter does not."""

    def train(self) -> None:
        """Let the parameters hold the point where gradients are taken."""
        self._switch(True)

    def eval(self) -> None:
        """Let the parameters hold the method's output. step() needs train() again."""
        self._switch(False)

    @torch.no_grad()
    def _switch(self, train: bool) -> None:
        if self._output is None:
            return
        for group in self.base.param_groups:
            if group[self._key("train_mode")] != train:
                for p in group["params"]:
                    kept = self._own(p)
                    if self._output in kept:
                        self._swap(p, kept, train)
                group[self._key("train_mode")] = train

    def _swap(self, p: Tensor, kept: dict[str, Tensor], train: bool) -> None:
        """Exchange the parameter with the stored output, bit by bit."""
        sharded.exchange(p, kept[self._output or ""])


def _points(params: list[Tensor]) -> list[Tensor]:
    """This rank's shard of each parameter, as an fp32 copy if it has 16 bits."""
    shards = [p if type(p) in PLAIN else sharded.local(p) for p in params]
    low = [j for j, x in enumerate(shards) if x.dtype in rounding.HALVES]
    if low:
        for j, copy in zip(low, fp32_copies([shards[j] for j in low]), strict=True):
            shards[j] = copy
    return shards


def decays(base: Optimizer, group: dict[str, Any]) -> list[str]:
    """The keys of a group under which the base decays its weights. A row's centre counts."""
    keys = [k for k, off in DECAYS.items() if k in group and _is_on(group[k], off)]
    if isinstance(base, SODA):
        method = base.methods.get(group.get("method", ""))  # a loaded name may be unknown
        if method is not None and method.centre != "last":
            keys.append("method")
    return keys


def _is_on(value: Any, off: Any) -> bool:
    if isinstance(value, Tensor) and value.is_cuda:
        return True  # reading it would synchronise the device
    return bool(value != off)


def reads_weights(base: Optimizer) -> bool:
    """Whether the base's update may depend on the weights: by its class, or by its decay."""
    known = f"{type(base).__module__}.{type(base).__qualname__}" in NON_READERS
    return not known or any(decays(base, g) for g in base.param_groups)
