"""Triton's kernels without a GPU: they agree with plain torch operations to rounding."""

import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch

from sodaopt import backends
from sodaopt.core import fused
from tests.support.interpreted import chosen, label

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("which", ["few", pytest.param("rest", marks=pytest.mark.slow)])
def test_interpreted(which: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.interpreted", which],
        env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {label(*case): True for case in chosen(which)}


TYPES = {  # types of the kernels' arguments that are not constants
    "chunks": "*i32", "rows": "*i64", "numbers": "*fp64", "squares": "*fp64",
    **dict.fromkeys(("X", "U", "A", "B", "C", "out"), "*fp16"),
    **dict.fromkeys(("first", "short", "long", "side", "depth"), "i32"),
    **dict.fromkeys(("lam", "alpha", "beta", "diagonal", "safety", "smallest"), "fp32"),
    "step": "i64",
}  # fmt: skip
CONSTANTS = {
    "MAP": "diagonal", "CENTRE": "tensor", "MOMENTUM": True, "OPTIMISM": True, "HAS_C": True,
    "IS_SQUARE": False, "KIND": "normal",
}  # fmt: skip
KERNELS = (
    "elementwise.step", "spectral._average", "spectral._normalise", "spectral._finish",
    "spectral._product", "pull._pull", "rounding._write", "seeded._pull",
)  # fmt: skip


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_a_gpu(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter accepts more than the compiler, which needs no GPU."""
    import triton
    from triton import language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module, function = name.split(".")
    kernel = getattr(import_module(f"sodaopt.backends.triton.{module}"), function)
    dtypes = {"X": tl.float32, "Z": tl.float32, "G": tl.dtype(dtype), "P": tl.dtype(dtype)}
    known = CONSTANTS | dtypes | {"ALIGNED": dtype == "bf16"}
    constants = {p.name: known[p.name] for p in kernel.params if p.is_constexpr}
    types = {n: "constexpr" if n in constants else TYPES[n] for n in kernel.arg_names}
    source = ASTSource(kernel, types, constants)
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 8})
    assert "st.global" in compiled.asm["ptx"]


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_a_launch_compiles_once_for_each_alignment() -> None:
    """Later calls pass the compiled kernel the arguments that Triton would pass, in its order."""
    from sodaopt.backends.triton import tables

    kernel = mock.MagicMock(arg_names=["x", "P", "ALIGNED", "BLOCK"])
    launch = tables.Launch(
        kernel, torch.device("cuda", 3), {"BLOCK": 8, "P": torch.float16, "Q": 1}, num_warps=2
    )
    with mock.patch.object(tables, "driver") as driver:
        for is_aligned in (True, False, False, True, True):
            launch((4, 5, 1), is_aligned, "x")
    calls = kernel.__getitem__.return_value
    assert kernel.__getitem__.call_args_list == [mock.call((4, 5, 1))] * 2
    P = tables.DTYPES[torch.float16]
    assert calls.call_args_list == [
        mock.call("x", P=P, BLOCK=8, ALIGNED=is_aligned, num_warps=2)
        for is_aligned in (True, False)
    ]
    compiled, stream = calls.return_value, driver.active.get_current_stream
    function = compiled.function, compiled.packed_metadata, None, None, None
    assert compiled.run.call_args_list == [
        mock.call(4, 5, 1, stream.return_value, *function, "x", P, is_aligned, 8)
        for is_aligned in (False, True, True)
    ]
    assert stream.call_args_list == [mock.call(3)] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "depth", "most"), [(768, 12, 0.25), (2048, 16, 0.15)])
def test_temporary_memory_is_a_share_of_the_parameters(
    width: int, depth: int, most: float, dtype: torch.dtype
) -> None:
    """The matrices of a GPT with 124 or 908 million parameters are cut into few and small parts."""
    counts = {(width, width): 4 * depth, (width, 4 * width): 2 * depth}
    shapes = [shape for shape, n in counts.items() for _ in range(n)]
    params = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    limit, parts = fused._limit(params), 0
    weights = sum(p.nbytes for p in params) + 50304 * width * dtype.itemsize
    for (short, long), n in counts.items():
        each = fused._bytes(short, long, torch.float16)
        its = fused._parts(n, each, limit)
        assert max(map(len, its)) * each <= most * weights
        parts += len(its)
    assert parts <= depth + 2


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_a_kernel_that_does_not_compile_is_replaced() -> None:
    """There is one warning, and then plain operations run."""
    there = torch.device("cuda", 99)  # no machine has so many
    with pytest.warns(UserWarning, match="falling back to slower PyTorch operations"):
        assert not backends.usable(there)
    with mock.patch("warnings.warn") as warned:
        assert not backends.usable(there)
    assert not warned.called
    backends.usable.cache_clear()


@pytest.mark.slow
def test_no_kernel_is_imported_on_a_cpu() -> None:
    """Triton takes a second to import, and a CPU step does not use it."""
    code = (
        "import sys, torch; from torch import nn; import sodaopt\n"
        "net = nn.Linear(8, 8); seeds = sodaopt.init.seeded_(net)\n"
        "opt = sodaopt.SODAWrapper(torch.optim.SGD(net.parameters(), 0.1), anchor=seeds)\n"
        "for _ in range(3): net(torch.ones(1, 8)).sum().backward(); opt.step()\n"
        "assert not [m for m in sys.modules if m.startswith('sodaopt.backends.triton')]"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
