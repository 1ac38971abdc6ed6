"""A fleet's documents in the store: read by every replica, written by the leader under its term."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from elastic.checkpoints.naming import PERIODIC
from elastic.config import JobSpec, check_name
from elastic.errors import CompareFailed, ConfigError
from elastic.fleet.documents import (
    FleetJob,
    FleetState,
    Grant,
    Grants,
    Placement,
    Quota,
    Result,
    Size,
    Submission,
    Wish,
)
from elastic.security.roles import Caller
from elastic.store.base import CreateRevision, Item, ModRevision, Prefix, Put, Store
from elastic.store.election import CALL_S, Candidate
from elastic.wire import codec

NAME = ".fleet"
"""The name under which the fleet's leader is elected; no job can have it."""

ROOT = f"/elastic/{NAME}/"
COUNT = f"{ROOT}count"

ENDED_KEPT = 100
"""How many ended jobs the fleet remembers: those that ended last."""

_NEEDED = ("jobs/", "placements/", "sizes/", "grants/", "results/")
"""What has to be read of a job before anything is decided about it."""

T = TypeVar("T")


def read(store: Store) -> tuple[FleetState, int]:
    """All documents, and the revision at which they were read."""
    listing = store.prefix(ROOT, timeout_s=CALL_S)
    items = {item.key.removeprefix(ROOT): item for item in listing.items}
    unread: dict[str, str] = {}
    placements, results = _values(items, "placements/", Placement, unread), _values(items, "results/", Result, unread)
    ended = {name: items[f"results/{name}"].create_revision for name in results}
    sizes = _values(items, "sizes/", Size, unread)
    grants = _values(items, "grants/", Grants, unread)
    submissions = _values(items, "jobs/", Submission, unread)
    left_out: dict[str, frozenset[str]] = {}
    for name in {key.partition("/")[2] for key in unread if key.startswith(_NEEDED)} - results.keys():
        granted = grants.get(name, Grants(())).grants
        left_out[name] = frozenset(placements.get(name, Placement(())).slots) | {grant.node for grant in granted}
    owners = _values(items, "owners/", Caller, unread)
    stops, cordons = _wishes(items, "stops/", unread), _wishes(items, "cordons/", unread)
    quotas = _values(items, "quotas/", Quota, unread)
    jobs = [
        FleetJob(
            submission,
            placements.get(name),
            stops.get(name),
            results.get(name),
            ended.get(name, 0),
            sizes.get(name),
            grants[name].grants if name in grants else (),
            owners.get(name),
        )
        for name, submission in submissions.items()
        if name not in left_out  # neither placed, moved nor run again by mistake
    ]
    jobs.sort(key=lambda job: job.submission.number)
    try:
        _count(items.get("count"))
    except ConfigError as error:
        unread["count"] = str(error)
    return FleetState(tuple(jobs), cordons, quotas, unread, left_out), listing.revision


def _count(item: Item | None) -> int:
    """How many jobs were ever submitted. Raises ConfigError for a value that this program has not written."""
    if item is None:
        return 0
    if not item.value.isdigit():
        raise ConfigError(
            f"{COUNT} in etcd is {item.value[:64]!r} and not a number, so no job can be submitted; write the largest "
            "number of any job so far there"
        )
    return int(item.value)


def _values(items: Mapping[str, Item], prefix: str, kind: type[T], unread: dict[str, str]) -> dict[str, T]:
    """What follows the prefix -> the document. unread: gets the documents that cannot be read: key -> why."""
    values: dict[str, T] = {}
    for key, item in items.items():
        if key.startswith(prefix):
            try:
                values[key.removeprefix(prefix)] = codec.from_json(kind, item.value)
            except (codec.WireError, ConfigError) as error:
                unread[key] = str(error)
    return values


def _wishes(items: Mapping[str, Item], prefix: str, unread: dict[str, str]) -> dict[str, Wish]:
    """The wishes below the prefix. A wish counts also if its reason cannot be read."""
    wishes = _values(items, prefix, Wish, unread)
    dark = {key: because for key, because in unread.items() if key.startswith(prefix)}
    return wishes | {key.removeprefix(prefix): Wish(f"cannot be read: {because}") for key, because in dark.items()}


def end(store: Store, job: str, result: Result) -> None:
    """Write how a job ended, unless that is known already. Any replica may do this: the job's own leader has written
    the result itself."""
    key = f"{ROOT}results/{job}"
    store.txn((CreateRevision(key, 0),), (Put(key, _result(result)),), timeout_s=CALL_S)


def _result(result: Result) -> bytes:
    return codec.to_json(replace(result, because=codec.cut(result.because)))


def _wish(because: str, *, preempts: bool = False) -> bytes:
    return codec.to_json(Wish(codec.cut(because), preempts))


class Registry:
    """Writes documents, for the fleet's leader. candidate: the fleet's, elected. Each method may raise the errors of
    `Candidate.write`; after StoreUnavailable it may be called again."""

    def __init__(self, store: Store, candidate: Candidate) -> None:
        self._store = store
        self._candidate = candidate

    def submit(
        self,
        spec: JobSpec,
        before: Submission | None = None,
        resume: str = "",
        token: str = "",
        owner: Caller | None = None,
        identity: str = "",
    ) -> str:
        """Write a new job. Returns its name. before, resume: an earlier job, and the checkpoint of it from which the
        new job goes on. token: of the request; if it has made a job already, that job's name is returned. identity: of
        an earlier job of another fleet, whose checkpoints are at the place of this job's. Raises ConfigError if the
        name is too long for a number, the count of jobs cannot be read, or a job with these checkpoints is not over."""
        item = self._store.get(COUNT, timeout_s=CALL_S)
        if made := self._made(lambda made: made.token == token) if token else "":
            return made
        if before is not None:
            state, _ = read(self._store)
            if (job := state.writes(before.series)) is not None:
                because = f"{job.name} has the checkpoints of {before.spec.name} and is not over; stop it first"
                raise ConfigError(because)
            if unread := unread_alike(state, before.series):
                raise ConfigError(f"{unread[0]} may have the checkpoints of {before.spec.name}, and cannot be read")
        asked = Submission(spec, 0, "", identity, resume, int(bool(identity)), token)
        return self._submit(item, spec, before, asked, owner)

    def resubmit(self, job: FleetJob) -> str:
        """Write the job as which a preempted one goes on, with its owner, its size and its place in the queue. Returns
        its name; if it has been written already, nothing happens. So it is if an operator has stopped it meanwhile, and
        then "" is returned."""
        item = self._store.get(COUNT, timeout_s=CALL_S)
        if made := self._made(lambda made: made.follows == job.name):
            return made
        wish = self._store.get(f"{ROOT}stops/{job.name}", timeout_s=CALL_S)
        if wish is None or not codec.from_json(Wish, wish.value).preempts:
            return ""
        pointer = Candidate(self._store, job.name, "", time.monotonic).pointer(PERIODIC)
        resume = pointer.entry if pointer is not None else job.submission.resume
        again = Submission(job.spec, 0, "", "", resume, since=job.since, follows=job.name)
        named = replace(job.spec, name=base_name(job.name))
        return self._submit(item, named, job.submission, again, job.owner, job.size, unchanged=(wish,))

    def _submit(
        self,
        item: Item | None,
        spec: JobSpec,
        before: Submission | None,
        asked: Submission,
        owner: Caller | None,
        size: Size | None = None,
        unchanged: Sequence[Item] = (),
    ) -> str:
        """item: the count of jobs, read before whatever says that this job is to be written. unchanged: other documents
        that say so. Raises CompareFailed if one of them has changed."""
        number = _count(item) + 1
        name = f"{spec.name}-{number}"
        try:
            check_name("name", name)
        except ConfigError as error:
            raise ConfigError(f"name={spec.name!r} is too long for a fleet, which adds a number: {error}") from error
        submission = replace(
            asked,
            spec=replace(spec, name=name),
            number=number,
            series=name,
            identity=asked.identity or secrets.token_hex(8),
        )
        if before is not None:
            submission = replace(
                submission, series=before.series, identity=before.identity, interruptions=before.interruptions + 1
            )
        puts = [Put(COUNT, str(number).encode()), Put(f"{ROOT}jobs/{name}", codec.to_json(submission))]
        if owner is not None:
            puts.append(Put(f"{ROOT}owners/{name}", codec.to_json(owner)))
        if size is not None:
            puts.append(Put(f"{ROOT}sizes/{name}", codec.to_json(size)))
        compares = [ModRevision(COUNT, item.mod_revision if item is not None else 0)]
        compares += [ModRevision(one.key, one.mod_revision) for one in unchanged]
        done = self._candidate.write(tuple(compares), tuple(puts))
        if not done.succeeded:
            raise CompareFailed("another job was submitted in the same moment")
        return name

    def _made(self, fits: Callable[[Submission], bool]) -> str:
        """The name of the job that was submitted so, or ""."""
        listing = self._store.prefix(f"{ROOT}jobs/", timeout_s=CALL_S)
        jobs = _values({item.key: item for item in listing.items}, ROOT, Submission, {})
        return next((submission.spec.name for submission in jobs.values() if fits(submission)), "")

    def place(self, job: str, placement: Placement, grants: tuple[Grant, ...]) -> None:
        """Write the placement and its grants in one transaction: a node must not run a job that it may not attend."""
        grant = Put(f"{ROOT}grants/{job}", codec.to_json(Grants(grants)))
        self._candidate.write((), (Put(f"{ROOT}placements/{job}", codec.to_json(placement)), grant))

    def grant(self, job: str, grants: tuple[Grant, ...]) -> None:
        self._keep(f"{ROOT}grants/{job}", codec.to_json(Grants(grants)))

    def scale(self, job: str, workers: int) -> None:
        self._keep(f"{ROOT}sizes/{job}", codec.to_json(Size(workers)))

    def stop(self, job: str, because: str, *, preempts: bool = False) -> None:
        """An operator's wish stays whatever the queue wants, and also stops the job as which a preempted one goes on.
        Each may have been written since the documents were read by which the other was decided."""
        key = f"{ROOT}stops/{job}"
        unwanted = (CreateRevision(key, 0),) if preempts else ()
        self._candidate.write(unwanted, (Put(key, _wish(because, preempts=preempts)),))
        if not preempts and (after := self._made(lambda made: made.follows == job)):
            self.stop(after, because)

    def allow(self, owner: str, slots: int) -> None:
        """Give an owner a quota; 0: none."""
        self._keep(f"{ROOT}quotas/{owner}", codec.to_json(Quota(slots)) if slots else None)

    def cordon(self, node: str, because: str) -> None:
        """because: why no job shall run on the node; "": jobs may run there again."""
        self._keep(f"{ROOT}cordons/{node}", _wish(because) if because else None)

    def end(self, job: str, result: Result) -> None:
        self._keep(f"{ROOT}results/{job}", _result(result))

    def _keep(self, key: str, document: bytes | None) -> None:
        """None: none any more."""
        if document is not None:
            self._candidate.write((), (Put(key, document),))
        else:
            self._candidate.write((), (), (key,))

    def forget(self, state: FleetState) -> None:
        """Remove ended jobs beyond the newest ENDED_KEPT, each in one transaction with all its own records. The records
        are not read: those of a large job do not fit into one answer of etcd."""
        for name in state.forgettable(ENDED_KEPT):
            keys = (
                f"{ROOT}{kind}/{name}"
                for kind in ("jobs", "placements", "owners", "grants", "sizes", "stops", "results")
            )
            self._candidate.write((), (), (Prefix(f"/elastic/{name}/"), *keys))


def unread_alike(state: FleetState, job: str) -> list[str]:
    """The jobs that cannot be read, and may go on with what that one has done: under its name with another number."""
    return sorted(name for name in state.left_out if base_name(name) == base_name(job))


def base_name(job: str) -> str:
    """The name with which a job was submitted."""
    return re.sub(r"-\d+$", "", job)
