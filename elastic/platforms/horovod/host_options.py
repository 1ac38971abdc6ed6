"""Where the workers of a job are to be, as the command and the functions say it, and the job that they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.errors import ConfigError
from elastic.platforms.common.job_driver import JobResult
from elastic.platforms.common.job_request import JobRequest
from elastic.platforms.horovod import discovery, launcher
from elastic.platforms.horovod import hosts as lists
from elastic.platforms.horovod.discovery import HostWatch
from elastic.platforms.horovod.option_mapping import WantedWorkers

START_S, ELASTIC_S = 30.0, 600.0
"""Defaults of --start-timeout and --elastic-timeout, those of horovodrun."""
CHECKPOINTS = "~/elastic-jobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """hosts: "a:2,b:4". hostfile: its path. script: lists the hosts. slots: of a host that the script prints alone.
    cooldown_s: as HostsLaunch has it."""

    hosts: str | None = None
    hostfile: Path | None = None
    script: str | None = None
    slots: int | None = None
    start_timeout_s: float = START_S
    elastic_timeout_s: float = ELASTIC_S
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    reset_limit: int | None = None
    cooldown_s: tuple[float, float] | None = None
    checkpoint_dir: str = CHECKPOINTS

    def listed(self, workers: int) -> dict[str, int] | None:
        """Host -> slots; None: the script will say. Raises ConfigError, also if they are too few for the workers."""
        for name, value, least in (
            ("--slots-per-host", self.slots, 1),
            ("--reset-limit", self.reset_limit, 0),
            ("--start-timeout", self.start_timeout_s, 0),
            ("--elastic-timeout", self.elastic_timeout_s, 0),
        ):
            if value is not None and not value >= least:  # a NaN is not, either
                raise ConfigError(f"{name} {value:g} must be a number of at least {least}")
        first_s, most_s = self.cooldown_s or (1.0, 1.0)
        if not 0 < first_s <= most_s:
            raise ConfigError(
                f"--blacklist-cooldown-range {first_s:g} {most_s:g}: two numbers of seconds above 0, the smaller first"
            )
        if sum(value is not None for value in (self.hosts, self.hostfile, self.script)) > 1:
            raise ConfigError("-H, --hostfile and --host-discovery-script: give one of them")
        if self.script is not None:
            discovery.check_script(self.script)
            return None
        found = {"localhost": workers}
        if self.hosts is not None:
            found = lists.of_option(self.hosts)
        elif self.hostfile is not None:
            found = lists.of_file(text_of(self.hostfile, "--hostfile"), str(self.hostfile))
        lists.check_enough(found, workers)
        return found

    def launch(
        self,
        what: Callable[..., Any] | Sequence[str],
        arguments: tuple[Any, ...],
        wanted: WantedWorkers,
        listed: Mapping[str, int] | None,
    ) -> JobResult:
        """Run a function or the words of a script on these hosts. Raises what launcher.run() raises."""
        root = self.checkpoint_dir
        request = JobRequest(
            what=what,
            arguments=arguments,
            workers=(wanted.least, wanted.most),
            checkpoint_dir=root if "://" in root else str(Path(root).expanduser().absolute()),
            options={
                **({"ranks": wanted.ranks} if wanted.ranks is not None else {}),
                **({"restart": True} if wanted.restart else {}),
                "timing": {"pause_limit_s": self.elastic_timeout_s},
            },
        )
        ssh = ["ssh"]
        if self.ssh_port is not None:
            ssh += ["-p", str(self.ssh_port)]
        if self.ssh_identity_file is not None:
            ssh += ["-i", self.ssh_identity_file]
        found = closing(HostWatch(self.script, self.slots)) if self.script is not None else nullcontext(listed or {})
        with found as source:
            return launcher.run(
                launcher.HostsLaunch(
                    request=request,
                    hosts=source,
                    start_timeout_s=self.start_timeout_s,
                    reset_limit=self.reset_limit,
                    cooldown_s=self.cooldown_s,
                    ssh=ssh,
                )
            )


def text_of(path: Path, option: str) -> str:
    """The text of a file that an option names. Raises ConfigError."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path} cannot be read: {error}") from error
