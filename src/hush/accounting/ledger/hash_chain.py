"""Hash chain of a ledger's lines: each digest commits to everything that came before it.

A line is a JSON object whose last key is `chain`: SHA-256, cut to 128 bits, of the digest before and
of the line's text up to that key. A line that was changed, left out or put elsewhere breaks the chain.
It guards against accidents, not against forgery: whoever may write the file can compute digests.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_KEY = b', "chain": "'
DIGITS = 32


class BrokenChain(ValueError):
    """A whole line that does not follow what comes before it."""


def link(before: str, text: bytes) -> str:
    """The digest of a text that follows everything whose digest is `before`."""
    return hashlib.sha256(before.encode() + text).hexdigest()[:DIGITS]


def text_of(entry: Mapping[str, Any]) -> bytes:
    """The text of an entry that is hashed: its line without the digest."""
    return json.dumps(entry).encode()[:-1]


def chained(text: bytes, before: str) -> tuple[bytes, str]:
    """The line of a text (with its newline), and its digest."""
    digest = link(before, text)
    return text + _KEY + digest.encode() + b'"}\n', digest


def entry_of(line: bytes, before: str) -> tuple[dict[str, Any], bytes, str] | None:
    """The entry of a line, its text and its digest; None for a torn line, which is cut short.

    Raises:
        BrokenChain: The line is whole and it, or something before it, is not as it was written.
    """
    try:
        entry = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    text, key, rest = line.rstrip(b"\n").rpartition(_KEY)
    digest = link(before, text)
    if not isinstance(entry, dict) or not key or rest != digest.encode() + b'"}':
        raise BrokenChain
    del entry["chain"]
    return entry, text, digest
