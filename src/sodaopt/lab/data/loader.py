"""Batches from shards, in an order that is a function of the seed and one number, the position.

A window is `context` tokens; windows do not overlap, so no token is an input twice in an epoch.
In each epoch the shards are shuffled, and the windows within each shard: mixed well, and a batch
still reads from one or two files only. `prepare` shuffles the documents across shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .shards import DataError, Ids, open_shard
from .shuffle import Indices, permutation

Rows = npt.NDArray[np.int64]
Batch = tuple[Tensor, Tensor]
Stretch = tuple[int, Indices]  # a shard, and windows in it


class Windows:
    """The windows of some shards, numbered through in the order of the files."""

    def __init__(self, files: Sequence[Path], context: int) -> None:
        if context < 1:
            raise DataError(f"context must be at least 1, got {context}")
        if not files:
            raise DataError("no shards to read from")
        self.files, self.context = list(files), context
        self.shards: list[Ids] = [open_shard(path) for path in files]
        # The last token of a window's targets is the first of the next window.
        self.counts = np.array([(len(ids) - 1) // context for ids in self.shards], dtype=np.int64)
        for path, ids, count in zip(files, self.shards, self.counts, strict=True):
            if count < 1:
                raise DataError(
                    f"{path} has {len(ids)} tokens, too few for one window of {context} and the "
                    f"token after it: use a smaller context, or prepare it with more text"
                )
        self.starts = np.concatenate([[0], np.cumsum(self.counts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def stretch(self, at: int, most: int) -> Stretch:
        """Window number `at` and up to `most` from there that are in the same shard."""
        shard = int(np.searchsorted(self.starts, at, side="right")) - 1
        last = min(at + most, int(self.starts[shard + 1]))
        return shard, np.arange(at, last) - self.starts[shard]

    def read(self, rows: Rows, at: int, stretch: Callable[[int, int], Stretch]) -> None:
        """Windows at, at + 1, ... of an order into rows, each with the token after it."""
        done = 0
        while done < len(rows):
            shard, which = stretch(at + done, len(rows) - done)
            self._read(shard, which, rows[done : done + len(which)])
            done += len(which)

    def _read(self, shard: int, which: Indices, out: Rows) -> None:
        ids, count = self.shards[shard], self.counts[shard]
        blocks = ids[: count * self.context].reshape(count, self.context)
        out[:, :-1] = blocks[which]
        out[:, -1] = ids[(which + 1) * self.context]

    def fingerprint(self) -> str:
        """Tells data apart: names, sizes and the beginning of each shard (its first page)."""
        digest = hashlib.sha256()
        for path, ids in zip(self.files, self.shards, strict=True):
            digest.update(f"{path.name} {len(ids)} ".encode() + ids[:1024].tobytes())
        return digest.hexdigest()


class Tray:
    """Memory in which a batch is put together for a device. For a GPU it is pinned: the copy does
    not wait for what the GPU still has to do."""

    def __init__(self, sequences: int, context: int, device: torch.device) -> None:
        self.device, pinned = device, device.type == "cuda"
        size = sequences, context + 1
        self.ids = torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=pinned)
        event: Any = torch.cuda.Event  # torch has no types for it
        self.copied = event(blocking=True) if pinned else None  # the thread waits without a core

    def rows(self) -> Rows:
        """Where to write, once the last batch has left."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.ids.numpy()

    def serve(self, sequences: int | None = None) -> Batch:
        """Inputs, and targets one token later, on the device."""
        both = self.ids[:sequences].to(self.device, non_blocking=True, copy=True)
        if self.copied is not None:
            self.copied.record(torch.cuda.current_stream(self.device))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def trays(sequences: int, context: int, device: torch.device) -> Iterator[Tray]:
    """Two in turn: one is filled while the other one's batch is on its way. Pinning memory anew
    for each batch takes milliseconds."""
    return cycle([Tray(sequences, context, device) for _ in range(2)])


class Loader:
    """Endless batches of (inputs, targets), each [sequences / world, context] of int64.

    Every rank works out the same order and takes its rows of the batch, so the batches do not
    depend on the number of ranks. While a batch is used, the next one is read by a thread.
    """

    def __init__(
        self,
        files: Sequence[Path],
        sequences: int,
        context: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        if sequences < 1 or sequences % world:
            raise DataError(f"a batch of {sequences} sequences cannot be shared by {world} ranks")
        if not 0 <= rank < world:
            raise DataError(f"rank {rank} is not one of {world}")
        if not 0 <= seed < 1 << 64:
            raise DataError(f"seed must be in 0..2^64-1, got {seed}")
        self.windows = Windows(files, context)
        self.sequences, self.context, self.seed = sequences, context, seed
        self.rank, self.world, self.device = rank, world, torch.device(device)
        self.position = 0  # windows taken so far, by all ranks together
        self._order = lru_cache(maxsize=4)(self._permuted)
        self._thread = ThreadPoolExecutor(1, "loader")
        self._ahead: tuple[int, Future[Tray]] | None = None
        self._trays = trays(sequences // world, context, self.device)

    @property
    def epoch(self) -> float:
        """How often the data has been seen so far."""
        return self.position / len(self.windows)

    @property
    def started_epochs(self) -> int:
        """Epochs begun so far: 0 before the first batch, 2 once a window is seen again."""
        return -(-self.position // len(self.windows))

    def next(self) -> Batch:
        ahead, self._ahead = self._ahead, None
        tray = ahead[1].result() if ahead is not None else None
        if tray is None or ahead is None or ahead[0] != self.position:  # the position was moved
            tray = self._read(self.position)
        self.position += self.sequences
        self._ahead = self.position, self._thread.submit(self._read, self.position)
        return tray.serve()

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.next()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position} | self._identity()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine = self._identity()
        differ = [name for name in mine if state.get(name) != mine[name]]
        if differ:
            raise DataError(
                f"the saved run read other data: {', '.join(differ)} differ; go on with the same "
                f"data set, context and seed, or start anew"
            )
        self.position = int(state["position"])

    def _identity(self) -> dict[str, Any]:
        data = self.windows.fingerprint()
        return {"data": data, "context": self.context, "seed": self.seed}

    def _read(self, position: int) -> Tray:
        """This rank's rows of the batch at a position; it can go over the end of an epoch."""
        tray = next(self._trays)
        share = self.sequences // self.world
        self.windows.read(tray.rows(), position + self.rank * share, self._stretch)
        return tray

    def _stretch(self, at: int, most: int) -> Stretch:
        """As `Windows.stretch`, in the shuffled order, and for any number of epochs."""
        epoch, at = divmod(at, len(self.windows))
        shards = self._order(len(self.windows.files), epoch, 0)
        ends = np.cumsum(self.windows.counts[shards])
        k = int(np.searchsorted(ends, at, side="right"))
        shard = int(shards[k])
        count = int(self.windows.counts[shard])
        first = at - (int(ends[k]) - count)
        return shard, self._order(count, epoch, shard + 1)[first : first + most]

    def _permuted(self, n: int, epoch: int, minor: int) -> Indices:
        return permutation(n, self.seed, epoch, minor)


def val_batches(
    files: Sequence[Path],
    sequences: int,
    context: int,
    tokens: int | None = None,
    rank: int = 0,
    world: int = 1,
    device: torch.device | str = "cpu",
) -> Iterator[Batch]:
    """The same windows in the same order each time: the first `tokens` tokens, or all there are.

    The last batch may have fewer sequences. Only what is left of each file after its last whole
    window is not read. Each rank gets its own part; ranks may differ in number by one sequence.
    """
    windows = Windows(files, context)
    count = len(windows) if tokens is None else min(len(windows), tokens // context)
    if count < world:
        raise DataError(f"{tokens} tokens are too few for a window of {context} on {world} ranks")
    first, last = rank * count // world, (rank + 1) * count // world
    places = trays(sequences, context, torch.device(device))

    def at(k: int) -> Batch:
        tray, count = next(places), min(sequences, last - k)
        windows.read(tray.rows()[:count], k, windows.stretch)
        return tray.serve(count)

    return (at(k) for k in range(first, last, sequences))
