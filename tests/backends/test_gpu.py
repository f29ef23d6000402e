"""On a GPU: trajectories and rounding bits equal those of a CPU, and runs resume bit by bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import Parameter

from sodaopt import SODA, Method, SODAWrapper, anchors, backends, init, rounding, schedules, zoo
from sodaopt.anchors import pull as pulling
from sodaopt.anchors.distributions import Seeded
from sodaopt.core import optimizer
from sodaopt.core.fused import Fused
from sodaopt.geometry import Ball, BiasRMS, Spectral, polar, transposed
from sodaopt.lab.execution import Execution
from sodaopt.lab.job import Job
from sodaopt.lab.train import train
from tests.support import interpreted
from tests.support.interpreted import is_close
from tests.support.reference import rounded
from tests.support.tables import FEW, METHODS, network
from tests.support.wrapped import z0_file
from tests.wrappers.test_wrapper import MAKERS, check_rounded_once

pytestmark = pytest.mark.gpu
few = pytest.mark.parametrize("method", FEW.values(), ids=FEW)


def on_gpu(weights: list[Parameter]) -> list[Parameter]:
    return [Parameter(w.detach().cuda()) for w in weights]


def feed(opt: Any, weights: list[Parameter], steps: range) -> None:
    for k in steps:
        for w in weights:
            rng = torch.Generator().manual_seed(k)
            g = torch.randn(w.shape, generator=rng, dtype=torch.float64)
            w.grad = g.to(w.device, w.dtype)
        opt.step()


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_equals_the_cpu(method: Method) -> None:
    """In float64, in which Newton-Schulz has no products in 16 bits."""
    a, b = network(), on_gpu(network())
    feed(SODA(a, 0.03, method), a, range(8))
    feed(SODA(b, 0.03, method), b, range(8))
    for u, v in zip(a, b, strict=True):
        torch.testing.assert_close(u.detach(), v.detach().cpu(), rtol=1e-10, atol=1e-10)


@few
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_resume_is_bitwise(method: Method, dtype: torch.dtype) -> None:
    there, back = on_gpu(network(dtype)), on_gpu(network(dtype))
    one, two = SODA(there, 0.03, method), SODA(back, 0.03, method)
    feed(one, there, range(6))
    saved = copy.deepcopy((one.state_dict(), [w.detach().clone() for w in there]))
    feed(one, there, range(6, 10))
    two.load_state_dict(saved[0])
    for w, v in zip(back, saved[1], strict=True):
        w.data.copy_(v)
    feed(two, back, range(6, 10))
    assert all(torch.equal(u, v) for u, v in zip(there, back, strict=True))


@pytest.mark.parametrize("anchor", ["clone", "bf16", "cpu", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_anchors(anchor: str, dtype: torch.dtype) -> None:
    a, b = on_gpu(network(dtype)), on_gpu(network(dtype))
    if anchor == "bf16":
        for w in (*a, *b):
            w.data.copy_(w.data.bfloat16())

    def wrapped(ws: list[Parameter], anchor: str) -> SODAWrapper:
        return SODAWrapper(torch.optim.AdamW(ws, 0.01, weight_decay=0, fused=True), anchor=anchor)

    one, two = wrapped(a, anchor), wrapped(b, "clone")
    feed(one, a, range(20))
    feed(two, b, range(20))
    assert all(is_close(u, v) for u, v in zip(a, b, strict=True))
    z0 = one.state[a[0]]["soda_z0"]
    assert z0.is_cuda == (anchor != "cpu")
    if anchor == "cpu":
        assert z0.is_pinned()


IN_SLICES: dict[str, Any] = {  # anchors whose z0 is copied or made slice by slice
    "bf16": lambda net, seeds: "bf16",
    "cpu": lambda net, seeds: "cpu",
    "constant, else cpu": lambda net, seeds: anchors.Constant(anchors.Host()),
    "file": lambda net, seeds: anchors.FromFile(z0_file(net), net),
    "seed": lambda net, seeds: seeds,
}


def layers(dtype: torch.dtype, width: int) -> tuple[nn.Module, init.Seeds]:
    """Return layers of many sizes, one of them channels_last. Their weights are exact in bf16."""
    net = nn.Sequential(
        nn.Linear(width, width), nn.Conv2d(8, 16, 3), nn.Linear(width, 4 * width),
        *(nn.Linear(k, 3) for k in range(1, 9)), nn.LayerNorm(width),
    )  # fmt: skip
    net = net.to("cuda", dtype).to(memory_format=torch.channels_last)

    def rules(path: str, module: nn.Module) -> init.Rules:
        return {n: init.sign(0.25) for n, _ in module.named_parameters(recurse=False)}

    return net, init.seeded_(net, rules=rules)


@pytest.mark.parametrize("size", [100, 1 << 12, 1 << 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", IN_SLICES)
def test_anchors_in_slices(
    name: str, dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They equal a clone for slices of any size, also if the host is far ahead of the device."""
    if name == "file":
        pytest.importorskip("safetensors")
    monkeypatch.setitem(pulling.SLICES, "cuda", size)
    (a, seeds), (b, _) = layers(dtype, 64), layers(dtype, 64)
    one, two = (
        SODAWrapper(torch.optim.AdamW(net.parameters(), 0.01, weight_decay=0), anchor=anchor)
        for net, anchor in ((a, IN_SLICES[name](a, seeds)), (b, "clone"))
    )
    busy = torch.randn(4096, 4096, device="cuda")
    for k in range(10):
        for p in a.parameters():
            p.grad = torch.full_like(p, 0.1 * (k - 4))
        for _ in range(3):
            busy = busy @ busy
            busy /= busy.norm()
        one.step()
    for k in range(10):
        for q in b.parameters():
            q.grad = torch.full_like(q, 0.1 * (k - 4))
        two.step()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert is_close(p, q)


@pytest.mark.parametrize("name", IN_SLICES)
def test_anchors_in_slices_need_no_second_copy(name: str) -> None:
    if name == "file":
        pytest.importorskip("safetensors")
    net = nn.Linear(8192, 8192, bias=False, device="cuda")  # 268 MB
    opt = SODAWrapper(
        torch.optim.SGD(net.parameters(), 0.01), anchor=IN_SLICES[name](net, init.seeded_(net))
    )
    net.weight.grad = torch.ones_like(net.weight)
    opt.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        opt.step()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra < net.weight.nbytes * (1.0 if name == "seed" else 0.5)


@pytest.mark.parametrize("kind", ["between", "sign", "constant"])
def test_seeds_are_the_cpus_bits(kind: str) -> None:
    """Equal bits: single additions and products round alike on every machine (IEEE 754)."""
    spec = init.Spec("w", init.Init(kind, -0.3, 0.4), 5, (100_000,))
    cpu, gpu = (spec.values(range(17, 100_000), torch.device(d)) for d in ("cpu", "cuda"))
    assert torch.equal(cpu, gpu.cpu())


@pytest.mark.parametrize("lam", [1e-3, 1 / 3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("start", [0, 1, 2, 3, (1 << 33) + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["between", "sign", "normal", "truncated"])
def test_seeds_in_registers(kind: str, dtype: torch.dtype, start: int, lam: float) -> None:
    """The kernel agrees with plain torch operations, for every start and tail."""
    from sodaopt.backends.triton import seeded

    spec = init.Spec("w", init.Init(kind, -0.3, 0.4), (1 << 63) + 5, (1 << 34,))
    torch.manual_seed(0)
    for n in (1, 5, 2047, 2048, 2051, 100_003):
        z0 = spec.values(range(start, start + n), torch.device("cuda")).to(dtype)
        for x in (torch.randn(n, device="cuda"), torch.randn(n, device="cuda").to(dtype)):
            expected = x.lerp(z0.to(x.dtype), lam)
            cut = n // 3  # two tensors in one launch, the second of them aligned to nothing
            seeded.pull_([x[:cut], x[cut:]], [spec, spec], [start, start + cut], lam, dtype)
            assert is_close(x, expected), (n, x.dtype)


@pytest.mark.parametrize("lam", [1e-3, 1 / 3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pull_toward_16_bits(dtype: torch.dtype, offset: int, lam: float) -> None:
    from sodaopt.backends.triton import pull

    torch.manual_seed(0)
    sizes = [1, 7, 2048, 8191, 8192, 8193, 100_003]
    whole = [torch.randn(n + offset, device="cuda") for n in sizes]
    xs = [x[offset:] for x in whole]
    zs = [torch.randn(n + offset, device="cuda").to(dtype)[offset:] for n in sizes]
    expected = [x.clone() for x in whole]
    for x, z in zip(expected, zs, strict=True):
        x[offset:].lerp_(z.float(), lam)
    pull.pull_(xs, zs, lam)
    for x, y in zip(whole, expected, strict=True):
        assert is_close(x, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_has_the_cpus_bits(dtype: torch.dtype) -> None:
    """Equal bits: the rounding adds and cuts integers, which is exact on every machine."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rounded(x, dtype, 7), rounded(x.cuda(), dtype, 7).cpu())


STEPS = {  # dtype, anchor, and the kernels that a step launches
    "bf16": (torch.float32, "bf16", {"pull"}),
    "seed": (torch.float32, "seed", {"seeded"}),
    "16 bits": (torch.bfloat16, "clone", {"pull", "rounding"}),
    "16 bits, seed": (torch.float16, "seed", {"seeded", "rounding"}),
    "clone": (torch.float32, "clone", set()),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_take_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step launches each kernel once for all parameters, and agrees with plain operations."""
    from sodaopt.backends.triton import pull, seeded
    from sodaopt.backends.triton import rounding as rounding_

    dtype, anchor, wanted = STEPS[name]
    calls: list[str] = []

    def count(module: Any, function: str, name: str) -> None:
        real = getattr(module, function)

        def counted(*args: Any) -> None:
            calls.append(name)
            real(*args)

        monkeypatch.setattr(module, function, counted)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3))).to("cuda", dtype)
        seeds = init.seeded_(net)
        opt = SODAWrapper(
            torch.optim.AdamW(net.parameters(), 0.01, weight_decay=0),
            anchor=seeds if anchor == "seed" else anchor,
        )
        for k in range(6):
            calls.clear()
            for p in net.parameters():
                p.grad = torch.full_like(p, 0.1 * (k - 2))
            opt.step()
        return [p.detach() for p in net.parameters()]

    count(pull, "pull_", "pull")
    count(seeded, "pull_", "seeded")
    count(rounding_, "write_", "rounding")
    with_kernels = run()
    assert set(calls) == wanted
    assert len(calls) == len(wanted)
    monkeypatch.setattr(backends, "usable", lambda device: False)
    assert all(map(is_close, run(), with_kernels))
    assert not calls


def test_kernels_in_a_graph() -> None:
    """The capture makes tables of the addresses of temporaries, which must live as long as it."""
    spec = init.Spec("w", init.between(-1, 1), 0, (100_003,))
    p = torch.randn(100_003, device="cuda").bfloat16()

    def step(p: torch.Tensor) -> None:
        x = p.float()
        anchors.pull_([x], [Seeded(spec, x)], 0.25)
        rounding.write_([p], [x], [0], seed=0, step=3)

    step(p.clone())  # compiles the kernels, which cannot be done in a capture
    expected = [p.clone()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(p)
    for _ in range(4):  # these steps make tables of the same sizes
        expected.append(expected[-1].clone())
        step(expected[-1])
    for wanted in expected[1:]:
        others = [torch.randn(64).pin_memory().to("cuda", non_blocking=True) for _ in range(50)]
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(p, wanted)
        del others


@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("start", [0, 3, (1 << 33) + 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_in_one_pass(dtype: torch.dtype, start: int, offset: int) -> None:
    """The kernel has the bits of plain torch operations, for numbers of every magnitude. Both add
    and cut integers, which is exact.
    """
    from sodaopt.backends.triton import rounding as kernel

    torch.manual_seed(0)
    sizes = [1, 7, 1024, 4095, 4096, 4097, 100_003]
    whole = [torch.randn(n + offset, device="cuda").to(dtype) for n in sizes]
    expected = [p.clone() for p in whole]
    xs = [torch.randn(n, device="cuda") * 10 ** torch.linspace(-12, 6, n).cuda() for n in sizes]
    for x in xs[1:]:
        x[:6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 65519.0, 1e-40])
    for j, (p, x) in enumerate(zip(expected, xs, strict=True)):
        index = torch.arange(start, start + len(x), device="cuda")
        p[offset:] = rounding.stochastic(x, dtype, rounding.key(7, j, 9), index)
    pairs = enumerate(zip(whole, xs, strict=True))
    kernel.write_([(p[offset:], x, start, rounding.prefix(7, j)) for j, (p, x) in pairs], 9)
    for p, q in zip(whole, expected, strict=True):
        assert torch.equal(p.view(torch.int16), q.view(torch.int16))


def in_one_pass() -> dict[str, tuple[Method, str]]:
    """Return the elementwise methods, those with the centre "init" once for each anchor."""
    fused = {n: m for n, m in METHODS.items() if m._is_one_sum and m.geometry.elementwise}
    bare = {n: m for n, m in fused.items() if (m.centre, m.lam, m.lam_bar) == ("last", 1, 0)}
    fused |= {f"soda({n})": zoo.soda(m) for n, m in bare.items()}
    return {
        f"{n}, {anchor}": (m, anchor)
        for n, m in fused.items()
        for anchor in (("clone", "bf16", "auto") if m.centre == "init" else ("clone",))
    }


def compare_with_eager(
    weights: Any, dtype: torch.dtype, method: Method, anchor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels agree with plain operations to rounding, in weights and state, at each step.

    fp32: 1e-6 of the largest element. 16 bits: the rounding bits are the same, so an element
    differs by at most one unit in the last place, where the sum crosses a rounding boundary.
    Polar factors: the fp16 products begin with inputs that differ in the last place. Then an update
    differs by a hundredth of its length, and in 16 bits by a fifth, because more sums cross.
    """
    found, factors, slack = [], [], 0.01 if dtype.itemsize >= 4 else 0.2
    for fused in (True, False):
        counted = mock.Mock(side_effect=polar.Newton.products)
        ws = weights()
        before = [w.detach().clone() for w in ws]
        opt = SODA(ws, 0.01, method, anchor=anchor, seed=3)
        with monkeypatch.context() as patch:
            patch.setattr(polar.Newton, "products", lambda self, X, f=counted: f(self, X))
            if not fused:
                patch.setattr(optimizer, "runs_kernels", lambda p: False)
            feed(opt, ws, range(1))
            kernels = [isinstance(b.run, Fused) for b in opt._buckets()]
            assert fused == all(kernels) or dtype == torch.float64
        found.append((ws, [t for w in ws for t in opt.state[w].values()]))
        factors.append(sum(len(call.args[1]) for call in counted.call_args_list))
    (ours, our_state), (theirs, their_state) = found
    for a, b, x in zip(ours, theirs, before, strict=True):
        far, update = (a.double() - b).norm(), (b.double() - x).norm()
        assert far < slack * update if factors[0] else is_close(a, b)
    assert all(map(is_close, our_state, their_state))
    assert factors[0] == factors[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", in_one_pass())
def test_elementwise_steps(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    method, anchor = in_one_pass()[name]

    def weights() -> list[Parameter]:
        return on_gpu([*network(dtype), Parameter(torch.zeros(4100, dtype=dtype))])

    compare_with_eager(weights, dtype, method, anchor, monkeypatch)


SPECTRAL = {
    "muon": zoo.muon(),
    "uscion": zoo.uscion(),
    "soda(muon)": zoo.soda(zoo.muon(weight_decay=0)),
    "soda_dagger": zoo.soda_dagger(),
    "transposed": Method(Ball(Spectral(view=transposed)), alpha=0.1),
}


@pytest.mark.parametrize("anchor", ["clone", "bf16", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", SPECTRAL)
def test_polar_steps(
    name: str, dtype: torch.dtype, anchor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No polar factor is computed twice."""

    def weights() -> list[Parameter]:
        torch.manual_seed(0)
        shapes = [(48, 32), (32, 48), (32, 32), (48, 32)]
        return on_gpu([Parameter(torch.randn(shape).to(dtype)) for shape in shapes])

    compare_with_eager(weights, dtype, SPECTRAL[name], anchor, monkeypatch)


CAPTURED = {
    "adamw": zoo.adamw(),
    "soda(lion)": zoo.soda(zoo.lion()),
    "coupled": zoo.soda(zoo.adam(), schedules.coupled()),
    "soda_dagger": zoo.soda_dagger(),
    "biases": zoo.soda_dagger(BiasRMS()),
}


def captured(method: Method, dtype: torch.dtype) -> tuple[Any, list[Parameter], torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(48, 32), (32, 48), (64, 64)]
    weights = on_gpu([Parameter(torch.randn(shape).to(dtype)) for shape in shapes])
    lr = torch.tensor(0.01, dtype=torch.float64, device="cuda")
    for w in weights:
        w.grad = torch.randn_like(w)
    return SODA(weights, lr, method, capturable=True, seed=3), weights, lr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_step_equals_the_step(name: str, dtype: torch.dtype) -> None:
    """One graph for all steps: k, lr and the memory of schedules are read on the device."""
    found = []
    for graphed in (True, False):
        opt, weights, lr = captured(CAPTURED[name], dtype)
        opt.step()
        take = opt.step
        if graphed:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                opt.step()
            take = graph.replay
        for k in range(5):
            lr.fill_(0.01 * (5 - k))
            for w in weights:
                w.grad.copy_(torch.randn(w.shape, generator=torch.Generator().manual_seed(k)))
            take()
            if k == 2:  # a step outside the graph reads its own tables
                opt.step()
        found.append([t for w in weights for t in (w.detach(), *opt.state[w].values())])
        assert float(opt.state[weights[0]]["step"]) == 7
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("name", ["coupled", "soda_dagger"])
def test_a_compiled_step_equals_the_step(name: str, mode: str) -> None:
    """The compiled function sets the learning rate. "reduce-overhead" adds CUDA graphs."""
    found = []
    for compiles in (True, False):
        torch._dynamo.reset()
        opt, weights, lr = captured(CAPTURED[name], torch.bfloat16)

        def train(opt: SODA, lr: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
            lr.copy_(now)
            opt.step()
            return opt.param_groups[0]["params"][0] * 2

        take = torch.compile(train, mode=mode, fullgraph=True) if compiles else train
        for k in range(5):
            for w in weights:
                w.grad.copy_(torch.randn(w.shape, generator=torch.Generator().manual_seed(k)))
            assert torch.equal(take(opt, lr, lr.new_tensor(0.01 * (5 - k))), weights[0] * 2)
        found.append([t for w in weights for t in (w.detach(), *opt.state[w].values())])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", CAPTURED)
def test_no_step_waits_for_the_device(name: str) -> None:
    for captures in (True, False):
        opt, weights, _ = captured(CAPTURED[name], torch.float32)
        if not captures:
            opt = SODA(weights, 0.01, CAPTURED[name])
        opt.step()
        opt.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for w in weights:
                w.grad = w.grad.clone()
            opt.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("capturable", [False, True])
def test_a_capture_needs_capturable_and_a_tensor(capturable: bool) -> None:
    weights = on_gpu(network(torch.float32))
    opt = SODA(weights, 0.01, zoo.adamw(), capturable=capturable)
    feed(opt, weights, range(1))
    with pytest.raises(RuntimeError, match="a tensor"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        opt.step()


def test_grad_scaler_skips_on_the_device() -> None:
    opt, weights, _ = captured(zoo.adamw(), torch.float32)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    scaler.scale(torch.ones((), device="cuda"))
    before = [w.detach().clone() for w in weights]
    weights[0].grad.fill_(torch.inf)
    for steps in (0, 1):
        scaler.step(opt)
        scaler.update()
        assert [float(opt.state[w]["step"]) for w in weights] == [steps] * len(weights)
        assert all(map(torch.equal, weights, before)) == (steps == 0)
        weights[0].grad.fill_(1.0)


@pytest.mark.parametrize(("check", "arguments"), list(interpreted.spectral_cases()))
def test_kernels_of_a_spectral_step(check: str, arguments: tuple[Any, ...]) -> None:
    """The checks of the interpreter, with fp16 products."""
    assert getattr(interpreted, check)(*arguments, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_a_16_bit_step_is_the_fp32_step_rounded_once(name: str, dtype: torch.dtype) -> None:
    check_rounded_once(MAKERS[name], dtype, "cuda")


@pytest.mark.parametrize("name", [n for n in polar.BACKENDS if n != "exact"])
@pytest.mark.parametrize(
    "shape", [(2, 256, 1024), (2, 512, 512), (1, 768, 192), (1, 768, 600)], ids=str
)
def test_fp16_newton_is_close_to_its_polynomial(name: str, shape: tuple[int, ...]) -> None:
    X = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exact = polar.BACKENDS[name](X.double())
    ours = polar.BACKENDS[name](X.cuda()).double().cpu()
    assert ours.dtype == torch.float64
    assert (ours - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("optimizer", ["soda_dagger", "soda(muon)", "schedule_free(adamw)"])
@pytest.mark.parametrize("graphs", [True, False])
def test_a_resumed_run_goes_on_along_its_curve(
    optimizer: str, graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses agree closely. Some kernels sum in another order each time, so bits differ."""
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    job = Job(optimizer=optimizer, preset="nano", steps=60, eval_every=20)
    execution = Execution(device="cuda", graphs=graphs, log_every=5)
    asked = iter(range(1, 1000))
    whole = train(job, tmp_path / "whole", execution)
    cut = train(job, tmp_path / "cut", execution, stop=lambda: next(asked) == 31)
    assert cut.end is not None
    assert (cut.end["status"], cut.end["step"]) == ("stopped", 31)
    again = train(job, tmp_path / "cut", execution)
    a, b = (np.array([e["loss"] for e in r.of("step")]) for r in (whole, again))
    assert len(a) == len(b) == 60
    assert np.abs(a - b).max() < 0.05 < a[0] - a[-1]
    assert whole.end is not None
    assert again.end is not None
    assert abs(whole.end["val_loss"] - again.end["val_loss"]) < 0.02
