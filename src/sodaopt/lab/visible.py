"""Make text from files safe to print."""

import re

# All control characters but tab and newline, and characters that reorder the text around them.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: object) -> str:
    """Replace control characters by their codes, because a terminal would obey them."""
    return _CONTROL.sub(_code, str(text))


def _code(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"
