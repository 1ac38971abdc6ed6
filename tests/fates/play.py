"""One trial: the quiet run, the same training under `elastic run` with its strikes, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_tests.nemesis import signals
from chaos_tests.nemesis.membership_view import MembershipView
from chaos_tests.support.json_lines import Journals
from chaos_tests.support.processes import living, services
from elastic.errors import ExitCode
from elastic.records import ledger
from elastic.records.exactly_once import prove
from tests.fates.draw import FRAMEWORKS, IN_ROUNDS, KINDS, Program, Strike, Trial
from tests.live.jobs import ROOT, Job

PROGRAMS = {
    kind: Path(__file__).parent / f"{'kept' if kind in IN_ROUNDS else kind}_program.py" for kind in dict.fromkeys(KINDS)
} | dict.fromkeys(FRAMEWORKS, ROOT / "tests" / "frameworks" / "scripts" / "drawn.py")
POLL_S = 0.002
"""Files and other processes: there is nothing to wait on."""

QUIET_S = 1200.0
"""Only bounds a hang: on a machine that does other work a quiet run takes many times as long as alone."""

END_S = 600.0
"""After the last strike, and between two: a job that takes longer has stopped."""

PATIENCE_S = 4.0
"""A strike that waits for an event is done after so many seconds without that event. A strike that cannot be done for
so many seconds is skipped."""

INTERRUPTED: dict[signal.Signals | None, set[int]] = {
    signal.SIGKILL: {-9},
    signal.SIGTERM: {143, 6, -15},
    signal.SIGINT: {130, -2},
}
"""Exit codes of a command that such a signal has ended, and that the same command takes up again. Negative ones are of
commands that had only just begun."""

THE_COMMAND = {"kill_command": signal.SIGKILL, "stop_command": signal.SIGTERM, "interrupt_command": signal.SIGINT}
AHEAD = {"kill_command", "signal_all"}
"""After these a job may go on from an older step than a snapshot that the script has saved; that is refused by name."""
OWN_SNAPSHOT = "a snapshot of the script's own may be newer than what the job has kept"
SERVICES = {
    "kill_agent": "elastic.agent",
    "kill_rendezvous": "elastic.rendezvous",
    "freeze_rendezvous": "elastic.rendezvous",
}


class Broken(Exception):
    """A promise that does not hold: which, and what was seen."""


@dataclass
class Played:
    """done: what was done, by its name; skipped: what could not be, and why."""

    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    commands: int = 1
    generations: int = 0


@dataclass(frozen=True)
class Seen:
    """What is compared of two runs. steps: the lines of the ledger, or of a sink where the run has no ledger. said: the
    digest that the script itself has written, or ""."""

    digest: str
    said: str
    steps: list[dict[str, Any]]


def play(trial: Trial, home: Path) -> Played:
    """Raises Broken."""
    expected = _quiet(trial, home)
    played = _Faulty(trial, home).run()
    try:
        _judge(trial, home, expected)
    except Broken as broken:
        raise Broken(f"{broken}\ndone: {played.done}, in {played.commands} commands") from broken
    return played


def _judge(trial: Trial, home: Path, expected: Seen) -> None:
    job_dir = home / "job"
    lines = ledger.read(job_dir / "steps.jsonl")
    found = {"ledger": lines}
    if trial.program.kind in ("steps", "outer"):
        found["sink"] = [json.loads(line) for line in (home / "sink.jsonl").read_text().splitlines()]
    in_rounds, drawn = trial.program.kind in IN_ROUNDS, trial.program.source == "drawn"
    for name, steps in found.items():
        one, other = (_without_samples(each) for each in (steps, expected.steps))
        if in_rounds:
            other = other or [{**line, "step": number} for number, line in enumerate(one)]  # torchrun has no ledger
            one, other = _both_known(one, other)
            if "log" in trial.program.extras and 2 * sum(bool(line["scalars"]) for line in one) < len(one):
                raise Broken(f"the {name} has what was logged in less than half of the steps")
        if (difference := ledger.compare(one, other)) is not None:
            raise Broken(f"the {name} and the quiet run's: {difference}")
    result = json.loads((job_dir / "result.json").read_bytes())
    digest, said = result.get("digest") or "", _said(home, "files")
    if digest != expected.digest and not (in_rounds and "" in (digest, expected.digest)):
        raise Broken(f"digest {digest[:16]} and not {expected.digest[:16]}, as without faults")
    if said != expected.said:
        raise Broken(f"the script's own digest {said[:16]} and not {expected.said[:16]}, as without faults")
    if not drawn and not in_rounds and "leaves_epoch" not in trial.program.extras:
        broken = [epoch for epoch in prove(iter(lines)) if not epoch.proved]
        if broken:
            raise Broken(f"samples not as planned: {broken[0].findings[:3]}")


def _without_samples(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A sink is not told of samples; they are compared with their plan."""
    return [{name: value for name, value in line.items() if name != "samples"} for line in lines]


def _both_known(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], ...]:
    """Without the values of steps that one of two runs in rounds does not know: workers that were lost or frozen may
    not have told what was logged in the last steps."""
    known = {
        line["step"] for line, twin in zip(one, other, strict=False) if line.get("scalars") and twin.get("scalars")
    }
    return tuple(
        [line if line["step"] in known else {**line, "scalars": {}} for line in lines] for lines in (one, other)
    )


def _said(home: Path, files: str) -> str:
    path = home / files / "digest"
    return path.read_text() if path.exists() else ""


def _quiet(trial: Trial, home: Path) -> Seen:
    """The training without faults: of a job of one without an agent, where there can be one; of torchrun, where the
    script always has as many processes; else of one worker."""
    (home / "quiet-files").mkdir()
    sink = home / "quiet.jsonl"
    environment = {
        "FATES_QUIET": "1",
        "FATES_SINK": str(sink),
        "FATES_FILES": str(home / "quiet-files"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    program = trial.program
    script = [str(PROGRAMS[program.kind]), program.to_json()]
    if program.kind in ("ranks", "units", *FRAMEWORKS) or trial.sums:
        words = ["--workers=1", "--quiet", "--notices=none", *_way(program), *trial.sums, *script]
        with Job(home, *words, name="quiet", environment=environment) as job:
            code = job.wait(QUIET_S)
            if code != 0:
                raise Broken(f"the quiet run ends with {code}: {job.output[-2000:]}")
            return Seen(str(job.result.get("digest") or ""), _said(home, "quiet-files"), job.steps())
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={program.shards}", "--standalone"]
    command = [sys.executable, *(launcher if program.kind == "replayed" else []), *script]
    everything = {**os.environ, **environment}
    done = subprocess.run(command, cwd=home, env=everything, capture_output=True, text=True, timeout=QUIET_S)
    if done.returncode != 0:
        raise Broken(f"the quiet run ends with {done.returncode}: {done.stderr[-2000:]}")
    if program.kind == "replayed":
        return Seen("", _said(home, "quiet-files"), [])
    digest = next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("digest "))
    return Seen(digest, "", [json.loads(line) for line in sink.read_text().splitlines()])


def _way(program: Program) -> tuple[str, ...]:
    """Options without which this script cannot run at all."""
    match program.kind:
        case "ranks" | "trainer" | "lightning":
            return (f"--ranks={program.shards}",)
        case "units":
            return ("--restart",)
        case "replayed":
            return ("--restart", f"--ranks={program.shards}")
    return ()


class _Faulty:
    """The commands of one job, one after the other, and what is done to them."""

    def __init__(self, trial: Trial, home: Path) -> None:
        self._trial, self._home = trial, home
        self._played = Played()
        self._thaw: list[tuple[float, signals.End]] = []

    def run(self) -> Played:
        todo = list(self._trial.strikes)
        while True:
            code = self._command(todo)
            if code == 0:
                self._played.skipped += [f"{strike}: the job was over" for strike in todo]
                return self._played
            self._played.commands += 1

    def _command(self, todo: list[Strike]) -> int:
        """One command, until it ends; its exit code, which is 0 or that of the signal which it was sent."""
        program, files = self._trial.program, self._home / "files"
        files.mkdir(exist_ok=True)
        environment = {"FATES_SINK": str(self._home / "sink.jsonl"), "FATES_FILES": str(files)}
        words = [f"--workers={self._trial.workers}", "--quiet", "--notices=none", *_way(program), *self._trial.options]
        words += [str(PROGRAMS[program.kind]), program.to_json()]
        with Job(self._home, *words, environment=environment) as job:
            watch = _Watch(job, program)
            allowed = {0}
            moment = _Moment(watch, todo[0]) if todo else None
            try:
                deadline = time.monotonic() + END_S
                while (code := job.command.process.poll()) is None:
                    self._thaw_those_due()
                    watch.look()
                    if moment is not None and moment.reached():
                        try:
                            allowed |= INTERRUPTED.get(self._strike(moment.strike, watch), set())
                            if program.kind in IN_ROUNDS and moment.strike.act == "kill_agent":
                                allowed.add(ExitCode.STATE_LOST)  # what the memory had is gone with the command
                        except signals.Impossible as reason:
                            if not moment.too_late():
                                continue
                            self._played.skipped.append(f"{moment.strike}: {reason}")
                        deadline = time.monotonic() + END_S
                        del todo[0]
                        moment = _Moment(watch, todo[0]) if todo else None
                    if time.monotonic() > deadline:
                        raise Broken(f"no end after {END_S:.0f} s")
                    time.sleep(POLL_S)
                if code not in allowed:
                    raise Broken(f"exit code {code}")
                if _is_complete(job):
                    code = 0  # which the command has said, too, and the same command would refuse it
                if left := job.left_behind():
                    raise Broken(f"left behind: {left}")
            except Broken as broken:
                raise Broken(f"{broken}\ndone: {self._played.done}\n{job.story()}") from broken
            finally:
                for _, thaw in self._thaw:
                    thaw()
                self._thaw.clear()
                self._played.generations += watch.world.generation
            return code

    def _thaw_those_due(self) -> None:
        for entry in [entry for entry in self._thaw if time.monotonic() >= entry[0]]:
            self._thaw.remove(entry)
            entry[1]()

    def _strike(self, strike: Strike, watch: _Watch) -> signal.Signals | None:
        """The signal, if the command itself got one. Raises blows.Impossible."""
        if "own_snapshot" in self._trial.program.extras and strike.act in AHEAD:
            raise signals.Impossible(OWN_SNAPSHOT)
        if (number := THE_COMMAND.get(strike.act)) is not None:
            watch.job.command.process.send_signal(number)
            self._played.done.append(strike.act)
            return number
        if strike.act == "signal_all":
            _signal_all(watch.job)
            self._played.done.append(strike.act)
            return None
        pids = watch.victims(strike)
        if strike.act.startswith("freeze"):
            self._thaw.append((time.monotonic() + strike.freeze_ms / 1000, signals.freeze(pids)))
        else:
            signals.send(pids, signal.SIGSEGV if strike.act == "segfault" else signal.SIGKILL)
            watch.hit.update(pids)
        watch.struck()
        self._played.done.append(f"{strike.act} {strike.victim}".strip())
        return None


def _signal_all(job: Job) -> None:
    """All that asks to stop, to every process but the command."""
    for pid in living(job.command.mark) - {job.command.process.pid}:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, number)


def _is_complete(job: Job) -> bool:
    return (job.dir / "result.json").exists() and job.result["exit_code"] == 0


class _Watch:
    """What the journals and the ledger of a running job say."""

    def __init__(self, job: Job, program: Program) -> None:
        self.job, self.world = job, MembershipView()
        self._in_rounds = program.kind in IN_ROUNDS
        self._has_snapshot = "own_snapshot" in program.extras
        self._since_ns = time.monotonic_ns()
        self.hit: set[int] = set()
        """Pids that are about to end, which the journals may say a little later."""
        self.events: dict[str, int] = {}
        self._all_hit = False
        self._journals = Journals(lambda: (job.dir / "journal").glob("*.jsonl"))

    def look(self) -> None:
        new = [line for line in self._journals.new() if line["t_mono_ns"] > self._since_ns]  # not of a command before
        self.world.feed(new)
        for line in new:
            self.events[line["event"]] = self.events.get(line["event"], 0) + 1

    def struck(self) -> None:
        """If the last strike hit every holder of the state, only what is kept from now on counts."""
        if self._all_hit:
            self.world.lose_all()
            self._all_hit = False

    def victims(self, strike: Strike) -> list[int]:
        """Pids. Raises blows.Impossible: nobody is there, or the state would be lost, which has an end of its own."""
        world, self._all_hit = self.world, False
        if (service := SERVICES.get(strike.act)) is not None:
            if service == "elastic.agent":
                self._must_be_kept()
            found = services(self.job.command.mark).get(service)
            if found is None:
                raise signals.Impossible(f"{service} does not run")
            return [found]
        hit = {worker for worker, pid in world.pids.items() if pid in self.hit}
        alive = [worker for worker in world.members if worker not in world.ended | world.lost | hit]
        if strike.act == "kill_all":
            chosen = alive
        elif strike.victim == "fork_server":
            ready = [line for line in self._journals.all() if line["event"] == "fork_server_ready"]
            if not ready or ready[-1]["pid"] not in living(self.job.command.mark):
                raise signals.Impossible("no fork server runs")
            return [int(ready[-1]["pid"])]
        elif strike.victim == "newest_process":
            chosen = [worker for worker in world.pids if worker not in world.ended | hit][-1:]
        elif strike.victim == "script":
            scripts = [pid for pids in world.scripts.values() for pid in pids]
            if not scripts:
                raise signals.Impossible("no script runs")
            return scripts[-1:]
        else:
            chosen = _chosen(strike.victim, alive)
        if not chosen:
            raise signals.Impossible("nobody is there")
        if set(chosen) >= set(world.holders) - hit:
            self._must_be_kept()
        return [world.pids[worker] for worker in chosen if worker in world.pids]

    def _must_be_kept(self) -> None:
        if self._in_rounds:
            return  # the machine has the state, and a script that finds none begins anew
        if self._has_snapshot:
            raise signals.Impossible(OWN_SNAPSHOT)
        if self.world.kept_step <= self.world.began_step:
            raise signals.Impossible("nothing newer is kept than that from which the job began")
        self._all_hit = True


def _chosen(victim: str, alive: list[str]) -> list[str]:
    match victim:
        case "oldest":
            return alive[:1]
        case "youngest":
            return alive[-1:]
        case "middle":
            return alive[len(alive) // 2 :][:1]
        case "two":
            return alive[:2]
        case _:
            return alive[1:]


class _Moment:
    """When a strike is due."""

    def __init__(self, watch: _Watch, strike: Strike) -> None:
        self._watch, self.strike = watch, strike
        self._since_s = time.monotonic()
        self._wanted = watch.events.get(strike.event, 0) + strike.number
        self._due_s: float | None = None
        """None: what it waits for has not come."""

    def reached(self) -> bool:
        if self._due_s is None and self._come():
            self._due_s = time.monotonic() + self.strike.delay_ms / 1000
        return self._due_s is not None and time.monotonic() >= self._due_s

    def too_late(self) -> bool:
        return self._due_s is not None and time.monotonic() > self._due_s + PATIENCE_S

    def _come(self) -> bool:
        match self.strike.when:
            case "step":
                return bool(self._watch.events) and len(self._watch.job.steps()) >= self.strike.number
            case "event":
                return (
                    time.monotonic() > self._since_s + PATIENCE_S
                    or self._watch.events.get(self.strike.event, 0) >= self._wanted
                )
            case _:  # "start" of this command, or "after" the strike before, which may have ended the command before
                return bool(self._watch.events)


def workspace(parent: Path, seed: int) -> Path:
    home = parent / f"trial-{seed}"
    home.mkdir(parents=True)
    return home
