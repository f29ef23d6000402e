"""Describe the versions, the device and the source code of a run for its record."""

import os
import platform
import re
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from sodaopt import __version__

CPUS = Path("/proc/cpuinfo")
PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "B200": 2250e12,
}
"""Dense bf16 operations per second, from the data sheets."""
PACKAGES = ("triton", "numpy", "transformers", "accelerate", "lightning", "deepspeed", "torchao")
"""Packages whose versions matter in a bug report."""


def environment(device: torch.device) -> dict[str, Any]:
    """Return the versions and the machine of a run."""
    return {
        "sodaopt": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": device_name(device),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "world": int(os.environ.get("WORLD_SIZE", "1")),
    }


def processor() -> str:
    """Return the name of the CPU."""
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", CPUS.read_text(), flags=re.MULTILINE)
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def report() -> str:
    """Return versions and devices as the text of a bug report."""
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    found = environment(torch.device("cpu"))
    del found["world"], found["device"]
    found |= {"cuda": torch.version.cuda, "gpus": ", ".join(gpus) or None, **git()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return "\n".join(f"{name:12} {value}" for name, value in found.items())


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak(device: torch.device) -> float | None:
    """Return the peak bf16 operations per second of this device, or None if unknown."""
    name = device_name(device)
    return next((flops for key, flops in PEAKS.items() if key in name), None)


def git() -> dict[str, Any]:
    """Return the commit of this source, and whether files differ from it.

    If the source is not in its git repository, the environment variable SODAOPT_COMMIT may name the
    commit.
    """
    copied = {"commit": name} if (name := os.environ.get("SODAOPT_COMMIT")) else {}
    here = Path(__file__).resolve().parent

    def ask(*args: str) -> str:
        result = subprocess.run(
            ["git", "-C", str(here), *args], capture_output=True, text=True, timeout=10, check=True
        )
        return result.stdout.strip()

    try:
        if not ask("ls-files", "--", Path(__file__).name):  # installed inside another repository
            return copied
        dirty = ask("status", "--porcelain", "--untracked-files=no")
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(dirty)}
    except (OSError, subprocess.SubprocessError):
        return copied


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of the device, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
