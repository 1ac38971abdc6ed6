"""A fleet's documents in the store: read by every replica, written by the leader under its term."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from elastic.config import JobSpec, check_name
from elastic.errors import CompareFailed, ConfigError
from elastic.fleet.documents import FleetJob, FleetState, Grant, Grants, Placement, Result, Size, Submission, Wish
from elastic.security.roles import Caller
from elastic.store.base import CreateRevision, Item, ModRevision, Prefix, Put, Store
from elastic.store.election import CALL_S, Candidate
from elastic.wire import codec

NAME = ".fleet"
"""Under which its leader is elected; no job can be called so."""

ROOT = f"/elastic/{NAME}/"
COUNT = f"{ROOT}count"

ENDED_KEPT = 100
"""Jobs that have ended, and of which the fleet still tells: those that have ended last."""

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
    owners = _values(items, "owners/", Caller, unread)
    stops, cordons = _wishes(items, "stops/", unread), _wishes(items, "cordons/", unread)
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
        for name, submission in _values(items, "jobs/", Submission, unread).items()
        if not {f"placements/{name}", f"results/{name}"} & unread.keys()  # neither placed nor run again by mistake
    ]
    jobs.sort(key=lambda job: job.submission.number)
    try:
        _count(items.get("count"))
    except ConfigError as error:
        unread["count"] = str(error)
    return FleetState(tuple(jobs), cordons, unread), listing.revision


def _count(item: Item | None) -> int:
    """How many jobs were ever submitted. Raises ConfigError for what nobody here has written."""
    if item is None:
        return 0
    if not item.value.isdigit():
        raise ConfigError(
            f"{COUNT} in etcd has {item.value[:64]!r}, which is no number of jobs, so that no other one can get its "
            "own; put a number there that is not smaller than that of any job so far"
        )
    return int(item.value)


def _values(items: Mapping[str, Item], prefix: str, kind: type[T], unread: dict[str, str]) -> dict[str, T]:
    """By what follows the prefix; unread: gets those that nobody here has written."""
    values: dict[str, T] = {}
    for key, item in items.items():
        if key.startswith(prefix):
            try:
                values[key.removeprefix(prefix)] = codec.from_json(kind, item.value)
            except (codec.WireError, ConfigError) as error:
                unread[key] = str(error)
    return values


def _wishes(items: Mapping[str, Item], prefix: str, unread: dict[str, str]) -> dict[str, Wish]:
    """A wish counts also when its reason cannot be read."""
    wishes = _values(items, prefix, Wish, unread)
    dark = {key: because for key, because in unread.items() if key.startswith(prefix)}
    return wishes | {key.removeprefix(prefix): Wish(f"cannot be read: {because}") for key, because in dark.items()}


def end(store: Store, job: str, result: Result) -> None:
    """Write how a job ended, unless that is known already. By any replica: the result itself was written by the job's
    own leader."""
    key = f"{ROOT}results/{job}"
    store.txn((CreateRevision(key, 0),), (Put(key, _result(result)),), timeout_s=CALL_S)


def _result(result: Result) -> bytes:
    return codec.to_json(replace(result, because=codec.cut(result.because)))


def _wish(because: str) -> bytes:
    return codec.to_json(Wish(codec.cut(because)))


class Registry:
    """The writing side, for who leads. candidate: of the fleet, elected. Each method may raise what
    `Candidate.write` does; after StoreUnavailable it may be called again."""

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
    ) -> str:
        """Returns the job's name. before, resume: an earlier job, and the one of its checkpoints from which this one
        goes on. token: of the request; if it has made a job already, that one's name is returned. Raises ConfigError
        if there is no room for its number in the name, or nobody knows the number."""
        item = self._store.get(COUNT, timeout_s=CALL_S)
        if token and (made := self._made_by(token)):  # looked for after the count: one made since then changes that
            return made
        number = _count(item) + 1
        name = f"{spec.name}-{number}"
        try:
            check_name("name", name)
        except ConfigError as error:
            raise ConfigError(f"name={spec.name!r} is too long for a fleet, which adds a number: {error}") from error
        submission = Submission(replace(spec, name=name), number, name, secrets.token_hex(8), token=token)
        if before is not None:
            again = before.interruptions + 1
            submission = replace(
                submission, series=before.series, identity=before.identity, resume=resume, interruptions=again
            )
        puts = [Put(COUNT, str(number).encode()), Put(f"{ROOT}jobs/{name}", codec.to_json(submission))]
        if owner is not None:
            puts.append(Put(f"{ROOT}owners/{name}", codec.to_json(owner)))
        done = self._candidate.write((ModRevision(COUNT, item.mod_revision if item is not None else 0),), tuple(puts))
        if not done.succeeded:
            raise CompareFailed("another job was submitted in the same moment")
        return name

    def _made_by(self, token: str) -> str:
        """The job, or ""."""
        listing = self._store.prefix(f"{ROOT}jobs/", timeout_s=CALL_S)
        jobs = _values({item.key: item for item in listing.items}, ROOT, Submission, {})
        return next((submission.spec.name for submission in jobs.values() if submission.token == token), "")

    def place(self, job: str, placement: Placement, grants: tuple[Grant, ...]) -> None:
        """Both at once: nobody is to run what he may not attend."""
        grant = Put(f"{ROOT}grants/{job}", codec.to_json(Grants(grants)))
        self._candidate.write((), (Put(f"{ROOT}placements/{job}", codec.to_json(placement)), grant))

    def grant(self, job: str, grants: tuple[Grant, ...]) -> None:
        self._candidate.write((), (Put(f"{ROOT}grants/{job}", codec.to_json(Grants(grants))),))

    def scale(self, job: str, workers: int) -> None:
        self._candidate.write((), (Put(f"{ROOT}sizes/{job}", codec.to_json(Size(workers))),))

    def stop(self, job: str, because: str) -> None:
        self._candidate.write((), (Put(f"{ROOT}stops/{job}", _wish(because)),))

    def cordon(self, node: str, because: str) -> None:
        """because: empty: no longer."""
        key = f"{ROOT}cordons/{node}"
        if because:
            self._candidate.write((), (Put(key, _wish(because)),))
        else:
            self._candidate.write((), (), (key,))

    def end(self, job: str, result: Result) -> None:
        self._candidate.write((), (Put(f"{ROOT}results/{job}", _result(result)),))

    def forget(self, book: FleetState) -> None:
        """Remove ended jobs beyond the newest ENDED_KEPT, each at once with all that it keeps as a job of its own.
        Unread: the records of a large job are more than etcd says in one answer."""
        for name in book.forgettable(ENDED_KEPT):
            keys = (
                f"{ROOT}{kind}/{name}"
                for kind in ("jobs", "placements", "owners", "grants", "sizes", "stops", "results")
            )
            self._candidate.write((), (), (Prefix(f"/elastic/{name}/"), *keys))


def base_name(job: str) -> str:
    """The name under which a job was submitted."""
    return re.sub(r"-\d+$", "", job)
