"""The lab's model and its optimizers against plain loops: a second forward pass that shares no code
with the first, and the recurrences of every optimizer written out layer by layer."""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from sodaopt.lab import model as module
from sodaopt.lab.job import Job, resolve
from sodaopt.lab.model import GPT, PAPER, Design, Shape
from sodaopt.lab.optimizers import averaged, build, parse
from sodaopt.lab.presets import PRESETS, TRACK3_DESIGN

SMALL = Shape(vocab=128, width=32, depth=2, head_dim=8, context=16)
Weights = dict[str, Tensor]


def started(shape: Shape, seed: int = 0, dtype: torch.dtype | None = None) -> GPT:
    torch.manual_seed(seed)
    return GPT(shape).to(dtype)


def scrambled(shape: Shape, dtype: torch.dtype | None = None) -> GPT:
    """No matrix is zero any more, and norms are not those of the start."""
    gpt = started(shape, 0, dtype)
    with torch.no_grad():
        for j, p in enumerate(gpt.parameters()):
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(j)).to(p)
    return gpt


def batch(shape: Shape, seed: int = 0, rows: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(shape.vocab, (rows, shape.context + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def weights(gpt: GPT) -> Weights:
    """The parameters by name. A tied matrix has the name of the head."""
    named = dict(gpt.named_parameters(remove_duplicate=False))
    if gpt.shape.design.tied:
        del named["embed.weight"]
    return {n: p.detach().clone() for n, p in named.items()}


# -- the forward pass, written differently --------------------------------------------------------


def plain_norm(x: Tensor) -> Tensor:
    eps = torch.finfo(x.dtype).eps
    return x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()


def turned(x: Tensor, half: bool) -> Tensor:
    """(..., positions, dim): the pair (i, i + dim/2) as a complex number, times e^(-i angle)."""
    positions, dim = x.shape[-2:]
    z = torch.complex(x[..., : dim // 2], x[..., dim // 2 :])
    pairs, still = range(dim // 2), dim // 4
    rates = [10_000 ** (-2 * j / dim) for j in pairs]
    if half:
        rates = [1024 ** (-j / (still - 1)) if j < still else 0.0 for j in pairs]
    rate = torch.tensor(rates, dtype=x.dtype)
    angle = torch.arange(positions, dtype=x.dtype)[:, None] * rate
    z = z * torch.exp(torch.complex(torch.zeros_like(angle), -angle))
    return torch.cat((z.real, z.imag), -1)


def affine(w: Weights, at: str, x: Tensor) -> Tensor:
    return torch.einsum("...d,ed->...e", x, w[f"{at}.weight"]) + w.get(f"{at}.bias", 0)


def gained(w: Weights, at: str, x: Tensor) -> Tensor:
    return plain_norm(x) * w.get(f"{at}.gains", 1)


def attended(w: Weights, at: str, x: Tensor, shape: Shape) -> Tensor:
    def split(name: str) -> Tensor:
        return torch.stack(affine(w, f"{at}.{name}", x).chunk(shape.width // shape.head_dim, -1), 1)

    half, scale = shape.design.half_rotary, shape.design.attention_scale
    q, k = (turned(plain_norm(split(name)), half) for name in "qk")
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
    t = x.shape[1]
    future = torch.arange(t)[:, None] < torch.arange(t)
    p = torch.exp(scores - scores.amax(-1, keepdim=True)) * (~future)
    p = p / p.sum(-1, keepdim=True)
    y = torch.cat(tuple(torch.einsum("bhts,bhsd->bhtd", p, split("v")).unbind(1)), -1)
    return affine(w, f"{at}.proj", y)


def plain_logits(w: Weights, shape: Shape, ids: Tensor) -> Tensor:
    x = w["head.weight" if shape.design.tied else "embed.weight"][ids]
    x = x.to(w["head.weight"].dtype)
    if shape.design.embedding_norm:
        x = gained(w, "norm1", x)
    for j in range(shape.depth):
        block = f"blocks.{j}"
        x = x + attended(w, f"{block}.attention", gained(w, f"{block}.norm1", x), shape)
        h = affine(w, f"{block}.mlp.fc", gained(w, f"{block}.norm2", x))
        h = shape.activation * torch.where(h > 0, h * h, torch.zeros_like(h))
        x = x + affine(w, f"{block}.mlp.proj", h)
    logits = affine(w, "head", gained(w, "norm2", x))
    c = shape.design.softcap
    return c * logits / (logits * logits + c * c).sqrt() if c else logits


def plain_loss(w: Weights, shape: Shape, ids: Tensor, targets: Tensor) -> Tensor:
    logits = plain_logits(w, shape, ids)
    chosen = logits.gather(-1, targets[..., None])[..., 0]
    top = logits.amax(-1)
    return (top + (logits - top[..., None]).exp().sum(-1).log() - chosen).mean()


def precise_angles(gpt: GPT) -> None:
    """The model keeps its table of angles in fp32."""
    shape, half = gpt.shape, gpt.shape.head_dim // 2
    positions = torch.arange(shape.context).double()
    rates = [10_000 ** (-j / half) for j in range(half)]
    if shape.design.half_rotary:
        rates = [1024 ** (-j / (half // 2 - 1)) for j in range(half // 2)] + [0.0] * (half // 2)
    angles = torch.stack([positions * rate for rate in rates], 1)
    gpt.cos, gpt.sin = angles.cos(), angles.sin()


CHANGED = {f.name: getattr(TRACK3_DESIGN, f.name) for f in fields(Design)}
BASIS = {"bf16_embedding": replace(PAPER, tied=False)}
DESIGNS = {n: replace(BASIS.get(n, PAPER), **{n: value}) for n, value in CHANGED.items()}
DESIGNS |= {"paper": PAPER, "track3": TRACK3_DESIGN}


@pytest.mark.parametrize("design", DESIGNS.values(), ids=DESIGNS)
@pytest.mark.parametrize("activation", [1.0, 2.0])
@pytest.mark.parametrize(("dtype", "close"), [(None, 1e-5), (torch.float64, 1e-10)])
def test_forward(
    activation: float, dtype: torch.dtype | None, close: float, design: Design
) -> None:
    shape = replace(SMALL, activation=activation, design=design)
    gpt = scrambled(shape, dtype)
    if dtype == torch.float64:
        precise_angles(gpt)
    x, y = batch(shape)
    w = weights(gpt)
    torch.testing.assert_close(gpt(x, y), plain_loss(w, shape, x, y), rtol=close, atol=close)
    torch.testing.assert_close(gpt(x), plain_logits(w, shape, x)[:, -1], rtol=close, atol=close)


def test_every_option_of_the_design_changes_the_model() -> None:
    """Each option changes the loss of the start, the loss with other weights, or the parameters."""
    x, y = batch(SMALL)

    def seen(design: Design) -> tuple[Any, ...]:
        shape = replace(SMALL, design=design)
        started_gpt, gpt = started(shape), scrambled(shape)
        names = [(n, p.shape, p.dtype) for n, p in gpt.named_parameters()]
        return names, gpt(x, y).item(), started_gpt.blocks[0].attention.q.weight.std().item()

    same = [n for n in CHANGED if seen(DESIGNS[n]) == seen(BASIS.get(n, PAPER))]
    assert same == []
    with pytest.raises(ValueError, match="use tied=False"):
        Design(bf16_embedding=True)


def test_the_start_of_track3() -> None:
    gpt = started(Shape(512, 256, 1, 64, 16, design=TRACK3_DESIGN))
    assert gpt.embed.weight.dtype == torch.bfloat16
    w = weights(gpt)
    zero = {name for name in w if "proj" in name or "bias" in name or "head" in name}
    assert all(not w[name].any() for name in zero)
    assert all((w[name] == 1).all() for name in w if name.endswith("gains"))
    spread = {n: float(p.float().std()) for n, p in w.items() if n not in zero and p.ndim == 2}
    assert spread.pop("embed.weight") == pytest.approx(1, rel=0.02)
    assert sorted(spread) == [f"blocks.0.{n}.weight" for n in
                              ("attention.k", "attention.q", "attention.v", "mlp.fc")]  # fmt: skip
    assert all(s == pytest.approx((0.33 / 256) ** 0.5, rel=0.02) for s in spread.values())
    assert float(w["blocks.0.mlp.fc.weight"].abs().max()) > 3 * (0.33 / 256) ** 0.5, "not uniform"


def test_no_position_sees_the_next() -> None:
    gpt, (x, _) = scrambled(SMALL), batch(SMALL)
    other = x.clone()
    other[:, -1] = (other[:, -1] + 1) % SMALL.vocab
    short = gpt(x[:, :-1])
    torch.testing.assert_close(short, plain_logits(weights(gpt), SMALL, other)[:, -2])


@pytest.mark.parametrize("logits", [1, 3 * 128, 10 * 128, 10**9])
@pytest.mark.parametrize("design", [PAPER, TRACK3_DESIGN], ids=["paper", "track3"])
def test_loss_in_pieces(logits: int, design: Design, monkeypatch: pytest.MonkeyPatch) -> None:
    """48 positions, in pieces that need not divide them."""
    gpt, (x, y) = scrambled(replace(SMALL, design=design), torch.float32), batch(SMALL)
    whole = gpt(x, y)
    whole.backward()
    grads = [p.grad.clone() for p in gpt.parameters()]
    gpt.zero_grad()
    monkeypatch.setattr(module, "LOGITS", logits)
    pieces = gpt(x, y)
    (3 * pieces).backward()
    torch.testing.assert_close(pieces, whole)
    with torch.no_grad():
        torch.testing.assert_close(gpt(x, y), whole)
    for p, g in zip(gpt.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, 3 * g, rtol=1e-4, atol=1e-6)


def test_gradients_in_pieces_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    h, w, bias = (torch.randn(size).double().requires_grad_() for size in ((7, 4), (5, 4), (5,)))
    y = torch.tensor([0, 1, 2, 3, 4, 0, 1])
    monkeypatch.setattr(module, "LOGITS", 10)
    assert torch.autograd.gradcheck(lambda h, w: module.cross_entropy(h, w, y), (h, w))
    capped = partial(module.cross_entropy, softcap=1.5)
    assert torch.autograd.gradcheck(lambda h, w, b: capped(h, w, y, b), (h, w, bias))


# -- sizes and the start --------------------------------------------------------------------------

COUNTS = {
    "nano": 1024 * 64 + 4 * 49_152,
    "small": 1024 * 256 + 6 * 786_432,
    "proxy": 8192 * 256 + 6 * 786_432,
    "gpt-64m": 50304 * 512 + 12 * 3_145_728,
    "gpt-124m": 123_568_128,
    "gpt-200m": 50304 * 1024 + 12 * 12_582_912,
    "gpt-300m": 300_318_720,
    "gpt-420m": 50304 * 1536 + 12 * 28_311_552,
    "gpt-700m": 50304 * 2048 + 12 * 50_331_648,
    "gpt-1b": 50304 * 2560 + 12 * 78_643_200,
    "track3": 2 * 50304 * 768 + 50304 + 12 * (7_077_888 + 9 * 768) + 26 * 768,
}
LABELS = {"64m": 64e6, "124m": 124e6, "200m": 200e6, "300m": 300e6, "420m": 420e6, "700m": 700e6,
          "1b": 1e9}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_parameters(name: str) -> None:
    shape = resolve(Job(preset=name), PRESETS[name].vocab or 0).shape
    with torch.device("meta"):
        counted = sum(p.numel() for p in GPT(shape).parameters())
    assert counted == shape.parameters == COUNTS[name]
    if label := LABELS.get(name.removeprefix("gpt-")):
        assert abs(counted / label - 1) < 0.1


@pytest.mark.parametrize("name", ["nano", "proxy", "gpt-64m"])
def test_first_loss(name: str) -> None:
    """Projections start at zero, so the embedding reaches the head unchanged at any depth."""
    shape = resolve(Job(preset=name, depth=1, context=32), PRESETS[name].vocab or 0).shape
    gpt = started(shape)
    E = gpt.embed.weight.detach()
    bound = 1 / math.sqrt(shape.width)
    assert E.abs().max() <= bound
    assert float(E.std()) == pytest.approx(bound / math.sqrt(3), rel=0.01)
    x, y = batch(shape, rows=1)
    h = E[x[0]].double()
    h = h / (h.square().mean(-1, keepdim=True) + 2**-23).sqrt()
    logits = h @ E.double().T
    loss = logits.logsumexp(-1).mean() - logits[torch.arange(len(y[0])), y[0]].mean()
    assert gpt(x, y).item() == pytest.approx(loss.item(), rel=1e-5)


# -- the first ten steps of every optimizer -------------------------------------------------------

Update = Callable[[dict[str, Any], Tensor, int, float], Tensor]  # memory, g, k, lr -> change
STEPS = 20  # of which ten are taken


def newton_schulz(G: Tensor) -> Tensor:
    X = G.T if G.shape[0] > G.shape[1] else G
    X = X / (X.norm().item() or 1)  # the gradients of q, k, v and fc are zero at the start
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X - 4.7750 * A @ X + 2.0315 * A @ A @ X
    return X.T if G.shape[0] > G.shape[1] else X


def adam(s: dict[str, Any], g: Tensor, k: int, lr: float) -> Tensor:
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.95 * s.get("v", 0) + 0.05 * g * g
    m, v = s["m"] / (1 - 0.9 ** (k + 1)), s["v"] / (1 - 0.95 ** (k + 1))
    return -lr * m / (v.sqrt() + 1e-8)


def ten_adam(s: dict[str, Any], g: Tensor, k: int, lr: float) -> Tensor:
    return adam(s, g, k, 10 * lr)


def muon(s: dict[str, Any], g: Tensor, k: int, lr: float) -> Tensor:
    s["m"] = 0.95 * s.get("m", 0) + 0.05 * g
    return -lr * math.sqrt(max(g.shape)) * newton_schulz(0.95 * s["m"] + 0.05 * g)


def ema(s: dict[str, Any], g: Tensor) -> Tensor:
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    return s["m"]


def optimistic(s: dict[str, Any], g: Tensor) -> Tensor:
    """SODA-dagger's: m begins at the first gradient."""
    s["m"] = 0.95 * s.get("m", g) + 0.05 * g
    return 0.95 * s["m"] + 0.05 * g


def spectral(mean: Callable[[dict[str, Any], Tensor], Tensor]) -> Update:
    return lambda s, g, k, lr: (
        -lr * 50 * math.sqrt(g.shape[0] / g.shape[1]) * newton_schulz(mean(s, g))
    )


def sign(mean: Callable[[dict[str, Any], Tensor], Tensor]) -> Update:
    return lambda s, g, k, lr: -lr * 3000 / g.shape[1] * mean(s, g).sign()


def lion(s: dict[str, Any], g: Tensor, k: int, lr: float) -> Tensor:
    u = -lr * (0.9 * s.get("m", 0) + 0.1 * g).sign()
    s["m"] = 0.99 * s.get("m", 0) + 0.01 * g
    return u


BASES: dict[str, tuple[Update, Update]] = {  # of the hidden layers, of the tied matrix
    "adamw": (adam, adam),
    "muon": (muon, ten_adam),
    "uscion": (spectral(ema), sign(ema)),
    "scion": (spectral(ema), sign(ema)),
    "soda_dagger": (spectral(optimistic), sign(optimistic)),
    "lion": (lion, lion),
}


class Moved:
    """One parameter under an average: the base moves z, gradients are taken at `at`, and `out` is
    the method's output. `pull` says which layers are pulled: all, the hidden ones, none."""

    def __init__(self, average: str, pull: str, base: str, hidden: bool, p: Tensor) -> None:
        self.average, self.base = average, base
        roles = {"soda": (True,), "soda_all": (True, False), "soda_tied": (False,)}
        self.pulled = base == "soda_dagger" or hidden in roles.get(pull, ())
        self.update, self.memory = BASES[base][0 if hidden else 1], {}
        self.at = self.out = self.z = self.z0 = p
        self.weight = 0.0

    def step(self, g: Tensor, k: int, lr: float, warmup: int) -> None:
        self.z = self.moved(self.update(self.memory, g, k, lr), k, lr, warmup)
        if self.average == "lookahead":
            if (k + 1) % 5 == 0:
                self.out = self.z = (self.out + self.z) / 2
            self.at = self.z
        elif self.average == "snoo":  # its first outer step would be the 32nd
            self.at = self.z
        elif self.average:
            self.memory["top"] = top = max(lr, self.memory.get("top", 0))
            self.weight += top**2
            c = top**2 / self.weight if self.average == "schedule_free" else 0.003287
            self.out = (1 - c) * self.out + c * self.z
            self.at = 0.9 * self.out + 0.1 * self.z
        else:
            self.at = self.out = self.z

    def moved(self, u: Tensor, k: int, lr: float, warmup: int) -> Tensor:
        if self.pulled:
            pull = 1 / (k + 2) if k >= warmup else 0  # it waits, and counts
            return (1 - pull) * self.z + pull * self.z0 + u
        return ((1 - lr) * self.z if self.base == "scion" else self.z) + u


def rate(k: int, warmup: int) -> float:
    """Of 20 steps: a rise over the warmup, constant, and a fall over the last 12."""
    rise = (k + 1) / warmup if k < warmup else 1
    return rise * min(1, (STEPS - k) / 12)


NAMES = ["adamw", "muon", "uscion", "scion", "soda_dagger", "soda(adamw)", "soda(muon)",
         "soda(uscion)", "soda(lion)", "soda_all(muon)", "soda_all(uscion)", "lion",
         "soda_tied(adamw)",
         "schedule_free(adamw)", "schedule_free(muon)", "gpa(adamw)", "gpa(muon)",
         "lookahead(muon)", "lookahead(scion)", "gpa(soda_dagger)", "lookahead(soda(muon))",
         "schedule_free(soda_all(uscion))", "gpa(soda(adamw))", "snoo(muon)"]  # fmt: skip


WARM = ["adamw", "muon", "soda_dagger", "soda(adamw)", "soda(muon)", "soda_all(uscion)",
        "schedule_free(adamw)", "lookahead(soda(muon))"]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "warm"), [*((name, None) for name in NAMES), *((name, 0.2) for name in WARM)]
)
def test_ten_steps(name: str, warm: float | None) -> None:
    """Ten steps of the paper's recipe in a small model."""
    settings = {"steps": STEPS, "width": 32, "depth": 2, "head_dim": 8, "context": 16}
    job = Job(preset="gpt-124m", optimizer=name, warmdown=0.6, warmup=warm, **settings)  # type: ignore[arg-type]
    lr = 2 ** {"adamw": -9, "muon": -11}.get(name.split("(")[-1].rstrip(")"), -12)
    ten_steps(job, replace(SMALL, activation=1.0), lr, 4 if warm else None)


NOT = ["(muon)", "((muon))", "gpa(soda(muon)", "soda(gpa(muon))", "gpa()", "muon)", "(", "soda",
       "soda(soda_dagger)", "gpa(soda(gpa(muon)))"]  # fmt: skip


@pytest.mark.parametrize("text", NOT)
def test_unknown_optimizers_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="unknown optimizer"):
        parse(text)


NANO = Shape(1024, 64, 4, 32, 128)
KNOWN = {"adamw": -9, "muon": -11, "scion": -12, "soda_dagger": -12}
LR = {
    "nano": {"adamw": -7, "muon": -9, "scion": -12, "soda_dagger": -11},
    "track3": KNOWN | {"muon": math.log2(0.025)},
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("at", PRESETS)
def test_learning_rates_of_presets(at: str, name: str) -> None:
    settings = resolve(Job(preset=at, optimizer=name), 1024).settings
    assert settings.lr == pytest.approx(2.0 ** LR.get(at, KNOWN)[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "name"),
    [*(("nano", name) for name in KNOWN), ("small", "soda_dagger"), ("proxy", "muon")],
)
def test_ten_steps_of_presets(at: str, name: str) -> None:
    """Ten steps of nano as it is, and of the others with the width of one or two heads."""
    small = Shape(256, 128, 2, 64 if at == "small" else 128, 16)
    shape = NANO if at == "nano" else small
    size = {} if at == "nano" else {"width": 128, "depth": 2, "context": 16}
    job = Job(preset=at, optimizer=name, steps=STEPS, warmdown=0.6, **size)  # type: ignore[arg-type]
    ten_steps(job, shape, 2 ** LR.get(at, KNOWN)[name], rows=1)


def ten_steps(job: Job, shape: Shape, lr: float, warmup: int | None = None, rows: int = 3) -> None:
    """Compare the losses of ten steps, and the loss of the method's output after them."""
    *outer, base = job.optimizer.rstrip(")").split("(")
    pull = next((w for w in outer if w.startswith("soda")), "")
    average = outer[0] if outer and outer[0] != pull else ""
    if warmup is None:  # 5 % of the steps for Adam and Lion
        warmup = 1 if base in ("adamw", "lion") else 0
    shape = replace(shape, activation=1.0 if base in ("adamw", "muon", "lion") else 2.0)
    resolved = resolve(job, shape.vocab)
    assert resolved.shape == shape
    assert resolved.settings.lr == lr

    gpt = started(shape)
    opt = build(resolved.name, gpt, resolved.settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, resolved.lr_factor)
    mine = {n: Moved(average, pull, base, n != "head.weight", p) for n, p in weights(gpt).items()}
    for k in range(10):
        x, y = batch(shape, k, rows)
        loss = gpt(x, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        schedule.step()

        w = {n: m.at.requires_grad_() for n, m in mine.items()}
        expected = plain_loss(w, shape, x, y)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4), k
        grads = torch.autograd.grad(expected, list(w.values()))
        for m, g in zip(mine.values(), grads, strict=True):
            m.at = m.at.detach()
            m.step(g, k, resolved.settings.lr * rate(k, warmup), warmup)
    x, y = batch(shape, 99, rows)
    outputs = {n: m.out for n, m in mine.items()}
    with averaged(opt), torch.no_grad():
        expected = plain_loss(outputs, shape, x, y).item()
        assert gpt(x, y).item() == pytest.approx(expected, rel=1e-4)


# -- track 3 --------------------------------------------------------------------------------------


def quintic(G: Tensor) -> Tensor:
    X = G.T if G.shape[0] > G.shape[1] else G
    X = X / (X.norm() + 1e-7)
    for _ in range(12):
        A = X @ X.T
        X = 2 * X - 1.5 * A @ X + 0.5 * A @ A @ X
    return X.T if G.shape[0] > G.shape[1] else X


def groups(w: Weights, hidden: list[str]) -> list[dict[str, Any]]:
    vectors = [name for name in w if w[name].ndim < 2]
    assert {"embed.weight", "head.weight", *vectors, *hidden} == set(w)
    lrs = {"embed.weight": 0.7, "head.weight": 0.004} | dict.fromkeys(vectors, 0.015)
    return [{"params": [w[name]], "lr": lr} for name, lr in lrs.items()]


@pytest.mark.parametrize("optimizer", ["muon", "soda(muon)"])
def test_ten_steps_of_track3(optimizer: str) -> None:
    """The script's optimizers written out: torch's AdamW, and Muon, on the sum of the losses."""
    shape = replace(SMALL, design=replace(TRACK3_DESIGN, bf16_embedding=False))
    job = Job(preset="track3", optimizer=optimizer, steps=STEPS)
    resolved = resolve(job, shape.vocab)
    assert (resolved.warmup, resolved.warmdown) == (0, 14)
    gpt = started(shape)
    opt = build(resolved.name, gpt, resolved.settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, resolved.lr_factor)
    w = {n: p.requires_grad_() for n, p in weights(gpt).items()}
    hidden = [n for n in w if n.startswith("blocks") and w[n].ndim == 2]
    theirs = torch.optim.AdamW(groups(w, hidden), betas=(0.8, 0.95), eps=1e-10, weight_decay=0.001)
    z0, momentum = {n: w[n].detach().clone() for n in hidden}, {n: 0 * w[n] for n in hidden}
    tokens = 512 * 1024
    for k in range(10):
        x, y = batch(shape, k)
        loss, expected = gpt(x, y), plain_loss(w, shape, x, y)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4), k
        loss.backward()
        opt.step()
        opt.zero_grad()
        schedule.step()
        theirs.zero_grad()
        (tokens * expected).backward()
        eta = min(1, (1 - k / STEPS) / 0.7)
        rates = [group["lr"] for group in theirs.param_groups]
        for group in theirs.param_groups:
            group["lr"] *= eta
        theirs.step()
        for group, lr in zip(theirs.param_groups, rates, strict=True):
            group["lr"] = lr
        for n in hidden:
            with torch.no_grad():
                g = w[n].grad
                momentum[n] = 0.95 * momentum[n] + 0.05 * g
                u = quintic(0.05 * g + 0.95 * momentum[n])
                u = -0.025 * eta * u * math.sqrt(max(1, g.shape[0] / g.shape[1]))
                pull = 1 / (k + 2) * (z0[n] - w[n])
                decay = -0.025 * eta * 0.05 * w[n]
                w[n] += u + (pull if optimizer == "soda(muon)" else decay)
                w[n].grad = None


def test_the_schedule_of_track3() -> None:
    run = resolve(Job(preset="track3", optimizer="muon"), 50257)
    assert (run.steps, run.tokens_per_step, run.shape.vocab) == (3250, 2**19, 50304)
    assert (run.settings.lr, run.settings.wd) == (0.025, 0.05)
    for k in (0, 974, 975, 976, 3249):
        expected = 1.0 if k / 3250 < 0.3 else (1 - k / 3250) / 0.7
        assert run.lr_factor(k) == pytest.approx(expected, rel=1e-12)
    late = [k for k in range(3250) if run.validates(k)]
    assert late == [*range(0, 2925, 125), *range(2925, 3250, 25)]
    assert run.eval_tokens == 20 * 2**19
    assert resolve(Job(preset="track3", optimizer="soda(muon)"), 50257).settings.wd == 0
    assert not resolve(Job(preset="track3", eval_every=100), 50257).validates(3025)
