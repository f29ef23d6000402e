"""Triton's kernels without a GPU: the same bits as plain torch operations."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from sodaopt import backends as kernels
from tests.support.interpreted import cases, name

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_interpreted() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.interpreted"],
        env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name(*case): True for case in cases()}


def test_a_kernel_that_cannot_run_gives_way() -> None:
    """Here it cannot: there is no GPU. Elsewhere there may be no compiler, or other bits."""
    kernels.usable.cache_clear()
    if find_spec("triton") is None:
        assert not kernels.usable("pull", torch.device("cpu"))
        return
    with pytest.warns(UserWarning, match="plain operations take its place"):
        assert not kernels.usable("pull", torch.device("cpu"))


def test_no_kernel_is_imported_without_need() -> None:
    """Triton takes a second to import, and a CPU has no use for it."""
    code = (
        "import sys, torch; from torch import nn; import sodaopt\n"
        "net = nn.Linear(8, 8); seeds = sodaopt.init.seeded_(net)\n"
        "opt = sodaopt.SODAWrapper(torch.optim.SGD(net.parameters(), 0.1), anchor=seeds)\n"
        "for _ in range(3): net(torch.ones(1, 8)).sum().backward(); opt.step()\n"
        "assert not [m for m in sys.modules if m.startswith('sodaopt.backends.')]"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
