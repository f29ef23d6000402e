"""Read batches from shards, in an order that depends on the seed and the position only.

A window is `context` tokens. Windows do not overlap, so a token is an input once in an epoch. Each
epoch shuffles the shards, and the windows within each shard, so a batch reads from one or two
files. `prepare` has shuffled the documents across shards.
"""

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

WindowIds = npt.NDArray[np.int64]
Batch = tuple[Tensor, Tensor]
Stretch = tuple[int, Indices]  # index of a shard, and windows in it


class Windows:
    """The windows of some shards, numbered in the order of the files.

    multiple: the number of windows of each shard is rounded down to a multiple of this
    """

    def __init__(self, files: Sequence[Path], context: int, multiple: int = 1) -> None:
        if context < 1:
            raise DataError(f"context must be at least 1, got {context}")
        if not files:
            raise DataError("the data set has no shards: prepare or download it again")
        self.files, self.context = list(files), context
        self.shards: list[Ids] = [open_shard(path) for path in files]
        # The last target of a window is the first token of the next window.
        counts = [(len(ids) - 1) // context // multiple * multiple for ids in self.shards]
        self.counts = np.array(counts, dtype=np.int64)
        needed = "a window" if multiple == 1 else f"a batch of {multiple} windows"
        for path, ids, count in zip(files, self.shards, self.counts, strict=True):
            if count < 1:
                raise DataError(
                    f"{path} has {len(ids)} tokens, too few for {needed} of {context} and the "
                    f"token after it: use a smaller context, or prepare more text"
                )
        self.starts = np.concatenate([[0], np.cumsum(self.counts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def stretch(self, at: int, most: int) -> Stretch:
        """Return window `at` and the following ones in the same shard, at most `most`."""
        shard = int(np.searchsorted(self.starts, at, side="right")) - 1
        last = min(at + most, int(self.starts[shard + 1]))
        return shard, np.arange(at, last) - self.starts[shard]

    def read(self, out: WindowIds, at: int, stretch: Callable[[int, int], Stretch]) -> None:
        """Read windows at, at + 1, ... of an order, each with the token after it.

        out: array of shape (windows, context + 1)
        stretch: the order, as `self.stretch` or a shuffled form of it
        """
        done = 0
        while done < len(out):
            shard, which = stretch(at + done, len(out) - done)
            self._read(shard, which, out[done : done + len(which)])
            done += len(which)

    def _read(self, shard: int, which: Indices, out: WindowIds) -> None:
        ids, count = self.shards[shard], self.counts[shard]
        blocks = ids[: count * self.context].reshape(count, self.context)
        out[:, :-1] = blocks[which]
        out[:, -1] = ids[(which + 1) * self.context]

    def fingerprint(self) -> str:
        """Return a hash of the name, the size and the first page of each shard."""
        digest = hashlib.sha256()
        for path, ids in zip(self.files, self.shards, strict=True):
            digest.update(f"{path.name} {len(ids)} ".encode() + ids[:1024].tobytes())
        return digest.hexdigest()


class BatchBuffer:
    """Host memory for a batch. It is pinned for a GPU, so that the copy is asynchronous."""

    def __init__(self, sequences: int, context: int, device: torch.device) -> None:
        self.device, pinned = device, device.type == "cuda"
        size = sequences, context + 1
        self.ids = torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=pinned)
        event: Any = torch.cuda.Event  # torch has no types for it
        self.copied = event(blocking=True) if pinned else None  # wait without spinning

    def array(self) -> WindowIds:
        """Return the memory to write to, after the copy of the last batch has ended."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.ids.numpy()

    def to_device(self, sequences: int | None = None) -> Batch:
        """Return inputs and targets on the device. Targets are one token later.

        sequences: how many sequences of the buffer to copy. None: all.
        """
        both = self.ids[:sequences].to(self.device, non_blocking=True, copy=True)
        if self.copied is not None:
            self.copied.record(torch.cuda.current_stream(self.device))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def make_buffers(sequences: int, context: int, device: torch.device) -> Iterator[BatchBuffer]:
    """Yield two buffers in turn, forever: one is filled while the other one is copied.

    Buffers are reused, because pinning memory takes milliseconds.
    """
    return cycle([BatchBuffer(sequences, context, device) for _ in range(2)])


class Loader:
    """Endless batches of (inputs, targets), each int64 of shape [sequences / world, context].

    Every rank computes the same order and reads its share of the batch, so the batches do not
    depend on the number of ranks. A thread reads the next batch in the background.

    shuffled: whether windows are in random order. Otherwise they are in the order of the files, and
    no batch is from two files.
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
        shuffled: bool = True,
    ) -> None:
        if sequences < 1 or sequences % world:
            raise DataError(
                f"the batch of {sequences} sequences is not a multiple of {world} ranks"
            )
        if not 0 <= rank < world:
            raise DataError(f"rank must be in 0..{world - 1}, got {rank}")
        if not 0 <= seed < 1 << 64:
            raise DataError(f"seed must be in 0..2^64-1, got {seed}")
        self.windows = Windows(files, context, 1 if shuffled else sequences)
        self.shuffled = shuffled
        self.sequences, self.context, self.seed = sequences, context, seed
        self.rank, self.world, self.device = rank, world, torch.device(device)
        self.position = 0  # windows read so far, by all ranks together
        self._order = lru_cache(maxsize=4)(self._permuted)
        self._thread = ThreadPoolExecutor(1, "loader")
        self._ahead: tuple[int, Future[BatchBuffer]] | None = None
        self._buffers = make_buffers(sequences // world, context, self.device)

    @property
    def epoch(self) -> float:
        """How often the data has been read so far."""
        return self.position / len(self.windows)

    @property
    def started_epochs(self) -> int:
        """Number of epochs begun: 0 before the first batch, 2 once a window repeats."""
        return -(-self.position // len(self.windows))

    def next(self) -> Batch:
        """Return the next batch, and begin to read the one after it."""
        ahead, self._ahead = self._ahead, None
        buffer = ahead[1].result() if ahead is not None else None
        if buffer is None or ahead is None or ahead[0] != self.position:  # a new position
            buffer = self._read(self.position)
        self.position += self.sequences
        self._ahead = self.position, self._thread.submit(self._read, self.position)
        return buffer.to_device()

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
                f"the checkpoint belongs to other data ({', '.join(differ)} differ): continue with "
                f"the same data set, context and seed, or start a new run"
            )
        self.position = int(state["position"])

    def _identity(self) -> dict[str, Any]:
        data = self.windows.fingerprint()
        return {"data": data, "context": self.context, "seed": self.seed}

    def _read(self, position: int) -> BatchBuffer:
        """Read this rank's share of the batch at a position. It may cross the end of an epoch."""
        buffer = next(self._buffers)
        share = self.sequences // self.world
        self.windows.read(buffer.array(), position + self.rank * share, self._stretch)
        return buffer

    def _stretch(self, at: int, most: int) -> Stretch:
        """Return a stretch as `Windows.stretch` does, but in the order of this loader.

        at: position of the first window, counted over all epochs
        """
        epoch, at = divmod(at, len(self.windows))
        if not self.shuffled:
            return self.windows.stretch(at, most)
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
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Return batches of the first `tokens` validation tokens, or of all. They are always the same.

    A batch is (inputs, targets, number of tokens that count). The last batch may have fewer
    sequences. Tokens after the last complete window of a file are skipped.

    Each rank gets its own share, and shares may differ by one sequence. All ranks must get the same
    number of batches, because FSDP gathers weights in each forward pass. So a rank with a smaller
    share may end with a batch that repeats a window, and 0 of its tokens count.
    """
    windows = Windows(files, context)
    count = len(windows) if tokens is None else min(len(windows), tokens // context)
    if count < world:
        most = len(windows) * context
        read = most if tokens is None else min(tokens, most)
        raise DataError(
            f"{read} validation tokens are too few for a window of {context} on {world} ranks: use "
            "more eval_tokens, or more text for validation"
        )
    first, last = rank * count // world, (rank + 1) * count // world
    buffers = make_buffers(sequences, context, torch.device(device))

    def at(k: int) -> tuple[Tensor, Tensor, int]:
        is_new, k = k < last, min(k, last - 1)
        buffer, count = next(buffers), min(sequences, last - k)
        windows.read(buffer.array()[:count], k, windows.stretch)
        return *buffer.to_device(count), count * context if is_new else 0

    return (at(k) for k in range(first, first + -(-count // world), sequences))
