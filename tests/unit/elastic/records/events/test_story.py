"""The story of a worker and of a generation: told from journals, with what led to it and without what did not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic import cli
from elastic.errors import ExitCode
from elastic.records.events import story
from elastic.records.events.table import TABLE
from elastic.records.journal import Journal, journal_path


def lines(*told: tuple[Any, ...]) -> list[dict[str, Any]]:
    """(event, generation, worker_id, fields) each, a second apart."""
    made = []
    for second, (event, generation, worker, fields) in enumerate(told):
        base = {"t_mono_ns": second * 10**9, "t_wall": float(second), "who": "r", "node": worker.partition(".")[0]}
        made.append({**base, "event": event, "generation": generation, "worker_id": worker, **fields})
    return made


KILLED = {"because": "killed by SIGKILL"}
JOB = lines(
    ("worker_started", 0, "a.0.0", {"pid": 7}),
    ("worker_started", 0, "b.0.0", {"pid": 8}),
    ("committed", 1, "", {"kind": "form", "members": ["a.0.0", "b.0.0"], "because": "2 of 2 workers are here"}),
    ("entered", 1, "b.0.0", {"rank": 1}),
    ("op_complete", 1, "a.0.0", {"op": 0}),
    ("op_complete", 1, "a.0.0", {"op": 1}),
    ("checkpoint_complete", 1, "b.0.0", {"step": 1}),
    ("worker_dying", 0, "b.0.0", KILLED),
    ("member_lost", 0, "b.0.0", {**KILLED, "rank": 1}),
    ("quiesce_started", 1, "", {"because": "b.0.0 lost: killed by SIGKILL"}),
    ("reported", 1, "a.0.0", {"reduced": 2}),
    ("committed", 2, "", {"kind": "loss", "members": ["a.0.0"], "because": "b.0.0 lost: killed by SIGKILL"}),
    ("running", 2, "", {}),
    ("worker_started", 0, "b.0.1", {"pid": 9}),
    ("committed", 3, "", {"kind": "planned", "members": ["a.0.0", "b.0.1"], "because": "b.0.1 joins"}),
    ("joined", 3, "b.0.1", {"op": 5}),
    ("unheard_of", 3, "b.0.1", {"because": "{braces}"}),
    ("node_leaves", 0, "", {"node": "b", "seconds_left": 30.0, "because": "asked"}),
    ("committed", 4, "", {"kind": "planned", "members": ["a.0.0"], "because": "b.0.1 drains"}),
    ("drained", 0, "b.0.1", {}),
    ("job_ended", 4, "", {"exit_code": 0, "because": "all members have finished"}),
)


def said(moments: list[story.StoryMoment]) -> list[str]:
    return [moment.said for moment in moments]


def test_the_story_of_a_worker_begins_with_its_start_and_says_why_it_ended() -> None:
    moments = story.of_worker(JOB, "b.0.0")
    assert said(moments) == [
        "b.0.0 starts as process 8",
        "b.0.0 becomes a member with generation 1",
        "b.0.0 enters generation 1 as rank 1",
        "the main thread of b.0.0 has ended",
        "b.0.0, rank 1, is lost to the job",
        "b.0.0 is no member any more with generation 2",
    ]
    assert moments[-1].because == "b.0.0 lost: killed by SIGKILL"


def test_the_story_of_a_generation_after_a_loss_has_the_cause_first_and_ends_with_the_next() -> None:
    moments = story.of_generation(JOB, 2)
    assert said(moments) == [
        "the main thread of b.0.0 has ended",
        "b.0.0, rank 1, is lost to the job",
        "the members of generation 1 are told to leave its ring",
        "a.0.0 reports how far it is: 2 operations",
        "generation 2 (loss) is durable, with a.0.0",
        "generation 2 trains",
        "generation 3 (planned) is durable, with a.0.0, b.0.1",
    ]


def test_the_story_of_a_generation_with_a_newcomer_says_how_it_came() -> None:
    assert said(story.of_generation(JOB, 3))[:2] == [
        "b.0.1 starts as process 9",
        "generation 3 (planned) is durable, with a.0.0, b.0.1",
    ]


def test_the_story_of_a_drain_has_what_the_node_was_told_and_the_end_of_the_job() -> None:
    assert said(story.of_generation(JOB, 4)) == [
        "node b has to go within 30.0 s",
        "generation 4 (planned) is durable, with a.0.0",
        "b.0.1 has left between two steps",
        "the job is over, exit 0",
    ]


def test_what_a_worker_finds_before_it_enters_the_next_generation_is_told() -> None:
    damaged = ("kept_damaged", 2, "a.0.0", {"segment": "0.1/0.0.0", "because": "its checksum differs"})
    found = lines(
        ("committed", 2, "", {"kind": "loss", "members": ["a.0.0"], "because": "b.0.0 lost"}),
        ("committed", 3, "", {"kind": "planned", "members": ["a.0.0", "b.0.1"], "because": "b.0.1 joins"}),
        damaged,
    )
    assert "damaged piece" in said(story.of_generation(found, 2))[-1]
    assert not any("damaged" in one for one in said(story.of_generation(found, 3)))


def test_of_the_operations_of_a_generation_the_first_is_told() -> None:
    assert [text for text in said(story.of_generation(JOB, 1)) if "has operation" in text] == [
        "a.0.0 has operation 0 complete"
    ]


def test_an_event_without_a_sentence_is_told_by_its_name() -> None:
    (moment,) = [moment for moment in story.of_worker(JOB, "b.0.1") if moment.line["event"] == "unheard_of"]
    assert (moment.said, moment.because) == ("unheard of, b.0.1", "{braces}")


def test_why_begins_with_what_has_ended_the_job_and_counts_what_was_lost() -> None:
    bad = {"because": "the data of shard 1 ends worker after worker", "ruling": "data"}
    lost = ("member_lost", 0, "b.0.0", {**KILLED, "rank": 1})
    told = lines(lost, ("worker_started", 0, "b.0.1", {"pid": 9}), lost, ("script_killed", 0, "a.0.0", {"signal": 9}))
    assert story.why(told) == "the job goes on\nmembers lost: 2 (2 killed by SIGKILL)"
    told += lines(("verdict", 0, "", bad))
    assert story.why(told).startswith(f"{bad['because']}\nmembers lost: 2")
    told += lines(("job_ended", 0, "", {"exit_code": 4, "because": f"{bad['because']}; all is lost\nTraceback"}))
    assert story.why(told).startswith(f"{bad['because']}; all is lost\nmembers lost: 2")
    events = [moment.line["event"] for moment in story.of_failures(told)]
    assert events == ["script_killed", "verdict", "job_ended"]
    assert story.why([]) == "the job goes on\nmembers lost: 0"


def test_a_question_why_is_about_no_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["story", "--why", "a.0.0", "--job-dir", str(tmp_path)]) == ExitCode.BAD_INPUT
    assert "or --why" in capsys.readouterr().err


def test_every_sentence_can_be_told_of_a_line_that_lacks_its_fields() -> None:
    for event in TABLE:
        assert story.moment(lines((event, 1, "a.0.0", {}))[0]).said


def test_a_snapshot_that_failed_is_in_the_story_of_its_worker_and_others_are_not() -> None:
    failed = ("snapshot_failed", 1, "a.0.0", {"because": "no room"})
    told = story.of_worker(lines(("snapshot_complete", 1, "a.0.0", {"step": 3}), failed), "a.0.0")
    assert [(moment.said, moment.because) for moment in told] == [("snapshot failed, a.0.0", "no room")]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A directory with that job in it, of one agent."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "job.json").write_text("{}")
    with Journal(journal_path(tmp_path / "job", "agent"), "train", "agent", "a") as journal:
        for line in JOB:
            told = {name: line[name] for name in line.keys() - {"event", "generation", "t_mono_ns", "t_wall", "who"}}
            journal.write(line["event"], line["generation"], **told)
    return tmp_path / "job"


def test_the_verb_tells_it_and_names_what_there_is(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--job-dir", str(job)]
    assert cli.main(["story", "2", *where]) == ExitCode.DONE
    shown = capsys.readouterr().out.splitlines()
    assert shown[4].endswith("  generation 2 (loss) is durable, with a.0.0: b.0.0 lost: killed by SIGKILL")
    assert cli.main(["story", "b.0.1", "--json", *where]) == ExitCode.DONE
    told = json.loads(capsys.readouterr().out)
    assert (told["about"], told["moments"][0]["said"]) == ("b.0.1", "b.0.1 starts as process 9")
    assert cli.main(["story", "9", *where]) == ExitCode.BAD_INPUT
    assert "there are 1, 2, 3, 4" in capsys.readouterr().err
    assert cli.main(["story", "c.0.0", *where]) == ExitCode.BAD_INPUT
    assert "there are a.0.0, b.0.0, b.0.1" in capsys.readouterr().err
    assert cli.main(["story", "1", "--job-dir", str(job.parent)]) == ExitCode.BAD_INPUT
