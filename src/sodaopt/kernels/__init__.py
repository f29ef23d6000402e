"""Triton: one launch where plain torch operations are many. Nothing beside this file is imported
before a tensor on a GPU asks for it."""

from functools import cache
from importlib.util import find_spec


@cache
def available() -> bool:
    return find_spec("triton") is not None
