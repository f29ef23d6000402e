"""An optimizer that shares the groups, the state and the defaults of its base optimizer.

A scheduler or framework that changes the wrapper's groups changes the base's. The wrapper keeps its
own numbers in the groups and its own tensors in the base's state, under keys with the wrapper's
prefix. One flat state dict holds everything, and a checkpoint of the bare base loads too.
"""

from collections import OrderedDict
from contextlib import ExitStack
from operator import attrgetter
from typing import Any, ClassVar, Self, TypeAlias

from torch import Tensor, no_grad
from torch.optim import Optimizer

from sodaopt import schedules
from sodaopt.core.method import without_addresses
from sodaopt.parallel import sharded
from sodaopt.wrappers import refusals
from sodaopt.wrappers.class_form import class_form
from sodaopt.wrappers.known_bases import check_base
from sodaopt.wrappers.low_precision import Fp32Step

Group: TypeAlias = dict[str, Any]


def _of_base(name: str) -> Any:
    """Return a property that reads and writes this attribute of the base."""
    return property(attrgetter(f"base.{name}"), lambda self, v: setattr(self.base, name, v))


def _is_unstepped(state: Any) -> bool:
    """Whether a base has made this state of a parameter without a step."""
    return isinstance(state, dict) and "step" in state and float(state["step"]) == 0


class LiveOptimizer(Optimizer):
    """The groups, state, checkpoints and pickles of a wrapper. `Wrapper` adds the step."""

    _prefix: ClassVar[str]
    base: Optimizer

    def __init_subclass__(cls) -> None:
        if "_prefix" in vars(cls):
            refusals.PREFIXES[cls._prefix] = cls.__name__

    def __init__(self, base: Optimizer) -> None:
        check_base(base, type(self).__name__)
        self.base = base
        self._connect()
        for keys in (base.defaults, *base.param_groups):  # defaults are for groups added later
            keys.update(self._group_keys() | keys)
        self._check_groups(base.param_groups)
        self._complete()
        if any(base.state.get(p) for p in self._fp32_step.params()):
            self.load_state_dict(self.state_dict())  # the bare base's 16-bit state becomes fp32

    def _connect(self) -> None:
        """Make the parts that are not copied or pickled."""
        super().__setstate__({})  # makes torch's tables of hooks, and lets step() run them
        # The wrapper shares the base's tables of step hooks, whose names are private in torch. If
        # torch removes them, drop these lines and the same tables in `_without_hooks` (base.py).
        # The base's hooks then run inside the wrapper's step, and see fp32 copies.
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(self, name, vars(self.base).setdefault(name, OrderedDict()))
        self._fp32_step = Fp32Step(self.base, type(self).__name__)
        self._provisional = self._unstepped()
        self._describe()
        refusals.WRAPPERS[id(self.base)] = self

    _output: ClassVar[str | None] = None
    """The name of the tensor that holds the method's output, if the parameter does not."""

    def _coef(self) -> schedules.Coef:
        """The schedule of lam. Its memory is in the groups."""
        return 0.0

    def _group_keys(self) -> Group:
        """The wrapper's group keys with their initial values, which are plain numbers."""
        mode = {"train_mode": True} if self._output else {}
        return self._prefixed({"k": 0, **schedules.start(self._coef()), **mode})

    def _check_groups(self, groups: list[Group]) -> None:
        """Raise if these groups, live or to be loaded, must not be wrapped.

        A subclass may set keys in them that do not come from a checkpoint.
        """

    def _own(self, p: Tensor) -> dict[str, Tensor]:
        """The wrapper's tensors of p, without the prefix.

        This never creates an entry of the state, because many bases initialise a parameter only if
        its state is empty.
        """
        return {} if p in self._provisional else self._split(self.base.state.get(p))[1]

    def _split(self, state: Any) -> tuple[Any, dict[str, Tensor]]:
        """The base's part of a parameter's state, and the wrapper's tensors without the prefix."""
        if not isinstance(state, dict):  # some bases keep another object
            return state, {}
        own = {key: t for key, t in state.items() if str(key).startswith(self._prefix)}
        theirs = {key: v for key, v in state.items() if key not in own}
        return theirs, {key.removeprefix(self._prefix): t for key, t in own.items()}

    def _prefixed(self, own: dict[str, Any]) -> dict[str, Any]:
        return {self._prefix + name: v for name, v in own.items()}

    # -- shared with the base -----------------------------------------------------------------

    param_groups: Any = _of_base("param_groups")
    state: Any = _of_base("state")
    defaults: Any = _of_base("defaults")

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to the base."""
        self.base.add_param_group(param_group)
        with ExitStack() as undo:
            undo.callback(self.base.param_groups.pop)
            self._check_groups(self.base.param_groups)
            undo.pop_all()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the base's parameters."""
        self.base.zero_grad(set_to_none=set_to_none)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base!r})"

    # -- saving and loading -------------------------------------------------------------------
    # These methods run the user's hooks as torch.optim.Optimizer does, whose tables of hooks have
    # private names. If torch renames the tables, only these loops change.

    def state_dict(self) -> dict[str, Any]:
        """Return the base's state dict with the wrapper's tensors and numbers in it."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state_dict = self.base.state_dict()  # SODA makes the state of new parameters here
        self._complete()
        state = dict(state_dict["state"])
        for n, p in self._numbered(state_dict):
            if own := self._split(self.base.state.get(p))[1]:
                state[n] = state[n] | self._prefixed(self._saved(p, own))
        state_dict = state_dict | {"state": state}
        for after in self._optimizer_state_dict_post_hooks.values():
            state_dict = after(self, state_dict) or state_dict
        return state_dict

    @no_grad()
    def _complete(self) -> None:
        """Add the wrapper's tensors to parameters with a state of the base, but without a step.

        SODA makes its state before the first step. torch.distributed.checkpoint then takes no step
        at lr = 0, and loads only the keys that the state has. The tensors are provisional: the
        first step of the parameter makes them again.
        """
        for p in (p for group in self.base.param_groups for p in self._members(group)):
            state: Any = self.base.state.get(p)
            if not self._split(state)[1] and _is_unstepped(state):
                state.update(self._prefixed(self._first(p)))
        self._provisional = self._unstepped()

    def _unstepped(self) -> set[Any]:
        """The parameters with tensors of the wrapper that the base has not stepped yet."""
        return {p for p, s in self.base.state.items() if self._split(s)[1] and _is_unstepped(s)}

    def _describe(self) -> None:
        """Give SODA the wrapper's arguments as text, because its ranks compare them."""
        others = ("base", "only", "anchor", "step")  # a scheduler replaces step
        own = {k: v for k, v in vars(self).items() if k not in others and not k.startswith("_")}
        if sharing := getattr(self.base, "_sharing", None):
            sharing.wrapper = without_addresses(f"{type(self).__name__} with {own}")

    def _members(self, group: Group) -> list[Tensor]:
        """Return the parameters of a group for which the wrapper keeps tensors."""
        params: list[Tensor] = group["params"]
        return params

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the base's state, and the wrapper's tensors in the dtypes of this wrapper."""
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        refusals.check_writer(self, state_dict["param_groups"])
        # everything is checked and copied before anything is changed
        groups = [self._group_keys() | g for g in state_dict["param_groups"]]
        self._check_groups(groups)
        state, restored = dict(state_dict["state"]), {}
        for n, p in self._numbered(state_dict):
            theirs, own = self._split(state.get(n))
            refusals.check_moments(theirs, p)
            if own:
                state[n] = theirs
                restored[p] = self._prefixed(self._restored(p, own))
        with ExitStack() as undo:
            undo.callback(self.base.state.update, dict(self.base.state))
            # SODA refuses a state dict that lacks a tensor of its state, such as the wrapper's
            self.base.state.update({p: self._split(s)[0] for p, s in self.base.state.items()})
            self._fp32_step.load_base({**state_dict, "state": state, "param_groups": groups})
            undo.pop_all()
        for p, own in restored.items():
            self.base.state[p].update(own)
        self._provisional = self._unstepped()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _numbered(self, state_dict: dict[str, Any]) -> list[tuple[Any, Tensor]]:
        """Return (number in the state dict, parameter) of each parameter."""
        numbers = [n for g in state_dict["param_groups"] for n in g["params"]]
        params = [p for g in self.base.param_groups for p in g["params"]]
        return list(zip(numbers, params, strict=True))

    def _first(self, p: Tensor) -> dict[str, Tensor]:
        """The wrapper's tensors of p before its first step."""
        raise NotImplementedError

    def _restored(self, p: Tensor, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the wrapper's tensors of p from loaded ones, in the dtypes of this wrapper.

        own: the loaded tensors, without the prefix.
        """
        refusals.check_shapes(own, p)
        return {name: t.copy_(sharded.place(own[name], t)) for name, t in self._first(p).items()}

    def _saved(self, p: Tensor, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """The wrapper's tensors of p as a checkpoint stores them."""
        return own

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if not k.startswith("_") and k != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._connect()

    @classmethod
    def of(cls, base_class: type[Optimizer], **options: Any) -> type[Self]:
        """Return a class that builds an optimizer of base_class and wraps it.

        Frameworks that build the optimizer need a class: `SODAWrapper.of(torch.optim.AdamW)`. The
        default weight decay of base_class is replaced by 0.

        base_class: a class of optimizers.
        options: keyword arguments of the wrapper. A list or a set becomes a tuple. Any other option
        must be hashable.
        """
        given = {k: tuple(v) if isinstance(v, list | set) else v for k, v in options.items()}
        form: Any = cls, base_class, tuple(sorted(given.items()))
        return class_form(*form)  # type: ignore[no-any-return]
