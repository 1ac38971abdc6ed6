"""A document that is too large for one write to the store, in pieces under one digest.

etcd refuses requests above 1.5 MB, which is the record of some 8000 members. A long record is written in pieces first;
what is committed then, in the one transaction that decides, is their number and the digest of the whole. Until that no
reader looks at them, and what a leader leaves behind that dies in between is overwritten by its successor or never
read. Their key has the digest in it, so pieces of two documents are never mixed.

    /elastic/<job>/pieces/<digest>/<i>

Pure: values in, values out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable

PIECE_BYTES = 512 * 1024
"""As large as the record of about 3000 members."""

PIECES_LIMIT = 1024

_HEAD = re.compile(rb'\{"digest": "([0-9a-f]{64})", "pieces": (\d{1,4})\}')


def cut(document: bytes) -> tuple[bytes, dict[str, bytes]]:
    """What is to be committed, and by key what is to be written before; nothing for a document of one piece."""
    if len(document) <= PIECE_BYTES:
        return document, {}
    pieces = [document[begin : begin + PIECE_BYTES] for begin in range(0, len(document), PIECE_BYTES)]
    digest = hashlib.sha256(document).hexdigest()
    head = json.dumps({"digest": digest, "pieces": len(pieces)}).encode()
    return head, {f"{digest}/{number}": piece for number, piece in enumerate(pieces)}


def whole(committed: bytes, read: Callable[[str], bytes | None]) -> bytes | None:
    """The document again, or None if not all of it is there. read: a piece by its key."""
    if (head := _HEAD.fullmatch(committed)) is None:
        return committed
    digest, count = head[1].decode(), min(int(head[2]), PIECES_LIMIT)
    document = b"".join(read(f"{digest}/{number}") or b"" for number in range(count))
    return document if hashlib.sha256(document).hexdigest() == digest else None
