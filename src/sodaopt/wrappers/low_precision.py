"""The fp32 step of 16-bit parameters under a wrapper.

During the base optimizer's step, fp32 copies replace the 16-bit parameters in its groups and state.
Neither its update nor its moments are rounded: the only rounding is the one into the parameter.
"""

from __future__ import annotations

from collections import OrderedDict, deque
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
        self.copies: Any = WeakTensorKeyDictionary()
        self.trusted = False  # the base was seen to move the copy

    @not_compiled
    def step(self, params: list[Tensor], points: list[Tensor]) -> None:
        """Step the base with an fp32 copy at each point instead of the parameter.

        points: this rank's shards in fp32. They hold the stepped values afterwards.
        """
        with _own_hooks(self.base, params, points):
            copies = self._copies(params, points)
            witnesses = [] if self.trusted else _witnesses(params, copies)
            try:
                with _replaced(self.base, params, copies):
                    self.base.step()
                    for x, copy in zip(points, copies, strict=True):
                        stepped = sharded.local(copy)
                        if stepped.data_ptr() != x.data_ptr():  # some bases set p.data
                            x.copy_(stepped)
            finally:
                for copy in copies:  # the copies stay known to the base, but hold no memory
                    copy.grad = None
                    copy.__dict__.pop("fp32_copy_of", None)
                    sharded.refill(copy, points[0].new_empty(0))
            self._check_witnesses(witnesses)

    def _copies(self, params: list[Tensor], points: list[Tensor]) -> list[Any]:
        """The fp32 copies. They are the same objects at each step, because bases remember them."""
        grads: list[Any] = [p.grad for p in params]
        copies = []
        for p, x, grad in zip(params, points, fp32_copies(grads), strict=True):
            copy: Any = self.copies.get(p)
            if copy is None:
                copy = self.copies[p] = nn.Parameter(sharded.like(x, p), p.requires_grad)
                for name, attribute in p.__dict__.items():
                    copy.__dict__.setdefault(name, attribute)
            else:
                sharded.refill(copy, x)
            copy.grad, copy.fp32_copy_of = grad, p
            copies.append(copy)
        return copies

    def _check_witnesses(self, witnesses: list[tuple[Tensor, ...]]) -> None:
        for p, copy, p_before, copy_before in witnesses:
            if not _same_bits(p, p_before):
                name = type(self.base).__name__
                raise RuntimeError(
                    f"{name} moved a 16-bit parameter instead of its fp32 copy, because it keeps "
                    f"parameters outside its param_groups: pass the wrapped optimizer to {name}, "
                    f"such as {self.wrapper}.of(torch.optim.AdamW) if it takes a class"
                )
            self.trusted |= not _same_bits(copy, copy_before)

    # -- the base optimizer's state -----------------------------------------------------------

    def _has_fp32_state(self, p: Tensor) -> bool:
        """Whether the base's state of p must be cast to fp32. SODA's own state already is.

        An empty parameter has no fp32 copy: the base steps it as it is.
        """
        return p.dtype in HALVES and p.numel() > 0 and not isinstance(self.base, SODA)

    def widen(self, p: Tensor) -> None:
        """Cast the base's 16-bit state of p to fp32.

        Nothing is cast if a part of it is fp32: then the base has chosen 16 bits for the rest.
        """
        state = self.base.state.get(p)
        if isinstance(state, dict) and self._has_fp32_state(p):
            theirs = {k: v for k, v in state.items() if not str(k).startswith(self.prefix)}
            floats = [t for t in _tensors(theirs) if t.numel() > 1 and t.is_floating_point()]
            if all(t.dtype in HALVES for t in floats):
                state.update(_map(lambda t: t.float() if t.dtype in HALVES else t, theirs))

    def restore(self, p: Tensor, saved: Any) -> None:
        """Undo torch's cast of loaded state to 16 bits, given the state as it was saved."""
        state = self.base.state.get(p)
        if self._has_fp32_state(p) and isinstance(state, dict) and isinstance(saved, dict):
            for key in state.keys() & saved.keys():
                state[key] = _uncast(state[key], saved[key])
            self.widen(p)


def fp32_copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copy 16-bit tensors to fp32, contiguous plain ones in a single block of memory.

    The allocator tends to return the same block at each step, so the kernels' tables stay valid.
    """
    is_simple = [type(t) in PLAIN and t.is_contiguous() and t.numel() % 4 == 0 for t in tensors]
    block = [t for t, simple in zip(tensors, is_simple, strict=True) if simple]
    if len(block) < 2 or len({t.device for t in block}) > 1 or torch.compiler.is_compiling():
        return [t.float() for t in tensors]
    memory = torch.empty(sum(t.numel() for t in block), dtype=torch.float32, device=block[0].device)
    pieces = torch.split(memory, [t.numel() for t in block])
    copies = [piece.view(t.shape) for piece, t in zip(pieces, block, strict=True)]
    torch._foreach_copy_(copies, block)
    in_block = iter(copies)
    return [next(in_block) if s else t.float() for t, s in zip(tensors, is_simple, strict=True)]


@contextmanager
def _replaced(base: Optimizer, params: list[Tensor], copies: list[Tensor]) -> Iterator[None]:
    """Replace the parameters by their copies in the base's groups and state."""
    states, lists = _states(base), [(group, group["params"]) for group in base.param_groups]
    by_id = dict(zip(map(id, params), copies, strict=True))
    try:
        for state in states:
            _rename(state, params, copies)
        for group, its in lists:
            group["params"] = [by_id.get(id(p), p) for p in its]
        yield
    finally:
        for group, its in lists:
            group["params"] = its
        for state in states:
            _rename(state, copies, params)


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


@contextmanager
def _own_hooks(base: Optimizer, params: list[Tensor], points: list[Tensor]) -> Iterator[None]:
    """Run the base's step hooks with the 16-bit parameters, which they know.

    Post hooks see the parameters at the stepped points. Their changes are copied to the points.
    """
    tables = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    before, after = (getattr(base, name, {}) for name in tables)
    if not (before or after):
        yield
        return
    for hook in before.values():
        hook(base, (), {})
    for name in tables:
        setattr(base, name, OrderedDict())
    try:
        yield
    finally:
        for name, table in zip(tables, (before, after), strict=True):
            setattr(base, name, table)
    if not after:
        return
    shards = [sharded.local(p.detach()) for p in params]
    for shard, x in zip(shards, points, strict=True):
        shard.copy_(x)
    rounded = [shard.clone() for shard in shards]
    for hook in after.values():
        hook(base, (), {})
    for shard, old, x in zip(shards, rounded, points, strict=True):
        x.copy_(torch.where(shard == old, x, shard.float()))


def _witnesses(params: list[Tensor], copies: list[Any]) -> list[tuple[Tensor, ...]]:
    """The smallest eight parameters with their values: they show which of the two a base moves."""
    both = zip(params, copies, strict=True)
    found = [(sharded.local(p.detach()), sharded.local(c.detach())) for p, c in both]
    if any(p.is_meta for p, _ in found) or (
        any(p.is_cuda for p, _ in found) and torch.cuda.is_current_stream_capturing()
    ):
        return []
    found = sorted((pair for pair in found if pair[0].numel()), key=lambda pair: pair[0].numel())
    return [(p, copy, p.clone(), copy.clone()) for p, copy in found[:8]]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit by bit, so that NaN equals NaN."""
    bits = {2: torch.int16, 4: torch.int32}[a.itemsize]
    return torch.equal(a.view(bits), b.view(bits))


# -- state in nested containers -------------------------------------------------------------------


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _map(lambda t: found.append(t) or t, tree)  # type: ignore[func-returns-value]
    return found


def _map(f: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply f to each tensor in nested dicts, lists, tuples and deques."""
    if isinstance(tree, Tensor):
        return f(tree)
    if isinstance(tree, dict):
        return type(tree)((k, _map(f, v)) for k, v in tree.items())
    if isinstance(tree, deque):
        return deque((_map(f, v) for v in tree), tree.maxlen)
    if type(tree) in (list, tuple):
        return type(tree)(_map(f, v) for v in tree)
    return tree


def _uncast(loaded: Any, saved: Any) -> Any:
    """The loaded state with each tensor that torch has cast to 16 bits as it was saved, in fp32."""
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        if loaded.dtype == saved.dtype:
            return loaded
        dtype = torch.float32 if saved.is_floating_point() else saved.dtype
        return saved.detach().to(loaded.device, dtype, copy=True)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return {k: _uncast(v, saved[k]) if k in saved else v for k, v in loaded.items()}
    if isinstance(saved, list | tuple | deque) and len(loaded) == len(saved):
        parts = [_uncast(a, b) for a, b in zip(loaded, saved, strict=True)]
        return deque(parts, saved.maxlen) if isinstance(saved, deque) else type(saved)(parts)
    return loaded
