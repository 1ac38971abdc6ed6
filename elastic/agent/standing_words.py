"""What every new leader has to hear from an agent about its workers.

A leader learns from records in the store and from agents; it inherits nothing from its predecessor. So an agent keeps,
for each living worker, its announcement brought up to date by everything the worker has said since, and the words
that stay true: a wish to drain, being finished, a death, a slot given up. Answers to one leader's questions (reports)
are not kept; the next leader asks again.

Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from elastic.errors import ExitCode
from elastic.protocol import messages

DEAD_KEPT = 1024
"""How many deaths a new leader is told. It asks about members of its last few generations only."""

RECORDS_KEPT = 16


class StandingWords:
    """What every new leader has to hear about one agent's workers."""

    def __init__(self) -> None:
        self._announced: dict[str, messages.Announce] = {}
        self._lasting: dict[str, dict[type, messages.Word]] = {}
        self._dead: deque[messages.WorkerDead] = deque(maxlen=DEAD_KEPT)
        self._last_words: deque[messages.Word] = deque(maxlen=DEAD_KEPT)
        """Words of dead workers: Finished and Left, without which their end looks like a loss; Unreadable, without
        which the same entry would be chosen again; and Failed, if it ends the job, with which no leader may go on."""
        self._given_up: dict[int, messages.SlotGivenUp] = {}
        self._records: dict[int, messages.Generation] = {}
        self._entered = 0

    def heard(self, word: messages.Word) -> None:
        """Take a word of a worker, or of the agent about a worker."""
        match word:
            case messages.Announce():
                self._announced[word.worker_id] = word
            case messages.WorkerDead():
                announced = self._announced.pop(word.worker_id, None)
                said = self._lasting.pop(word.worker_id, {})
                self._last_words.extend(
                    said[kind]
                    for kind in (messages.Finished, messages.Left, messages.Unreadable)
                    if announced and kind in said
                )
                match said.get(messages.Failed):
                    case messages.Failed(exit_code=code) as failed if code != ExitCode.SCRIPT_FAILED:
                        self._last_words.append(failed)
                self._dead.append(word)
            case messages.DrainOver():
                self._lasting.get(word.worker_id, {}).pop(messages.DrainWish, None)
            case messages.SlotGivenUp():
                self._given_up[word.slot] = word
            case (
                messages.DrainWish()
                | messages.Left()
                | messages.Finished()
                | messages.Failed()
                | messages.Unreadable()
                | messages.WorkerFrozen()
            ):
                self._lasting.setdefault(word.worker_id, {})[type(word)] = word
            case _:
                self._update(word)

    def thawed(self, worker_id: str) -> None:
        """The worker beats again, so a later leader need not hear that it was frozen."""
        self._lasting.get(worker_id, {}).pop(messages.WorkerFrozen, None)

    def invited(self, worker_id: str) -> None:
        """A leader has invited the worker, so a later leader need not invite another one."""
        self._note(worker_id, invited=True)

    def at_home(self, worker_id: str, home: int) -> None:
        """A leader has given the worker this number, which it keeps under later leaders."""
        self._note(worker_id, home=home)

    def _note(self, worker_id: str, **changes: Any) -> None:
        if (known := self._announced.get(worker_id)) is not None:
            self._announced[worker_id] = replace(known, **changes)

    def published(self, generation: messages.Generation) -> None:
        """Note a record that a leader has published to the workers."""
        self._records[generation.number] = generation
        for number in sorted(self._records)[:-RECORDS_KEPT]:
            if number != self._entered:  # many may be planned before one of them takes effect
                del self._records[number]

    def shows(self, word: messages.Progress) -> bool:
        """Whether a worker's word shows that the ring of its generation is up: an operation was completed in it."""
        record = self._records.get(word.generation)
        return record is not None and record.kind is not messages.Kind.PLANNED and word.reduced > record.plan.op

    @property
    def newest(self) -> int:
        """The highest generation that workers of this agent may have entered, or 0."""
        return max([*self._records, *(word.entered for word in self._announced.values())], default=0)

    @property
    def leader(self) -> str:
        """The worker of rank 0 in the newest generation that a worker of this agent has entered, or "".

        Before that, rank 0 of the newest record: its script may print before the agent hears that it has entered.
        """
        record = self._records.get(self._entered or max(self._records, default=0))
        return record.ids[0] if record and record.members else ""

    def has_others(self, node: str) -> bool:
        """Whether the newest generation that a worker of this agent has entered has members on other nodes."""
        record = self._records.get(self._entered)
        return record is not None and any(member.node != node for member in record.members)

    def words(self) -> tuple[messages.Word, ...]:
        """Everything that a new leader has to be told, in an order that it can process."""
        lasting = [word for words in self._lasting.values() for word in words.values()]
        return (*self._announced.values(), *lasting, *self._last_words, *self._dead, *self._given_up.values())

    def _update(self, word: messages.Word) -> None:
        worker_id = getattr(word, "worker_id", "")
        known = self._announced.get(worker_id)
        if known is None:
            return
        match word:
            case messages.Progress(_, generation, reduced):
                known = replace(known, entered=max(known.entered, generation), reduced=max(known.reduced, reduced))
            case messages.RingUp(_, generation) if not self._is_pending(generation, known):
                known = replace(
                    known, entered=max(known.entered, generation), ring=messages.RingState.LIVE, ready=False
                )
            case messages.RingBrokenReport(_, generation) | messages.BuildFailedReport(_, generation) if (
                not self._is_pending(generation, known)
            ):
                known = replace(known, ring=messages.RingState.ABORTED)
            case messages.Report():
                ring = messages.RingState.ABORTED if word.entered else known.ring
                known = replace(known, entered=word.entered, reduced=max(known.reduced, word.reduced), ring=ring)
            case messages.Ready():
                known = replace(known, ready=True)
        self._announced[worker_id] = known
        self._entered = max(self._entered, known.entered)

    def _is_pending(self, generation: int, known: messages.Announce) -> bool:
        """Whether the generation is planned and not in effect; its ring is built before Progress tells of it."""
        record = self._records.get(generation)
        return record is not None and record.kind is messages.Kind.PLANNED and generation > known.entered
