"""A newcomer becomes a member, whoever answers it and whichever connection breaks: real sockets, rings on paper."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elastic import position
from elastic.journal import Journal
from elastic.messages import Generation, Kind, Member, Order, Plan, Publish, Word
from elastic.position import Phase
from runtime.admission import Admission
from runtime.copy import CopyConnection
from runtime.donor import Donor
from runtime.hello import Hello
from runtime.listener import Listener
from runtime.newcomer import Asker
from runtime.orders import Orders
from runtime.partial import Json, Partial
from runtime.rings import Rings
from runtime.session import Op, OpKind
from runtime.standing import Standing
from runtime.state import Carrier
from runtime.values import Values
from tests.unit.rings import GENEROUS_S

JOB = "job"
TOKEN = "token"


class RingsOnPaper(Rings):
    """Every ring is up at once."""

    def build(self, generation: Generation, post: Callable[[position.Event], object]) -> None:
        post(position.RingBuilt(generation.number))


class Breaking(CopyConnection):
    """Breaks after a message that `breaks` holds for has come."""

    def __init__(self, sock: socket.socket, breaks: Callable[[dict[str, Json]], bool]) -> None:
        super().__init__(sock)
        self._breaks = breaks

    def receive(self, *args: object, **kwargs: object) -> tuple[dict[str, Json], list[torch.Tensor]]:
        header, blobs = super().receive()
        if self._breaks(header):
            self.abort()
        return header, blobs


class Worker:
    """The threads of one worker, without its ring and its agent."""

    def __init__(self, name: str, weight: float, journal: Journal) -> None:
        self.name = name
        self.breaks: Callable[[dict[str, Json]], bool] = lambda header: False
        self.words: list[Word] = []
        self.listener = Listener("127.0.0.1", job=JOB, me=name, token_of=lambda _: TOKEN, serve_copy=self._serve)
        self.standing = Standing(name, RingsOnPaper(self.listener, JOB, name, 1.0), self.words.append, journal)
        self.model = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(self.model.weight, weight)
        self.donor = Donor(self.standing)
        self.donor.carrier = Carrier(Values())
        self.donor.carrier.register(model=self.model)
        self.donor.carrier.freeze()
        self.asker = Asker(JOB, name)
        self.orders = Orders(self.standing, self.asker, self.words.append, journal)
        self.admission = Admission(self.standing, self.orders, self.asker, journal)

    def _serve(self, sock: socket.socket, hello: Hello) -> None:
        self.donor.serve(Breaking(sock, lambda header: self.breaks(header)), hello.worker_id)

    def member(self, seniority: int) -> Member:
        return Member(self.name, self.name, *self.listener.address, seniority)

    def hear(self, order: Order) -> None:
        self.orders.deliver(order)

    def begin(self, op: Op) -> None:
        self.standing.post(position.Begin(op.units, joinable=True))
        self.donor.open_window(op)

    def complete(self, carried: tuple[int, ...], result: Partial) -> None:
        """The ring's part: headers of all, then the result."""
        generation = self.standing.position.entered
        with self.standing.changed:
            self.standing.post(position.ReadHeader())
            self.standing.post(position.Obtained(generation, carried))
            self.standing.keep(result)
        self.donor.close_window()

    def await_position(self, holds: Callable[[position.Position], bool]) -> None:
        with self.standing.changed:
            assert self.standing.changed.wait_for(lambda: holds(self.standing.position), GENEROUS_S)


Make = Callable[..., Worker]
STEP = Op(OpKind.PASS, 1, epoch=0, step=0)
RESULT = Partial(0, 1, {"float32": torch.tensor([1.0, 2.0])})


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def new(name: str, weight: float = 0.0) -> Worker:
            journal = stack.enter_context(Journal(tmp_path / f"{name}.jsonl", JOB, name, name))
            worker = Worker(name, weight, journal)
            stack.callback(worker.listener.close)
            return worker

        yield new


def generation(number: int, kind: Kind, *workers: Worker) -> Generation:
    members = tuple(worker.member(rank) for rank, worker in enumerate(workers))
    return Generation(number, kind, 1, members, Plan(), "", token=TOKEN)


def joining(newcomer: Worker) -> tuple[threading.Thread, list[tuple[Op, Partial | None]]]:
    """Its user's thread, in the library after its rehearsal."""
    newcomer.standing.position = replace(newcomer.standing.position, phase=Phase.FRESH)
    carrier, joined = newcomer.donor.carrier, list[tuple[Op, Partial | None]]()
    assert carrier is not None
    thread = threading.Thread(target=lambda: joined.append(newcomer.admission.join(carrier)), daemon=True)
    thread.start()
    return thread, joined


def test_a_newcomer_whose_connection_breaks_while_its_generation_takes_effect_asks_again(make: Make) -> None:
    a, c = make("a", 7.0), make("c")
    broken = threading.Event()

    def first_question(header: dict[str, Json]) -> bool:
        """The copy is complete and its fate is not known yet."""
        first = header.get("want") == "outcome" and not broken.is_set()
        if first:
            broken.set()
        return first

    a.breaks = first_question
    thread, joined = joining(c)
    for order in (generation(1, Kind.FORM, a), generation(2, Kind.PLANNED, a, c)):
        a.hear(Publish(1, order))
        c.hear(Publish(1, order))
    a.begin(STEP)
    a.await_position(lambda p: p.holders == ("c",))
    assert broken.wait(GENEROUS_S)
    a.complete((2,), RESULT)
    thread.join(GENEROUS_S)
    assert joined and joined[0][1] is not None and c.standing.position.entered == 2
    assert torch.equal(joined[0][1].flats["float32"], RESULT.flats["float32"])
    assert c.model.weight.tolist() == [[7.0, 7.0]]


def test_a_newcomer_copies_from_the_donor_also_when_that_one_leaves_with_the_same_generation(make: Make) -> None:
    a, b, c = make("a", 7.0), make("b", 7.0), make("c")
    thread, joined = joining(c)
    for order in (generation(1, Kind.FORM, a, b), generation(2, Kind.PLANNED, b, c)):
        for worker in (a, b, c):
            worker.hear(Publish(1, order))
    for worker in (a, b):
        worker.begin(STEP)
    a.await_position(lambda p: p.holders == ("c",))
    for worker in (a, b):
        worker.complete((2, 2), RESULT)
    thread.join(GENEROUS_S)
    assert joined and c.standing.position.entered == 2


def test_a_newcomer_that_has_asked_learns_of_a_generation_that_was_planned_meanwhile(make: Make) -> None:
    a, c, d = make("a", 7.0), make("c"), make("d")
    asked = threading.Event()

    def see(header: dict[str, Json]) -> bool:
        if header.get("want") == "outcome":
            asked.set()
        return False

    a.breaks = see
    thread, joined = joining(c)
    for order in (generation(1, Kind.FORM, a), generation(2, Kind.PLANNED, a, c)):
        a.hear(Publish(1, order))
        c.hear(Publish(1, order))
    a.begin(STEP)
    assert asked.wait(GENEROUS_S)
    for worker in (a, c):
        worker.hear(Publish(1, generation(3, Kind.PLANNED, a, c, d)))
    a.complete((3,), RESULT)
    thread.join(GENEROUS_S)
    assert joined and c.standing.position.entered == 3


def test_a_copy_is_given_up_only_when_a_member_says_that_no_generation_took_effect(make: Make) -> None:
    a, c = make("a", 7.0), make("c")
    thread, joined = joining(c)
    for order in (generation(1, Kind.FORM, a), generation(2, Kind.PLANNED, a, c)):
        a.hear(Publish(1, order))
        c.hear(Publish(1, order))
    a.begin(STEP)
    a.await_position(lambda p: p.holders == ("c",))
    assert c.standing.position.copied == 0
    a.complete((0,), RESULT)
    a.begin(replace(STEP, step=1))
    a.await_position(lambda p: p.reduced == 1 and p.holders == ("c",))
    a.complete((2,), RESULT)
    thread.join(GENEROUS_S)
    assert joined and joined[0][0].step == 1
