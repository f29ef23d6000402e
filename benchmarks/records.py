"""The folder of the results, and the machine that a result names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def where(device: str) -> dict[str, Any]:
    """Return the device, the torch version and the number of threads of a result."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
