"""SODA's groups and the state of its parameters: making, saving and loading, train and eval."""

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sodaopt._errors import check_shape, times
from sodaopt.anchors import Anchor
from sodaopt.core.diagnostics import Watched
from sodaopt.core.method import Method, named
from sodaopt.core.validation import as_list, check_capturable, check_keys, check_lr, check_parameter
from sodaopt.geometry import State
from sodaopt.parallel import sharded


class StatefulOptimizer(Watched):
    """An optimizer whose groups name their method, and whose state follows from the method.

    methods: the methods by the names that the groups hold.
    """

    methods: dict[str, Method]
    anchor: Anchor
    capturable: bool = False
    _repeatable: Any = None

    # -- groups -------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, also during a run. It may have its own `method`, and its own `lr` or an
        `lr_factor` of the optimizer's lr."""
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group is a dict, got {type(param_group).__name__}")
        group, where = dict(param_group), f"group {len(self.param_groups)}"
        factor = group.pop("lr_factor", 1.0)
        if group.get("lr") is not None and factor != 1:
            raise ValueError(f"{where} has both an lr and an lr_factor: give one of them")
        for name in ("lr", "method"):
            if group.get(name) is None:
                group[name] = self.defaults[name]
            if group[name] is None:
                raise ValueError(
                    f"{where} has no {name}: give SODA a {name} for all groups, or one to the group"
                )
        group["lr"] = group["lr"] * factor if factor != 1 else group["lr"]
        group["method"] = self._register(group["method"])
        method = self.methods[group["method"]]
        lr = check_lr(group["lr"], where)
        check_keys(group, method, where)
        group["settings"] = repr(method)
        group["params"] = params = as_list(group.get("params"), where)
        method.coefs(0, lr, method.advance(method.memory, 0, lr))  # raises if one is out of range
        if self.capturable:
            check_capturable(method, where)
        known = {p for g in self.param_groups for p in g["params"]}
        for j, entry in enumerate(params):
            name, p = entry if isinstance(entry, tuple) else (f"parameter {j} of {where}", entry)
            check_parameter(name, p, method, known)
            known.add(p)
        super().add_param_group(group)
        self._adopt()

    def _register(self, method: Method | str) -> str:
        """Return the name under which a group finds its method: groups hold plain values only."""
        if isinstance(method, str):
            method = self.methods.get(method) or named(method)
        if not isinstance(method, Method):
            raise TypeError(f"the method must be a Method such as zoo.adamw(), got {method!r}")
        name, n = method.name, 1
        while self.methods.setdefault(name, method) != method:
            n += 1
            name = f"{method.name}#{n}"
        return name

    # -- state --------------------------------------------------------------------------------

    def _fresh(self, p: Tensor, method: Method, first: bool = False) -> State:
        """Make the state of a parameter before its first step.

        first: that step begins now, and an anchor may check or round the weights.
        """
        y, dtype = p.detach(), torch.promote_types(p.dtype, torch.float32)
        # float64 counts beyond 2^24. On a GPU, reading the count would synchronise the device.
        numbers: Any = {"dtype": torch.float64, "device": p.device if self.capturable else "cpu"}
        s: State = {"step": torch.tensor(0.0, **numbers)}
        if method.centre == "init":
            s["z0"] = self.anchor.capture(p, first)
        if method._keeps_m:
            s["m"] = torch.zeros_like(y, dtype=dtype)
        if method._keeps_z:
            s["z"] = y.to(dtype, copy=True)
        if method._keeps_x:
            s["x"] = y.to(dtype, copy=True)
            if dtype != y.dtype:
                s["y"] = y.clone()  # eval() cannot exchange 16 bits of y with the fp32 x
        s |= {n: sharded.place(t, y) for n, t in method.geometry.state(y, dtype).items()}
        return s | {n: torch.tensor(v, **numbers) for n, v in method.memory.items()}

    def _current(self, p: Tensor, method: Method, first: bool = False) -> State:
        """Return the state of p. Until its first step, make it again from p as it is now.

        Weights may be loaded, moved or replaced by sharded ones after the constructor.
        """
        if p not in self.state:
            self._adopt()
        s: State = self.state[p]
        if not s or float(s["step"]) == 0:
            s = self.state[p] = s | self._fresh(p, method, first)
        return s

    def _adopt(self) -> None:
        """Give each trainable parameter a state, and drop the state of parameters in no group."""
        methods = {p: self.methods[g["method"]] for g in self.param_groups for p in g["params"]}
        for key, s in list(self.state.items()):
            # a look-up in the defaultdict may have stored {}
            if isinstance(key, Tensor) and (key not in methods or not s):
                del self.state[key]
        for p, method in methods.items():
            if p.requires_grad and p not in self.state:
                self.state[p] = self._fresh(p, method)

    # -- saving and loading -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return torch's flat layout: `state` by parameter number, and `param_groups`."""
        self._adopt()
        found: dict[str, Any] = super().state_dict()
        params = [p for group in self.param_groups for p in group["params"]]
        for n, p in enumerate(params):
            if "z0" in (s := found["state"].get(n, {})):
                found["state"][n] = s | {"z0": self.anchor.saved(s["z0"], p)}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict. Each tensor keeps the dtype and device that this optimizer gives it.

        torch casts all state to the parameter's dtype, which would cut fp32 momentum to bf16.
        """
        self._adopt()
        with self.register_load_state_dict_pre_hook(_shield):  # after the user's own hooks
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        own = {"methods": self.methods, "anchor": self.anchor, "capturable": self.capturable}
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "methods" not in state:  # load_state_dict calls this too, without methods
            self._check_loaded(state["param_groups"])
            _warn_of_settings(state["param_groups"])
            for p, loaded in state["state"].items():
                is_param = isinstance(p, Tensor)  # the user may store state under other keys
                state["state"][p] = self._restored(p, loaded.state) if is_param else loaded.state
        self._repeatable = None
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it, and it must not enter the groups
        for group in self.param_groups:
            group.update(self.defaults | group)
            group["settings"] = repr(self.methods[group["method"]])

    def _check_loaded(self, groups: list[dict[str, Any]]) -> None:
        """Raise if the groups to load were stepped by other methods."""
        for j, (ours, theirs) in enumerate(zip(self.param_groups, groups, strict=True)):
            # version 0.1 did not save settings
            saved = {"method": "another optimizer", "settings": ours["settings"]} | theirs
            for name in ("method", "settings"):
                if saved[name] != ours[name]:
                    raise ValueError(
                        f"group {j} runs {ours[name]!r}, but the state to load was written by "
                        f"{saved[name]!r}: build the optimizer with the settings of the "
                        "checkpoint, and its groups in the same order"
                    )

    def _restored(self, p: Any, loaded: dict[str, Any]) -> State:
        """Return the loaded state of p, with the dtypes and devices of this optimizer."""
        ours = self.state.get(p, {})
        if missing := sorted(set(ours) - set(loaded)):
            raise ValueError(
                f"the state to load has no {', '.join(missing)} for a parameter of shape "
                f"{times(p.shape)}: another method wrote it, or parameters were replaced after the "
                "optimizer was built. In that case call its state_dict() once before loading"
            )
        return {
            name: self.anchor.restore(v, p) if name == "z0" else _cast(name, v, ours.get(name), p)
            for name, v in loaded.items()
        }

    # -- which point the parameters hold ------------------------------------------------------

    @torch.no_grad()
    def _switch(self, train: bool) -> None:
        for group in self.param_groups:
            method = self.methods[group["method"]]
            if method._keeps_x and group["train_mode"] != train:
                for p in group["params"]:
                    if p.requires_grad or p in self.state:
                        _swap(p, self._current(p, method), train)
                group["train_mode"] = train


def _swap(p: Tensor, s: State, train: bool) -> None:
    """Exchange y in the parameter with x in the state, bit by bit.

    In eval mode the key "x" holds y. If the parameter has 16 bits and x is fp32, y is under "y".
    """
    if "y" in s:
        if not train:
            s["y"].copy_(p)
        p.copy_(s["y"] if train else s["x"])
    else:
        sharded.swap(p, s["x"])


def _shield(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Hide each parameter's state from torch's load_state_dict, which would cast it."""
    shielded = {k: SimpleNamespace(state=s) for k, s in state_dict["state"].items()}
    return state_dict | {"state": shielded}


def _warn_of_settings(groups: list[dict[str, Any]]) -> None:
    if not all("settings" in group for group in groups):
        warnings.warn(
            "the state to load has no settings of its method (version 0.1 did not save them): "
            "make sure that they are this optimizer's",
            stacklevel=2,
        )


def _cast(name: str, v: Any, ours: Any, p: Tensor) -> Any:
    """Copy a loaded value of p into the dtype and device of this optimizer's own.

    name: its key in the state.
    ours: this optimizer's value. If it is not a tensor, the user has put the loaded value there.
    """
    if isinstance(ours, Tensor):
        check_shape(name, getattr(v, "shape", ()), ours.shape)
        return sharded.place(v.detach(), ours).to(ours.device, ours.dtype, copy=True)
    return v.detach().to(p.device, copy=True) if isinstance(v, Tensor) else copy.deepcopy(v)
