"""What comes out at the other end of a bad cable."""

from __future__ import annotations

import random

from chaos_tests.cluster.lossy_link import SUMMED_FROM, Roughness

FRAME = bytes(12) + b"\x08\x00" + bytes(100)
ARP = bytes(12) + b"\x08\x06" + bytes(28)


def carried(how: Roughness, frame: bytes = FRAME, times: int = 1000) -> list[list[tuple[float, bytes]]]:
    dice = random.Random(1)
    return [how.fates(frame, dice) for _ in range(times)]


def test_a_good_cable_changes_nothing() -> None:
    assert carried(Roughness()) == [[(0.0, FRAME)]] * 1000


def test_frames_are_lost_and_doubled_in_their_shares() -> None:
    counts = [len(fates) for fates in carried(Roughness(lost=0.1, doubled=0.2))]
    assert 60 < counts.count(0) < 140
    assert 130 < counts.count(2) < 230
    assert sum(counts.count(number) for number in (0, 1, 2)) == 1000


def test_frames_are_late_by_no_more_and_no_less_than_was_said() -> None:
    late = [late_s for ((late_s, _),) in carried(Roughness(delay_s=0.05, jitter_s=0.02))]
    assert 0.03 <= min(late) < 0.035 and 0.065 < max(late) <= 0.07
    assert min(late_s for ((late_s, _),) in carried(Roughness(delay_s=0.01, jitter_s=0.02))) == 0.0


def test_damage_is_one_bit_that_a_checksum_covers() -> None:
    for ((_, frame),) in carried(Roughness(damaged=1.0)):
        assert sum((a ^ b).bit_count() for a, b in zip(frame, FRAME, strict=True)) == 1
        assert frame[:SUMMED_FROM] == FRAME[:SUMMED_FROM]


def test_what_has_no_checksum_is_not_damaged() -> None:
    assert carried(Roughness(damaged=1.0), ARP) == [[(0.0, ARP)]] * 1000
    assert carried(Roughness(damaged=1.0), FRAME[:SUMMED_FROM]) == [[(0.0, FRAME[:SUMMED_FROM])]] * 1000
