"""`sodaopt data wikipedia` against a server with files in the format of WikiExtractor."""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("tyro")

from sodaopt.lab.data import open_data, wikipedia
from sodaopt.lab.data.texts import documents
from sodaopt.lab.data.wikipedia import Extraction, articles, clean, is_prose, position
from tests.support.lab_texts import call

WORDS = ("the", "of", "and", "in", "to", "a", "is", "was", "sea", "ship", "whale", "island")


def article(number: int, title: str, *lines: str) -> str:
    head = f'<doc id="{number}" url="http://en.wikipedia.org/wiki?curid={number}" title="{title}">'
    return "\n".join([head, title, "", *lines, "</doc>", ""])


def paragraphs(seed: int | str, count: int = 6) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=40)).capitalize() + "." for _ in range(count)]


SHARED = "This line is the same in every article, and it is long enough to be kept only once."


class Handler(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Any = self.server
        server.asked.append(self.path)
        super().do_GET()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Any]:
    """A server with two extractions of 104 and 3 files, in place of GitHub."""
    root, sources = tmp_path / "host", []
    for repo, numbers, share in (("a/Long", range(104), 1.0), ("b/Recent", range(1, 4), 0.5)):
        source = Extraction(repo, "c0ffee", "text", numbers, "", share, 0.2 * (repo == "a/Long"))
        digest = hashlib.sha256()
        for k, path in enumerate(source.paths):
            pages = [article(j, f"{repo[0]} {k} {j}", SHARED, *paragraphs(f"{repo} {k} {j}"))
                     for j in range(2 if repo == "a/Long" else 8)]  # fmt: skip
            file = root / repo / source.commit / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(pages))
            digest.update(file.read_bytes())
        sources.append(Extraction(repo, "c0ffee", "text", numbers, digest.hexdigest(), share,
                                  source.val_share))  # fmt: skip
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(root)))
    server.asked, server.sources, server.root = [], tuple(sources), root
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_from_the_download_to_a_data_set(
    tmp_path: Path, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(wikipedia, "SOURCES", host.sources)
    make = ("wikipedia", "--endpoint", host.url, "--vocab", 300, "--workers", 1)
    assert call(*make) == 0
    assert len(host.asked) == 107
    assert host.asked[100] == "/a/Long/c0ffee/text/AB/wiki_00"
    folder = Path("runs/wikipedia")
    found = {name: [d.split("\n")[0] for d in documents(folder / name)]
             for name in ("Long.txt", "Recent.txt", "val.txt")}  # fmt: skip
    titles = [title for names in found.values() for title in names]
    assert len(set(titles)) == len(titles)
    assert sorted(found["Long.txt"] + found["val.txt"]) == sorted(
        f"a {k} {j}" for k in range(104) for j in range(2)
    )
    assert found["val.txt"] == [t for t in titles if t[0] == "a" and position(t) < 0.2]
    assert found["Recent.txt"] == [t for k in range(3) for j in range(8)
                                   if position(t := f"b {k} {j}") < 0.5]  # fmt: skip
    text = (folder / "Long.txt").read_text() + (folder / "val.txt").read_text()
    assert text.count(SHARED) == 1, "a long line is kept once"
    data = open_data("proxy")
    assert data.meta["licence"].startswith("CC BY-SA")
    assert data.vocab == 300
    assert data.train_tokens > 2 * data.val_tokens > 0
    before = (data.folder / "train_000000.bin").read_bytes()
    assert call(*make, "--force") == 0
    assert len(host.asked) == 107, "complete files are not downloaded again"
    assert (data.folder / "train_000000.bin").read_bytes() == before


def test_errors(
    tmp_path: Path, host: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(wikipedia, "SOURCES", host.sources)
    monkeypatch.setattr(wikipedia.time, "sleep", lambda seconds: None)
    make = ("wikipedia", "--endpoint", host.url, "--vocab", 300)
    lost = host.root / "a/Long/c0ffee/text/AB/wiki_03"
    text = lost.read_bytes()
    lost.unlink()
    assert call(*make) == 2
    assert "wiki_03: HTTP Error 404" in capsys.readouterr().err
    lost.write_bytes(text.replace(b"whale", b"while"))
    assert call(*make) == 2
    assert "text is damaged: remove the folder" in capsys.readouterr().err
    assert not Path("runs/data/proxy").exists()
    assert call("wikipedia", "--endpoint", "http://127.0.0.1:1", "--texts", "other") == 2
    assert "Complete files are kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Tom &amp; Jerry &lt;b&gt;run&lt;/b&gt;", "Tom & Jerry run"),
        ("Ahab (, ) sails<!-- note -->  on , he says .", "Ahab sails on, he says."),
        ("a < b and b > c", "a < b and b > c"),
        ("| align=right | 5", ""),
        ("{{Infobox ship", ""),
        ("as of 2012[ [update]] it is", ""),
        ("zero\u200b width\x07", "zero width"),
    ],
)
def test_clean(line: str, expected: str) -> None:
    assert clean(line) == expected


def test_articles() -> None:
    """A heading at the end has lost its list, and goes too."""
    text = article(1, "A &amp; B", "One.", "", "Two", "External links.") + article(2, "C", "x")
    assert list(articles(text)) == [("A & B", ["One.", "Two"]), ("C", ["x"])]


@pytest.mark.parametrize(
    ("title", "lines", "prose"),
    [
        ("Whale", paragraphs(0), True),
        ("Whale (disambiguation)", paragraphs(0), False),
        ("Whale", ["Whale may refer to:", *paragraphs(0)], False),
        ("Whale", paragraphs(0, 1), False),
        ("Whale", ["the ship of 1850"] * 100, False),
        ("Wal", ["Der Wal lebt im Meer und atmet mit Lungen, wie alle anderen Tiere."] * 9, False),
    ],
)
def test_prose(title: str, lines: list[str], prose: bool) -> None:
    assert is_prose(title, lines) == prose


def test_sources() -> None:
    """The files of both repositories, whose names do not all begin at 00."""
    long, recent = (source.paths for source in wikipedia.SOURCES)
    assert (len(long), long[0], long[-1]) == (400, "text/AA/wiki_00", "text/AD/wiki_99")
    assert (len(recent), recent[0], recent[-1]) == (826, "data/AA/wiki_01", "data/AI/wiki_26")
    assert json.dumps(long + recent).count("AI/") == 27
