"""Tokenizers, and data sets by name: their content, and the errors for damaged ones."""

import hashlib
import json
import shlex
import shutil
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro

pytest.importorskip("tokenizers")
pytest.importorskip("tiktoken")

from sodaopt.lab.data import DataError, Loader, corpus, dataset, open_data, texts
from sodaopt.lab.data import tokenizer as tokenizers
from sodaopt.lab.data.command import Data
from sodaopt.lab.data.corpus import KNOWN
from sodaopt.lab.data.shards import largest_id, open_shard, write_shard
from sodaopt.lab.data.staging import staged
from sodaopt.lab.scales import SCALES
from sodaopt.lab.studies import STUDIES
from tests.support.lab_jobs import context, start_forkserver
from tests.support.lab_texts import TEXTS, noise

# Tokenizers


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [15496, 995]),
        (" the", [262]),
        ("hello", [31373]),
        ("<|endoftext|>", [27, 91, 437, 1659, 5239, 91, 29]),
    ],
)
def test_gpt2_has_the_known_ids(text, ids):
    gpt2 = tokenizers.load("gpt2")
    assert gpt2.encode(text) == ids
    assert gpt2.decode(ids) == text
    assert (gpt2.vocab, gpt2.eot) == (50257, 50256)
    assert gpt2.decode([gpt2.eot]) == "<|endoftext|>"


def test_gpt2_agrees_with_another_implementation():
    from tokenizers import Tokenizer, models, pre_tokenizers

    lines = (tokenizers.ASSETS / "gpt2/vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    merges = [tuple(line.split()) for line in lines]
    alphabet = {bytes([b]): letter for b, letter in enumerate(_letters())}
    ranks = tokenizers.load("gpt2").encoding._mergeable_ranks
    vocab = {"".join(alphabet[bytes([b])] for b in word): rank for word, rank in ranks.items()}
    theirs = Tokenizer(models.BPE(vocab, merges))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    gpt2 = tokenizers.load("gpt2")
    for text in TEXTS + [noise(seed) for seed in range(50)]:
        assert gpt2.encode(text) == theirs.encode(text).ids
        assert gpt2.encode_batch([text])[0].tolist() == gpt2.encode(text)


def _letters() -> list[str]:
    """Return GPT-2's letters for the bytes, by the rule of its authors."""
    same = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    same += range(ord("®"), ord("ÿ") + 1)
    rest = [b for b in range(256) if b not in same]
    letters = {b: chr(b) for b in same} | {b: chr(256 + k) for k, b in enumerate(rest)}
    return [letters[b] for b in range(256)]


@pytest.fixture(scope="module")
def small() -> tokenizers.Tokenizer:
    return tokenizers.load(str(tokenizers.ASSETS / "tokenizer.json"))


@pytest.mark.parametrize("name", ["gpt2", "small"])
@pytest.mark.parametrize("seed", range(5))
def test_every_text_comes_back(name, seed, small):
    tokenizer = small if name == "small" else tokenizers.load(name)
    for text in [*TEXTS, noise(seed)]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eot not in ids
        assert all(0 <= i < tokenizer.vocab for i in ids)


def test_the_embedded_tokenizer_can_be_made_again(small):
    assert small.vocab == corpus.EMBEDDED_VOCAB
    assert json.loads(corpus.train_embedded_tokenizer().json) == json.loads(small.json)


def test_our_tokenizer_agrees_with_the_library_whose_file_it_is(small):
    assert isinstance(small, tokenizers.ByteBPE)
    theirs = tokenizers.OtherTokenizer(small.json, Path("tokenizer.json"))
    documents = list(texts.documents(corpus.SMALL["val"]))
    for text in [*TEXTS, *documents, *(noise(seed) for seed in range(50))]:
        ids = small.encode(text)
        assert ids == theirs.encode(text)
        assert small.encode_batch([text])[0].tolist() == ids
        assert theirs.encode_batch([text])[0].tolist() == ids
        assert small.decode(ids) == theirs.decode(ids) == text
    assert (small.vocab, small.eot) == (theirs.vocab, theirs.eot)


@pytest.mark.parametrize("change", ["dropout", "prefix", "normalizer", "order", "words", "added"])
def test_an_unusual_tokenizer_is_left_to_its_library(change, small):
    data = json.loads(small.json)
    model = data["model"]
    match change:
        case "dropout":
            model["dropout"] = 0.1
        case "prefix":
            data["pre_tokenizer"]["add_prefix_space"] = True
        case "normalizer":
            data["normalizer"] = {"type": "Lowercase"}
        case "order":
            model["merges"][0], model["merges"][-1] = model["merges"][-1], model["merges"][0]
        case "words":
            model["vocab"]["xyzzy"] = 1024
        case "added":
            data["added_tokens"].append({**data["added_tokens"][0], "id": 1024, "content": "<x>"})
    assert isinstance(tokenizers.parse(json.dumps(data)), tokenizers.OtherTokenizer)


# Data sets


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def embedded(root):
    return open_data("embedded", root)


def test_the_embedded_data_set(embedded):
    assert (embedded.name, embedded.vocab) == ("embedded", 1024)
    assert embedded.train_tokens > 10 * embedded.val_tokens > 1e6
    tokenizer = embedded.tokenizer()
    ids = open_shard(embedded.val[0])
    assert ids[0] == tokenizer.eot
    assert (ids == tokenizer.eot).sum() == 13, "one for each document"
    assert tokenizer.decode(ids[1:60].tolist()).startswith("State of the Union Address")
    inputs, targets = Loader(embedded.train, 4, 64).next()
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert not dataset.verify(embedded)


def test_the_embedded_data_set_is_the_whole_corpus(embedded):
    """The data set has the text of each document once, in another order."""
    tokenizer = embedded.tokenizer()
    ids = np.concatenate([open_shard(path) for path in embedded.train])
    parts = np.split(ids, np.flatnonzero(ids == tokenizer.eot))[1:]
    found = sorted(tokenizer.decode(part[1:].tolist()) for part in parts)
    documents = list(texts.documents(corpus.SMALL["train"]))
    assert found == sorted(documents)
    assert tokenizer.decode(parts[0][1:].tolist()) != documents[0], "shuffled"


def test_the_embedded_data_set_is_made_once_and_when_it_changed(embedded, root):
    stamp = embedded.train[0].stat().st_mtime_ns
    assert open_data("embedded", root).train[0].stat().st_mtime_ns == stamp
    (embedded.folder / "tokenizer.json").write_text("{}")
    again = open_data("embedded", root)
    assert again.train[0].stat().st_mtime_ns > stamp
    assert again.tokenizer().vocab == 1024


def digest(root: Path) -> str:
    data = open_data("embedded", root)
    return hashlib.sha256(b"".join(p.read_bytes() for p in data.train + data.val)).hexdigest()


def at_once(barrier, root: Path, found) -> None:
    barrier.wait()
    found.put(digest(root))


def test_two_processes_make_the_embedded_data_set_at_once(tmp_path, embedded, root):
    start_forkserver()
    barrier, found = context.Barrier(2), context.Queue()
    processes = [context.Process(target=at_once, args=(barrier, tmp_path, found)) for _ in "ab"]
    for process in processes:
        process.start()
    assert [found.get(timeout=60) for _ in processes] == [digest(root)] * 2
    for process in processes:
        process.join()
    assert [p.name for p in tmp_path.iterdir()] == ["embedded"]


def test_only_the_first_of_two_folders_is_kept(tmp_path):
    out = tmp_path / "out"
    late = ExitStack()
    (late.enter_context(staged(out)) / "a").write_text("late")
    with staged(out) as early:
        (early / "a").write_text("early")
    with pytest.raises(FileExistsError, match="already exists"):
        late.close()
    assert (out / "a").read_text() == "early"
    with staged(out, replace=True) as third:
        (third / "a").write_text("third")
    assert (out / "a").read_text() == "third"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def fineweb(folder: Path, **ids: list[int]) -> Path:
    """A folder of shards without a meta.json, as it is downloaded."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in ids.items():
        write_shard(folder / f"fineweb_{name}.bin", np.array(values))
    return folder


def test_a_folder_without_meta_holds_gpt2_ids(tmp_path):
    folder = fineweb(
        tmp_path / "fine", train_000002=[1] * 30, train_000001=[50256] * 20, val_000000=[3] * 10
    )
    for name, root in (("fine", tmp_path), (str(folder), Path("nowhere"))):
        data = open_data(name, root)
        assert [p.name[-8:] for p in data.train] == ["0001.bin", "0002.bin"]
        assert (data.vocab, data.train_tokens, data.val_tokens) == (50257, 50, 10)
        assert data.tokenizer().eot == 50256


def test_ids_are_checked_once(tmp_path, monkeypatch):
    folder = fineweb(tmp_path / "fine", train_1=[1] * 30, val_0=[3] * 10)
    seen = []
    monkeypatch.setattr(dataset, "largest_id", lambda p: seen.append(p.name) or largest_id(p))
    for _ in range(2):
        open_data(str(folder))
    assert sorted(seen) == ["fineweb_train_1.bin", "fineweb_val_0.bin"]
    fineweb(folder, train_2=[50257])
    with pytest.raises(DataError, match=r"train_2.bin has the id 50257, but the vocabulary has 50"):
        open_data(str(folder))
    assert seen[2:] == ["fineweb_train_2.bin"]


WRONG_META = {
    "shards are a list": {"shards": [1]},
    "shard is a number": {"shards": {"train_000000.bin": 5}},
    "shard without tokens": {"shards": {"train_000000.bin": {"sha256": ""}}},
    "tokens are a text": {"shards": {"train_000000.bin": {"tokens": "5", "sha256": ""}}},
    "vocab is a text": {"vocab": "1024"},
    "vocab is none": {"vocab": None},
    "tokenizer is a number": {"tokenizer": 7},
    "tokenizer is elsewhere": {"tokenizer": "../tokenizer.json"},
    "sources are texts": {"sources": ["a"]},
    "licence is a list": {"licence": []},
}
WRONG_TOKENIZERS = {
    "large id": lambda t: t["model"]["vocab"].update({"<|endoftext|>": 70_000}),
    "large ids": lambda t: t["model"]["vocab"].update({list(t["model"]["vocab"])[-1]: 2_000}),
    "id is a text": lambda t: t["model"]["vocab"].update({list(t["model"]["vocab"])[-1]: "x"}),
    "negative id": lambda t: t["model"]["vocab"].update({"<|endoftext|>": -1}),
    "vocab is a list": lambda t: t["model"].update(vocab=[], merges=[]),
    "no normalizer": lambda t: (t.pop("normalizer"), t.pop("model")),
}


def damaged(kind: str, data: dataset.Dataset, folder: Path) -> Path:
    """A copy of a data set with something wrong."""
    shutil.copytree(data.folder, folder)
    meta = json.loads((folder / "meta.json").read_text())
    match kind:
        case "truncated":
            path = folder / "train_000000.bin"
            path.write_bytes(path.read_bytes()[:-100])
        case "missing" | "no val":
            (folder / f"{'train' if kind == 'missing' else 'val'}_000000.bin").unlink()
        case "another":
            write_shard(folder / "train_000009.bin", np.arange(50))
        case "ids":
            path = folder / "train_000000.bin"
            raw = bytearray(path.read_bytes())
            raw[-2:] = (60_000).to_bytes(2, "little")
            path.write_bytes(raw)
        case "vocab":
            meta["vocab"] = 1025
        case "format":
            meta["format"] = 99
        case "no tokenizer":
            (folder / "tokenizer.json").unlink()
        case "bad tokenizer":
            (folder / "tokenizer.json").write_text("{}")
        case _ if kind in WRONG_META:
            meta |= WRONG_META[kind]
        case _ if kind in WRONG_TOKENIZERS:
            words = json.loads((folder / "tokenizer.json").read_text())
            WRONG_TOKENIZERS[kind](words)
            (folder / "tokenizer.json").write_text(json.dumps(words))
    text = json.dumps(meta)
    (folder / "meta.json").write_text(text[:50] if kind == "bad meta" else text)
    return folder


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated", "train_000000.bin is cut short"),
        ("missing", "no shard named train_"),
        ("no val", "no shard named val_"),
        ("another", r"train_000009.bin has \d+ tokens, but meta.json says none"),
        ("ids", "train_000000.bin has the id 60000, but the vocabulary has 1024 tokens: prepare"),
        ("vocab", "tokenizer.json has 1024 tokens, but meta.json says 1025"),
        ("format", "does not have format 1"),
        ("bad meta", "meta.json is damaged"),
        ("no tokenizer", "cannot read the tokenizer"),
        ("bad tokenizer", "is not a tokenizer.json"),
        *((kind, r"meta.json is damaged \(.*\): prepare") for kind in WRONG_META),
        *((kind, "tokenizer.json (has the id|is not a)") for kind in WRONG_TOKENIZERS),
    ],
)
def test_errors_are_found_on_opening(kind, message, embedded, tmp_path):
    with pytest.raises(DataError, match=message):
        open_data(str(damaged(kind, embedded, tmp_path / "copy")))


@pytest.mark.parametrize(
    "text",
    ["[]", "5", "null", '{"a": 5}', '{"fineweb_train_1.bin": 5}', "[" * 100_000, "\xff",
     '{"fineweb_train_1.bin": [1, 2]}', '{"fineweb_train_1.bin": "abc"}', "stamp"],
)  # fmt: skip
def test_a_damaged_list_of_checked_shards_is_made_again(text, tmp_path):
    folder = fineweb(tmp_path / "fine", train_1=[1] * 30, val_0=[3] * 10)
    open_data(str(folder))
    whole = (folder / "checked.json").read_text()
    if text == "stamp":  # the stamps are right, and the ids are missing
        entries = json.loads(whole)
        text = json.dumps({name: entry[:2] for name, entry in entries.items()})
    (folder / "checked.json").write_text(text, encoding="latin-1")
    assert open_data(str(folder)).train_tokens == 30
    assert json.loads(whole).items() <= json.loads((folder / "checked.json").read_text()).items()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fineweb10B", "is not in .*: get it with sodaopt data download fineweb10B 9"),
        ("proxy", "is not in .*: make it with sodaopt data wikipedia"),
        (
            "proxy-fineweb",
            "is not in .*: make it with sodaopt data download fineweb10B 2, and then sodaopt",
        ),
        ("fineweb10b", "did you mean 'fineweb10B'.*sodaopt data download fineweb10B 9"),
        ("embeded", "did you mean 'embedded'"),
        ("mine2", "did you mean 'mine1'"),
        ("xyz", "known: embedded, .*sodaopt data prepare"),
    ],
)
def test_an_unknown_name_gets_a_hint(name, message, tmp_path):
    fineweb(tmp_path / "mine1", train_1=[1], val_0=[3])
    with pytest.raises(DataError, match=message):
        open_data(name, tmp_path)


def test_every_data_set_of_reproduce_has_a_command():
    jobs = [
        cell.job(scale, row, seed=0, lr=None)
        for study in STUDIES.values()
        for scale in SCALES.values()
        for row in study.rows(scale)
        for cell in study.cells
    ]
    names = {job.dataset for job in jobs}
    assert {"proxy", "fineweb100B"} <= names
    for name in names - {corpus.EMBEDDED} | {"proxy-fineweb"}:
        _, kind, *rest = shlex.split(KNOWN[name].command.split(", and then ")[0])
        assert kind == "data"
        tyro.cli(Data, args=rest)  # raises for a wrong command
