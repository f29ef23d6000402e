"""The fp32 step of 16-bit parameters under a wrapper.

During the base optimizer's step, fp32 copies replace the 16-bit parameters in its groups and state.
Neither its update nor its moments are rounded: the only rounding is the one into the parameter.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from sodaopt.backends import PLAIN, not_compiled
from sodaopt.core.optimizer import SODA
from sodaopt.parallel import sharded
from sodaopt.rounding import HALVES


class Fp32Step:
    """Steps a base optimizer on fp32 copies of its 16-bit parameters.

    wrapper: the wrapper's class name, for messages.
    prefix: the prefix of the wrapper's own keys in the state.
    """

    def __init__(self, base: Optimizer, wrapper: str, prefix: str) -> None:
        self.base, self.wrapper, self.prefix = base, wrapper, prefix
        self.kept: Any = WeakTensorKeyDictionary()

    def copies(self, params: list[Tensor], points: list[Tensor]) -> list[Any]:
        """Make a copy of each 16-bit parameter at its fp32 point, with its gradient in fp32.

        The copies are the same objects at each step, because bases remember them.
        """
        grads: list[Any] = [p.grad for p in params]
        return self._copies(params, points, fp32_copies(grads))

    def release(self, params: list[Tensor]) -> None:
        """Take the memory of the copies away until the next step."""
        empty = {
            d: torch.empty(0, dtype=torch.float32, device=d) for d in {p.device for p in params}
        }
        for p in params:
            made: Any = self.kept.get(p)
            if made is not None:
                made.grad = None
                made.__dict__.pop("fp32_copy_of", None)
                sharded.refill(made, empty[p.device])

    @not_compiled  # torch.compile cannot trace the attributes of a tensor
    def _copies(self, *columns: list[Tensor]) -> list[Any]:
        return [self._copy(*one) for one in zip(*columns, strict=True)]

    def _copy(self, p: Tensor, x: Tensor, grad: Tensor) -> Any:
        made: Any = self.kept.get(p)
        if made is None:
            made = self.kept[p] = nn.Parameter(sharded.like(x, p), p.requires_grad)
            for name, attribute in p.__dict__.items():
                made.__dict__.setdefault(name, attribute)
        else:
            sharded.refill(made, x)
        made.grad, made.fp32_copy_of = grad, p
        return made

    @contextmanager
    def replaced(
        self, params: list[Tensor], copies: list[Any], points: list[Tensor]
    ) -> Iterator[None]:
        """Replace the parameters by their copies in the base's groups and state."""
        groups = [(group, group["params"]) for group in self.base.param_groups]
        states, versions = _states(self.base), [sharded.local(p)._version for p in params]
        by_id = dict(zip(map(id, params), copies, strict=True))
        try:
            for state in states:
                _rename(state, params, copies)
            for group, its in groups:
                group["params"] = [by_id.get(id(p), p) for p in its]
            yield
        finally:
            for group, its in groups:
                group["params"] = its
            for state in states:
                _rename(state, copies, params)
        if [sharded.local(p)._version for p in params] != versions:
            name = type(self.base).__name__
            raise RuntimeError(
                f"{name} moved a 16-bit parameter instead of its fp32 copy, because it keeps "
                f"parameters outside its param_groups: pass the wrapped optimizer to {name}, "
                f"such as {self.wrapper}.of(torch.optim.AdamW) if it takes a class"
            )
        read_back(copies, points)

    # -- the base optimizer's state -----------------------------------------------------------

    def _needs_fp32_state(self, p: Tensor) -> bool:
        """Whether the base's state of p must be cast to fp32. SODA's own state already is.

        An empty parameter has no fp32 copy: the base steps it as it is.
        """
        return p.dtype in HALVES and p.numel() > 0 and not isinstance(self.base, SODA)

    def widen(self, p: Tensor) -> None:
        """Cast the base's 16-bit state of p to fp32.

        If a part of the state is fp32, the base chose 16 bits for the rest, and nothing is cast.
        """
        state = self.base.state.get(p)
        if isinstance(state, dict) and self._needs_fp32_state(p):
            theirs = {k: v for k, v in state.items() if not str(k).startswith(self.prefix)}
            floats = [t for t in _tensors(theirs) if t.numel() > 1 and t.is_floating_point()]
            if all(t.dtype in HALVES for t in floats):
                state.update(_map(_fp32, theirs))

    def restore(self, p: Tensor, saved: Any) -> None:
        """Undo torch's cast of loaded state to 16 bits, given the state as it was saved."""
        state = self.base.state.get(p)
        if not (self._needs_fp32_state(p) and isinstance(state, dict) and isinstance(saved, dict)):
            return

        def uncast(t: Tensor) -> Tensor:
            is_cast = t.is_floating_point() and t.dtype != p.dtype
            return t.detach().to(p.device, torch.float32 if is_cast else t.dtype, copy=True)

        for key in state.keys() & saved.keys() - {"step"}:  # torch does not cast this one
            state[key] = _map(uncast, saved[key])
        self.widen(p)


def fp32_copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copy 16-bit tensors to fp32, contiguous plain ones in a single block of memory.

    Other tensors are returned as they are. The allocator tends to return the same block at each
    step, so the kernels' tables stay valid.
    """
    is_simple = [
        t.dtype in HALVES and type(t) in PLAIN and t.is_contiguous() and t.numel() % 4 == 0
        for t in tensors
    ]
    block = [t for t, simple in zip(tensors, is_simple, strict=True) if simple]
    if len(block) < 2 or len({t.device for t in block}) > 1 or torch.compiler.is_compiling():
        return [_fp32(t) for t in tensors]
    memory = torch.empty(sum(t.numel() for t in block), dtype=torch.float32, device=block[0].device)
    pieces = torch.split(memory, [t.numel() for t in block])
    copies = [piece.view(t.shape) for piece, t in zip(pieces, block, strict=True)]
    torch._foreach_copy_(copies, block)
    in_block = iter(copies)
    return [next(in_block) if s else _fp32(t) for t, s in zip(tensors, is_simple, strict=True)]


def _fp32(t: Tensor) -> Tensor:
    return t.float() if t.dtype in HALVES else t


def _states(base: Optimizer) -> list[Any]:
    """The base's state, and the state of optimizers inside it that share its groups."""
    groups = set(map(id, base.param_groups))
    inside = [v for v in vars(base).values() if isinstance(v, Optimizer)]
    shared = [o.state for o in inside if groups & set(map(id, o.param_groups))]
    return [base.state, *(state for state in shared if state is not base.state)]


def _rename(state: Any, old: Iterable[Tensor], new: Iterable[Tensor]) -> None:
    for a, b in zip(old, new, strict=True):
        if a in state:
            state[b] = state.pop(a)


def read_back(copies: list[Any], points: list[Tensor]) -> None:
    """Copy the stepped values to the points, if the base has replaced a copy's memory."""
    for made, x in zip(copies, points, strict=True):
        stepped = sharded.local(made)
        if stepped.data_ptr() != x.data_ptr():  # some bases set p.data
            x.copy_(stepped)
            sharded.refill(made, x)


# -- state in nested containers -------------------------------------------------------------------


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _map(lambda t: found.append(t) or t, tree)  # type: ignore[func-returns-value]
    return found


def _map(f: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply f to each tensor in nested dicts, lists, tuples and deques, of any subclass."""
    if isinstance(tree, Tensor):
        return f(tree)
    if isinstance(tree, dict):
        made = copy.copy(tree)  # a defaultdict keeps its default
        made.update({k: _map(f, v) for k, v in tree.items()})
        return made
    if isinstance(tree, deque):
        return type(tree)((_map(f, v) for v in tree), tree.maxlen)
    if isinstance(tree, list | tuple):
        parts = [_map(f, v) for v in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree
