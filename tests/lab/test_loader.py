"""Shards and batches: the format, and an order that one number determines."""

import hashlib
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from sodaopt.lab.data import DataError, Loader, shards, val_batches
from sodaopt.lab.data.shards import count_tokens, largest_id, open_shard, write_shard
from sodaopt.lab.data.shuffle import permutation

CONTEXT = 8


# Shards


@pytest.mark.parametrize("ids", [[], [7], [0, 65535], range(5000)], ids=["0", "1", "ends", "5000"])
def test_a_shard_holds_what_was_written(ids, tmp_path):
    path = tmp_path / "train_0.bin"
    digest = write_shard(path, np.array(ids, dtype=np.int64))
    assert open_shard(path).tolist() == list(ids)
    assert count_tokens(path) == len(ids)
    assert largest_id(path) == max(ids, default=-1)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "no temporary file is left"


def test_the_format_is_the_public_one(tmp_path):
    """As modded-nanogpt reads it."""
    write_shard(tmp_path / "a.bin", np.array([5, 6, 7]))
    data = (tmp_path / "a.bin").read_bytes()
    header = torch.frombuffer(bytearray(data[:1024]), dtype=torch.int32)
    assert header[:3].tolist() == [20240520, 1, 3]
    assert not header[3:].any()
    assert data[1024:] == b"\x05\x00\x06\x00\x07\x00"


@pytest.mark.parametrize("ids", [[65536], [-1], [0.5]], ids=str)
def test_ids_that_do_not_fit_are_refused(ids, tmp_path):
    with pytest.raises(DataError, match=r"uint16|integers"):
        write_shard(tmp_path / "a.bin", np.array(ids))
    assert not list(tmp_path.iterdir())


def header(magic=20240520, version=1, count=3):
    values = np.zeros(256, dtype="<i4")
    values[:3] = magic, version, count
    return values.tobytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cut short: it has 0 bytes"),
        (header()[:1000], "cut short: it has 1000 bytes"),
        (header(magic=1) + b"abcdef", "begins with 1, not 20240520"),
        (header(version=2) + b"abcdef", "version 2"),
        (header() + b"abcde", "says 3 tokens, or 1030 bytes, but it has 1029"),
        (header() + b"abcdefg", "is damaged: its header says 3 tokens"),
        (header(count=-1), "says -1 tokens"),
    ],
)
def test_an_incomplete_shard_is_refused(data, message, tmp_path):
    path = tmp_path / "train_0.bin"
    path.write_bytes(data)
    with pytest.raises(DataError, match=message) as e:
        open_shard(path)
    assert str(path) in str(e.value)


def test_a_shard_is_not_touched_when_writing_fails(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    write_shard(path, np.arange(5))
    before = path.read_bytes()

    def fail(_):
        raise OSError("disk")

    monkeypatch.setattr(shards.os, "fsync", fail)
    with pytest.raises(OSError, match="disk"):
        write_shard(path, np.arange(9))
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


# The loader


def written(folder: Path, *sizes: int) -> list[Path]:
    """Shards in which every token tells its place: no two tokens are the same."""
    folder.mkdir(exist_ok=True)
    ids, paths = np.arange(sum(sizes)), []
    for k, part in enumerate(np.split(ids, np.cumsum(sizes)[:-1])):
        paths.append(folder / f"train_{k}.bin")
        write_shard(paths[-1], part)
    return paths


SIZES = (8 * 11 + 5, 8 * 7 + 1, 8 * 4 + 8)  # 11, 7 and 4 windows
WINDOWS = 22


@pytest.fixture
def files(tmp_path):
    return written(tmp_path / "shards", *SIZES)


def taken(loader: Loader, batches: int) -> torch.Tensor:
    rows = [loader.next()[0] for _ in range(batches)]
    return torch.cat(rows) if rows else torch.empty(0)


@pytest.mark.parametrize("sequences", [1, 2, 4, 11, 22])
def test_no_token_is_an_input_twice_in_an_epoch(sequences, files):
    loader = Loader(files, sequences, CONTEXT)
    rows = taken(loader, WINDOWS // sequences)
    assert len(rows.unique()) == rows.numel() >= (WINDOWS - 2) * CONTEXT
    starts = torch.cat([torch.arange(n) * CONTEXT + s for n, s in ((11, 0), (7, 93), (4, 150))])
    assert set(rows[:, 0].tolist()) <= set(starts.tolist())


@pytest.mark.parametrize("sequences", [1, 3, 64])
def test_targets_are_the_next_tokens(sequences, files):
    loader = Loader(files, sequences, CONTEXT)
    for _ in range(12):
        inputs, targets = loader.next()
        assert inputs.shape == targets.shape == (sequences, CONTEXT)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(targets, inputs + 1)


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_ranks_share_the_batch_of_one(world, files):
    alone = Loader(files, 6, CONTEXT, seed=3)
    ranks = [Loader(files, 6, CONTEXT, seed=3, rank=r, world=world) for r in range(world)]
    for _ in range(9):  # over the end of two epochs
        whole = alone.next()
        parts = [loader.next() for loader in ranks]
        for k in range(2):
            assert torch.equal(torch.cat([part[k] for part in parts]), whole[k])


@pytest.mark.parametrize("at", [0, 1, 4, 5, 9])
def test_resuming_goes_on_as_if_nothing_had_been(at, files):
    first = Loader(files, 5, CONTEXT, seed=1)
    taken(first, at)
    state = json.loads(json.dumps(first.state_dict()))
    second = Loader(files, 5, CONTEXT, seed=1)
    second.next()  # what was read ahead must not count
    second.load_state_dict(state)
    assert second.position == first.position == 5 * at
    assert torch.equal(taken(first, 8), taken(second, 8))


def test_a_run_can_go_on_with_another_batch_size_and_number_of_ranks(files):
    first, second = Loader(files, 4, CONTEXT), Loader(files, 2, CONTEXT, rank=1, world=2)
    taken(first, 3)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.next()[0][1:2], second.next()[0])


@pytest.mark.parametrize("change", ["seed", "context", "content", "names", "sizes"])
def test_resuming_on_other_data_is_an_error(change, files, tmp_path):
    state = Loader(files, 2, CONTEXT).state_dict()
    other = written(tmp_path / "other", *(SIZES if change != "sizes" else (93, 57, 32)))
    if change == "content":
        write_shard(other[1], np.arange(SIZES[1]))
    if change == "names":
        other[0] = other[0].rename(other[0].with_name("train_00.bin"))
    changed = Loader(other, 2, 4 if change == "context" else CONTEXT, seed=change == "seed")
    with pytest.raises(DataError, match=change if change in ("seed", "context") else "data differ"):
        changed.load_state_dict(state)


def test_data_that_was_moved_is_the_same_data(files, tmp_path):
    state = Loader(files, 2, CONTEXT).state_dict()
    Loader(written(tmp_path / "elsewhere", *SIZES), 2, CONTEXT).load_state_dict(state)


def test_seeds_and_epochs_have_their_own_order(files):
    orders = [taken(Loader(files, 1, CONTEXT, seed=s), 2 * WINDOWS)[:, 0] for s in range(3)]
    rows = [order[k : k + WINDOWS] for order in orders for k in (0, WINDOWS)]
    assert all(row.sort()[0].equal(rows[0].sort()[0]) for row in rows)
    assert len({tuple(row.tolist()) for row in rows}) == 6
    first = [tuple(dict.fromkeys(np.digitize(row, [93, 150]).tolist())) for row in rows]
    assert len(set(first)) > 1, "the order of the shards differs too"


def test_a_batch_can_be_longer_than_an_epoch(files):
    ones = taken(Loader(files, 1, CONTEXT), 50)
    assert torch.equal(taken(Loader(files, 50, CONTEXT), 1), ones)


def test_epochs_are_counted(files):
    loader = Loader(files, 11, CONTEXT)
    seen = []
    for _ in range(4):
        seen.append((loader.epoch, loader.started_epochs))
        loader.next()
    assert seen == [(0, 0), (0.5, 1), (1, 1), (1.5, 2)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sequences": 3, "world": 2}, "3 sequences is not a multiple of 2"),
        ({"sequences": 0}, "0 sequences"),
        ({"rank": 2, "world": 2}, "rank must be in 0..1, got 2"),
        ({"context": 0}, "context"),
        ({"context": 40}, "train_2.bin has 40 tokens, too few for a window of 40"),
        ({"seed": -1}, "seed"),
    ],
)
def test_a_loader_that_cannot_work_is_refused(arguments, message, files):
    with pytest.raises(DataError, match=message):
        Loader(files, **({"sequences": 2, "context": CONTEXT} | arguments))


def test_the_order_never_changes():
    """These numbers are Philox's. Runs of older versions need them to resume."""
    assert permutation(8, 0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert permutation(8, 1, 2, 3).tolist() == [6, 1, 4, 2, 5, 0, 7, 3]


def test_windows_are_mixed_well(tmp_path):
    """No window stays near its place on average."""
    order = permutation(10_000, 5, 1, 1)
    assert sorted(order) == list(range(10_000))
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05


# Validation


@pytest.mark.parametrize("sequences", [1, 4, 22, 100])
@pytest.mark.parametrize("tokens", [None, 8 * 13, 8 * 13 + 7, 10**9])
def test_validation_reads_everything_in_order(sequences, tokens, files):
    batches = list(val_batches(files, sequences, CONTEXT, tokens))
    count = 13 if tokens in (8 * 13, 8 * 13 + 7) else WINDOWS
    sizes = [len(inputs) for inputs, _, _ in batches]
    assert sum(sizes) == count
    assert all(size == sequences for size in sizes[:-1])
    inputs = torch.cat([i for i, _, _ in batches])
    assert torch.equal(inputs[:, 0], inputs[:, 0].sort()[0])
    assert all(torch.equal(t, i + 1) and n == i.numel() for i, t, n in batches)


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_ranks_share_validation(world, files):
    whole = torch.cat([i for i, _, _ in val_batches(files, 4, CONTEXT)])
    ranks = [list(val_batches(files, 4, CONTEXT, rank=r, world=world)) for r in range(world)]
    assert torch.equal(torch.cat([i for rank in ranks for i, _, n in rank if n]), whole)
    assert len({len(rank) for rank in ranks}) == 1, "FSDP needs equal numbers of forward passes"


def test_validation_on_too_few_tokens_is_refused_at_once(files):
    with pytest.raises(DataError, match="7 validation tokens are too few"):
        val_batches(files, 4, CONTEXT, 7)


@pytest.mark.gpu
def test_batches_on_a_gpu_are_those_on_the_host(files):
    host, device = Loader(files, 4, CONTEXT), Loader(files, 4, CONTEXT, device="cuda")
    for _ in range(20):
        for ours, theirs in zip(host.next(), device.next(), strict=True):
            assert theirs.is_cuda
            assert torch.equal(ours, theirs.cpu())


def test_reading_is_fast(tmp_path):
    """A GPU needs 5 M tokens a second. The test asks for 1 M, because the host is shared."""
    write_shard(tmp_path / "train_0.bin", np.arange(20_000_000) % 50000)
    loader = Loader([tmp_path / "train_0.bin"], 256, 1024)
    loader.next()
    begin = time.perf_counter()
    for _ in range(10):
        loader.next()
    assert 10 * 256 * 1024 / (time.perf_counter() - begin) > 1e6
