"""The driver's part of a job on an engine, from its start to its result. The engine's own driver starts the tasks."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from elastic.agent.worker import function_file
from elastic.checkpoints.naming import EntryName
from elastic.checkpoints.series import Series, newest_at
from elastic.checkpoints.storage import storage_at
from elastic.errors import ConfigError, ElasticError, ExitCode, LaunchFailed
from elastic.platforms.common.job_request import JobRequest
from elastic.platforms.common.name_claim import NameClaim
from elastic.platforms.common.node_task import TaskOutcome, Ticket
from elastic.platforms.common.private_fleet import PrivateFleet
from elastic.records.job_files import LEDGER
from elastic.records.resume import owner_of

ASK_S = 1.0
GRACE_S = 30.0
GO_ON_S = 300.0
"""How long a job that has lost all its nodes tries to go on while nobody answers."""

FAILURES = 5
ERROR_LINE = re.compile(r"[\w.]*(?:Error|Exception|Lost|Failure|AgentEnded)\b.*")
ERROR_CHARACTERS = 300
TAIL_BYTES = 1 << 16
"""The newest line of a node's ledger is looked for in its last 64 KiB."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job has ended. value: what the function has returned on rank 0; None of a script. metrics: what was logged
    in the last step, name -> number. steps: how many were applied. digest: of the final state. checkpoint: path or URL
    of the newest checkpoint, or None. job: its name. values: what the function has returned, by rank."""

    value: Any
    metrics: Mapping[str, Any]
    steps: int
    digest: str
    checkpoint: str | None
    job: str
    values: Sequence[Any] = field(default=(), repr=False)


@dataclass(slots=True)
class NodeTask:
    """A task of the engine that serves the job. attempts: how often it was started, each time as a node of another
    name."""

    number: int
    attempts: int = 0
    node: str = ""
    failures: int = 0
    """In a row."""
    pause_s: float = 0.0
    """Before the next start."""
    due_s: float = 0.0
    """When that is."""


class JobDriver:
    """A context manager. host: the address of this machine that the nodes reach. Raises ConfigError for a request that
    cannot be a job, NameInUse while another call has its name, ElasticError if there is no rendezvous."""

    def __init__(self, request: JobRequest, host: str, extra: str) -> None:
        self.request = request
        self._extra = extra
        self._spec = request.spec()
        self.function: bytes | None = None
        """That the tasks call, as function_file has it; None: they run a script."""
        if callable(request.what):
            function_file.check_installed(f"a function on {extra.capitalize()}", extra)
            with tempfile.TemporaryDirectory() as temporary:
                path = function_file.write_function(Path(temporary), request.what, request.arguments)
                self.function = path.read_bytes()
        url = f"{self._spec.checkpoint_dir.rstrip('/')}/{self._spec.name}-1"  # each fleet begins with the number 1
        with contextlib.ExitStack() as opened:
            self._claim = opened.enter_context(NameClaim(request.name, url)) if request.name else None
            identity, found = _before(url) if request.name else ("", None)
            self._resumed = found
            """The checkpoint with which the job has begun."""
            resume = f"@{found}" if found is not None else ""
            self.fleet = opened.enter_context(PrivateFleet(f"{host}:0"))
            self.job = str(self.fleet.client.submit(self._spec, resume, identity=identity)["job"])
            self._opened = opened.pop_all()
        self._asks_s = 0.0
        self._told = ""
        self._gives_up_s = math.inf
        self._entry: dict[str, Any] = {"state": ""}
        self._served: list[TaskOutcome] = []
        export = " ".join(f"{name}={value}" for name, value in self.fleet.environment.items())
        _say(f"{self.job}; to look at it: export {export}")
        if found is not None:
            _say(f"{self.job} was begun before; it goes on from step {found.step}, checkpoint {found}")
        elif identity:
            _say(f"{self.job} was begun before, and has no whole checkpoint; it begins again")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def state(self) -> str:
        """The state of the job, a word of `elastic jobs`; "" before the fleet has answered for the first time."""
        return str(self._entry["state"])

    # ---------------------------------------------------------------------------------------------------- tasks

    def ticket(self, task: NodeTask) -> Ticket:
        """For the next attempt of this task."""
        task.attempts += 1
        task.node = f"node-{task.number}-{task.attempts}"
        slots = self.request.workers_per_node
        return self.fleet.ticket(self.job, task.node, slots, GRACE_S, self.function)

    def ended(self, task: NodeTask, outcome: TaskOutcome | Exception) -> None:
        """An attempt has ended. An error is said, and the task is started again after 0, 1, 2, 4, ... 30 s.

        Raises ElasticError for a task that has failed FAILURES times in a row while no node has come: none will.
        """
        node, task.node = task.node, ""
        if isinstance(outcome, TaskOutcome):
            task.failures, task.pause_s = 0, 0.0
            self._served.append(outcome)
            if outcome.over:
                self._asks_s = 0.0
                return
            _say(f"{node} has left the job, as its machine has to go")
        else:
            because = cause(str(outcome)) or type(outcome).__name__
            _say(f"{node} is lost: {because}")
            task.failures += 1
            if task.failures >= FAILURES and self._entry["state"] == "waits":
                needs = f"; the Python of each node needs what the function imports, and elastic-ring[{self._extra}]"
                missing = needs if "ModuleNotFoundError" in because else ""
                raise ElasticError(f"no node has come, and each attempt fails: {because}{missing}")
            task.due_s = time.monotonic() + task.pause_s
            task.pause_s = min(30.0, max(1.0, 2 * task.pause_s))
        try:
            self.fleet.forget(node)
        except ElasticError:  # it has never come, or nobody leads: its place is free 30 s after its last word
            return

    # ------------------------------------------------------------------------------------------------------ job

    def poll(self) -> bool:
        """Whether the job is over. Asks at most once a second. Raises ElasticError if the rendezvous has ended, and
        NameInUse if another call has taken the name over."""
        if self._claim is not None:
            self._claim.check()
        if time.monotonic() < self._asks_s:
            return bool(self._entry["state"] == "ended")
        self._asks_s = time.monotonic() + ASK_S
        entry = self.fleet.entry(self.job)
        if entry is None:
            return False
        self._entry = entry
        interrupted = (ExitCode.DRAINED, ExitCode.STATE_LOST)
        if entry["state"] == "ended" and entry["exit_code"] in interrupted and not entry["stopped"]:
            return not self._goes_on()
        told = f"{entry['state']}{': ' if entry['because'] else ''}{entry['because'].partition(chr(10))[0]}"
        if told != self._told and entry["state"] != "ended":
            self._told = told
            _say(f"{self.job} {told}")
        return bool(entry["state"] == "ended")

    def _goes_on(self) -> bool:
        """Every node had to go, or is lost: the job goes on from its newest checkpoint when nodes come. Returns whether
        it does, or may a little later: its fleet, or the storage, may not answer for a moment."""
        before = self._entry
        try:
            found = newest_at(before["checkpoints"], before["identity"])
            if found is None:
                return False
            # A request whose answer was lost is not followed twice.
            told = self.fleet.client.submit(self._spec, f"{self.job}@{found}", token=f"after-{self.job}")
        except ElasticError as error:
            self._gives_up_s = min(self._gives_up_s, time.monotonic() + GO_ON_S)
            later = not isinstance(error, ConfigError) and time.monotonic() < self._gives_up_s
            if not later or str(error) != self._told:
                self._told = str(error)
                _say(f"{self.job} cannot go on{' yet' * later}: {error}")
            if later:
                self._entry = {**before, "state": ""}
            return later
        self._gives_up_s = math.inf
        self.job, self._resumed = str(told["job"]), found
        self._entry, self._asks_s = {**before, "state": ""}, 0.0
        self._served.clear()
        _say(f"{before['job']} is interrupted: {before['because'].partition(chr(10))[0]}")
        _say(f"goes on as {self.job} from step {found.step}, checkpoint {found}")
        return True

    def newest_step(self) -> dict[str, Any]:
        """The newest line of the ledger that a node has, or {}. While the job runs."""
        lines = []
        for node in self._entry.get("slots", {}):
            try:
                piece = self.fleet.client.log(self.job, node, LEDGER, -TAIL_BYTES)
            except ElasticError:
                continue
            whole = piece.text[: piece.text.rfind(b"\n") + 1].splitlines()
            lines += [json.loads(line) for line in whole[-1:] if line.startswith(b"{")]
        return max(lines, key=lambda line: int(line["step"]), default={})

    def result(self) -> JobResult:
        """The result of the job, which is over, and whose tasks have all ended. Raises LaunchFailed unless it is
        complete, and ConfigError if no rank has returned from the function."""
        entry = self._entry
        if entry["exit_code"] != ExitCode.DONE:
            because, _, traceback = str(entry["because"]).partition("\n")
            failure = LaunchFailed(f"{self.job}: {because}", int(entry["exit_code"]))
            if traceback:
                failure.add_note(traceback)
            raise failure
        last = max((dict(one.last) for one in self._served if one.last), key=lambda line: int(line["step"]), default={})
        series = Series(storage_at(entry["checkpoints"]))
        found, _ = series.newest(entry["identity"])
        checkpoint = None if found is None else f"{entry['checkpoints'].rstrip('/')}/{series.path(found.name)}"
        metrics = last.get("scalars", {})
        began = self._resumed.step if self._resumed is not None else 0  # it may have been the end already
        steps = int(last["step"]) + 1 if last else began
        values = self._values(self._served)
        first = values[0] if values else None
        return JobResult(first, metrics, steps, str(entry["digest"]), checkpoint, self.job, values)

    def _values(self, served: Sequence[TaskOutcome]) -> list[Any]:
        if self.function is None:
            return []
        directory = self.fleet.directory / "values"
        directory.mkdir(mode=0o700)
        for one in served:
            for rank, content in one.values.items():
                function_file.keep_value(directory, rank, content)
        return function_file.read_values(directory)


def _before(url: str) -> tuple[str, EntryName | None]:
    """Return the identity and the newest checkpoint of the job that an earlier call has begun there, and whose fleet is
    gone. The identity is "" if there is no such job."""
    identity = str(owner_of(storage_at(url)).get("job_id", ""))
    return identity, newest_at(url, identity) if identity else None


def cause(text: str) -> str:
    """The line that a person needs, of the text of an engine's error, which has tracebacks of Python and of Java."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if ERROR_LINE.match(line) and not line.startswith(("org.apache.", "java."))]
    return (named or lines or [""])[-1 if named else 0][:ERROR_CHARACTERS]


def _say(text: str) -> None:
    print(f"elastic: {text}", file=sys.stderr, flush=True)
