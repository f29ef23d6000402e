"""Permutations that are the same on every machine and with every version of numpy."""

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def permutation(n: int, seed: int, major: int = 0, minor: int = 0) -> Indices:
    """Return 0..n-1 in an order that depends on seed, major and minor only.

    Each number gets a 64-bit word of Philox, which is a published function of key and counter, and
    the words are sorted. A new version of numpy may change `Generator.permutation`, but not Philox.
    """
    key = np.array([seed, major << 32 | minor], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw(n)
    return np.argsort(words, kind="stable").astype(np.int64)
