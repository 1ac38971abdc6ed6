"""The rules of durable checkpoints: names, manifests, intervals, retention, shares, and which one is used."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.checkpoints.manifest import FileEntry, Manifest, Moment, PartNote, _digest
from elastic.checkpoints.naming import EntryName, check_series, is_inside
from elastic.checkpoints.partition import Rows, share
from elastic.checkpoints.pointer import Pointer
from elastic.checkpoints.policy import (
    FIRST_S,
    LEAST_S,
    PRIOR_MTBF_S,
    Every,
    Keep,
    Unit,
    best_interval_s,
    mtbf_s,
    superfluous,
)
from elastic.checkpoints.select import UNFINISHED, Found, assess, newest_first
from elastic.errors import CheckpointCorrupt, ConfigError

NAME = EntryName(500, 0, 3, "0123abcd")
FILE = FileEntry("part-00000-of-00001.safetensors", 12, "a" * 64)
NO_STATE: dict[str, Any] = {"format": 1, "tensors": [], "objects": {}, "state": {}}
MANIFEST = Manifest(
    job="train",
    job_id="feed",
    series="_periodic",
    entry=str(NAME),
    moment=Moment(step=500, epoch=2, epoch_start=400, seed=0, shards=8, once={"0 once(f)": [1, "é"]}),
    generation=3,
    world=1,
    taken="2026-01-02T03:04:05Z",
    files=(FILE,),
    header={**NO_STATE, "state": {"best": 0.5}},
)


def entry(step: int) -> EntryName:
    return EntryName(step, 0, 1, "00000000")


def test_a_checkpoint_is_as_large_as_its_files_together() -> None:
    assert MANIFEST.size == 12
    assert replace(MANIFEST, files=(FILE, replace(FILE, name="tokenizer.json", size=30))).size == 42


def test_files_of_the_script_are_no_tensors_of_the_checkpoint() -> None:
    """Also if they are tensors of its own, which always lie in a directory."""
    own = (replace(FILE, name="tokenizer.json"), replace(FILE, name="adapters/lora.safetensors"))
    assert replace(MANIFEST, files=(own[0], FILE, own[1])).data == (FILE,)


# Names


def test_a_name_is_read_back_and_names_sort_by_step() -> None:
    assert EntryName.parse(str(NAME)) == NAME
    assert sorted(map(str, map(entry, (1000, 9, 99)))) == [str(entry(step)) for step in (9, 99, 1000)]


@pytest.mark.parametrize(
    "text", ["", "best", "step-5", f"{NAME}x", f"{NAME}/..", f".{NAME}", str(NAME).replace(".0.", f".{'1' * 5000}.")]
)
def test_what_is_no_entry_is_left_alone(text: str) -> None:
    assert EntryName.parse(text) is None


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".hidden", "a b", "x" * 101, "_periodic", None])
def test_a_series_has_a_harmless_name(name: str) -> None:
    with pytest.raises(ConfigError, match="letters"):
        check_series(name)


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "files/../x", "a/b", "a\0b", "", "files/", "..", "manifest.json"]
)
def test_a_manifest_cannot_name_files_outside_its_entry(path: str) -> None:
    assert not is_inside(path)


# Manifests


def test_a_manifest_is_read_back() -> None:
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST
    note = PartNote((FILE,), MANIFEST.taken)
    assert PartNote.from_json(note.to_json()) == note
    with pytest.raises(CheckpointCorrupt):
        PartNote.from_json(note.to_json().replace(b"aaaa", b"aaab"))


@given(st.data())
def test_any_flipped_bit_in_a_manifest_is_found(data: st.DataObject) -> None:
    content = bytearray(MANIFEST.to_json())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    try:
        read = Manifest.from_json(bytes(content))
    except CheckpointCorrupt:
        return
    assert read == MANIFEST, "a flipped bit that changes nothing, such as that of a space at the end"


@pytest.mark.parametrize("length", [0, 1, 100, len(MANIFEST.to_json()) // 2, len(MANIFEST.to_json()) - 3])
def test_a_truncated_manifest_is_found(length: int) -> None:
    with pytest.raises(CheckpointCorrupt, match="damaged"):
        Manifest.from_json(MANIFEST.to_json()[:length])


@pytest.mark.parametrize(
    "wrong",
    [
        replace(MANIFEST, files=(replace(FILE, name="../../secret"),)),
        replace(MANIFEST, files=(replace(FILE, size=-1),)),
        replace(MANIFEST, files=(replace(FILE, sha256="x"),)),
        replace(MANIFEST, moment=replace(MANIFEST.moment, step=501)),
        replace(MANIFEST, moment=replace(MANIFEST.moment, stop=cast(Any, 5))),
        replace(MANIFEST, entry="best"),
        replace(MANIFEST, generation=-1),
    ],
)
def test_a_manifest_that_says_impossible_things_is_refused(wrong: Manifest) -> None:
    with pytest.raises(CheckpointCorrupt):
        Manifest.from_json(wrong.to_json())


def test_a_manifest_of_an_earlier_version_says_of_no_stop() -> None:
    body = json.loads(MANIFEST.to_json())
    del body["sha256"], body["moment"]["stop"]
    assert Manifest.from_json(json.dumps({"sha256": _digest(body), **body}).encode()) == MANIFEST


def test_a_manifest_of_a_later_format_is_refused_by_name() -> None:
    body = {**json.loads(MANIFEST.to_json()), "format": 2}
    del body["sha256"]
    with pytest.raises(CheckpointCorrupt, match="its format is 2"):
        Manifest.from_json(json.dumps({"sha256": _digest(body), **body}).encode())


# Which one is used


def test_an_entry_is_judged_by_its_manifest_and_the_sizes_of_its_files() -> None:
    content, sizes = MANIFEST.to_json(), {FILE.name: FILE.size}
    assert assess(NAME, "feed", content, sizes) == Found(NAME, MANIFEST)
    assert assess(NAME, "", content, sizes).problem == ""
    assert assess(NAME, "feed", None, sizes).unfinished
    problems = {
        "damaged": assess(NAME, "feed", content[:-9], sizes),
        "another job, train": assess(NAME, "beef", content, sizes),
        "manifest is that of": assess(entry(7), "feed", content, sizes),
        "is missing": assess(NAME, "feed", content, {}),
        "has 11 bytes instead of 12": assess(NAME, "feed", content, {FILE.name: 11}),
    }
    for problem, found in problems.items():
        assert problem in found.problem
        assert not found.unfinished


def test_the_newest_comes_first_whatever_its_generation() -> None:
    older, newer = EntryName(5, 0, 9, "ffffffff"), EntryName(6, 0, 1, "00000000")
    assert [found.name for found in newest_first([Found(older, None, UNFINISHED), Found(newer, None)])] == [
        newer,
        older,
    ]


# Retention


def test_the_last_ones_stay_and_the_first_of_every_so_many_steps() -> None:
    complete = [entry(step) for step in range(0, 1000, 100)]
    assert superfluous(Keep(2), complete, []) == complete[:-2]
    stay = set(complete) - set(superfluous(Keep(1, every=400), complete, []))
    assert stay == {entry(0), entry(400), entry(800), entry(900)}
    assert superfluous(Keep(3), complete[:2], []) == []


def test_an_unfinished_one_goes_when_a_later_one_is_complete() -> None:
    assert superfluous(Keep(1), [entry(5)], [entry(4), entry(5), entry(6)]) == [entry(4)]
    assert superfluous(Keep(1), [], [entry(4)]) == []


@pytest.mark.parametrize(
    ("text", "keep"), [("3", Keep(3)), ("last 3", Keep(3)), ("last 2, every 100 steps", Keep(2, 100))]
)
def test_retention_is_read_and_said(text: str, keep: Keep) -> None:
    assert Keep.parse(text) == keep
    assert Keep.parse(str(keep)) == keep


@pytest.mark.parametrize("text", ["", "0", "last", "last 0", "-1", "2, every 0", "2 every 5", "two"])
def test_retention_that_keeps_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="last 2"):
        Keep.parse(text)


# Intervals


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("10 min", Every(Unit.SECONDS, 600)),
        ("1.5 h", Every(Unit.SECONDS, 5400)),
        ("30s", Every(Unit.SECONDS, 30)),
        ("500 steps", Every(Unit.STEPS, 500)),
        ("1 step", Every(Unit.STEPS, 1)),
        ("auto", Every(Unit.AUTO)),
        ("off", Every(Unit.OFF)),
    ],
)
def test_an_interval_is_read(text: str, every: Every) -> None:
    assert Every.parse(text) == every


@pytest.mark.parametrize("text", ["", "10", "0 min", "0 steps", "1.5 steps", "-5 min", "10 days", "minute", "AUTO"])
def test_a_wrong_interval_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match='"10 min"'):
        Every.parse(text)


def test_steps_decide_alone_or_time_does() -> None:
    steps = Every.parse("500 steps")
    assert [step for step in range(1501) if steps.at_step(step)] == [500, 1000, 1500]
    assert steps.wait_s(1.0, 1e5) == math.inf
    assert Every.parse("30 s").wait_s(None, 1e5) == 30
    assert not Every.parse("30 s").at_step(30)
    assert Every.parse("off").wait_s(None, 1.0) == math.inf


def test_auto_takes_the_first_early_and_then_goes_by_its_cost() -> None:
    auto = Every.parse("auto")
    assert auto.wait_s(None, PRIOR_MTBF_S) == FIRST_S
    assert auto.wait_s(1e-9, PRIOR_MTBF_S) == LEAST_S
    assert auto.wait_s(1.0, PRIOR_MTBF_S) == pytest.approx(math.sqrt(2 * PRIOR_MTBF_S), rel=0.01)


@given(st.floats(0.01, 1e3), st.floats(3600, 1e7))
def test_the_interval_is_about_the_best_one(cost_s: float, mtbf: float) -> None:
    """Compared with the overhead that Daly's model (his equation 20) gives for other intervals."""

    def overhead(interval_s: float) -> float:
        return mtbf / interval_s * math.expm1((interval_s + cost_s) / mtbf)

    best = overhead(best_interval_s(cost_s, mtbf))
    assert best <= min(overhead(best_interval_s(cost_s, mtbf) * factor) for factor in (0.7, 1.4)) * 1.001


def test_the_failure_rate_is_the_jobs_own_after_a_while() -> None:
    assert mtbf_s(0.0, 0) == PRIOR_MTBF_S
    assert mtbf_s(10 * PRIOR_MTBF_S, 99) == pytest.approx(PRIOR_MTBF_S * 0.11)


# Who writes what


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=8), st.integers(1, 6))
def test_the_shares_cover_every_row_once(shapes: list[list[int]], world: int) -> None:
    sizes = [4 * math.prod(shape) for shape in shapes]
    covered: dict[int, list[Rows]] = {}
    for rank in range(world):
        for rows in share(shapes, sizes, rank, world):
            covered.setdefault(rows.tensor, []).append(rows)
    for number, shape in enumerate(shapes):
        rows_of = covered.get(number, [])
        assert rows_of[0].first == 0
        assert rows_of[-1].end == (shape[0] if shape else 1)
        assert all(one.end == other.first for one, other in pairwise(rows_of))


def test_a_large_tensor_is_split_evenly() -> None:
    shares = [share([[1000, 10], []], [40_000, 4], rank, 4) for rank in range(4)]
    assert [sum(rows.end - rows.first for rows in found if rows.tensor == 0) for found in shares] == [
        251,
        250,
        250,
        249,
    ]


def test_the_interval_is_that_of_the_paper() -> None:
    """x = 1 / 4, for which the square root is a half: 40 * (1 + 1/6 + 1/36) - 20."""
    assert best_interval_s(20.0, 40.0) == pytest.approx(40.0 * 43 / 36 - 20.0, rel=1e-12)


def test_where_a_checkpoint_costs_twice_what_passes_between_failures_it_is_taken_as_often_as_they_come() -> None:
    assert best_interval_s(2.0, 1.0) == 1.0 and best_interval_s(3.0, 1.0) == 1.0


def test_pointers_are_in_the_order_of_generation_step_and_call() -> None:
    """After a return to an older checkpoint the numbers of steps repeat."""
    first, *later = [
        Pointer("step-000000000100.0.g1-00000000", "a.0.0", 1),
        Pointer("step-000000000100.1.g1-00000000", "a.0.0", 1),
        Pointer("step-000000000101.0.g1-00000000", "a.0.0", 1),
        Pointer("step-000000000050.0.g2-00000000", "b.0.0", 2),
    ]
    assert first.is_newer_than(None) is True
    for pointer in later:
        assert pointer.is_newer_than(first) is True
        assert first.is_newer_than(pointer) is pointer.is_newer_than(pointer) is False
        first = pointer


def test_a_pointer_is_read_as_it_was_written_and_a_damaged_one_is_named() -> None:
    pointer = Pointer("step-000000000100.0.g1-00000000", "a.0.0", 1)
    assert Pointer.from_json(pointer.to_json()) == pointer
    sound = json.loads(pointer.to_json())
    changes = ({"since": "1"}, {"since": True}, {"holder": 1}, {"entry": "step"}, {"more": 1})
    for damaged in (b"", b"[]", b"{}", *(json.dumps(sound | change).encode() for change in changes)):
        with pytest.raises(CheckpointCorrupt):
            Pointer.from_json(damaged)
