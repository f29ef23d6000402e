"""Independent implementations with which every row of `sodaopt.zoo` is compared.

THEIRS has optimizers of other projects, run by their own code. RECURRENCES has the recurrences of
`recurrences.py`, written out from the papers. `tools/parity.py` steps both sides and compares them.

Candidates that were read and left out:

- pytorch_optimizer.SimplifiedAdEMAMix: averages m with weight 1 - beta where the paper sums, and
  divides by sqrt(1 - beta2^t) where it should multiply.
- pytorch_optimizer.SCIONLight: its momentum lives in p.grad, so clearing gradients disables it.
- pytorch_optimizer.ScalableShampoo: EMA statistics, grafting, delayed preconditioning.
- torch_optimizer.Shampoo 0.3.0: exponent -1/2 instead of -1/4 for a matrix, and R is built from
  the half-preconditioned gradient.
- pytorch_optimizer.QHAdam (an optimistic Adam): keeps its bias corrections in float32.
- pytorch_optimizer.FTRL: adaptive per-coordinate metric, centre at the origin, not a row.
- pytorch_optimizer.RACS: running row and column scales, not the fixed point of Multi-Norm.
- schedulefree.ScheduleFreeWrapper around Adam: shares the base's state dict, so KeyError.
- optax.nadam: bias-corrects m by t+1 and g by t, so neither the paper's NAdam nor torch's.
- optax.contrib.muon: the same two corrections turn m_bar, and its shape factor reads (in, out).
- GPA's own code (not on PyPI): float32 moments, decay on z blends the undecayed z into y.
- Scion's own code (not on PyPI): equal to pytorch_optimizer.SCION, which is here.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from sodaopt import Method
from tests.support import recurrences as r

Make = Callable[[list[Parameter], float], Any]
Kwargs = Mapping[str, Any] | Callable[[ModuleType, ModuleType, ModuleType], Mapping[str, Any]]


@dataclass(frozen=True)
class Theirs:
    """A row of the zoo and an independent implementation of it.

    kwargs: the arguments of the row, or a function of sodaopt's (zoo, geometry, polar) that returns
    them.
    make: a function (params, lr) that returns their optimizer.
    tol: the largest difference allowed.
    schedule: a function from the step to a factor of lr.
    own_schedule: their optimizer applies the schedule itself.
    package: the distribution with their code, or "" for a recurrence.
    """

    row: str
    kwargs: Kwargs
    label: str
    make: Make
    lr: float
    tol: float = 1e-12
    note: str = ""
    schedule: Callable[[int], float] | None = None
    own_schedule: bool = False
    package: str = "torch"

    @property
    def source(self) -> str:
        return f"{self.package} {version(self.package)}" if self.package else "written out"

    @property
    def installed(self) -> bool:
        try:
            return bool(self.source)
        except PackageNotFoundError:
            return False

    def method(self) -> Any:
        from sodaopt import geometry, zoo
        from sodaopt.geometry import polar as msign

        kwargs = self.kwargs(zoo, geometry, msign) if callable(self.kwargs) else self.kwargs
        return getattr(zoo, self.row)(**kwargs)


class Bfloat16IsACopy(TorchFunctionMode):
    """Replace a cast to bf16 by a copy in the tensor's own dtype. Their code changes the copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtypes = [a for a in (*args, *(kwargs or {}).values()) if a is torch.bfloat16]
        if func is torch.Tensor.bfloat16 or (func is torch.Tensor.to and dtypes):
            return args[0].clone()
        return func(*args, **(kwargs or {}))


@contextmanager
def in_float64() -> Iterator[None]:
    """Run their code in float64 in places where it hard-codes a lower precision.

    torch's and Keller Jordan's Muon cast to bf16. pytorch_optimizer's Newton-Schulz has bf16 as a
    default argument. torch's NAdam keeps prod(mu) in the default dtype.
    """
    patched = []
    try:
        from pytorch_optimizer.optimizer.utils.matrix import zero_power_via_newton_schulz_5 as ns

        patched.append((ns, ns.__defaults__))
        ns.__defaults__ = (*ns.__defaults__[:-1], torch.float64)
    except ImportError:
        pass
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Bfloat16IsACopy():
            yield
    finally:
        torch.set_default_dtype(default)
        for f, defaults in patched:
            f.__defaults__ = defaults


class Optax:
    """An optax transformation with the interface of a torch optimizer."""

    def __init__(self, params: list[Parameter], transform: Any):
        self.params, self.transform, self.state = params, transform, None
        self.param_groups: list[dict] = []

    @torch.no_grad()
    def step(self) -> None:
        import jax
        import numpy as np

        with jax.enable_x64(True):
            x, g = ([jax.numpy.array(t.detach().numpy()) for t in ts] for ts in self._tensors())
            self.state = self.transform.init(x) if self.state is None else self.state
            updates, self.state = self.transform.update(g, self.state, x)
        for p, u in zip(self.params, updates, strict=True):
            p.add_(torch.from_numpy(np.array(u)))

    def _tensors(self) -> tuple[list, list]:
        return self.params, [p.grad for p in self.params]


class Plain:
    """A recurrence with the interface of a torch optimizer. Each parameter has a dict of memory."""

    def __init__(self, params: list[Parameter], lr: float, f: r.Step):
        self.param_groups = [{"params": params, "lr": lr}]
        self.f, self.k, self.memory = f, 0, [{} for _ in params]

    @torch.no_grad()
    def step(self) -> None:
        group = self.param_groups[0]
        for p, s in zip(group["params"], self.memory, strict=True):
            p.copy_(self.f(s, p.clone(), p.grad, self.k, group["lr"]))
        self.k += 1

    @torch.no_grad()
    def eval(self) -> None:
        for p, s in zip(self.param_groups[0]["params"], self.memory, strict=True):
            p.copy_(s.get("x", p))


DISTRIBUTIONS = {
    "lion_pytorch": "lion-pytorch",
    "muon": "muon-optimizer",
    "optax": "optax",
    "pytorch_optimizer": "pytorch-optimizer",
    "schedulefree": "schedulefree",
    "torch": "torch",
}


def find(path: str) -> Any:
    """Import `package.module.Name`."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def build(path: str, params: list[Parameter], lr: float, options: Mapping[str, Any]) -> Any:
    """Return their optimizer of these parameters, from its class or its optax transformation."""
    if path.startswith("optax."):
        return Optax(params, find(path)(lr, **options))
    return find(path)(params, lr=lr, **options)


def call(
    row: str, kwargs: Kwargs, path: str, options: Mapping[str, Any], lr: float, **more: Any
) -> Theirs:
    """Compare our row(**kwargs) with their path(params, lr, **options). The label is that call."""
    arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
    more = {"package": DISTRIBUTIONS[path.split(".")[0]]} | more
    more = {"make": lambda params, lr: build(path, params, lr, options)} | more
    return Theirs(row, kwargs, f"{path}({arguments})" if options else path, lr=lr, **more)


def po_muon(params: list[Parameter], lr: float, adjusted: bool) -> Any:
    groups = [{"params": params, "use_muon": True, "momentum": 0.9, "weight_decay": 0.1}]
    return build("pytorch_optimizer.Muon", groups, lr, {"use_adjusted_lr": adjusted})


def po_scion(norm: str, options: dict[str, Any], constraint: bool) -> Make:
    def make(params: list[Parameter], lr: float) -> Any:
        kind = find("pytorch_optimizer.optimizer.scion.LMONorm")[norm]
        more = {"norm_type": kind, "norm_kwargs": options, "constraint": constraint}
        return build("pytorch_optimizer.SCION", params, lr, {"momentum": 0.2, "scale": 2.0} | more)

    return make


def around(path: str, base: Callable[..., Any], options: Mapping[str, Any], beta: float) -> Make:
    """Return a function that makes their wrapper around one of torch's optimizers."""
    return lambda params, lr: find(path)(base(params, lr, **options), momentum=beta)


def warmup(n: int) -> Callable[[int], float]:
    return lambda k: min(1, (k + 1) / n)


def warmdown(k: int) -> float:
    return 1 - k / 40


def from_zero(k: int) -> float:
    return min(1, k / 10)


def _torch() -> Iterator[Theirs]:
    mu, wd, ab = {"momentum": 0.9}, {"weight_decay": 0.5}, {"betas": (0.8, 0.95), "eps": 1e-4}
    yield call("sgd", {}, "torch.optim.SGD", {}, 0.3)
    yield call("sgd", mu, "torch.optim.SGD", mu, 0.05, schedule=warmdown)
    yield call("nesterov", mu, "torch.optim.SGD", mu | {"nesterov": True}, 0.05)
    yield call("adam", {}, "torch.optim.Adam", {}, 0.01)
    yield call("adam", ab, "torch.optim.Adam", ab, 0.01, schedule=warmdown)
    yield call("adamw", {}, "torch.optim.AdamW", {}, 0.01)
    yield call("adamw", wd, "torch.optim.AdamW", wd, 0.01, schedule=warmdown)
    for decay in ({}, wd):
        options = decay | {"decoupled_weight_decay": True}
        yield call("torch_nadam", decay, "torch.optim.NAdam", options, 0.01)


def _lion_and_signum() -> Iterator[Theirs]:
    wd, ab = {"weight_decay": 0.5}, {"betas": (0.95, 0.98), "weight_decay": 0.5}
    note = "decay by lr wd, not the other form, decoupled_weight_decay=True"
    yield call("lion", {}, "lion_pytorch.Lion", {}, 0.005)
    yield call("lion", wd, "lion_pytorch.Lion", wd, 0.005, schedule=warmdown, note=note)
    yield call("lion", ab, "pytorch_optimizer.Lion", ab, 0.005)
    yield call("signsgd", {}, "pytorch_optimizer.SignSGD", {"momentum": 0.0}, 0.005)
    yield call("signsgd", {}, "optax.sign_sgd", {}, 0.005)
    yield call("signum", {}, "pytorch_optimizer.SignSGD", {"momentum": 0.9}, 0.005)
    yield call("signum", wd, "pytorch_optimizer.SignSGD", {"momentum": 0.9} | wd, 0.005)
    yield call("signum", {"beta": 0.8}, "optax.signum", {"beta": 0.8}, 0.005)


def _muon() -> Iterator[Theirs]:
    def ours(scale: str, momentum: float, weight_decay: float) -> Kwargs:
        plain = {"momentum": momentum, "weight_decay": weight_decay}
        return lambda zoo, geo, ms: {"scale": getattr(geo, scale), **plain}

    for scale, adjust in (("original", "original"), ("adamw", "match_rms_adamw")):
        for wd in (0.0, 0.1):
            yield call(
                *("muon", ours(scale, 0.95, wd), "torch.optim.Muon"),
                *({"adjust_lr_fn": adjust, "weight_decay": wd}, 0.02),
                schedule=warmdown if wd else None,
                note="their .bfloat16() as a copy in float64",
            )
        adjusted = scale == "adamw"
        yield call(
            *("muon", ours(scale, 0.9, 0.1), "pytorch_optimizer.Muon"),
            {"momentum": 0.9, "weight_decay": 0.1, "use_adjusted_lr": adjusted},
            0.02,
            make=lambda params, lr, adjusted=adjusted: po_muon(params, lr, adjusted),
            note="their Newton-Schulz in float64",
        )
    note = "they add 1e-7 to the Frobenius norm, ours is clamped at 1e-15"
    wd = {"weight_decay": 0.1}
    yield call("muon", wd, "muon.SingleDeviceMuon", wd, 0.02, tol=1e-6, note=note)


def _scion() -> Iterator[Theirs]:
    def ours(norm: str, is_dense: bool) -> Kwargs:
        def kwargs(zoo: ModuleType, geo: ModuleType, ms: ModuleType) -> dict[str, Any]:
            more = {"polar": ms.KELLER} if norm == "Spectral" else {}
            scaled = getattr(geo, norm)(scale=geo.dense if is_dense else geo.one_hot, **more)
            return {"norm": scaled, "radius": 2.0, "alpha": 0.2}

        return kwargs

    for norm, kind, flag in (
        ("Spectral", "SPECTRAL", "normalize"),
        ("Sign", "SIGN", "normalize"),
        ("ColNorm", "COL", "normalized"),
        ("RowNorm", "ROW", "normalized"),
    ):
        for is_dense in (True, False):
            for row, constraint in (("scion", True), ("uscion", False)):
                loose = {"tol": 1e-6, "note": "they add 1e-8 to the norms"}
                yield Theirs(
                    row,
                    ours(norm, is_dense),
                    f"pytorch_optimizer.SCION({kind}, {flag}={is_dense}, constraint={constraint})",
                    po_scion(kind, {flag: is_dense}, constraint),
                    lr=0.005,
                    package="pytorch-optimizer",
                    schedule=warmdown if norm == "Sign" else None,
                    **(loose if flag == "normalized" else {}),
                )


def _metrics() -> Iterator[Theirs]:
    yield call(
        *("shampoo", {"eps": 1e-6}, "pytorch_optimizer.Shampoo", {"matrix_eps": 1e-6}, 0.05),
        tol=1e-10,
        note="SVD against eigh of nearly singular L and R",
    )
    for alpha in (0.0, 3.0):
        ours, options = {"betas": (0.95, 0.99)}, {"b1": 0.95, "b2": 0.99}
        yield call(
            *("simplified_ademamix", ours | {"alpha": alpha}),
            *("optax.contrib.simplified_ademamix", options | {"alpha": alpha}, 0.001),
        )


def _schedule_free() -> Iterator[Theirs]:
    sgd, adamw = "schedulefree.SGDScheduleFree", "schedulefree.AdamWScheduleFree"
    row, own = "schedule_free", {"schedule": warmup(10), "own_schedule": True}
    ours = {"beta": 0.8, "r": 1.0, "weight_lr_power": 1.0}
    theirs = {"momentum": 0.8, "r": 1.0, "weight_lr_power": 1.0, "warmup_steps": 10}
    yield call(row, {}, sgd, {}, 0.3)
    yield call(row, {}, sgd, {}, 0.3, schedule=warmdown, note="decreasing lr")
    yield call(row, {}, sgd, {}, 0.3, schedule=from_zero, note="warmup from lr = 0")
    yield call(row, ours, sgd, theirs, 0.3, **own)
    yield call(row, {}, "optax.contrib.schedule_free_sgd", {"b1": 0.9}, 0.3)

    def rmsprop(zoo: ModuleType, geo: ModuleType, ms: ModuleType) -> dict[str, Any]:
        return {"base": zoo.adam(betas=(0.0, 0.999))}

    yield call(row, rmsprop, adamw, {"warmup_steps": 10}, 0.01, **own)
    first, second = (
        "schedulefree.ScheduleFreeWrapperReference",
        "pytorch_optimizer.ScheduleFreeWrapper",
    )
    yield Theirs(
        row,
        lambda zoo, geo, ms: {"base": zoo.sgd(momentum=0.5)},
        f"{first}(SGD(momentum=0.5), momentum=0.9)",
        around(first, torch.optim.SGD, {"momentum": 0.5}, beta=0.9),
        lr=0.2,
        package="schedulefree",
    )
    yield Theirs(
        row,
        lambda zoo, geo, ms: {"base": zoo.adam(), "beta": 0.8},
        f"{second}(Adam, momentum=0.8)",
        around(second, torch.optim.Adam, {}, beta=0.8),
        lr=0.01,
        package="pytorch-optimizer",
    )


THEIRS: tuple[Theirs, ...] = (
    *_torch(),
    *_lion_and_signum(),
    *_muon(),
    *_scion(),
    *_metrics(),
    *_schedule_free(),
)


def plain(row: str, kwargs: Kwargs, label: str, step: r.Step, lr: float, **more: Any) -> Theirs:
    return Theirs(row, kwargs, label, lambda p, lr: Plain(p, lr, step), lr, package="", **more)


def _elementwise() -> Iterator[Theirs]:
    ours = {"betas": (0.8, 0.99), "weight_decay": 0.5}
    yield plain("nadam", {}, "x - lr m_bar/(sqrt(v) + eps)", r.descend(r.nadam()), 0.01)
    label, step = "(1 - lr wd) x - lr m_bar/(sqrt(v) + eps)", r.decayed(r.nadam(0.8, 0.99), 0.5)
    yield plain("nadam", ours, label, step, 0.01, schedule=warmdown)

    ours = {"betas": (0.99, 0.999), "alpha": 2.0}
    label, step = "x - lr (m + a g)/(sqrt(v_hat) + eps)", r.simplified_ademamix(0.99, 0.999, 2.0)
    yield plain("simplified_ademamix", ours, label, r.descend(step), 0.001)

    def sharp(zoo: ModuleType, geo: ModuleType, ms: ModuleType) -> dict[str, Any]:
        return {"map": geo.Sharp}

    ours = {"beta": 0.8, "weight_decay": 0.5}
    yield plain("signsgd", {}, "x - lr sign(g)", r.descend(r.signsgd()), 0.005)
    yield plain("signsgd", sharp, "x - lr ||g||_1 sign(g)", r.descend(r.signsgd(sharp=True)), 0.005)
    yield plain("signum", {}, "x - lr sign(m)", r.descend(r.signum()), 0.005)
    label, step = "(1 - lr wd) x - lr sign(m)", r.decayed(r.signum(0.8), 0.5)
    yield plain("signum", ours, label, step, 0.005, schedule=warmdown)


def _matrix() -> Iterator[Theirs]:
    def ssd(name: str) -> Kwargs:
        return lambda zoo, geo, ms: {"map": getattr(geo, name), "polar": ms.EXACT}

    yield plain("ssd", ssd("Sharp"), "x - lr ||g||_nuc U V^T", r.descend(r.ssd()), 0.1)
    label, step = "x - lr U V^T", r.descend(r.ssd(sharp=False))
    yield plain("ssd", ssd("Ball"), label, step, 0.02, schedule=warmdown)

    def muon(zoo: ModuleType, geo: ModuleType, ms: ModuleType) -> dict[str, Any]:
        return {"polar": ms.EXACT, "weight_decay": 0.1}

    label = "(1 - lr wd) x - lr sqrt(max(1, o/i)) msign(g + mu b)"
    yield plain("muon", muon, label, r.decayed(r.muon(), 0.1), 0.02)
    label, step = "x - lr L^(-1/4) g R^(-1/4)", r.descend(r.shampoo(1e-6))
    yield plain("shampoo", {"eps": 1e-6}, label, step, 0.05, tol=1e-10)
    yield plain("multinorm", {}, "x - lr Sinkhorn(g)", r.descend(r.multinorm()), 0.005)


def _exact(zoo: ModuleType, geo: ModuleType, ms: ModuleType) -> dict[str, Any]:
    return {"norm": geo.Spectral(polar=ms.EXACT), "radius": 2.0}


def _layers() -> Iterator[Theirs]:
    def norm(name: str) -> Kwargs:
        return lambda zoo, geo, ms: {"norm": getattr(geo, name)(), "radius": 2.0}

    label, step = "(1 - lr) x - lr rho sqrt(o/i) msign(m)", r.decayed(r.uscion(2.0), 1.0)
    yield plain("scion", _exact, label, step, 0.01, schedule=warmdown)
    label, step = "x - lr rho sqrt(o/i) msign(m)", r.descend(r.uscion(2.0))
    yield plain("uscion", _exact, label, step, 0.01)
    label, step = "x - lr rho (sqrt(o)/i) col/||col||", r.descend(r.uscion(2.0, ball=r.columns))
    yield plain("uscion", norm("ColNorm"), label, step, 0.01)
    label, step = "x - lr rho row/(sqrt(i) ||row||)", r.descend(r.uscion(2.0, ball=r.rows))
    yield plain("uscion", norm("RowNorm"), label, step, 0.01)
    label, step = "z0 + sum (j+2) u_j/(k+2)", r.soda_dagger(2.0)
    yield plain("soda_dagger", _exact, label, step, 0.01)

    ours = {"radius": 5.0}
    label, step = "(1 - lr) x - lr rho g/||g||", r.decayed(r.normalized(5.0), 1.0)
    yield plain("frank_wolfe", ours, label, step, 0.02)
    label, step = "(1 - lr) x - lr rho m/||m||", r.decayed(r.normalized(5.0, 0.3), 1.0)
    yield plain("frank_wolfe", ours | {"alpha": 0.3}, label, step, 0.02, schedule=warmdown)


def _averaged() -> Iterator[Theirs]:
    def ball(zoo: ModuleType, geo: ModuleType, ms: ModuleType) -> dict[str, Any]:
        return {"geometry": geo.Ball(geo.Sign(scale=geo.unit))}

    def clip(zoo: ModuleType, geo: ModuleType, ms: ModuleType) -> dict[str, Any]:
        return {"geometry": geo.Clip(geo.Euclidean())}

    for row, optimism, at_z in (
        ("dual_averaging", False, True),
        ("double_averaging", False, False),
        ("oda", True, True),
        ("moda", True, False),
    ):
        for name, ours, mirror, lr in (
            ("sharp", {}, r.sharp, 0.1),
            ("clip", clip, r.clip, 0.1),
            ("sign ball", ball, r.sign_ball, 0.002),
        ):
            step = r.averaging(mirror, optimism, at_z)
            yield plain(row, ours, f"z0 + sums of g, {name}", step, lr)
    step = r.averaging(r.sharp, True, False, a=lambda k: k + 1)
    yield plain("accelerated", {}, "z0 + sums of (k+1) g", step, 0.02)

    def adam(zoo: ModuleType, geo: ModuleType, ms: ModuleType) -> dict[str, Any]:
        return {"base": zoo.adam(), "lam": 0.1, "lam_bar": 0.2}

    yield plain("gpa", {}, "z - lr g, averaged", r.gpa(r.sgd()), 1.0)

    def sped(zoo: ModuleType, geo: ModuleType, ms: ModuleType) -> dict[str, Any]:
        return {"base": zoo.adam(), "warmup": 8, "beta": 0.7, "rho": 0.6}

    label, step = "Schedule-Free Adam, beta to 1", r.amuse(r.adam(), 0.7, 8, 0.6)
    yield plain("amuse", sped, label, step, 0.01)
    label, step = "z - lr Adam, averaged", r.gpa(r.adam(), 0.1, 0.2)
    yield plain("gpa", adam, label, step, 0.01, schedule=warmdown)


def _wrapped() -> Iterator[Theirs]:
    def adam(zoo: ModuleType, geo: ModuleType, ms: ModuleType) -> dict[str, Any]:
        return {"method": zoo.adam()}

    def lion(zoo: ModuleType, geo: ModuleType, ms: ModuleType) -> dict[str, Any]:
        return {"method": zoo.lion()}

    def muon(zoo: ModuleType, geo: ModuleType, ms: ModuleType) -> dict[str, Any]:
        return {"method": zoo.muon(polar=ms.EXACT)}

    def clip(zoo: ModuleType, geo: ModuleType, ms: ModuleType) -> dict[str, Any]:
        return {"method": Method(geo.Clip(geo.Euclidean()))}

    yield plain("soda", adam, "Algorithm 1 (Adam)", r.soda(r.adam()), 0.01, schedule=warmdown)
    yield plain("soda", lion, "Algorithm 1 (Lion)", r.soda(r.lion()), 0.005, schedule=warmdown)
    yield plain("soda", muon, "Algorithm 1 (Muon)", r.soda(r.muon()), 0.02)
    yield plain("soda", clip, "Algorithm 1 (clipped gradient)", r.soda(r.clipped()), 0.3)


RECURRENCES: dict[str, Theirs] = {
    f"{entry.row}: {entry.label}": entry
    for table in (_elementwise, _matrix, _layers, _averaged, _wrapped)
    for entry in table()
}
