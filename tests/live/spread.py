"""A job over several nodes, all of them on this machine: etcd, a rendezvous, and an agent with a directory per node.

As on several machines, agents share nothing but where the leader listens, how the job ended, and the checkpoints.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from chaos_tests.cluster import Network
from chaos_tests.cluster.hosts import PREFIX
from chaos_tests.support.json_lines import Journals
from elastic.checkpoints.settings import Settings
from elastic.config import JobSpec, Timing
from elastic.errors import ElasticError
from elastic.records import ledger
from elastic.records.events.story import of_generation
from elastic.rendezvous.job_status import job_status
from elastic.store.embedded import EmbeddedEtcd
from elastic.wire import codec
from tests.live.jobs import ANSWER_S, ASK_S, DEADLINE_S, POLL_S, ROOT, TRAINER

T = TypeVar("T")
Line = dict[str, Any]


class Spread:
    """Context manager; whatever it started is gone afterwards. The script does not end before its pace is 0.

    network: each node is a host of it, and the rendezvous is outside. memory: where nodes have their directories in
    memory; None: they have none."""

    def __init__(self, home: Path, etcd: EmbeddedEtcd, name: str, network: Network | None = None, **spec: Any) -> None:
        self.home = home
        self.dir = home / "rendezvous"
        self.gates = home / "gates"
        self._etcd, self._network = etcd, network
        command = (sys.executable, str(TRAINER))
        self._memory: Path | None = spec.pop("memory", None)
        timing = replace(spec.pop("timing", Timing()), join_window_s=DEADLINE_S)  # nobody is left out who starts slowly
        self.spec = JobSpec(**{"name": name, "command": command, "workers": 2, "timing": timing, **spec})
        self._processes: list[subprocess.Popen[bytes]] = []
        self._journals = Journals(lambda: self.home.glob("*/journal/*.jsonl"))
        self.gates.mkdir()
        (self.gates / "end").touch()
        self._make(self.dir)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        if error is not None:
            error.add_note(self.story())

    def rendezvous(self) -> subprocess.Popen[bytes]:
        where = ("--listen", f"{self._network.outside}:0") if self._network is not None else ()
        return self._start("elastic.rendezvous", "--etcd", self._etcd.endpoint, "--job-dir", str(self.dir), *where)

    def agent(self, node: str, *options: str, slots: int = 1) -> subprocess.Popen[bytes]:
        """One that is told of its end by the file `notice(node)`, unless the options say otherwise."""
        directory = self.home / node
        if not directory.exists():
            self._make(directory)
            for shared in ("rendezvous.json", "result.json"):
                (directory / shared).symlink_to(self.dir / shared)
        notices = () if "--notices" in options else ("--notices", f"file:{self.notice(node)}")
        words = ("--job-dir", str(directory), "--node", node, "--slots", str(slots), *notices, *options)
        if self._network is None:
            return self._start("elastic.agent", *words)
        where = ("--address", self._network.add(node))
        return self._start("elastic.agent", *words, *where, within=self._network.within(node))

    def notice(self, node: str) -> Path:
        return self.home / f"{node}.notice"

    def give_notice(self, node: str, seconds_left: float) -> None:
        temporary = self.home / "notice.tmp"
        temporary.write_text(str(seconds_left))
        temporary.rename(self.notice(node))

    def _make(self, directory: Path) -> None:
        (directory / "logs").mkdir(parents=True)
        (directory / "job.json").write_bytes(codec.to_json(self.spec))
        settings = Settings(
            root=str(self.home / "checkpoints"),
            every="1000000 steps",
            job=self.spec.name,
            job_id=self.spec.name,
            memory=self._memory_of(directory.name),
        )
        (directory / "checkpoints.json").write_text(json.dumps(asdict(settings)))

    def _memory_of(self, node: str) -> str:
        """Its directory in memory, which is made."""
        if self._memory is None:
            return ""
        (self._memory / node).mkdir(exist_ok=True)
        return str(self._memory / node)

    def _start(self, *words: str, within: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "LIVE_GATES": str(self.gates), "OMP_NUM_THREADS": "1"
        }  # fmt: skip
        command = [*PREFIX, *within, sys.executable, "-m", *words]
        with (self.home / "processes.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=self.home, env=environment, stdout=log, stderr=log)
        self._processes.append(process)
        return process

    # ---------------------------------------------------------------------------------------------- what is

    def until(self, what: str, reached: Callable[[], T | None]) -> T:
        """The first true value."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not (value := reached()):
            assert time.monotonic() < deadline_s, f"not within {DEADLINE_S} s: {what}"
            time.sleep(POLL_S)  # files and other processes: there is nothing to wait on
        return value

    def status(self) -> Line:
        """As `elastic status --json` says it, once somebody can say it."""
        deadline_s = time.monotonic() + ANSWER_S
        while True:
            try:
                return dict(job_status(self.dir, wait_s=ASK_S))
            except ElasticError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(POLL_S)

    def members(self) -> list[str]:
        return [member["worker_id"] for member in self.status()["members"]]

    def await_members(self, *worker_ids: str, state: str = "running") -> Line:
        """That these, in rank order, are the members, and have applied a step in a job of that state."""

        def there() -> Line | None:
            status = self.status()
            members = [member["worker_id"] for member in status["members"] if member["applied"]]
            return status if status["state"] == state and members == list(worker_ids) else None

        return self.until(f"members {worker_ids}, {state}", there)

    def await_slots(self, *slots: str) -> None:
        """Until workers of these slots, in rank order, are the members, of any incarnation: a newcomer whose epoch ends
        before it has copied the state is replaced by another process."""

        def there() -> bool:
            status = self.status()
            members = [member["worker_id"].rpartition(".")[0] for member in status["members"] if member["applied"]]
            return status["state"] == "running" and members == list(slots)

        self.until(f"workers of {slots}", lambda: there() or None)

    def events(self, event: str, **fields: object) -> list[Line]:
        """Journal lines of all nodes, by time."""
        wanted = fields.items()
        return [line for line in self._journals.all() if line["event"] == event and wanted <= line.items()]

    def told(self, generation: int) -> str:
        """What `elastic story` says of a generation."""
        return "\n".join(moment.said for moment in of_generation(self._journals.all(), generation))

    def await_event(self, event: str, **fields: object) -> Line:
        return self.until(f"{event} {fields}", lambda: next(iter(self.events(event, **fields)), None))

    def steps(self) -> list[Line]:
        """The ledgers of all nodes, merged by step."""
        parts = (directory / "steps.jsonl" for directory in self._directories())
        stable = not self.spec.restart  # a machine may be lost with what its script had logged in a step
        return ledger.merged((part for part in parts if part.exists()), stable=stable)

    def await_result(self) -> Line:
        path = self.dir / "result.json"
        self.until("a result", path.exists)
        document: Line = json.loads(path.read_bytes())
        return document

    def kill(self, worker_id: str, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.events("worker_started", worker_id=worker_id)[-1]["pid"], number)

    def story(self) -> str:
        """For a failure."""
        logs = [self.home / "processes.log", *self.home.glob("*/logs/*.log")]
        tails = [f"--- {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-12:]) for log in logs]
        return "\n".join([*tails, *told_from(self._journals.all()[-120:])])

    def _directories(self) -> list[Path]:
        return [path.parent for path in self.home.glob("*/job.json")]

    # ------------------------------------------------------------------------------------------- holding it

    def shut(self, gate: str, worker_id: str) -> None:
        """For this worker, and wait until it stands there."""
        temporary = self.gates / f"{gate}.tmp"
        temporary.write_text(worker_id)
        temporary.rename(self.gates / gate)
        self.until(f"{worker_id} at gate {gate!r}", (self.gates / f"{gate}.{worker_id}").exists)

    def open(self, gate: str) -> None:
        (self.gates / gate).unlink()

    def pace(self, seconds: float, worker_id: str = "") -> None:
        """How long the script takes over a shard from now on, in this worker or in all others; 0 in all: to its end."""
        temporary = self.gates / "pace.tmp"
        temporary.write_text(str(seconds))
        temporary.rename(self.gates / (f"pace.{worker_id}" if worker_id else "pace"))
        if not (seconds or worker_id):
            (self.gates / "end").unlink(missing_ok=True)


def told_from(lines: list[Line]) -> list[str]:
    """Lines of journals for people."""
    return [
        f"{line['t_mono_ns'] / 1e9:10.3f} {line['who']} {line['event']} {line['generation']} {str(rest)[:160]}"
        for line in lines
        if (rest := {k: v for k, v in line.items() if k not in _HEAD})
    ]


_HEAD = ("t_mono_ns", "t_wall", "job", "node", "pid", "who", "event", "generation")


LOSSES = ("member_lost", "quiesce_started", "redo_started", "ring_aborted", "slot_given_up")
"""Events of a job in which something was lost."""


def losses(job: Spread) -> list[str]:
    return [event for event in LOSSES if job.events(event)]
