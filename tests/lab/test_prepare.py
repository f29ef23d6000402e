"""`sodaopt data prepare` and `info`: any text to a data set, all or nothing."""

import gzip
import lzma
import resource
import signal
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("zstandard")
pytest.importorskip("tokenizers")
pytest.importorskip("tiktoken")
pytest.importorskip("tyro")

import zstandard

from sodaopt.lab.data import DataError, build, command, corpus, open_data, prepare, texts
from sodaopt.lab.data import tokenizer as tokenizers
from sodaopt.lab.data.shards import open_shard
from tests.support.lab_jobs import begin, context, start_forkserver
from tests.support.lab_texts import DOCUMENTS, EOT, call, content, noise

SMALL = tokenizers.ASSETS / "tokenizer.json"
UNPACKED = {"": bytes, ".xz": lzma.compress, ".gz": gzip.compress}
UNPACKED[".zst"] = lambda data: b"".join(
    zstandard.compress(part) for part in (data[:700], data[700:])
)


def documents_of(data) -> list[str]:
    """Return the decoded documents of the shards, in order."""
    tokenizer, found = data.tokenizer(), []
    for files in (data.train, data.val):
        ids = np.concatenate([open_shard(path) for path in files])
        parts = np.split(ids, np.flatnonzero(ids == tokenizer.eot))
        assert len(parts[0]) == 0, "the separator is before each document"
        found += [tokenizer.decode(part[1:].tolist()) for part in parts[1:]]
    return found


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
@pytest.mark.parametrize("packed", UNPACKED)
def test_every_kind_of_file(kind, packed, tmp_path):
    path = tmp_path / f"a.{kind}{packed}"
    path.write_bytes(UNPACKED[packed](content(kind, DOCUMENTS)))
    assert list(texts.documents(path)) == DOCUMENTS
    out = tmp_path / "out"
    assert call("prepare", path, "--tokenizer", SMALL, "--val-fraction", 0.1, "--out", out) == 0
    data = open_data(str(out))
    found = documents_of(data)
    assert sorted(found) == sorted(DOCUMENTS)
    assert found != DOCUMENTS, "shuffled"
    assert 0.02 < data.val_tokens / (data.train_tokens + data.val_tokens) <= 0.1


def test_another_field_of_json_lines(tmp_path):
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    path.write_bytes(content("jsonl", DOCUMENTS).replace(b'"text"', b'"body"'))
    asked = "prepare", path, "--vocab", 300, "--val-fraction", 0.1, "--out", out
    assert call(*asked, "--field", "body") == 0
    assert sorted(documents_of(open_data(str(out)))) == sorted(DOCUMENTS)
    with pytest.raises(DataError, match='a JSON object with a field "text"'):
        list(texts.documents(path))


def test_shards_get_another_tokenizer(tmp_path):
    """As for the proxy from the published shards of FineWeb."""
    text, first, second = tmp_path / "a.txt", tmp_path / "first", tmp_path / "second"
    text.write_bytes(content("txt", DOCUMENTS))
    more = "--val-fraction", 0.1, "--out"
    assert call("prepare", text, "--tokenizer", "gpt2", *more, first) == 0
    assert call("prepare", *sorted(first.glob("*.bin")), "--vocab", 300, *more, second) == 0
    data = open_data(str(second))
    assert (data.vocab, sorted(documents_of(data))) == (300, sorted(DOCUMENTS))


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    pyarrow.parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"body": DOCUMENTS, "id": [*DOCUMENTS]}), path)
    assert list(texts.documents(path, field="body")) == DOCUMENTS
    with pytest.raises(DataError, match="no column 'text': name one of body, id with --field"):
        list(texts.documents(path))


@pytest.mark.parametrize("tokenizer", ["gpt2", str(SMALL), None], ids=["gpt2", "file", "trained"])
def test_every_tokenizer(tokenizer, tmp_path, capsys):
    parts = [DOCUMENTS[:30], DOCUMENTS[30:]]
    files = [tmp_path / f"{k}.txt" for k in range(2)]
    for path, part in zip(files, parts, strict=True):
        path.write_bytes(content("txt", part))
    choice = ["--tokenizer", tokenizer] if tokenizer else ["--vocab", 300]
    out = tmp_path / "out"
    assert call("prepare", files[0], "--val", files[1], *choice, "--out", out) == 0
    said = capsys.readouterr().out
    data = open_data(str(out))
    assert data.vocab == {"gpt2": 50257, str(SMALL): 1024, None: 300}[tokenizer]
    assert ("training a tokenizer of 300 tokens" in said) == (tokenizer is None)
    assert f"{data.train_tokens:,} tokens for training in 1 shard," in said
    found = documents_of(data)
    assert sorted(found[:30]) == sorted(parts[0])
    assert found[30:] == parts[1], "validation data keeps its order"


def test_shards_have_about_the_same_size(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(content("txt", DOCUMENTS))
    out = tmp_path / "out"
    args = ("--tokenizer", SMALL, "--shard-tokens", "0.5K", "--val-fraction", 0.1)
    assert call("prepare", path, *args, "--out", out) == 0
    data = open_data(str(out))
    sizes = [len(open_shard(path)) for path in data.train]
    assert len(sizes) > 2
    assert max(sizes) <= 500
    assert max(sizes) - min(sizes) < len(sizes)
    assert sorted(documents_of(data)) == sorted(DOCUMENTS)


@pytest.mark.parametrize("workers", [1, 3])
def test_the_result_does_not_depend_on_the_workers(workers, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "BATCH", 200)
    path = tmp_path / "a.txt"
    path.write_bytes(content("txt", DOCUMENTS))
    options = prepare.PrepareOptions([path], tmp_path / "out", tokenizer="gpt2", workers=workers)
    meta = prepare.prepare(options).meta
    monkeypatch.undo()
    again = prepare.prepare(prepare.PrepareOptions([path], tmp_path / "two", tokenizer="gpt2"))
    assert again.meta["shards"] == meta["shards"]
    other = prepare.prepare(
        prepare.PrepareOptions([path], tmp_path / "3", tokenizer="gpt2", seed=1)
    )
    assert other.meta["shards"] != meta["shards"]


def test_one_document_is_cut_for_validation(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n".join(DOCUMENTS))
    data = prepare.prepare(prepare.PrepareOptions([path], tmp_path / "out", tokenizer="gpt2"))
    assert data.val_tokens == (data.train_tokens + data.val_tokens) // 100
    ids = np.concatenate([open_shard(p) for p in data.train + data.val])
    assert data.tokenizer().decode(ids[1:].tolist()) == path.read_text()


@pytest.mark.parametrize("name", ["gpt2", "small"])
def test_a_long_document_in_pieces_has_the_same_tokens(name):
    tokenizer = tokenizers.load(str(SMALL) if name == "small" else name)
    assert tokenizer.splittable
    text = "".join(noise(seed) + "a\nb" for seed in range(60))
    parts = list(texts.pieces(text, most=300))
    assert len(parts) > 20
    assert "".join(parts) == text
    ids = [i for row in tokenizer.encode_batch(parts) for i in row.tolist()]
    assert ids == tokenizer.encode(text)


@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("last", [True, False], ids=["closed", "open"])
def test_separators(newline, last, tmp_path):
    """A separator is a line of its own, with either line end, after each document or between."""
    path = tmp_path / "a.txt"
    documents = [f"a {EOT} within{newline}b", f"{EOT} at the beginning", "c"]
    text = f"{newline}{EOT}{newline}".join(documents) + f"{newline}{EOT}{newline}" * last
    path.write_bytes(text.encode())
    assert list(texts.documents(path)) == documents


def test_the_sample_takes_the_same_share_of_each_file(tmp_path):
    paths = [tmp_path / f"{k}.txt" for k in range(3)]
    for path in paths:
        path.write_bytes(content("txt", [path.stem * 10] * 50))
    found = "".join(prepare.sample(paths, 300))
    assert [found.count(path.stem) for path in paths] == [100] * 3


def wrong(kind: str, folder: Path) -> list[object]:
    """Arguments with something wrong."""
    good, bad = folder / "good.txt", folder / "bad.txt"
    good.write_bytes(content("txt", DOCUMENTS))
    packed = {".xz": lzma.compress(b"a" * 99999), ".zst": zstandard.compress(b"ab" * 99999)}
    match kind:
        case "missing" | "val missing":
            return [good, "--val", bad] if kind == "val missing" else [good, bad]
        case "empty" | "blank" | "not utf-8" | "one letter":
            contents = {"empty": b"", "blank": b" \n", "not utf-8": b"ab \xff c"}
            bad.write_bytes(contents.get(kind, b"a"))
            return [bad] if kind == "one letter" else [good, bad]
        case "folder":
            return [folder]
        case "twice":
            return [good, "--val", good]
        case "cut .xz" | "cut .zst" | "not .xz" | "not .zst":
            bad = folder / f"bad.txt{kind[4:]}"
            bad.write_bytes(packed[kind[4:]][:-9] if kind[:3] == "cut" else b"plain text")
            return [good, bad]
        case "not json" | "no text" | "half a character":
            bad, lines = folder / "bad.jsonl", {"not json": "text", "no text": '{"a": 1}'}
            bad.write_text('{"text": "a"}\n' + lines.get(kind, r'{"text": "\ud800"}'))
            return [bad]
        case "exists" | "other files":
            (folder / "out").mkdir()
            (folder / "out/meta.json").write_text("{}")
            if kind == "exists":
                return [good]
            (folder / "out/thesis.tex").write_text("years of work")
            return [good, "--force"]
        case "known":
            return [good, "--out", "runs/data/embedded"]
        case "both":
            return [good, "--vocab", 500, "--tokenizer", "gpt2"]
        case "nothing":
            return []
    flag, value = kind.split()
    return [good, flag, value]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nothing", "no files given: name the text files"),
        ("missing", "bad.txt does not exist"),
        ("val missing", "bad.txt does not exist"),
        ("empty", "bad.txt is empty"),
        ("blank", "bad.txt contains no text"),
        ("not utf-8", "bad.txt is not UTF-8 (byte 0xff after b'ab ')"),
        ("one letter", "too little text for val data: 0 tokens"),
        ("folder", "is a folder: name the files"),
        ("twice", "good.txt is named twice"),
        ("cut .xz", "bad.txt.xz is damaged or cut short"),
        ("cut .zst", "bad.txt.zst is damaged or cut short"),
        ("not .xz", "bad.txt.xz is damaged"),
        ("not .zst", "bad.txt.zst is damaged"),
        ("not json", 'bad.jsonl, line 2: expected a JSON object with a field "text"'),
        ("no text", 'bad.jsonl, line 2: expected a JSON object with a field "text"'),
        ("half a character", 'bad.jsonl, line 2: expected a JSON object with a field "text"'),
        ("exists", "already exists: replace it with --force"),
        ("other files", "contains other files (thesis.tex)"),
        ("known", "embedded is the name of a known data set"),
        ("both", "--vocab 500 is for a new tokenizer"),
        ("--vocab 256", "vocab must be in 257..65536, got 256"),
        ("--vocab 70000", "vocab must be in 257..65536, got 70000"),
        ("--val-fraction 1.5", "val-fraction must be between 0 and 1"),
        ("--workers 0", "workers must be at least 1"),
        ("--shard-tokens many", "--shard-tokens must be a number such as 5000"),
        ("--tokenizer gpt3", "cannot read the tokenizer gpt3"),
        ("--tokenizer pyproject.toml", "pyproject.toml is not a tokenizer.json"),
    ],
)
def test_wrong_input_is_named_and_leaves_nothing(kind, message, tmp_path, capsys):
    arguments = wrong(kind, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    out = [] if "--out" in arguments else ["--out", tmp_path / "out"]
    choice = [] if {"--vocab", "--tokenizer"} & set(arguments) else ["--tokenizer", SMALL]
    assert call("prepare", *arguments, *choice, *out) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_force_replaces_a_data_set(tmp_path):
    path, out = tmp_path / "a.txt", tmp_path / "out"
    path.write_bytes(content("txt", DOCUMENTS))
    assert call("prepare", path, "--tokenizer", "gpt2", "--out", out) == 0
    assert call("prepare", path, "--tokenizer", SMALL, "--out", out, "--force") == 0
    assert open_data(str(out)).vocab == 1024
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "out"]


def prepared_until(stop, path, out, reached):
    """Prepare a data set, and halt before a file is written or while the text is encoded."""

    def halt(name):
        if name == stop:
            reached.touch()
            time.sleep(60)

    write, atomically = build.write_shard, build.write_atomically

    def shard(path, ids):
        halt(path.name)
        return write(path, ids)

    def text(path, parts):
        halt(path.name)
        return atomically(path, parts)

    build.write_shard, build.write_atomically = shard, text
    options = prepare.PrepareOptions([path], out, vocab=300, shard_tokens=500)
    prepare.prepare(options, tell=lambda n: halt("encoding"))


@pytest.mark.parametrize("stop", ["encoding", "meta.json"])
def test_killed_half_way_leaves_nothing_and_a_rerun_works(stop, tmp_path):
    work, reached = tmp_path / "work", tmp_path / "reached"
    work.mkdir()
    path, out = work / "a.txt", work / "out"
    path.write_bytes(content("txt", DOCUMENTS))
    start_forkserver()
    process = context.Process(target=prepared_until, args=(stop, path, out, reached))
    process.start()
    while not reached.exists():
        assert process.is_alive()
        time.sleep(0.005)
    process.kill()
    process.join()
    left = [p for p in work.iterdir() if p != path]
    assert len(left) == 1, "the folder it was writing"
    assert not out.exists()
    for folder in left:
        with pytest.raises(DataError, match="partial output"):
            open_data(str(folder))
    with pytest.raises(DataError, match="unknown data set 'out'"):
        open_data("out", work)
    data = prepare.prepare(prepare.PrepareOptions([path], out, vocab=300, val_fraction=0.1))
    assert sorted(documents_of(data)) == sorted(DOCUMENTS)
    assert sorted(p.name for p in work.iterdir()) == ["a.txt", "out"], "the rest is swept"


def limited(limit):
    sys.dont_write_bytecode = True  # a cut file of bytecode would stay
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


@pytest.mark.parametrize("file", ["ids", "shard"])
def test_a_full_disk_leaves_nothing(file, tmp_path, monkeypatch):
    """No file may grow beyond a limit, as if the disk were full. Each file is the first for one."""
    work = tmp_path / "work"
    work.mkdir()
    path, out = work / "a.txt", work / "out"
    path.write_bytes(content("txt", DOCUMENTS))
    size = 2 * sum(len(tokenizers.load(str(SMALL)).encode(text)) + 1 for text in DOCUMENTS)
    limit = {"ids": size - 100, "shard": size + 100}[file]
    arguments = ["data", "prepare", path, "--tokenizer", SMALL, "--val-fraction", "0.1"]
    monkeypatch.chdir(tmp_path)  # the output of the command goes there
    start_forkserver()
    ended = begin([*map(str, arguments), "--out", str(out)], partial(limited, limit))
    assert ended.end() == 2, ended.output
    assert "File too large" in ended.output
    assert [p.name for p in work.iterdir()] == ["a.txt"]


# Info


def test_info_says_what_is_there(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.txt"
    path.write_bytes(content("txt", DOCUMENTS))
    assert call("prepare", path, "--tokenizer", SMALL, "--licence", "CC0") == 0
    assert call("info") == 0
    said = capsys.readouterr().out
    for name in (*corpus.KNOWN, "mine"):
        assert name in said
    assert call("info", "mine", "--verify") == 0
    said = capsys.readouterr().out
    for word in ("CC0", "mine.txt", "1,024 tokens", "tokenizer.json", "2 checksums are right"):
        assert word in said
    assert call("info", "min") == 2
    assert "did you mean 'mine'" in capsys.readouterr().err


def test_verify_finds_a_flipped_bit(tmp_path, capsys):
    path, out = tmp_path / "a.txt", tmp_path / "out"
    path.write_bytes(content("txt", DOCUMENTS))
    prepare.prepare(prepare.PrepareOptions([path], out, tokenizer="gpt2"))
    shard = out / "train_000000.bin"
    data = bytearray(shard.read_bytes())
    data[2000] ^= 1
    shard.write_bytes(data)
    assert call("info", out) == 0
    assert call("info", out, "--verify") == 1
    assert "train_000000.bin is damaged" in capsys.readouterr().out


def test_a_terminal_gets_a_progress_bar():
    import io

    from rich.console import Console

    console = Console(force_terminal=True, file=io.StringIO(), width=100)
    with command._progress(console, 100) as (stage, tell):
        stage("encoding")
        tell(50)
        time.sleep(0.15)
    assert "━" in console.file.getvalue()
