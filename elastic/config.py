"""What a job is and how long things may take: frozen, validated where it is written, read from TOML text.

Every duration is in seconds of one process's monotonic clock. A ConfigError names the field, its value, and a
value that would do.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from elastic.checkpoints.policy import Every, Keep
from elastic.errors import ConfigError

NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
"""Names of jobs and nodes: they become store keys, file names and, before a dot, parts of worker ids."""

PAIR_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,62}")

LARGEST = 10**15
"""The largest number in a job file: every number up to it can be sent, and is exact as a double."""

BEAT_PER_AGENT_S = 0.0005
"""Beats of all agents together stay below 2000 a second, and above 1000 agents below 1000 a second."""

LEAST_BEATS = 5
"""Beats become rarer than in proportion to evict_s only as long as this many beats of an agent fit into evict_s."""


class Reduction(StrEnum):
    """How gradients are summed."""

    EXACT = "exact"
    """In the order of the canonical tree: the same bits for every world size."""
    ALLREDUCE = "allreduce"
    """In rank order: fastest, not bit-stable across world sizes."""
    FIXED = "fixed"
    """As integers, in any order: the same bits for every world size, and no more bytes than allreduce sends. Of 32 bits
    for float32 up to 64 shards a step, else of 64 bits."""
    FIXED64 = "fixed64"
    """The same, with 64 bits always: twice the bytes, and closer to the true sum than float32 can be."""

    @property
    def stable(self) -> bool:
        """Whether the bits of a sum are the same for every world size."""
        return self is not Reduction.ALLREDUCE

    @property
    def of_integers(self) -> bool:
        """Whether integers are summed, in any order."""
        return self in (Reduction.FIXED, Reduction.FIXED64)


class Compression(StrEnum):
    """What a shard's gradients of float32, bfloat16 and float16 are rounded to before they are summed. So is each sum
    of two of them, at its place in the tree: the same bits for every world size."""

    NONE = "none"
    BF16 = "bf16"
    """bfloat16: half of the bytes."""
    FP16 = "fp16"
    """float16: half of the bytes, 3 bits more than bfloat16, and sums of weighted gradients below 65504."""
    INT8 = "int8"
    """Integers of 8 bits and a step for each 252 of them: a quarter of the bytes. Rounded up or down at random."""


class Stragglers(StrEnum):
    """What becomes of a worker that is much slower than the others."""

    IGNORE = "ignore"
    """Nothing; all compute equally many shards, however fast they are."""
    NAME = "name"
    """Shards follow speed, and it is named."""
    DEMOTE = "demote"
    """So they do, and it gives its place to a spare, where one is ready."""


class Overlap(StrEnum):
    """Whether gradients are summed while backward goes on."""

    AUTO = "auto"
    """On if the workers are on several machines: within one, sending takes the processors from the training."""
    ON = "on"
    OFF = "off"


class RingKind(StrEnum):
    """What carries the gradients from worker to worker."""

    TCP = "tcp"
    """Summed on CPUs, also where the workers train on GPUs."""
    NCCL = "nccl"
    """Summed on GPUs, one of which each worker has to itself."""
    MPI = "mpi"
    """MPI between the CPUs of one machine, started by an mpirun of the job's own."""


def check_name(what: str, name: str) -> str:
    """The name itself, if it may be one. Raises ConfigError with the rule otherwise."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{what}={name!r} must be 1 to 63 lower-case letters, digits and inner hyphens, for example "
            f"{_suggest_name(name)!r}"
        )
    return name


def check_pairs(what: str, pairs: Sequence[str]) -> None:
    """Raises ConfigError for what is not NAME=VALUE, and for a name that comes twice."""
    seen: set[str] = set()
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not PAIR_NAME.fullmatch(name) or "\0" in value:
            said = pair if what == "labels" else name  # a value may be a secret
            raise ConfigError(f"{what}: {said!r:.80} must be NAME=VALUE, for example gpu=h100")
        if name in seen:
            raise ConfigError(f"{what}: {name} is given twice; leave one out")
        seen.add(name)


def _suggest_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63].strip("-") or "job"


@dataclass(frozen=True, slots=True)
class Option:
    """How a field is set: by a job file under its own name, by `elastic run` under this one. unit: stands for its value
    in the help. text: what it does, for both."""

    name: str
    unit: str
    text: str

    @classmethod
    def of(cls, owner: type, name: str) -> Option | None:
        """That of a field; None if only a job file sets it."""
        found = next(spec.metadata.get("option") for spec in fields(owner) if spec.name == name)
        assert found is None or isinstance(found, cls)
        return found


def _option(name: str, unit: str, default: Any, text: str) -> Any:
    """A field with an Option. A flag, which has no unit, sets the value that is not the default."""
    return field(default=default, metadata={"option": Option(name, unit, text)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Every deadline of the control plane, in seconds. The relations between them are checked here, once."""

    beat_s: float = 0.25
    """How often an agent reports its workers."""

    suspect_s: float = 1.0
    """Silence after which a worker is suspected. At least 3 * beat_s, so that two lost beats suspect nobody."""

    evict_s: float = 2.5
    """Silence after which a worker is lost; of one that a signal has stopped, 0.3 times as long, and at least
    3 * beat_s. A silent node is lost after twice as long. Above suspect_s, so that a suspect has time to speak."""

    control_silence_s: float = 60.0
    """The same for a node whose ring still steps: the ring is its proof of life. Above evict_s."""

    progress_s: float = 30.0
    """Longest time a worker may stay at one place without moving on before it counts as stuck: in a shard, for which
    all others wait, without using a processor; in a copy of the state; without a beat, using one. A shard gets ten
    times the longest of late, if that is more. Above evict_s."""

    hang_s: float = _option(
        "--hang-limit",
        "S",
        600.0,
        "a worker is replaced when its script has made no progress for so many seconds, between two operations or "
        "within one shard; if no worker makes progress, the job goes back to the newest snapshot or checkpoint. With "
        "--restart the round ends when no script has used a processor for so long",
    )
    """The same for a worker that uses a processor in its shard, or is between two operations: a script may compile, or
    write a file on one worker alone. Also for all members together, or the only one, where nobody waits for anybody;
    ten times as long for those that use a processor. At least progress_s."""

    orphan_limit_s: float = 600.0
    """How long a ring steps on, and survivors wait, without any leader. Above control_silence_s."""

    orphan_margin_s: float = 30.0
    """How much longer than orphan_limit_s a leader waits before it takes an unseen ring for parked. At least
    evict_s and 1 % of orphan_limit_s: members notice late, and two clocks do not run alike."""

    join_window_s: float = 30.0
    """How long the first generation waits for `workers` before it starts with `min_workers`. Below these it waits on
    for its agents, and for processes that they have started and that have not announced themselves, up to
    orphan_limit_s."""

    pause_limit_s: float = _option(
        "--pause-limit",
        "S",
        600.0,
        "seconds that a job below --min-workers waits, with its state in memory, until it ends with exit code 3",
    )

    join_grace_s: float = 0.1
    """How long a donor waits for the end of a copy; the larger of this and a quarter of a step."""

    build_s: float = 5.0
    """Deadline of one attempt to build a ring."""

    fence_grace_s: float = 10.0
    """How long an expelled worker is left alone, so that it can find itself fenced. Above evict_s."""

    stop_grace_s: float = 3.0
    """Between asking a process to stop and SIGKILL. Below 5: an interrupted job is gone within 5 seconds."""

    backoff_min_s: float = 0.5
    """Wait before the first replacement of a worker; doubles up to backoff_max_s."""

    backoff_max_s: float = 30.0

    uneven_s: float = 30.0
    """How long members must differ in speed before shards are given out anew or a straggler is named, and the least
    time between two such changes."""

    @property
    def stopped_s(self) -> float:
        """Silence after which a worker is lost that is seen to be stopped by a signal: until somebody continues it, it
        cannot speak. Two lost beats suspect nobody."""
        return max(3 * self.beat_s, 0.3 * self.evict_s)

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if not math.isfinite(value) or value <= 0:
                raise ConfigError(f"timing.{spec.name}={value} must be a positive number of seconds")
        least_s = 3 * self.beat_s
        rounding = 1 - 1e-9  # scaled() multiplies both sides, and products round
        self._require(self.suspect_s >= least_s * rounding, "suspect_s", ">= 3 * beat_s", least_s)
        self._require(self.evict_s > self.suspect_s, "evict_s", "> suspect_s", 2.5 * self.suspect_s)
        for name in ("control_silence_s", "progress_s", "fence_grace_s"):
            self._require(getattr(self, name) > self.evict_s, name, "> evict_s", 4 * self.evict_s)
        self._require(
            self.orphan_limit_s > self.control_silence_s,
            "orphan_limit_s",
            "> control_silence_s",
            10 * self.control_silence_s,
        )
        self._require(self.hang_s >= self.progress_s, "hang_s", ">= progress_s", 20 * self.progress_s)
        margin_s = max(self.evict_s, self.orphan_limit_s / 100)
        self._require(
            self.orphan_margin_s >= margin_s, "orphan_margin_s", ">= max(evict_s, orphan_limit_s / 100)", margin_s
        )
        self._require(self.stop_grace_s < 5, "stop_grace_s", "< 5", 3)
        self._require(self.backoff_max_s >= self.backoff_min_s, "backoff_max_s", ">= backoff_min_s", self.backoff_min_s)

    def _require(self, holds: bool, name: str, relation: str, fix: float) -> None:
        if not holds:
            raise ConfigError(f"timing.{name}={getattr(self, name)} must be {relation}; set it to {fix:g}")

    def scaled(self, n_agents: int) -> Timing:
        """The timing for that many agents. Above 500 agents (at the default beat) evict_s and whatever must stay above
        it grow by one factor. Beats become rarer by up to twice that factor, and three fit into suspect_s."""
        factor = n_agents * BEAT_PER_AGENT_S / self.beat_s
        if factor <= 1:
            return self
        evict_s = self.evict_s * factor
        beat_s = self.beat_s * factor
        beat_s = max(beat_s, min(beat_s * min(factor, 2.0), evict_s / LEAST_BEATS))
        return replace(
            self,
            beat_s=beat_s,
            suspect_s=max(self.suspect_s * factor, 3 * beat_s),
            evict_s=evict_s,
            control_silence_s=max(self.control_silence_s, 2 * evict_s),
            progress_s=max(self.progress_s, 2 * evict_s),
            hang_s=max(self.hang_s, 2 * evict_s),
            fence_grace_s=max(self.fence_grace_s, 2 * evict_s),
            orphan_limit_s=max(self.orphan_limit_s, 4 * evict_s),
            orphan_margin_s=max(self.orphan_margin_s, evict_s),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """What to run, and on how many workers. 1 <= min_workers <= workers <= max_workers."""

    name: str
    command: tuple[str, ...]
    """Program and arguments of one worker."""

    workers: int
    """The world the job starts with and returns to."""

    min_workers: int = _option(
        "--min-workers",
        "M",
        1,
        "the fewest workers that train: with fewer, the job waits for replacements. At the start the job waits for all "
        "workers until the join window is over, and then for these",
    )

    max_workers: int | None = None
    """The largest world, where nodes bring more workers than `workers`; None: `workers`."""

    spares: int = _option(
        "--spares",
        "K",
        0,
        "further processes on each node that have run the script's own set-up, and replace lost workers",
    )

    stragglers: Stragglers = _option(
        "--stragglers",
        "",
        Stragglers.NAME,
        "'name': give each worker as many shards as its speed allows, and name those that are too slow; 'demote': "
        "also replace these by spares; 'ignore': give all workers equally many shards",
    )

    slow_factor: float = _option(
        "--slow-factor", "F", 2.0, "a worker is too slow if its shards take F times as long as the median of the others"
    )

    reduction: Reduction = _option(
        "--reduction",
        "",
        Reduction.EXACT,
        "how gradients are summed: along a tree (exact) or as integers (fixed, fixed64), with the same bits for every "
        "number of workers; or in rank order (allreduce)",
    )

    compression: Compression = _option(
        "--compression",
        "",
        Compression.NONE,
        "round gradients before they are sent, to half of the bytes, or to a quarter (int8); with --reduction exact or "
        "allreduce. The result differs from that of none; with exact it has the same bits for every number of workers",
    )

    overlap: Overlap = _option(
        "--overlap",
        "",
        Overlap.AUTO,
        "whether gradients are summed while backward goes on; auto: on if the workers are on several machines. The "
        "bits are the same",
    )

    retain_results: bool = _option(
        "--no-retain-results",
        "",
        True,
        "use less memory: do not keep the gradients of the last pass for a worker that missed them when another died; "
        "such a worker computes that pass again",
    )

    ring: RingKind = _option(
        "--ring",
        "",
        RingKind.TCP,
        "how gradients are sent; nccl: by NCCL, with one GPU for each worker; mpi: by the MPI of one mpirun, needs "
        "elastic-ring[mpi]",
    )

    ranks: int = _option(
        "--ranks",
        "N",
        0,
        "run a torchrun script that uses DistributedDataParallel: the script always sees N ranks, which any number of "
        "workers computes (default: the script calls elastic.join()). With --restart: any script, always N processes",
    )

    restart: bool = _option(
        "--restart",
        "",
        False,
        "run any torchrun script: it starts again on all workers, with torchrun's environment, whenever a worker is "
        "lost or joins; only what the script saves itself, or gives to elastic.keep, is kept",
    )

    threads: int = _option("--threads", "T", 1, "torch threads of each worker")
    """Part of the bits, so it never depends on the machine."""

    checkpoint_every: str = _option(
        "--checkpoint-every",
        "T",
        "auto",
        '"10 min", "500 steps", "off", or "auto": as often as its cost and the failures so far make best',
    )

    snapshot_every: str = _option(
        "--snapshot-every",
        "T",
        "auto",
        "how often the state is copied into the memory of each machine; a job that loses all workers goes on from "
        'there. Values as of --checkpoint-every; "auto": every 5 s, or less often if that costs more than 1 % of the '
        "time",
    )

    checkpoint_keep: str = _option(
        "--keep", "K", "last 2", 'checkpoints to keep: "last 2", or "last 2, every 10000 steps"'
    )

    checkpoint_dir: str = _option(
        "--checkpoint-dir",
        "DIR",
        "",
        "a directory, or an fsspec path such as s3://bucket/run (default: checkpoints in the job directory)",
    )

    replace: bool = _option("--no-replace", "", True, "go on without a worker that was lost")

    max_restarts: int = _option(
        "--max-restarts",
        "R",
        3,
        "how often each worker slot gets a new process after its script failed; kills from outside are not counted. "
        "Also how often the job begins again after all members died before a step was applied",
    )

    fork: bool = _option(
        "--cold-start",
        "",
        True,
        "start every worker with its own interpreter, and do not fork it from a process that has imported torch; for "
        "scripts whose modules set environment variables that torch reads when it is imported",
    )

    env: tuple[str, ...] = ()
    """Environment of the workers besides that of their agent: NAME=VALUE each."""

    env_from: str = ""
    """A file on each node with more of it, NAME=VALUE lines, read there when the job's agent starts. `env` counts
    more."""

    directory: str = ""
    """Where workers run, on every node; "": where their agent was started."""

    labels: tuple[str, ...] = ()
    """NAME=VALUE each: the job lies on nodes only whose agents were given all of them."""

    priority: int = 0
    """In the queue of a fleet: jobs of a higher one come first, and may preempt those of lower ones."""

    owner: str = ""
    """Whose quota of a fleet the job uses; of a submitter with a certificate it is the name in that."""

    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        check_name("name", self.name)
        Every.parse(self.checkpoint_every, "checkpoint")
        Every.parse(self.snapshot_every, "snapshot")
        Keep.parse(self.checkpoint_keep)
        if not self.command or not self.command[0]:
            raise ConfigError("command is empty; give the program first, for example ['python', 'train.py']")
        for what, value in (("checkpoint_dir", self.checkpoint_dir), ("directory", self.directory)):
            check_text(what, value)
        for word in self.command:
            check_text("a word of command", word)
        if any("\0" in word for word in self.command):
            raise ConfigError(f"command={list(self.command)!r} holds a NUL character; remove it")
        if self.min_workers < 1:
            raise ConfigError(f"min_workers={self.min_workers} must be >= 1")
        if self.workers < self.min_workers:
            raise ConfigError(
                f"workers={self.workers} must be >= min_workers={self.min_workers}; raise workers or lower min_workers"
            )
        if self.max_workers is not None and self.max_workers < self.workers:
            raise ConfigError(f"max_workers={self.max_workers} must be >= workers={self.workers}, or be left out")
        if self.ranks < 0:
            raise ConfigError(f"ranks={self.ranks} must be >= 0; 0 is a script that calls elastic.join()")
        if self.restart and 0 < self.ranks < self.workers_limit:
            raise ConfigError(f"ranks={self.ranks}: {self.workers_limit} workers need a rank each; raise ranks")
        if self.spares < 0:
            raise ConfigError(f"spares={self.spares} must be >= 0; 0 starts replacements when they are needed")
        if self.priority < 0:
            raise ConfigError(f"priority={self.priority} must be >= 0; give the jobs that come first a higher one")
        if self.owner:
            check_name("owner", self.owner)
        check_pairs("env", self.env)
        check_pairs("labels", self.labels)
        if "\0" in self.env_from:
            raise ConfigError(f"env_from={self.env_from!r} holds a NUL character; remove it")
        if "\0" in self.directory:
            raise ConfigError(f"directory={self.directory!r} holds a NUL character; remove it")
        if self.spares and not self.replace:
            raise ConfigError(f"spares={self.spares} replace lost workers, and replace=False forbids it; leave one out")
        if not (math.isfinite(self.slow_factor) and self.slow_factor > 1):
            raise ConfigError(f"slow_factor={self.slow_factor} must be above 1; 2 names workers at half the speed")
        if self.compression is not Compression.NONE and self.reduction in (Reduction.FIXED, Reduction.FIXED64):
            raise ConfigError(
                f"compression={str(self.compression)!r} rounds each sum of two, and "
                f"reduction={str(self.reduction)!r} takes sums in any order; use reduction='exact', or leave one out"
            )
        if not self.retain_results and not self.reduction.stable:
            raise ConfigError(
                f"retain_results=False needs reduction='exact' or 'fixed', not {str(self.reduction)!r}: what one "
                "member computes again must have the bits that the others have"
            )
        if self.threads < 1:
            raise ConfigError(f"threads={self.threads} must be >= 1")
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts={self.max_restarts} must be >= 0; 0 ends the job at the first failure")

    @property
    def environment(self) -> dict[str, str]:
        """`env` as a mapping."""
        return {name: value for name, _, value in (pair.partition("=") for pair in self.env)}

    @property
    def level(self) -> str:
        """What of the script survives a change of the workers, for people."""
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        if self.restart:
            always = f", always with {ranks}" if self.ranks else ""
            return (
                f"restarted: each change of the workers ends the script on all of them and starts it again{always}; "
                "only what the script saves itself, or gives to elastic.keep, is kept"
            )
        exact = "no bit changes" if self.reduction.stable else "the last bits of a sum may change"
        if self.ranks:
            return f"in place, {ranks}: the ranks of a lost worker go to the others, and {exact}"
        return f"in place: the shards of a lost worker go to the others, and {exact}"

    @property
    def workers_limit(self) -> int:
        """max_workers, or `workers` where it was left out."""
        return self.workers if self.max_workers is None else self.max_workers


def is_text(value: str) -> bool:
    """Whether it can leave the process: names of files, and JSON, can hold what is no text."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_text(what: str, value: object) -> None:
    """Raises ConfigError unless it is UTF-8, as everything has to be that one process tells another."""
    if not is_text(str(value)):
        raise ConfigError(f"{what}={str(value)!r} is not UTF-8; rename it, or give another")


def job_from_toml(text: str, where: str) -> JobSpec:
    """The job in a TOML document: fields of JobSpec at the top, those of Timing in the table [timing], and the
    workers' environment in the table [env], as strings.

    where: the file's name, for messages. Raises ConfigError, with the line where it can be known, for a syntax error,
    an unknown or missing field, a wrong type, and a broken relation.
    """
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and lists in lists in lists
        raise ConfigError(f"{where}: not valid TOML: {error}") from error
    return job_from_table(document, Places(text, where), where)


def job_from_table(document: Mapping[str, object], place: Places, where: str) -> JobSpec:
    """The job in such a document. where: for messages. Raises ConfigError, as job_from_toml does."""
    timing_table, env_table = _inner_table(document, "timing", place), _inner_table(document, "env", place)
    known = {spec.name: str(spec.type) for spec in fields(JobSpec) if spec.name not in ("timing", "env")}
    rest = {name: value for name, value in document.items() if name not in ("timing", "env")}
    values = checked_fields(rest, known, place, "")
    for name in ("name", "command", "workers"):
        if name not in values:
            raise ConfigError(f"{where}: {name} is missing")
    timings = checked_fields(timing_table, {spec.name: str(spec.type) for spec in fields(Timing)}, place, "timing.")
    for name, value in env_table.items():
        if not PAIR_NAME.fullmatch(name):
            raise ConfigError(f"{place.of('env')}: env: {name!r:.80} cannot be the name of a variable")
        if not isinstance(value, str):
            raise ConfigError(
                f"{place.of(f'env.{name}')}: env.{name}={_shown(value)} must be a string; put it into quotes"
            )
    env = tuple(f"{name}={value}" for name, value in env_table.items())
    try:
        return JobSpec(**values, env=env, timing=Timing(**timings))  # type: ignore[arg-type]  # their types are compared
    except ConfigError as error:
        named = re.match(r"[a-z_.]+", str(error))
        raise ConfigError(f"{place.of(named[0]) if named else where}: {error}") from error


def _inner_table(document: Mapping[str, object], name: str, place: Places) -> dict[str, object]:
    table = document.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{place.of(name)}: {name} must be a table; write [{name}] above its fields, or give a dict")
    return table


class Places:
    """In which line of a TOML document, which has been found valid, a field is given."""

    def __init__(self, text: str, where: str) -> None:
        self._where = where
        self._lines: dict[str, int] = {}
        table, inside = "", ""
        for number, line in enumerate(text.splitlines(), start=1):
            if inside:  # a string of several lines
                inside = "" if inside in line else inside
                continue
            if header := re.match(r"\[([^\[\]]+)\]", line.strip()):
                name = header[1].strip()
                table = f"{name}."
                self._lines.setdefault(name, number)
            elif key := re.match(r"""\s*["']?([A-Za-z0-9_.-]+)["']?\s*=""", line):
                self._lines.setdefault(f"{table}{key[1]}", number)
            inside = next((quote for quote in ('"""', "'''") if line.count(quote) % 2), "")

    def of(self, name: str) -> str:
        """ "FILE, line N", or the file alone."""
        return f"{self._where}, line {self._lines[name]}" if name in self._lines else self._where


def checked_fields(
    table: Mapping[str, object], known: Mapping[str, str], place: Places, prefix: str
) -> dict[str, object]:
    """The values of a table of a TOML document. known: field -> its type, one of those in _WANTED. prefix: of the names
    in messages. Raises ConfigError with file, line and field for an unknown field, and a value of another type."""
    values: dict[str, object] = {}
    for name, value in table.items():
        at = place.of(f"{prefix}{name}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            raise ConfigError(f"{at}: unknown field {prefix}{name}; {hint}")
        try:
            values[name] = _converted(value, known[name])
        except ValueError as error:
            raise ConfigError(f"{at}: {prefix}{name}={_shown(value)} must be {error}") from None
    return values


def _shown(value: object) -> str:
    """For a message. Python refuses to spell numbers of thousands of digits, which TOML can give in hexadecimal."""
    try:
        return repr(value)
    except ValueError:
        return "(a number of thousands of digits)"


def _converted(value: object, type_name: str) -> object:
    """The value as a field of that annotated type; ValueError says what it must be."""
    match type_name, value:
        case "bool", bool():
            return value
        case "float", float():
            return value
        case "float", int() if not isinstance(value, bool) and abs(value) <= LARGEST:
            return float(value)
        case "int" | "int | None", int() if not isinstance(value, bool) and abs(value) <= LARGEST:
            return value
        case "str", str():
            return value
        case "tuple[str, ...]", list() if all(isinstance(word, str) for word in value):
            return tuple(value)
        case _, str() if value in list(_CHOICES.get(type_name, ())):
            return _CHOICES[type_name](value)
    raise ValueError(_WANTED[type_name])


_ENUMS = (Compression, Overlap, Reduction, RingKind, Stragglers)
_CHOICES: dict[str, type[StrEnum]] = {kind.__name__: kind for kind in _ENUMS}
_WANTED = {
    "bool": "true or false",
    "float": "a number of seconds",
    "int": "a whole number of at most 15 digits",
    "int | None": "a whole number of at most 15 digits",
    "str": "a string",
    "tuple[str, ...]": "a list of strings",
    **{name: " or ".join(repr(str(choice)) for choice in kind) for name, kind in _CHOICES.items()},
}
