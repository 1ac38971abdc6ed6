"""The digest of a kept step: the same for any shards and any number of workers, and another one for any other bit."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import CheckpointCorrupt
from runtime.recovery.kept.boxes import Box
from runtime.recovery.kept.choice import HeldSegment, RoundNumber
from runtime.recovery.kept.digest import combined, leaf_digests
from runtime.recovery.kept.place import RANDOM
from runtime.recovery.kept.segment import Segment, SegmentWriter

Part = list[tuple[str, torch.Tensor, Box, bool]]
"""Path, values of a box, the box, whether it is sharded."""

ROUND = RoundNumber(0, 1)
SHAPE = (7, 3)
WHOLE = torch.arange(21, dtype=torch.float32).view(SHAPE)
BIAS = torch.tensor([0.5, -0.0])
EVERYTHING = Box.whole(SHAPE)


def segments(home: Path, parts: Sequence[Part]) -> list[Any]:
    found: list[Any] = []
    for number, part in enumerate(parts):
        body, entries = bytearray(), []
        for path, values, box, sharded in part:
            shape = list(SHAPE) if sharded else list(values.shape)
            entries.append([path, "float32", shape, box.offset, box.shape, len(body), sharded, "cpu"])
            body += values.contiguous().numpy().tobytes()
            body += bytes(-len(body) % 64)
        (home / str(number)).mkdir()
        file = SegmentWriter(home / str(number), 0, number).oldest()
        place = file.begin(len(body))
        place[:] = bytes(body)
        header = file.finish(
            HeldSegment(3, ROUND, 0, number, len(parts)), place, json.dumps({"tensors": entries}).encode()
        )
        found.append(Segment(home / str(number) / file.name, header))
    return found


def rows(*cuts: int) -> list[Part]:
    """The tensor by rows, in the parts of a world; the bias is in the first part, as all have it."""
    parts: list[Part] = []
    for first, end in itertools.pairwise((0, *cuts, SHAPE[0])):
        box = Box((first, 0), (end - first, SHAPE[1]))
        parts.append([("model.weight", WHOLE[first:end], box, True)])
    parts[0].append(("model.bias", BIAS, Box.whole(BIAS.shape), False))
    return parts


def digest(parts: Sequence[Part], workers: int = 1, *, own: bool = False) -> str:
    with tempfile.TemporaryDirectory() as home:
        every = segments(Path(home), parts)
        return combined([leaf_digests(every, worker, workers, own=own) for worker in range(workers)])


@given(st.lists(st.integers(0, SHAPE[0]), max_size=3), st.integers(1, 4))
def test_it_is_the_same_for_any_shards_and_workers(cuts: list[int], workers: int) -> None:
    assert digest(rows(*sorted(cuts)), workers) == digest(rows())


def test_any_other_bit_has_another_one() -> None:
    found = {digest(rows())}
    for path in ("model.weight", "model.bias"):
        parts = rows(3)
        at = next(number for number, entry in enumerate(parts[0]) if entry[0] == path)
        name, values, box, sharded = parts[0][at]
        parts[0][at] = name, torch.where(values == values.view(-1)[1], -values, values), box, sharded
        found.add(digest(parts))
    assert len(found) == 3


def test_of_ranks_what_one_has_as_the_first_one_counts_once() -> None:
    alike: Part = [("own.weight", WHOLE, EVERYTHING, False)]
    other: Part = [("own.weight", WHOLE + 1, EVERYTHING, False)]
    alone = digest([alike, []], own=True)
    assert digest([alike, alike], own=True) == alone
    assert len({alone, digest([alike, other], own=True), digest([other, alike], own=True)}) == 3


def test_random_numbers_do_not_count() -> None:
    random: Part = [(f"{RANDOM}.torch", WHOLE, EVERYTHING, False)]
    assert digest([rows()[0] + random], own=True) == digest(rows(), own=True)


def test_a_part_that_is_missing_is_seen() -> None:
    with pytest.raises(CheckpointCorrupt, match=r"9 elements of model\.weight"):
        digest(rows(4)[:1])
