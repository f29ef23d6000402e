"""Tokenizers: GPT-2's, which is in the package, and byte-level BPEs trained on the data.

Tokenizer files have the format of the library `tokenizers`. Text is encoded with tiktoken, which is
several times faster.
"""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .shards import MOST_IDS, DataError, Ids

EOT = "<|endoftext|>"
ASSETS = Path(__file__).parent / "assets"
FILE = "tokenizer.json"
GPT2, GPT2_VOCAB = "gpt2", 50257
LEAST_VOCAB = 257  # the bytes, and the separator of documents
# GPT-2's rule for words, in the fast form of tiktoken.
_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


class Tokenizer(Protocol):
    """Encode text to ids and decode ids. `<|endoftext|>` in a text is not the separator `eot`."""

    vocab: int
    eot: int
    json: str | None
    """Content of tokenizer.json, or None for GPT-2's tokenizer, which has a name."""
    splittable: bool
    """Whether no token crosses a newline between two characters that are not spaces."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def encode_batch(self, texts: list[str]) -> list[Ids]: ...


class ByteBPE:
    """A byte-level BPE that splits words as GPT-2 does."""

    splittable = True

    def __init__(self, ranks: dict[bytes, int], eot: int, text: str | None = None) -> None:
        import tiktoken

        self.vocab, self.eot, self.json = len(ranks) + 1, eot, text
        self.encoding = tiktoken.Encoding(
            "sodaopt", pat_str=_WORDS, mergeable_ranks=ranks, special_tokens={EOT: eot}
        )

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.encoding.decode(ids)

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        encoded = (self.encoding.encode_to_numpy(text, disallowed_special=()) for text in texts)
        return [ids.astype(np.uint16) for ids in encoded]


class OtherTokenizer:
    """Any other tokenizer.json, read by the library `tokenizers`."""

    splittable = False

    def __init__(self, text: str, where: Path) -> None:
        from tokenizers import Tokenizer as Inner

        try:
            self.inner = Inner.from_str(text)
        except Exception as e:  # the library raises plain Exception
            raise DataError(f"{where} is not a tokenizer.json: {e}") from None
        eot = self.inner.token_to_id(EOT)
        if eot is None:
            raise DataError(
                f"{where} has no token {EOT}, which must separate the documents: add it"
            )
        self.inner.encode_special_tokens = True  # as if they were plain text
        self.vocab, self.eot = self.inner.get_vocab_size(), int(eot)
        self.json: str | None = text

    def encode(self, text: str) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.inner.decode(list(ids), skip_special_tokens=False))

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        found = self.inner.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, dtype=np.uint16) for one in found]


def load(name: str, folder: Path = Path()) -> Tokenizer:
    """Load `gpt2`, or a tokenizer.json in the folder."""
    if name == GPT2:
        return _gpt2()
    path = folder / name
    try:
        return parse(path.read_text(encoding="utf-8"), path)
    except OSError as e:
        raise DataError(
            f"cannot read the tokenizer {path} ({e.strerror}): name a {FILE}, or {GPT2}"
        ) from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not a tokenizer.json: it is not UTF-8") from None


@cache
def _gpt2() -> Tokenizer:
    """Load GPT-2's tokenizer. The bytes have the first ids, and the merges follow."""
    lines = (ASSETS / GPT2 / "vocab.bpe").read_text(encoding="utf-8").splitlines()
    words = [*_letters(), *(line.replace(" ", "") for line in lines[1:])]  # after the version
    return ByteBPE(_ranks({word: rank for rank, word in enumerate(words)}), GPT2_VOCAB - 1)


def _letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level BPE stands for.

    A printable byte is its own letter. The other bytes have letters from 256 on.
    """
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + k): b for k, b in enumerate(others)}


def _ranks(vocab: dict[str, int]) -> dict[bytes, int]:
    """Return the vocabulary with bytes instead of letters."""
    byte = _letters()
    return {bytes(byte[letter] for letter in word): rank for word, rank in vocab.items()}


def parse(text: str, where: Path = Path(FILE)) -> Tokenizer:
    """Make the tokenizer from the text of a tokenizer.json.

    where: the path for error messages
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise DataError(f"{where} is not a tokenizer.json: {e}") from None
    found: Tokenizer
    if _is_plain(data):
        vocab = dict(data["model"]["vocab"])
        _check_ids(vocab, where)
        eot = vocab.pop(EOT)
        found = ByteBPE(_ranks(vocab), eot, text)
    else:
        found = other = OtherTokenizer(text, where)
        _check_ids(other.inner.get_vocab(), where)
    if found.vocab > MOST_IDS:
        raise DataError(
            f"{where} has {found.vocab} tokens, but a shard holds ids below {MOST_IDS}: use a "
            "smaller vocabulary"
        )
    return found


def _check_ids(vocab: dict[str, int], where: Path) -> None:
    """Raise if an id is not below the number of tokens, which is the size of the embedding."""
    largest = max(vocab.values(), default=0)
    if largest >= len(vocab):
        raise DataError(
            f"{where} has the id {largest}, but only {len(vocab)} tokens: number the tokens from 0 "
            f"to {len(vocab) - 1}, or use another tokenizer"
        )


def _is_plain(data: Any) -> bool:
    """Whether tiktoken gives the same ids as `tokenizers` for this file.

    The ids are the same if each merge makes a new token, in the order of the ids, as training does.
    Then a token is always made of the same parts, and only one merge can complete it.
    """
    try:
        model, words = data["model"], data["pre_tokenizer"]
        vocab, merges = model["vocab"], model["merges"]
        pairs = [m.split(" ") if isinstance(m, str) else m for m in merges]
        made = [vocab[a + b] for a, b in pairs]
        others = set(vocab.values()) - set(made) - {vocab[EOT]}
        letters = {vocab[letter] for letter in _letters()}
        added = [token["content"] for token in data["added_tokens"]]
        plain = (words["type"], words["add_prefix_space"], words.get("use_regex", True))
        normalizer = data["normalizer"]
        in_order = all(a < b for a, b in zip([max(letters), *made], made, strict=False))
        whole = all(type(n) is int and n >= 0 for n in vocab.values())
    except (AttributeError, KeyError, TypeError, ValueError):
        return False
    unusual = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    return (
        plain == ("ByteLevel", False, True)
        and normalizer is None
        and whole
        and not any(model.get(name) for name in unusual)
        and added == [EOT]
        and others == letters
        and in_order
    )


def check_vocab(vocab: int) -> None:
    if not LEAST_VOCAB <= vocab <= MOST_IDS:
        raise DataError(
            f"vocab must be in {LEAST_VOCAB}..{MOST_IDS}, got {vocab}: it contains 256 bytes and "
            f"the separator, and a shard holds ids below {MOST_IDS}"
        )


def train(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Train a byte-level BPE. Its tokens are the separator (id 0), the bytes, and merges."""
    check_vocab(vocab)
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[EOT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer=trainer)
    return parse(inner.to_str(pretty=True))
