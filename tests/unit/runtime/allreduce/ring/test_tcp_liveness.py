"""When the host of a peer counts as out of reach: pure, from what kernels count, and the questions on real sockets."""

from __future__ import annotations

import errno
import socket
import time

import pytest

from runtime.allreduce.ring import tcp_liveness
from runtime.allreduce.ring.tcp_liveness import (
    KERNEL_CHECK_S,
    SILENT_S,
    STUCK_S,
    Counters,
    CountersSeen,
    Judge,
    PeerWatch,
)

HOST, OTHER = "10.0.0.2", "10.0.0.3"


def seen(
    answered_s: float, repeats: int = 2, peer: str = "w1", host: str = HOST, *, waited: bool = True, probes: int = 0
) -> CountersSeen:
    return CountersSeen(peer, host, waited, Counters(repeats, probes, round(1000 * answered_s)))


def verdicts(*looks: list[CountersSeen], answers: tuple[int, ...] = ()) -> list[str]:
    """What each look says; answers: before which of them the host answers a question."""
    judge, said = Judge(0.0), []
    for number, connections in enumerate(looks):
        now_s = 100.0 + number * KERNEL_CHECK_S
        if number in answers:
            judge.answered(HOST, now_s)
        said.append(judge.look(connections, now_s))
    return said


def falling_silent(looks: int, repeats: int = 2, probes: int = 0) -> list[list[CountersSeen]]:
    return [[seen(number * KERNEL_CHECK_S, repeats, probes=probes)] for number in range(looks)]


def test_a_host_that_answers_nothing_for_long_is_lost_at_the_second_look_that_says_so() -> None:
    assert verdicts(*falling_silent(6)) == ["", "", "", "", "w1", "w1"]
    assert verdicts(*falling_silent(6, repeats=0, probes=2)) == ["", "", "", "", "w1", "w1"]


@pytest.mark.parametrize("fields", [{"repeats": 0}, {"repeats": 1}, {"repeats": 0, "probes": 1}])
def test_what_was_not_sent_again_and_again_is_no_proof(fields: dict[str, int]) -> None:
    assert set(verdicts(*falling_silent(9, **fields))) == {""}


def test_one_for_whom_nobody_waits_and_one_of_this_host_are_never_lost() -> None:
    assert set(verdicts(*[[seen(9.0 + n, waited=False), seen(9.0 + n, peer="w2", host="")] for n in range(5)])) == {""}


def test_what_one_connection_acknowledges_speaks_for_all_to_that_host_and_for_no_other() -> None:
    lively = [[seen(4.0 + number), seen(0.1, peer="w2", repeats=0, waited=False)] for number in range(20)]
    assert set(verdicts(*lively)) == {""}
    elsewhere = [[seen(4.0 + number), seen(0.1, peer="w2", host=OTHER)] for number in range(3)]
    assert verdicts(*elsewhere) == ["", "w1", "w1"]


def test_an_answer_to_a_question_counts_as_much_as_one_to_data() -> None:
    looks = falling_silent(12)
    assert verdicts(*looks, answers=(3, 5, 7))[:10] == [""] * 10
    assert verdicts(*looks, answers=(3, 5, 7))[-1] == "w1", "three seconds after the last one, and a look"


def test_a_connection_on_which_nothing_moves_is_given_up_though_its_host_answers() -> None:
    judge = Judge(0.0)
    for number in range(3):
        judge.answered(HOST, 100.0 + number)
        said = judge.look([seen(STUCK_S - 1 + number)], 100.0 + number)
    assert said == "w1"


def test_a_host_is_asked_when_something_was_sent_again_and_nothing_has_come_back_for_a_moment() -> None:
    judge = Judge(0.0)
    for answered_s, repeats, asked in ((0.1, 3, set()), (1.0, 1, {HOST}), (1.0, 0, set())):
        connections = [seen(answered_s, repeats)]
        judge = Judge(0.0)
        judge.look(connections, 100.0)
        assert judge.to_ask(connections, 100.0) == asked
    connections = [seen(2.0, waited=False), seen(2.0, peer="w2", host="")]
    judge.look(connections, 100.0)
    assert judge.to_ask(connections, 100.0) == set()


def test_what_is_known_of_a_link_is_told_with_its_rate() -> None:
    judge, now_s = Judge(90.0), 100.0
    judge.look([CountersSeen("w1", HOST, True, Counters(0, 0, 0, 1_000_000))], 91.0)
    told = judge.told(CountersSeen("w1", HOST, True, Counters(3, 0, 4200, 3_500_000)), now_s)
    assert told == f"{HOST} has acknowledged nothing for 4.2 s; 2.5 MB in 10.0 s, 2.00 Mbit/s"


class Repeating:
    """A connection that has sent something again for long."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.peer, self.address = "w1", address

    def counters(self) -> Counters:
        return Counters(5, 0, round(1000 * SILENT_S) + 1)


@pytest.mark.parametrize("listens", [True, False])
def test_a_host_whose_kernel_accepts_or_refuses_connections_can_be_reached(
    listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_liveness, "KERNEL_CHECK_S", 0.0)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as door:
        link = Repeating(door.getsockname())
        if not listens:
            door.close()
        with PeerWatch({"w1": link}) as lookout:
            said = [lookout.lost([link])[0] for _ in range(20)]
            assert lookout._judge.silent_s("127.0.0.1", time.monotonic()) < SILENT_S
    assert said == [""] * 20
    assert all(sock.fileno() == -1 for _, sock in lookout._asked), "no descriptor is left"


def test_a_host_to_which_there_is_no_way_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_liveness, "KERNEL_CHECK_S", 0.0)
    monkeypatch.setattr(socket.socket, "connect_ex", lambda sock, address: errno.ENETUNREACH)
    link = Repeating(("127.0.0.1", 9))
    with PeerWatch({"w1": link}) as lookout:
        said = [lookout.lost([link]) for _ in range(3)]
    assert said[0] == ("", "") and said[1][0] == "w1" and "127.0.0.1 has acknowledged nothing for 3.0 s" in said[1][1]
