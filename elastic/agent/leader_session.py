"""An agent's stream to the leader of the job: words and beats up, orders down.

The stream is opened again whenever it ends, until the leader has ended the job. An agent never stops its workers for
lack of a leader; after orphan_limit_s without one it asks them to leave their ring, and they wait with their state.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from dataclasses import dataclass
from typing import Protocol

import grpc

from elastic.agent.context import AgentContext
from elastic.agent.rare_beats import RareBeats, beats_between, patience, whole_beats
from elastic.agent.standing_words import StandingWords
from elastic.errors import NotAdmitted
from elastic.protocol.messages import Order, Word
from elastic.records.files import read_token
from elastic.rendezvous.leader_stream import FIRST_RETRY_S, LONGEST_RETRY_S, LeaderStream, leader_options, speak
from elastic.wire import codec
from elastic.wire import elastic_pb2 as pb
from elastic.wire.broadcast import Reader
from elastic.wire.services import RendezvousStub

BEATS_APART = 10_000
"""Agents that start together count their beats from different numbers, so that rare beats do not all come at once."""

PART_S = 1.0
"""How long, in seconds, a stopping agent waits until its leader has heard that the workers are gone."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of the job, as the leader has ordered it."""

    exit_code: int
    because: str


class LeaderSessionEvents(Protocol):
    """The agent's side of a session: what the leader says and does."""

    def on_leader(self) -> None:
        """A leader is about to be told all standing words."""

    def on_order(self, to: list[str], order: Order) -> None:
        """An order came from a leader of the newest term seen."""

    def on_orphaned(self, term: int) -> None:
        """There was no leader for orphan_limit_s; called once until there is a leader again."""

    def on_drain(self, left_s: float, because: str) -> None:
        """An operator wants this node empty."""

    def on_drain_over(self) -> None:
        """The operator no longer wants this node empty."""

    def on_worker_signal(self, worker_id: str, *, kill: bool) -> None:
        """An operator wants a worker killed, or the stacks of its threads in its log."""

    def on_end(self, ended: Ended) -> None: ...


class LeaderSession:
    """Used on the event loop only."""

    def __init__(self, here: AgentContext, events: LeaderSessionEvents, standing: StandingWords) -> None:
        """Raises ConfigError for certificates that cannot be used."""
        self._here, self._spec, self._journal = here, here.spec, here.journal
        self._channels = here.reach.channels()
        self._leader_stream = LeaderStream(lambda: here.reach.replicas or (self._address(),))
        self._reader = Reader()
        self._beats = RareBeats(beats_between(here.spec, here.slots), standing, random.randrange(BEATS_APART))
        self._spoke = False
        self._events = events
        self._standing = standing
        self._outbox: asyncio.Queue[pb.AgentWord] | None = None
        self.term = 0
        """The term of the newest leader that was seen."""
        self._welcomed = False
        self._over = False
        self._parting = False

    def say(self, word: Word) -> None:
        """Say a word to the present leader, if there is one, and to every later leader while the word stays true."""
        self._standing.heard(word)
        for said in self._beats.take(word):
            self._put_word(said)

    def beat(self) -> None:
        """To be called every beat_s. An agent of a large job sends only some of these beats, as its leader expects."""
        if (words := self._beats.due()) is None:
            return
        for word in words:
            self._put_word(word)
        if not self._spoke:  # each word is a sign of life
            self._put(pb.AgentWord(beat=pb.Beat()))
        self._spoke = False

    async def part(self, attending: asyncio.Task[None]) -> None:
        """Let the leader hear the last words before the stream ends. attending: the task of `always`."""
        self._parting = True
        if self._outbox is not None:
            self._put(pb.AgentWord(goodbye=pb.Goodbye()))
            await asyncio.wait([attending], timeout=PART_S)

    async def always(self) -> None:
        """Keep a stream to the leader, until the job is over or `part` was called. Raises NotAdmitted."""
        pause_s, said = FIRST_RETRY_S, ""
        led_s, orphaned = time.monotonic(), False
        while not (self._over or self._parting):
            self._welcomed = False
            refused = None
            try:
                because = await self._leader_stream.attend(self._attend, lambda: self._welcomed)
            except NotAdmitted as error:
                because, refused = str(error), error
            if self._welcomed:
                pause_s, led_s, orphaned = FIRST_RETRY_S, time.monotonic(), False
            if self._parting:
                return
            if not orphaned and time.monotonic() >= led_s + self._spec.timing.orphan_limit_s:
                # By now a leader elsewhere may assume that this ring is gone, so the ring must stop.
                self._journal.write("parked", because=f"no leader for {self._spec.timing.orphan_limit_s:.0f} s")
                self._events.on_orphaned(self.term)
                orphaned = True
            if not self._over and (ended := self._result_on_file()) is not None:
                self._end(ended)
            if refused is not None and not self._over:
                self._journal.write("not_admitted", because=because)
                raise refused
            if not self._over:
                if because != said:
                    self._journal.write("no_leader", because=because)
                    said = because
                # Thousands of agents that try at once would leave a replica no time to become the leader.
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                longest_s = LONGEST_RETRY_S * patience(self._beats.every)
                pause_s = min(2 * pause_s, longest_s, self._spec.timing.fence_grace_s / 3)

    def _beats_in(self, beat_ms: int) -> int:
        """Number of beat_s between two beats that the leader expects. 0: an older leader, which does not say it."""
        return whole_beats(beat_ms / 1000, self._spec) if beat_ms else self._beats.every

    def _put_word(self, word: Word) -> None:
        self._put(pb.AgentWord(word=codec.word_to_wire(word)))

    def _put(self, word: pb.AgentWord) -> None:
        if self._outbox is not None:
            self._outbox.put_nowait(word)
            self._spoke = True

    async def _attend(self, address: str) -> str:
        """Keep one stream until it ends. Returns why it ended."""
        try:
            hello = self._hello()
        except (OSError, ValueError) as error:  # the storage of the token is away
            return str(error)
        async with self._channels.aio_channel(address, leader_options(patience(self._beats.every))) as channel:
            call = RendezvousStub(channel).Attend()
            outbox: asyncio.Queue[pb.AgentWord] = asyncio.Queue()
            await call.write(pb.AgentWord(hello=hello))
            speaking: asyncio.Task[None] | None = None
            try:
                async for order in call:
                    match order.WhichOneof("content"):
                        case "welcome":
                            self._beats.every = self._beats_in(order.welcome.beat_ms)
                            self._beats.infers_rings = order.welcome.infers_rings
                            if speaking is None:
                                self._welcome(order.welcome.term, outbox)
                                speaking = asyncio.create_task(speak(call, outbox))
                        case "addressed":
                            self._hear(list(order.addressed.to), self._reader.read(order.addressed))
                        case "drain_node" if order.drain_node.over:
                            self._events.on_drain_over()
                        case "drain_node":
                            self._events.on_drain(order.drain_node.left_ms / 1000, order.drain_node.because)
                        case "worker_signal":
                            kill = order.worker_signal.kind == pb.WorkerSignal.KILL
                            self._events.on_worker_signal(order.worker_signal.worker_id, kill=kill)
                        case "end" if order.end.term >= self.term:
                            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                                await call.write(pb.AgentWord(goodbye=pb.Goodbye()))  # the leader may be gone
                            self._end(Ended(order.end.exit_code, order.end.because))
                            return "the job is over"
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    job, node = self._spec.name, self._here.node
                    raise NotAdmitted(
                        f"the leader of {job} does not admit the agent of {node}: {error.details()}"
                    ) from error
                raise
            finally:
                self._outbox = None
                if speaking is not None:
                    speaking.cancel()
                    await asyncio.gather(speaking, return_exceptions=True)
                call.cancel()
        return f"{address}: the leader ended the stream"

    def _hello(self) -> pb.AgentHello:
        known = [pb.Known(number=number, digest=digest) for number, digest in self._reader.known.items()]
        token = read_token(self._here.job_dir)  # each time, because the node's daemon may have another one by now
        return pb.AgentHello(
            job=self._spec.name, node=self._here.node, slots=self._here.slots, known=known, term=self.term, token=token
        )

    def _welcome(self, term: int, outbox: asyncio.Queue[pb.AgentWord]) -> None:
        """Tell a leader everything that it may never have heard; from here on it hears words as they are said."""
        if term < self.term:
            raise codec.WireError(f"the leader's term {term} is older than term {self.term}, which was seen before")
        self.term, self._welcomed = term, True
        self._journal.write("attending", term=term)
        self._events.on_leader()
        for word in self._standing.words():
            outbox.put_nowait(pb.AgentWord(word=codec.word_to_wire(word)))
        self._outbox = outbox

    def _hear(self, to: list[str], order: Order) -> None:
        """Take an order. An order of an older term is refused, because its leader was replaced."""
        if order.term < self.term:
            self._journal.write("order_refused", order=type(order).__name__, term=order.term, newest=self.term)
            return
        self.term = order.term
        self._events.on_order(to, order)

    def _end(self, ended: Ended) -> None:
        if self._over:
            return
        self._over = True
        self._journal.write("job_over", exit_code=ended.exit_code, because=ended.because)
        self._events.on_end(ended)

    def _address(self) -> str:
        try:
            document = json.loads((self._here.job_dir / "rendezvous.json").read_bytes())
        except (OSError, ValueError):  # missing, or its storage is away: it is read again
            return ""
        return str(document.get("address", ""))

    def _result_on_file(self) -> Ended | None:
        """How the job ended, by the result file; None: the file does not say it."""
        try:
            document = json.loads((self._here.job_dir / "result.json").read_bytes())
        except (OSError, ValueError):  # missing, or its storage is away: it is read again
            return None
        return Ended(int(document["exit_code"]), str(document["because"]))
