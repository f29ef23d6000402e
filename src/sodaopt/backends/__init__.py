"""Triton: one launch where plain torch operations are many. Nothing beside this file is imported
before a tensor on a GPU asks for it. All tensors of a launch are done at once: as with torch's own,
two of them must not share memory. Before a step is captured in a CUDA graph one must have run."""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec

import torch


@cache
def usable(what: str, device: torch.device) -> bool:
    """Whether a kernel compiles here and has torch's bits; else plain operations do its work.

    what: "pull", a kind of initial weights, a dtype to round to, or a map's lines; see `checks`.
    """
    if find_spec("triton") is None:
        return False
    try:
        from sodaopt.backends.triton import checks

        checks.CHECKS[what](device)
    except Exception as error:
        warnings.warn(
            f"the Triton kernel for {what!r} cannot be used on {device}, and plain operations take "
            f"its place, which are slower: {type(error).__name__}: {error}",
            stacklevel=2,
        )
        return False
    return True
