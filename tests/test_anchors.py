"""Every anchor is a clone in effect, wherever it keeps z0; and seeds make weights again."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from sodaopt import SODA, SODAWrapper, anchors, init, memory, param_groups, philox, zoo
from sodaopt.init import Init, Seeds, seeded_

F32, BF16 = torch.float32, torch.bfloat16
dtypes = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)


def model(dtype: torch.dtype = F32, seed: int | None = None) -> tuple[nn.Module, Seeds]:
    """Uniform, normal and constant weights, two of them tied."""
    net = nn.Sequential(
        nn.Embedding(13, 8), nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8, bias=False),
        nn.Linear(8, 13, bias=False),
    ).to(dtype)  # fmt: skip
    net[4].weight = net[0].weight
    return net, seeded_(net, seed or 0)


def train(net: nn.Module, opt: Any, steps: range) -> None:
    for k in steps:
        ids = torch.randint(13, (7,), generator=torch.Generator().manual_seed(k))
        opt.zero_grad()
        net(ids).float().square().mean().backward()
        opt.step()


def saved_file(net: nn.Module, path: Path) -> Path:
    save = pytest.importorskip("safetensors.torch").save_file
    save({n: p.detach().clone() for n, p in net.named_parameters()}, path)
    return path


ANCHORS: dict[str, Callable[[nn.Module, Seeds, Path], Any]] = {
    "clone": lambda net, seeds, tmp: "clone",
    "fp32": lambda net, seeds, tmp: anchors.Clone(torch.float32),
    "bf16": lambda net, seeds, tmp: "bf16",
    "cpu": lambda net, seeds, tmp: "cpu",
    "constant": lambda net, seeds, tmp: "constant",
    "auto": lambda net, seeds, tmp: "auto",
    "constant or bf16": lambda net, seeds, tmp: anchors.Constant(anchors.Rounded()),
    "seed": lambda net, seeds, tmp: seeds,
    "file": lambda net, seeds, tmp: anchors.FromFile(saved_file(net, tmp / "z0.safetensors"), net),
}
OPTIMIZERS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "SODAWrapper": lambda net, a: SODAWrapper(
        AdamW(net.parameters(), lr=0.01, weight_decay=0), anchor=a
    ),
    "SODA": lambda net, a: SODA(net.parameters(), 0.01, zoo.soda(zoo.adam()), anchor=a),
    "SODA, x and z": lambda net, a: SODA(net.parameters(), 0.01, zoo.oda(), anchor=a),
}
each = pytest.mark.parametrize("name", ANCHORS)
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def assert_bitwise(a: Any, b: Any) -> None:
    for s, t in zip(a, b, strict=True):
        assert torch.equal(s, t)


@each
@optimizers
@dtypes
def test_equal_to_a_clone(name: str, make: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """Bitwise, 200 steps for seeds; for bf16 copies, from weights that were rounded."""
    steps = range(200 if name == "seed" and make is not OPTIMIZERS["SODA, x and z"] else 20)
    (a, seeds), (b, _) = model(dtype), model(dtype)
    if "bf16" in name:
        with torch.no_grad():
            for net in (a, b):
                for p in net.parameters():
                    p.copy_(p.bfloat16())
    one, two = make(a, ANCHORS[name](a, seeds, tmp_path)), make(b, "clone")
    train(a, one, steps)
    train(b, two, steps)
    assert_bitwise(weights(a), weights(b))


@each
@optimizers
@dtypes
def test_resume_is_bitwise(name: str, make: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    (a, seeds_a), (b, seeds_b) = model(dtype), model(dtype)
    one = make(a, ANCHORS[name](a, seeds_a, tmp_path))
    two = make(b, ANCHORS[name](b, seeds_b, tmp_path))
    train(a, one, range(5))
    file = io.BytesIO()
    torch.save({"net": a.state_dict(), "opt": one.state_dict()}, file)
    train(a, one, range(5, 9))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    b.load_state_dict(saved["net"])
    two.load_state_dict(saved["opt"])
    key = "soda_z0" if isinstance(one, SODAWrapper) else "z0"
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        kept, back = one.state[p][key], two.state[q][key]
        assert (kept.dtype, kept.device, kept.shape) == (back.dtype, back.device, back.shape)
    train(b, two, range(5, 9))
    assert_bitwise(weights(a), weights(b))


@each
@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies(name: str, how: Any, tmp_path: Path) -> None:
    net, seeds = model()
    opt = OPTIMIZERS["SODA"](net, ANCHORS[name](net, seeds, tmp_path))
    train(net, opt, range(3))
    twin_net, twin = how((net, opt))
    train(net, opt, range(3, 6))
    train(twin_net, twin, range(3, 6))
    assert_bitwise(weights(net), weights(twin_net))


BYTES = {"clone": 1.0, "fp32": 1.0, "bf16": 0.5, "cpu": 1.0, "seed": 0.0, "file": 0.0}


@pytest.mark.parametrize(("name", "share"), BYTES.items())
def test_what_it_costs(name: str, share: float, tmp_path: Path) -> None:
    net, seeds = model()
    opt = OPTIMIZERS["SODAWrapper"](net, ANCHORS[name](net, seeds, tmp_path))
    train(net, opt, range(1))
    size = sum(p.nbytes for p in net.parameters())
    assert memory(net, opt).state()["soda_z0"] == share * size


def test_constants_cost_one_number() -> None:
    net, _ = model()
    opt = SODAWrapper(AdamW(net.parameters(), weight_decay=0), anchor="auto")
    train(net, opt, range(1))
    kept = {n: opt.state[p]["soda_z0"].numel() for n, p in net.named_parameters()}
    assert kept["2.weight"] == kept["2.bias"] == 1
    assert kept["1.weight"] == 128


def test_bf16_rounds_the_weights_once() -> None:
    net, _ = model()
    before = weights(net)
    opt = SODA(net.parameters(), 0.0, zoo.soda(zoo.adam()), anchor="bf16")
    assert_bitwise(weights(net), before)  # not before training begins
    train(net, opt, range(1))
    assert_bitwise(weights(net), [w.bfloat16().float() for w in before])


# -- seeds ----------------------------------------------------------------------------------------


def test_philox_known_answers() -> None:
    """The vectors that its authors publish with Random123."""
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    for counter, key, answer in (
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (pi, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        words = philox.block(tuple(torch.tensor([c]) for c in counter), key)
        assert tuple(int(w) for w in words) == answer


def test_any_part_is_the_same_part() -> None:
    key, cpu = (1, 2), torch.device("cpu")
    whole = philox.words(0, 1000, key, 77, cpu)
    for start, stop in ((0, 1), (3, 9), (501, 1000), (999, 1000), (8, 8)):
        assert torch.equal(philox.words(start, stop, key, 77, cpu), whole[start:stop])
    index = torch.randperm(1000)
    assert torch.equal(philox.words_at(index, key, 77), whole[index])
    assert (philox.words(0, 1000, key, 78, cpu) != whole).float().mean() > 0.99


MOMENTS: dict[str, tuple[Init, float, float]] = {
    "uniform": (init.uniform(-0.3, 0.5), 0.1, 0.8 / math.sqrt(12)),
    "normal": (init.normal(0.2, 0.5), 0.2, 0.5),
    "truncated": (init.truncated(0.1, 0.5), 0.1, 0.5 * 0.87962566),
    "sign": (init.sign(0.7), 0.0, 0.7),
    "constant": (init.constant(0.4), 0.4, 0.0),
}


@pytest.mark.parametrize(("rule", "mean", "std"), MOMENTS.values(), ids=MOMENTS)
def test_distributions(rule: Init, mean: float, std: float) -> None:
    n = 200_000
    x = init.Spec("w", rule, 3, (n,)).values(0, n, torch.device("cpu")).double()
    assert x.mean() == pytest.approx(mean, abs=5 * std / math.sqrt(n) + 1e-7)
    assert x.std() == pytest.approx(std, rel=0.01, abs=1e-7)
    assert x.isfinite().all()
    at = torch.tensor([5, 0, n - 1])
    assert torch.equal(init.Spec("w", rule, 3, (n,)).values_at(at).double(), x[at])


LAYERS = {
    "Linear": lambda: nn.Linear(300, 400),
    "Conv2d": lambda: nn.Conv2d(32, 64, 5),
    "grouped Conv1d": lambda: nn.Conv1d(64, 128, 3, groups=4),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(32, 64, 3),
    "Embedding": lambda: nn.Embedding(500, 200),
    "LayerNorm": lambda: nn.LayerNorm(100),
    "BatchNorm": lambda: nn.BatchNorm2d(100),
    "LSTM": lambda: nn.LSTM(100, 200),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_stands_in_for_torchs_initialisers(make: Callable[[], nn.Module]) -> None:
    ours, theirs = make(), make()
    seeded_(ours, 1)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        tol = 0.02 if p.numel() > 5000 else 0.25
        assert p.std(unbiased=False).item() == pytest.approx(
            q.std(unbiased=False).item(), rel=tol
        ), name
        assert p.abs().max().item() == pytest.approx(q.abs().max().item(), rel=max(tol, 0.2)), name


def test_seeds_are_reproducible_and_differ() -> None:
    (a, _), (b, _), (c, _) = model(), model(), model(seed=1)
    assert_bitwise(weights(a), weights(b))
    assert not torch.equal(weights(a)[1], weights(c)[1])
    assert not torch.equal(weights(a)[1].flatten()[:8], weights(a)[5].flatten()[:8])


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "loaded": lambda net: net[1].load_state_dict(nn.Linear(8, 16).state_dict()),
    "changed": lambda net: net[3].weight.data.mul_(1.0001),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_parameter_that_is_not_what_its_seed_says(change: Any) -> None:
    net, seeds = model()
    opt = SODAWrapper(AdamW(net.parameters(), weight_decay=0), anchor=seeds)
    change(net)
    with pytest.raises(ValueError, match=r"[13]\.(weight|bias) .* is not what its seed says"):
        train(net, opt, range(1))


def test_a_resized_or_unknown_parameter() -> None:
    net, seeds = model()
    net[0] = nn.Embedding(20, 8)
    opt = SODAWrapper(AdamW(net.parameters(), weight_decay=0), anchor=seeds)
    with pytest.raises(ValueError, match=r"0.weight \(20x8\) is not what its seed says"):
        train(net, opt, range(1))
    lone = nn.Linear(2, 2)
    opt = SODAWrapper(AdamW(lone.parameters(), weight_decay=0), anchor=seeds)
    lone(torch.ones(2)).sum().backward()
    with pytest.raises(ValueError, match="was not filled by"):
        opt.step()


def test_a_module_without_a_rule() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.zeros(3))

    with pytest.raises(ValueError, match=r"gate \(3\) of a Odd: give one"):
        seeded_(Odd())
    odd = Odd()
    seeded_(odd, rules=lambda path, module: {"gate": init.sign(2.0)})
    assert set(odd.gate.abs().tolist()) == {2.0}


WRONG = {
    "misspelt": ("clnoe", "did you mean 'clone'"),
    "seed alone": ("seed", r"seeds = sodaopt.init.seeded_\(model, 0\)"),
}


@pytest.mark.parametrize(("name", "words"), WRONG.values(), ids=WRONG)
def test_refused(name: str, words: str) -> None:
    net, _ = model()
    with pytest.raises(ValueError, match=words):
        SODAWrapper(AdamW(net.parameters(), weight_decay=0), anchor=name)
    with pytest.raises(TypeError, match="an anchor is a name"):
        SODA(net.parameters(), 0.1, zoo.soda(zoo.adam()), anchor=3)
    with pytest.raises(ValueError, match="reanchor needs a z0 that can be written"):
        SODAWrapper(AdamW(net.parameters(), weight_decay=0), anchor=model()[1], at_start="reanchor")


# -- memory ---------------------------------------------------------------------------------------

REPORTED: dict[str, Callable[[nn.Module], Any]] = {
    "AdamW": lambda net: AdamW(net.parameters()),
    "wrapped": lambda net: SODAWrapper(AdamW(net.parameters(), weight_decay=0)),
    "wrapped, auto": lambda net: SODAWrapper(
        AdamW(net.parameters(), weight_decay=0), anchor="auto"
    ),
    "wrapped SODA": lambda net: SODAWrapper(SODA(net.parameters(), 0.1, zoo.adam())),
    "soda_dagger": lambda net: SODA(param_groups(net, "soda_dagger"), 0.1),
    "soda_dagger, auto": lambda net: SODA(param_groups(net, "soda_dagger"), 0.1, anchor="auto"),
    "soda_dagger, bf16": lambda net: SODA(param_groups(net, "soda_dagger"), 0.1, anchor="bf16"),
}


@pytest.mark.parametrize("make", REPORTED.values(), ids=REPORTED)
@dtypes
def test_predicted_is_measured(make: Any, dtype: torch.dtype) -> None:
    with torch.device("meta"):
        ghost = nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 16), nn.LayerNorm(16),
                              nn.Linear(16, 13)).to(dtype)  # fmt: skip
    net = copy.deepcopy(ghost).to_empty(device="cpu")
    seeded_(net)
    opt = make(net)
    before = memory(net, opt)
    train(net, opt, range(1))
    after = memory(net, opt)
    assert before.predicted
    assert not after.predicted
    assert memory(ghost, make(ghost)).total() == pytest.approx(after.total(), rel=0.02)
    assert before.total() == pytest.approx(after.total(), rel=0.02)
    assert "x weights" in str(after)
