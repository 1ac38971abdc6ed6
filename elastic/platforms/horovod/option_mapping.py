"""What becomes of each option of horovodrun. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from elastic.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NotUsed:
    """An option that is accepted, and what became of what it sets. values: how many words follow it."""

    names: tuple[str, ...]
    because: str
    values: int = 1


_RING = "all gradients of a step travel together, see --overlap of `elastic run`"
NOT_USED = (
    NotUsed(("--autotune",), _RING, 0),
    NotUsed(("--autotune-log-file",), _RING),
    NotUsed(("--fusion-threshold-mb",), _RING),
    NotUsed(("--cycle-time-ms",), _RING),
    NotUsed(("--cache-capacity",), _RING),
    NotUsed(("--hierarchical-allreduce", "--no-hierarchical-allreduce"), "sums go by nodes where there are several", 0),
    NotUsed(("--hierarchical-allgather", "--no-hierarchical-allgather"), "there is one way to gather", 0),
    NotUsed(("--gloo", "--use-gloo"), "workers connect to each other by TCP", 0),
    NotUsed(("--mpi", "--use-mpi"), "workers connect to each other by TCP; `elastic run --ring mpi` uses MPI", 0),
    NotUsed(("--mpi-args", "--jsrun"), "there is no mpirun here"),
    NotUsed(("--network-interfaces", "--network-interface"), "a host is reached under the name that the list has"),
    NotUsed(("--stall-check-warning-time-seconds",), "see timing.hang_s of a job file"),
    NotUsed(("--no-stall-check",), "hangs are always found", 0),
    NotUsed(("--log-level",), "see `elastic logs`"),
    NotUsed(("--verbose",), "see `elastic logs`", 0),
    NotUsed(("--output-filename",), "see logs/ in the directory of the job"),
    NotUsed(("--disable-cache",), "there is no cache", 0),
)
"""Each is said once when it is given."""


@dataclass(frozen=True, slots=True)
class WantedWorkers:
    """workers: that the job begins with, at least and at most. ranks: of exact mode; None: elastic mode. restart: the
    script is started again for each change. bounded: whether it was said how many there may be at most."""

    workers: int
    least: int
    most: int
    ranks: int | None
    restart: bool
    bounded: bool = True

    def among(self, hosts: Mapping[str, int] | None) -> WantedWorkers:
        """On these hosts: an elastic job without a bound takes all their slots."""
        if hosts is None or self.bounded or not self.elastic:
            return self
        return replace(self, most=max(self.most, sum(hosts.values())))

    @property
    def elastic(self) -> bool:
        """Whether the script is to have @hvd.elastic.run."""
        return self.ranks is None and not self.restart


def wanted(
    np: int | None, min_np: int | None, max_np: int | None, ranks: int | None, *, discovers: bool, restart: bool
) -> WantedWorkers:
    """What -np, --min-np, --max-np, --ranks and --restart ask for together. With --min-np, --max-np or a discovery
    script the job is elastic, as with Horovod; without them it has -np logical ranks. Raises ConfigError."""
    for name, value in (("-np", np), ("--min-np", min_np), ("--max-np", max_np), ("--ranks", ranks)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value} must be at least 1")
    if ranks is not None and restart:
        raise ConfigError("--ranks trains in place, and --restart starts scripts anew; give one of them")
    first = np or min_np or max_np
    if first is None:
        raise ConfigError("give -np, the number of workers")
    elastic = discovers or min_np is not None or max_np is not None
    least = min_np or (first if not elastic else 1)
    most = max_np or first
    if not least <= first <= most:
        raise ConfigError(f"--min-np {least}, -np {first} and --max-np {most} must be in ascending order")
    in_place = first if ranks is None and not elastic and not restart else ranks
    least = 1 if in_place is not None and min_np is None else least
    return WantedWorkers(first, least, most, in_place, restart, bounded=max_np is not None)


def of_config(document: Any, path: str) -> dict[str, Any]:
    """Options of a --config-file of Horovod, as this command spells them: groups such as `params:` and `timeline:` hold
    options with _ or - between words. Raises ConfigError."""
    if not isinstance(document, Mapping):
        raise ConfigError(f"--config-file {path}: it holds no options")
    found: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, Mapping):
            prefix = {"timeline": "timeline-", "autotune": "autotune-", "params": ""}.get(str(key), "")
            for name, inner in value.items():
                spelled = str(name).replace("_", "-")
                if spelled == "enabled":
                    found[str(key).replace("_", "-")] = inner
                else:
                    found[spelled if spelled.startswith(prefix) else prefix + spelled] = inner
        else:
            found[str(key).replace("_", "-")] = value
    return found
