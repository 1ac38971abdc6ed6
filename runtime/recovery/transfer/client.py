"""A worker's questions to others over copy connections; the answering side is donor.py."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any, cast

import torch

from elastic.protocol.messages import Generation, Member
from runtime.allreduce.reduction.partial_sum import Json, Partial, parse_partial
from runtime.allreduce.reduction.schedule import DTYPES
from runtime.allreduce.ring.ring import Peer
from runtime.allreduce.ring.tls import PLAIN, TlsContexts
from runtime.recovery.state.training_state import Carrier
from runtime.recovery.transfer.connection import CopyConnection, CopyFailed, open_copy
from runtime.recovery.transfer.result_log import LoggedResult
from runtime.session import Copy, JoinMeta, Op, OpKind

CONNECT_S = 5.0
ANSWER_S = 20.0
"""Seconds after which a silent member is not asked any further; a member answers "later" much earlier."""


class CopyClient:
    """Asks one question at a time, on the user's thread; any thread may abort it.

    Most questions have a connection each. A newcomer's connection to its donor lasts from the copy until the newcomer
    has caught up, also across generations that this donor survives.
    """

    def __init__(self, job: str, worker_id: str, seal: TlsContexts = PLAIN) -> None:
        self.job = job
        self._seal = seal
        self.worker_id = worker_id
        self._asking: CopyConnection | None = None
        self._following: tuple[str, CopyConnection] | None = None
        self._received_before = 0

    def abort(self) -> None:
        """Make a question under way raise CopyFailed: its generation is over, and its member may be frozen."""
        asking = self._asking
        if asking is not None:
            asking.abort()

    def abort_following(self, unless: Collection[str] = ()) -> None:
        """Abort the lasting connection if its donor is none of these."""
        following = self._following
        if following is not None and following[0] not in unless:
            following[1].abort()

    @property
    def received(self) -> int:
        """Bytes of all answers so far. Any thread."""
        following, asking = self._following, self._asking  # the user's thread may leave both in this moment
        received = following[1].received if following is not None else 0
        return self._received_before + received + (asking.received if asking is not None else 0)

    @property
    def following(self) -> CopyConnection | None:
        return self._following[1] if self._following else None

    @property
    def donor(self) -> str:
        """Worker id of the present donor; "": there is none."""
        return self._following[0] if self._following else ""

    def follow(self, member: Member, generation: Generation) -> CopyConnection:
        """A lasting connection to this donor. Raises CopyFailed."""
        connection = self.connect(member, generation)
        self._following = (member.worker_id, connection)
        self._asking = None
        return connection

    def unfollow(self) -> None:
        if self._following is not None:
            self._following[1].close()
            self._received_before += self._following[1].received
            self._following = None

    def connect(self, member: Member, generation: Generation) -> CopyConnection:
        """A connection for one question. Raises CopyFailed."""
        connection = self.help(member, generation)
        self._received_before += self._asking.received if self._asking else 0
        self._asking = connection
        return connection

    def help(self, member: Member, generation: Generation) -> CopyConnection:
        """A connection that its caller aborts. Any thread. Raises CopyFailed."""
        return open_copy(
            Peer(member.worker_id, member.host, member.port),
            job=self.job,
            generation=generation.number,
            me=self.worker_id,
            plan=generation.digest(),
            token=generation.token,
            deadline_s=CONNECT_S,
            seal=self._seal,
        )

    def meta(self, generation: Generation) -> JoinMeta | None:
        """Ask the members in rank order where the loop stands; None if no member can say yet."""
        for _, answer, _ in self._answers(generation, {"want": "meta"}):
            if "meta" in answer:
                with suppress(CopyFailed):  # another member may say it in order
                    return parse_meta(answer["meta"])
        return None

    def initial(self, generation: Generation, digest: str, carrier: Carrier) -> str | None:
        """Copy the initial state with this digest into the carrier. Returns the source, or None."""
        for source, answer, blobs in self._answers(generation, {"want": "initial", "digest": digest}):
            if isinstance(header := answer.get("state"), dict):
                carrier.load(header, blobs)
                return source
        return None

    def registered(self, generation: Generation, name: str) -> tuple[dict[str, Json], list[torch.Tensor]] | None:
        """A copy of one registered object, which has only this one; None if no member has it yet."""
        for _, answer, blobs in self._answers(generation, {"want": "object", "name": name}):
            if isinstance(header := answer.get("state"), dict):
                return header, blobs
        return None

    def _answers(
        self, generation: Generation, question: dict[str, Json]
    ) -> Iterator[tuple[str, dict[str, Json], list[torch.Tensor]]]:
        """(worker id, header, tensors) of the answer of each other member that gives one, in rank order."""
        for member in generation.members:
            if member.worker_id == self.worker_id:
                continue
            try:
                with closing(self.connect(member, generation)) as connection:
                    connection.send(question)
                    answer, blobs = connection.receive()
            except CopyFailed:
                continue
            yield member.worker_id, answer, blobs

    def result(self, member: Member, generation: Generation, op: int) -> Partial:
        """The result of the operation that this worker is still in. Raises CopyFailed."""
        with closing(self.connect(member, generation)) as connection:
            connection.send({"want": "result", "op": op})
            answer, blobs = connection.receive()
        return parse_result(answer, blobs)


@contextmanager
def _well_formed(what: str) -> Iterator[None]:
    """Raise CopyFailed for errors in the block, which reads what a member has sent."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CopyFailed(f"malformed {what}: {error!r:.200}") from error


def parse_meta(meta: Json) -> JoinMeta:
    """Parse the place of the job. Raises CopyFailed."""
    with _well_formed("answer about where the job stands"):
        found = JoinMeta(**cast(dict[str, Any], meta))
        numbers = (found.epoch, found.step, found.epoch_start)
        tables = (found.state, found.once, found.shared, found.data or {}, found.early, found.values)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"{numbers} are no places in a job")
        if not all(isinstance(table, dict) for table in tables):
            raise TypeError("a table is none")
        if not isinstance(found.stop, str | None):
            raise TypeError("why the job stops is no text")
        if not all(isinstance(said, list) and len(said) == 2 and type(said[0]) is int for said in found.early.values()):
            raise TypeError("what was called before a pass is malformed")
        return found


def parse_state(answer: dict[str, Json]) -> tuple[int, Copy]:
    """(number of the operation whose state is sent, the copy without its tensors). Raises CopyFailed."""
    number, header, values, early, stop = (answer.get(key) for key in ("op", "state", "values", "early", "stop"))
    if type(number) is not int or not (
        isinstance(header, dict)
        and isinstance(values, dict)
        and isinstance(early, dict)
        and isinstance(stop, str | None)
    ):
        raise CopyFailed("malformed answer about a state")
    return number, Copy(parse_op(answer.get("about")), header, (), values, early, stop)


def parse_result(answer: dict[str, Json], blobs: Sequence[torch.Tensor]) -> Partial:
    """Parse a result. Raises CopyFailed if the answer is a refusal or does not fit its tensors."""
    meta, groups = answer.get("result"), answer.get("groups")
    if not isinstance(meta, dict) or not isinstance(groups, dict) or len(groups) != len(blobs):
        raise CopyFailed(f"no result came: {answer.get('refused', 'malformed answer')}")
    flats: dict[str, torch.Tensor] = {}
    for (name, size), blob in zip(sorted(groups.items()), blobs, strict=True):
        dtype = DTYPES.get(name)
        if dtype is None or type(size) is not int or blob.numel() != size * dtype.itemsize:
            raise CopyFailed(f"group {name!r} of a result has {blob.numel()} bytes for {str(size)[:40]} elements")
        flats[name] = blob.view(dtype)
    with _well_formed("result"):
        return replace(parse_partial(meta), flats=flats)


def parse_results(first: int, answer: dict[str, Json], blobs: Sequence[torch.Tensor]) -> list[LoggedResult]:
    """The results of operations ``first``, ``first + 1``, ... Raises CopyFailed as parse_result does."""
    entries: list[LoggedResult] = []
    at = 0
    with _well_formed("list of results"):
        for part in cast(list[dict[str, Json]], answer["results"]):
            count = len(cast(dict[str, Json], part["groups"]))
            result = parse_result(part, blobs[at : at + count])
            fingerprint = cast(dict[str, str], part["fingerprint"])
            if not isinstance(fingerprint, dict):
                raise TypeError("a fingerprint is no object")
            entries.append(LoggedResult(first + len(entries), parse_op(part["about"]), fingerprint, result))
            at += count
    return entries


def parse_op(about: Json) -> Op:
    """Parse an operation. Raises CopyFailed."""
    with _well_formed("operation"):
        fields = cast(dict[str, Json], about)
        numbers = {name: fields[name] for name in ("units", "epoch", "step", "pass_no")}
        if not all(type(number) is int for number in numbers.values()) or not isinstance(fields["label"], str):
            raise TypeError(f"{about!r:.100} is no operation")
        kind, early = OpKind(cast(str, fields["kind"])), fields["early"] is True
        return Op(kind=kind, label=fields["label"], early=early, **cast(dict[str, int], numbers))
