"""Every anchor acts like a clone, wherever it keeps z0. Seeds reproduce the initial weights."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, is_tensor, nn
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sodaopt import SODA, SODAWrapper, anchors, init, memory, zoo
from sodaopt.anchors import philox, value
from sodaopt.anchors import pull as pulling
from sodaopt.anchors.distributions import Seeded
from sodaopt.anchors.init import Init, Seeds, Spec, seeded_
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


# Every anchor with a name, and some without one.
ANCHORS: dict[str, Callable[[nn.Module, Seeds, Path], Any]] = {
    **{name: lambda net, seeds, tmp, name=name: name for name in anchors.ANCHORS},
    "fp32": lambda net, seeds, tmp: anchors.Clone(torch.float32),
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


def test_the_names_are_typed() -> None:
    assert get_args(anchors.AnchorName) == ("auto", *(n for n in anchors.ANCHORS if n != "auto"))


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def assert_close(a: Any, b: Any) -> None:
    tolerance = 2.0**-6 if a[0].dtype == BF16 else 1e-5
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def assert_bitwise(a: Any, b: Any) -> None:
    for s, t in zip(a, b, strict=True):
        assert torch.equal(s, t)


@pytest.mark.slow
@each
@optimizers
@dtypes
def test_equal_to_a_clone(name: str, make: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """Bitwise, except that constants agree to rounding. bf16 copies start from rounded weights.

    The bits are equal on every CPU. Each parameter is smaller than a slice, so both anchors apply
    the same operation to whole tensors with the same values.
    """
    steps = range(20)
    (a, seeds), (b, _) = model(dtype), model(dtype)
    assert max(p.numel() for p in a.parameters()) <= pulling.SLICES["cpu"]
    anchor = anchors.anchor(ANCHORS[name](a, seeds, tmp_path))
    for p in a.parameters():
        anchor.capture(p, first=True)
    b.load_state_dict(a.state_dict())
    one, two = make(a, anchor), make(b, "clone")
    train(a, one, steps)
    train(b, two, steps)
    if "constant" in name or name == "auto":  # a constant is pulled by another formula
        assert_close(weights(a), weights(b))
    else:
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
    for n, (p, q) in enumerate(zip(a.parameters(), b.parameters(), strict=True)):
        kept, back = one.state[p][key], two.state[q][key]
        assert (kept.dtype, kept.device, kept.shape) == (back.dtype, back.device, back.shape)
        assert saved["opt"]["state"][n][key].dtype == kept.dtype
    train(b, two, range(5, 9))
    assert_bitwise(weights(a), weights(b))


@each
@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies(name: str, how: Any, tmp_path: Path) -> None:
    net, seeds = model()
    opt = OPTIMIZERS["SODA"](net, ANCHORS[name](net, seeds, tmp_path))
    train(net, opt, range(3))
    other_net, other = how((net, opt))
    train(net, opt, range(3, 6))
    train(other_net, other, range(3, 6))
    assert_bitwise(weights(net), weights(other_net))


BYTES = {"clone": 1.0, "fp32": 1.0, "bf16": 0.5, "cpu": 1.0, "seed": 0.0, "file": 0.0}


@pytest.mark.parametrize(("name", "share"), BYTES.items())
def test_the_bytes_of_z0(name: str, share: float, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("z0", [(0.0, 1.0), (1.0, 0.0)], ids=["bias first", "gain first"])
def test_each_constant_is_pulled_to_its_own_number(z0: tuple[float, float]) -> None:
    ps = [nn.Parameter(torch.full((4,), z)) for z in z0]
    opt = SODAWrapper(torch.optim.SGD(ps, lr=1.0), anchor="auto")
    xs = list(z0)
    for k in range(3):
        for p in ps:
            p.grad = -torch.ones_like(p)
        opt.step()
        xs = [x + (z - x) / (k + 2) + 1 for x, z in zip(xs, z0, strict=True)]
    for p, x in zip(ps, xs, strict=True):
        torch.testing.assert_close(p.detach(), torch.full((4,), x))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (0, 3)], ids=str)
def test_one_element_stays_a_tensor(shape: tuple[int, ...]) -> None:
    """A number on the host would save nothing, and a scalar could not be told from it."""
    p = torch.ones(shape)
    assert anchors.constant_of(p) is None
    assert anchors.Constant().capture(p, first=True).shape == shape


def test_other_attributes_of_a_parameter_are_not_its_z0() -> None:
    p: Any = nn.Parameter(torch.arange(4.0))
    p.original = torch.zeros(4)
    assert torch.equal(anchors.Constant().capture(p, first=True), p)


@pytest.mark.parametrize(
    ("anchor", "dtype"), [("bf16", BF16), (anchors.Clone(torch.float16), torch.float16)], ids=str
)
def test_weights_are_rounded_once(anchor: Any, dtype: torch.dtype) -> None:
    net, _ = model()
    before = weights(net)
    opt = SODA(net.parameters(), 0.0, zoo.soda(zoo.adam()), anchor=anchor)
    assert_bitwise(weights(net), before)  # they are not rounded before training begins
    train(net, opt, range(1))
    assert_bitwise(weights(net), [w.to(dtype).float() for w in before])


def at_a_time(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Pull n elements at a time, because the tensors of the tests fit into one slice."""
    monkeypatch.setitem(pulling.SLICES, "cpu", n)


@each
@dtypes
def test_slice_by_slice(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large tensors are pulled in slices, with the same bits."""
    (a, seeds), (b, again) = model(dtype), model(dtype)
    one = OPTIMIZERS["SODAWrapper"](a, ANCHORS[name](a, seeds, tmp_path))
    two = OPTIMIZERS["SODAWrapper"](b, ANCHORS[name](b, again, tmp_path))
    train(a, one, range(4))
    at_a_time(monkeypatch, 48)
    train(b, two, range(4))
    assert_bitwise(weights(a), weights(b))


class Largest(TorchDispatchMode):
    """Record the size of the largest new tensor, in bytes."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if is_tensor(t)}
        for t in filter(is_tensor, tree_leaves(out)):
            if t.untyped_storage().data_ptr() not in known:
                self.nbytes = max(self.nbytes, t.nbytes)
        return out


@pytest.mark.parametrize("name", ["clone", "bf16", "cpu", "auto", "seed", "file"])
def test_no_second_copy(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(1000, 1000, bias=False)
    seeds = seeded_(net)
    pretrained = copy.deepcopy(net).bfloat16() if name == "file" else net
    path = saved_file(pretrained, tmp_path / "z0.safetensors")
    made = anchors.FromFile(path, net) if name == "file" else seeds if name == "seed" else name
    anchor = anchors.anchor(made)
    p, kept = net.weight.detach(), anchor.capture(net.weight, True)
    at_a_time(monkeypatch, 1 << 14)
    with Largest() as largest:
        pulling.pull_([p], [anchor.source(net.weight, kept)], 0.25)
    assert largest.nbytes <= 8 * (1 << 14)


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
    """z0 has the file's values: one pull of 1/2 from zero ends at half of them."""
    net = nn.Linear(8, 8, bias=False).to(stored)
    path = saved_file(net, tmp_path / "z0.safetensors")
    z0 = net.weight.detach().double()
    net = net.to(dtype)
    net.weight.data.zero_()
    opt = SODAWrapper(torch.optim.SGD(net.parameters(), 0.1), anchor=anchors.FromFile(path, net))
    net.weight.grad = torch.zeros_like(net.weight)
    opt.step()
    tolerance = 2.0**-7 if dtype == BF16 else 1e-6
    torch.testing.assert_close(net.weight.double(), z0 / 2, rtol=tolerance, atol=1e-6)


# -- x + lam (z - x) ------------------------------------------------------------------------------


XS: dict[str, Callable[[], Tensor]] = {
    "fp32": lambda: torch.randn(1003),
    "fp64": lambda: torch.randn(7, 5, dtype=torch.float64),
    "0-d": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
    "rows of a view": lambda: torch.randn(50, 20)[7:31],
    "columns of a view": lambda: torch.randn(50, 20)[:, 3:9],
    "channels_last": lambda: torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
}
SOURCES: dict[str, Callable[[Tensor], tuple[Any, Tensor]]] = {
    "alike": lambda x: (z := torch.randn_like(x), z),
    "another layout": lambda x: (
        z := torch.randn_like(x).mT.contiguous().mT if x.dim() == 2 else x + 1,
        z,
    ),
    "bf16": lambda x: ((z := torch.randn_like(x).bfloat16()), z.double()),
    "fp64": lambda x: ((z := torch.randn_like(x).double()), z),
    "negated": lambda x: (torch._neg_view(torch.ones_like(x)), -torch.ones_like(x)),
    "zero": lambda x: (0.0, torch.zeros_like(x)),
    "a number": lambda x: (0.7, torch.full_like(x, 0.7)),
    "a seed": lambda x: (
        seed := Seeded(Spec("w", Init("between", -1.0, 1.0), 3, tuple(x.shape)), x),
        seed.spec.values(range(x.numel()), x.device).to(x.dtype).view(x.shape),
    ),
}


@pytest.mark.parametrize("lam", [0.0, 1e-3, 0.5, 1.0])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", XS)
def test_pull(name: str, source: str, lam: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every implementation is x + lam (z0 - x), and memory beside a view does not change."""
    at_a_time(monkeypatch, 64)
    torch.manual_seed(0)
    x = XS[name]()
    z0, expected = SOURCES[source](x)
    expected = x.double() + lam * (expected.double() - x.double())
    around = None if x._base is None else x._base.clone()
    pulling.pull_([x], [z0], lam)
    torch.testing.assert_close(x.double(), expected, rtol=1e-6, atol=1e-6)
    if around is not None:
        torch.as_strided(around, x.size(), x.stride(), x.storage_offset()).copy_(x)
        assert torch.equal(x._base, around)


@pytest.mark.parametrize(("lam", "left"), [(0.5, 3.0), (1.0, 1.0)])
def test_a_pull_that_fails(lam: float, left: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pulls before it are undone. A pull with lam = 1 has no inverse, so it stays."""

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(pulling, "_to_numbers", fail)
    first, second = torch.full((4,), 3.0), torch.full((4,), 3.0)
    with pytest.raises(MemoryError):
        pulling.pull_([first, second], [torch.ones(4), 2.0], lam)
    assert first.tolist() == [left] * 4
    assert second.tolist() == [3.0] * 4


@pytest.mark.slow
def test_import_under_another_default_device() -> None:
    code = (
        "import torch; torch.set_default_device('meta'); import sodaopt\n"
        "from torch import nn\n"
        "net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)); sodaopt.init.seeded_(net)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@each
@dtypes
@pytest.mark.parametrize("flat", [False, True])
def test_weights_are_loaded_before_the_optimizer_exists(
    name: str, dtype: torch.dtype, flat: bool, tmp_path: Path
) -> None:
    """DCP allocates state with a step without gradients, and then loads a checkpoint into it.

    That step must not move, round, check or pull the weights, which are loaded already.
    """
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
@pytest.mark.parametrize("more", [0, 2])
def test_weights_may_be_loaded_after_a_step_that_allocates_state(
    name: str, more: int, tmp_path: Path
) -> None:
    """z0 is the loaded weights, except that a file and a seed have a z0 of their own.

    more: further steps at lr = 0 before the weights are loaded.
    """
    net, seeds = model()
    opt = OPTIMIZERS["SODAWrapper"](net, ANCHORS[name](net, seeds, tmp_path))
    other, _ = model(seed=None if name in ("seed", "file") else 1)
    before = weights(net)
    DCP(False).save(net, opt, tmp_path / "saved")
    lr, opt.param_groups[0]["lr"] = opt.param_groups[0]["lr"], 0.0
    train(net, opt, range(more))
    opt.param_groups[0]["lr"] = lr
    assert_bitwise(weights(net), before)
    net.load_state_dict(other.state_dict())
    train(net, opt, range(1))
    z0 = [value(opt.anchor.source(p, opt.state[p]["soda_z0"]), p) for p in net.parameters()]
    for p in other.parameters() if opt.anchor.writable else ():
        opt.anchor.capture(p, first=True)  # it may round the weights
    for z, w in zip(z0, weights(other), strict=True):
        assert torch.equal(z.expand_as(w), w)


KEPT = ("clone", "fp32", "cpu", "auto")


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
    assert_close(weights(a), weights(b))


UNREADABLE = {
    "to a seed": ("clone", "seed", "has a z0, and Seeds does not keep it in the state: load it"),
    "to a clone": ("seed", "clone", "has no z0, and Clone keeps it in the state: load it with"),
}


@pytest.mark.parametrize(("old", "new", "words"), UNREADABLE.values(), ids=UNREADABLE)
@optimizers
def test_a_z0_that_the_anchor_cannot_read(
    old: str, new: str, words: str, make: Any, tmp_path: Path
) -> None:
    (a, seeds), (b, others) = model(), model()
    one, two = make(a, ANCHORS[old](a, seeds, tmp_path)), make(b, ANCHORS[new](b, others, tmp_path))
    train(a, one, range(1))
    with pytest.raises(ValueError, match=f"the state to load {words}"):
        two.load_state_dict(one.state_dict())


# -- seeds ----------------------------------------------------------------------------------------


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a safetensors file."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def joined(header: dict[str, Any], data: bytes, spaces: int = 0) -> bytes:
    text = json.dumps(header).encode() + b" " * spaces
    return len(text).to_bytes(8, "little") + text + data


DAMAGED: dict[str, Callable[[dict[str, Any], bytes], bytes]] = {
    "empty": lambda header, data: b"",
    "cut in the header": lambda header, data: joined(header, b"")[:20],
    "cut in the data": lambda header, data: joined(header, data)[:-5],
    "a header of 16 GiB": lambda header, data: (1 << 34).to_bytes(8, "little") + data,
    "an offset beyond the end": lambda header, data: joined(
        {n: t | {"data_offsets": [0, 1 << 40]} for n, t in header.items()}, data
    ),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_refused(damage: Any, tmp_path: Path) -> None:
    net = nn.Linear(4, 3)
    path = saved_file(net, tmp_path / "z0.safetensors")
    path.write_bytes(damage(*parts(path)))
    with pytest.raises(ValueError, match=r"z0\.safetensors is damaged .*: copy it again"):
        anchors.FromFile(path, net)


def test_only_floating_point_tensors_of_a_file_are_z0(tmp_path: Path) -> None:
    """The integers of a quantised file are not weights."""
    net = nn.Linear(4, 3)
    save = pytest.importorskip("safetensors.torch").save_file
    tensors = {"weight": torch.ones(3, 4, dtype=torch.int8), "bias": torch.zeros(3)}
    save(tensors, tmp_path / "z0.safetensors")
    anchor = anchors.FromFile(tmp_path / "z0.safetensors", net)
    assert torch.equal(anchor.entry(net.bias), tensors["bias"])
    with pytest.raises(ValueError, match="parameter in FromFile"):
        anchor.capture(net.weight, first=True)


@pytest.mark.parametrize("spaces", range(4))
def test_data_that_are_not_aligned(spaces: int, tmp_path: Path) -> None:
    net = nn.Linear(4, 3)
    path = saved_file(net, tmp_path / "z0.safetensors")
    path.write_bytes(joined(*parts(path), spaces))
    z0 = [p.detach().clone() for p in net.parameters()]
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1.0)
    base = torch.optim.SGD(net.parameters(), 1e-30)  # a real step, which moves nothing
    opt = SODAWrapper(base, anchor=anchors.FromFile(path, net))
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    for p, z in zip(net.parameters(), z0, strict=True):
        torch.testing.assert_close(p.detach(), z + 0.5)


def test_philox_known_answers() -> None:
    """The test vectors that the authors of Philox publish with Random123."""
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
    "between": (init.between(-0.3, 0.5), 0.1, 0.8 / math.sqrt(12)),
    "normal": (init.normal(0.2, 0.5), 0.2, 0.5),
    "truncated": (init.truncated(0.1, 0.5), 0.1, 0.5 * 0.87962566),
    "sign": (init.sign(0.7), 0.0, 0.7),
    "constant": (init.constant(0.4), 0.4, 0.0),
}


@pytest.mark.parametrize(("rule", "mean", "std"), MOMENTS.values(), ids=MOMENTS)
def test_distributions(rule: Init, mean: float, std: float) -> None:
    n = 200_000
    x = init.Spec("w", rule, 3, (n,)).values(range(n), torch.device("cpu")).double()
    assert x.mean() == pytest.approx(mean, abs=5 * std / math.sqrt(n) + 1e-7)
    assert x.std() == pytest.approx(std, rel=0.01, abs=1e-7)
    assert x.isfinite().all()
    at = torch.tensor([5, 0, n - 1])
    assert torch.equal(init.Spec("w", rule, 3, (n,)).values(at, at.device).double(), x[at])


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
def test_layers_start_as_large_as_torchs(make: Callable[[], nn.Module]) -> None:
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
def test_a_parameter_that_differs_from_its_seed(change: Any) -> None:
    net, seeds = model()
    opt = SODAWrapper(AdamW(net.parameters(), weight_decay=0), anchor=seeds)
    change(net)
    with pytest.raises(
        ValueError, match=r"[13]\.(weight|bias) .* does not hold the weights of its seed"
    ):
        train(net, opt, range(1))


def test_a_resized_or_unknown_parameter() -> None:
    net, seeds = model()
    net[0] = nn.Embedding(20, 8)
    opt = SODAWrapper(AdamW(net.parameters(), weight_decay=0), anchor=seeds)
    with pytest.raises(ValueError, match=r"0\.weight is 13x8 in Seeds, .* is 20x8\. Use the"):
        train(net, opt, range(1))
    lone = nn.Linear(2, 2)
    opt = SODAWrapper(AdamW(lone.parameters(), weight_decay=0), anchor=seeds)
    lone(torch.ones(2)).sum().backward()
    with pytest.raises(ValueError, match="is not in the anchor's model"):
        opt.step()


def test_a_module_without_a_rule() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.zeros(3))

    with pytest.raises(ValueError, match=r"gate \(3\) of a Odd: give one"):
        seeded_(Odd())
    with pytest.raises(ValueError, match=r"weight \(5x2\) of a Embedding: give one"):
        seeded_(nn.Embedding(5, 2, padding_idx=0))  # torch sets its row to zero
    odd = Odd()
    seeded_(odd, rules=lambda path, module: {"gate": init.sign(2.0)})
    assert set(odd.gate.abs().tolist()) == {2.0}


WRONG = {
    "misspelt": ("clnoe", "did you mean 'clone'"),
    "seed alone": ("seed", r"seeds = sodaopt.init.seeded_\(model, 0\)"),
    "file alone": ("file", r"anchors.FromFile\(path, model\)"),
}


@pytest.mark.parametrize(("name", "words"), WRONG.values(), ids=WRONG)
def test_refused(name: str, words: str) -> None:
    net, _ = model()
    with pytest.raises(ValueError, match=words):
        SODAWrapper(AdamW(net.parameters(), weight_decay=0), anchor=name)
    with pytest.raises(TypeError, match="anchor must be one of"):
        SODA(net.parameters(), 0.1, zoo.soda(zoo.adam()), anchor=3)
    with pytest.raises(ValueError, match="reanchor' needs an anchor that stores z0"):
        SODAWrapper(AdamW(net.parameters(), weight_decay=0), anchor=model()[1], at_start="reanchor")
    with pytest.raises(ValueError, match="use Seeds without Constant"):
        anchors.Constant(model()[1])


def test_a_parameter_with_the_address_of_another() -> None:
    """A framework may replace parameters, and a new one may get the id of an old one."""
    net = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    seeds = seeded_(net)
    for _ in range(20):
        for name, p in list(net.named_parameters()):
            assert seeds.entry(p).name == name
            net[int(name[0])].weight = nn.Parameter(p.detach().clone())
    with pytest.raises(ValueError, match="is not in the anchor's model"):
        seeds.entry(nn.Parameter(torch.zeros(8)))


def test_the_page_has_the_table() -> None:
    """`python -m benchmarks.anchors --docs` writes it from the results of each machine."""
    from benchmarks.anchors import PAGE, table
    from tools.pages import filled

    assert filled(PAGE, "anchors", table()) == PAGE.read_text()
