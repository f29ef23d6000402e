"""The step that all wrappers share: move the points, step the base optimizer, finish.

A step that raises an error (out of memory, say) ends in one of two ways. If the base's step has not
begun, the wrapper's work is undone. Otherwise the wrapper's work is finished: the part of the
update that the base has made stays, and the step counts. Ctrl-C waits until the step is done.
"""

import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer, optimizer

from sodaopt import rounding, schedules
from sodaopt.backends import PLAIN
from sodaopt.core.diagnostics import Watched
from sodaopt.parallel import sharded
from sodaopt.parallel.agree import Refusal
from sodaopt.wrappers.live import Group, LiveOptimizer
from sodaopt.wrappers.low_precision import fp32_copies

Tensors: TypeAlias = dict[Tensor, dict[str, Tensor]]
"""The wrapper's tensors of each parameter, by name."""


@dataclass
class GroupStep:
    """One step of a group's parameters that have a gradient.

    indices: the index of each parameter in the optimizer.
    completed: whether the base's step has returned.
    """

    group: Group
    indices: list[int]
    params: list[Tensor]
    completed: bool = False

    @cached_property
    def low(self) -> list[int]:
        """The positions of the 16-bit parameters."""
        return [j for j, p in enumerate(self.params) if p.dtype in rounding.HALVES]

    @cached_property
    def points(self) -> list[Tensor]:
        """The tensors that the base steps: this rank's shards, and fp32 copies of 16-bit ones.

        Capturing z0 may round the parameters, so the copies are made later, at their first use.
        """
        points = [p if type(p) in PLAIN else sharded.local(p) for p in self.params]
        if self.low:
            for j, x in zip(self.low, fp32_copies([points[j] for j in self.low]), strict=True):
                points[j] = x
        return points

    def write(self, seed: int, k: int) -> None:
        """Round the fp32 copies into the 16-bit parameters. The other points are the parameters."""
        if self.low:
            params, points = [self.params[j] for j in self.low], [self.points[j] for j in self.low]
            rounding.write_(params, points, [self.indices[j] for j in self.low], seed, k)


class Wrapper(Watched, LiveOptimizer):
    """An optimizer around a base optimizer. A subclass defines `_around` and `_first`."""

    def _kept(self, step: GroupStep) -> Tensors:
        """The wrapper's tensors of each parameter. New ones are stored after the base's step."""
        return {p: self._own(p) or self._first(p) for p in step.params}

    def _around(self, step: GroupStep, kept: Tensors, lam: float) -> Generator[None]:
        """Move the points to where the base must step from, yield, and finish the step.

        The generator is resumed after the base's step, also if the base raised an error. If the
        base's step does not begin, the generator is closed at the yield (GeneratorExit). It must
        then move the points back.

        kept: the tensors that `_kept` returned.
        """
        raise NotImplementedError

    def _k(self, group: Group) -> int:
        """The step k at which the schedule of lam is evaluated."""
        return int(group[self._prefix + "k"])

    def _memory(self, group: Group) -> dict[str, Any]:
        """The memory of the schedule at its step k. It is not advanced while k is negative."""
        k, coef = self._k(group), self._coef()
        past = {n: group[self._prefix + n] for n in schedules.start(coef)}
        # a few bases have no lr
        return schedules.advance(coef, past, k, group.get("lr", 1.0)) if k >= 0 else past

    def _lam(self, group: Group, memory: dict[str, Any]) -> float:
        """Return lam at the coming step.

        memory: the memory of the schedule at that step.
        """
        lam = schedules.value(self._coef(), self._k(group), group.get("lr", 1.0), memory)
        return lam.item() if isinstance(lam, Tensor) else lam

    # -- the step -----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, and return the loss if there is a closure.

        closure: computes the loss and the gradients. It is called once, before the pull.
        """
        step = partial(self._step, closure)
        sharing = getattr(self.base, "_sharing", None)  # SODA shows errors to the ranks that wait
        return step() if sharing is None else sharing.publishing(step)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._check_groups(self.base.param_groups)
        if not all(g.get(self._prefix + "train_mode", True) for g in self.base.param_groups):
            raise RuntimeError("step() in eval mode would move the output: call train() first")
        steps = list(self._group_steps())
        _check_capture(self, steps)
        with _ctrl_c_waits(), ExitStack() as undo, ExitStack() as finish:
            arounds = [undo.enter_context(closing(self._step_group(step))) for step in steps]
            for around in arounds:
                next(around)
            with self._in_fp32(steps), _without_hooks(self.base):
                for around in arounds:
                    finish.callback(next, around, None)
                try:
                    self.base.step()  # the closure has run, and some bases take none
                except Refusal:  # the base has changed nothing, so undo
                    finish.pop_all()
                    raise
            for step in steps:
                step.completed = True
        return loss

    def _in_fp32(self, steps: list[GroupStep]) -> AbstractContextManager[None]:
        """Return a context in which the base steps fp32 copies of the 16-bit parameters."""
        low = [(step.params[j], step.points[j]) for step in steps for j in step.low]
        if not low:
            return nullcontext()
        params, points = zip(*low, strict=True)
        return self._fp32_step.replaced(params, points, fp32_copies([p.grad for p in params]))

    def _group_steps(self) -> Iterator[GroupStep]:
        """Yield a `GroupStep` for each group in which a parameter has a gradient."""
        indices = count()
        for group in self.base.param_groups:
            members = zip(group["params"], indices, strict=False)
            found = {j: p for p, j in members if p.grad is not None and p.numel()}
            if found:
                yield GroupStep(group, list(found), list(found.values()))

    def _step_group(self, step: GroupStep) -> Generator[None]:
        """Step one group: yield to the base's step, then store the wrapper's tensors and numbers.

        If the base's step failed, nothing is stored for a parameter without state of the base,
        because many bases initialise a parameter only if its state is empty.
        """
        group, state, prefix = step.group, self.base.state, self._prefix
        memory = self._memory(group)
        lam, kept = self._lam(group, memory), self._kept(step)
        yield from self._around(step, kept, lam)
        for p, own in kept.items():
            if step.completed or state.get(p):
                state[p].update({prefix + name: t for name, t in own.items()})
        self._provisional = {p for p in self._provisional if p in state and p not in kept}
        numbers = {"k": group[prefix + "k"] + 1, **memory}
        group.update({prefix + name: v for name, v in numbers.items()})

    # -- which point the parameters hold ------------------------------------------------------

    @torch.no_grad()
    def _switch(self, train: bool) -> None:
        mode = self._prefix + "train_mode"
        for group in self.base.param_groups:
            if group.get(mode, train) != train:
                for p in group["params"]:
                    if own := self._own(p):
                        self._swap(p, own, train)
                group[mode] = train

    def _swap(self, p: Tensor, kept: dict[str, Tensor], train: bool) -> None:
        """Exchange the parameter and the stored output, bit by bit."""
        sharded.swap(p, kept[self._output or ""])


def _check_capture(wrapper: Optimizer, steps: list[GroupStep]) -> None:
    """Raise if a CUDA graph is being captured. A CPU step skips this question."""
    is_on_gpu = any(step.params[0].is_cuda for step in steps)
    if is_on_gpu and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"a CUDA graph of {type(wrapper).__name__} would repeat the k of this step: capture "
            "SODA(..., capturable=True) instead, with a method such as 'soda(adam)'"
        )


@contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Let Ctrl-C take effect after the block. A second Ctrl-C takes effect at once.

    Python raises KeyboardInterrupt right after the operation in which it arrives. A handler of this
    error could not tell whether that operation is done.
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
def _without_hooks(base: Optimizer) -> Iterator[None]:
    """Let the base step without hooks.

    torch runs global hooks, and hooks that wrapper and base share, around the wrapper's step.
    """
    tables: list[Any] = [base._optimizer_step_pre_hooks, base._optimizer_step_post_hooks]
    tables += _global_hooks()
    with ExitStack() as restore:
        for table in filter(len, tables):
            restore.callback(table.update, dict(table))
            table.clear()
        yield


def _global_hooks() -> list[Any]:
    """Return torch's tables of global hooks."""
    # their names are private: if torch removes them, return [], and these hooks run twice in a step
    return [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]
