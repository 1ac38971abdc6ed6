"""How often agents have to speak follows the size of their job; none is judged by an interval that it was not told."""

from __future__ import annotations

from elastic.config import Timing
from elastic.protocol.failure_detector import STEADY, AgentMonitor

OWN = Timing()
SOME, MANY = 3, 5000


def test_a_silent_agent_is_named_once_and_so_is_its_return() -> None:
    monitor = AgentMonitor(OWN, SOME, 0.0)
    for node in ("a", "b"):
        monitor.watch(node, 0.0)
    told: list[tuple[list[str], list[str]]] = []
    for now_s in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0):
        monitor.beat("a", now_s)
        if now_s >= 3.5:
            monitor.beat("b", now_s)
        silent, back = monitor.look(now_s)
        told.append((list(silent), back))
    nothing: tuple[list[str], list[str]] = ([], [])
    assert told == [*[nothing] * 4, (["b"], []), nothing, ([], ["b"]), nothing]


def test_thousands_speak_rarely_and_have_the_time_for_it() -> None:
    monitor = AgentMonitor(OWN, MANY, 0.0)
    assert monitor.beat_s == 20 * OWN.beat_s and monitor.silence_s == 10 * OWN.evict_s
    assert monitor.look_s == 10 * OWN.beat_s, "looked at more often than it speaks"
    monitor.watch("a", 0.0)
    for look in range(1, 10):
        assert monitor.look(look * monitor.look_s) == ({}, []), "well within its time"
    assert list(monitor.look(10 * monitor.look_s + 0.1)[0]) == ["a"]


def test_a_job_that_shrinks_gives_each_agent_the_time_to_hear_of_it() -> None:
    monitor = AgentMonitor(OWN, MANY, 0.0)
    for node in ("a", "b"):
        monitor.watch(node, 0.0)
    monitor.look(2.0)
    assert monitor.follow(SOME, 2.4) and monitor.beat_s == OWN.beat_s
    assert monitor.look(3.0) == ({}, []), "it was silent for longer than such a job allows, and for good reason"
    monitor.beat("a", 3.0)
    for now_s in (3.5, 4.0, 4.5):
        monitor.beat("a", now_s)
        assert monitor.look(now_s) == ({}, [])
    assert list(monitor.look(4.9)[0]) == ["b"]


def test_a_job_that_grows_is_given_longer() -> None:
    monitor = AgentMonitor(OWN, SOME, 0.0)
    monitor.watch("a", 0.0)
    assert monitor.follow(MANY, 0.5) and monitor.beat_s == 20 * OWN.beat_s
    assert all(monitor.look(now_s) == ({}, []) for now_s in (3.0, 6.0, 9.0))


def test_a_few_agents_more_or_less_change_nothing() -> None:
    monitor = AgentMonitor(OWN, MANY, 0.0)
    assert not monitor.follow(MANY, 1.0)
    assert not monitor.follow(int(MANY * STEADY) - 1, 1.0) and not monitor.follow(int(MANY / STEADY) + 1, 1.0)
    assert monitor.beat_s == 20 * OWN.beat_s
    assert monitor.follow(int(MANY * STEADY) + 1, 1.0)


def test_who_is_gone_is_not_silent() -> None:
    monitor = AgentMonitor(OWN, SOME, 0.0)
    monitor.watch("a", 0.0)
    monitor.forget("a")
    monitor.beat("a", 0.1)
    assert monitor.look(0.9) == monitor.look(1.8) == monitor.look(2.7) == ({}, [])
