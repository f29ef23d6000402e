"""The mechanism that all wrappers share.

A wrapper is a real `torch.optim.Optimizer` that exposes its base's groups, state and defaults live:
a scheduler or framework that drives the wrapper drives both. The wrapper's own numbers live in the
groups and its own tensors in the base's state, under keys with the wrapper's prefix. One flat state
dict holds everything, and a checkpoint of the bare base loads too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from sodaopt import rounding
from sodaopt.backends import PLAIN
from sodaopt.parallel import sharded
from sodaopt.wrappers.class_form import class_form
from sodaopt.wrappers.known_bases import check_base, reads_weights
from sodaopt.wrappers.low_precision import Fp32Step, fp32_copies

Group: TypeAlias = dict[str, Any]


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

    def write(self, seed: int, k: int) -> None:
        """Round the points into the 16-bit parameters. Other parameters hold them already."""
        if low := self.low():
            params, points = [self.params[j] for j in low], [self.points[j] for j in low]
            rounding.write_(params, points, [self.indices[j] for j in low], seed, k)


class Wrapper(Optimizer):
    """A subclass writes `_before` and `_after` the base's step, and `_undo` for a failed one."""

    prefix: ClassVar[str]
    base: Optimizer

    def __init__(self, base: Optimizer) -> None:
        check_base(base, type(self).__name__)
        self.base = base
        super().__setstate__({})  # the hook tables and the patched step, without taking parameters
        for key, value in self._group_keys().items():
            base.defaults.setdefault(key, value)  # for groups added later
            for group in base.param_groups:
                group.setdefault(key, value)
        self._check_groups(base.param_groups)
        for p in list(base.state):
            self._fp32_step.widen(p)

    @property
    def _fp32_step(self) -> Fp32Step:
        if "_stepper" not in self.__dict__:  # a copy or an unpickled wrapper makes a new one
            self._stepper = Fp32Step(self.base, type(self).__name__, self._key(""))
        return self._stepper

    # -- the parts that a subclass writes -----------------------------------------------------

    def _group_keys(self) -> Group:
        """The wrapper's group keys with their first values: plain numbers."""
        mode = {self._key("train_mode"): True} if self._output else {}
        return {self._key("k"): 0, **mode}

    def _check_groups(self, groups: list[Group]) -> None:
        """Raise if these groups, live or to be loaded, must not be wrapped."""

    def _before(self, step: GroupStep) -> Any:
        """Move the points to where the base must step from."""

    def _after(self, step: GroupStep) -> None:
        """Use the points that the base has stepped, and write the parameters."""

    def _undo(self, step: GroupStep) -> None:
        """Restore the weights if the base's step raised."""

    def _key(self, name: str) -> str:
        return f"{self.prefix}_{name}"

    def _own(self, p: Tensor) -> dict[str, Tensor]:
        """The wrapper's tensors of p, without the prefix.

        It never creates an entry: many bases initialise a parameter only if its state is empty.
        """
        s, mine = self.base.state.get(p, {}), self._key("")
        return {str(k)[len(mine) :]: v for k, v in s.items() if str(k).startswith(mine)}

    def _keep(self, p: Tensor, **tensors: Tensor) -> None:
        """Store tensors of p. Call it only after the base has stepped p."""
        self.base.state[p].update({self._key(name): t for name, t in tensors.items()})

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
                begun.pop(0).group[self._key("k")] += 1
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

    # -- the base, live -----------------------------------------------------------------------

    @property
    def param_groups(self) -> list[Group]:
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        self.base.param_groups = groups

    @property
    def state(self) -> Any:
        return self.base.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base.state = state

    @property
    def defaults(self) -> Group:
        return self.base.defaults

    @defaults.setter
    def defaults(self, defaults: Group) -> None:
        self.base.defaults = defaults

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to the base."""
        count = len(self.base.param_groups)
        self.base.add_param_group(param_group)
        try:
            self._check_groups(self.base.param_groups)
        except ValueError:
            del self.base.param_groups[count:]  # a refused group leaves no trace
            raise
        for group in self.base.param_groups[count:]:
            for p in group["params"]:
                self._fp32_step.widen(p)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the base's parameters."""
        self.base.zero_grad(set_to_none=set_to_none)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base!r})"

    # -- saving and loading -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The base's state dict with the wrapper's keys in it."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state_dict = self._with_saved_tensors(self.base.state_dict())
        for after in self._optimizer_state_dict_post_hooks.values():
            state_dict = after(self, state_dict) or state_dict
        return state_dict

    def _with_saved_tensors(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict with the wrapper's tensors as checkpoints store them."""
        state, mine = dict(state_dict["state"]), self._key("")
        for n, p in self._numbered(state_dict):
            ours = [k for k in state.get(n, ()) if str(k).startswith(mine)]
            if ours:
                saved = {k: self._saved(p, k.removeprefix(mine), state[n][k]) for k in ours}
                state[n] = state[n] | saved
        return state_dict | {"state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the base's state, and the wrapper's tensors without any cast."""
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        ours, theirs = self._split(state_dict["state"])
        groups = [self._group_keys() | g for g in state_dict["param_groups"]]
        for group, current in zip(groups, self.base.param_groups, strict=False):
            group |= {k: current[k] for k in self._constructor_keys() if k in current}
        self._check_groups(groups)  # before anything is loaded
        self._load_base({**state_dict, "state": theirs, "param_groups": groups})
        for n, p in self._numbered(state_dict):
            if n in theirs:
                self._fp32_step.restore(p, theirs[n])
            for key, t in ours.get(n, {}).items():
                self.base.state[p][key] = self._restored(p, key.removeprefix(self._key("")), t)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _numbered(self, state_dict: dict[str, Any]) -> list[tuple[Any, Tensor]]:
        """The parameters with their numbers in a state dict."""
        numbers = [n for g in state_dict["param_groups"] for n in g["params"]]
        params = [p for g in self.base.param_groups for p in g["params"]]
        return list(zip(numbers, params, strict=True))

    def _load_base(self, state_dict: dict[str, Any]) -> None:
        """Load the base without the wrapper's tensors: the base would miss them in the dict."""
        kept = {
            p: {k: s.pop(k) for k in list(s) if str(k).startswith(self._key(""))}
            for p, s in self.base.state.items()
            if isinstance(s, dict)
        }
        try:
            self.base.load_state_dict(state_dict)
        except BaseException:
            for p, s in kept.items():
                self.base.state[p].update(s)
            raise

    def _restored(self, p: Tensor, name: str, t: Tensor) -> Tensor:
        """Copy a loaded tensor of p as this wrapper keeps it, in its own dtype."""
        return t.detach().to(p.device, copy=True)

    def _saved(self, p: Tensor, name: str, t: Tensor) -> Tensor:
        """A tensor of p as a checkpoint stores it."""
        return t

    def _constructor_keys(self) -> list[str]:
        """Group keys that the constructor decides, not a checkpoint."""
        return []

    def _split(self, state: dict[Any, Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """The wrapper's tensors and the base's, separated."""
        mine, ours, theirs = self._key(""), {}, {}
        for n, s in state.items():
            if isinstance(s, dict):
                ours[n] = {k: v for k, v in s.items() if str(k).startswith(mine)}
                s = {k: v for k, v in s.items() if not str(k).startswith(mine)}
            theirs[n] = s
        return ours, theirs

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if not k.startswith("_") and k != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        super().__setstate__({})

    @classmethod
    def of(cls, base_class: type[Optimizer], **options: Any) -> type[Self]:
        """This wrapper around a class of optimizers, as a class.

        For frameworks that build the optimizer: `SODAWrapper.of(torch.optim.AdamW)(params)`.
        The default weight decay of the base class is replaced by 0.
        """
        made: type[Self] = class_form(cls, base_class, options)
        return made


def _points(params: list[Tensor]) -> list[Tensor]:
    """This rank's shard of each parameter, as an fp32 copy if it has 16 bits."""
    shards = [p if type(p) in PLAIN else sharded.local(p) for p in params]
    low = [j for j, x in enumerate(shards) if x.dtype in rounding.HALVES]
    for j, copy in zip(low, fp32_copies([shards[j] for j in low]), strict=True):
        shards[j] = copy
    return shards
