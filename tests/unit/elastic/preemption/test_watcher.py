"""Looking at a source from a thread: every change once, trouble once, and nothing that waits for a slow provider."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic.errors import ConfigError
from elastic.preemption import slurm, watcher
from elastic.preemption.notice import Notice, NoticeKind
from elastic.preemption.provider import NoticeSource, Unanswered
from elastic.preemption.selection import check, guess, maker, sources
from elastic.preemption.slurm import Slurm
from elastic.preemption.watcher import NoticeWatcher

PATIENCE_S = 30.0


class Scripted(NoticeSource):
    """Answers with what it is given; a callable is called."""

    name = "scripted"
    pause_s = 0.001
    signals = (signal.SIGUSR1,)

    def __init__(self) -> None:
        self.now: Notice | Callable[[], Notice | None] | None = None
        self.looks = 0
        self.heard: list[str] = []

    def look(self) -> Notice | None:
        self.looks += 1
        return self.now() if callable(self.now) else self.now

    def signalled(self) -> None:
        self.heard.append("signal")

    def left(self) -> None:
        self.heard.append("left")


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "FIRST_RETRY_S", 0.001)
    monkeypatch.setattr(watcher, "LONGEST_RETRY_S", 0.004)


class Watched:
    def __init__(self) -> None:
        self.source = Scripted()
        self.said: queue.Queue[object] = queue.Queue()
        self.watcher = NoticeWatcher(
            self.source, lambda name, notice: self.said.put(notice), lambda name, because: self.said.put(because)
        )

    def next(self) -> object:
        return self.said.get(timeout=PATIENCE_S)

    def looked_again(self, times: int = 3) -> None:
        until = self.source.looks + times
        self.until(lambda: self.source.looks >= until)

    def until(self, true: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not true():
            assert time.monotonic() < deadline_s
            time.sleep(0.001)


@pytest.fixture
def watched() -> Iterator[Watched]:
    one = Watched()
    yield one
    one.watcher.close()
    one.watcher.join(PATIENCE_S)


def reclaim(left_s: float, because: str = "so") -> Notice:
    return Notice(NoticeKind.RECLAIM, left_s, because)


def unanswered() -> Notice | None:
    raise Unanswered("no answer")


def test_a_notice_is_heard_once_however_often_it_is_seen_and_once_when_it_is_gone(watched: Watched) -> None:
    watched.source.now = reclaim(100)
    assert watched.next() == reclaim(100)
    watched.looked_again()
    watched.source.now = None
    assert watched.next() is None
    watched.looked_again()
    assert watched.said.empty()


def test_an_earlier_end_is_news_and_a_later_one_is_not(watched: Watched) -> None:
    watched.source.now = reclaim(100)
    watched.next()
    watched.source.now = reclaim(200)
    watched.looked_again()
    watched.source.now = reclaim(50)
    assert watched.next() == reclaim(50)
    watched.source.now = reclaim(60, "another")
    assert watched.next() == reclaim(60, "another")


def test_trouble_is_said_once_until_the_source_has_answered_again_and_a_notice_stands_meanwhile(
    watched: Watched,
) -> None:
    watched.source.now = reclaim(100)
    watched.next()
    watched.source.now = unanswered
    assert watched.next() == "no answer"
    watched.looked_again()
    watched.source.now = reclaim(100)
    watched.looked_again()
    assert watched.said.empty()
    watched.source.now = unanswered
    assert watched.next() == "no answer"


def test_a_source_that_fails_at_an_answer_is_asked_again(watched: Watched) -> None:
    def fail() -> Notice | None:
        raise RecursionError("too deep")

    watched.source.now = fail
    assert watched.next() == "RecursionError: too deep"
    watched.looked_again()
    watched.source.now = reclaim(100)
    assert watched.next() == reclaim(100)


def test_a_signal_and_the_end_of_the_node_reach_a_source_that_sleeps(watched: Watched) -> None:
    watched.looked_again()
    watched.source.pause_s = PATIENCE_S
    watched.watcher.signalled()
    watched.watcher.left()
    deadline_s = time.monotonic() + PATIENCE_S / 2
    while sorted(watched.source.heard) != ["left", "signal"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_the_last_word_waits_for_no_other_look(watched: Watched) -> None:
    """Slurm may answer in seconds, and the process ends behind it."""
    watched.source.now = reclaim(100)
    watched.next()
    watched.source.pause_s = PATIENCE_S
    watched.looked_again(1)  # it sleeps behind this one
    watched.source.now = unanswered
    watched.watcher.left()
    watched.watcher.close()
    watched.watcher.join()
    assert watched.source.heard == ["left"]


def test_a_last_word_that_fails_is_said_also_behind_the_end(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, closed = threading.Event(), threading.Event()

    def left() -> None:
        reached.set()
        closed.wait(PATIENCE_S)
        raise Unanswered("requeue was refused")

    monkeypatch.setattr(watched.source, "left", left)
    watched.watcher.left()
    assert reached.wait(PATIENCE_S)
    watched.watcher.close()
    closed.set()
    watched.watcher.join()
    assert watched.said.get_nowait() == "requeue was refused"


def test_the_end_waits_as_long_as_slurm_may_take() -> None:
    requeues, stays = Slurm({}, requeue=True), Slurm({}, requeue=False)
    assert requeues.last_word_s > slurm.ASK_TIMEOUT_S + slurm.REQUEUE_TIMEOUT_S > stays.last_word_s


def test_a_question_that_hangs_holds_up_nobody(watched: Watched) -> None:
    released, reached = threading.Event(), threading.Event()

    def hang() -> Notice | None:
        reached.set()
        released.wait(PATIENCE_S)
        return reclaim(1)

    watched.source.now = hang
    assert reached.wait(PATIENCE_S)
    watched.watcher.close()
    assert not released.is_set()
    released.set()
    watched.watcher.join(PATIENCE_S)
    assert watched.said.empty(), "a closed watcher says nothing"


# ------------------------------------------------------------------------------------------------------- choosing


@pytest.mark.parametrize("choice", ["auto", "aws", "gcp", "azure", "slurm", "slurm:requeue", "file:/run/n", "none"])
def test_a_choice_that_is_known(choice: str) -> None:
    assert check(choice) == choice


@pytest.mark.parametrize(
    ("choice", "because"), [("ibm", "auto, aws"), ("file:here", "absolute"), ("AWS", "none of"), ("", "none of")]
)
def test_a_choice_that_is_not(choice: str, because: str) -> None:
    with pytest.raises(ConfigError, match=because):
        check(choice)


def names(choice: str, environment: dict[str, str], vendor: Path) -> list[str]:
    return [source.name for source in sources(choice, environment, vendor)]


def test_what_is_watched_of_each_choice(tmp_path: Path) -> None:
    no = tmp_path / "none"
    assert names("none", {}, no) == names("auto", {}, no) == []
    assert names("aws", {}, no) == ["EC2"]
    assert names("gcp", {}, no) == ["Compute Engine preempted", "Compute Engine maintenance-event"]
    assert names("azure", {}, no) == ["Azure Scheduled Events"]
    assert names("slurm", {}, no) == names("slurm:requeue", {}, no) == ["Slurm"]
    assert names("file:/run/n", {}, no) == ["file /run/n"]


@pytest.mark.parametrize(
    ("made_by", "environment", "expected"),
    [
        ("Amazon EC2", {}, ["aws"]),
        ("Google", {}, ["gcp"]),
        ("Microsoft Corporation", {}, ["azure"]),
        ("QEMU", {}, []),
        ("", {}, []),
        ("Amazon EC2", {"AWS_EC2_METADATA_DISABLED": "true"}, []),
        ("Google", {"NO_GCE_CHECK": "True"}, []),
        ("QEMU", {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1"}, ["aws"]),
        ("QEMU", {"GCE_METADATA_HOST": "127.0.0.1:1"}, ["gcp"]),
        ("Amazon EC2", {"AZURE_POD_IDENTITY_AUTHORITY_HOST": "http://127.0.0.1:1"}, ["azure"]),
        ("Amazon EC2", {"SLURM_JOB_ID": "7"}, ["slurm", "aws"]),
    ],
)
def test_auto_goes_by_the_environment_and_the_firmware(
    made_by: str, environment: dict[str, str], expected: list[str]
) -> None:
    assert guess(environment, made_by) == expected


def test_the_maker_is_read_where_there_is_one(tmp_path: Path) -> None:
    vendor = tmp_path / "sys_vendor"
    assert maker(vendor) == ""
    vendor.write_text("Google\n")
    assert names("auto", {}, vendor) == ["Compute Engine preempted", "Compute Engine maintenance-event"]
