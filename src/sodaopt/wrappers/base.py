"""Wrappers around any torch optimizer: the pull toward the initial weights, and iterate averages.

A wrapper is a real `torch.optim.Optimizer` that shows its base's groups, state and defaults live:
whatever drives the base (a scheduler, a framework) drives both. Its own numbers live in the groups
and its own tensors in the base's state, under keys with the wrapper's prefix, so one flat state
dict holds all of it and a checkpoint of the bare base loads too.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeAlias

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from sodaopt.core.optimizer import SODA
from sodaopt.parallel import sharded
from sodaopt.wrappers.known_bases import DECAYS, NON_READERS
from sodaopt.wrappers.low_precision import Twins

Group: TypeAlias = dict[str, Any]
Pair: TypeAlias = tuple[int, Tensor]


class Wrapper(Optimizer):
    """What all of them share. A subclass writes `before` and `after` the base's step."""

    prefix: ClassVar[str]
    base: Optimizer

    def __init__(self, base: Optimizer) -> None:
        check_base(base, type(self).__name__)
        self.base = base
        super().__setstate__({})  # the hook tables and the patched step, without taking parameters
        for key, value in self.marks().items():
            base.defaults.setdefault(key, value)  # for groups added later
            for group in base.param_groups:
                group.setdefault(key, value)
        self.check()
        for p in list(base.state):
            self._twins.widen(p)

    def marks(self) -> Group:
        """The group keys of this wrapper with their first values: plain numbers."""
        mode = {self.key("train_mode"): True} if self.output else {}
        return {self.key("k"): 0, **mode}

    def check(self) -> None:
        """Raise if the base as it is now must not be wrapped."""
        self.check_groups(self.base.param_groups)

    def before(self, group: Group, pairs: list[Pair]) -> Any:
        """Move the parameters to where the base is to step. What it returns, `after` gets."""

    def after(self, group: Group, pairs: list[Pair], held: Any) -> None:
        """Take the base's step in."""

    def undo(self, group: Group, pairs: list[Pair], held: Any) -> None:
        """Leave sound weights behind where the base's step did not come back."""

    def points(self, pairs: list[Pair], held: Any) -> list[tuple[Tensor, Tensor]]:
        """16-bit parameters, and for each this rank's part of the fp32 point that the base is to
        step in its place; those not here it steps as they are."""
        return []

    @property
    def _twins(self) -> Twins:
        """What steps 16-bit parameters. It knows nothing that must be kept."""
        if "_stepper" not in self.__dict__:
            self._stepper = Twins(self.base, type(self).__name__, self.key(""))
        return self._stepper

    def key(self, name: str) -> str:
        return f"{self.prefix}_{name}"

    def own(self, p: Tensor) -> dict[str, Tensor]:
        """This wrapper's tensors of p, without the prefix. Never creates an entry: many bases
        initialise a parameter only while its state is empty."""
        n = len(self.prefix) + 1
        s = self.base.state.get(p, {})
        return {k[n:]: v for k, v in s.items() if isinstance(k, str) and k.startswith(self.key(""))}

    def keep(self, p: Tensor, **tensors: Tensor) -> None:
        """Store tensors of p; only after the base has stepped on it."""
        self.base.state[p].update({self.key(name): t for name, t in tensors.items()})

    # -- the step -----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure where the parameters are, then move them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.check()
        if self.output and not all(g[self.key("train_mode")] for g in self.base.param_groups):
            raise RuntimeError("step() in eval mode would move the output: call train() first")
        number, work = 0, []
        try:
            for group in self.base.param_groups:
                pairs = [
                    (number + j, p)
                    for j, p in enumerate(group["params"])
                    if p.grad is not None and p.numel()
                ]
                number += len(group["params"])
                if pairs:
                    work.append((group, pairs, self.before(group, pairs)))
            points = [pair for _, pairs, held in work for pair in self.points(pairs, held)]
            if points:
                self._twins.step(points)
            else:
                self.base.step()  # bare: some bases take no closure
            while work:
                self.after(*work[0])
                group = work.pop(0)[0]
                group[self.key("k")] += 1
        except BaseException:  # Ctrl-C too: whoever catches it may save the weights
            for group, pairs, held in work:
                self.undo(group, pairs, held)
            raise
        return loss

    @property
    def reads(self) -> bool:
        """Whether the base's update may depend on the point it is at: by its class, or because
        it decays that point."""
        known = f"{type(self.base).__module__}.{type(self.base).__qualname__}" in NON_READERS
        return not known or any(decays(self.base, g) for g in self.base.param_groups)

    # -- which point the parameters hold ------------------------------------------------------

    output: ClassVar[str | None] = None
    """The tensor that holds the method's output, where that is not the parameter itself."""

    def train(self) -> None:
        """Parameters hold the point where gradients are taken."""
        self._switch(True)

    def eval(self) -> None:
        """Parameters hold the method's output; a step needs train() again."""
        self._switch(False)

    @torch.no_grad()
    def _switch(self, train: bool) -> None:
        if self.output is None:
            return
        for group in self.base.param_groups:
            if group[self.key("train_mode")] != train:
                for p in group["params"]:
                    kept = self.own(p)
                    if self.output in kept:
                        self.swap(p, kept, train)
                group[self.key("train_mode")] = train

    def swap(self, p: Tensor, kept: dict[str, Tensor], train: bool) -> None:
        """Exchange the parameter with the stored output, bit by bit."""
        sharded.exchange(p, kept[self.output or ""])

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
        """Through the base."""
        held = len(self.base.param_groups)
        self.base.add_param_group(param_group)
        try:
            self.check()
        except ValueError:
            del self.base.param_groups[held:]  # a refused group leaves no trace
            raise
        for group in self.base.param_groups[held:]:
            for p in group["params"]:
                self._twins.widen(p)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Through the base."""
        self.base.zero_grad(set_to_none=set_to_none)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base!r})"

    # -- saving and loading -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The base's, this wrapper's keys in it."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state_dict = self._write(self.base.state_dict())
        for after in self._optimizer_state_dict_post_hooks.values():
            state_dict = after(self, state_dict) or state_dict
        return state_dict

    def _write(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """This wrapper's tensors as a checkpoint has them; the state itself stays as it is."""
        state, prefix = dict(state_dict["state"]), self.key("")
        numbers = [n for g in state_dict["param_groups"] for n in g["params"]]
        params = [p for g in self.base.param_groups for p in g["params"]]
        for n, p in zip(numbers, params, strict=True):
            ours = [k for k in state.get(n, ()) if isinstance(k, str) and k.startswith(prefix)]
            if ours:
                written = {k: self.written(p, k.removeprefix(prefix), state[n][k]) for k in ours}
                state[n] = state[n] | written
        return state_dict | {"state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The base loads what is its own; this wrapper's tensors keep dtype and value exactly."""
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        ours, theirs = self._split(state_dict["state"])
        live = self.base.param_groups
        groups = [self.marks() | g for g in state_dict["param_groups"]]
        for group, current in zip(groups, live, strict=False):
            group |= {k: current[k] for k in self.chosen() if k in current}
        self.check_groups(groups)  # before anything is loaded
        self._load_base({**state_dict, "state": theirs, "param_groups": groups})
        numbers = [n for g in state_dict["param_groups"] for n in g["params"]]
        params = [p for g in self.base.param_groups for p in g["params"]]
        for n, p in zip(numbers, params, strict=True):
            if n in theirs:
                self._twins.restore(p, theirs[n])
            for key, t in ours.get(n, {}).items():
                self.base.state[p][key] = self.place(p, key.removeprefix(self.key("")), t)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _load_base(self, state_dict: dict[str, Any]) -> None:
        """Without this wrapper's tensors, which the base would miss in what it loads."""
        kept = {
            p: {k: s.pop(k) for k in list(s) if str(k).startswith(self.key(""))}
            for p, s in self.base.state.items()
            if isinstance(s, dict)
        }
        try:
            self.base.load_state_dict(state_dict)
        except BaseException:
            for p, s in kept.items():
                self.base.state[p].update(s)
            raise

    def check_groups(self, groups: list[Group]) -> None:
        """Raise if these groups, live or to be loaded, must not be wrapped."""

    def place(self, p: Tensor, name: str, t: Tensor) -> Tensor:
        """A loaded tensor of p as this wrapper keeps it: its own dtype, and a copy."""
        return t.detach().to(p.device, copy=True)

    def written(self, p: Tensor, name: str, t: Tensor) -> Tensor:
        """A tensor of p as a checkpoint has it."""
        return t

    def chosen(self) -> list[str]:
        """Group keys that the constructor decides, not a checkpoint."""
        return []

    def _split(self, state: dict[Any, Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """The state to load, this wrapper's tensors and the base's apart."""

        def part(s: Any, ours: bool) -> Any:
            if not isinstance(s, dict):
                return {} if ours else s
            mine = self.key("")
            return {k: v for k, v in s.items() if str(k).startswith(mine) == ours}

        return tuple({n: part(s, ours) for n, s in state.items()} for ours in (True, False))  # type: ignore[return-value]

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if not k.startswith("_") and k != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        super().__setstate__({})

    # -- as a class ---------------------------------------------------------------------------

    @classmethod
    def of(cls, base_class: type[Optimizer], **options: Any) -> type[Self]:
        """This wrapper around a class of optimizers, as a class: for frameworks that build the
        optimizer themselves, `SODAWrapper.of(torch.optim.AdamW)(params, lr=1e-3)`. A weight decay
        that the base would have by default is off."""
        made: type[Self] = _class_form(cls, base_class, options)
        return made


def _class_form(cls: Any, base_class: type[Optimizer], options: dict[str, Any]) -> Any:
    base_init: Any = base_class.__init__
    signature = inspect.signature(base_init)
    arguments = dict(signature.parameters)
    if "weight_decay" in arguments:  # also where a framework reads the defaults, and passes them
        arguments["weight_decay"] = arguments["weight_decay"].replace(default=0.0)
    signature = signature.replace(parameters=list(arguments.values()))

    @functools.wraps(base_init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        if "weight_decay" in arguments:
            given.arguments.setdefault("weight_decay", 0.0)
        cls.__init__(self, base_class(*given.args[1:], **given.kwargs), **options)

    def __reduce__(self: Any) -> Any:
        if type(self) is made:  # which cannot be found by name; a subclass of it can
            return _rebuild, (cls, base_class, options), self.__getstate__()
        return copyreg.__newobj__, (type(self),), self.__getstate__()  # type: ignore[attr-defined]

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    name = f"{cls.__name__}_{base_class.__name__}"
    body = {
        "__init__": __init__,
        "__reduce__": __reduce__,
        "__doc__": f"{cls.__name__} around {base_class.__name__}.",
        "__module__": cls.__module__,
    }
    made = type(name, (cls,), body)
    return made


def _rebuild(cls: Any, base_class: type[Optimizer], options: dict[str, Any]) -> Any:
    made = _class_form(cls, base_class, options)
    return made.__new__(made)


def check_base(base: Any, who: str) -> None:
    name = type(base).__name__
    if isinstance(base, type):
        raise TypeError(f"{who} wraps an optimizer, not a class: {who}.of({base.__name__})(params)")
    if isinstance(base, Wrapper):
        raise TypeError(f"{who} around {name}: one wrapper at a time")
    if not isinstance(base, Optimizer):
        raise TypeError(f"{who} wraps a torch.optim.Optimizer, got {name}")
    step = inspect.signature(type(base).step).parameters
    closure = list(step.values())[1] if len(step) > 1 else None
    if isinstance(base, LBFGS) or (closure is not None and closure.default is closure.empty):
        raise TypeError(
            f"{name} evaluates the loss several times a step, at points of its own: there is no "
            "one update to add the pull to"
        )
    averages = (
        any(m.keeps_x or m.keeps_z for m in base.methods.values())
        if isinstance(base, SODA)
        else callable(getattr(base, "eval", None))
    )
    if averages:
        raise TypeError(f"{name} averages its iterates itself: wrap the optimizer inside it")


def decays(base: Optimizer, group: Group) -> list[str]:
    """The keys of a group under which the base decays its weights; a row's centre counts."""
    keys = [k for k, off in DECAYS.items() if k in group and _is_on(group[k], off)]
    if isinstance(base, SODA):
        method = base.methods.get(group.get("method", ""))  # a loaded name may be another's
        if method is not None and method.centre != "last":
            keys.append("method")
    return keys


def _is_on(value: Any, off: Any) -> bool:
    return isinstance(value, Tensor) or value != off
