"""16-bit parameters under a wrapper: the base steps fp32 twins that stand in their places.

So nothing is rounded on the way to the one rounding into the parameter: neither the base's update
nor what it keeps, which is fp32 too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from sodaopt._bare import is_bare
from sodaopt.core.optimizer import SODA
from sodaopt.parallel import sharded
from sodaopt.rounding import HALVES


class Twins:
    """Those of one base's parameters; wrapper: the name of what is around it, and with what its own
    keys in the state begin."""

    def __init__(self, base: Optimizer, wrapper: str, prefix: str) -> None:
        self.base, self.wrapper, self.prefix = base, wrapper, prefix
        self.made: Any = WeakTensorKeyDictionary()
        self.trusted = False  # the base was seen to move what stands in a parameter's place

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def step(self, points: list[tuple[Tensor, Tensor]]) -> None:
        """The base's step, with a twin at x in the place of p for each of these (p, x), x being
        this rank's part of it; x is where the base has stepped to."""
        base, states = self.base, _states(self.base)
        params, xs = [p for p, _ in points], [x for _, x in points]
        lists = [(group, group["params"]) for group in base.param_groups]
        with _hooks(base, points):
            twins = self._in_place_of(params, xs)
            witnesses = [] if self.trusted else _witnesses(params, twins)
            places = dict(zip(map(id, params), twins, strict=True))
            try:
                for state in states:
                    _rename(state, params, twins)
                for group, its in lists:
                    group["params"] = [places.get(id(p), p) for p in its]
                base.step()
                for x, twin in zip(xs, twins, strict=True):
                    stepped = sharded.local(twin)
                    if stepped.data_ptr() != x.data_ptr():  # some bases hang other memory there
                        x.copy_(stepped)
            finally:
                for group, its in lists:
                    group["params"] = its
                for state in states:
                    _rename(state, twins, params)
                nothing = xs[0].new_empty(0)
                for twin in twins:
                    twin.grad = None
                    twin.__dict__.pop("stands_for", None)
                    sharded.refill(twin, nothing)
            self._check_witnesses(witnesses)

    def _in_place_of(self, params: list[Tensor], xs: list[Tensor]) -> list[Any]:
        """For each 16-bit parameter one in fp32 with the values x, and else as it is: the same
        object at each step, for bases that remember it."""
        grads: list[Any] = [p.grad for p in params]
        twins = []
        for p, x, grad in zip(params, xs, in_fp32(grads), strict=True):
            twin: Any = self.made.get(p)
            if twin is None:
                twin = self.made[p] = nn.Parameter(sharded.like(x, p), p.requires_grad)
                for name, value in p.__dict__.items():
                    twin.__dict__.setdefault(name, value)
            else:
                sharded.refill(twin, x)
            twin.grad, twin.stands_for = grad, p
            twins.append(twin)
        return twins

    def _check_witnesses(self, witnesses: list[tuple[Tensor, ...]]) -> None:
        for p, twin, p_before, twin_before in witnesses:
            if not _is_same(p, p_before):
                name = type(self.base).__name__
                raise RuntimeError(
                    f"{name} moved a 16-bit parameter itself and not the fp32 one in its place, "
                    f"for it keeps parameters outside its param_groups: give {name} the wrapped "
                    f"optimizer, {self.wrapper}.of(torch.optim.AdamW) where it takes a class"
                )
            self.trusted |= not _is_same(twin, twin_before)

    # -- the base's state ---------------------------------------------------------------------

    def has_wide_state(self, p: Tensor) -> bool:
        """Whether the base's state of p is to be fp32 though p is not. (The template's is, where
        it should be.)"""
        return p.dtype in HALVES and not isinstance(self.base, SODA)

    def widen(self, p: Tensor) -> None:
        """What the bare base keeps of p in 16 bits. Where some of it is fp32 the rest is 16 bits by
        the base's own choice."""
        state = self.base.state.get(p)
        if isinstance(state, dict) and self.has_wide_state(p):
            theirs = {k: v for k, v in state.items() if not str(k).startswith(self.prefix)}
            tensors = [t for t in tree_leaves(theirs) if isinstance(t, Tensor) and t.numel() > 1]
            if all(t.dtype in HALVES for t in tensors if t.is_floating_point()):
                state.update(_widened(theirs))

    def restore(self, p: Tensor, saved: Any) -> None:
        """After the base has loaded what was saved of p: torch has cast it to 16 bits."""
        state = self.base.state.get(p)
        if self.has_wide_state(p) and isinstance(state, dict) and isinstance(saved, dict):
            state.update(_as_saved(state, saved))
            self.widen(p)


def in_fp32(parts: list[Tensor]) -> list[Tensor]:
    """Copies, in one piece of memory that an allocator tends to have in the same place at each
    step. Those that cannot be in a row there, each at a multiple of 16 bytes, are apart."""
    one = len({t.device for t in parts}) == 1 and not torch.compiler.is_compiling()
    fit = [one and t.layout == torch.strided and is_bare(t) and t.numel() % 4 == 0 for t in parts]
    row = list(compress(parts, fit))
    out: list[Tensor] = []
    if row:
        n = sum(t.numel() for t in row)
        room = torch.empty(n, dtype=torch.float32, device=row[0].device)
        out = list(_unflatten_dense_tensors(room, row))  # type: ignore[no-untyped-call]
        torch._foreach_copy_(out, row)
    copies = iter(out)
    return [next(copies) if fits else t.float() for t, fits in zip(parts, fit, strict=True)]


def _states(base: Optimizer) -> list[Any]:
    """The base's state, and that of optimizers inside it that share its groups."""
    groups = set(map(id, base.param_groups))
    inside = [v for v in vars(base).values() if isinstance(v, Optimizer)]
    shared = [o.state for o in inside if groups & set(map(id, o.param_groups))]
    return [base.state, *(state for state in shared if state is not base.state)]


def _rename(state: Any, old: Iterable[Tensor], new: Iterable[Tensor]) -> None:
    for a, b in zip(old, new, strict=True):
        if a in state:
            state[b] = state.pop(a)


@contextmanager
def _hooks(base: Optimizer, points: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """The base's own hooks, which know the parameters and nothing of what stands in their place:
    run before, and after with the parameters where the base has stepped to. What they change there
    is taken over into the points."""
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
    parts = [sharded.local(p.detach()) for p, _ in points]
    for part, (_, x) in zip(parts, points, strict=True):
        part.copy_(x)
    rounded = [part.clone() for part in parts]
    for hook in after.values():
        hook(base, (), {})
    for part, old, (_, x) in zip(parts, rounded, points, strict=True):
        x.copy_(torch.where(part == old, x, part.float()))


def _witnesses(params: list[Tensor], twins: list[Any]) -> list[tuple[Tensor, ...]]:
    """The smallest few with copies: enough to see which of the two a base moves."""
    both = zip(params, twins, strict=True)
    found = [(sharded.local(p.detach()), sharded.local(t.detach())) for p, t in both]
    if any(p.is_meta for p, _ in found) or (
        any(p.is_cuda for p, _ in found) and torch.cuda.is_current_stream_capturing()
    ):
        return []
    found = sorted((pair for pair in found if pair[0].numel()), key=lambda pair: pair[0].numel())
    return [(p, twin, p.clone(), twin.clone()) for p, twin in found[:8]]


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit, so that NaN is NaN."""
    bits = {2: torch.int16, 4: torch.int32}[a.itemsize]
    return torch.equal(a.view(bits), b.view(bits))


def _widened(state: Any) -> Any:
    """State with fp32 for each tensor of 16 bits."""
    return tree_map_only(Tensor, lambda t: t.float() if t.dtype in HALVES else t, state)


def _as_saved(loaded: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Loaded state with the saved value of each tensor that torch has cast to 16 bits: as it was,
    but that what floats is fp32."""

    def leaf(t: Any, saved: Any) -> Any:
        if not (isinstance(t, Tensor) and isinstance(saved, Tensor)) or t.dtype == saved.dtype:
            return t
        dtype = torch.float32 if saved.is_floating_point() else saved.dtype
        return saved.detach().to(t.device, dtype, copy=True)

    found = {}
    for key in loaded.keys() & saved.keys():
        leaves, (before, form) = tree_leaves(loaded[key]), tree_flatten(saved[key])
        if len(leaves) == len(before):  # in the saved form: torch forgets how long a deque may be
            found[key] = tree_unflatten(list(map(leaf, leaves, before)), form)
    return found
