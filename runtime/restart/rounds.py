"""A round: a generation of the job in which every worker runs the script once."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from elastic.protocol.worker_id import node_of
from runtime.reduction.partial_sum import Json

_CALL = re.compile(r'^\s*File "(.+)", line (\d+)', re.MULTILINE)


class ScriptState(StrEnum):
    """What a worker's script does in the round in progress."""

    WAITING = "waiting"
    """It has not been started."""
    RUNNING = "running"
    DONE = "done"
    """It has ended with status 0."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Failure:
    """How a script failed."""

    status: int
    """Exit status, or minus the signal that ended the process."""
    at_s: float
    """Seconds since 1970, of the worker's clock."""
    place: str = ""
    """File and line, where the script says it by torch's @record."""
    message: str = ""

    @classmethod
    def read(cls, status: int, now_s: float, error_file: Path) -> Self:
        """error_file: where torch.distributed.elastic.multiprocessing.errors.record writes an exception; a script that
        does not use it writes none."""
        try:
            written_s = error_file.stat().st_mtime  # its own timestamp is in whole seconds
            found = json.loads(error_file.read_text())["message"]
            extra = found["extraInfo"]
            calls = _CALL.findall(extra["py_callstack"])
            place = f"{calls[-1][0]}:{calls[-1][1]}" if calls else ""
            return cls(status, written_s, place, str(found["message"]))
        except FileNotFoundError:
            return cls(status, now_s)
        except (ValueError, LookupError, TypeError, AttributeError):
            return cls(status, now_s, message=f"{error_file} cannot be read")

    @property
    def said(self) -> str:
        ended = f"signal {-self.status}" if self.status < 0 else f"exit status {self.status}"
        return f"the script ended with {ended}" + (f": {self.message}" if self.message else "")


@dataclass(frozen=True, slots=True)
class ScriptReport:
    """What a worker says to the others in each exchange."""

    generation: int
    """The round that it is in."""
    state: ScriptState
    store: tuple[str, int] | None = None
    """Of the worker with rank 0: address and port of the TCPStore of this round, as soon as it listens."""
    failure: Failure | None = None

    def to_json(self) -> dict[str, Json]:
        return asdict(self)

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Self:
        store, failure = said["store"], said["failure"]
        return cls(
            said["generation"],
            ScriptState(said["state"]),
            (str(store[0]), int(store[1])) if store else None,
            Failure(**failure) if failure else None,
        )


@dataclass(frozen=True, slots=True)
class StartScript:
    """StartScript the script: all workers are ready for the round, and its store listens."""

    store: tuple[str, int]


@dataclass(frozen=True, slots=True)
class Blame:
    """The script of this worker has failed first; the others had to fail too."""

    worker: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class AllDone:
    """All scripts have ended with status 0: the job is done."""


@dataclass(frozen=True, slots=True)
class GoOn:
    """Nothing is to be done. failing: a script has failed, and others may have failed before it."""

    failing: bool = False


def decide(
    reports: Mapping[str, ScriptReport], members: Sequence[str], generation: int, *, failing: bool
) -> StartScript | Blame | AllDone | GoOn:
    """What all workers do after an exchange; they have the same reports, so they decide alike.

    reports: by worker id. members: of the round, in rank order. failing: a failure was in the reports before these.
    """
    found = [(worker, reports[worker]) for worker in members if worker in reports]
    if len(found) < len(members) or any(report.generation != generation for _, report in found):
        return GoOn()
    failures = [(worker, report.failure) for worker, report in found if report.failure is not None]
    if failures:
        # The failure of one script closes its connections, by which the others fail too, some of them faster.
        first = min(failures, key=lambda entry: (entry[1].status >= 0, entry[1].at_s, entry[0]))
        return Blame(*first) if failing else GoOn(failing=True)
    states = {report.state for _, report in found}
    if states == {ScriptState.DONE}:
        return AllDone()
    store = found[0][1].store
    return StartScript(store) if states == {ScriptState.WAITING} and store is not None else GoOn()


def environment(
    me: str, members: Sequence[str], store: tuple[str, int], job: str, restarts: int, error_file: Path
) -> dict[str, str]:
    """The variables that torchrun sets for a script (torch 2.13, LocalElasticAgent._start_workers).

    members: worker ids in rank order. restarts: generations of the job before this one.
    """
    nodes = list(dict.fromkeys(map(node_of, members)))
    here = [worker for worker in members if node_of(worker) == node_of(me)]
    rank, world = str(members.index(me)), str(len(members))
    return {
        "RANK": rank,
        "ROLE_RANK": rank,
        "LOCAL_RANK": str(here.index(me)),
        "GROUP_RANK": str(nodes.index(node_of(me))),
        "ROLE_NAME": "default",
        "WORLD_SIZE": world,
        "ROLE_WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": str(len(here)),
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "MASTER_ADDR": store[0],
        "MASTER_PORT": str(store[1]),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(restarts + 1),
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
