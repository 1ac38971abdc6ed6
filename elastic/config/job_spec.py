"""What to run, and on how many workers: frozen, and checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from elastic.checkpoints.policy import Every, Keep
from elastic.config.names import check_name, check_pairs, check_text
from elastic.config.options import Stragglers, option
from elastic.config.summing import Summing
from elastic.config.timing import Timing
from elastic.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec(Summing):
    """What to run, and on how many workers. 1 <= min_workers <= workers <= max_workers."""

    name: str
    command: tuple[str, ...]
    """Program and arguments of one worker."""

    workers: int
    """The world the job starts with and returns to."""

    min_workers: int = option(
        "--min-workers",
        "M",
        1,
        "the fewest workers that train: with fewer, the job waits for replacements. At the start the job waits for all "
        "workers until the join window is over, and then for these",
    )

    max_workers: int | None = None
    """The largest world, where nodes bring more workers than `workers`; None: `workers`."""

    spares: int = option(
        "--spares",
        "K",
        0,
        "further processes on each node that have run the script's own set-up, and replace lost workers",
    )

    stragglers: Stragglers = option(
        "--stragglers",
        "",
        Stragglers.NAME,
        "'name': give each worker as many shards as its speed allows, and name those that are too slow; 'demote': "
        "also replace these by spares; 'ignore': give all workers equally many shards",
    )

    slow_factor: float = option(
        "--slow-factor", "F", 2.0, "a worker is too slow if its shards take F times as long as the median of the others"
    )

    ranks: int = option(
        "--ranks",
        "N",
        0,
        "run a torchrun script that uses DistributedDataParallel: the script always sees N ranks, which any number of "
        "workers computes (default: the script calls elastic.join()). With --restart: any script, always N processes",
    )

    restart: bool = option(
        "--restart",
        "",
        False,
        "run any torchrun script: it starts again on all workers, with torchrun's environment, whenever a worker is "
        "lost or joins; only what the script saves itself, or gives to elastic.keep, is kept",
    )

    threads: int = option("--threads", "T", 1, "torch threads of each worker")
    """Part of the bits, so it never depends on the machine."""

    checkpoint_every: str = option(
        "--checkpoint-every",
        "T",
        "auto",
        '"10 min", "500 steps", "off", or "auto": as often as its cost and the failures so far make best',
    )

    snapshot_every: str = option(
        "--snapshot-every",
        "T",
        "auto",
        "how often the state is copied into the memory of each machine; a job that loses all workers goes on from "
        'there. Values as of --checkpoint-every; "auto": every 5 s, or less often if that costs more than 1 % of the '
        "time",
    )

    checkpoint_keep: str = option(
        "--keep", "K", "last 2", 'checkpoints to keep: "last 2", or "last 2, every 10000 steps"'
    )

    checkpoint_dir: str = option(
        "--checkpoint-dir",
        "DIR",
        "",
        "a directory, or an fsspec path such as s3://bucket/run (default: checkpoints in the job directory)",
    )

    replace: bool = option("--no-replace", "", True, "go on without a worker that was lost")

    max_restarts: int = option(
        "--max-restarts",
        "R",
        3,
        "how often each worker slot gets a new process after its script failed; kills from outside are not counted. "
        "Also how often the job begins again after all members died before a step was applied; with --restart 20 "
        "times, within a minute each",
    )

    fork: bool = option(
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
        Summing.__post_init__(self)
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
        if self.outer and (self.restart or self.ranks):
            raise ConfigError(
                f"outer={self.outer!r:.120} is for scripts that call elastic.join() and job.steps(): in a script of "
                f"{'--restart' if self.restart else '--ranks'} all ranks make each step together. Write the loop of "
                "docs/algorithms.md, or leave --outer out"
            )
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
