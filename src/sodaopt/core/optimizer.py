"""The template as a torch optimizer: groups, the state of parameters, saving, train and eval."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from sodaopt import anchors
from sodaopt._errors import times, unknown
from sodaopt.core.method import ROWS, Method
from sodaopt.core.update import Leaf, sum_dtype, update
from sodaopt.core.validation import Defaults, as_list, check_keys, check_lr, check_parameter
from sodaopt.geometry import State
from sodaopt.parallel import sharded

Params: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class SODA(Optimizer):
    """Run a `Method` on parameters, or one method a group.

        SODA(model.parameters(), lr=1e-3, method=zoo.adamw())
        SODA([{"params": hidden, "method": zoo.muon()}, {"params": rest, "lr": 3e-4}], 0.02,
             zoo.adam())

    The parameters hold y. `eval()` puts x there and `train()` y again, exactly; both do nothing
    for methods with lam_bar = 0. Parameters in bf16 or fp16 are summed in fp32 and rounded
    stochastically; `seed` picks the rounding bits. foreach=False goes parameter by parameter.
    anchor: where methods with centre "init" keep z0, see `sodaopt.anchors`.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor,
        method: Method | str | None = None,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        seed: int = 0,
        anchor: Any = "clone",
    ) -> None:
        self.methods: dict[str, Method] = {}
        self.anchor = anchors.anchor(anchor)
        check_lr(lr, "SODA")
        defaults = Defaults(
            lr=lr,
            method=None if method is None else self._register(method),
            foreach=foreach,
            maximize=maximize,
            seed=seed,
            train_mode=True,
        )
        super().__init__(params, defaults)
        if not any(group["params"] for group in self.param_groups):
            raise ValueError("optimizer got an empty parameter list")

    # -- the step -----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on every parameter that has a gradient."""
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError("step() in eval mode would move x, not y: call train() first")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    # k is read on the host: a traced step would freeze or break on it
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _step(self) -> None:
        number = 0
        for group in self.param_groups:
            method = self.methods[group["method"]]
            for leaves in self._buckets(group, method, number):
                # a step inside an autocast region must not run its matrix products in 16 bits
                device = leaves[0].p.device.type
                with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
                    update(leaves, method, group, self.anchor)
            number += len(group["params"])

    def _buckets(self, group: dict[str, Any], method: Method, number: int) -> Iterator[list[Leaf]]:
        """Leaves that can share one call of every operation, those with a gradient alone."""
        buckets: dict[object, list[Leaf]] = {}
        for j, p in enumerate(group["params"]):
            if p.grad is None or p.numel() == 0:
                continue
            if p.grad.layout != torch.strided:
                raise RuntimeError(
                    f"{_label(group, j)} has a sparse gradient, and every method here moves dense "
                    "parameters: build the embedding with sparse=False"
                )
            s: Any = self.state.get(p)
            k = int(s["step"]) if s else 0
            s = s if k else self._current(p, method, first=True)
            past = tuple(float(s[name]) for name in method.memory)
            alone = j if group["foreach"] is False else None
            key = (k, past, p.dtype, p.device, alone)
            buckets.setdefault(key, []).append(Leaf(p, s, number + j))
        yield from buckets.values()

    # -- state --------------------------------------------------------------------------------

    def _fresh(self, p: Tensor, method: Method, first: bool = False) -> State:
        """The state of a parameter before its first step; first: which begins now."""
        y, dtype = p.detach(), sum_dtype(p.dtype)
        # explicit: a default dtype of bf16 would stop k at 256, a default device stall each step
        s: State = {"step": torch.tensor(0.0, dtype=torch.float32, device="cpu")}
        if method.centre == "init":
            s["z0"] = self.anchor.take(p, first)
        if method.keeps_m:
            s["m"] = torch.zeros_like(y, dtype=dtype)
        if method.keeps_z:
            s["z"] = y.to(dtype, copy=True)
        if method.keeps_x:
            s["x"] = y.to(dtype, copy=True)
            if dtype != y.dtype:
                s["y"] = y.clone()  # eval() cannot put 16 bits of y into the fp32 x
        s |= method.geometry.state(y, dtype)
        memory = method.memory.items()
        return s | {n: torch.tensor(v, dtype=torch.float64, device="cpu") for n, v in memory}

    def _current(self, p: Tensor, method: Method, first: bool = False) -> State:
        """The state of p. Up to its first step it is made again from the parameter as it is now:
        weights may be loaded, moved or swapped for sharded ones after the constructor."""
        if p not in self.state:
            self._adopt()
        s: State = self.state[p]
        if not s or float(s["step"]) == 0:
            s = self.state[p] = self._fresh(p, method, first)
        return s

    def _adopt(self) -> None:
        """Give every trainable parameter of the groups a state, and forget all others."""
        known = self.state.copy()
        self.state.clear()
        for group in self.param_groups:
            for p in group["params"]:
                if known.get(p):  # not {}: looking for p in the defaultdict puts that there
                    self.state[p] = known[p]
                elif p.requires_grad:
                    self.state[p] = self._fresh(p, self.methods[group["method"]])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, in mid-run too. A group may have its own `method`, and its own `lr` or an
        `lr_factor` for the optimizer's."""
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group is a dict, got {type(param_group).__name__}")
        group, where = dict(param_group), f"group {len(self.param_groups)}"
        wanted = group.get("method") or self.defaults["method"]
        if wanted is None:
            raise ValueError(
                f"{where} has no method: SODA(params, lr, zoo.adamw()), or a 'method' in the group"
            )
        group["method"] = self._register(wanted)
        method = self.methods[group["method"]]
        factor = group.pop("lr_factor", 1.0)
        if "lr" in group and factor != 1:
            raise ValueError(f"{where} has both an lr and an lr_factor: give one of them")
        group.setdefault("lr", self.defaults["lr"] * factor if factor != 1 else self.defaults["lr"])
        check_lr(group["lr"], where)
        check_keys(group, method, where)
        group["params"] = params = as_list(group.get("params"), where)
        lr = float(group["lr"])
        method.coefs(0, lr, method.advance(method.memory, 0, lr))
        seen = {p for g in self.param_groups for p in g["params"]}
        for j, entry in enumerate(params):
            name, p = entry if isinstance(entry, tuple) else (f"parameter {j} of {where}", entry)
            if not isinstance(p, Tensor):
                raise TypeError(f"{name} is no tensor but a {type(p).__name__}")
            check_parameter(name, p, method)
            if p in seen:
                raise ValueError(f"{name} ({times(p.shape)}) is in the optimizer twice: drop one")
            seen.add(p)
        super().add_param_group(group)
        self._adopt()

    def _register(self, method: Method | str) -> str:
        """The name under which a group finds its method: groups hold plain values only."""
        if isinstance(method, str):
            if method in self.methods:
                return method
            if method not in ROWS:
                raise ValueError(unknown("method", method, [*self.methods, *ROWS]))
            method = ROWS[method]()
        if not isinstance(method, Method):
            raise TypeError(f"the method must be a Method such as zoo.adamw(), got {method!r}")
        name, n = method.name, 1
        while self.methods.get(name, method) != method:
            n += 1
            name = f"{method.name}#{n}"
        self.methods[name] = method
        return name

    # -- saving and loading -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's flat layout: `state` by parameter number and `param_groups`, plain values."""
        self._adopt()
        found: dict[str, Any] = super().state_dict()
        params = [p for group in self.param_groups for p in group["params"]]
        for n, s in found["state"].items():
            if "z0" in s:
                found["state"][n] = s | {"z0": self.anchor.written(s["z0"], params[n])}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but each tensor keeps the dtype and device that this optimizer gives it.

        torch casts all state to the parameter's dtype, which would cut fp32 momentum to bf16.
        """
        self._adopt()
        handle = self.register_load_state_dict_pre_hook(_hold)  # after the user's own hooks
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"methods": self.methods, "anchor": self.anchor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "methods" not in state:  # from load_state_dict; from pickle and deepcopy it is there
            self._check_loaded(state["param_groups"])
            for p, loaded in state["state"].items():
                state["state"][p] = self._release(p, loaded)
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it; groups keep the keys they had
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def _check_loaded(self, groups: list[dict[str, Any]]) -> None:
        for j, (ours, theirs) in enumerate(zip(self.param_groups, groups, strict=True)):
            if theirs.get("method") != ours["method"]:
                raise ValueError(
                    f"group {j} runs {ours['method']!r}, but the state to load was written by "
                    f"{theirs.get('method') or 'another optimizer'!r}: build the optimizer with "
                    "the same methods in the same order"
                )

    def _release(self, p: Any, loaded: dict[str, Any]) -> State:
        ours = self.state.get(p, {})
        if missing := sorted(set(ours) - set(loaded)):
            why = (
                "it was written by another method"
                if loaded
                else "parameters were replaced after the optimizer was built, so call its "
                "state_dict() once before loading"
            )
            raise ValueError(
                f"the state to load has no {', '.join(missing)} for a parameter of shape "
                f"{times(p.shape)}: {why}"
            )
        return {
            name: self.anchor.place(v.tensor, p) if name == "z0" else _cast(v, ours.get(name), p)
            for name, v in loaded.items()
        }

    # -- which point the parameters hold ------------------------------------------------------

    def train(self) -> None:
        """Parameters hold y, where gradients are taken."""
        self._switch(True)

    def eval(self) -> None:
        """Parameters hold x, the method's output. step() needs train() again."""
        self._switch(False)

    @torch.no_grad()
    def _switch(self, train: bool) -> None:
        for group in self.param_groups:
            method = self.methods[group["method"]]
            if not method.keeps_x or group["train_mode"] == train:
                continue
            for p in group["params"]:
                if p.requires_grad or p in self.state:
                    _swap(p, self._current(p, method), train)
            group["train_mode"] = train


def _swap(p: Tensor, s: State, train: bool) -> None:
    """Exchange y in the parameter with x in the state, bit by bit.

    Equal dtypes trade places, so that in eval mode the key "x" holds y. A 16-bit y waits in "y".
    """
    if "y" in s:
        if not train:
            s["y"].copy_(p)
        p.copy_(s["y"] if train else s["x"])
    else:
        sharded.exchange(p, s["x"])


class _Held:
    """A tensor that torch's load_state_dict passes on without casting it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _hold(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    def hold(v: Any) -> Any:
        return _Held(v) if isinstance(v, Tensor) else v

    state = {k: {n: hold(v) for n, v in s.items()} for k, s in state_dict["state"].items()}
    return state_dict | {"state": state}


def _cast(v: Any, ours: Tensor | None, p: Tensor) -> Any:
    """A loaded value as this optimizer keeps it; a copy, for the saved one may still be in use."""
    if not isinstance(v, _Held):
        return v
    if ours is None:
        return v.tensor.detach().to(p.device, copy=True)
    return v.tensor.detach().to(ours.device, ours.dtype, copy=True)


def _label(group: dict[str, Any], j: int) -> str:
    names = group.get("param_names")
    return str(names[j]) if names else f"a parameter of shape {times(group['params'][j].shape)}"
