"""The leader's orders to this worker: generations, and whether its part in the job is over."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import NoReturn

from elastic.agent.worker import held_signals
from elastic.agent.worker.client import AgentClient
from elastic.agent.worker.node_notice import NodeNotice
from elastic.errors import ExitCode
from elastic.protocol import messages
from elastic.protocol.worker_state import Phase
from elastic.records.journal import Journal
from runtime.recovery.transfer.client import CopyClient
from runtime.script_end import exit_now
from runtime.worker.state_owner import SharedWorkerState

GENERATIONS_KEPT = 8
"""How many generations are kept; tokens of older ones prove nothing any more."""


class LeaderOrders:
    """`deliver` runs on the client's thread, everything else on the user's. Guarded by ``shared.changed``."""

    def __init__(self, shared: SharedWorkerState, asker: CopyClient, client: AgentClient, journal: Journal) -> None:
        self.invited = False
        """Whether the world has a place for this newcomer."""
        self.home = -1
        """The number that a leader has given this newcomer."""
        self.ended_round = (0, -1)
        """Generation and operation of the round that was over last, although this worker computed still."""
        self.ready = False
        """Whether this newcomer has rehearsed: it says so again to every leader, and after every loss."""
        self.hold = False
        """Whether a step of the members is to wait for this newcomer's copy from the first one on."""
        self._outdated = 0
        self.going: NodeNotice | None = None
        self.pointed: dict[messages.CheckpointComplete, Callable[[bool], None]] = {}
        """Unanswered word of a checkpoint -> the function to call with whether the pointer is there."""
        self.before_exit: Callable[[], None] = lambda: None
        """Called when this process is about to end by an order of the leader."""
        self.on_order: Callable[[], None] = lambda: None
        """Called behind each order, on the client's thread."""
        self._shared = shared
        self._asker = asker
        self._client = client
        self._journal = journal
        self._term = 0
        self._generations: dict[int, messages.Generation] = {}
        self._over: messages.Close | messages.Fence | messages.Release | None = None

    def deliver(self, order: messages.Order) -> None:
        """Take an order. Orders of an older leader's term are refused."""
        answer, holds = None, False
        with self._shared.changed:
            if order.term < self._term:
                return
            newer_leader = order.term > self._term
            self._term = order.term
            if newer_leader:  # the one before has perhaps not heard of a checkpoint
                for word in self.pointed:
                    self._client.send(word)
            match order:
                case messages.Publish(_, generation):
                    self._published(order, generation, newer_leader)
                case messages.Quiesce():
                    self._asker.abort()
                    self._shared.post(order)
                case messages.Invite():
                    self.invited = True
                    self._shared.changed.notify_all()
                case messages.Home(_, _, home):
                    self.home = home
                case messages.EndRound(_, _, generation, op):
                    self.ended_round = (generation, op)
                case messages.Pointed(_, worker_id, series, entry, holds):
                    answer = self.pointed.pop(messages.CheckpointComplete(worker_id, series, entry), None)
                case messages.Drain(over=True):
                    self.going = None
                case messages.Drain() as drain:
                    self._has_to_go(drain)
                case messages.Fence() | messages.Release() | messages.Close():
                    if self._over is None or isinstance(order, messages.Close):
                        self._over = order
                    self._asker.abort()
                    self._asker.abort_following()
                    self._shared.changed.notify_all()
        if answer is not None:
            answer(holds)
        self.on_order()

    def _published(self, order: messages.Publish, generation: messages.Generation, newer_leader: bool) -> None:
        if generation.kind is not messages.Kind.PLANNED:
            self._asker.abort()
            self._asker.abort_following(unless=generation.ids)
        self._generations[generation.number] = generation
        for number in sorted(self._generations)[:-GENERATIONS_KEPT]:
            del self._generations[number]
        before = self._shared.position.record
        after = self._shared.post(order)
        if self.ready and after.phase is Phase.FRESH and (newer_leader or before is not after.record):
            self._say_ready()

    def _has_to_go(self, drain: messages.Drain) -> None:
        notice = NodeNotice.begins(
            drain.left_ms / 1000, drain.because, drain.kind, drain.said_by, signalled=drain.signalled
        )
        if self.going is None or not self.going.is_repeated_by(notice):
            self.going = notice

    def too_slow(self) -> None:
        """Report another sign that the members train faster than this newcomer copies and catches up: after a few,
        training waits for it."""
        with self._shared.changed:
            self._outdated += 1
            self._say_ready()

    def say_ready(self) -> None:
        """Ask to be admitted, now and again when the members or the leader are other ones."""
        with self._shared.changed:
            self.ready = True
            self._say_ready()

    def _say_ready(self) -> None:
        me, newest = self._shared.position.me, self.newest.number
        self._client.send(messages.Ready(me, newest, self._outdated, self.hold))

    # -------------------------------------------------------------------------------------------- questions

    @property
    def newest(self) -> messages.Generation:
        """The newest generation that was announced, in effect or pending."""
        with self._shared.changed:
            return self._generations[max(self._generations)]

    def planned(self, numbers: Iterable[int]) -> bool:
        """Whether these generations are known, and nobody was lost when they began."""
        with self._shared.changed:
            found = [self._generations.get(number) for number in numbers]
        return all(one is not None and one.kind is messages.Kind.PLANNED for one in found)

    def token_of(self, generation: int) -> str | None:
        record = self._generations.get(generation)
        return record.token if record else None

    @property
    def over(self) -> bool:
        """Whether `leave_if_over` would end this process."""
        return self._over is not None or self._shared.position.phase is Phase.GONE

    @property
    def complete(self) -> bool:
        """Whether the leader says that the job is complete: one member has left the loop, so all have every result."""
        return isinstance(self._over, messages.Close) and self._over.exit_code == 0

    def leave_if_over(self) -> None:
        """End this process if it has no part in the job any more. No user code runs after that, except the script's
        handler of SIGTERM if that signal is why the worker leaves.

        Not to be called under the lock: the goodbye needs the client's thread.
        """
        over = self._over
        if isinstance(over, messages.Close | messages.Release) and self.going is not None and self.going.signalled:
            held_signals.call_handler()
        if isinstance(over, messages.Close):
            if over.exit_code:
                print(f"elastic: {self._shared.position.me} stops: {over.because}", file=sys.stderr)
            self.exit(over.exit_code)
        if isinstance(over, messages.Release):
            self.exit(ExitCode.DONE)
        if isinstance(over, messages.Fence) or self._shared.position.phase is Phase.GONE:
            because = over.because if isinstance(over, messages.Fence) else self._shared.position.because
            print(f"elastic: {self._shared.position.me} is fenced: {because}", file=sys.stderr)
            self.exit(ExitCode.FENCED)

    def give_way(self, because: str) -> NoReturn:
        """End this process: its successor in the slot can do what this one cannot."""
        print(f"elastic: {self._shared.position.me} gives way to a new process: {because}", file=sys.stderr)
        self.exit(ExitCode.FENCED)

    def exit(self, code: int) -> NoReturn:
        self.before_exit()
        self._journal.write("exit", code=int(code))
        self._client.close()
        exit_now(code)
