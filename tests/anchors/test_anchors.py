"""Every anchor is a clone in effect, wherever it keeps z0; and seeds make weights again."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import os
import pickle
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, is_tensor, nn
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sodaopt import SODA, SODAWrapper, anchors, init, memory, native, param_groups, zoo
from sodaopt.anchors import philox
from sodaopt.anchors import pull as pulling
from sodaopt.anchors.seeded import Init, Seeds, Spec, seeded_
from tests.core.test_checkpoint import DCP

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


@pytest.fixture(params=["native", "torch"])
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pull by the compiled pass, and by torch's own as where that was not built."""
    if request.param == "torch":
        monkeypatch.setattr(native, "PULLS", {})
    elif not native.PULLS:
        pytest.skip("native.c was not built: python hatch_build.py")


def at_a_time(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Buckets of n bytes and slices of n elements, where tests are too small for more than one."""
    monkeypatch.setitem(pulling.BUCKETS, "cpu", n)
    monkeypatch.setitem(init.SLICES, "cpu", n)


@each
@dtypes
@pytest.mark.usefixtures("passes")
def test_bucket_by_bucket(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large tensors are cut, small ones share: the same bits, and never a second copy."""
    (a, seeds), (b, again) = model(dtype), model(dtype)
    one = OPTIMIZERS["SODAWrapper"](a, ANCHORS[name](a, seeds, tmp_path))
    two = OPTIMIZERS["SODAWrapper"](b, ANCHORS[name](b, again, tmp_path))
    train(a, one, range(4))
    at_a_time(monkeypatch, 48)
    train(b, two, range(4))
    assert_bitwise(weights(a), weights(b))


class Largest(TorchDispatchMode):
    """The largest tensor that is made, in bytes."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if is_tensor(t)}
        for t in filter(is_tensor, tree_leaves(out)):
            if t.untyped_storage().data_ptr() not in known:
                self.nbytes = max(self.nbytes, t.nbytes)
        return out


@pytest.mark.parametrize("name", ["clone", "bf16", "cpu", "auto", "seed", "file"])
@pytest.mark.usefixtures("passes")
def test_no_second_copy(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(1000, 1000, bias=False)
    seeds = seeded_(net)
    pretrained = copy.deepcopy(net).bfloat16() if name == "file" else net
    path = saved_file(pretrained, tmp_path / "z0.safetensors")
    made = anchors.FromFile(path, net) if name == "file" else seeds if name == "seed" else name
    anchor = anchors.anchor(made)
    p, kept = net.weight.detach(), anchor.take(net.weight, True)
    at_a_time(monkeypatch, 1 << 14)
    with Largest() as largest:
        anchor.pull_([net.weight], [p], [kept], 0.25)
    assert largest.nbytes <= 8 * (1 << 14)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_a_bucket_ahead(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where bucket n + 1 is on its way while n is pulled: who waits for what. The streams
    here only take notes; `tests/test_gpu.py` runs real ones."""
    log: list[Any] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def record_event(self) -> int:
            log.append((self.name, "done", len(log)))
            return len(log) - 1

        def wait_event(self, event: int) -> None:
            log.append((self.name, "waits for", event))

    main, side = Stream("main"), Stream("side")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(pulling, "_side_stream", lambda device: side)
    monkeypatch.setattr(Tensor, "record_stream", lambda t, stream: log.append("kept"))
    monkeypatch.setitem(pulling.BUCKETS, "cuda", 40)
    xs, zs = sized(*[(10,)] * count), sized(*[(10,)] * count)
    buckets = iter([[(x, z, F32)] for x, z in zip(xs, zs, strict=True)])
    rooms = set()
    for n, [(x, z, dtype)] in enumerate(pulling._ahead(buckets, torch.device("cpu"))):
        assert x is xs[n]
        assert torch.equal(z, zs[n])
        assert dtype == F32
        rooms.add(z.data_ptr())
        log.append(("main", "pulls", n))
    assert len(rooms) == min(count, 2)
    assert log[len(log) - len(rooms) :] == ["kept"] * len(rooms)
    sent = [j for j, e in enumerate(log) if e[:2] == ("side", "done")]
    used = [j for j, e in enumerate(log) if e[:2] == ("main", "pulls")]
    assert len(sent) == len(used) == count
    for n in range(count):
        assert ("main", "waits for", sent[n]) in log[: used[n]]
        if n:
            assert sent[n] < used[n - 1]  # ahead
        if n >= 2:  # its room is free once main has pulled from it
            assert log[used[n - 2] + 1] == ("main", "done", used[n - 2] + 1)
            assert ("side", "waits for", used[n - 2] + 1) in log[sent[n - 1] : sent[n]]


def test_other_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements are pulled to their own z0 wherever they are stored."""
    at_a_time(monkeypatch, 64)
    for name in ("clone", "bf16", "cpu", "seed"):
        nets = [nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last) for _ in range(2)]
        seeds = [seeded_(net) for net in nets]
        for net in nets:
            for p in net.parameters() if name == "bf16" else ():
                p.data.copy_(p.data.bfloat16())
            assert not net.weight.is_contiguous()
        used = [seeds[0] if name == "seed" else name, "clone"]
        opts = [OPTIMIZERS["SODAWrapper"](n, a) for n, a in zip(nets, used, strict=True)]
        for k in range(3):
            for net, opt in zip(nets, opts, strict=True):
                for p in net.parameters():
                    p.grad = torch.full_like(p, 0.1 * (k + 1))
                opt.step()
        assert_bitwise(*map(weights, nets))


FILES = {
    "a wider file": (F32, BF16),
    "a narrower file": (BF16, F32),
    "halves": (torch.float16, BF16),
}


@pytest.mark.parametrize(("stored", "dtype"), FILES.values(), ids=FILES)
def test_a_file_of_another_dtype(stored: torch.dtype, dtype: torch.dtype, tmp_path: Path) -> None:
    """It is what the parameters would hold if they were loaded from it."""
    (a, _), (b, _), (source, _) = model(dtype), model(dtype), model(stored)
    path = saved_file(source, tmp_path / "z0.safetensors")
    for net in (a, b):
        for p, q in zip(net.parameters(), source.parameters(), strict=True):
            p.data.copy_(q.data)
    one = OPTIMIZERS["SODAWrapper"](a, anchors.FromFile(path, a))
    two = OPTIMIZERS["SODAWrapper"](b, "clone")
    train(a, one, range(8)), train(b, two, range(8))
    assert_bitwise(weights(a), weights(b))


# -- x + lam (z - x) ------------------------------------------------------------------------------


def sized(*shapes: Any, dtype: torch.dtype = F32) -> list[Tensor]:
    return [torch.randn(s, dtype=dtype) for s in shapes]


LERPS: dict[str, tuple[Callable[[], list[Tensor]], Any]] = {
    "eligible": (lambda: sized((7,), (1003,), (300, 401), (1 << 20) + 5), 0.25),
    "float64": (lambda: sized((7,), (1003,), dtype=torch.float64), 1 / 3),
    "mixed dtypes": (lambda: sized((1003,)) + sized((1003,), dtype=torch.float64), 0.25),
    "bf16": (lambda: sized((1003,), dtype=BF16), 0.25),
    "bf16 and fp32": (lambda: sized((1003,), dtype=BF16) + sized((9,)), 0.25),
    "0-d": (lambda: sized((), (3,)), 0.25),
    "empty": (lambda: sized((0,), (0, 3), (5,)), 0.25),
    "a slice of rows": (lambda: [sized((50, 20))[0][7:31]], 0.25),
    "a slice of columns": (lambda: [sized((50, 20))[0][:, 3:9]], 0.25),
    "transposed": (lambda: [sized((50, 20))[0].T], 0.25),
    "channels_last": (
        lambda: [sized((4, 3, 5, 5))[0].to(memory_format=torch.channels_last)],
        0.25,
    ),
    "a tensor for lam": (lambda: sized((1003,)), torch.tensor(0.25)),
    "an int": (lambda: sized((1003,)), 1),
    "a half": (lambda: sized((1003,)), 0.5),
    "almost a half": (lambda: sized((1003,)), 0.49999),
    "beyond": (lambda: sized((1003,)), 0.9),
    "none": (lambda: sized((1003,)), 0.0),
    "all": (lambda: sized((1003,)), 1.0),
}


@pytest.mark.parametrize(("make", "lam"), LERPS.values(), ids=LERPS)
@pytest.mark.usefixtures("passes")
def test_lerp(make: Callable[[], list[Tensor]], lam: Any) -> None:
    """The fast way and the plain one are the same bits; only what is meant changes."""
    torch.manual_seed(0)
    xs, zs = make(), make()
    around = [x._base.clone() if x._base is not None else None for x in xs]
    plain = [x.clone() for x in xs]
    torch._foreach_lerp_(plain, zs, lam)
    before, versions = [z.clone() for z in zs], [x._version for x in xs]
    pulling.lerp_(xs, zs, lam)
    assert_bitwise(xs, plain)
    assert_bitwise(zs, before)
    assert all(x._version > v for x, v in zip(xs, versions, strict=True))  # autograd is told
    for x, old in zip(xs, around, strict=True):
        if old is not None:  # what is stored beside a view stays
            same = torch.zeros_like(old)
            torch.as_strided(same, x.size(), x.stride(), x.storage_offset()).fill_(1)
            assert torch.equal(x._base[same == 0], old[same == 0])


PAIRS = [(F32, F32), (torch.float64, torch.float64), (F32, BF16)]
SIZES = [0, 1, 15, 16, 17, 1023, 4095, 4096, 4097, 8191, 16384, 16389, 100_003]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("lam", [0.0, 1e-3, 1 / 3, 0.49999])
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize(
    "pair", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}".replace("torch.", "")
)
@pytest.mark.skipif(not native.PULLS, reason="native.c was not built: python hatch_build.py")
def test_native(
    pair: tuple[torch.dtype, torch.dtype], offset: int, lam: float, threads: int
) -> None:
    """lerp_ to the bit for every tail, alignment and number of threads, and nothing beside it."""
    torch.manual_seed(0)
    whole = [[torch.randn(n + 2 * offset).to(t) for n in SIZES] for t in pair]
    xs, zs = ([t[offset : len(t) - offset] for t in ts] for ts in whole)
    expected = [t.clone() for t in whole[0]]
    for t, z in zip(expected, zs, strict=True):
        t[offset : len(t) - offset].lerp_(z.to(t.dtype), lam)
    with on_threads(threads):
        native.pull_(xs, zs, lam)
    assert_bitwise(whole[0], expected)


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("passes")
def test_tensors_that_share_memory_are_pulled_one_after_the_other() -> None:
    """As torch does it: weights tied by their data are two parameters on one storage."""
    torch.manual_seed(0)
    n = 1 << 23
    start, z = torch.randn(n), torch.randn(n)
    cuts = [slice(n * k // 8, None) for k in range(7, 0, -1)]
    views = [slice(None), *cuts, slice(None, n // 3), slice(n // 5, n)]
    expected = start.clone()
    for at in views:
        expected[at].lerp_(z[at], 0.3)
    for _ in range(6):  # who comes first is a matter of luck
        x = start.clone()
        with on_threads(2):
            pulling.lerp_([x[at] for at in views], [z[at] for at in views], 0.3)
        assert torch.equal(x, expected)


@pytest.mark.usefixtures("passes")
def test_a_freed_storage_is_an_error() -> None:
    p = nn.Parameter(torch.randn(1 << 16))
    opt = SODAWrapper(torch.optim.SGD([p], 0.1))
    p.grad = torch.ones_like(p)
    opt.step()
    p.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError):
        opt.step()


@pytest.mark.usefixtures("passes")
def test_a_negated_view_is_not_read_as_it_lies() -> None:
    x, z = torch.zeros(1 << 16), torch._neg_view(torch.ones(1 << 16))
    pulling.lerp_([x], [z], 0.25)
    assert (x == -0.25).all()


@pytest.mark.skipif(not native.PULLS, reason="native.c was not built: python hatch_build.py")
@pytest.mark.parametrize("fault", ["x[e] +=", "x[i] +="], ids=["in the blocks", "in the tail"])
def test_a_fault_in_the_library_is_found(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = (Path(native.__file__).with_name("native.c")).read_text(encoding="utf-8")
    assert fault in source
    (tmp_path / "n.c").write_text(source.replace(fault, f"{fault} 2 *"), encoding="utf-8")
    cc = shlex.split(os.environ.get("CC") or "cc")
    build = [*cc, "-O1", "-fPIC", "-fopenmp", "-ffp-contract=fast"]
    subprocess.run([*build, "-c", "n.c", "-o", "n.o"], cwd=tmp_path, check=True)
    subprocess.run([*cc, "-shared", "n.o", "-o", "n.so"], cwd=tmp_path, check=True)
    monkeypatch.setattr(native, "PULLS", {})
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "n.so")
    native._load()
    assert native.PULLS == {}


def test_import_under_another_default_device() -> None:
    code = (
        "import torch; torch.set_default_device('meta'); import sodaopt\n"
        "from torch import nn\n"
        "net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)); sodaopt.init.seeded_(net)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(not native.PULLS, reason="native.c was not built: python hatch_build.py")
@pytest.mark.parametrize("fault", ["other bits", "a symbol is missing", "no library"])
def test_a_library_that_is_not_sound_is_not_used(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "PULLS", {})
    if fault == "other bits":
        lerp = Tensor.lerp
        monkeypatch.setattr(Tensor, "lerp", lambda x, z, w: lerp(x, z, w).nextafter(z))
    elif fault == "a symbol is missing":
        monkeypatch.setattr(native, "PAIRS", [*native.PAIRS, (torch.float16, torch.float16)])
    else:
        monkeypatch.setattr(native, "LIBRARY", tmp_path / "libnative.so")
    native._load()
    assert native.PULLS == {}


# -- checkpoints ----------------------------------------------------------------------------------


@each
@dtypes
@pytest.mark.parametrize("flat", [False, True])
def test_weights_are_loaded_before_the_optimizer_exists(
    name: str, dtype: torch.dtype, flat: bool, tmp_path: Path
) -> None:
    """Then a distributed checkpoint is loaded into the state of an optimizer of other weights,
    made by a step without gradients, which must not move, round, check or pull them."""
    (a, seeds), (b, again) = model(dtype), model(dtype)
    one, two = (
        OPTIMIZERS["SODAWrapper"](net, ANCHORS[name](net, its, tmp_path))
        for net, its in ((a, seeds), (b, again))
    )
    train(a, one, range(4))
    one.zero_grad()
    DCP(flat).save(a, one, tmp_path / "saved")
    b.load_state_dict(a.state_dict())
    DCP(flat).load(b, two, tmp_path / "saved")
    assert_bitwise(weights(a), weights(b))
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        kept, back = one.state[p]["soda_z0"], two.state[q]["soda_z0"]
        assert kept.dtype == back.dtype
        assert torch.equal(kept, back)
    train(a, one, range(4, 8))
    train(b, two, range(4, 8))
    assert_bitwise(weights(a), weights(b))


@each
def test_a_dry_step_decides_nothing(name: str, tmp_path: Path) -> None:
    """Nor does it stop weights from being loaded after it, but where z0 does not depend on them."""
    net, seeds = model()
    opt = OPTIMIZERS["SODAWrapper"](net, ANCHORS[name](net, seeds, tmp_path))
    other, _ = model(seed=None if name in ("seed", "file") else 1)
    before = weights(net)
    DCP(False).save(net, opt, tmp_path / "saved")
    assert_bitwise(weights(net), before)
    net.load_state_dict(other.state_dict())
    train(net, opt, range(1))
    z0 = [opt.anchor.give(p, opt.state[p]["soda_z0"]) for p in net.parameters()]
    for z, w in zip(z0, weights(other), strict=True):
        assert torch.equal(z.float().expand_as(w), w.bfloat16().float() if "bf16" in name else w)


KEPT = ("clone", "fp32", "cpu", "constant", "auto")


@pytest.mark.parametrize("new", KEPT)
@pytest.mark.parametrize("old", KEPT)
@optimizers
def test_exact_anchors_read_each_other(old: str, new: str, make: Any, tmp_path: Path) -> None:
    (a, seeds), (b, _) = model(), model()
    one, two = make(a, ANCHORS[old](a, seeds, tmp_path)), make(b, ANCHORS[new](b, seeds, tmp_path))
    train(a, one, range(3))
    b.load_state_dict(a.state_dict())
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    train(a, one, range(3, 6)), train(b, two, range(3, 6))
    assert_bitwise(weights(a), weights(b))


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
    "uniform": (init.between(-0.3, 0.5), 0.1, 0.8 / math.sqrt(12)),
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


def test_one_function_makes_every_z0(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made from a seed goes through `regenerate_`, which may take a kernel."""
    calls: list[tuple[str, int, float]] = []

    def kernel(xs: list[Tensor], ps: list[Tensor], specs: list[Spec], lam: Any) -> None:
        for x, spec in zip(xs, specs, strict=True):
            assert x.dim() == 1
            calls.append((spec.name, x.numel(), lam))
            x.lerp_(torch.full_like(x, 0.5), lam)

    monkeypatch.setattr(init, "regenerate_", kernel)
    net = nn.Linear(4, 3, bias=False)
    seeds = seeded_(net)
    assert_bitwise(weights(net), [torch.full((3, 4), 0.5)])
    opt = SODAWrapper(torch.optim.SGD(net.parameters(), 0.0), anchor=seeds)
    for _ in range(2):
        net.weight.grad = torch.ones(3, 4)
        opt.step()
    opt.diagnostics()
    assert calls == [("weight", 12, lam) for lam in (1.0, 1.0, 1 / 3, 1.0)]


def test_a_parameter_with_the_address_of_another() -> None:
    """Parameters that a framework puts in others' places may get their ids."""
    net = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    seeds = seeded_(net)
    for _ in range(20):
        for name, p in list(net.named_parameters()):
            assert seeds.of(p).name == name
            net[int(name[0])].weight = nn.Parameter(p.detach().clone())
    assert seeds.of(nn.Parameter(torch.zeros(8))) is None


# -- memory ---------------------------------------------------------------------------------------

REPORTED: dict[str, Callable[[nn.Module], Any]] = {
    "AdamW": lambda net: AdamW(net.parameters()),
    "wrapped": lambda net: SODAWrapper(AdamW(net.parameters(), weight_decay=0)),
    "wrapped, auto": lambda net: SODAWrapper(
        AdamW(net.parameters(), weight_decay=0), anchor="auto"
    ),
    "wrapped, bf16": lambda net: SODAWrapper(
        AdamW(net.parameters(), weight_decay=0), anchor="bf16"
    ),
    "wrapped, cpu": lambda net: SODAWrapper(AdamW(net.parameters(), weight_decay=0), anchor="cpu"),
    "wrapped, seed": lambda net: SODAWrapper(
        AdamW(net.parameters(), weight_decay=0), anchor=seeded_(net)
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


NOTES: dict[str, tuple[str, str]] = {
    "clone": ("clone", "z0: Clone keeps 1.63 kB; a clone 1.63 kB, bf16 816 B, cpu, file and seed"),
    "auto": ("auto", "z0: Constant keeps 1.51 kB; a clone 1.63 kB, bf16 816 B, cpu, file and seed"),
    "bf16": ("bf16", "the weights are rounded to bf16 once, at the first step"),
    "constant or bf16": ("constant or bf16", "the weights are rounded to bf16 once"),
    "cpu": ("cpu", "z0: Host keeps 1.63 kB on the host"),
    "file": ("file", "z0: FromFile keeps nothing"),
    "seed": ("seed", "z0 is made again at each step: about"),
}


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize(("name", "words"), NOTES.values(), ids=NOTES)
def test_the_report_says(name: str, words: str, stepped: bool, tmp_path: Path) -> None:
    """What the anchor does, and what the others would save."""
    net, seeds = model()
    opt = OPTIMIZERS["SODAWrapper"](net, ANCHORS[name](net, seeds, tmp_path))
    if stepped:
        train(net, opt, range(2))
    assert words in str(memory(net, opt))


def test_the_report_offers_cheaper_seeds() -> None:
    net = nn.Linear(800, 800, bias=False)
    made = {kind: {"weight": getattr(init, kind)(0.0, 0.02)} for kind in ("normal", "uniform")}
    said = {}
    for kind, rule in made.items():
        seeds = seeded_(net, rules=lambda path, module, rule=rule: rule)
        opt = SODAWrapper(AdamW(net.parameters(), weight_decay=0), anchor=seeds)
        said[kind] = str(memory(net, opt))
    assert "normal weights take" in said["normal"]
    assert "uniform or sign ones would take" in said["normal"]
    assert "would take" not in said["uniform"]


def test_the_page_has_the_table() -> None:
    """`python -m benchmarks.anchors --docs` writes it from the results of each machine."""
    from benchmarks.anchors import PAGE, table
    from benchmarks.pages import filled

    assert filled(PAGE, "anchors", table()) == PAGE.read_text()
