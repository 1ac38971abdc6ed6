"""The documents that a fleet keeps in its store, as frozen values.

/elastic/.fleet/leader             address of the fleet's leader, on its lease (elastic/store/election.py)
/elastic/.fleet/count              how many jobs were ever submitted
/elastic/.fleet/jobs/<job>         Submission, written once
/elastic/.fleet/placements/<job>   Placement, from when the job starts; may change while it runs
/elastic/.fleet/owners/<job>       Caller: who submitted the job
/elastic/.fleet/grants/<job>       Grants: who may attend the job
/elastic/.fleet/sizes/<job>        Size: the number of workers that an operator wants
/elastic/.fleet/stops/<job>        Wish: an operator wants the job to end, or it is preempted
/elastic/.fleet/cordons/<node>     Wish: an operator wants no job on this node
/elastic/.fleet/quotas/<owner>     Quota: how many slots an owner may count on
/elastic/.fleet/results/<job>      Result, written once; the job's own records are at /elastic/<job>/

A job's number makes its name unique in the fleet for ever, so no record of an earlier job is taken for its own. For
that reason a job that was preempted goes on under another number, when it has left.

The agents of the nodes on which the fleet has placed a job may attend it, each by a token of its own. A share of a job
on a node comes with a grant of a new token. The fleet's leader tells the token only to the node's daemon, which tells
it to the job's agent. The grant outlives the share until the agent has left, because an agent that drains needs its
leader. Then the grant is removed; the next share there gets another token.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from elastic.config import JobSpec, RingKind
from elastic.errors import ConfigError, ExitCode
from elastic.security.roles import Caller

_LEFT = (ExitCode.DRAINED, ExitCode.TERMINATED, ExitCode.STATE_LOST, ExitCode.BELOW_QUORUM)
"""How a job ends that leaves its nodes in order, or too slowly, or loses them meanwhile."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A job as it was submitted. spec.name: the job's full name, "<name>-<number>".

    series: the name of the first job with these checkpoints, and of their directory below spec.checkpoint_dir.
    identity: theirs too; a job that goes on with them has the same. resume: the checkpoint from which the job goes on,
    or "". interruptions: how often it was interrupted before. token: the token of the request, which may have come
    twice. since: the number of the first job whose place in the queue this one has, because it was preempted; 0: its
    own. follows: the job that was preempted, and goes on as this one; "": none.
    """

    spec: JobSpec
    number: int
    series: str
    identity: str
    resume: str = ""
    interruptions: int = 0
    token: str = ""
    since: int = 0
    follows: str = ""

    @property
    def checkpoints(self) -> str:
        """The directory or URL of the job's checkpoints."""
        return f"{self.spec.checkpoint_dir.rstrip('/')}/{self.series}"


@dataclass(frozen=True, slots=True)
class NodeShare:
    """The slots of one node that a job has."""

    node: str
    slots: int


@dataclass(frozen=True, slots=True)
class Placement:
    shares: tuple[NodeShare, ...]

    @property
    def slots(self) -> dict[str, int]:
        """Node -> the job's slots there."""
        return {share.node: share.slots for share in self.shares}

    @property
    def total(self) -> int:
        return sum(share.slots for share in self.shares)


@dataclass(frozen=True, slots=True)
class Grant:
    """A permission for the job's agent on that node. token: a secret of the replicas, the node's daemon and the
    agent."""

    node: str
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Grants:
    """All grants of one job."""

    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class Wish:
    """An operator's wish, with its reason. preempts: the queue's wish, which stops a job so that it waits again."""

    because: str
    preempts: bool = False


@dataclass(frozen=True, slots=True)
class Quota:
    """The slots that an owner's jobs get before those of owners that hold more than theirs."""

    slots: int


@dataclass(frozen=True, slots=True)
class Size:
    """The number of workers that an operator wants, instead of the `workers` with which the job was submitted."""

    workers: int


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a job. generation: the newest that was in effect, or 0."""

    exit_code: int
    because: str
    digest: str = ""
    generation: int = 0


@dataclass(frozen=True, slots=True)
class FleetJob:
    """All documents of one job. ended: the store's revision that brought the result, or 0."""

    submission: Submission
    placement: Placement | None = None
    stop: Wish | None = None
    result: Result | None = None
    ended: int = 0
    size: Size | None = None
    grants: tuple[Grant, ...] = ()
    owner: Caller | None = None

    @property
    def workers(self) -> int:
        """The number of workers that the job is to have."""
        return self.size.workers if self.size is not None else self.spec.workers

    @property
    def account(self) -> str:
        """Whose quota the job uses: of a caller with a certificate its name, else what the job's file says, or ""."""
        return (self.owner.name if self.owner is not None else "") or self.spec.owner

    @property
    def since(self) -> int:
        """The job's age: of two, the smaller number is the older job."""
        return self.submission.since or self.submission.number

    @property
    def waits_again(self) -> bool:
        """Whether the job has left because it was preempted. How it ended otherwise, by itself too, is its end."""
        return (
            self.result is not None and self.result.exit_code in _LEFT and self.stop is not None and self.stop.preempts
        )

    @property
    def name(self) -> str:
        return self.submission.spec.name

    @property
    def spec(self) -> JobSpec:
        return self.submission.spec

    @property
    def shares(self) -> tuple[NodeShare, ...]:
        return self.placement.shares if self.placement is not None else ()

    @property
    def waits(self) -> bool:
        """Whether the job has not begun."""
        return self.result is None and self.placement is None

    @property
    def runs(self) -> bool:
        """Whether the job has begun and is not over; also while it has no place any more."""
        return self.result is None and self.placement is not None


@dataclass(frozen=True, slots=True)
class FleetState:
    """All documents at one revision of the store. jobs: in order of submission. unread: key -> why that document cannot
    be read. left_out: a job that may run, and is not among the jobs because a document of it cannot be read -> the
    nodes that it has, as far as they can be read."""

    jobs: tuple[FleetJob, ...] = ()
    cordons: Mapping[str, Wish] = field(default_factory=dict)
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def job(self, name: str) -> FleetJob | None:
        return next((job for job in self.jobs if job.name == name), None)

    def after(self, name: str) -> FleetJob | None:
        """The job as which a preempted one goes on, if it was not preempted again."""
        return next((job for job in self.jobs if job.submission.follows == name), None)

    def writes(self, series: str) -> FleetJob | None:
        """The job with these checkpoints that is not over: it removes those that it takes for old."""
        alike = (job for job in self.jobs if job.submission.series == series)
        return next((j for j in alike if j.result is None or (j.waits_again and self.after(j.name) is None)), None)

    def forgettable(self, kept: int) -> list[str]:
        """The names of the ended jobs, but for the `kept` that ended last."""
        over = sorted((job for job in self.jobs if job.result is not None), key=lambda job: job.ended)
        return [job.name for job in over[: max(0, len(over) - kept)]]


def check_for_fleet(spec: JobSpec) -> None:
    """Raise ConfigError for values that a job on one machine may have and a job on several may not."""
    directory = spec.checkpoint_dir
    if "://" not in directory and not directory.startswith("/"):
        raise ConfigError(
            f"checkpoint_dir={directory!r} must be an absolute path that all nodes share, or a URL such as "
            "s3://bucket/run: each member writes its part of a checkpoint there"
        )
    if spec.ring is RingKind.MPI:
        raise ConfigError("ring='mpi' connects the workers of one machine, under `elastic run`; take 'tcp' or 'nccl'")
    if spec.env_from and not spec.env_from.startswith("/"):
        raise ConfigError(f"env_from={spec.env_from!r} must be an absolute path: each node reads its own file")
    if spec.directory and not spec.directory.startswith("/"):
        raise ConfigError(f"directory={spec.directory!r} must be an absolute path, the same on every node")


def granted(
    job: FleetJob, placement: Placement | None, left: Collection[str], new: Callable[[], str]
) -> tuple[Grant, ...]:
    """The grants that a job needs with this placement. left: the nodes that the job's agent has left. new: makes a
    token."""
    placed = placement.slots if placement is not None else {}
    kept = [grant for grant in job.grants if grant.node in placed or grant.node not in left]
    kept += [Grant(node, new()) for node in sorted(placed.keys() - {grant.node for grant in kept})]
    return tuple(sorted(kept, key=lambda grant: grant.node))


def token_of(job: FleetJob, node: str) -> str:
    """The token of the job's agent on that node; "" if there is no grant."""
    return next((grant.token for grant in job.grants if grant.node == node), "")


def objection(job: FleetJob | None, node: str, token: str) -> str:
    """Why the agent of that node may not attend the job, or ""."""
    wanted = token_of(job, node) if job is not None else ""
    if not wanted:
        return "the fleet has not placed this job on this node, or not any more"
    if not hmac.compare_digest(wanted.encode(), token.encode()):
        return "the token is not that of this job's place on this node"
    return ""
