"""Who waits for whom, by what each worker did last."""

from __future__ import annotations

from elastic.records.flight_recorder import Flight, FlightEvent, FlightNote
from elastic.records.last_notes import last_notes, ranks, text

S = 1_000_000_000


def flight(
    worker: str, event: FlightEvent, operation: int, *, at_s: int = 10, generation: int = 2, words: str = ""
) -> Flight:
    return Flight(worker, 7, 100 * S, (FlightNote(1, at_s * S, generation, operation, -1, event, words),))


def entered(worker: str, generation: int, rank: int) -> dict[str, object]:
    return {"event": "entered", "worker_id": worker, "generation": generation, "rank": rank}


def awaited(*flights: Flight) -> list[str]:
    return [last.worker_id for last in last_notes(flights, 130 * S, {}) if last.awaited]


def test_those_who_compute_are_waited_for_by_those_who_wait() -> None:
    a, b = flight("a.0.0", FlightEvent.WAITS, 5), flight("b.0.0", FlightEvent.COMPUTES, 5)
    assert awaited(a, b) == ["b.0.0"]
    assert awaited(a, flight("b.0.0", FlightEvent.WAITS, 5)) == []
    assert awaited(flight("a.0.0", FlightEvent.COMPUTES, 5), b) == []


def test_one_in_an_earlier_operation_is_waited_for_also_if_it_waits() -> None:
    assert awaited(flight("a.0.0", FlightEvent.GATHERED, 5), flight("b.0.0", FlightEvent.WAITS, 4)) == ["b.0.0"]
    assert awaited(flight("a.0.0", FlightEvent.WAITS, 5), flight("b.0.0", FlightEvent.DONE, 4)) == ["b.0.0"]
    assert awaited(flight("a.0.0", FlightEvent.WAITS, 5), flight("b.0.0", FlightEvent.COMPUTES, 6)) == []


def test_a_worker_of_an_earlier_generation_is_not_waited_for() -> None:
    lost = flight("b.0.0", FlightEvent.COMPUTES, 3, generation=1)
    assert awaited(flight("a.0.0", FlightEvent.WAITS, 5), lost) == []


def test_the_newest_worker_of_a_slot_counts() -> None:
    found = [flight(f"b.0.{number}", FlightEvent.COMPUTES, 5) for number in (2, 10, 9)]
    assert awaited(flight("a.0.0", FlightEvent.WAITS, 5), *found) == ["b.0.10"]


def test_it_is_told_in_words() -> None:
    told = text(
        last_notes(
            [
                flight("a.0.0", FlightEvent.WAITS, 5, words="pass 0 of step 4"),
                flight("b.0.0", FlightEvent.COMPUTES, 5, at_s=5, words="shard 3 in pass 0 of step 4"),
                flight("c.0.0", FlightEvent.DONE, 4, at_s=7),
            ],
            None,
            ranks([entered("a.0.0", 2, 0), entered("b.0.0", 1, 0), entered("b.0.0", 2, 1)]),
        )
    )
    assert told.splitlines() == [
        "rank 0 (a.0.0)  generation 2, operation 5: waits for the others in pass 0 of step 4, for 0 s",
        "rank 1 (b.0.0)  generation 2, operation 5: computes shard 3 in pass 0 of step 4, for 5 s",
        "c.0.0           generation 2, operation 4: runs the script between two operations, for 3 s",
        "the others wait for rank 1 (b.0.0), c.0.0; the first to look at is c.0.0: it runs the script between two "
        "operations, for 3 s",
    ]
    assert text(last_notes([], None, {})) == ""
