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
from collections.abc import Callable, Collection
from itertools import compress
from typing import Any, ClassVar, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_map_only

from . import sharded
from ._bare import is_bare
from .bases import DECAYS, NON_READERS
from .template import SODA

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

    def key(self, name: str) -> str:
        return f"{self.prefix}_{name}"

    def own(self, p: Tensor) -> dict[str, Tensor]:
        """This wrapper's tensors of p, without the prefix. Never creates an entry: many bases
        initialise a parameter only while its state is empty."""
        n = len(self.prefix) + 1
        s = self.base.state.get(p, {})
        return {k[n:]: v for k, v in s.items() if isinstance(k, str) and k.startswith(self.key(""))}

    def _is_ours(self, state: Group) -> bool:
        """Whether some of it is this wrapper's: what it adds comes last."""
        mine = self.key("")
        return any(isinstance(k, str) and k.startswith(mine) for k in reversed(state))

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
                places = self.places(group)
                pairs = [
                    (number + j, p)
                    for j, p in enumerate(group["params"])
                    if p.grad is not None and p.numel() and (places is None or j in places)
                ]
                number += len(group["params"])
                if pairs:
                    work.append((group, pairs, self.before(group, pairs)))
            points = [pair for _, pairs, held in work for pair in self.points(pairs, held)]
            self._step_in_fp32(points) if points else self.base.step()
            while work:
                self.after(*work[0])
                group = work.pop(0)[0]
                group[self.key("k")] += 1
        except BaseException:  # Ctrl-C too: whoever catches it may save the weights
            for group, pairs, held in work:
                self.undo(group, pairs, held)
            raise
        return loss

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _step_in_fp32(self, points: list[tuple[Tensor, Tensor]]) -> None:
        """The base's step with fp32 twins in the places of these 16-bit parameters, so that
        nothing is rounded on the way: not its update, nor its own state, which is fp32 as well."""
        base, state = self.base, self.base.state
        params, xs = [p for p, _ in points], [x for _, x in points]
        twins, states = _twins(params, xs), [state.get(p) for p in params]
        new = [s is None or not self._is_ours(s) for s in states]
        before = [sharded.local(p.detach()).clone() for p in compress(params, new)]
        lists = [group["params"] for group in base.param_groups]
        try:
            for p, twin, s, is_new in zip(params, twins, states, new, strict=True):
                if s is not None:  # of 16 bits where the bare base has made it
                    state[twin] = _widened(s) if is_new else s
                    del state[p]
            places = dict(zip(map(id, params), twins, strict=True))
            for group in base.param_groups:
                group["params"] = [places.get(id(p), p) for p in group["params"]]
            base.step()
        finally:
            for group, its in zip(base.param_groups, lists, strict=True):
                group["params"] = its
            for p, twin in zip(params, twins, strict=True):
                if (s := state.pop(twin, None)) is not None:
                    state[p] = s
        for x, twin in zip(xs, twins, strict=True):
            stepped = sharded.local(twin)
            if stepped.data_ptr() != x.data_ptr():  # some bases hang other memory there
                x.copy_(stepped)
        parts = [sharded.local(p.detach()) for p in compress(params, new)]
        if not all(map(_is_same, parts, before)):
            name = type(base).__name__
            raise RuntimeError(
                f"{name} moved a 16-bit parameter itself and not the fp32 one in its place, for it "
                f"keeps parameters outside its param_groups: wrap the optimizer inside {name}, "
                f"which {type(self).__name__}.of(torch.optim.AdamW) is a class for"
            )

    def places(self, group: Group) -> Collection[int] | None:
        """Which parameters of the group are wrapped, by their places; None for all."""
        return None

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
            if not ours.get(n):
                continue
            if p.dtype.itemsize < 4:  # torch has cast the base's state to that
                self.base.state[p].update(_as_saved(self.base.state[p], theirs[n]))
            for key, t in ours[n].items():
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


def in_fp32(parts: list[Tensor]) -> list[Tensor]:
    """Copies, in one piece of memory that stays in its place from step to step, if each can begin
    there at a multiple of 16 bytes."""
    apart = not all(t.layout == torch.strided and is_bare(t) and t.numel() % 4 == 0 for t in parts)
    if apart or len({t.device for t in parts}) != 1 or torch.compiler.is_compiling():
        return [t.float() for t in parts]
    n = sum(t.numel() for t in parts)
    room = torch.empty(n, dtype=torch.float32, device=parts[0].device)
    out: list[Tensor] = list(_unflatten_dense_tensors(room, parts))  # type: ignore[no-untyped-call]
    torch._foreach_copy_(out, parts)
    return out


def _twins(params: list[Tensor], xs: list[Tensor]) -> list[nn.Parameter]:
    """For each 16-bit parameter one in fp32 with the values x, and else as it is."""
    grads = in_fp32([p.grad for p in params if p.grad is not None])
    twins = []
    for p, x, grad in zip(params, xs, grads, strict=True):
        twin = nn.Parameter(sharded.like(x, p), p.requires_grad)
        twin.grad = grad
        for name, value in p.__dict__.items():
            twin.__dict__.setdefault(name, value)
        twins.append(twin)
    return twins


def _widened(state: Any) -> Any:
    """State with fp32 for each tensor of 16 bits."""

    def widened(t: Tensor) -> Tensor:
        return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t

    return tree_map_only(Tensor, widened, state)


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit, so that NaN is NaN; on the meta device, where memory is foretold, there are no
    bits."""
    return a.is_meta or torch.equal(a.view(torch.int16), b.view(torch.int16))


def _as_saved(loaded: Any, saved: Any) -> Any:
    """Loaded state, with the saved value in fp32 of each tensor that was cast to 16 bits."""
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return {k: _as_saved(v, saved.get(k)) for k, v in loaded.items()}
    if isinstance(loaded, list) and isinstance(saved, list) and len(loaded) == len(saved):
        return [_as_saved(a, b) for a, b in zip(loaded, saved, strict=True)]
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor) and loaded.dtype != saved.dtype:
        return saved.detach().to(loaded.device, torch.float32, copy=True)
    return loaded


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
