"""The parameters in pieces, among the workers: updates are pushed to the owners, who answer with the new values.

    {"want": "store_push", "phase", "worker", "number", "pieces", "bases", "age_s"} + differences
        -> {"weights", "marks"} + values; {"later": why}
    {"want": "store_mirror", "phase", "generation", "worker", "number", "pieces", "weights", "marks"} + differences
        -> {"stale": pieces that have to be copied first}; {"later": why}
    {"want": "store_copy", "phase", "generation", "pieces", "marks", "applied"} + three vectors of each piece
        -> {}; {"later": why}

piece_copies.py decides; here are the threads. Pushes are heard on threads of the listener, and one at a time is
committed. A thread of the store follows the generations, and brings new mirrors into step.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import torch

from runtime.allreduce.reduction.partial_sum import Json
from runtime.asynchronous.member_calls import received
from runtime.asynchronous.piece_copies import AskLater, HeldPiece, Judged, LostUpdates, PieceCopies
from runtime.asynchronous.update_rules import PieceState
from runtime.recovery.transfer.connection import CopyConnection, CopyFailed
from runtime.script_end import TorchThread

VECTORS = 3
"""A copy of a piece consists of so many vectors: values, momentum, pending differences."""
POLL_S = 0.05
"""Seconds between two looks at the list of members, and before a question is asked again."""

Answer = tuple[dict[str, Json], list[torch.Tensor]]


class Asks(Protocol):
    """See MemberCalls."""

    def ask(self, channel: str, worker: str, request: dict[str, Json], tensors: Sequence[torch.Tensor]) -> Answer: ...
    def keep(self, members: Sequence[str]) -> None: ...


class MembersNow(NamedTuple):
    """A generation and its members."""

    generation: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PieceUpdate:
    """What a worker brings. number: as of PieceCopies.judge. bases: piece -> the version from which it
    began. age_s: seconds since then. differences: piece -> outer minus own parameters, float32, 1-D."""

    number: int
    bases: Mapping[int, int]
    age_s: float
    differences: Mapping[int, torch.Tensor]


@dataclass(slots=True)
class Pushed:
    """What has become of it. weights: piece -> what it counted; None: unknown, as the answer to it was lost. marks:
    piece -> lineage and version after it. values: piece -> the parameters now."""

    weights: dict[int, float | None]
    marks: dict[int, tuple[int, int]]
    values: dict[int, torch.Tensor]


class ParameterStore:
    """The store as one worker has it. push() is for the thread of the script."""

    def __init__(
        self,
        me: str,
        copies: PieceCopies,
        calls: Asks | None,
        members: Callable[[], MembersNow],
        on_lost: Callable[[Sequence[LostUpdates]], None],
    ) -> None:
        """calls: None: there never is another worker. members: those of now. on_lost: called when updates may be lost,
        on the store's thread."""
        self._me, self._copies, self._calls, self._members = me, copies, calls, members
        self._on_lost = on_lost
        self._lock = threading.Condition()
        """Guards the copies; nothing is sent under it."""
        self._committing = threading.Lock()
        """Held while an update is committed: owned pieces change under both locks."""
        self._mirrors_checked = True
        self._stopping = threading.Event()

    def begin(self, phase: int, roster: Sequence[str], start: Sequence[PieceState], *, in_step: bool = True) -> None:
        """All workers begin a phase with the same pieces. start: must not change before the next phase. in_step: as of
        PieceCopies.begin."""
        with self._committing, self._lock:
            self._copies.begin(phase, roster, start, in_step=in_step)
        self._follow(self._members())

    def follow_members(self) -> None:
        """Begin to follow the generations, on a thread of the store."""
        TorchThread(target=self._run, name="store").start()

    def end_phase(self) -> None:
        """All living workers have brought their updates. Nothing is committed any more, also for dead ones."""
        with self._committing, self._lock:
            self._copies.closed = True

    def owned(self) -> dict[int, HeldPiece]:
        """Copies of what this worker owns now, behind the end of the phase."""
        self._follow(self._members())
        with self._lock:
            return {piece: self._copies.own(piece) for piece in self._copies.owned()}

    def pause(self) -> None:
        """The phase is over for all: until the next one nobody asks for the pieces, whoever comes or goes."""
        with self._lock:
            self._copies.phase = -1

    def close(self) -> None:
        self._stopping.set()

    # ------------------------------------------------------------------------------------- the script's thread

    def push(self, update: PieceUpdate, still: Callable[[], object]) -> Pushed:
        """Bring an update to the owners of its pieces, whoever they are by then. still: called before each attempt; it
        ends the process if its part in the job is over."""
        found = Pushed({}, {}, {})
        left = set(update.bases)
        with self._lock:
            phase = self._copies.phase
        while left:
            still()
            before, owners = len(left), self._owners(left)
            for owner, pieces in owners.items():
                left -= self._push_to(owner, phase, pieces, update, found)
            if len(left) == before:
                with self._lock:
                    self._lock.wait(POLL_S)
        return found

    def _owners(self, pieces: Iterable[int]) -> dict[str, list[int]]:
        """Owner -> those of the pieces that it owns now; {}: it is not known yet."""
        owners: dict[str, list[int]] = {}
        with self._lock, contextlib.suppress(AskLater):
            for piece in sorted(pieces):
                owners.setdefault(self._copies.holders(piece).owner, []).append(piece)
        return owners

    def _push_to(self, owner: str, phase: int, pieces: list[int], update: PieceUpdate, found: Pushed) -> set[int]:
        """Returns the pieces of which it is known now what has become of them."""
        about: dict[str, Json] = {
            "want": "store_push",
            "phase": phase,
            "worker": self._me,
            "number": update.number,
            "pieces": list[Json](pieces),
            "bases": [update.bases[piece] for piece in pieces],
            "age_s": update.age_s,
        }
        differences = [update.differences[piece] for piece in pieces]
        try:
            if owner == self._me or self._calls is None:
                answer, values = self._answer_push(about, differences)
            else:
                answer, values = self._calls.ask("push", owner, about, differences)
        except CopyFailed:
            return set()
        weights, marks = answer.get("weights"), answer.get("marks")
        if not (isinstance(weights, list) and isinstance(marks, list)):
            return set()  # later
        if not len(weights) == len(marks) == len(pieces) == len(values):
            raise CopyFailed(f"malformed answer of {owner} to an update")
        for piece, weight, mark, value in zip(pieces, weights, marks, values, strict=True):
            lineage, version = cast(list[int], mark)
            found.weights[piece] = None if weight is None else float(cast(float, weight))
            found.marks[piece], found.values[piece] = (lineage, version), value
        return set(pieces)

    # -------------------------------------------------------------------------------------------- the owner

    def _answer_push(self, request: Mapping[str, Json], differences: Sequence[torch.Tensor]) -> Answer:
        pieces = _numbers(request.get("pieces"))
        try:
            judged = self._commit(request, pieces, dict(zip(pieces, differences, strict=True)))
            with self._lock:
                held = [self._copies.own(piece) for piece in pieces]
                answer: dict[str, Json] = {
                    "weights": [one.weight for one in judged],
                    "marks": [list[Json](one.mark()) for one in held],
                }
                return answer, [one.state.values.clone() for one in held]
        except AskLater as later:
            return {"later": str(later)}, []

    def _commit(
        self, request: Mapping[str, Json], pieces: Sequence[int], differences: Mapping[int, torch.Tensor]
    ) -> list[Judged]:
        """Have an update applied by the mirrors, and then here. Raises AskLater."""
        worker, number = str(request["worker"]), cast(int, request["number"])
        with self._committing:
            while True:
                with self._lock:
                    self._copies.check(cast(int, request["phase"]))
                    generation = self._copies.generation
                    bases, age_s = _numbers(request.get("bases")), cast(float, request["age_s"])
                    judged = self._copies.judge(worker, number, pieces, bases, age_s)
                if self._mirrored(generation, worker, number, judged, differences):
                    with self._lock:
                        self._copies.commit(worker, number, judged, differences)
                    return judged
                if self._stopping.is_set():
                    raise AskLater(f"{self._me} has left")
                with self._lock:
                    if self._copies.generation == generation:
                        self._lock.wait(POLL_S)

    def _mirrored(
        self,
        generation: int,
        worker: str,
        number: int,
        judged: Sequence[Judged],
        differences: Mapping[int, torch.Tensor],
    ) -> bool:
        """Whether all mirrors have applied it. False: one is gone, or knows another generation."""
        mirrors: dict[str, list[Judged]] = {}
        for one in judged:
            if one.mirror and one.weight is not None:
                mirrors.setdefault(one.mirror, []).append(one)
        for mirror, part in mirrors.items():
            about = {**self._place(generation), "want": "store_mirror", "worker": worker, "number": number}
            about["pieces"] = [one.piece for one in part]
            about["weights"] = [one.weight for one in part]
            about["marks"] = [list[Json](one.mark) for one in part]
            if not self._in_step(mirror, about, [differences[one.piece] for one in part]):
                return False
        return True

    def _place(self, generation: int) -> dict[str, Json]:
        return {"phase": self._copies.phase, "generation": generation}

    def _in_step(self, mirror: str, about: dict[str, Json], differences: list[torch.Tensor]) -> bool:
        """Tell a mirror what `about` says, after copies of the pieces that it lacks. The caller holds `_committing`, so
        no owned piece changes."""
        assert self._calls is not None
        try:
            while True:
                answer, _ = self._calls.ask("mirror", mirror, about, differences)
                stale = answer.get("stale")
                if not isinstance(stale, list):
                    return False
                for piece in _numbers(stale):
                    with self._lock:
                        held = self._copies.own(piece)
                    copy: dict[str, Json] = {**about, "want": "store_copy", "pieces": [piece]}
                    copy |= {"marks": [list[Json](held.mark())], "applied": [dict[str, Json](held.applied)]}
                    state = held.state
                    said, _ = self._calls.ask("mirror", mirror, copy, [state.values, state.momentum, state.pending])
                    if "later" in said:
                        return False
                if not stale:
                    return True
        except (CopyFailed, AskLater):
            return False

    # ------------------------------------------------------------------------------------ requests of others

    def answer(self, connection: CopyConnection, request: Mapping[str, Json]) -> bool:
        """Answer, unless the request is another one. Threads of the listener. Raises CopyFailed."""
        want = request.get("want")
        if want not in ("store_push", "store_mirror", "store_copy"):
            return False
        numbers = {"phase": int, "number": int, "generation": int, "worker": str, "age_s": float}
        if not all(isinstance(request.get(name, kind()), kind) for name, kind in numbers.items()):
            raise CopyFailed(f"malformed {want}")
        pieces = _numbers(request.get("pieces"))
        with self._lock:
            sizes = self._copies.sizes
        if not all(0 <= piece < len(sizes) for piece in pieces) or len({*pieces}) < len(pieces):
            raise CopyFailed(f"{want} of pieces that there are not, or of one twice")
        weights = request.get("weights")
        if want == "store_copy":
            expected = [sizes[piece] for piece in pieces for _ in range(VECTORS)]
        elif isinstance(weights, list) and len(weights) == len(pieces):
            expected = [sizes[piece] for piece, weight in zip(pieces, weights, strict=True) if weight is not None]
        else:
            expected = [sizes[piece] for piece in pieces]
        tensors = received(connection, expected)
        try:
            if want == "store_push":
                answer, values = self._answer_push(request, tensors)
            else:
                answer, values = self._take(str(want), request, pieces, tensors), []
        except (KeyError, ValueError, TypeError) as error:
            raise CopyFailed(f"malformed {want}: {error!r:.200}") from error
        connection.send(answer, [value.view(torch.uint8) for value in values])
        return True

    def _take(
        self, want: str, request: Mapping[str, Json], pieces: Sequence[int], tensors: Sequence[torch.Tensor]
    ) -> dict[str, Json]:
        """As a mirror."""
        marks = [(lineage, version) for lineage, version in cast(list[list[int]], request["marks"])]
        with self._lock:
            try:
                self._copies.check(cast(int, request["phase"]), cast(int, request["generation"]))
                if want == "store_copy":
                    for number, piece in enumerate(pieces):
                        lineage, version = marks[number]
                        applied = cast(list[dict[str, int]], request["applied"])[number]
                        values, momentum, pending = tensors[VECTORS * number : VECTORS * (number + 1)]
                        state = PieceState(values, momentum, pending, version)
                        self._copies.take_copy(piece, HeldPiece(state, lineage, dict(applied)))
                    return {}
                weights = cast(list[float | None], request["weights"])
                judged = [Judged(*one) for one in zip(pieces, weights, [""] * len(pieces), marks, strict=True)]
                differences = dict(zip((one.piece for one in judged if one.weight is not None), tensors, strict=True))
                worker, number = str(request["worker"]), cast(int, request["number"])
                return {"stale": list[Json](self._copies.mirror(worker, number, judged, differences))}
            except AskLater as later:
                return {"later": str(later)}

    # ---------------------------------------------------------------------------------------- generations

    def _run(self) -> None:
        while not self._stopping.wait(POLL_S):
            self.look()

    def look(self) -> None:
        """Follow the members, and bring new mirrors into step if no update is committed just now."""
        self._follow(self._members())
        if not self._mirrors_checked and self._committing.acquire(timeout=POLL_S):
            try:
                self._check_mirrors()
            finally:
                self._committing.release()

    def _follow(self, now: MembersNow) -> None:
        """Enter the generation, if it is another one."""
        if self._me not in now.members:
            return
        with self._lock:
            if self._copies.phase < 0 or self._copies.generation >= now.generation:
                return
            lost = self._copies.enter(now.generation, now.members)
            self._mirrors_checked = False
            self._lock.notify_all()
        if self._calls is not None:
            self._calls.keep(now.members)
        if lost:
            self._on_lost(lost)

    def _check_mirrors(self) -> None:
        """Bring the mirrors into step, also of pieces that get no updates now."""
        with self._lock:
            generation = self._copies.generation
            judged = [
                Judged(piece, None, self._copies.holders(piece).mirror, self._copies.own(piece).mark())
                for piece in self._copies.owned()
            ]
        mirrors: dict[str, list[Judged]] = {}
        for one in judged:
            if one.mirror:
                mirrors.setdefault(one.mirror, []).append(one)
        done = True
        for mirror, part in mirrors.items():
            about: dict[str, Json] = {**self._place(generation), "want": "store_mirror", "worker": "", "number": 0}
            about |= {"pieces": [one.piece for one in part], "weights": [None] * len(part)}
            about["marks"] = [list[Json](one.mark) for one in part]
            done &= self._in_step(mirror, about, [])
        with self._lock:
            self._mirrors_checked = done and self._copies.generation == generation


def _numbers(said: Json) -> list[int]:
    """Raises CopyFailed for anything but a list of integers."""
    if not isinstance(said, list) or not all(type(one) is int for one in said):
        raise CopyFailed("a list of numbers is none")
    return cast(list[int], said)
