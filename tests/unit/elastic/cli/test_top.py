"""What `elastic top` makes of two looks at a fleet: rates between them, and a row for everything."""

from __future__ import annotations

from typing import Any

from elastic.cli.fleet.jobs import overview_text
from elastic.cli.job import top

NODE = {"node": "a", "up": True, "slots": 2, "because": "", "jobs": {"train-1": 1}}
AWAY = {"node": "b", "up": False, "slots": 0, "because": "is away", "jobs": {}}


def entry(name: str, state: str, **fields: Any) -> dict[str, Any]:
    return {"job": name, "state": state, "because": "why", "workers": 2, **fields}


NO_ROOM = {"because": "no room", "advice": "make some"}


def look(applied: int, *more: dict[str, Any]) -> dict[str, Any]:
    """With a trouble that the fleet tells twice: of a job on that node, and of the node."""
    member = {"worker_id": "a.0.0", "rank": 0, "applied": applied, "phase": "shard 1"}
    status = {"state": "running", "because": "all are here", "generation": 3, "applied": applied, "members": [member]}
    jobs = [entry("train-1", "placed", troubles=[NO_ROOM]), *more]
    return {"leader": "r", "jobs": jobs, "nodes": [NODE, AWAY], "statuses": {"train-1": status}, "troubles": [NO_ROOM]}


def test_the_rate_is_that_between_two_looks() -> None:
    (first,) = top.facts(look(100), 7.0, None, 0.0, 5)["jobs"]
    assert (first["step"], first["steps_per_s"]) == (100, None)
    (then,) = top.facts(look(130), 9.0, look(100), 7.0, 5)["jobs"]
    assert then["steps_per_s"] == 15.0
    (again,) = top.facts(look(10), 9.0, look(100), 7.0, 5)["jobs"]
    assert again["steps_per_s"] == 0.0, "whoever answers now may be behind whoever answered then"


def test_jobs_that_wait_are_shown_with_their_reason_and_of_those_that_are_over_the_newest() -> None:
    over = [entry(f"old-{number}", "ended", exit_code=number, generation=1) for number in range(4)]
    shown = top.facts(look(1, *over, entry("next-9", "waits", because="needs 2 free slots")), 1.0, None, 0.0, 2)
    assert [job["job"] for job in shown["jobs"]] == ["train-1", "next-9", "old-3", "old-2"]
    text = top.text(shown, members=False)
    assert "needs 2 free slots" in text and "exit 3: why" in text and "a.0.0" not in text
    assert text.splitlines()[-1] == "trouble: no room; make some"
    assert text.count("no room") == 1


def test_a_row_says_members_of_those_wanted_and_a_node_that_is_away_says_so() -> None:
    text = top.text(top.facts(look(130), 9.0, look(100), 7.0, 5), members=True).splitlines()
    assert text[1].split() == ["train-1", "running", "1/2", "3", "130", "15.00", "all", "are", "here"]
    assert text[2].split() == ["rank", "0", "a.0.0", "step", "130", "shard", "1"]
    assert [line.split() for line in text[5:7]] == [["a", "1/2"], ["b", "away"]]


def test_a_fleet_without_jobs_says_so() -> None:
    empty = {"leader": "r", "jobs": [], "nodes": [], "statuses": {}}
    assert "no jobs" in top.text(top.facts(empty, 1.0, None, 0.0, 5), members=False)


def test_who_is_in_a_job_is_what_its_leader_says_and_not_where_the_fleet_has_slots_for_it() -> None:
    given = {"slots": {"a": 1, "b": 1}, "because": ""}
    seen = look(7, entry("next-9", "waits", slots={}), entry("over-3", "ended", slots={}, exit_code=0, generation=4))
    seen["jobs"][0] |= given
    shown = top.with_members(seen)
    assert [job["members"] for job in shown["jobs"]] == [["a.0.0"], [], []]
    assert [job["generation"] for job in shown["jobs"]] == [3, 0, 4]
    assert "train-1              placed    1 on a\n" in overview_text({**shown, "nodes": []}, long=True)
    assert "members of generation 3: a.0.0" in overview_text({**shown, "nodes": []}, long=True)
    seen["statuses"]["train-1"] = {"state": "unknown", "generation": 0, "members": []}
    shown = top.with_members(seen)
    assert shown["jobs"][0]["members"] is None
    assert "1 on a, 1 on b" in overview_text({**shown, "nodes": []})
