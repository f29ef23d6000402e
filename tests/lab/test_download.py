"""`sodaopt data download` against a server that imitates the Hugging Face Hub."""

import hashlib
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("huggingface_hub")
pytest.importorskip("tokenizers")
pytest.importorskip("tiktoken")
pytest.importorskip("tyro")

from sodaopt.lab.data import DataError, download, open_data
from sodaopt.lab.data.shards import write_shard
from tests.support.lab_texts import call

REPO = "kjj0/fineweb10B-gpt2"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKENS = 400_000


class Hub(ThreadingHTTPServer):
    """Serve the files of a repository.

    cut: byte counts by file. The server ends one transfer after each of them.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.requests: list[tuple[str, str, str | None]] = []
        self.cut: dict[str, list[int]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def gets(self) -> list[tuple[str, str | None]]:
        return [(name, span) for method, name, span in self.requests if method == "GET"]


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        name = self.path.removeprefix(f"/datasets/{REPO}/resolve/main/")
        span = self.headers.get("Range")
        self.server.requests.append((self.command, name, span))
        path = self.server.folder / name
        if "/" in name or not path.is_file():
            return self.missing()
        data = path.read_bytes()
        first = int(re.match(r"bytes=(\d+)-", span)[1]) if span else 0
        self.send_response(206 if span else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - first))
        if span:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if body:
            self.send(name, data[first:])
        return None

    def send(self, name: str, data: bytes) -> None:
        cuts = self.server.cut.get(name)
        if not cuts:
            self.wfile.write(data)
            return
        self.wfile.write(data[: cuts.pop(0)])
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def missing(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "hub"
    folder.mkdir()
    for k, name in enumerate(["val_000000", "train_000001", "train_000002"]):
        ids = np.arange(TOKENS) * (k + 3) % 50257
        write_shard(folder / f"fineweb_{name}.bin", ids)
    server = Hub(folder)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def same(hub: Hub, out: Path) -> bool:
    files = sorted(path.name for path in out.glob("*.bin"))
    return all((out / f).read_bytes() == (hub.folder / f).read_bytes() for f in files)


def test_shards_are_fetched_and_kept(hub, tmp_path, capsys):
    out = tmp_path / "fineweb10B"
    args = ("--endpoint", hub.url, "--out", out)
    assert call("download", "fineweb10B", 1, *args) == 0
    data = open_data(str(out))
    assert (data.vocab, data.train_tokens, data.val_tokens) == (50257, TOKENS, TOKENS)
    assert len(hub.gets()) == 2
    assert call("download", "fineweb10B", 2, *args) == 0
    assert len(hub.gets()) == 3, "shards on the disk are not fetched again"
    assert same(hub, out)
    said = capsys.readouterr().out
    assert "2 of 3 shards are already in" in said
    assert "[1/1] fineweb_train_000002.bin" in said
    assert f"{2 * TOKENS:,} tokens for training in 2 shards" in said


def test_an_interrupted_transfer_goes_on_where_it_was(hub, tmp_path, monkeypatch):
    # a transfer resumes after its last whole chunk
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)
    hub.cut = {"fineweb_train_000001.bin": [300_000, 200_000]}
    data = download.download("fineweb10B", 1, tmp_path / "out", hub.url)
    assert data.train_tokens == TOKENS
    assert same(hub, tmp_path / "out")
    spans = [span for name, span in hub.gets() if "train" in name]
    assert spans[0] is None
    assert len(spans) == 3
    assert all(int(re.search(r"\d+", span)[0]) > 0 for span in spans[1:]), "not from the beginning"


@pytest.mark.parametrize("damage", ["cut", "magic", "empty"])
def test_a_damaged_shard_on_disk_is_fetched_again(damage, hub, tmp_path):
    out = tmp_path / "out"
    download.download("fineweb10B", 1, out, hub.url)
    path = out / "fineweb_train_000001.bin"
    data = path.read_bytes()
    path.write_bytes({"cut": data[:-10], "magic": b"    " + data[4:], "empty": b""}[damage])
    download.download("fineweb10B", 1, out, hub.url)
    assert same(hub, out)
    assert len(hub.gets()) == 3


@pytest.mark.parametrize("damage", ["cut", "magic"])
def test_a_damaged_shard_on_the_server_is_refused(damage, hub, tmp_path, capsys):
    path = hub.folder / "fineweb_train_000001.bin"
    data = path.read_bytes()
    path.write_bytes({"cut": data[:-10], "magic": b"    " + data[4:]}[damage])
    out = tmp_path / "out"
    assert call("download", "fineweb10B", 1, "--endpoint", hub.url, "--out", out) == 2
    said = capsys.readouterr().err
    assert "the download of fineweb_train_000001.bin from" in said
    assert [path.name for path in out.glob("*.bin")] == ["fineweb_val_000000.bin"]
    with pytest.raises(DataError, match="no shard named train"):
        open_data(str(out))


def test_ids_beyond_the_vocabulary_are_found(hub, tmp_path):
    write_shard(hub.folder / "fineweb_train_000001.bin", np.array([60000] * 10))
    with pytest.raises(DataError, match="has the id 60000, but the vocabulary has 50257"):
        download.download("fineweb10B", 1, tmp_path / "out", hub.url)


def test_no_network(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)  # the client tries again for 23 s
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert call("download", "fineweb10B", 1, "--endpoint", url, "--out", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "could not download fineweb_val_000000.bin" in said
    assert "Run the command again when there is a connection" in said
    assert f"huggingface.co/datasets/{REPO}" in said


def test_a_shard_that_the_hub_does_not_have(hub, tmp_path, capsys):
    assert call("download", "fineweb10B", 3, "--endpoint", hub.url, "--out", tmp_path / "o") == 2
    assert f"has no {REPO}/fineweb_train_000003.bin" in capsys.readouterr().err


def test_wrong_arguments_are_refused_before_anything_is_fetched(hub, tmp_path, monkeypatch):
    for name, count, message in (
        ("fineweb10b", 1, "did you mean 'fineweb10B'"),
        ("fineweb10B", 104, "shards must be in 1..103"),
        ("fineweb10B", 0, "shards must be in 1..103"),
    ):
        with pytest.raises(DataError, match=message):
            download.download(name, count, tmp_path / "out", hub.url)
    monkeypatch.setattr(download, "SHARD_BYTES", 10**18)
    with pytest.raises(DataError, match="GB free: download fewer"):
        download.download("fineweb10B", 1, tmp_path / "out", hub.url)
    assert not hub.requests
