"""Liveness by table: what was seen, and what the detector makes of it at default timing."""

from __future__ import annotations

import pytest

from elastic.config import Timing
from elastic.protocol.failure_detector import Detector, Facts, Health

TIMING = Timing()
STEP_S = 0.125


def run_silence(seconds: float, state: str, ticks_per_s: float) -> tuple[Health, str]:
    """One worker beats at 0 and never again; the agent looks and judges eight times a second."""
    detector = Detector(TIMING, 0.0)
    detector.watch("w", 0.0)
    now_s = 0.0
    verdict = detector.judge(now_s)["w"]
    while now_s < seconds:
        now_s += STEP_S
        for name in detector.suspects(now_s):
            detector.look(name, Facts(state, int(now_s * ticks_per_s)), now_s)
        verdict = detector.judge(now_s)["w"]
    return verdict.health, verdict.because


@pytest.mark.parametrize(
    ("silent_s", "state", "ticks_per_s", "health", "because"),
    [
        (0.0, "S", 0, Health.ALIVE, "beats arrive"),
        (0.875, "S", 0, Health.ALIVE, "beats arrive"),
        (0.625, "T", 0, Health.ALIVE, "beats arrive"),
        (0.75, "T", 0, Health.FROZEN, "no beat for 0.8 s, stopped by a signal (state T)"),
        (0.75, "S", 0, Health.ALIVE, "beats arrive"),
        (1.0, "S", 0, Health.SUSPECT, "no beat for 1.0 s"),
        (2.375, "S", 0, Health.SUSPECT, "no beat for 2.4 s"),
        (2.5, "t", 0, Health.FROZEN, "stopped by a signal (state t)"),
        (2.5, "S", 0, Health.FROZEN, "no CPU used"),
        (2.5, "D", 0, Health.FROZEN, "no CPU used"),
        (2.5, "R", 100, Health.SUSPECT, "but it uses CPU"),
        (2.5, "S", 5, Health.SUSPECT, "but it uses CPU"),
        (2.375, "T", 100, Health.SUSPECT, "no beat for 2.4 s"),
        (29.875, "R", 100, Health.SUSPECT, "but it uses CPU"),
        (30.0, "R", 100, Health.FROZEN, "over progress_s"),
    ],
)
def test_silence_is_judged_by_its_length_and_by_what_proc_shows(
    silent_s: float, state: str, ticks_per_s: float, health: Health, because: str
) -> None:
    found, reason = run_silence(silent_s, state, ticks_per_s)
    assert found is health
    assert because in reason


def test_a_beat_clears_a_suspicion_and_what_proc_had_shown() -> None:
    detector = Detector(TIMING, 0.0)
    detector.watch("w", 0.0)
    for now_s in (0.9, 1.8):
        detector.judge(now_s)
    detector.look("w", Facts("T", 7), 2.3)
    assert detector.judge(2.4)["w"].health is Health.SUSPECT, "one look says nothing: the next one is at another moment"
    detector.beat("w", 2.45)
    for now_s in (3.0, 3.9, 4.4, 4.94):
        assert detector.judge(now_s)["w"].health is not Health.FROZEN
    assert detector.judge(5.0)["w"].because.endswith("no CPU used meanwhile")


def test_cpu_used_before_the_suspicion_does_not_excuse_a_freeze() -> None:
    """A worker computes for a moment after its last beat and is then frozen by a cgroup: state S, no CPU."""
    detector = Detector(TIMING, 0.0)
    detector.watch("w", 0.0)
    detector.look("w", Facts("S", 20), 0.6)
    detector.judge(0.9)
    for now_s in (1.5, 2.0, 2.5):
        detector.look("w", Facts("S", 40), now_s)
        verdict = detector.judge(now_s)["w"]
    assert verdict.health is Health.FROZEN


def test_a_watcher_that_slept_starts_all_timers_anew() -> None:
    detector = Detector(TIMING, 0.0)
    detector.watch("w", 0.0)
    detector.watch("v", 0.0)
    assert {v.health for v in detector.judge(60.0).values()} == {Health.ALIVE}
    detector.beat("v", 60.5)
    for now_s in (60.9, 61.8, 62.5):
        verdicts = detector.judge(now_s)
    assert verdicts["w"].health is Health.FROZEN
    assert verdicts["v"].health is Health.SUSPECT


def test_one_that_was_stopped_for_a_moment_is_not_frozen() -> None:
    """As by a debugger that looks at it, twice: between the two it ran."""
    detector = Detector(TIMING, 0.0)
    detector.watch("w", 0.0)
    for now_s, state in ((0.5, "t"), (0.75, "S"), (0.9, "t")):
        detector.look("w", Facts(state, 0), now_s)
        assert detector.judge(now_s)["w"].health is Health.ALIVE


def test_one_that_has_long_to_speak_is_looked_at_as_soon_as_it_is_suspect() -> None:
    """Its CPU time counts from then on, however long it may be silent."""
    patient = Timing(evict_s=20.0, control_silence_s=60.0, progress_s=30.0, fence_grace_s=30.0)
    detector = Detector(patient, 0.0)
    detector.watch("w", 0.0)
    assert patient.stopped_s == 6.0
    assert detector.suspects(0.9) == () and detector.suspects(1.0) == ("w",)


def test_only_watched_processes_are_judged() -> None:
    detector = Detector(TIMING, 0.0)
    detector.beat("stranger", 0.1)
    detector.look("stranger", Facts("T", 0), 0.1)
    detector.watch("w", 0.1)
    detector.forget("w")
    assert detector.judge(0.5) == {}
