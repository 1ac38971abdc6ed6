"""A node's stream to the fleet's leader: the leader sends the jobs to run, the node tells how they go.

The node opens a new stream whenever one ends. The leader also sends queries on it: for pieces of logs, and for facts
about the node and about the ports of other nodes.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from typing import Protocol

from elastic.fleet.node.job_environment import NodeSettings
from elastic.fleet.node.job_runner import SLACK_S, STOP_S
from elastic.fleet.probes import NodeProbes
from elastic.process import notify
from elastic.records import job_files
from elastic.records.journal import Journal
from elastic.rendezvous.leader_stream import FIRST_RETRY_S, LONGEST_RETRY_S, LeaderStream, leader_options, speak
from elastic.security.channels import ChannelFactory
from elastic.security.job_user import acting
from elastic.wire import codec
from elastic.wire import elastic_pb2 as pb
from elastic.wire.services import FleetStub

GOODBYE_S = 1.0

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Offer:
    """The node's offer. slots: how many workers it takes. labels: NAME=VALUE each. lock: see lock_identity."""

    slots: int
    labels: tuple[str, ...]
    lock: str


class FleetSessionEvents(Protocol):
    """What the stream calls: the daemon that runs the jobs."""

    @property
    def done(self) -> bool:
        """Whether the daemon ends, and no job runs here any more."""

    def on_welcome(self) -> None:
        """A leader listens that has heard nothing of this node yet."""

    def on_end(self) -> None:
        """An operator wants this process to end, in order."""

    def on_duties(self, duties: dict[str, pb.Duty], over: dict[str, str]) -> None:
        """The leader has sent its orders. duties: all jobs that are to run here. over: job -> its result, a JSON
        object."""


class FleetLeaderSession:
    """Keeps a node's stream to the fleet's leader. Used on the event loop only."""

    def __init__(
        self,
        site: NodeSettings,
        offer: Offer,
        journal: Journal,
        channels: ChannelFactory,
        attendant: FleetSessionEvents,
    ) -> None:
        self._site = site
        self._offer = offer
        self._journal = journal
        self._channels = channels
        self._attendant = attendant
        reach = site.reach
        self._probes = NodeProbes(site.node, reach.address, reach.replicas, offer.slots, site.jobs_dir)
        self._leader_stream = LeaderStream(lambda: site.reach.replicas)
        self._outbox: asyncio.Queue[pb.NodeWord] | None = None
        self._answers: set[asyncio.Task[None]] = set()
        self._duties: dict[str, pb.Duty] = {}
        self._welcomed = False
        self._renews = False
        """Whether this side ends the stream, to begin another one."""
        self.term = 0
        """The term of the newest leader that was seen."""

    def say(self, word: pb.NodeWord) -> None:
        """Send to the current leader, if there is one; `on_welcome` tells a later leader anew."""
        if self._outbox is not None:
            self._outbox.put_nowait(word)

    def offer(self, slots: int, labels: tuple[str, ...]) -> None:
        """Offer this from now on. The leader hears of it on a new stream: a node says what it offers when it comes."""
        self._offer = replace(self._offer, slots=slots, labels=labels)
        self._probes.slots = slots
        self._renew()

    def _renew(self) -> None:
        if self._outbox is not None:
            self._renews = True
            self._outbox.put_nowait(pb.NodeWord(goodbye=pb.Goodbye()))

    async def part(self, attending: asyncio.Task[None]) -> None:
        """Let the leader hear the last messages before the stream ends. attending: the task of `always`."""
        if self._outbox is not None:
            self._outbox.put_nowait(pb.NodeWord(goodbye=pb.Goodbye()))
            await asyncio.wait([attending], timeout=GOODBYE_S)

    async def always(self) -> None:
        """Keep a stream to the leader, until the daemon has nothing more to do."""
        pause_s, said = FIRST_RETRY_S, ""
        while True:
            self._welcomed = False
            because = await self._leader_stream.attend(self._attend, lambda: self._welcomed)
            if self._attendant.done:
                return
            if self._welcomed:
                pause_s = FIRST_RETRY_S
            renews, self._renews = self._renews, False
            if renews:
                continue
            if because != said:
                self._journal.write("no_fleet_leader", because=because)
                notify.status(f"looks for the fleet's leader: {because}")
                said = because
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_RETRY_S)

    async def _attend(self, address: str) -> str:
        """Serve one stream until it ends. Returns why it ended."""
        async with self._channels.aio_channel(address, leader_options()) as channel:
            call = FleetStub(channel).Attend()
            outbox: asyncio.Queue[pb.NodeWord] = asyncio.Queue()
            offered = self._offer
            await call.write(pb.NodeWord(hello=self._hello()))
            speaking: asyncio.Task[None] | None = None
            try:
                async for order in call:
                    match order.WhichOneof("content"):
                        case "welcome" if speaking is None:
                            self._welcome(order.welcome.term, address)
                            self._outbox = outbox
                            self._attendant.on_welcome()
                            speaking = asyncio.create_task(speak(call, outbox))
                            if self._offer is not offered:
                                self._renew()
                        case "duties" if order.duties.term >= self.term:
                            kept = {job: duty for job, duty in self._duties.items() if job in order.duties.keeps}
                            self._duties = kept | {duty.job: duty for duty in order.duties.duties}
                            over = {over.job: over.result for over in order.duties.over}
                            self._attendant.on_duties(self._duties, over)
                        case "log":
                            self.say(pb.NodeWord(piece=await asyncio.to_thread(self._piece, order.log)))
                        case "end" if order.end.process == self._probes.process:
                            self._attendant.on_end()
                        case "examine":
                            self._answering(asyncio.create_task(self._examine(order.examine)))
            finally:
                self._outbox = None
                self._probes.close()
                if speaking is not None:
                    speaking.cancel()
                    await asyncio.gather(speaking, return_exceptions=True)
                call.cancel()
        return f"{address}: the leader ended the stream"

    def _hello(self) -> pb.NodeHello:
        site, offer = self._site, self._offer
        return pb.NodeHello(
            node=site.node,
            slots=offer.slots,
            labels=offer.labels,
            address=site.reach.address,
            lock=offer.lock,
            leave_ms=round(1000 * min(site.grace_s + SLACK_S + STOP_S, DAY_S)),
            term=self.term,
        )

    def _welcome(self, term: int, address: str) -> None:
        if term < self.term:
            raise codec.WireError(f"the leader's term {term} is older than term {self.term}, which was seen before")
        self.term, self._welcomed = term, True
        self._journal.write("attending_fleet", term=term, address=address)
        notify.ready(f"attends the fleet's leader at {address}")

    def _answering(self, task: asyncio.Task[None]) -> None:
        """Let the task answer a query beside the orders, which go on meanwhile."""
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _examine(self, query: pb.ExamineNode) -> None:
        found = await self._probes.answer(query)
        self.say(pb.NodeWord(examined=pb.Examined(number=query.number, document=json.dumps(found))))

    def _piece(self, query: pb.LogQuery) -> pb.LogPiece:
        """A piece of a log; an empty one with size -1 if the log is missing or cannot be read."""
        try:
            with acting(self._site.job_user if query.job else None):
                found = job_files.read(self._site.jobs_dir, query.job, query.log, query.offset)
        except OSError as error:
            self._journal.write("log_unreadable", job=query.job, log=query.log, because=str(error))
            found = job_files.LogPiece(b"", query.offset, -1)
        return pb.LogPiece(number=query.number, text=found.text, end=found.end, size=found.size)
