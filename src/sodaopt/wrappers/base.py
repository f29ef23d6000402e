"""The step that all wrappers share: move the points, step the base optimizer, finish.

A step that raises an error (out of memory, say) ends in one of two ways. If the base's step has not
begun, the wrapper's work is undone. Otherwise it is finished: the base's update stays as far as the
base came, and the step counts. Ctrl-C waits until the step is done.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer, optimizer

from sodaopt import rounding, schedules
from sodaopt.backends import PLAIN
from sodaopt.core.diagnostics import Watched
from sodaopt.parallel import sharded
from sodaopt.schedules import Coef
from sodaopt.wrappers.live import Group, LiveOptimizer
from sodaopt.wrappers.low_precision import fp32_copies, read_back

Operation: TypeAlias = Callable[[], Any]


@dataclass
class GroupStep:
    """One step of a group's parameters that have a gradient.

    indices: the index of each parameter in the optimizer.
    points: this rank's shard of each parameter that the base steps: the parameter's own memory, or
    an fp32 copy if the parameter has 16 bits.
    undo: operations that restore the parameters if the base's step does not begin.
    finish: operations that complete the step after the base's. An operation that raises runs again,
    so an operation in several parts must give the same result if it begins again.
    completed: the base's step has returned.
    """

    group: Group
    indices: list[int]
    params: list[Tensor]
    points: list[Tensor]
    undo: list[Operation] = field(default_factory=list)
    finish: list[Operation] = field(default_factory=list)
    completed: bool = False

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
    """A subclass writes `_before`."""

    @property
    def _coef(self) -> Coef:
        """The schedule of the pull or of the average. Its memory is in the groups."""
        return 0.0

    def _before(self, step: GroupStep) -> None:
        """Move the points to where the base must step from, and fill step.undo and step.finish."""

    def _group_keys(self) -> Group:
        keys = {"k": 0, **schedules.start(self._coef)} | (
            {"train_mode": True} if self._output else {}
        )
        return {self._key(name): v for name, v in keys.items()}

    def _memory(self, group: Group, k: int) -> dict[str, Any]:
        """The memory of the schedule at its step k. Before step 0 it does not change."""
        past = {n: group[self._key(n)] for n in schedules.start(self._coef)}
        return schedules.advance(self._coef, past, k, group.get("lr", 1.0)) if k >= 0 else past

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
        is_ready = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if is_ready and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"a CUDA graph of {type(self).__name__} would repeat the k of this step: capture "
                "SODA(..., capturable=True) instead, with a method such as 'soda(adam)'"
            )
        with _ctrl_c_waits():
            self._step()
        return loss

    def _step(self) -> None:
        _run_hooks(self.base, 0)
        steps = self._group_steps()
        with _undone_or_finished(steps) as begun:
            in_fp32 = self._in_fp32(steps) if any(step.low() for step in steps) else nullcontext()
            for step in steps:
                self._before(step)
            with in_fp32, _without_hooks(self.base):
                begun.append(True)
                self.base.step()  # without a closure: some bases take none
            for step in steps:
                step.completed = True
            _run_hooks_after(self.base, steps)

    def _in_fp32(self, steps: list[GroupStep]) -> AbstractContextManager[None]:
        """Prepare the block in which the base steps fp32 copies of the 16-bit parameters."""
        params, points = _low(steps)
        release = partial(self._fp32_step.release, params)
        steps[0].undo.append(release)
        copies = self._fp32_step.copies(params, points)
        steps[0].finish += [partial(read_back, copies, points), release]
        return self._fp32_step.replaced(params, copies, points)

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
                points = [p if type(p) in PLAIN else sharded.local(p) for p in params]
                if any(x.dtype in rounding.HALVES for x in points):
                    points = fp32_copies(points)
                steps.append(GroupStep(group, [j for j, _ in found], params, points))
        return steps

    def _keep(self, step: GroupStep, tensors: dict[Tensor, dict[str, Tensor]]) -> None:
        """Store tensors of parameters after the base's step.

        If that step failed, a parameter that the base has no state of is left out: many bases
        initialise a parameter only if its state is empty.
        """
        for p, own in tensors.items():
            if step.completed or self.base.state.get(p):
                self.base.state[p].update({self._key(name): t for name, t in own.items()})

    def _count(self, step: GroupStep, **memory: Any) -> Operation:
        """The operation that counts the step, and keeps the memory of a schedule."""
        keys = {"k": step.group[self._key("k")] + 1, **memory}
        return partial(step.group.update, {self._key(n): v for n, v in keys.items()})

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


def _low(steps: list[GroupStep]) -> tuple[list[Tensor], list[Tensor]]:
    """The 16-bit parameters of all groups, and their points."""
    low = [(step, j) for step in steps for j in step.low()]
    return [step.params[j] for step, j in low], [step.points[j] for step, j in low]


@contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Let Ctrl-C take effect after the block. A second Ctrl-C takes effect at once.

    Python raises KeyboardInterrupt right after the operation that it arrives in, and nobody could
    tell whether that operation is done.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # other threads get no signals
        return
    waiting: list[Any] = []

    def wait(*signal_and_frame: Any) -> None:
        waiting.append(signal_and_frame)
        if len(waiting) > 1:
            before(*signal_and_frame)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting:
            before(*waiting[0])


@contextmanager
def _undone_or_finished(steps: list[GroupStep]) -> Iterator[list[bool]]:
    """Undo the steps if the block raises before `begun` has an entry. Else finish them."""
    begun: list[bool] = []
    try:
        yield begun
    finally:
        operations = deque(o for s in steps for o in (s.finish if begun else s.undo))
        for s in steps:  # operations refer to their step, so its fp32 copies would wait for gc
            s.finish, s.undo = [], []
        _run(operations)


def _run(operations: deque[Operation], attempts: int = 2) -> None:
    """Run all operations. If one raises, it and those after it run before the error is raised."""
    try:
        while operations:
            operations[0]()
            operations.popleft()
    finally:
        if operations and attempts > 1:
            _run(operations, attempts - 1)


# -- the base's step hooks ------------------------------------------------------------------------
#
# Hooks before the step run before the wrapper moves a parameter. Hooks after it see the points that
# the base has stepped. torch runs the global step hooks and the wrapper's own hooks around the
# wrapper's step, so the global hooks must not run again around the base's.
#
# The tables of hooks are private in torch. If they go, the base runs its own hooks around its step,
# and 16-bit parameters are seen by hooks as they were before the step.


def _hook_tables(base: Optimizer) -> list[dict[int, Any]]:
    """The base's hooks before and after a step, and the global ones."""
    own = [getattr(base, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post")]
    return [*own, optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]


def _run_hooks(base: Optimizer, table: int) -> None:
    for hook in list(_hook_tables(base)[table].values()):
        hook(base, (base,), {})


@contextmanager
def _without_hooks(base: Optimizer) -> Iterator[None]:
    """Let the base step without any hook."""
    held = [(table, dict(table)) for table in _hook_tables(base) if table]
    try:
        for table, _ in held:
            table.clear()
        yield
    finally:
        for table, hooks in held:
            table.update(hooks)


def _run_hooks_after(base: Optimizer, steps: list[GroupStep]) -> None:
    """Run the base's hooks after its step.

    They see the 16-bit parameters at the fp32 points that the base has stepped, and their changes
    are copied to the points.
    """
    if not _hook_tables(base)[1]:
        return
    params, points = _low(steps)
    shards = [sharded.local(p.detach()) for p in params]
    for shard, x in zip(shards, points, strict=True):
        shard.copy_(x)
    rounded = [shard.clone() for shard in shards]
    _run_hooks(base, 1)
    for shard, old, x in zip(shards, rounded, points, strict=True):
        x.copy_(torch.where(shard == old, x, shard.float()))
