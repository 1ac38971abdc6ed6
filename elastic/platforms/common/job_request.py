"""What is to run on the nodes of an engine: the arguments of its call, checked, and the job that they mean."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from elastic.config import JobSpec, Places, job_from_table
from elastic.errors import ConfigError

OWN = ("name", "command", "workers", "min_workers", "max_workers", "checkpoint_dir", "labels", "directory")
"""Fields of JobSpec that are set in another way, or mean nothing on the nodes of an engine."""

JOIN_WINDOW_S = 10.0
"""How long a job waits for all its workers before it begins with fewer: an engine starts tasks within seconds, or has
to get machines first."""

LAUNCHED = ("python", "-m", "runtime.launched")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """what: a function, or the words of a script. workers: how many, or at least and at most. workers_per_node: how
    many of them one task of the engine has. name: of the job, which goes on where one of that name has stopped; "": a
    new job, under a name that no other has. options: fields of JobSpec. Raises ConfigError."""

    what: Callable[..., Any] | str | Sequence[str]
    arguments: tuple[Any, ...] = ()
    workers: int | tuple[int, int]
    workers_per_node: int = 1
    name: str = ""
    checkpoint_dir: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        least, most = self.world
        if least < 1 or most < least:
            raise ConfigError(f"workers={self.workers!r} must be a number of at least 1, or (at least, at most)")
        if isinstance(self.workers_per_node, bool) or not isinstance(self.workers_per_node, int):
            raise ConfigError(f"workers_per_node={self.workers_per_node!r} must be an integer of at least 1")
        if self.workers_per_node < 1:
            raise ConfigError(f"workers_per_node={self.workers_per_node} must be at least 1")
        if self.arguments and not callable(self.what):
            raise ConfigError(f"arguments {self.arguments!r:.80} are for a function; those of a script follow its name")
        known = {spec.name for spec in fields(JobSpec)} - set(OWN)
        if unknown := sorted(self.options.keys() - known):
            raise ConfigError(f"unknown option {unknown[0]}; known are {', '.join(sorted(known))}")

    @property
    def world(self) -> tuple[int, int]:
        """At least and at most so many workers."""
        pair = self.workers if isinstance(self.workers, tuple | list) else (self.workers, self.workers)
        if len(pair) != 2 or any(isinstance(one, bool) or not isinstance(one, int) for one in pair):
            raise ConfigError(f"workers={self.workers!r} must be a number, or (at least, at most)")
        return pair[0], pair[1]

    @property
    def nodes(self) -> int:
        """How many tasks the largest world takes."""
        return math.ceil(self.world[1] / self.workers_per_node)

    def spec(self) -> JobSpec:
        """The job. Its checkpoints are in a directory of its name. Raises ConfigError."""
        least, most = self.world
        command: Sequence[str]
        if callable(self.what):
            command, base = LAUNCHED, getattr(self.what, "__name__", "")
        else:
            words = [self.what] if isinstance(self.what, str) else list(self.what)
            if not words:
                raise ConfigError("the script is empty; give its path")
            command, base = ("python", *map(str, words)), Path(words[0]).stem
        base = re.sub(r"[^a-z0-9]+", "-", base.lower()).strip("-")[:40].strip("-") or "job"
        timing = self.options.get("timing", {})
        if isinstance(timing, dict):
            timing = {"join_window_s": JOIN_WINDOW_S, **timing}
        document = {
            **self.options,
            "name": self.name or f"{base}-{secrets.token_hex(3)}",
            "command": list(command),
            "workers": most,
            "min_workers": least,
            "checkpoint_dir": self.checkpoint_dir,
            "timing": timing,
        }
        return job_from_table(document, Places("", "options"), "options")
