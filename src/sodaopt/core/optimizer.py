"""The template as a torch optimizer: groups, the state of parameters, saving, train and eval."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from sodaopt import anchors
from sodaopt._errors import times
from sodaopt.anchors import AnchorName
from sodaopt.backends import PLAIN, not_compiled
from sodaopt.core import fused
from sodaopt.core.diagnostics import Pull
from sodaopt.core.kept import Kept, inputs_of
from sodaopt.core.method import Method, named
from sodaopt.core.state import StatefulOptimizer
from sodaopt.core.together import agreed
from sodaopt.core.update import Bucket, eager_step
from sodaopt.core.validation import (
    FOREIGN,
    as_list,
    check_comm_dtype,
    check_keys,
    check_lr,
    check_parameter,
    check_seed,
)
from sodaopt.geometry import State
from sodaopt.parallel import sharded
from sodaopt.parallel.exchange import Sharing

Params: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class Step(NamedTuple):
    """An implementation of one step of a bucket. wants(bucket) tells whether it handles it."""

    name: str
    wants: Callable[[Bucket], bool]
    run: Callable[[Bucket], None]


STEPS = (  # the first that wants a bucket runs it
    Step("triton elementwise", lambda b: b.kernel in fused.ELEMENTWISE, fused.elementwise_step),
    Step("triton polar", lambda b: b.kernel == "polar", fused.polar_step),
    Step("eager", lambda b: True, eager_step),
)


class SODA(StatefulOptimizer):
    """Run a `Method` on parameters, or one method a group.

    >>> opt = SODA(model.parameters(), lr=1e-3, method=zoo.adamw())
    >>> first, *rest = model.parameters()
    >>> groups = [{"params": [first], "method": "soda(muon)"}, {"params": rest, "lr": 3e-4}]
    >>> opt = SODA(groups, lr=0.02, method=zoo.adam())

    The parameters hold y. `eval()` puts x there and `train()` puts y back, exactly. Both do nothing
    for methods with lam_bar = 0. Parameters in bf16 or fp16 are summed in fp32 and rounded
    stochastically.

    lr: may be left out if every group has its own.
    method: a Method or a name, "soda(adam)" for zoo.soda(zoo.adam()). A group may have its own.
    foreach: False steps parameter by parameter.
    maximize: ascend instead of descend.
    seed: selects the rounding bits.
    anchor: where methods with centre "init" keep z0, see `sodaopt.anchors`.
    process_group: the ranks that have the same plain parameters and gradients, as under DDP. They
    share the work of spectral maps. None: every rank computes all. DTensors use their mesh.
    comm_dtype: torch.bfloat16 halves the bytes that matrices take between ranks.
    """

    sharing = Sharing()  # for copies, which cannot hold a process group
    has_agreed = False

    def __init__(
        self,
        params: Params,
        lr: float | Tensor | None = None,
        method: Method | str | None = None,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        seed: int = 0,
        anchor: AnchorName | anchors.Anchor = "clone",
        process_group: Any = None,
        comm_dtype: torch.dtype | None = None,
    ) -> None:
        self.sharing = Sharing(process_group, check_comm_dtype(comm_dtype))
        self.methods: dict[str, Method] = {}
        self.anchor = anchors.anchor(anchor)
        self._kept: dict[int, Kept] = {}
        if isinstance(params, set):
            raise TypeError("params is a set, whose order changes between runs: pass a list")
        check_seed(seed)
        if lr is not None:
            check_lr(lr, "SODA")
        defaults = {
            "lr": lr,
            "method": None if method is None else self._register(method),
            "foreach": foreach,
            "maximize": maximize,
            "seed": seed,
            "train_mode": True,
        }
        super().__init__(params, defaults)
        if not any(group["params"] for group in self.param_groups):
            raise ValueError("optimizer got an empty parameter list")

    # -- the step -----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step on every parameter that has a gradient."""
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError("step() in eval mode would move x, not y: call train() first")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @not_compiled  # k is read on the host: a traced step would freeze it
    def _step(self) -> None:
        # elementwise maps do not communicate
        is_local = all(method.geometry.elementwise for method in self.methods.values())
        for bucket in self._buckets() if is_local else agreed(self, self._buckets):
            # inside an autocast region the matrix products would run in 16 bits
            device = bucket.params[0].device.type
            with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
                next(step for step in STEPS if step.wants(bucket)).run(bucket)
            self._advance(bucket)

    def _buckets(self) -> Iterator[Bucket]:
        """Group the parameters that have a gradient, so that a bucket shares all operations.

        The buckets of the last step are used again if all that they depend on is as it was.
        """
        index = 0
        for n, group in enumerate(self.param_groups):
            if not FOREIGN.isdisjoint(group):  # set after the constructor
                check_keys(group, self.methods[group["method"]], f"a group of {group['method']}")
            kept = self._kept.pop(n, None)
            if (
                kept is not None
                and kept.inputs == inputs_of(group, self.state, index)
                and kept.follows()
            ):
                buckets = kept.buckets
                for bucket in buckets:
                    self._renew(bucket, group)
            else:
                buckets, kept = self._sorted(group, index), None
                if all(b.kernel and not b.is_sharded for b in buckets):  # others hold gradients
                    kept = Kept(inputs_of(group, self.state, index), buckets)
            yield from buckets
            if kept is not None:
                self._kept[n] = kept
            index += len(group["params"])

    def _sorted(self, group: dict[str, Any], index: int) -> list[Bucket]:
        buckets: dict[Any, Bucket] = {}
        method = self.methods[group["method"]]
        leader = self._leader(group) if method.counts_by_group else None
        for j, p in enumerate(group["params"], index):
            if p.grad is None or p.numel() == 0:
                continue
            s, k = self._stepped_state(p, method, group)
            if leader is not None and leader["step"] > k:
                k = self._join(s, leader, method)
            z0 = self.anchor.source(p, s["z0"]) if method.centre == "init" else None
            ranks = None if method.geometry.elementwise else self.sharing.key(p)
            kernel = method.kernel if ranks is None and fused.kernels_run_on(p) else None
            if kernel is not None and not fused.is_fusable(p, s, kernel, z0):
                kernel = None
            is_sharded = type(p) not in PLAIN and sharded.is_sharded(p)
            alone = j if group["foreach"] is False else None
            past = tuple([float(s[name]) for name in method.memory])
            key = k, past, p.dtype, p.device, is_sharded, ranks, kernel, alone
            bucket = buckets.get(key)
            if bucket is None:
                sharing = None if ranks is None else self.sharing
                bucket = self._new_bucket(group, k, past, is_sharded, sharing, kernel)
                buckets[key] = bucket
            bucket.append(p, s, j, z0)
        return list(buckets.values())

    def _stepped_state(self, p: Tensor, method: Method, group: dict[str, Any]) -> tuple[State, int]:
        """The state and the step count of a parameter that is about to be stepped."""
        if p.grad is not None and p.grad.layout != torch.strided:
            raise RuntimeError(
                f"{_label(group, p)} has a sparse gradient, and every method here moves dense "
                "parameters: build the embedding with sparse=False"
            )
        s: Any = self.state.get(p)
        k = int(s["step"]) if s else 0
        return s if k else self._current(p, method, first=True), k

    def _leader(self, group: dict[str, Any]) -> State | None:
        """The state of the parameter with the most steps. It has the group's k and memory."""
        states = [s for p in group["params"] if (s := self.state.get(p))]
        return max(states, key=lambda s: float(s["step"]), default=None)

    def _join(self, s: State, leader: State, method: Method) -> int:
        """Take over the group's k and memory, after steps without a gradient. Return k."""
        for name in ("step", *method.memory):
            s[name].copy_(leader[name])
        return int(s["step"])

    def _new_bucket(
        self, group: dict[str, Any], k: int, past: tuple[float, ...], is_sharded: bool,
        sharing: Sharing | None, kernel: str | None,
    ) -> Bucket:  # fmt: skip
        method, lr = self.methods[group["method"]], float(group["lr"])
        memory = method.advance(dict(zip(method.memory, past, strict=True)), k, lr)
        return Bucket(
            shapes=[], g=[], k=k, lr=lr, state=[], method=method, c=method.coefs(k, lr, memory),
            memory=memory, params=[], indices=[], z0=[], maximize=group["maximize"],
            seed=group["seed"], is_sharded=is_sharded, sharing=sharing, kernel=kernel,
        )  # fmt: skip

    def _renew(self, b: Bucket, group: dict[str, Any]) -> None:
        """Set the coefficients of the next step."""
        b.k, b.lr = b.k + 1, float(group["lr"])
        b.memory = b.method.advance(b.memory, b.k, b.lr)
        b.c = b.method.coefs(b.k, b.lr, b.memory)

    def _advance(self, bucket: Bucket) -> None:
        """Count the step, and keep the memory of the coefficients."""
        # with a number, or without alpha, this call takes four times as long
        one = torch.ones((), dtype=torch.float64, device="cpu")
        torch._foreach_add_([s["step"] for s in bucket.state], one, alpha=1.0)
        for s in bucket.state:
            for name, number in bucket.memory.items():
                s[name].fill_(number)

    def pulls(self) -> dict[Tensor, Pull]:
        """Return the pull of the coming step, of methods that pull and step in one sum."""
        found = {}
        for group in self.param_groups:
            method, lr = self.methods[group["method"]], float(group["lr"])
            if method.centre == "last" or not method.fused:
                continue
            for p in group["params"]:
                s = self.state.get(p)
                if s:
                    k, past = int(s["step"]), {name: float(s[name]) for name in method.memory}
                    lam = float(method.coefs(k, lr, method.advance(past, k, lr)).lam)
                    z0 = self.anchor.source(p, s["z0"]) if method.centre == "init" else 0.0
                    found[p] = Pull(lam, z0)
        return found

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._kept = {}
        super().__setstate__(state)

    # -- groups -------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, also during a run. It may have its own `method`, and its own `lr` or an
        `lr_factor` of the optimizer's lr."""
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
        if group.setdefault("lr", self.defaults["lr"]) is None:
            raise ValueError(
                f"{where} has no lr: SODA(params, lr, method), or an 'lr' in the group"
            )
        group["lr"] = group["lr"] * factor if factor != 1 else group["lr"]
        check_lr(group["lr"], where)
        check_keys(group, method, where)
        group["settings"] = method.settings
        group["params"] = params = as_list(group.get("params"), where)
        lr = float(group["lr"])
        method.coefs(0, lr, method.advance(method.memory, 0, lr))
        seen = {p for g in self.param_groups for p in g["params"]}
        for j, entry in enumerate(params):
            name, p = entry if isinstance(entry, tuple) else (f"parameter {j} of {where}", entry)
            check_parameter(name, p, method)
            if p in seen:
                raise ValueError(
                    f"{name} ({times(p.shape)}) is in the optimizer twice: remove one of them"
                )
            seen.add(p)
        super().add_param_group(group)
        self._adopt()

    def _register(self, method: Method | str) -> str:
        """Return the name under which a group finds its method: groups hold plain values only."""
        if isinstance(method, str):
            if method in self.methods:
                return method
            method = named(method)
        if not isinstance(method, Method):
            raise TypeError(f"the method must be a Method such as zoo.adamw(), got {method!r}")
        name, n = method.name, 1
        while self.methods.get(name, method) != method:
            n += 1
            name = f"{method.name}#{n}"
        self.methods[name] = method
        return name


def _label(group: dict[str, Any], p: Tensor) -> str:
    j = next(j for j, q in enumerate(group["params"]) if q is p)
    names = group.get("param_names")
    return str(names[j]) if names else f"a parameter of shape {times(p.shape)}"
