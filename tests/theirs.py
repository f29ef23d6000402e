"""What every row of `sodaopt.zoo` is proven equal to.

THEIRS holds other people's optimizers, run through their own code. RECURRENCES holds the rows that
nobody else ships, written out in `recurrences.py`. `parity.py` steps both sides and compares.

Candidates that were read and left out:

- pytorch_optimizer.SimplifiedAdEMAMix: averages m with weight 1 - beta where the paper sums, and
  divides by sqrt(1 - beta2^t) where it should multiply.
- pytorch_optimizer.SCIONLight: its momentum lives in p.grad, so clearing gradients disables it.
- pytorch_optimizer.ScalableShampoo: EMA statistics, grafting, delayed preconditioning.
- torch_optimizer.Shampoo 0.3.0: exponent -1/2 instead of -1/4 for a matrix, and R is built from
  the half-preconditioned gradient.
- pytorch_optimizer.QHAdam (an optimistic Adam): keeps its bias corrections in float32.
- pytorch_optimizer.FTRL: adaptive per-coordinate metric, centre at the origin; no row.
- pytorch_optimizer.RACS: running row and column scales, not the fixed point of Multi-Norm.
- schedulefree.ScheduleFreeWrapper around Adam: shares the base's state dict, so KeyError.
- optax.nadam: bias-corrects m by t+1 and g by t; neither the paper's NAdam nor torch's.
- optax.contrib.muon: the same two corrections turn m_bar, and its shape factor reads (in, out).
- GPA's own code (not on PyPI): float32 moments; with decay on z it blends the undecayed z into y.
- Scion's own code (not on PyPI): equal to pytorch_optimizer.SCION, which is here.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch
from torch.nn import Parameter

from tests import recurrences as r

Make = Callable[[list[Parameter], float], Any]
Kwargs = Mapping[str, Any] | Callable[[ModuleType, ModuleType, ModuleType], Mapping[str, Any]]


@dataclass(frozen=True)
class Theirs:
    """One row of the zoo beside one independent implementation of it."""

    row: str
    kwargs: Kwargs  # of the row; or (zoo, geometry, msign) -> kwargs where it takes our objects
    label: str
    make: Make  # (params, lr) -> something with step() and param_groups
    lr: float
    tol: float = 1e-12
    note: str = ""
    schedule: Callable[[int], float] | None = None  # step -> factor on lr
    own_schedule: bool = False  # theirs applies it by itself; ours reads group["lr"]
    package: str = "torch"  # distribution; "" is written out here

    @property
    def source(self) -> str:
        return f"{self.package} {version(self.package)}" if self.package else "written out"

    def method(self) -> Any:
        from sodaopt import geometry, msign, zoo

        kwargs = self.kwargs(zoo, geometry, msign) if callable(self.kwargs) else self.kwargs
        return getattr(zoo, self.row)(**kwargs)


@contextmanager
def in_float64() -> Iterator[None]:
    """Their code in float64 where it hard-codes less: the same lines, without the rounding.

    torch's and Keller Jordan's Muon call `.bfloat16()`; pytorch_optimizer's Newton-Schulz has bf16
    as a default argument; torch's NAdam keeps prod(mu) in the default dtype.
    """
    patched = []
    try:
        from pytorch_optimizer.optimizer.utils.matrix import zero_power_via_newton_schulz_5 as ns

        patched.append((ns, ns.__defaults__))
        ns.__defaults__ = (*ns.__defaults__[:-1], torch.float64)
    except ImportError:
        pass
    bfloat16, default = torch.Tensor.bfloat16, torch.get_default_dtype()
    torch.Tensor.bfloat16 = torch.Tensor.clone  # a copy, as a cast would be: theirs divides it
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)
        torch.Tensor.bfloat16 = bfloat16
        for f, defaults in patched:
            f.__defaults__ = defaults


class Optax:
    """An optax transformation behind torch's step()."""

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


def optax(build: Callable[[ModuleType, float], Any]) -> Make:
    def make(params: list[Parameter], lr: float) -> Optax:
        import optax

        return Optax(params, build(optax, lr))

    return make


class Plain:
    """A recurrence behind torch's step(), one dict of memory per parameter."""

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


def lion_pytorch(params: list[Parameter], lr: float, **kwargs: Any) -> Any:
    from lion_pytorch import Lion

    return Lion(params, lr, **kwargs)


def kozistr(name: str, **kwargs: Any) -> Make:
    def make(params: list[Parameter], lr: float) -> Any:
        import pytorch_optimizer

        return getattr(pytorch_optimizer, name)(params, lr=lr, **kwargs)

    return make


def kozistr_muon(params: list[Parameter], lr: float, **kwargs: Any) -> Any:
    from pytorch_optimizer import Muon

    return Muon([{"params": params, "use_muon": True}], lr=lr, **kwargs)


def kozistr_wrapper(params: list[Parameter], lr: float) -> Any:
    from pytorch_optimizer import ScheduleFreeWrapper

    return ScheduleFreeWrapper(torch.optim.Adam(params, lr), momentum=0.8)


def keller(params: list[Parameter], lr: float, **kwargs: Any) -> Any:
    from muon import SingleDeviceMuon

    return SingleDeviceMuon(params, lr, **kwargs)


def schedulefree(name: str, **kwargs: Any) -> Make:
    def make(params: list[Parameter], lr: float) -> Any:
        import schedulefree

        return getattr(schedulefree, name)(params, lr, **kwargs)

    return make


def schedulefree_wrapper(params: list[Parameter], lr: float) -> Any:
    from schedulefree import ScheduleFreeWrapperReference

    return ScheduleFreeWrapperReference(torch.optim.SGD(params, lr, momentum=0.5), momentum=0.9)


def warmup(n: int) -> Callable[[int], float]:
    return lambda k: min(1, (k + 1) / n)


def warmdown(k: int) -> float:
    return 1 - k / 40


SF, PO, LION, KELLER = "schedulefree", "pytorch-optimizer", "lion-pytorch", "muon-optimizer"
EPS = "they add 1e-8 to the norm"


def _torch() -> Iterator[Theirs]:
    o = torch.optim
    yield Theirs("sgd", {}, "torch.optim.SGD", lambda p, lr: o.SGD(p, lr), lr=0.3)
    yield Theirs(
        "sgd",
        {"momentum": 0.9},
        "torch.optim.SGD(momentum=0.9)",
        lambda p, lr: o.SGD(p, lr, momentum=0.9),
        lr=0.05,
        schedule=warmdown,
    )
    yield Theirs(
        "nesterov",
        {"momentum": 0.9},
        "torch.optim.SGD(momentum=0.9, nesterov=True)",
        lambda p, lr: o.SGD(p, lr, momentum=0.9, nesterov=True),
        lr=0.05,
    )
    yield Theirs("adam", {}, "torch.optim.Adam", lambda p, lr: o.Adam(p, lr), lr=0.01)
    yield Theirs(
        "adam",
        {"betas": (0.8, 0.95), "eps": 1e-4},
        "torch.optim.Adam(betas=(0.8, 0.95), eps=1e-4)",
        lambda p, lr: o.Adam(p, lr, betas=(0.8, 0.95), eps=1e-4),
        lr=0.01,
        schedule=warmdown,
    )
    yield Theirs("adamw", {}, "torch.optim.AdamW", lambda p, lr: o.AdamW(p, lr), lr=0.01)
    yield Theirs(
        "adamw",
        {"weight_decay": 0.5},
        "torch.optim.AdamW(weight_decay=0.5)",
        lambda p, lr: o.AdamW(p, lr, weight_decay=0.5),
        lr=0.01,
        schedule=warmdown,
    )
    for wd in (0.0, 0.5):
        yield Theirs(
            "torch_nadam",
            {"weight_decay": wd},
            f"torch.optim.NAdam(weight_decay={wd}, decoupled_weight_decay=True)",
            lambda p, lr, wd=wd: o.NAdam(p, lr, weight_decay=wd, decoupled_weight_decay=True),
            lr=0.01,
        )
    for fn, scale in (("original", "original"), ("match_rms_adamw", "adamw")):
        for wd in (0.0, 0.1):
            yield Theirs(
                "muon",
                lambda zoo, geometry, msign, scale=scale, wd=wd: {
                    "scale": getattr(geometry, scale),
                    "weight_decay": wd,
                },
                f'torch.optim.Muon(adjust_lr_fn="{fn}", weight_decay={wd})',
                lambda p, lr, fn=fn, wd=wd: o.Muon(p, lr, weight_decay=wd, adjust_lr_fn=fn),
                lr=0.02,
                schedule=warmdown if wd else None,
                note="their .bfloat16() as a copy in float64",
            )


def _lion() -> Iterator[Theirs]:
    for wd in (0.0, 0.5):
        yield Theirs(
            "lion",
            {"weight_decay": wd},
            f"lion_pytorch.Lion(weight_decay={wd})",
            lambda p, lr, wd=wd: lion_pytorch(p, lr, weight_decay=wd),
            lr=0.005,
            package=LION,
            schedule=warmdown if wd else None,
            note="decay by lr wd; its decoupled_weight_decay=True is another" if wd else "",
        )
    yield Theirs(
        "lion",
        {"betas": (0.95, 0.98), "weight_decay": 0.5},
        "pytorch_optimizer.Lion(betas=(0.95, 0.98), weight_decay=0.5)",
        kozistr("Lion", betas=(0.95, 0.98), weight_decay=0.5),
        lr=0.005,
        package=PO,
    )


def _sign() -> Iterator[Theirs]:
    yield Theirs(
        "signsgd",
        {},
        "pytorch_optimizer.SignSGD(momentum=0)",
        kozistr("SignSGD", momentum=0.0),
        lr=0.005,
        package=PO,
    )
    yield Theirs(
        "signsgd",
        {},
        "optax.sign_sgd",
        optax(lambda optax, lr: optax.sign_sgd(lr)),
        lr=0.005,
        package="optax",
    )
    for wd in (0.0, 0.5):
        yield Theirs(
            "signum",
            {"weight_decay": wd},
            f"pytorch_optimizer.SignSGD(momentum=0.9, weight_decay={wd})",
            kozistr("SignSGD", momentum=0.9, weight_decay=wd),
            lr=0.005,
            package=PO,
        )
    yield Theirs(
        "signum",
        {"beta": 0.8},
        "optax.signum(beta=0.8)",
        optax(lambda optax, lr: optax.signum(lr, beta=0.8)),
        lr=0.005,
        package="optax",
    )


def _spectral() -> Iterator[Theirs]:
    yield Theirs(
        "muon",
        {"weight_decay": 0.1},
        "muon.SingleDeviceMuon(weight_decay=0.1)",
        lambda p, lr: keller(p, lr, weight_decay=0.1),
        lr=0.02,
        package=KELLER,
        tol=1e-6,
        note="they add 1e-7 to the Frobenius norm, ours is clamped at 1e-7",
    )
    for adjusted, scale in ((False, "original"), (True, "adamw")):
        yield Theirs(
            "muon",
            lambda zoo, geometry, msign, scale=scale: {
                "scale": getattr(geometry, scale),
                "momentum": 0.9,
                "weight_decay": 0.1,
            },
            f"pytorch_optimizer.Muon(momentum=0.9, weight_decay=0.1, use_adjusted_lr={adjusted})",
            lambda p, lr, adjusted=adjusted: kozistr_muon(
                p, lr, momentum=0.9, weight_decay=0.1, use_adjusted_lr=adjusted
            ),
            lr=0.02,
            package=PO,
            note="their Newton-Schulz in float64",
        )
    norms: tuple[tuple[str, str, dict, float], ...] = (
        ("Spectral", "SPECTRAL", {"normalize": True}, 1e-12),
        ("Spectral", "SPECTRAL", {"normalize": False}, 1e-12),
        ("Sign", "SIGN", {"normalize": True}, 1e-12),
        ("Sign", "SIGN", {"normalize": False}, 1e-12),
        ("ColNorm", "COL", {"normalized": True}, 1e-6),
        ("ColNorm", "COL", {"normalized": False}, 1e-6),
        ("RowNorm", "ROW", {"normalized": True}, 1e-6),
        ("RowNorm", "ROW", {"normalized": False}, 1e-6),
    )
    for row, constraint in (("scion", True), ("uscion", False)):
        for norm, theirs, options, tol in norms:
            yield Theirs(
                row,
                lambda zoo, geometry, msign, norm=norm, options=options: {
                    "norm": _norm(geometry, msign, norm, all(options.values())),
                    "radius": 2.0,
                    "alpha": 0.2,
                },
                f"pytorch_optimizer.SCION({theirs}, {_call(options)}, constraint={constraint})",
                _scion(theirs, options, constraint),
                lr=0.005,
                tol=tol,
                package=PO,
                schedule=warmdown if norm == "Sign" else None,
                note=EPS if tol > 1e-12 else "",
            )


def _call(options: dict) -> str:
    return ", ".join(f"{k}={v}" for k, v in options.items())


def _norm(geometry: ModuleType, msign: ModuleType, name: str, hidden: bool) -> Any:
    scale = geometry.hidden if hidden else geometry.one_hot
    more = {"polar": msign.KELLER} if name == "Spectral" else {}
    return getattr(geometry, name)(scale=scale, **more)


def _scion(norm: str, options: dict, constraint: bool) -> Make:
    def make(params: list[Parameter], lr: float) -> Any:
        from pytorch_optimizer import SCION
        from pytorch_optimizer.optimizer.scion import LMONorm

        kind = {"norm_type": LMONorm[norm], "norm_kwargs": options}
        return SCION(params, lr, momentum=0.2, scale=2.0, constraint=constraint, **kind)

    return make


def _metrics() -> Iterator[Theirs]:
    yield Theirs(
        "shampoo",
        {"eps": 1e-6},
        "pytorch_optimizer.Shampoo(matrix_eps=1e-6)",
        kozistr("Shampoo", matrix_eps=1e-6),
        lr=0.05,
        tol=1e-10,
        package=PO,
        note="SVD against eigh of nearly singular L and R",
    )
    for alpha in (0.0, 3.0):
        yield Theirs(
            "simplified_ademamix",
            {"betas": (0.95, 0.99), "alpha": alpha},
            f"optax.contrib.simplified_ademamix(b1=0.95, b2=0.99, alpha={alpha})",
            optax(
                lambda optax, lr, alpha=alpha: optax.contrib.simplified_ademamix(
                    lr, b1=0.95, b2=0.99, alpha=alpha
                )
            ),
            lr=0.001,
            package="optax",
        )


def _averaged() -> Iterator[Theirs]:
    yield Theirs(
        "schedule_free",
        {},
        "schedulefree.SGDScheduleFree",
        schedulefree("SGDScheduleFree"),
        lr=0.3,
        package=SF,
    )
    yield Theirs(
        "schedule_free",
        {"beta": 0.8, "r": 1.0, "weight_lr_power": 1.0},
        "schedulefree.SGDScheduleFree(momentum=0.8, r=1, weight_lr_power=1, warmup_steps=10)",
        schedulefree("SGDScheduleFree", momentum=0.8, r=1, weight_lr_power=1, warmup_steps=10),
        lr=0.3,
        package=SF,
        schedule=warmup(10),
        own_schedule=True,
    )
    yield Theirs(
        "schedule_free",
        {},
        "schedulefree.SGDScheduleFree",
        schedulefree("SGDScheduleFree"),
        lr=0.3,
        package=SF,
        schedule=warmdown,
        note="decreasing lr",
    )
    yield Theirs(
        "schedule_free",
        {},
        "schedulefree.SGDScheduleFree",
        schedulefree("SGDScheduleFree"),
        lr=0.3,
        package=SF,
        schedule=lambda k: min(1, k / 10),
        note="warmup from lr = 0",
    )
    yield Theirs(
        "schedule_free",
        lambda zoo, geometry, msign: {"base": zoo.adam(betas=(0.0, 0.999))},
        "schedulefree.AdamWScheduleFree(warmup_steps=10)",
        schedulefree("AdamWScheduleFree", warmup_steps=10),
        lr=0.01,
        package=SF,
        schedule=warmup(10),
        own_schedule=True,
    )
    yield Theirs(
        "schedule_free",
        lambda zoo, geometry, msign: {"base": zoo.sgd(momentum=0.5)},
        "schedulefree.ScheduleFreeWrapperReference(SGD(momentum=0.5))",
        schedulefree_wrapper,
        lr=0.2,
        package=SF,
    )
    yield Theirs(
        "schedule_free",
        lambda zoo, geometry, msign: {"base": zoo.adam(), "beta": 0.8},
        "pytorch_optimizer.ScheduleFreeWrapper(Adam, momentum=0.8)",
        kozistr_wrapper,
        lr=0.01,
        package=PO,
    )
    yield Theirs(
        "schedule_free",
        {},
        "optax.contrib.schedule_free_sgd(b1=0.9)",
        optax(lambda optax, lr: optax.contrib.schedule_free_sgd(lr, b1=0.9)),
        lr=0.3,
        package="optax",
    )


THEIRS: tuple[Theirs, ...] = (
    *_torch(),
    *_lion(),
    *_sign(),
    *_spectral(),
    *_metrics(),
    *_averaged(),
)


def _plain(
    row: str, kwargs: Kwargs, label: str, step: r.Step, lr: float, **more: Any
) -> tuple[str, Theirs]:
    """Keyed by its formula, which is unique."""

    def make(params: list[Parameter], lr: float) -> Plain:
        return Plain(params, lr, step)

    return f"{row}: {label}", Theirs(row, kwargs, label, make, lr, package="", **more)


def _exact(zoo: ModuleType, geometry: ModuleType, msign: ModuleType) -> dict[str, Any]:
    return {"norm": geometry.Spectral(polar=msign.EXACT), "radius": 2.0}


def _ball(zoo: ModuleType, geometry: ModuleType, msign: ModuleType) -> dict[str, Any]:
    return {"geometry": geometry.Ball(geometry.Sign(scale=geometry.unit))}


def _clip(zoo: ModuleType, geometry: ModuleType, msign: ModuleType) -> dict[str, Any]:
    return {"geometry": geometry.Clip(geometry.Euclidean())}


_dual = {"dual_averaging": (False, True), "double_averaging": (False, False)}
_dual |= {"oda": (True, True), "moda": (True, False)}

RECURRENCES: dict[str, Theirs] = dict(
    (
        _plain("nadam", {}, "x - lr m_bar/(sqrt(v) + eps)", r.descend(r.nadam()), 0.01),
        _plain(
            "nadam",
            {"betas": (0.8, 0.99), "weight_decay": 0.5},
            "(1 - lr wd) x - lr m_bar/(sqrt(v) + eps)",
            r.decayed(r.nadam(0.8, 0.99), 0.5),
            0.01,
            schedule=warmdown,
        ),
        _plain("signsgd", {}, "x - lr sign(g)", r.descend(r.signsgd()), 0.005),
        _plain(
            "signsgd",
            lambda zoo, geometry, msign: {"map": geometry.Sharp},
            "x - lr ||g||_1 sign(g)",
            r.descend(r.signsgd(sharp=True)),
            0.005,
        ),
        _plain(
            "ssd",
            lambda zoo, geometry, msign: {"map": geometry.Sharp, "polar": msign.EXACT},
            "x - lr ||g||_nuc U V^T",
            r.descend(r.ssd()),
            0.1,
        ),
        _plain(
            "ssd",
            lambda zoo, geometry, msign: {"map": geometry.Ball, "polar": msign.EXACT},
            "x - lr U V^T",
            r.descend(r.ssd(sharp=False)),
            0.02,
            schedule=warmdown,
        ),
        _plain("signum", {}, "x - lr sign(m)", r.descend(r.signum()), 0.005),
        _plain(
            "signum",
            {"beta": 0.8, "weight_decay": 0.5},
            "(1 - lr wd) x - lr sign(m)",
            r.decayed(r.signum(0.8), 0.5),
            0.005,
            schedule=warmdown,
        ),
        _plain(
            "muon",
            lambda zoo, geometry, msign: {"polar": msign.EXACT, "weight_decay": 0.1},
            "(1 - lr wd) x - lr sqrt(max(1, o/i)) msign(g + mu b)",
            r.decayed(r.muon(), 0.1),
            0.02,
        ),
        _plain(
            "scion",
            _exact,
            "(1 - lr) x - lr rho sqrt(o/i) msign(m)",
            r.decayed(r.uscion(radius=2.0), 1.0),
            0.01,
            schedule=warmdown,
        ),
        _plain(
            "uscion",
            _exact,
            "x - lr rho sqrt(o/i) msign(m)",
            r.descend(r.uscion(radius=2.0)),
            0.01,
        ),
        _plain(
            "frank_wolfe",
            {"radius": 5.0},
            "(1 - lr) x - lr rho g/||g||",
            r.decayed(r.normalized(5.0), 1.0),
            0.02,
        ),
        _plain(
            "frank_wolfe",
            {"radius": 5.0, "alpha": 0.3},
            "(1 - lr) x - lr rho m/||m||",
            r.decayed(r.normalized(5.0, 0.3), 1.0),
            0.02,
            schedule=warmdown,
        ),
        _plain(
            "shampoo",
            {"eps": 1e-6},
            "x - lr L^(-1/4) g R^(-1/4)",
            r.descend(r.shampoo(1e-6)),
            0.05,
            tol=1e-10,
        ),
        _plain("multinorm", {}, "x - lr Sinkhorn(g)", r.descend(r.multinorm()), 0.005),
        _plain(
            "simplified_ademamix",
            {"betas": (0.99, 0.999), "alpha": 2.0},
            "x - lr (m + a g)/(sqrt(v_hat) + eps)",
            r.descend(r.simplified_ademamix(0.99, 0.999, 2.0)),
            0.001,
        ),
        _plain(
            "simplified_ademamix",
            {"betas": (0.99, 0.999), "alpha": 2.0, "beta1_warmup": 25},
            "x - lr (m + a g)/(sqrt(v_hat) + eps), half-life warmup of b",
            r.descend(r.simplified_ademamix(0.99, 0.999, 2.0, warmup=25)),
            0.001,
            schedule=warmdown,
        ),
        _plain(
            "gpa",
            lambda zoo, geometry, msign: {"base": zoo.sgd()},
            "z - lr g, averaged",
            r.gpa(r.sgd()),
            1.0,
        ),
        _plain(
            "gpa",
            lambda zoo, geometry, msign: {"base": zoo.adam(), "lam": 0.1, "lam_bar": 0.2},
            "z - lr m_hat/(sqrt(v_hat) + eps), averaged",
            r.gpa(r.adam(), lam=0.1, lam_bar=0.2),
            0.01,
        ),
        _plain(
            "gpa",
            lambda zoo, geometry, msign: {"base": zoo.adamw(weight_decay=0.5), "lam": 0.1},
            "(1 - lr wd) z - lr m_hat/(sqrt(v_hat) + eps), averaged",
            r.gpa(r.adam(), lam=0.1, wd=0.5),
            0.01,
            schedule=warmdown,
        ),
        *(
            _plain(row, kwargs, f"z0 + sums of g, {map_}", r.averaging(mirror, *how), lr)
            for row, how in _dual.items()
            for map_, kwargs, mirror, lr in (
                ("sharp", {}, r.sharp, 0.1),
                ("clip", _clip, r.clip, 0.1),
                ("sign ball", _ball, r.sign_ball, 0.002),
            )
        ),
        _plain(
            "accelerated",
            {},
            "z0 + sums of (k+1) g",
            r.averaging(r.sharp, True, False, a=lambda k: k + 1),
            0.02,
        ),
        _plain(
            "soda_dagger",
            _exact,
            "z0 + sum (j+2) u_j/(k+2)",
            r.soda_dagger(radius=2.0),
            0.01,
        ),
        _plain(
            "soda",
            lambda zoo, geometry, msign: {"method": zoo.adam()},
            "Algorithm 1 (Adam)",
            r.soda(r.adam()),
            0.01,
            schedule=warmdown,
        ),
        _plain(
            "soda",
            lambda zoo, geometry, msign: {"method": zoo.muon(polar=msign.EXACT)},
            "Algorithm 1 (Muon)",
            r.soda(r.muon()),
            0.02,
        ),
        _plain(
            "soda",
            lambda zoo, geometry, msign: {"method": zoo.lion()},
            "Algorithm 1 (Lion)",
            r.soda(r.lion()),
            0.005,
            schedule=warmdown,
        ),
        _plain(
            "soda",
            lambda zoo, geometry, msign: {
                "method": zoo.Method(geometry.Clip(geometry.Euclidean()))
            },
            "Algorithm 1 (clipped gradient)",
            r.soda(r.clipped()),
            0.3,
        ),
    )
)
