"""Permutations that stay the same for good: on every machine, with every version of numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def permutation(n: int, seed: int, major: int = 0, minor: int = 0) -> Indices:
    """0..n-1 in an order that depends on the three numbers alone.

    numpy may change what `Generator.permutation` gives, but not the words of Philox, which is a
    published function of key and counter. The order is that of n such words of 64 bits.
    """
    key = np.array([seed, major << 32 | minor], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw(n)
    return np.argsort(words, kind="stable").astype(np.int64)
