"""The ledger of applied steps: every step once, in order, and the same for every worker that reports it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.records import ledger
from elastic.records.ledger import Ledger, LedgerConflict, LedgerRefused, compare, read


def line(step: int, **changed: object) -> dict[str, Any]:
    plain = {
        "step": step,
        "epoch": 0,
        "generation": 1,
        "world_size": 2,
        "lr": [0.1],
        "scalars": {"loss": 1 / (step + 3)},
    }
    return {**plain, "samples": [[2 * step], [2 * step + 1]], **changed}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps.jsonl"


def test_a_known_step_is_dropped(path: Path) -> None:
    with Ledger(path) as book:
        assert book.append(line(0))
        assert not book.append(line(0, generation=2, world_size=1))
    assert read(path) == [line(0)]


@given(st.permutations([step for step in range(6) for _ in range(2)]))
def test_steps_are_in_order_whatever_order_they_arrive_in(tmp_path_factory: Any, order: list[int]) -> None:
    path = tmp_path_factory.mktemp("ledger") / "steps.jsonl"
    with Ledger(path) as book:
        taken = [step for step in order if book.append(line(step))]
        assert (book.next_step, book._waiting) == (6, {})
    assert sorted(taken) == list(range(6))
    assert read(path) == [line(step) for step in range(6)]


def test_a_later_step_waits_for_the_missing_one(path: Path) -> None:
    with Ledger(path) as book:
        book.append(line(1))
        assert (book.next_step, len(book._waiting)) == (0, 1)
        assert read(path) == []


def test_the_wait_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "WAITING_LIMIT", 2)
    with Ledger(path) as book:
        book.append(line(1))
        book.append(line(2))
        with pytest.raises(LedgerConflict, match="step 0 is missing"):
            book.append(line(3))
        book.append(line(0))
        assert book.next_step == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [("scalars", {"loss": 0.5}), ("lr", [0.2]), ("epoch", 1), ("samples", [[0], [2]]), ("scalars", {"loss": -0.0})],
)
@pytest.mark.parametrize("first", [0, 1])
def test_a_step_reported_differently_is_a_conflict(path: Path, field: str, value: object, first: int) -> None:
    """Both against the line on file (step 0) and against one that waits (step 1)."""
    with Ledger(path) as book:
        book.append(line(first, scalars={"loss": 0.0}))
        with pytest.raises(LedgerConflict, match=f"step {first} .*{field}="):
            book.append({**line(first, scalars={"loss": 0.0}), field: value})


def mean(*parts: Sequence[float]) -> dict[str, float]:
    """The loss of three shards, summed on each member, and then over the members in rank order."""
    return {"loss": sum(map(sum, parts)) / 3}


def test_a_round_with_a_quorum_that_is_done_again_is_no_conflict(path: Path) -> None:
    """Other replicas were late."""
    before, after = ({"loss": loss, "elastic.replicas": count} for loss, count in ((0.5, 3.0), (0.25, 2.0)))
    with Ledger(path) as book:
        assert book.append(line(0, scalars=before)) and book.append(line(1, scalars=before))
        with pytest.raises(LedgerConflict, match=r"step 1 .*scalars="):  # two members of one ring
            book.append(line(1, scalars=after))
    with Ledger(path) as book:
        assert not book.append(line(1, scalars=after))
        assert book.append(line(2, scalars=after))
    assert [one["scalars"] for one in read(path)] == [before, before, after]


def test_steps_done_again_in_a_job_whose_last_bits_depend_on_its_faults_are_no_conflict(path: Path) -> None:
    """--reduction allreduce: the resumed run has other members, so other shards are added first."""
    before, after = mean([0.1, 0.2], [0.3]), mean([0.1], [0.2, 0.3])
    assert before != after
    with Ledger(path, stable=False) as book:
        assert book.append(line(0, scalars=before))
        assert book.append(line(1, scalars=before, lr=[before["loss"]]))
    with Ledger(path, stable=False) as book:
        assert not book.append(line(1, scalars=after, lr=[after["loss"]]))
        assert book.append(line(2, scalars=before))
        assert not book.append(line(2, scalars=after, generation=2)), "after a loss of every copy of the state"
        with pytest.raises(LedgerConflict, match=r"step 2 .*scalars="):  # two members of one ring
            book.append(line(2, scalars=after))
        with pytest.raises(LedgerConflict, match=r"step 1 .*samples="):
            book.append(line(1, samples=[[0], [2]]))
    assert read(path) == [
        line(0, scalars=before),
        line(1, scalars=before, lr=[before["loss"]]),
        line(2, scalars=before),
    ]


def test_a_torn_last_line_is_cut_off_at_start(path: Path) -> None:
    with Ledger(path) as book:
        book.append(line(0))
        book.append(line(1))
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert read(path) == [line(0)]
    with Ledger(path) as book:
        assert book.next_step == 1
        assert not book.append(line(0))
        assert book.append(line(1))
    assert path.read_bytes() == whole


@pytest.mark.parametrize("damage", [b"not json\n", b'{"step": 7}\n', b"[]\n"])
def test_a_damaged_ledger_is_refused_with_its_line(path: Path, damage: bytes) -> None:
    with Ledger(path) as book:
        book.append(line(0))
    with path.open("ab") as file:
        file.write(damage + b"{}\n")
    with pytest.raises(LedgerConflict, match="line 2 "):
        Ledger(path)


def test_numbers_unknown_to_json_are_written_as_words_and_equal_themselves(path: Path) -> None:
    odd = line(0, scalars={"loss": math.nan, "norm": -math.inf})
    with Ledger(path) as book:
        assert book.append(odd)
        assert not book.append(odd)
    assert read(path)[0]["scalars"] == {"loss": "nan", "norm": "-inf"}


def test_runs_are_compared_in_what_is_the_same_for_every_world() -> None:
    quiet = [line(step) for step in range(3)]
    assert compare(quiet, [line(step, generation=9, world_size=5) for step in range(3)]) is None
    assert compare(quiet, quiet[:2]) == "step 2 is only in the first run"
    assert compare(quiet[:2], quiet) == "step 2 is only in the second run"
    differing = [quiet[0], line(1, samples=[[2], [4]]), quiet[2]]
    assert compare(quiet, differing) == "step 1 differs in samples: [[2], [3]] and [[2], [4]]"


def test_what_a_full_disk_does_not_take_waits_for_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger(path) as book:
        book.append(line(0))
        write = os.write
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda file, data: write(file, data[:20]))
            assert book.append(line(1))
            assert book.append(line(2))
            assert book.refused is not None and book.refused.strerror == "No space left on device"
            assert not book.append(line(1)), "it is known all the same"
            with pytest.raises(LedgerConflict, match="step 1 "):
                book.append(line(1, epoch=9))
            assert read(path) == [line(0)], "half a line was left behind"
        book.flush()
        assert book.refused is None
        assert not book._waiting
    assert read(path) == [line(step) for step in range(3)]


def test_a_disk_that_stays_full_ends_the_job_and_says_why(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "WAITING_LIMIT", 2)
    book = Ledger(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: 0)
        for step in range(2):
            book.append(line(step))
        with pytest.raises(LedgerRefused, match="from step 0 on: No space left on device; make room"):
            book.append(line(2))
        with pytest.raises(LedgerRefused):
            book.close()


def test_a_closed_ledger_is_on_the_disk_with_the_lines_that_closing_wrote(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable = b""
    fsync = os.fsync

    def noted(file: int) -> None:
        nonlocal durable
        fsync(file)
        durable = path.read_bytes()

    monkeypatch.setattr(os, "fsync", noted)
    with Ledger(path) as book:
        book.append(line(0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda file, data: 0)
            book.append(line(1))
    assert read(path) == [line(0), line(1)]
    assert durable == path.read_bytes()


@given(st.permutations([step for step in (3, 4, 5, 9, 10, 20) for _ in range(2)]))
def test_a_part_takes_every_step_once_whenever_it_comes(tmp_path_factory: Any, order: list[int]) -> None:
    path = tmp_path_factory.mktemp("ledger") / "steps.jsonl"
    half = len(order) // 2
    taken: list[int] = []
    for steps in (order[:half], order[half:]):
        with Ledger(path, whole=False) as book:
            taken += [step for step in steps if book.append(line(step))]
            assert not book._waiting
    assert sorted(taken) == [3, 4, 5, 9, 10, 20]
    assert sorted(read(path), key=lambda one: int(one["step"])) == [line(step) for step in sorted(taken)]
    assert ledger.between(path, 4, 10) == [line(4), line(5), line(9)]


def test_a_part_refuses_what_differs_from_a_line_on_file(path: Path) -> None:
    with Ledger(path, whole=False) as book:
        book.append(line(7))
        book.append(line(2))
    with Ledger(path, whole=False) as book:
        assert book.next_step == 8
        assert not book.append(line(2))
        with pytest.raises(LedgerConflict, match="epoch"):
            book.append(line(7, epoch=1))


def test_parts_of_several_nodes_are_merged_by_step(tmp_path: Path) -> None:
    for name, steps in (("a", (0, 1, 2, 5)), ("b", (4, 2, 3))):
        with Ledger(tmp_path / name, whole=False) as book:
            for step in steps:
                book.append(line(step))
    assert ledger.merged([tmp_path / "a", tmp_path / "b"], stable=True) == [line(step) for step in range(6)]


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("names", ["ab", "ba"])
def test_a_line_without_values_hides_none_that_another_node_has_written(
    names: str, stable: bool, tmp_path: Path
) -> None:
    """Workers that come when all others are lost record a step of which they know nothing."""
    for name, said in (("a", line(3)), ("b", line(3, generation=2, lr=[], scalars={}))):
        with Ledger(tmp_path / name, whole=False) as book:
            book.append(said)
    assert ledger.merged([tmp_path / name for name in names], stable=stable) == [line(3)]


def test_steps_in_which_workers_do_not_wait_differ_when_they_are_done_again(path: Path) -> None:
    data = {ledger.UNWAITING: True}
    with Ledger(path) as book:
        assert book.append(line(0, scalars={"loss": 1.0}, data=data))
    with Ledger(path) as book:
        assert not book.append(line(0, scalars={"loss": 2.0}, data=data))
        assert book.append(line(1, scalars={"loss": 1.0}, data=data))
        with pytest.raises(LedgerConflict, match=r"step 1 .*scalars="):  # two members of one ring
            book.append(line(1, scalars={"loss": 2.0}, data=data))


def test_parts_that_differ_are_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with Ledger(tmp_path / name, whole=False) as book:
            book.append(line(3, samples=[name]))
    for stable in (False, True):
        with pytest.raises(LedgerConflict, match="step 3 differs in samples"):
            ledger.merged([tmp_path / "a", tmp_path / "b"], stable=stable)


def test_a_step_that_another_node_has_done_again_may_have_other_last_bits_if_the_job_may(tmp_path: Path) -> None:
    for name, generation in (("a", 1), ("b", 2), ("c", 2)):
        with Ledger(tmp_path / name, whole=False) as book:
            book.append(line(3, scalars={"loss": ord(name)}, generation=generation))
    parts = [tmp_path / name for name in "abc"]
    assert [one["generation"] for one in ledger.merged(parts[:2], stable=False)] == [1]
    for stable, some in ((True, parts[:2]), (False, parts[1:])):
        with pytest.raises(LedgerConflict, match="step 3 differs in scalars"):
            ledger.merged(some, stable=stable)
