"""The checksum of copied bytes finds what a sum of words in one direction would not."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest

from runtime.allreduce.fixed_point import conversion
from runtime.recovery.transfer import checksum as module
from runtime.recovery.transfer.checksum import ROW_BYTES, ROW_WORDS, FilledBody, checksum

SIZE = 5 * ROW_BYTES + 1003


@pytest.fixture
def content() -> bytearray:
    return bytearray(random.Random(5).randbytes(SIZE))


def of(content: bytearray) -> int:
    return checksum(memoryview(content))


def test_any_flipped_bit_changes_it(content: bytearray) -> None:
    expected = of(content)
    dice = random.Random(7)
    places = [0, ROW_BYTES - 1, ROW_BYTES, 5 * ROW_BYTES - 1, 5 * ROW_BYTES, SIZE - 1]
    for place in [*places, *(dice.randrange(SIZE) for _ in range(200))]:
        flipped = 1 << dice.randrange(8)
        content[place] ^= flipped
        assert of(content) != expected, f"bit {flipped} of byte {place}"
        content[place] ^= flipped
    assert of(content) == expected


@pytest.mark.parametrize("distance", [1, 512, ROW_WORDS, 2 * ROW_WORDS + 1], ids=["next", "page", "row", "other"])
def test_words_that_changed_places_change_it(content: bytearray, distance: int) -> None:
    expected = of(content)
    words = np.frombuffer(content, dtype=np.uint64, count=5 * ROW_WORDS)
    words[[7, 7 + distance]] = words[[7 + distance, 7]]
    assert of(content) != expected


@pytest.mark.parametrize("size", [64, 4096, ROW_BYTES])
def test_blocks_that_changed_places_change_it(content: bytearray, size: int) -> None:
    expected = of(content)
    content[:size], content[2 * size : 3 * size] = content[2 * size : 3 * size], content[:size]
    assert of(content) != expected


def test_zeros_more_or_less_change_it() -> None:
    sums = [checksum(memoryview(bytes(size))) for size in (0, 1, 8, ROW_BYTES - 1, ROW_BYTES, 2 * ROW_BYTES)]
    assert len(set(sums)) == len(sums)


def test_less_than_a_row_is_guarded_by_crc32(content: bytearray) -> None:
    small = bytes(content[: ROW_BYTES - 1])
    assert checksum(memoryview(small)) == zlib.crc32(small)


def test_pieces_are_summed_in_their_order(content: bytearray) -> None:
    first, second = memoryview(content)[:ROW_BYTES], memoryview(content)[ROW_BYTES : 2 * ROW_BYTES]
    assert checksum(second, checksum(first)) != checksum(first, checksum(second))


def test_it_does_not_depend_on_where_the_bytes_lie(content: bytearray) -> None:
    for offset in range(1, 9):
        moved = memoryview(bytearray(offset) + content)[offset:]
        assert checksum(moved) == of(content)


def without_kernel(monkeypatch: pytest.MonkeyPatch, data: memoryview) -> int:
    with monkeypatch.context() as patch:
        patch.setattr(module, "kernel", lambda: None)
        return checksum(data, 7)


compiled = pytest.mark.skipif(conversion.kernel() is None, reason="there is no compiler here")


@compiled
@pytest.mark.parametrize("begin", [0, 1, 8, 1003])
def test_kernel_and_numpy_find_the_same(content: bytearray, begin: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (0, 1, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 1, 3 * ROW_BYTES + 4, SIZE - 1003):
        part = memoryview(content)[begin : begin + size]
        assert checksum(part, 7) == without_kernel(monkeypatch, part)


@compiled
@pytest.mark.parametrize("seed", range(20))
def test_what_is_copied_has_the_checksum_of_the_whole_body(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(seed)
    largest = dice.choice((64, 3000, 20_000, 400_000))
    sources = [np.frombuffer(dice.randbytes(dice.randint(1, largest)), np.uint8) for _ in range(dice.randint(1, 40))]
    places, at = [], 0
    for source in sources:
        at += dice.choice((0, 0, 64, 5 * ROW_BYTES + 8))
        places.append(at)
        at += source.nbytes
    wanted = bytearray(dice.randbytes(at + dice.choice((0, 77, 2 * ROW_BYTES))))
    shift = dice.choice((0, 0, 64, 8, 1))
    found = memoryview(bytearray(shift) + wanted)[shift:]
    for place, source in zip(places, sources, strict=True):
        wanted[place : place + source.nbytes] = source.tobytes()
    pieces = [(one.ctypes.data, place, one.nbytes) for one, place in zip(sources, places, strict=True)]
    filled, middle = FilledBody(found), dice.randint(0, len(pieces))
    for some in (pieces[:middle], pieces[middle:]):
        filled.copy(*np.array(some, np.int64).reshape(-1, 3).T.copy())
    assert filled.checksum(7) == without_kernel(monkeypatch, memoryview(wanted))
    assert found == wanted
