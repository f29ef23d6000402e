"""`sodaopt data wikipedia`: English Wikipedia for the proxy preset, from public extractions.

Two repositories on GitHub hold articles that WikiExtractor has turned into plain text. The files at
fixed commits are downloaded, cleaned and split into training and validation documents. The text is
by Wikipedia's contributors and has the licence CC BY-SA 3.0.
"""

import hashlib
import html
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from ..files import write_atomically
from .shards import DataError
from .tokenizer import EOT

HOST = "https://raw.githubusercontent.com"
LICENCE = "CC BY-SA 3.0 (Wikipedia contributors)"
LEAST = 400
"""Least number of characters of a document."""
SHORT_LINE = 60
"""Documents with shorter lines on average count as lists. Lines of at least this length are kept
once, and shorter ones always."""
ATTEMPTS = 4
Say = Callable[[str], None]


@dataclass(frozen=True)
class Extraction:
    """Files of WikiExtractor in a repository at a commit: FOLDER/AA/wiki_00, ..."""

    repo: str
    commit: str
    folder: str
    numbers: range
    """Numbers of the files: 0 is AA/wiki_00, and 100 is AB/wiki_00."""
    sha256: str
    """Checksum of all files, one after the other."""
    share: float = 1.0
    """Share of the articles to use."""
    val_share: float = 0.0
    """Share of the articles for validation."""

    @property
    def paths(self) -> list[str]:
        names = ((chr(ord("A") + k // 100), k % 100) for k in self.numbers)
        return [f"{self.folder}/A{letter}/wiki_{k:02d}" for letter, k in names]


LONG = Extraction(
    "jason-feng/wikiVisual",
    "1c0fac92f29f17c1603bfffbe864e0dfdff66897",
    "text",
    range(400),
    "8483f9bd98aef5a2d9c5ebcff243a531c258c7814c091ee602641aaa303ebef5",
    val_share=0.01,
)
"""Page ids 12 to 60633, of a dump of about 2015: the oldest articles, which are long."""
RECENT = Extraction(
    "ZhouYii/PatchedDistro",
    "961716d8a5a0df1a6373a4d61e360a0b5d1b85cd",
    "data",
    range(1, 827),
    "f01741d79abe6ed8f4b4f5f1cbc3838111310aef8d5bff14fe4e84127e4859f8",
    share=0.5,
)
"""Later and shorter articles, of an earlier dump."""
SOURCES = (LONG, RECENT)


def write_texts(
    sources: Sequence[Extraction], out: Path, host: str = HOST, say: Say = lambda _: None
) -> tuple[list[Path], Path]:
    """Download and clean the articles. Return a file of text for each source, and val.txt.

    The hash of its title decides whether an article is left out, or is for training or validation.
    So the result is the same each time.

    out: the folder of the downloaded files and of the text
    host: the address to download from
    """
    for source in sources:
        download(source, out / source.repo, host, say)
        check(source, out / source.repo)
    train, val = [], out / "val.txt"
    seen: set[bytes] = set()
    with val.open("w", encoding="utf-8") as val_file:
        for source in sources:
            say(f"{source.repo}: cleaning {len(source.paths)} files")
            found = documents([out / source.repo / path for path in source.paths], seen)
            train.append(out / f"{source.repo.split('/')[1]}.txt")
            with train[-1].open("w", encoding="utf-8") as train_file:
                for title, text in found:
                    if (at := position(title)) < source.share:
                        file = val_file if at < source.val_share else train_file
                        file.write(f"{text}\n{EOT}\n")
    return train, val


def position(title: str) -> float:
    """Return a number in [0, 1) from the hash of a title."""
    return int.from_bytes(hashlib.sha256(title.encode()).digest()[:6]) / 2**48


# -- download -------------------------------------------------------------------------------------


def download(source: Extraction, out: Path, host: str = HOST, say: Say = lambda _: None) -> None:
    """Download the files of an extraction that `out` does not have yet."""
    missing = [path for path in source.paths if not (out / path).exists()]
    for number, path in enumerate(missing, 1):
        if number % 100 == 1:
            say(f"{source.repo}: file {number} of {len(missing)}")
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out / path, [_fetch(f"{host}/{source.repo}/{source.commit}/{path}")])


def _fetch(url: str) -> bytes:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with urlopen(url, timeout=60) as answer:
                return bytes(answer.read())
        except (OSError, URLError) as e:
            gone = isinstance(e, HTTPError) and e.code in (403, 404)
            if gone or attempt == ATTEMPTS:
                raise DataError(
                    f"could not download {url}: {e}. Run the command again when there is a "
                    f"connection. Complete files are kept"
                ) from None
            time.sleep(2**attempt / 10)
    raise AssertionError


def check(source: Extraction, folder: Path) -> None:
    """Raise if a downloaded file differs from the file in the repository."""
    digest = hashlib.sha256()
    for path in source.paths:
        digest.update((folder / path).read_bytes())
    if digest.hexdigest() != source.sha256:
        raise DataError(
            f"a file in {folder / source.folder} is damaged: remove the folder, and run the "
            f"command again"
        )


# -- text -----------------------------------------------------------------------------------------

HEAD = re.compile(r'<doc id="\d+".*? title="([^"]*)".*?>')
MARKUP = re.compile(r"<!--.*?-->|</?[a-zA-Z][^<>]*>")
TABLE = re.compile(r"^\s*[|!]|^\s*\{\||\{\{|\}\}|\[ ?\[|^\s*#REDIRECT", re.IGNORECASE)
EMPTY = re.compile(r"\([\s,;:–-]*\)|\[\s*\]")
SPACE = re.compile(r"\s+(?=[,.])")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028\u2029\ufeff]")
ENGLISH = re.compile(r"\b(?:the|of|and|in|to|a|is|was)\b")


def articles(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the title and the clean lines of each article in a file of WikiExtractor."""
    for part in text.split("\n</doc>"):
        if not (head := HEAD.search(part)):
            continue
        _, *body = part[head.end() :].strip().split("\n")  # without the title
        lines = [line for line in map(clean, body) if line]
        while lines and _is_heading(lines[-1]):  # its list or table is gone
            lines.pop()
        yield html.unescape(head[1]), lines


def clean(line: str) -> str:
    """Return a line without markup. The result is empty if the line is part of a table."""
    line = MARKUP.sub("", html.unescape(html.unescape(line)))
    if TABLE.search(line):
        return ""
    line = re.sub(r"\s+", " ", EMPTY.sub("", CONTROL.sub("", line)))
    return SPACE.sub("", line).strip()


def _is_heading(line: str) -> bool:
    return len(line) < SHORT_LINE and line.endswith(".")


def is_prose(title: str, lines: Sequence[str]) -> bool:
    """Whether an article is English prose of some length, not a list or a disambiguation page."""
    text = " ".join(lines)
    if len(text) < LEAST or len(text) < SHORT_LINE * len(lines):
        return False
    if "(disambiguation)" in title or re.search(r"\bmay (?:also )?refer to:?$", lines[0]):
        return False
    return len(ENGLISH.findall(text)) > len(text) / 60


def documents(files: Sequence[Path], seen: set[bytes]) -> Iterator[tuple[str, str]]:
    """Yield the title and the text of each article of prose.

    seen: hashes of the long lines so far. A long line is kept once.
    """
    for path in files:
        for title, lines in articles(path.read_text(encoding="utf-8", errors="replace")):
            new = [line for line in lines if len(line) < SHORT_LINE or _is_new(line, seen)]
            if new and is_prose(title, new):
                yield title, "\n".join([title, "", *new])


def _is_new(line: str, seen: set[bytes]) -> bool:
    digest = hashlib.sha256(line.encode()).digest()[:12]
    new = digest not in seen
    seen.add(digest)
    return new
