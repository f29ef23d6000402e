"""How many bytes an optimizer keeps, by parameter and by kind of state.

    print(sodaopt.memory(model, optimizer))

Before the first step the state is predicted: a copy of the optimizer takes one step on the meta
device, where nothing is allocated. After the first step the tensors of the state are counted.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sodaopt import anchors
from sodaopt._errors import times
from sodaopt.anchors import init
from sodaopt.core.optimizer import SODA
from sodaopt.layers.table import size
from sodaopt.parallel import sharded


@dataclass(frozen=True)
class Row:
    """The bytes of one parameter on this rank."""

    name: str
    shape: tuple[int, ...]
    weight: int
    gradient: int
    state: dict[str, int]


@dataclass(frozen=True)
class Memory:
    """The report: `rows`, `total()`, and a table when printed."""

    rows: tuple[Row, ...]
    predicted: bool
    notes: tuple[str, ...] = ()

    def state(self) -> dict[str, int]:
        """Bytes by kind of state."""
        out: dict[str, int] = {}
        for row in self.rows:
            for key, n in row.state.items():
                out[key] = out.get(key, 0) + n
        return out

    def total(self) -> int:
        """Bytes of state."""
        return sum(self.state().values())

    def __str__(self) -> str:
        keys = [k for k in self.state() if self.state()[k] >= 1000] or list(self.state())
        head = ["parameter", "shape", "weights", "gradient", *keys, "state"]
        lines = [head]
        for r in sorted(self.rows, key=lambda r: -r.weight)[:12]:
            cells = [size(r.state.get(k, 0)) or "-" for k in keys]
            sums = size(sum(r.state.values())) or "-"
            lines.append([r.name, times(r.shape), size(r.weight), size(r.gradient), *cells, sums])
        if len(self.rows) > 12:
            lines.append([f"({len(self.rows) - 12} more)", *[""] * (len(head) - 1)])
        weights = sum(r.weight for r in self.rows)
        by_kind = [size(self.state()[k]) for k in keys]
        gradients = size(sum(r.gradient for r in self.rows))
        lines.append(["all", "", size(weights), gradients, *by_kind, size(self.total()) or "-"])
        widths = [max(len(line[j]) for line in lines) for j in range(len(head))]
        text = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
        how = "predicted on the meta device" if self.predicted else "counted"
        share = self.total() / weights if weights else 0.0
        last = f"state {share:.2f} x weights, {how}"
        return "\n".join([*(t.rstrip() for t in text), last, *self.notes])


def memory(model: nn.Module, optimizer: Optimizer) -> Memory:
    """Bytes per parameter and state: counted if the optimizer has stepped, else predicted."""
    stepped = _stepped(optimizer)
    copied, meta = (optimizer, {}) if stepped else _on_meta(model, optimizer)
    rows = []
    for name, p in model.named_parameters():
        q = meta.get(p, p)
        state = copied.state.get(q, {})
        rows.append(
            Row(
                name,
                tuple(p.shape),
                sharded.local(p).nbytes,
                sharded.local(p).nbytes if p.requires_grad else 0,
                {
                    str(k): sharded.local(t).nbytes
                    for k, t in state.items()
                    if isinstance(t, Tensor)
                },
            )
        )
    return Memory(tuple(rows), not stepped, tuple(_notes(model, optimizer, rows)))


def _notes(model: nn.Module, optimizer: Optimizer, rows: list[Row]) -> list[str]:
    """The bytes that the anchor keeps, and those that other anchors would keep."""
    anchor = getattr(optimizer, "anchor", None)
    pulled = [r for r in rows if {"z0", "soda_z0"} & set(r.state)]
    if anchor is None or not pulled:
        return []
    params = dict(model.named_parameters())
    whole = sum(r.weight for r in pulled)
    half = sum(2 * sharded.local(params[r.name]).numel() for r in pulled)
    now = sum(r.state.get("z0", 0) + r.state.get("soda_z0", 0) for r in pulled)
    where = " on the host" if isinstance(anchor, anchors.Host) else ""
    notes = [
        f"z0: {type(anchor).__name__} keeps {size(now) or 'nothing'}{where}; a clone {size(whole)},"
        f" bf16 {size(half)}, cpu, file and seed nothing on the device"
    ]
    if anchor.rounds_weights:
        notes.append("the weights are rounded to bf16 once, at the first step")
    return notes


def _stepped(optimizer: Optimizer) -> bool:
    """Whether a parameter has been stepped."""
    counts = [s.get("step") for s in optimizer.state.values() if isinstance(s, dict)]
    return any(c is None or float(c) > 0 for c in counts) and bool(counts)


def _on_meta(model: nn.Module, optimizer: Optimizer) -> tuple[Optimizer, dict[Tensor, Tensor]]:
    """Step a copy of the optimizer on meta copies of its parameters.

    A meta tensor has no values, so its anchor treats those parameters as constant that torch's own
    initialisers would make constant.
    """
    params = [p for g in optimizer.param_groups for p in g["params"]]
    meta: dict[Tensor, Tensor] = {}
    for p in params:
        q = nn.Parameter(sharded.local(p).detach().to("meta"), requires_grad=p.requires_grad)
        q.grad = torch.empty_like(q) if p.requires_grad else None
        meta[p] = q
    known = {id(p): meta[p] for p in params}
    constants = {meta[p] for p in params if _constant(model, p)}
    with anchors.known_constants(constants):
        base = getattr(optimizer, "base", optimizer)
        kept, base.state = base.state, type(base.state)(dict)  # so that deepcopy skips the state
        try:
            copied = copy.deepcopy(optimizer, known)
        finally:
            base.state = kept
        for group in (
            copied.param_groups
        ):  # the meta device cannot run these, and they do not change the state
            group.update({k: v for k, v in PLAIN.items() if k in group})
        if isinstance(getattr(copied, "base", copied), SODA):
            copied.state_dict()  # it makes its state before the first step
        if not isinstance(copied, SODA):
            copied.step()
    return copied, meta


PLAIN = {"fused": None, "capturable": False, "foreach": False}


def _constant(model: nn.Module, p: Tensor) -> bool:
    if not p.is_meta:
        return anchors.constant_of(p) is not None
    for module in model.modules():
        rules = init.default(module) or {}
        for name, q in module.named_parameters(recurse=False):
            if q is p:
                return name in rules and rules[name].kind == "constant"
    return False
