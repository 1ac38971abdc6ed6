"""Each provider of notices, asked over HTTP as in its cloud: what it says, and what its troubles are."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from chaos_tests.cluster.cloud_metadata import AzureHost, Ec2, Gce, MetadataService, Reply
from elastic.preemption import aws, azure, gcp, relay
from elastic.preemption.aws import Aws
from elastic.preemption.azure import Azure
from elastic.preemption.file import File, notice_in
from elastic.preemption.gcp import Gcp
from elastic.preemption.notice import Notice, NoticeKind
from elastic.preemption.provider import NoticeSource, Unanswered
from elastic.preemption.slurm import Slurm, left_at_first, seconds_of

ACTION = "spot/instance-action"
REBALANCE = "events/recommendations/rebalance"
NOW = datetime(2026, 1, 31, 8, 20, 30, tzinfo=UTC)


@pytest.fixture
def ec2() -> Iterator[Ec2]:
    with Ec2() as service:
        service.now = lambda: NOW
        yield service


@pytest.fixture
def gce() -> Iterator[Gce]:
    with Gce() as service:
        yield service


@pytest.fixture
def host() -> Iterator[AzureHost]:
    with AzureHost() as service:
        service.now = lambda: NOW
        yield service


def of_ec2(service: MetadataService) -> Aws:
    return Aws({aws.ENDPOINT: f"http://{service.address}"})


def of_gce(service: MetadataService, key: str = gcp.PREEMPTED) -> Gcp:
    return Gcp({gcp.HOST: service.address}, key)


def of_azure(service: MetadataService) -> Azure:
    return Azure({azure.HOST: f"http://{service.address}"})


@pytest.mark.parametrize(("cloud", "made"), [(Ec2, Aws), (Gce, lambda it: Gcp(it, gcp.PREEMPTED)), (AzureHost, Azure)])
def test_a_machine_is_reclaimed_and_given_back(
    cloud: type[MetadataService], made: Callable[[Mapping[str, str]], NoticeSource]
) -> None:
    with cloud() as service:
        source = made(service.environment)
        assert source.look() is None
        service.reclaim(20.0)
        notice = source.look()
        assert notice and notice.kind is NoticeKind.RECLAIM and 10 <= notice.seconds_left <= 30
        service.withdraw()
        assert source.look() is None


# ---------------------------------------------------------------------------------------------------------- EC2


def test_ec2_says_nothing_until_there_is_an_action_and_one_token_serves_all_questions(ec2: Ec2) -> None:
    source = of_ec2(ec2)
    assert [source.look(), source.look()] == [None, None]
    assert [request.method for request in ec2.asked].count("PUT") == 1


def test_ec2_counts_the_time_left_by_the_services_own_clock(ec2: Ec2) -> None:
    ec2.documents[ACTION] = '{"action": "terminate", "time": "2026-01-31T08:22:00Z"}'
    because = "EC2 will terminate this spot instance at 2026-01-31T08:22:00Z"
    assert of_ec2(ec2).look() == Notice(NoticeKind.RECLAIM, 90.0, because)


def test_an_action_of_ec2_that_nobody_has_heard_of_ends_the_instance_too(ec2: Ec2) -> None:
    ec2.documents[ACTION] = '{"action": "melt", "time": "2026-01-31T08:22:00Z"}'
    notice = of_ec2(ec2).look()
    assert notice and (notice.kind, notice.seconds_left) == (NoticeKind.RECLAIM, 90.0)


def test_ec2_hibernates_at_once(ec2: Ec2) -> None:
    ec2.documents[ACTION] = '{"action": "hibernate", "time": "2026-01-31T08:22:00Z"}'
    notice = of_ec2(ec2).look()
    assert notice and notice.seconds_left == 0


def test_an_ec2_recommendation_is_advice_and_an_action_comes_before_it(ec2: Ec2) -> None:
    ec2.documents[REBALANCE] = '{"noticeTime": "2026-01-31T08:19:00Z"}'
    source = of_ec2(ec2)
    advice = source.look()
    assert advice and not advice.leaves and advice.seconds_left == math.inf
    ec2.documents[ACTION] = '{"action": "stop", "time": "2026-01-31T08:22:00Z"}'
    notice = source.look()
    assert notice and notice.leaves


def test_an_expired_ec2_token_is_replaced_without_a_word(ec2: Ec2) -> None:
    source = of_ec2(ec2)
    source.look()
    ec2.token += 1
    assert source.look() is None
    assert [request.method for request in ec2.asked].count("PUT") == 2


def test_an_ec2_token_that_is_never_taken_is_trouble_and_not_a_loop(ec2: Ec2) -> None:
    source = of_ec2(ec2)
    ec2.answer = lambda request: Reply(200, "t") if request.method == "PUT" else Reply(401)  # type: ignore[method-assign]
    with pytest.raises(Unanswered, match="401"):
        source.look()
    assert len(ec2.asked) == 2


def test_a_wrong_clock_cannot_give_more_time_than_the_two_minutes_of_ec2() -> None:
    document = {"action": "stop", "time": "2026-01-31T08:22:00Z"}
    now = datetime(2026, 1, 31, tzinfo=UTC)
    assert aws.interruption(document, now).seconds_left == aws.WARNING_S
    assert aws.interruption(document, now + timedelta(days=1)).seconds_left == 0


# ---------------------------------------------------------------------------------------------- Compute Engine


def test_compute_engine_is_asked_once_and_then_waited_for_until_the_value_changes(gce: Gce) -> None:
    source = of_gce(gce)
    assert source.look() is None
    gce.set("preempted", "TRUE")
    notice = source.look()
    assert notice == Notice(NoticeKind.RECLAIM, 30.0, "Compute Engine preempts this machine")
    first, second = gce.asked
    assert (first.query, second.query["wait_for_change"]) == ({}, "true")


def test_compute_engine_moves_a_machine_or_stops_it(gce: Gce) -> None:
    source = of_gce(gce, gcp.MAINTENANCE)
    assert source.look() is None
    gce.set("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE")
    moved = source.look()
    gce.set("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
    stopped = source.look()
    assert moved and stopped
    assert (moved.leaves, stopped.leaves, stopped.seconds_left) == (False, True, 60.0)
    gce.set("maintenance-event", "NONE")
    assert source.look() is None


def test_who_answers_without_googles_header_is_not_the_metadata_server(gce: Gce) -> None:
    gce.trouble = Reply(200, "TRUE")
    with pytest.raises(Unanswered, match="no value of a Compute Engine metadata server"):
        of_gce(gce).look()


# -------------------------------------------------------------------------------------------------------- Azure


def test_azure_events_of_other_machines_are_theirs(host: AzureHost) -> None:
    host.schedule("1", "Preempt", "Sat, 31 Jan 2026 08:21:00 GMT", "train_4")
    assert of_azure(host).look() is None


@pytest.mark.parametrize(
    ("kind", "not_before", "expected"),
    [
        ("Preempt", "Sat, 31 Jan 2026 08:20:55 GMT", (NoticeKind.RECLAIM, 25.0)),
        ("Reboot", "Sat, 31 Jan 2026 08:30:30 GMT", (NoticeKind.MAINTENANCE, 600.0)),
        ("Redeploy", "Sat, 31 Jan 2026 08:19:00 GMT", (NoticeKind.MAINTENANCE, 0.0)),
        ("Terminate", "", (NoticeKind.MAINTENANCE, 0.0)),
        ("Freeze", "Sat, 31 Jan 2026 08:21:00 GMT", (NoticeKind.ADVICE, math.inf)),
        ("Repaint", "", (NoticeKind.ADVICE, math.inf)),
    ],
)
def test_azure_event_types(host: AzureHost, kind: str, not_before: str, expected: tuple[NoticeKind, float]) -> None:
    host.schedule("1", kind, not_before, "train_3")
    notice = of_azure(host).look()
    assert notice and (notice.kind, notice.seconds_left) == expected


def test_the_azure_event_that_comes_first_counts_and_a_pause_counts_last(host: AzureHost) -> None:
    host.schedule("new", "Repaint", "Sat, 31 Jan 2026 08:20:31 GMT", "train_3")
    host.schedule("freeze", "Freeze", "Sat, 31 Jan 2026 08:20:31 GMT", "train_3")
    host.schedule("late", "Reboot", "Sat, 31 Jan 2026 08:25:00 GMT", "train_3")
    host.schedule("soon", "Preempt", "Sat, 31 Jan 2026 08:20:50 GMT", "train_4", "train_3")
    notice = of_azure(host).look()
    assert notice and "soon" in notice.because


def test_azure_may_begin_when_the_node_has_left(host: AzureHost) -> None:
    host.schedule("mine", "Reboot", "Sat, 31 Jan 2026 08:30:30 GMT", "train_3")
    host.schedule("pause", "Freeze", "Sat, 31 Jan 2026 08:30:30 GMT", "train_3")
    host.schedule("other", "Reboot", "Sat, 31 Jan 2026 08:30:30 GMT", "train_9")
    source = of_azure(host)
    source.look()
    source.left()
    assert [event["EventStatus"] for event in host.events] == ["Started", "Scheduled", "Scheduled"]


def test_nothing_is_approved_while_nothing_is_scheduled(host: AzureHost) -> None:
    source = of_azure(host)
    source.look()
    source.left()
    assert all(request.method == "GET" for request in host.asked)


def test_a_completed_azure_event_is_gone(host: AzureHost) -> None:
    host.schedule("1", "Reboot", "Sat, 31 Jan 2026 08:30:30 GMT", "train_3")
    source = of_azure(host)
    assert source.look()
    host.events.clear()
    assert source.look() is None


# ------------------------------------------------------------------------------------------------ every service


TROUBLES: list[Callable[[MetadataService], Reply | Callable[[], Reply]]] = [
    lambda service: Reply(429),
    lambda service: Reply(500),
    lambda service: Reply(503, "<html>try again</html>"),
    lambda service: Reply(200, "<html>a captive portal</html>", {"Metadata-Flavor": "Google"}),
    lambda service: Reply(200, '{"Events": [{}], "action": "melt", "time": 3}', {"Metadata-Flavor": "Google"}),
    lambda service: Reply(200, "x" * 100_000, {"Metadata-Flavor": "Google"}),
    lambda service: service.hang,
]


@pytest.mark.parametrize("trouble", TROUBLES, ids=["429", "500", "503", "garbage", "other JSON", "endless", "hangs"])
@pytest.mark.parametrize(("kind", "of"), [(Ec2, of_ec2), (Gce, of_gce), (AzureHost, of_azure)])
def test_a_service_in_trouble_is_said_to_be_and_works_again_afterwards(
    kind: type[MetadataService],
    of: Callable[[MetadataService], NoticeSource],
    trouble: Callable[[MetadataService], Reply | Callable[[], Reply]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(azure, "FIRST_TIMEOUT_S", 10.0)
    monkeypatch.setattr(gcp, "WAIT_S", 0)
    for module in (aws, gcp, azure):
        monkeypatch.setattr(module, "TIMEOUT_S", 10.0)
    with kind() as service:
        source = of(service)
        assert source.look() is None
        service.trouble = trouble(service)
        for module in (aws, gcp, azure):  # short only where no answer is waited for, as this machine may pause
            monkeypatch.setattr(module, "TIMEOUT_S", 0.1)
        with pytest.raises(Unanswered, match=service.address):
            source.look()
        service.trouble = None
        for module in (aws, gcp, azure):
            monkeypatch.setattr(module, "TIMEOUT_S", 10.0)
        assert source.look() is None


@pytest.mark.parametrize("of", [of_ec2, of_gce, of_azure])
def test_nobody_at_the_address_is_trouble_too(of: Callable[[MetadataService], NoticeSource]) -> None:
    with Ec2() as gone:
        source = of(gone)
    with pytest.raises(Unanswered, match="refused"):
        source.look()


# -------------------------------------------------------------------------------------------- Slurm and a file


@pytest.mark.parametrize(
    ("end", "left_s"), [("1100", 100.0), ("", 60.0), ("soon", 60.0), ("900", 60.0), ("90000", 60.0)]
)
def test_slurms_end_of_the_job_counts_where_it_fits_to_the_signal(end: str, left_s: float) -> None:
    assert left_at_first({"SLURM_JOB_END_TIME": end, "SLURM_JOB_ID": "77"}, 1000.0) == left_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("59", 59.0),
        ("1:30", 90.0),
        ("0:00", 0.0),
        ("2:00:01", 7201.0),
        ("3-04:00:00", 273600.0),
        ("UNLIMITED", math.inf),
        ("NOT_SET", None),
        ("INVALID", None),
        ("", None),
        ("1-30", None),
    ],
)
def test_the_time_that_is_left_as_squeue_says_it(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


def program(directory: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    """A program of Slurm, which is asked before any other one of that name."""
    command = directory / name
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    if str(directory) not in os.environ["PATH"].split(os.pathsep):
        monkeypatch.setenv("PATH", str(directory), prepend=os.pathsep)


def test_slurm_speaks_by_a_signal_and_takes_the_job_back_only_when_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, monkeypatch, "scontrol", f'echo "$@" >> {tmp_path}/said')
    program(tmp_path, monkeypatch, "squeue", "echo 'Invalid job id specified' >&2; exit 1")
    for requeue in (False, True):
        source = Slurm({"SLURM_JOB_ID": "77"}, requeue=requeue)
        assert source.look() is None
        source.left()
        assert not (tmp_path / "said").exists(), "nobody had to leave"
        source.signalled()
        notice = source.look()
        assert notice is not None and notice.kind is NoticeKind.TIME_LIMIT
        assert notice.because == "Slurm job 77 reaches its time limit"
        assert notice.seconds_left == pytest.approx(60.0, abs=1.0), "nobody says how much time is left"
        source.left()
    assert (tmp_path / "said").read_text() == "requeue 77\n"


def test_a_limit_that_is_raised_takes_the_notice_back_until_the_new_one_is_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, monkeypatch, "scontrol", f'echo "$@" >> {tmp_path}/said')
    program(tmp_path, monkeypatch, "squeue", f'echo "$@" > {tmp_path}/asked; cat {tmp_path}/left')
    source = Slurm({"SLURM_JOB_ID": "77"}, requeue=True)
    left = tmp_path / "left"
    left.write_text("9:00:00")
    assert source.look() is None
    assert source.pause_s > 600 and not (tmp_path / "asked").exists(), "before the signal nobody is asked"
    for text, seconds in (("2:00", 120.0), ("1:58", 118.0), ("1:02:00", None), ("2:10", None), ("2:04", 124.0)):
        if text == "2:00":
            source.signalled()
        left.write_text(text)
        notice = source.look()
        assert (notice and notice.seconds_left) == (pytest.approx(seconds, abs=1.0) if seconds else None), text
        if notice is None:
            source.left()
            assert not (tmp_path / "said").exists(), "the node stays"
    assert source.pause_s == 60.0
    assert (tmp_path / "asked").read_text() == "--noheader --jobs 77 --format %L\n"
    left.write_text("slurm_load_jobs error: Unable to contact slurm controller")
    assert source.look() is not None, "what was last heard stands"
    source.left()
    source.left()
    assert (tmp_path / "said").read_text() == "requeue 77\n", "once, although Slurm's signal is one more notice"


def test_a_refused_requeue_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, monkeypatch, "scontrol", "echo 'Requested operation is presently disabled' >&2; exit 1")
    program(tmp_path, monkeypatch, "squeue", "echo 1:00")
    source = Slurm({"SLURM_JOB_ID": "77"}, requeue=True)
    source.signalled()
    assert source.look() is not None
    with pytest.raises(Unanswered, match="scontrol requeue 77 ended with 1: Requested operation"):
        source.left()


@pytest.mark.parametrize(
    ("text", "left_s", "because", "source"),
    [
        ("", 120.0, "/n says so", ""),
        ("25\n", 25.0, "/n says so", ""),
        ('{"seconds_left": 9, "because": "rack 7"}', 9.0, "rack 7", ""),
        ('{"seconds_left": 9, "because": "rack 7", "source": "Ray"}', 9.0, "rack 7", "Ray"),
    ],
)
def test_three_forms_of_a_notice_file(text: str, left_s: float, because: str, source: str) -> None:
    assert notice_in(text, "/n") == Notice(NoticeKind.RECLAIM, left_s, because, source)


def test_what_a_daemon_passes_on_names_who_said_it(tmp_path: Path) -> None:
    heard = Notice(NoticeKind.MAINTENANCE, 60.0, "reboot")
    relay.write(tmp_path, 7, {"Azure": relay.standing("Azure", heard)})
    passed = relay.NoticeRelay(tmp_path).look()
    assert passed is not None and (passed.kind, passed.because, passed.source) == (heard.kind, "reboot", "Azure")


@pytest.mark.parametrize(
    "text",
    [
        "soon",
        "-1",
        "[3]",
        "true",
        '{"seconds_left": "3"}',
        '{"because": 3}',
        '{"source": 1}',
        "NaN",
        "1e300",
        "9" * 400,
    ],
)
def test_a_notice_file_with_something_else_in_it_is_trouble(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notice"
    source = File(path)
    assert source.look() is None
    path.write_text(text)
    with pytest.raises(Unanswered, match=str(path)):
        source.look()
    path.write_text(json.dumps({"seconds_left": 3}))
    notice = source.look()
    assert notice and notice.seconds_left == 3
    path.unlink()
    assert source.look() is None


def test_a_node_that_was_drained_is_not_left_after_a_loss_and_one_that_has_lost_a_worker_is(tmp_path: Path) -> None:
    agent = relay.NoticeRelay(tmp_path)
    assert not relay.left_after_loss(tmp_path), "its daemon has told nothing yet"
    relay.write(tmp_path, 7, {})
    assert agent.look() is None
    agent.left()
    assert not relay.left_after_loss(tmp_path), "an operator has drained it"
    relay.lose_worker(tmp_path, "a.0.0")
    assert not relay.left_after_loss(tmp_path), "the drain is over, and the others are still there"
    agent.left()
    assert relay.left_after_loss(tmp_path) and not relay.node_is_left(tmp_path)
    with pytest.raises(Unanswered, match=r"lost\.json"):
        relay.lose_worker(tmp_path / "none", "a.0.0")


def test_a_file_that_is_nested_too_deep_is_no_answer(tmp_path: Path) -> None:
    (tmp_path / relay.LEFT).write_text("[" * 200_000)
    with pytest.raises(Unanswered, match=r"left\.json"):
        relay.has_left(tmp_path, 1)
