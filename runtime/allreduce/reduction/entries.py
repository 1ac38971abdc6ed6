"""One member's entry in the headers of an operation, as bytes.

    16 bytes      digest of the fields on which all members should agree
    4 bytes       length of the next part, little-endian; 0: as in this member's last entry for the same one of PARTS
    JSON          the member's other fields, and of each term all but its numbers
    8 bytes each  float64: of each term its weight, then total and weight of each scalar

In a steady state only numbers change from step to step. So the JSON goes once, and is parsed once by each member.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from runtime.allreduce.reduction.partial_sum import Json, Partial, as_counts, as_list, parse_partial

MAX_HEADER_BYTES = 64 << 20
DIGEST_BYTES = 16
_HEAD = struct.Struct(f"<{DIGEST_BYTES}sI")
_TERMS = "terms"
_COMPACT = json.JSONEncoder(separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Term:
    """The description of one partial sum: all of it but tensors and numbers. meta: with 0 for each number. leaves: see
    over_mesh.exchange. numbers: how many it has."""

    meta: Partial
    leaves: tuple[int, ...]
    numbers: int


@dataclass(frozen=True, slots=True)
class Said:
    """The JSON of an entry. fields: the member's other fields. These and notes are not to be changed: the member's next
    entry may say the same."""

    encoded: bytes
    fields: dict[str, Json]
    terms: tuple[Term, ...]
    numbers: struct.Struct


def digest(agreed: bytes) -> bytes:
    """The digest of the fields on which all members should agree. agreed: these fields as JSON."""
    return hashlib.blake2b(agreed, digest_size=DIGEST_BYTES).digest()


def encode(
    agreed: bytes, fields: dict[str, Json], roots: Sequence[Partial], leaves: Sequence[int] | None, last: Said | None
) -> bytes:
    """The entry of a member that brings these roots. agreed: the digest. leaves: of its only root. last: what it said
    in its last entry over this ring; None if this is the first. Raises ValueError if it is too large."""
    terms: list[Json] = [
        {**_without_numbers(root).meta(), "leaves": list[Json](sorted(leaves or ()))} for root in roots
    ]
    said = encoded_json({**fields, _TERMS: terms})
    if last is not None and last.encoded == said:
        said = b""
    numbers = [number for root in roots for number in _numbers(root)]
    return _HEAD.pack(agreed, len(said)) + said + _struct(len(numbers)).pack(*numbers)


def _numbers(root: Partial) -> list[float]:
    return [root.weight, *(number for _, *both in root.scalars.values() for number in both)]


def _without_numbers(root: Partial) -> Partial:
    scalars = {name: (kind, 0.0, 0.0) for name, (kind, _, _) in root.scalars.items()}
    return replace(root, weight=0.0, scalars=scalars)


def decode(entry: bytes, last: Said | None) -> tuple[bytes, Said, tuple[float, ...]]:
    """(digest of what should be agreed on, fields and terms, numbers of all terms) of an entry. last: as in `encode`.

    Raises ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError or struct.error for what is no
    entry.
    """
    agreed, length = _HEAD.unpack_from(entry)
    end = _HEAD.size + length
    said = _parse(entry[_HEAD.size : end]) if length else last
    if said is None:
        raise ValueError("it says the same as before, and has said nothing")
    if len(entry) != end + said.numbers.size:
        raise ValueError(f"{len(entry)} bytes, and {end} without the numbers of {len(said.terms)} terms")
    return agreed, said, said.numbers.unpack_from(entry, end)


def with_numbers(term: Term, numbers: Sequence[float]) -> Partial:
    """The partial sum without its tensors."""
    of, following = term.meta, iter(numbers)
    weight = next(following)
    scalars = {name: (kind, next(following), next(following)) for name, (kind, _, _) in of.scalars.items()}
    return Partial(of.lo, of.hi, {}, of.has_grad, weight, scalars, of.note, of.nonfinite)


def encoded_json(value: Json) -> bytes:
    """Raises ValueError if it is too large."""
    encoded = _COMPACT.encode(value).encode()
    if len(encoded) > MAX_HEADER_BYTES:
        raise ValueError(f"header of {len(encoded)} bytes, at most {MAX_HEADER_BYTES} allowed")
    return encoded


def _parse(encoded: bytes) -> Said:
    fields = json.loads(encoded)
    terms = tuple(map(_term, as_list(fields.pop(_TERMS))))
    return Said(encoded, fields, terms, _struct(sum(term.numbers for term in terms)))


def _term(meta: Json) -> Term:
    if not isinstance(meta, dict):
        raise TypeError("a term is no object")
    partial = parse_partial(meta)
    return Term(partial, tuple(as_counts(meta["leaves"])), len(_numbers(partial)))


@lru_cache(maxsize=64)
def _struct(numbers: int) -> struct.Struct:
    return struct.Struct(f"<{numbers}d")
