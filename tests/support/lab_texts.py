"""Texts for the tests of the lab's data, and the command that works on them."""

import json
import random

from sodaopt import cli

DOCUMENTS = [f"Title {k}\n\nA whale, {'é' * (k % 3)} and its tail.\nThe end {k}" for k in range(60)]
EOT = "<|endoftext|>"

TEXTS = [
    "Hello world",
    " the",
    "",
    "It's 1851; we'll see   two\n\n  spaces\t\n and\r\nlines ",
    "naïve café — “quotes” … 中文字 🐋 \u00a0\u200b",
    "<|endoftext|> is text here",
    "\x00\x01\x7f control",
]


def noise(seed: int) -> str:
    """Text of all kinds of characters, with many spaces."""
    draw = random.Random(seed)
    kinds = ["  \n\t\r", "abcdeéß", "0123", "'.,!?-", "'s't'll", "中文🐋\u3000\u00a0", "the ing "]
    return "".join(draw.choice(draw.choice(kinds)) for _ in range(400))


def call(*arguments: object) -> int:
    """Run `sodaopt data ...` and return its exit code."""
    return cli.main(["data", *map(str, arguments)])


def content(kind: str, documents: list[str]) -> bytes:
    if kind == "jsonl":
        return "".join(json.dumps({"id": 1, "text": d}) + "\n" for d in documents).encode()
    return "".join(f"{d}\n{EOT}\n" for d in documents).encode()
