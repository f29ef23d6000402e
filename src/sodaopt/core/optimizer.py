"""The template as a torch optimizer: sort parameters into buckets, and step each bucket."""

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sodaopt import anchors, backends
from sodaopt.core import compiled, fused, together, validation
from sodaopt.core.diagnostics import Pull
from sodaopt.core.method import Coefs, Method
from sodaopt.core.state import StatefulOptimizer
from sodaopt.core.update import Bucket, eager_step, finish
from sodaopt.geometry import State
from sodaopt.parallel import sharded
from sodaopt.parallel.exchange import Sharing


def runs_kernels(p: Tensor) -> bool:
    """Whether the Triton kernels run on the device of p. A CPU step asks nothing about GPUs."""
    return p.is_cuda and backends.usable(p.device)


def has_kernel(ranks: Any, method: Method, p: Tensor, s: State, z0: anchors.Source | None) -> bool:
    """Whether the kernels of `fused.py` can step a parameter: see `Step.wants`."""
    name = method._kernel
    return name in fused.PLANS and runs_kernels(p) and fused.is_fusable(p, s, name, z0)


class Step(NamedTuple):
    """An implementation of a step.

    wants: whether it can step a parameter: a function of the ranks that share the parameter (see
    `Sharing.key`), its method, the parameter, its state and the `Source` of its z0.
    plan: returns the function that takes this step of a bucket, and later ones of the same tensors.
    capturable: a CUDA graph can capture the step.
    """

    name: str
    wants: Callable[..., bool]
    plan: Callable[[Bucket], Callable[[Bucket], None]]
    capturable: bool


STEPS = (  # the first that wants a parameter steps it
    Step("shared", lambda ranks, *_: ranks is not None, lambda b: finish, False),  # see together.py
    Step("triton", has_kernel, fused.Fused, True),
    Step("eager", lambda *_: True, lambda b: eager_step, False),
)


class SODA(StatefulOptimizer):
    """Run a `Method` on parameters, or one method a group.

    >>> opt = SODA(model.parameters(), lr=1e-3, method=zoo.adamw())
    >>> first, *rest = model.parameters()
    >>> groups = [{"params": [first], "method": "soda(muon)"}, {"params": rest, "lr": 3e-4}]
    >>> opt = SODA(groups, lr=0.02, method=zoo.adam())

    The parameters hold y. `eval()` puts x there and `train()` puts y back, exactly. Both do nothing
    for methods with lam_bar = 0. The steps of bf16 and fp16 parameters are computed in fp32, and
    rounded stochastically.

    params: parameters, (name, parameter) pairs, or groups such as `param_groups` returns.
    lr: the learning rate. It may be left out if every group has its own.
    method: a Method or a name, "soda(adam)" for zoo.soda(zoo.adam()). A group may have its own.
    maximize: ascend instead of descend.
    capturable: keep k and the coefficients on the device. Every parameter then needs a kernel. A
    CUDA graph can capture step() after a first step outside the graph, torch.compile makes step()
    one operator, and GradScaler skips steps without waiting for the device. For a graph or the
    operator, lr must be a tensor, which a schedule changes in place.
    seed: selects the random bits of stochastic rounding.
    anchor: where methods with centre "init" keep z0, see `sodaopt.anchors`.
    process_group: the ranks that have the same plain parameters and gradients, as under DDP. They
    share the work of maps that need whole matrices. None: every rank computes all. DTensors use
    their mesh. A copy of the optimizer, or one that was pickled, has neither process_group nor
    comm_dtype.
    comm_dtype: the dtype in which matrices travel between ranks. None is fp32, or float64 for
    parameters in float64. torch.float16 and torch.bfloat16 halve the bytes, and fp16 is more exact.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float | Tensor | None = None,
        method: Method | str | None = None,
        *,
        maximize: bool = False,
        capturable: bool = False,
        seed: int = 0,
        anchor: anchors.AnchorName | anchors.Anchor = "clone",
        process_group: Any = None,
        comm_dtype: torch.dtype | None = None,
    ) -> None:
        validation.check_sharing(process_group, comm_dtype)
        self._sharing = Sharing(process_group, comm_dtype)
        self.methods: dict[str, Method] = {}
        self.anchor = anchors.anchor(anchor)
        self.capturable = capturable
        validation.check_seed(seed)
        if lr is not None:
            validation.check_lr(lr, "SODA(params, lr, method)")
        defaults = {
            "lr": lr,
            "method": None if method is None else self._register(method),
            "maximize": maximize,
            "seed": seed,
            "train_mode": True,
        }
        super().__init__(validation.as_list(params, "SODA"), defaults)
        if not any(group["params"] for group in self.param_groups):
            raise ValueError("optimizer got an empty parameter list")
        compiled.KNOWN[id(self)] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_sharing" not in vars(self):  # a copy cannot hold a process group
            self._sharing = Sharing()
        compiled.KNOWN[id(self)] = self  # a copy is made without __init__

    # -- the step -----------------------------------------------------------------------------

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler leaves the division and the skipping of a step to this optimizer.

        The name is torch's. If torch renames it, GradScaler waits for the device again.
        """
        return self.capturable

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step on every parameter that has a gradient."""
        loss = None if closure is None else self._sharing.publishing(torch.enable_grad()(closure))
        self._step()
        return loss

    def _step(self) -> None:
        if torch.compiler.is_compiling() and self.capturable:
            params = [p for group in self.param_groups for p in group["params"]]
            lrs = [group["lr"] for group in self.param_groups]
            # an operator takes no DTensors. It would not see an lr that is a number and is changed.
            if all(type(p) in backends.PLAIN for p in params) and all(
                isinstance(lr, Tensor) for lr in lrs
            ):
                compiled.step(params, [p.grad for p in params], lrs, id(self))
                return
        self._step_now()

    @backends.not_compiled  # a traced step would freeze k, which the host reads
    def _step_now(self) -> None:
        for bucket in self._repeated():
            self._step_bucket(bucket)

    def _step_bucket(self, b: Bucket) -> None:
        device = b.params[0].device.type
        # autocast would run the matrix products in 16 bits. It does not know the meta device.
        with torch.autocast("cpu" if device == "meta" else device, enabled=False):
            b.run(b)
        b.g = []
        self._advance(b)

    def _check(self) -> None:
        """Raise in eval mode, or if a hyperparameter was set in a group after the constructor."""
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("step() in eval mode would move x, not y: call train() first")
            if not validation.FOREIGN.isdisjoint(group):
                method = self.methods[group["method"]]
                validation.check_keys(group, method, f"a group of {group['method']}")

    # -- buckets ------------------------------------------------------------------------------

    def _repeated(self) -> Iterator[Bucket]:
        """Yield the buckets of the last step if their signature is the same, else make them.

        If ranks share parameters, they take the whole step together. Buckets are kept only after
        all of them have been stepped. So after a step that failed, the next step makes them again.
        """
        kept, self._repeatable = self._repeatable, None
        if kept is not None and kept[0] == self._signature():
            self._check()
            for b in kept[1]:
                self._prepare(b)
            yield from kept[1]
        elif shared := together.shared(self):
            kept = None
            together.step(self, shared)
        else:
            self._check()
            buckets = self._buckets()
            yield from buckets
            signature = self._signature()
            # a new tensor cannot have the id of a tensor that is held
            held = [t for b in buckets for s in b.state for t in s.values()]
            kept = signature and (signature, buckets, held)
        self._repeatable = kept

    def _signature(self) -> list[Any] | None:
        """Return everything that decides how parameters are sorted into buckets.

        Step counts are relative to the first one, so that the signature is the same at the next
        step. None: the parameters must be sorted again, because one of them is sharded, or has not
        been stepped yet.
        """
        found: list[Any] = []
        first, state = None, self.state
        for group in self.param_groups:
            found.append((id(group), group["method"], group["maximize"], group["seed"]))
            for p in group["params"]:
                g: Any = p.grad
                s: Any = state.get(p)
                if g is None or p.numel() == 0:  # p is not stepped
                    found.append(None)
                    continue
                # if capturable, the host does not know the count. Loading drops the buckets
                k = 0 if not s else 1 if self.capturable else s["step"].item()
                if not k or type(p) not in backends.PLAIN:
                    return None
                first = first or k
                found += (
                    id(p), p.dtype, p.shape, p.device, p.is_contiguous(), *map(id, s.values()),
                    type(g), g.dtype, g.layout, g.is_contiguous(), g.is_neg(), k - first,
                )  # fmt: skip
        return found

    def _buckets(self) -> list[Bucket]:
        """Sort the parameters that have a gradient into buckets, each stepped by one call."""
        members: dict[Any, list[Any]] = {}
        indices = count()
        for n, group in enumerate(self.param_groups):
            method = self.methods[group["method"]]
            if method._counts_by_group:
                self._catch_up(group, method)
            for p, j in zip(group["params"], indices, strict=False):
                if p.grad is None or p.numel() == 0:
                    continue
                if p.grad.layout != torch.strided:
                    raise RuntimeError(
                        f"{validation.labels(self.param_groups)[p]} has a sparse gradient, and "
                        "every method here moves dense parameters: build the embedding with "
                        "sparse=False"
                    )
                s = self._current(p, method, first=True)
                z0 = self.anchor.source(p, s["z0"]) if method.centre == "init" else None
                ranks = None if method.geometry.elementwise else self._sharing.key(p)
                step = next(step for step in STEPS if step.wants(ranks, method, p, s, z0))
                if self.capturable and not step.capturable:
                    raise validation.unreadable(validation.labels(self.param_groups)[p])
                counts = tuple(float(s[name]) for name in ("step", *method.memory))
                key = n, ranks, step, sharded.is_sharded(p), p.dtype, p.device, counts
                members.setdefault(key, []).append((p, s, j, z0))
        return [self._bucket(found, *key[:3]) for key, found in members.items()]

    def _bucket(self, members: list[Any], n: int, ranks: Any, step: Step) -> Bucket:
        """Make a bucket of parameters of group n, and prepare its step.

        members: (parameter, state, index, z0) of each parameter.
        """
        params, states, indices, z0 = map(list, zip(*members, strict=True))
        if is_sharded := sharded.is_sharded(params[0]):
            states = [{name: sharded.local(t) for name, t in s.items()} for s in states]
        group = self.param_groups[n]
        b = Bucket(
            shapes=[p.shape for p in params], g=[], k=0, lr=0.0, state=states, group=group,
            method=self.methods[group["method"]], params=params, indices=indices, z0=z0,
            is_sharded=is_sharded, ranks=ranks,
        )  # fmt: skip
        b.run = step.plan(b)
        self._prepare(b)
        return b

    def _catch_up(self, group: dict[str, Any], method: Method) -> None:
        """Set k and the memory to the group's for parameters that had no gradient at some steps."""
        states = [s for p in group["params"] if (s := self.state.get(p))]
        leader = max(states, key=lambda s: float(s["step"]), default=None)
        for p in group["params"]:
            if leader is not None and p.grad is not None and p.numel():
                s = self._current(p, method, first=True)
                if leader["step"] > s["step"]:
                    for name in ("step", *method.memory):
                        s[name].copy_(leader[name])

    def _coefs(self, s: State, method: Method, lr: Any) -> tuple[Any, Any, Any, Coefs]:
        """Return k, lr, and the memory and the coefficients of the coming step.

        If capturable, k and the memory are tensors on the device, and lr is as in the group.
        """
        k, past = s["step"], {name: s[name] for name in method.memory}
        if not self.capturable:
            k, lr, past = int(k), float(lr), {name: float(v) for name, v in past.items()}
        memory = method.advance(past, k, lr)
        return k, lr, memory, method.coefs(k, lr, memory)

    def _prepare(self, b: Bucket) -> None:
        """Set the numbers of the coming step."""
        b.k, b.lr, b.memory, b.c = self._coefs(b.state[0], b.method, b.group["lr"])
        # GradScaler sets both during a step, if capturable
        b.grad_scale, b.found_inf = (getattr(self, n, None) for n in ("grad_scale", "found_inf"))

    def _advance(self, b: Bucket) -> None:
        """Count the step, and keep the memory of the coefficients."""
        steps = [s["step"] for s in b.state]
        one = torch.ones((), dtype=torch.float64, device=steps[0].device)
        if b.found_inf is not None:
            _uncount(b, one, b.found_inf)
        # with a number, or without alpha, this call takes four times as long
        torch._foreach_add_(steps, one, alpha=1.0)
        for name, value in b.memory.items():
            for s in b.state:
                s[name].fill_(value)

    def _pulls(self) -> dict[Tensor, Pull]:
        """Return the pull of the coming step by parameter, for methods whose step is one sum."""
        found = {}
        for group in self.param_groups:
            method = self.methods[group["method"]]
            if method.centre == "last" or not method._is_one_sum:
                continue
            for p in group["params"]:
                if s := self.state.get(p):
                    *_, c = self._coefs(s, method, group["lr"])
                    z0 = self.anchor.source(p, s["z0"]) if method.centre == "init" else 0.0
                    found[p] = Pull(float(c.lam), z0)
        return found


def _uncount(b: Bucket, one: Tensor, found_inf: Tensor) -> None:
    """If the kernels skipped the step, set `one` to 0 and the bucket's memory back. Both are on the
    device, so the host does not know."""
    one -= found_inf.reshape(())
    b.memory = {n: b.state[0][n].lerp(v, one) for n, v in b.memory.items()}
