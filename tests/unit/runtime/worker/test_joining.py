"""A newcomer becomes a member, whoever answers it and whichever connection breaks: real sockets, rings on paper."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from elastic.agent.worker.client import AgentClient
from elastic.errors import Disagree, JoinMissed, NoMemory
from elastic.protocol import worker_state
from elastic.protocol.loop_state import LoopKind, ScriptStage
from elastic.protocol.messages import (
    Generation,
    Invite,
    Kind,
    Member,
    Order,
    Plan,
    Publish,
    Quiesce,
    Ready,
    Report,
    Word,
)
from elastic.protocol.worker_state import Phase
from elastic.records.journal import Journal
from runtime.allreduce.reduction.partial_sum import Json, Partial
from runtime.allreduce.ring.handshake import Hello
from runtime.allreduce.ring.listener import Listener
from runtime.allreduce.ring.ring_set import Rings
from runtime.recovery.state.encoding import NamedTensor
from runtime.recovery.state.script_state import Values
from runtime.recovery.state.training_state import Carrier
from runtime.recovery.transfer.client import CopyClient, parse_results
from runtime.recovery.transfer.connection import CopyConnection, CopyFailed
from runtime.recovery.transfer.result_log import LoggedResult
from runtime.session import Copy, JoinMeta, Op, OpKind, ScriptLoop
from runtime.worker.donor import CopyServer
from runtime.worker.joining import JoinProtocol
from runtime.worker.leader_orders import LeaderOrders
from runtime.worker.state_owner import SharedWorkerState
from tests.unit.rings import GENEROUS_S, wait_until

JOB = "job"
TOKEN = "token"
STEP = Op(OpKind.PASS, 1, epoch=0, step=0)


class RingsOnPaper(Rings):
    """Every ring is up at once."""

    def build(self, generation: Generation, post: Callable[[worker_state.Event], object]) -> None:
        post(worker_state.RingBuilt(generation.number))


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


class SlowCarrier(Carrier):
    """Calls `before` before it becomes a copy."""

    def __init__(self, values: Values, before: Callable[[], object]) -> None:
        super().__init__(values)
        self._before = before

    def load(self, header: dict[str, Json], blobs: Sequence[torch.Tensor]) -> None:
        self._before()
        super().load(header, blobs)


class Worker:
    """The threads of one worker, without its ring and its agent."""

    def __init__(self, name: str, weight: float, journal: Journal, journal_path: Path, host: str) -> None:
        self.name = name
        self.journal = journal_path
        self.requests: set[tuple[Json, Json]] = set()
        self.before_load: Callable[[], object] = lambda: None
        self.breaks: Callable[[dict[str, Json]], bool] = lambda header: False
        self.words: list[Word] = []
        self.op = STEP
        self.listener = Listener(host, job=JOB, me=name, token_of=lambda _: TOKEN, serve_copy=self._serve)
        self.shared = SharedWorkerState(name, RingsOnPaper(self.listener, JOB, name, 1.0), self.words.append, journal)
        self.model = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(self.model.weight, weight)
        self.donor = CopyServer(self.shared, journal)
        self.carrier = self.donor.carrier = SlowCarrier(Values(), lambda: self.before_load())
        self.carrier.register(model=self.model)
        self.carrier.freeze()
        self.asker = CopyClient(JOB, name)
        client = cast(AgentClient, SimpleNamespace(send=self.words.append))
        self.orders = LeaderOrders(self.shared, self.asker, client, journal)
        self.script = ScriptLoop(newcomer=True)
        self.admission = JoinProtocol(self.shared, self.orders, self.asker, journal, self.script)

    def _serve(self, sock: socket.socket, hello: Hello) -> None:
        self.donor.serve(Breaking(sock, self._note), hello.worker_id)

    def member(self, seniority: int) -> Member:
        return Member(self.name, self.name, *self.listener.address, seniority)

    def hear(self, order: Order) -> None:
        self.orders.deliver(order)

    def begin(self, op: Op) -> None:
        self.op = op
        joinable = op.kind is OpKind.PASS
        self.shared.post(worker_state.Begin(op.units, joinable))
        if joinable:
            self.donor.open_window(op, GENEROUS_S)

    def go_through(self, op: Op, carried: tuple[int, ...], result: Partial) -> None:
        """An operation, the one in progress or the next one."""
        if self.shared.position.phase is not Phase.COLLECTING:
            self.begin(op)
        self.complete(carried, result)

    def weigh(self, weight: float) -> None:
        with torch.no_grad():
            self.model.weight.fill_(weight)

    def events(self, event: str) -> int:
        return sum(json.loads(line)["event"] == event for line in self.journal.read_text().splitlines())

    def await_event(self, event: str) -> None:
        wait_until(lambda: self.events(event) > 0)

    def await_request(self, want: str, op: int) -> None:
        with self.shared.changed:
            assert self.shared.changed.wait_for(lambda: (want, op) in self.requests, GENEROUS_S)

    def _note(self, header: dict[str, Json]) -> bool:
        with self.shared.changed:
            self.requests.add((header.get("want"), header.get("op")))
            self.shared.changed.notify_all()
        return self.breaks(header)

    def complete(self, carried: tuple[int, ...], result: Partial) -> None:
        """The ring's part: headers of all, then the result."""
        generation = self.shared.position.entered
        with self.shared.changed:
            self.shared.post(worker_state.ReadHeader())
            self.shared.post(worker_state.Obtained(generation, tuple((number,) for number in carried)))
            self.donor.keep(self.shared.position.kept, self.op, {}, result, result)
        self.donor.window.close()

    def await_position(self, holds: Callable[[worker_state.WorkerState], bool]) -> None:
        with self.shared.changed:
            assert self.shared.changed.wait_for(lambda: holds(self.shared.position), GENEROUS_S)


Make = Callable[..., Worker]
RESULT = Partial(0, 1, {"float32": torch.tensor([1.0, 2.0])})


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def new(name: str, weight: float = 0.0, host: str = "127.0.0.1") -> Worker:
            path = tmp_path / f"{name}.jsonl"
            worker = Worker(name, weight, stack.enter_context(Journal(path, JOB, name, name)), path, host)
            stack.callback(worker.listener.close)
            stack.callback(worker.asker.unfollow)
            return worker

        yield new


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every state is too large for a window."""
    monkeypatch.setattr("runtime.worker.donor.CERTAINLY_BYTES_PER_S", 1e-9)


def generation(number: int, kind: Kind, *workers: Worker, base: int = 1) -> Generation:
    """base: of a planned one."""
    members = tuple(worker.member(rank) for rank, worker in enumerate(workers))
    return Generation(number, kind, base if kind is Kind.PLANNED else number, members, Plan(), "", token=TOKEN)


def in_pass(newcomer: Worker, here: Op, *, bound: bool) -> None:
    """Its script has rehearsed in this pass."""
    newcomer.shared.position = replace(newcomer.shared.position, phase=Phase.FRESH)
    newcomer.script.at = newcomer.script.at._replace(
        stage=ScriptStage.COPYING, loop=LoopKind.EPOCHS, epoch=here.epoch, step=here.step, bound=bound
    )


def joining(
    newcomer: Worker, here: Op = STEP, *, bound: bool = False
) -> tuple[threading.Thread, list[tuple[Op, Partial | None]]]:
    """Its user's thread, in the library after its rehearsal."""
    in_pass(newcomer, here, bound=bound)
    joined = list[tuple[Op, Partial | None]]()
    join = newcomer.admission.join
    thread = threading.Thread(target=lambda: joined.append(join(here, {}, newcomer.carrier)), daemon=True)
    thread.start()
    return thread, joined


def joined_with(thread: threading.Thread, joined: list[tuple[Op, Partial | None]]) -> tuple[Op, list[float]]:
    thread.join(GENEROUS_S)
    assert joined, "it is still joining"
    op, result = joined[0]
    assert result is not None
    return op, values(result)


def values(result: Partial) -> list[float]:
    return result.flats["float32"].tolist()


def at_step(step: int) -> Op:
    return replace(STEP, step=step)


def other(number: int) -> Partial:
    return Partial(0, 1, {"float32": torch.full((2,), float(number))})


def publish(workers: Sequence[Worker], *generations: Generation) -> None:
    """All of them hear of each of these."""
    for order in generations:
        for worker in workers:
            worker.hear(Publish(1, order))


def begin(op: Op, *workers: Worker) -> None:
    for worker in workers:
        worker.begin(op)


def follow(donor: Worker, newcomer: Worker, *others: Worker) -> None:
    """A job of these, and a plan that the newcomer joins it."""
    members = (donor, *others)
    publish((*members, newcomer), generation(1, Kind.FORM, *members), generation(2, Kind.PLANNED, *members, newcomer))


def fall_behind(newcomer: Worker, donor: Worker, *others: Worker) -> None:
    """It joins a job of those: it has copied what the donor holds of STEP, and taken over the result of that."""
    members = (donor, *others)
    follow(donor, newcomer, *others)
    thread, joined = joining(newcomer)
    for worker in members:
        worker.begin(STEP)
    donor.await_request("next", 0)
    for worker in members:
        worker.complete((0,) * len(members), RESULT)
    assert joined_with(thread, joined) == (STEP, [1.0, 2.0])


def die(worker: Worker, survivors: tuple[Worker, Worker], op: int) -> None:
    """The members lose it in this operation; the newcomer, the second survivor, is planned again."""
    worker.listener.close()
    member, newcomer = survivors
    for other in survivors:
        other.hear(Quiesce(1, 1, 2))
    loss = replace(generation(3, Kind.LOSS, member), plan=Plan(op=op))
    for order in (loss, generation(4, Kind.PLANNED, member, newcomer, base=3)):
        for other in survivors:
            other.hear(Publish(1, order))


def test_an_asker_may_have_nothing_to_ask_for_as_long_as_it_likes(make: Make) -> None:
    """As a script that sends each step that it keeps, and evaluates for hours."""
    patience: list[float | None] = []

    class Noted(CopyConnection):
        def receive(self, into: Any = None, within_s: float | None = None) -> Any:
            patience.append(within_s)
            return super().receive(into, within_s)

    ours, theirs = socket.socketpair()
    asker = CopyConnection(ours)
    asker.send({"want": "anything"})
    serving = threading.Thread(target=make("w0").donor.serve, args=(Noted(theirs), "w1"))
    serving.start()
    assert "unknown request" in str(asker.receive()[0]["refused"])
    asker.close()
    serving.join()
    assert patience == [math.inf, math.inf]


def test_a_spare_waits_until_there_is_a_place_for_it_whatever_happens_meanwhile(make: Make) -> None:
    a, b, c = make("a"), make("b"), make("c")
    c.shared.position = replace(c.shared.position, phase=Phase.FRESH)
    waiting = threading.Thread(target=c.admission.await_invitation, daemon=True)
    waiting.start()
    c.hear(Publish(1, generation(1, Kind.FORM, a, b)))
    c.hear(Quiesce(1, 1, 1))
    c.hear(Publish(1, generation(2, Kind.LOSS, a)))
    assert waiting.is_alive() and isinstance(c.words[-1], Report)
    c.hear(Invite(1, "c"))
    waiting.join(GENEROUS_S)
    assert not waiting.is_alive()


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
    follow(a, c)
    a.begin(STEP)
    a.await_position(lambda p: p.holders == ("c",))
    assert broken.wait(GENEROUS_S)
    a.complete((2,), RESULT)
    thread.join(GENEROUS_S)
    assert joined and joined[0][1] is not None and c.shared.position.entered == 2
    assert torch.equal(joined[0][1].flats["float32"], RESULT.flats["float32"])
    assert c.model.weight.tolist() == [[7.0, 7.0]]


@pytest.mark.parametrize("word", ["complete", "next"])
def test_a_newcomer_whose_word_was_lost_counts_as_a_holder_when_it_asks_for_the_outcome(
    make: Make, word: str, request: pytest.FixtureRequest
) -> None:
    """It cannot know that the donor never had the word; and the donor's operation may wait for it."""
    if word == "next":
        request.getfixturevalue("large")
    a, c = make("a", 7.0), make("c")
    lost = threading.Event()

    def first_of_its_kind(header: dict[str, Json]) -> bool:
        if (word in header or header.get("want") == word) and not lost.is_set():
            lost.set()
            raise CopyFailed("the connection broke before this came")
        return False

    a.breaks = first_of_its_kind
    thread, joined = joining(c)
    follow(a, c)
    a.begin(STEP)
    a.await_position(lambda p: p.holders == ("c",))
    assert lost.is_set()
    a.complete((2,), RESULT)
    assert joined_with(thread, joined) == (STEP, [1.0, 2.0])
    assert c.shared.position.entered == 2


def test_a_newcomer_copies_from_the_donor_also_when_that_one_leaves_with_the_same_generation(make: Make) -> None:
    a, b, c = make("a", 7.0), make("b", 7.0), make("c")
    thread, joined = joining(c)
    publish((a, b, c), generation(1, Kind.FORM, a, b), generation(2, Kind.PLANNED, b, c))
    begin(STEP, a, b)
    a.await_position(lambda p: p.holders == ("c",))
    for worker in (a, b):
        worker.complete((2, 2), RESULT)
    thread.join(GENEROUS_S)
    assert joined and c.shared.position.entered == 2


def test_a_newcomer_that_has_asked_learns_of_a_generation_that_was_planned_meanwhile(make: Make) -> None:
    a, c, d = make("a", 7.0), make("c"), make("d")
    asked = threading.Event()

    def see(header: dict[str, Json]) -> bool:
        if header.get("want") == "outcome":
            asked.set()
        return False

    a.breaks = see
    thread, joined = joining(c)
    follow(a, c)
    a.begin(STEP)
    assert asked.wait(GENEROUS_S)
    publish((a, c), generation(3, Kind.PLANNED, a, c, d))
    a.complete((3,), RESULT)
    thread.join(GENEROUS_S)
    assert joined and c.shared.position.entered == 3


def test_a_copy_that_outlasts_a_loss_counts_for_donor_and_newcomer_alike(make: Make) -> None:
    """The same operation is done again in the next generation, with the same state."""
    a, b, c = make("a", 7.0), make("b", 7.0), make("c")
    c.before_load = lambda: die(b, (a, c), 0)

    def too_late(header: dict[str, Json]) -> bool:
        """To ask whether it counts, when it does."""
        if header.get("want") == "next":
            a.await_position(lambda p: p.reduced > 0)
        return False

    a.breaks = too_late
    thread, joined = joining(c)
    follow(a, c, b)
    begin(STEP, a, b)
    a.await_position(lambda p: p.entered == 3 and p.holders == ("c",))
    a.complete((4,), RESULT)
    assert joined_with(thread, joined) == (STEP, [1.0, 2.0])
    assert c.shared.position.entered == 4
    assert c.events("copy_outdated") == 0


def test_a_donor_that_hears_late_of_a_loss_does_not_count_a_copy(make: Make) -> None:
    """It would forget that when it hears of it, and the newcomer relied on it. In the next operation both agree."""
    a, b, c = make("a", 7.0), make("b", 7.0), make("c")
    loss, heard = generation(3, Kind.LOSS, a), threading.Event()

    def the_newcomer_hears() -> None:
        for worker in (a, c):
            worker.hear(Quiesce(1, 1, 2))
        c.hear(Publish(1, loss))
        c.before_load = lambda: None
        heard.set()

    c.before_load = the_newcomer_hears
    thread, joined = joining(c)
    follow(a, c, b)
    begin(STEP, a, b)
    c.await_event("state_copied")
    assert heard.wait(GENEROUS_S)
    wait_until(lambda: not a.shared.position.copying)
    assert a.shared.position.holders == ()
    a.hear(Publish(1, loss))
    publish((a, c), generation(4, Kind.PLANNED, a, c, base=3))
    a.complete((0,), RESULT)
    assert joined_with(thread, joined) == (STEP, [1.0, 2.0])
    thread, joined = joining(c, at_step(1))
    a.begin(at_step(1))
    a.await_position(lambda p: p.holders == ("c",))
    a.complete((4,), other(1))
    assert joined_with(thread, joined) == (at_step(1), [1.0, 1.0])
    assert c.shared.position.entered == 4


def test_a_newcomer_that_hears_late_of_a_loss_is_not_counted(make: Make) -> None:
    """It asks to count in a generation that is over; the donor knows that, and says so."""
    a, b, c = make("a", 7.0), make("b", 7.0), make("c")
    follow(a, c, b)
    begin(STEP, a, b)
    loss, plan = generation(3, Kind.LOSS, a), generation(4, Kind.PLANNED, a, c, base=3)
    news: tuple[Order, ...] = (Quiesce(1, 1, 2), Publish(1, loss), Publish(1, plan))
    for order in news:
        a.hear(order)
    thread, joined = joining(c)
    c.await_event("state_copied")
    wait_until(lambda: not a.shared.position.copying)
    assert a.shared.position.holders == ()
    for order in news:
        c.hear(order)
    a.await_position(lambda p: p.holders == ("c",))
    a.complete((4,), RESULT)
    assert joined_with(thread, joined) == (STEP, [1.0, 2.0])


def test_a_newcomer_after_whose_copy_no_generation_took_effect_takes_over_the_result(make: Make) -> None:
    a, c = make("a", 7.0), make("c")
    thread, joined = joining(c)
    follow(a, c)
    a.begin(STEP)
    a.await_position(lambda p: p.holders == ("c",))
    assert c.shared.position.copied == 0
    a.complete((0,), RESULT)
    assert joined_with(thread, joined) == (STEP, [1.0, 2.0]), "the last result is still there"
    thread, joined = joining(c, at_step(1))
    a.begin(at_step(1))
    a.await_position(lambda p: p.reduced == 1 and p.holders == ("c",))
    a.complete((2,), RESULT)
    assert joined_with(thread, joined) == (at_step(1), [1.0, 2.0])
    assert c.events("state_copied") == 1


def test_a_newcomer_takes_over_results_from_a_held_copy_on_until_it_has_caught_up(make: Make, large: None) -> None:
    a, c = make("a", 7.0), make("c")
    follow(a, c)
    thread, joined = joining(c)
    a.begin(STEP)
    a.await_request("next", 0)
    evaluation = Op(OpKind.EVALUATE, 1, step=1, label="score")
    for op, result in ((STEP, RESULT), (at_step(1), other(1)), (evaluation, other(2))):
        a.go_through(op, (0,), result)
        a.weigh(9.0)  # the script goes on
    assert joined_with(thread, joined) == (STEP, [1.0, 2.0])
    assert c.script.at.behind and c.shared.position.phase is Phase.FRESH
    assert c.model.weight.tolist() == [[7.0, 7.0]]
    assert joined_with(*joining(c, at_step(1))) == (at_step(1), [1.0, 1.0])
    assert values(c.admission.take_over(evaluation, {})) == [2.0, 2.0]
    thread, joined = joining(c, at_step(2))
    a.begin(at_step(2))
    a.await_position(lambda p: p.holders == ("c",))
    a.complete((2,), other(3))
    assert joined_with(thread, joined) == (at_step(2), [3.0, 3.0])
    assert (c.shared.position.entered, c.script.at.behind) == (2, False)
    assert c.events("state_copied") == 1


def go_astray(newcomer: Worker, donor: Worker) -> None:
    """It was bound to step 5, and has found the others in step 0."""
    follow(donor, newcomer)
    thread, joined = joining(newcomer, at_step(5), bound=True)
    donor.begin(STEP)
    donor.await_request("next", 0)
    assert newcomer.shared.position.copied == -1, "no state that could become the job's"
    assert donor.shared.position.holders == ()
    donor.complete((0,), RESULT)
    assert joined_with(thread, joined) == (STEP, [1.0, 2.0])
    newcomer.script.at = newcomer.script.at._replace(stage=ScriptStage.BETWEEN)
    assert newcomer.script.at.behind and newcomer.shared.position.phase is Phase.FRESH


def copied_anew(newcomer: Worker, donor: Worker) -> list[Copy]:
    """What it copies in step 1, which begins meanwhile."""
    copies: list[Copy] = []
    thread = threading.Thread(target=lambda: copies.append(newcomer.admission.copy_anew()), daemon=True)
    thread.start()
    donor.begin(at_step(1))
    thread.join(GENEROUS_S)
    return copies


@pytest.mark.parametrize("held", [False, True])
def test_a_newcomer_bound_to_another_step_goes_through_it_and_copies_anew(
    make: Make, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """What it makes of the first copy is compared with nothing, and it is a member after the second one."""
    if held:
        monkeypatch.setattr("runtime.worker.donor.CERTAINLY_BYTES_PER_S", 1e-9)
    a, c = make("a", 7.0), make("c")
    go_astray(c, a)
    evaluation = Op(OpKind.EVALUATE, 1, label="score")
    a.go_through(evaluation, (0,), other(2))
    assert values(c.admission.take_over(evaluation, {"weights": "its own"})) == [2.0, 2.0]
    a.weigh(9.0)
    (copy,) = copied_anew(c, a)
    c.carrier.load(copy.header, copy.blobs)
    assert (copy.op, c.model.weight.tolist()) == (at_step(1), [[9.0, 9.0]])
    assert a.shared.position.holders == (), "its script may yet fail before it comes to that pass"
    thread, joined = joining(c, at_step(1), bound=True)
    a.await_position(lambda p: p.holders == ("c",))
    a.complete((2,), other(3))
    assert joined_with(thread, joined) == (at_step(1), [3.0, 3.0])
    assert (c.shared.position.entered, c.script.at.behind) == (2, False)


def test_a_connection_that_is_found_to_have_ended_late_does_not_end_the_copy_over_the_next_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The donor would not wait for that copy any more, and cut it off."""
    a, c = make("a", 7.0), make("c")
    go_astray(c, a)
    forget, say = CopyServer._forget, JoinProtocol._say_complete
    may, done = threading.Event(), threading.Event()
    copying: list[tuple[str, ...]] = []

    def forgetting(server: CopyServer, connection: CopyConnection, newcomer: str) -> None:
        assert may.wait(GENEROUS_S)
        forget(server, connection, newcomer)
        done.set()

    def saying(admission: JoinProtocol, number: int, base: int) -> None:
        may.set()
        assert done.wait(GENEROUS_S)
        copying.append(a.shared.position.copying)
        say(admission, number, base)

    monkeypatch.setattr(CopyServer, "_forget", forgetting)
    monkeypatch.setattr(JoinProtocol, "_say_complete", saying)
    copied_anew(c, a)
    assert copying == [("c",)]


def test_the_results_since_its_second_copy_are_there_for_a_newcomer_that_takes_its_time(make: Make) -> None:
    a, c = make("a", 7.0), make("c")
    go_astray(c, a)
    assert [copy.op for copy in copied_anew(c, a)] == [at_step(1)]
    a.await_position(lambda p: not p.copying)  # the end of a window cuts off a copy whose end is not known here yet
    a.complete((0,), other(1))
    a.go_through(at_step(2), (0,), other(2))
    for step in (1, 2):
        assert joined_with(*joining(c, at_step(step), bound=True)) == (at_step(step), [float(step)] * 2)


def test_a_copy_says_that_the_job_stops(make: Make) -> None:
    a, c = make("a", 7.0), make("c")
    for step, because in ((0, None), (1, "enough")):
        a.donor.meta = JoinMeta(0, step, 0, {}, {}, stop=because)
        go_astray(c, a) if step == 0 else copied_anew(c, a)
        assert c.script.stop == because


def cut_off_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The donor's window closes just before it hears that the copy is complete."""
    say, cut = JoinProtocol._say_complete, list[int]()

    def saying(admission: JoinProtocol, number: int, base: int) -> None:
        if not cut:
            cut.append(number)
            assert admission._asker.following is not None
            admission._asker.following.abort()
        say(admission, number, base)

    monkeypatch.setattr(JoinProtocol, "_say_complete", saying)


def test_a_second_copy_that_is_cut_off_before_the_donor_hears_of_it_is_tried_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, c = make("a", 7.0), make("c")
    go_astray(c, a)
    cut_off_once(monkeypatch)
    assert [copy.op for copy in copied_anew(c, a)] == [at_step(1)] and c.events("copy_failed") == 1


def test_a_first_copy_that_is_cut_off_before_the_donor_hears_of_it_is_tried_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the operation that it goes through nobody would keep the result for it."""
    a, c = make("a", 7.0), make("c")
    cut_off_once(monkeypatch)
    go_astray(c, a)
    assert c.events("copy_failed") == 1


def test_a_newcomer_whose_draws_led_it_elsewhere_gives_way_to_a_new_process(make: Make) -> None:
    a, c = make("a", 7.0), make("c")
    go_astray(c, a)
    a.go_through(at_step(1), (0,), other(1))
    with pytest.raises(JoinMissed, match="drew for another step"):
        c.admission.take_over(Op(OpKind.EVALUATE, 1, label="score"), {})


def test_a_newcomer_that_a_step_waits_for_gives_way_to_a_new_process_if_it_is_bound_to_another(make: Make) -> None:
    """It would wait for the result of that step, and the step for it."""
    a, c = make("a", 7.0), make("c")
    form, plan = generation(1, Kind.FORM, a), generation(2, Kind.PLANNED, a, c)
    publish((a, c), replace(form, hold=True), replace(plan, hold=True))
    a.begin(STEP)
    in_pass(c, at_step(5), bound=True)
    with pytest.raises(JoinMissed, match="step 0 waits for this newcomer"):
        c.admission.join(at_step(5), {}, c.carrier)


def test_a_newcomer_that_goes_through_a_step_which_begins_to_wait_for_it_gives_way_to_a_new_process(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy was made before a loss took the members below their quorum."""
    monkeypatch.setattr("runtime.worker.donor.LATER_S", 0.05)
    a, b, c = make("a", 7.0), make("b", 7.0), make("c")
    follow(a, c, b)
    in_pass(c, at_step(5), bound=True)
    begin(STEP, a, b)
    errors: list[str] = []

    def join() -> None:
        try:
            c.admission.join(at_step(5), {}, c.carrier)
        except JoinMissed as missed:
            errors.append(str(missed))

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    a.await_request("next", 0)
    for worker in (a, c):
        worker.hear(Quiesce(1, 1, 2))
        worker.hear(Publish(1, replace(generation(3, Kind.LOSS, a), plan=Plan(op=0), hold=True)))
    thread.join(GENEROUS_S)
    assert errors and "waits for a newcomer" in errors[0]


def test_a_copy_that_was_cut_off_is_followed_by_a_held_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    a, c = make("a", 7.0), make("c")
    follow(a, c)
    over = threading.Event()
    fits = c.carrier.check

    def check(header: dict[str, Json]) -> None:
        """Before the first byte of the tensors is asked for: a copy that is here as a whole cannot be cut off."""
        over.wait(GENEROUS_S)
        fits(header)

    monkeypatch.setattr(c.carrier, "check", check)
    thread, joined = joining(c)
    a.begin(STEP)
    a.await_position(lambda p: p.copying == ("c",))
    a.complete((0,), RESULT)
    over.set()
    a.begin(at_step(1))
    a.await_request("next", 1)
    a.complete((0,), other(1))
    assert joined_with(thread, joined) == (at_step(1), [1.0, 1.0])


def test_a_donor_goes_on_counting_a_newcomer_whose_generation_did_not_take_effect(make: Make, large: None) -> None:
    a, c = make("a", 7.0), make("c")
    fall_behind(c, a)
    thread, joined = joining(c, at_step(1))
    a.begin(at_step(1))
    a.await_position(lambda p: p.holders == ("c",))
    a.complete((0,), other(1))
    assert joined_with(thread, joined) == (at_step(1), [1.0, 1.0])
    assert c.script.at.behind and c.events("state_copied") == 1


def test_another_question_of_a_newcomer_does_not_end_the_wait_for_it(make: Make, large: None) -> None:
    a, c = make("a", 7.0), make("c")
    fall_behind(c, a)
    a.begin(at_step(1))
    assert a.shared.position.copying == ("c",)
    record = c.shared.position.record
    assert record is not None
    connection = c.asker.help(a.member(0), record)
    connection.send({"want": "meta"})
    connection.receive()
    connection.close()
    wait_until(lambda: sum(thread.name == "copy-c" for thread in threading.enumerate()) == 1)
    assert a.shared.position.copying == ("c",)


def test_a_newcomer_that_has_caught_up_survives_the_death_of_its_donor(make: Make, large: None) -> None:
    a, b, c = make("a", 7.0), make("b", 7.0), make("c")
    fall_behind(c, a, b)
    thread, joined = joining(c, at_step(1))
    begin(at_step(1), a, b)
    a.await_position(lambda p: p.holders == ("c",))
    die(a, survivors=(b, c), op=1)
    b.await_position(lambda p: p.holders == ("c",))
    b.complete((4,), other(1))
    assert joined_with(thread, joined) == (at_step(1), [1.0, 1.0])
    assert (c.shared.position.entered, c.events("state_copied")) == (4, 1)


def test_a_donor_knows_in_which_operation_a_newcomer_may_have_copied_its_state(make: Make, large: None) -> None:
    """Also of a held one, when the operation is over."""
    a, b, c = make("a", 7.0), make("b", 7.0), make("c")
    fall_behind(c, a, b)
    assert (a.donor.window.state_given, b.donor.window.state_given) == (True, False)
    a.begin(at_step(1))
    assert not a.donor.window.state_given


def test_a_donor_knows_of_a_copy_straight_from_its_tensors(make: Make) -> None:
    a, c = make("a", 7.0), make("c")
    follow(a, c)
    a.begin(STEP)
    assert not a.donor.window.state_given
    joining(c)
    a.await_position(lambda p: p.holders == ("c",))
    assert a.donor.window.state_given


def test_the_next_donor_keeps_as_many_results_for_a_newcomer_as_the_one_that_died(
    make: Make, large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("donor", "held_copy"):
        monkeypatch.setattr(f"runtime.worker.{module}.LOG_BYTES_MIN", 0)
    monkeypatch.setattr("runtime.worker.held_copy.LOG_STATES", 1 << 10)
    a, b, c = make("a", 7.0), make("b", 7.0), make("c")
    fall_behind(c, a, b)
    thread, joined = joining(c, at_step(1))
    begin(at_step(1), a, b)
    a.await_position(lambda p: p.holders == ("c",))
    die(a, survivors=(b, c), op=1)
    b.await_position(lambda p: p.holders == ("c",))
    b.complete((0,), other(1))  # no generation takes effect after it, so c takes over its result
    assert joined_with(thread, joined) == (at_step(1), [1.0, 1.0])
    assert (c.shared.position.phase, c.events("state_copied"), c.events("copy_outdated")) == (Phase.FRESH, 1, 0)


def test_a_newcomer_whose_donor_died_copies_anew_where_nobody_has_its_results(make: Make, large: None) -> None:
    a, b, c = make("a", 7.0), make("b", 7.0), make("c")
    fall_behind(c, a, b)
    for step in (1, 2):
        for worker in (a, b):
            worker.go_through(at_step(step), (0, 0), other(step))
    b.weigh(8.0)
    b.begin(at_step(3))
    die(a, survivors=(b, c), op=3)
    thread, joined = joining(c, at_step(1))
    b.await_position(lambda p: p.holders == ("c",))
    b.complete((4,), other(3))
    assert joined_with(thread, joined) == (at_step(3), [3.0, 3.0])
    assert (c.events("state_copied"), c.model.weight.tolist()) == (2, [[8.0, 8.0]])


def test_a_newcomer_goes_on_with_its_copy_where_the_donor_died_and_the_operation_is_done_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.recovery.transfer.multi_source.PART_BYTES", 4)
    a, b, c = make("a", 7.0), make("b", 7.0), make("c")
    follow(a, c, b)
    asked = list[Json]()
    second = threading.Event()

    def break_at_the_second_part(header: dict[str, Json]) -> bool:
        if "part" in header:
            if asked:
                second.set()
                return True
            asked.append(header["part"])
        return False

    def note(header: dict[str, Json]) -> bool:
        if "part" in header:
            asked.append(header["part"])
        return False

    a.breaks, b.breaks = break_at_the_second_part, note
    thread, joined = joining(c)
    begin(STEP, a, b)
    assert second.wait(GENEROUS_S)
    die(a, survivors=(b, c), op=0)
    b.await_position(lambda p: p.holders == ("c",))
    b.complete((4,), RESULT)
    assert joined_with(thread, joined) == (STEP, [1.0, 2.0])
    assert c.model.weight.tolist() == [[7.0, 7.0]]
    assert c.events("copy_goes_on") == 1
    assert len({json.dumps(part) for part in asked}) == len(asked), "no part was sent twice"


def test_between_passes_a_newcomer_whose_donor_died_takes_the_last_result_from_the_next_one(
    make: Make, large: None
) -> None:
    """And the results after it, which are kept for it from then on."""
    a, b, c = make("a", 7.0), make("b", 7.0), make("c")
    fall_behind(c, a, b)
    score = Op(OpKind.EVALUATE, 1, step=1, label="score")
    for worker in (a, b):
        worker.go_through(score, (0, 0), other(1))
    second, third = replace(STEP, step=1), replace(score, label="again")
    b.begin(second)
    die(a, survivors=(b, c), op=2)
    assert values(c.admission.take_over(score, {})) == [1.0, 1.0]
    b.complete((0,), other(2))
    b.go_through(third, (0,), other(3))
    assert joined_with(*joining(c, second)) == (second, [2.0, 2.0])
    assert values(c.admission.take_over(third, {})) == [3.0, 3.0]
    assert (c.events("state_copied"), c.events("copy_outdated")) == (1, 0)


def test_between_passes_the_next_donor_keeps_what_is_in_progress(
    make: Make, large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.worker.donor.LATER_S", 0.2)
    a, b, c = make("a", 7.0), make("b", 7.0), make("c")
    fall_behind(c, a, b)
    score = Op(OpKind.EVALUATE, 1, step=1, label="score")
    begin(score, a, b)
    taken = list[Partial]()
    thread = threading.Thread(target=lambda: taken.append(c.admission.take_over(score, {})), daemon=True)
    thread.start()
    a.await_request("next", 1)
    die(a, survivors=(b, c), op=1)
    b.await_request("next", 1)
    b.complete((0,), other(1))
    thread.join(GENEROUS_S)
    assert [values(result) for result in taken] == [[1.0, 1.0]]


def test_a_newcomer_that_does_not_hear_that_it_counts_asks_what_became_of_the_operation(
    make: Make, large: None
) -> None:
    a, c = make("a", 7.0), make("c")
    follow(a, c)
    broken, over = threading.Event(), threading.Event()

    def lose_first_answer(header: dict[str, Json]) -> bool:
        if header.get("want") != "next":
            return False
        if broken.is_set():
            over.wait(GENEROUS_S)
            return False
        broken.set()
        return True

    a.breaks = lose_first_answer
    thread, joined = joining(c)
    a.begin(STEP)
    a.await_position(lambda p: p.holders == ("c",))
    assert broken.is_set()
    a.complete((2,), RESULT)
    over.set()
    assert joined_with(thread, joined) == (STEP, [1.0, 2.0])
    assert (c.shared.position.entered, c.events("state_copied")) == (2, 1)


def test_results_that_come_when_a_copy_has_become_the_state_change_nothing(
    make: Make, large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, c = make("a", 7.0), make("c")
    follow(a, c)

    def lose_all(number: int, answer: dict[str, Json], blobs: list[torch.Tensor]) -> list[LoggedResult]:
        c.hear(Quiesce(1, 1, 2))
        c.hear(Publish(1, replace(generation(3, Kind.LOSS, c), plan=Plan(op=0))))
        return parse_results(number, answer, blobs)

    monkeypatch.setattr("runtime.worker.joining.parse_results", lose_all)
    thread, joined = joining(c)
    a.begin(STEP)
    a.await_request("next", 0)
    a.complete((0,), RESULT)
    thread.join(GENEROUS_S)
    assert joined == [(STEP, None)]
    assert (c.shared.position.entered, c.shared.position.reduced) == (3, 0)


@pytest.mark.parametrize(("states", "available_bytes"), [(2, 1 << 30), (1 << 20, 64)])
def test_a_newcomer_is_told_when_the_results_it_needs_were_too_many(
    make: Make, large: None, monkeypatch: pytest.MonkeyPatch, states: int, available_bytes: int
) -> None:
    for module in ("donor", "held_copy"):
        monkeypatch.setattr(f"runtime.worker.{module}.LOG_BYTES_MIN", 0)
    monkeypatch.setattr("runtime.worker.held_copy.LOG_STATES", states)
    monkeypatch.setattr("runtime.worker.held_copy.available_bytes", lambda: available_bytes)
    a, c = make("a", 7.0), make("c")
    follow(a, c)
    late = threading.Event()
    a.breaks = lambda header: header.get("want") == "next" and not late.wait(GENEROUS_S)
    thread, joined = joining(c)
    a.begin(STEP)
    a.await_request("next", 0)
    for step in (0, 1):  # the last result would be there
        a.go_through(at_step(step), (0,), other(step))
    late.set()
    a.begin(at_step(2))
    a.await_position(lambda p: p.holders == ("c",))
    a.complete((2,), other(2))
    assert joined_with(thread, joined) == (at_step(2), [2.0, 2.0])
    assert c.events("copy_outdated") == 1
    assert [word.outdated for word in c.words if isinstance(word, Ready)] == [1], "the leader hears of it"
    c.orders.ready = True
    c.hear(Publish(2, generation(3, Kind.PLANNED, a, c)))
    c.shared.position = replace(c.shared.position, phase=Phase.FRESH)
    c.hear(Publish(3, generation(4, Kind.PLANNED, a, c)))
    assert c.words[-1] == Ready("c", 4, outdated=1), "and the next leader too"
    c.orders.hold = True
    c.hear(Publish(4, generation(5, Kind.PLANNED, a, c)))
    assert c.words[-1] == Ready("c", 5, outdated=1, hold=True)


def test_a_newcomer_that_takes_over_results_no_faster_than_they_come_asks_to_be_waited_for(
    make: Make, large: None
) -> None:
    a, c = make("a", 7.0), make("c")
    fall_behind(c, a)
    step = 0
    for some in (3, 2, 2, 4):
        while a.shared.position.reduced < step + 1 + some:
            op = at_step(a.shared.position.reduced)
            a.go_through(op, (0,), other(op.step))
        for _ in range(some):
            step += 1
            assert joined_with(*joining(c, at_step(step))) == (at_step(step), [float(step)] * 2)
    assert c.events("newcomer_no_nearer") == 3, "all but the second"
    assert [word.outdated for word in c.words if isinstance(word, Ready)] == [1, 2, 3], "the leader hears of it"
    assert (c.events("state_copied"), c.events("copy_outdated")) == (1, 0)


def test_one_result_at_a_time_is_a_sign_of_a_slow_newcomer_only_where_it_could_join(make: Make, large: None) -> None:
    a, c = make("a", 7.0), make("c")
    fall_behind(c, a)
    evaluation = Op(OpKind.EVALUATE, 1, step=1, label="score")
    for number in (1, 2, 3):
        a.go_through(evaluation, (0,), other(number))
        assert values(c.admission.take_over(evaluation, {})) == [float(number)] * 2
    assert c.events("newcomer_no_nearer") == 0
    for step in (1, 2):
        a.go_through(at_step(step), (0,), other(step))
        assert joined_with(*joining(c, at_step(step))) == (at_step(step), [float(step)] * 2)
    assert c.events("newcomer_no_nearer") == 2


def test_a_slow_newcomer_that_is_bound_to_another_step_asks_nobody_to_wait(make: Make) -> None:
    """The step would wait for it, and it for the result of that step."""
    a, c = make("a", 7.0), make("c")
    go_astray(c, a)
    evaluation = Op(OpKind.EVALUATE, 1, label="score")
    for number in (2, 4, 6):
        for result in (number, number + 1):
            a.go_through(evaluation, (0,), other(result))
        for result in (number, number + 1):
            assert values(c.admission.take_over(evaluation, {})) == [float(result)] * 2
    assert c.events("newcomer_no_nearer") == 0
    assert not [word for word in c.words if isinstance(word, Ready)]


def test_a_step_that_waits_for_a_newcomer_is_copied_from_directly_however_large_the_state(
    make: Make, large: None
) -> None:
    a, c = make("a", 7.0), make("c")
    thread, joined = joining(c)
    for order in (generation(1, Kind.FORM, a), generation(2, Kind.PLANNED, a, c)):
        publish((a, c), replace(order, hold=True))
    a.begin(STEP)
    a.await_position(lambda p: p.holders == ("c",))
    a.complete((2,), RESULT)
    assert joined_with(thread, joined) == (STEP, [1.0, 2.0])
    assert a.events("state_held") == 0


def test_a_newcomer_waits_while_a_donor_has_no_memory_for_a_copy(
    make: Make, large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It describes its state to try again as seldom as there may be some by now."""
    left, described = [0], list[float]()
    monkeypatch.setattr("runtime.worker.held_copy.available_bytes", lambda: left[0])
    monkeypatch.setattr("runtime.worker.donor.LATER_S", 0.5)
    a, c = make("a", 7.0), make("c")
    describe = a.carrier.describe_settled

    def describe_and_count() -> tuple[dict[str, Json], list[NamedTensor]]:
        described.append(time.monotonic())
        return describe()

    monkeypatch.setattr(a.carrier, "describe_settled", describe_and_count)
    follow(a, c)
    thread, joined = joining(c)
    a.begin(STEP)
    a.await_event("state_not_held")
    wait_until(lambda: len(described) >= 4)
    tries = described[::2]  # once to see whether it fits into the window, once for a copy
    assert all(after - before >= 0.5 for before, after in pairwise(tries)), "sooner than it may have changed"
    left[0] = 1 << 30
    a.await_request("next", 0)
    a.complete((0,), RESULT)
    assert joined_with(thread, joined) == (STEP, [1.0, 2.0])
    assert a.events("state_not_held") == 1


def test_a_donor_that_has_no_memory_waits_no_longer_when_the_step_waits(
    make: Make, large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.worker.held_copy.available_bytes", lambda: 0)
    monkeypatch.setattr("runtime.worker.donor.LATER_S", GENEROUS_S)
    a, b, c = make("a", 7.0), make("b", 7.0), make("c")
    follow(a, c, b)
    thread, joined = joining(c)
    begin(STEP, a, b)
    a.await_event("state_not_held")
    for number, order in enumerate((generation(3, Kind.LOSS, a), generation(4, Kind.PLANNED, a, c, base=3))):
        for worker in (a, c):
            if not number:
                worker.hear(Quiesce(1, 1, 2))
            worker.hear(Publish(1, replace(order, hold=not number)))
    a.await_position(lambda p: p.holders == ("c",))
    a.complete((4,), RESULT)
    assert joined_with(thread, joined) == (STEP, [1.0, 2.0])
    assert a.events("state_held") == 0


def test_a_donor_whose_system_gives_no_memory_says_so_and_serves_on(
    make: Make, large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(sizes: Sequence[int]) -> list[torch.Tensor]:
        raise NoMemory("the system has no memory")

    with monkeypatch.context() as patched:
        patched.setattr("runtime.worker.held_copy.room_for", lambda sizes: refuse(sizes) if sizes else [])
        monkeypatch.setattr("runtime.worker.donor.LATER_S", 0.1)
        a, c = make("a", 7.0), make("c")
        follow(a, c)
        thread, joined = joining(c)
        a.begin(STEP)
        a.await_event("state_not_held")
    a.await_request("next", 0)
    a.complete((0,), RESULT)
    assert joined_with(thread, joined) == (STEP, [1.0, 2.0])


def test_members_on_other_hosts_send_parts_of_the_state_too(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.recovery.transfer.multi_source.PART_BYTES", 4)
    a, b, c = make("a", 7.0), make("b", 7.0, "127.0.0.2"), make("c")
    helped = threading.Event()

    def wait_for_help(header: dict[str, Json]) -> bool:
        if "part" in header:
            helped.wait(GENEROUS_S)
        return False

    def help_now(header: dict[str, Json]) -> bool:
        if "part" in header:
            helped.set()
        return False

    a.breaks, b.breaks = wait_for_help, help_now
    follow(a, c, b)
    thread, joined = joining(c)
    begin(STEP, a, b)
    a.await_position(lambda p: p.holders == ("c",))
    assert helped.is_set()
    for worker in (a, b):
        worker.complete((2, 2), RESULT)
    assert joined_with(thread, joined) == (STEP, [1.0, 2.0])
    assert c.model.weight.tolist() == [[7.0, 7.0]]


def test_a_member_that_is_in_another_operation_or_has_drifted_sends_no_part(make: Make) -> None:
    a, c = make("a", 7.0), make("c")
    follow(a, c)
    a.begin(STEP)
    record = c.shared.position.record
    assert record is not None
    for op, digest in ((0, "another"), (1, "another")):
        connection = c.asker.help(a.member(0), record)
        connection.send({"want": "part", "op": op, "digest": digest})
        assert "refused" in connection.receive()[0]
        connection.close()


def test_two_newcomers_are_sent_one_copy_and_are_counted_together(make: Make, large: None) -> None:
    a, c, d = make("a", 7.0), make("c"), make("d")
    publish((a, c, d), generation(1, Kind.FORM, a), generation(3, Kind.PLANNED, a, c, d))
    both = [joining(c), joining(d)]
    a.begin(STEP)
    a.await_position(lambda p: p.holders == ("c", "d"))
    a.complete((3,), RESULT)
    assert [joined_with(*one) for one in both] == [(STEP, [1.0, 2.0])] * 2


def test_as_many_newcomers_as_come_at_once_join_together(make: Make) -> None:
    a, *newcomers = make("a", 7.0), *(make(f"n{number:02}") for number in range(20))
    publish((a, *newcomers), generation(1, Kind.FORM, a), generation(2, Kind.PLANNED, a, *newcomers))
    all_joining = [joining(newcomer) for newcomer in newcomers]
    a.begin(STEP)
    a.await_position(lambda p: len(p.holders) == len(newcomers))
    a.complete((2,), RESULT)
    assert [joined_with(*one) for one in all_joining] == [(STEP, [1.0, 2.0])] * len(newcomers)


def test_between_passes_a_newcomer_without_results_gives_way_to_a_new_process(make: Make, large: None) -> None:
    a, b, c = make("a", 7.0), make("b", 7.0), make("c")
    fall_behind(c, a, b)
    score = Op(OpKind.EVALUATE, 1, label="score")
    for op in (score, at_step(1)):
        for worker in (a, b):
            worker.go_through(op, (0, 0), other(1))
    die(a, survivors=(b, c), op=3)
    with pytest.raises(JoinMissed, match="results"):
        c.admission.take_over(score, {})


@pytest.mark.parametrize(("here", "marks"), [(Op(OpKind.EVALUATE, 1), {}), (STEP, {"learning rates": "0.2"})])
def test_a_newcomer_that_came_to_another_place_or_drifted_says_so(
    make: Make, large: None, here: Op, marks: dict[str, str]
) -> None:
    a, c = make("a", 7.0), make("c")
    fall_behind(c, a)
    a.go_through(STEP, (0,), other(1))
    with pytest.raises(Disagree, match="the members"):
        c.admission.take_over(here, marks)
