"""How an agent's workers are made to leave: what is said to the leader and to them, and who is ended when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from elastic.agent.agent import is_loss
from elastic.agent.drain import OPERATOR, SIGTERM, NodeDrain
from elastic.config import JobSpec
from elastic.errors import ExitCode
from elastic.preemption import relay
from elastic.preemption.notice import Notice, NoticeKind
from elastic.preemption.provider import NoticeSource
from elastic.protocol import worker_slot
from elastic.protocol.messages import Drain, DrainOver, DrainWish, Order, Word
from elastic.protocol.worker_slot import Slot
from elastic.records.journal import Journal
from elastic.wire import codec

PATIENCE_S = 30.0
SPEC = JobSpec(name="job", command=("train",), workers=2)


class Host:
    """The workers and the leader of an agent, on paper: two slots with members, orders and words kept."""

    term = 3
    has_others = True

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.said: list[Word] = []
        self.orders: list[Order] = []
        self.signals: list[str] = []
        self.socket = self
        for number in range(2):
            slot = worker_slot.Slot("a", number, SPEC, 0)
            for event in (worker_slot.Due(), worker_slot.Spawned(100 + number), worker_slot.WorkerJoined()):
                slot, _ = worker_slot.step(slot, event, 0.0)
            self.slots.append(worker_slot.step(slot, worker_slot.Served(), 0.0)[0])

    def tell(self, number: int, event: worker_slot.Event) -> None:
        self.slots[number], actions = worker_slot.step(self.slots[number], event, 0.0)
        self.signals += [self.slots[number].worker_id for action in actions if isinstance(action, worker_slot.Signal)]

    def for_all_slots(self, event: worker_slot.Event) -> None:
        for number in range(len(self.slots)):
            self.tell(number, event)

    def supervise_worker(self, worker_id: str, event: worker_slot.Event) -> None:
        self.tell([slot.worker_id for slot in self.slots].index(worker_id), event)

    def say(self, word: Word) -> None:
        self.said.append(word)

    def order(self, worker_id: str, order: Order) -> None:
        self.orders.append(codec.order_from_bytes(codec.order_to_wire(order).SerializeToString()))


@contextmanager
def drained(tmp_path: Path) -> Iterator[tuple[Host, NodeDrain]]:
    """An agent's workers and leader, and what makes them leave; on an event loop."""
    host = Host()
    with Journal(tmp_path / "journal.jsonl", "job", "agent-a", "a") as journal:
        departure = NodeDrain(journal, cast(Any, host), cast(Any, host))
        yield host, departure
        departure.close()


def notice(left_s: float) -> Notice:
    return Notice(NoticeKind.RECLAIM, left_s, "spot")


async def test_leader_and_workers_hear_it_and_a_later_leader_hears_it_with_what_is_left(tmp_path: Path) -> None:
    with drained(tmp_path) as (host, departure):
        departure.notices.heard("EC2", notice(100.0))
        wishes = [word for word in host.said if isinstance(word, DrainWish)]
        assert [(wish.worker_id, wish.because) for wish in wishes] == [("a.0.0", "spot"), ("a.1.0", "spot")]
        assert all(90_000 < wish.left_ms <= 100_000 for wish in wishes)
        assert [order for order in host.orders if isinstance(order, Drain) and order.term == 3] == host.orders
        assert [wish.worker_id for wish in departure.wishes()] == ["a.0.0", "a.1.0"]
        assert all(later.left_ms <= first.left_ms for later, first in zip(departure.wishes(), wishes, strict=True))


def told(host: Host, worker_id: str) -> list[tuple[str, str, str, bool]]:
    """What this worker was told, in order."""
    orders = [order for order in host.orders if isinstance(order, Drain) and order.worker_id == worker_id]
    return [(order.kind, order.said_by, order.because, order.over) for order in orders]


async def test_workers_are_told_who_says_why_and_which_of_several_notices_stands(tmp_path: Path) -> None:
    later = Notice(NoticeKind.MAINTENANCE, 200.0, "rack 7 is switched off", "file /run/a notice")
    with drained(tmp_path) as (host, departure):
        departure.notices.heard("node", later)
        departure.notices.heard("EC2", notice(100.0))
        departure.notices.heard("EC2", None)
        departure.notices.heard("node", None)
        first = ("maintenance", "file /run/a notice", "rack 7 is switched off", False)
        assert told(host, "a.0.0") == [first, ("reclaim", "EC2", "spot", False), first, (*first[:3], True)]
        assert told(host, "a.1.0") == told(host, "a.0.0")


async def test_a_signal_that_joins_a_notice_is_told_too(tmp_path: Path) -> None:
    """The script may have a handler for it."""
    with drained(tmp_path) as (host, departure):
        departure.notices.heard("EC2", notice(100.0))
        departure.asked(300.0, "it was asked to stop (SIGTERM)", SIGTERM)
        signalled = [order.signalled for order in host.orders if isinstance(order, Drain)]
        assert signalled == [False, False, True, True]


async def test_a_worker_that_comes_after_a_notice_was_taken_back_hears_nothing(tmp_path: Path) -> None:
    with drained(tmp_path) as (host, departure):
        departure.notices.heard("EC2", notice(100.0))
        departure.notices.heard("EC2", None)
        host.orders.clear()
        departure.announced("a.1.0")
        assert host.orders == []


async def test_a_notice_of_any_length_can_be_sent(tmp_path: Path) -> None:
    with drained(tmp_path) as (host, departure):
        departure.notices.heard("EC2", notice(1e300))
        for wish in departure.wishes():
            codec.word_to_wire(wish)
        assert len(host.orders) == 2


async def test_a_node_that_stays_wishes_nothing(tmp_path: Path) -> None:
    with drained(tmp_path) as (host, departure):
        departure.announced("a.0.0")
        assert (host.said, host.orders, list(departure.wishes()), departure.is_done) == ([], [], [], False)


async def test_a_worker_that_announces_itself_on_a_leaving_node_is_told(tmp_path: Path) -> None:
    with drained(tmp_path) as (host, departure):
        departure.notices.heard("EC2", notice(100.0))
        host.said.clear()
        departure.announced("a.1.0")
        assert [word.worker_id for word in host.said if isinstance(word, DrainWish)] == ["a.1.0"]


async def test_a_notice_that_is_taken_back_is_taken_back_for_each_worker(tmp_path: Path) -> None:
    with drained(tmp_path) as (host, departure):
        departure.notices.heard("EC2", notice(100.0))
        host.said.clear()
        departure.notices.heard("EC2", None)
        assert host.said == [DrainOver("a.0.0"), DrainOver("a.1.0")]
        assert not any(slot.node_leaves for slot in host.slots)


@pytest.mark.parametrize(("others", "ended"), [(True, ["a.0.0", "a.1.0"]), (False, [])])
async def test_members_are_ended_only_if_others_go_on(tmp_path: Path, others: bool, ended: list[str]) -> None:
    with drained(tmp_path) as (host, departure):
        host.has_others = others
        departure.notices.heard("EC2", notice(0.0))
        await asyncio.sleep(0.01)
    assert sorted(set(host.signals)) == ended


async def test_the_node_is_done_when_its_last_worker_has_gone(tmp_path: Path) -> None:
    with drained(tmp_path) as (host, departure):
        departure.asked(100.0, "maintenance")
        for number in range(2):
            assert not departure.is_done
            host.tell(number, worker_slot.WorkerReleased())
            host.tell(number, worker_slot.Exited(0))
        assert departure.is_done


class Provider(NoticeSource):
    name = "EC2"
    pause_s = 0.01

    def __init__(self) -> None:
        self.says: Notice | None = None
        self.told = threading.Semaphore(0)

    def look(self) -> Notice | None:
        return self.says

    def left(self) -> None:
        self.told.release()


async def hears(provider: Provider) -> bool:
    return await asyncio.to_thread(provider.told.acquire, timeout=PATIENCE_S)


async def test_whoever_says_that_an_empty_node_has_to_go_hears_that_it_is_empty(tmp_path: Path) -> None:
    with drained(tmp_path) as (host, departure):
        host.slots.clear()
        departure.asked(600.0, "maintenance")
        provider = Provider()
        departure.notices.watch([provider])
        provider.says = notice(900.0)
        assert await hears(provider)
        provider.says = notice(30.0)
        assert await hears(provider), "sooner, it is another one"


async def test_an_agent_that_has_left_says_so_of_each_later_notice_of_its_node(tmp_path: Path) -> None:
    """The daemon asks whether the node is left because of all that stands."""
    with drained(tmp_path) as (host, departure):
        host.slots.clear()
        departure.notices.watch([relay.NoticeRelay(tmp_path)])
        standing = {"EC2": relay.standing("EC2", notice(60.0))}
        for number, source in ((7, "EC2"), (8, "Azure")):
            standing[source] = relay.standing(source, notice(60.0 * number))
            relay.write(tmp_path, number, standing)
            async with asyncio.timeout(PATIENCE_S):
                while not relay.has_left(tmp_path, number):
                    await asyncio.sleep(0.01)


async def test_a_node_leaves_from_the_first_notice_until_the_last_one_is_taken_back(tmp_path: Path) -> None:
    """A worker that ends meanwhile is no loss of the node."""
    with drained(tmp_path) as (_, departure):
        assert not departure.is_leaving
        departure.asked(100.0, "maintenance", source=SIGTERM)
        departure.asked(100.0, "maintenance")
        departure.notices.heard(SIGTERM, None)
        assert departure.is_leaving
        departure.notices.heard(OPERATOR, None)
        assert not departure.is_leaving


def test_a_newcomer_that_came_too_late_is_no_loss_for_which_its_node_is_left() -> None:
    assert not is_loss(ExitCode.FENCED, served=False)
    assert is_loss(ExitCode.FENCED, served=True) and is_loss(-9, served=False) and is_loss(1, served=True)
    assert not any(is_loss(status, served=True) for status in (ExitCode.DONE, ExitCode.DRAINED))
