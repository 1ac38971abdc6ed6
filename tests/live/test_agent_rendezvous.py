"""Real etcd, rendezvous and agent processes; workers on paper. Faults are real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos_tests.nemesis import signals
from elastic.config import JobSpec, Timing
from elastic.errors import ElasticError
from elastic.records import journal, ledger
from elastic.rendezvous.operator_client import fetch_status
from elastic.store.election import Candidate
from elastic.store.embedded import EmbeddedEtcd
from elastic.wire import codec
from tests.live.fleet import lives, pids
from tests.live.jobs import SLACK_S

PATIENCE_S = 100.0
STOPPED_S = 5.0
ROOT = Path(__file__).parents[2]
PAPER = (sys.executable, "-m", "tests.live.programs.paper_worker")


class Cluster:
    """One job's control plane in processes of its own."""

    def __init__(self, job_dir: Path, etcd: EmbeddedEtcd, name: str, command: tuple[str, ...], **changes: Any) -> None:
        self.dir = job_dir
        self.etcd = etcd
        self.spec = JobSpec(**{"name": name, "command": command, "workers": 2, "fork": False, **changes})
        self.processes: list[subprocess.Popen[bytes]] = []
        job_dir.mkdir()
        (job_dir / "job.json").write_bytes(codec.to_json(self.spec))

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", *arguments, "--job-dir", str(self.dir)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.processes.append(process)
        return process

    def rendezvous(self) -> subprocess.Popen[bytes]:
        return self.start("elastic.rendezvous", "--etcd", self.etcd.endpoint)

    def agent(self, slots: int = 2) -> subprocess.Popen[bytes]:
        return self.start("elastic.agent", "--node", "a", "--slots", str(slots))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    # ---------------------------------------------------------------------------------------------- what is

    def status(self) -> dict[str, Any]:
        """The leader's view, or nothing while there is none."""
        try:
            return fetch_status(json.loads((self.dir / "rendezvous.json").read_text())["address"], 2.0)
        except (ElasticError, FileNotFoundError):
            return {"state": "", "members": [], "generation": 0, "term": 0, "waiting": []}

    def wait(self, what: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        seen: dict[str, Any] = wait_for(what, self.status, holds)
        return seen

    def running(self, world: int, above: int = 0) -> dict[str, Any]:
        return self.wait(
            f"running with {world} workers in a generation above {above}",
            lambda s: s["state"] == "running" and len(s["members"]) == world and s["generation"] > above,
        )

    def result(self) -> dict[str, Any]:
        def read() -> dict[str, Any]:
            path = self.dir / "result.json"
            return json.loads(path.read_text()) if path.exists() else {}

        ended: dict[str, Any] = wait_for("a result", read, bool)
        return ended

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in journal.read_all(self.dir) if line["event"] == name]


def wait_for(what: str, look: Callable[[], Any], holds: Callable[[Any], bool]) -> Any:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds(seen := look()):
        assert time.monotonic() < deadline_s, f"waited {PATIENCE_S} s for {what}; last seen: {seen}"
        time.sleep(0.02)
    return seen


Make = Callable[..., Cluster]


@pytest.fixture
def cluster(tmp_path: Path, etcd: EmbeddedEtcd, request: pytest.FixtureRequest) -> Iterator[Make]:
    """Clusters of this test. The store is shared, so each job has a name of its own."""
    made: list[Cluster] = []

    def make(command: tuple[str, ...] = PAPER, **changes: Any) -> Cluster:
        name = f"job-{len(made)}-{abs(hash(request.node.nodeid)) % 10**9}"
        made.append(Cluster(tmp_path / name, etcd, name, command, **changes))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.long
def test_a_killed_worker_is_lost_and_replaced_while_the_other_keeps_its_process(cluster: Make) -> None:
    job = cluster(workers=3)
    job.rendezvous()
    job.agent(slots=3)
    before = job.running(3)
    assert [m["worker_id"] for m in before["members"]] == ["a.0.0", "a.1.0", "a.2.0"]
    os.kill(pids(before)["a.1.0"], signal.SIGKILL)
    after = job.running(3, above=before["generation"])
    assert [m["worker_id"] for m in after["members"]] == ["a.0.0", "a.2.0", "a.1.1"]
    assert {w: p for w, p in pids(after).items() if w != "a.1.1"} == {
        w: p for w, p in pids(before).items() if w != "a.1.0"
    }
    committed = [(line["generation"], line["kind"]) for line in job.events("committed")]
    assert committed == [(1, "form"), (2, "loss"), (3, "planned")]


@pytest.mark.long
def test_a_new_leader_adopts_the_generation_and_touches_nothing(cluster: Make) -> None:
    job = cluster()
    first = job.rendezvous()
    job.agent()
    before = job.running(2)
    first.kill()
    first.communicate()
    job.rendezvous()
    after = job.wait("a leader of a higher term", lambda s: s["term"] > before["term"] and all(pids(s).values()))
    assert (after["generation"], pids(after)) == (before["generation"], pids(before))
    os.kill(pids(after)["a.0.0"], signal.SIGKILL)
    again = job.running(2, above=after["generation"])
    assert [m["worker_id"] for m in again["members"]] == ["a.1.0", "a.0.1"]
    assert not [line for line in job.events("quiesce_started") if line["generation"] == 0]


@pytest.mark.long
def test_a_death_without_a_leader_is_learned_by_the_next_one(cluster: Make) -> None:
    job = cluster()
    first = job.rendezvous()
    job.agent()
    before = job.running(2)
    first.kill()
    first.communicate()
    os.kill(pids(before)["a.1.0"], signal.SIGKILL)
    wait_for("the agent to see it", lambda: job.events("worker_exited"), bool)
    job.rendezvous()
    after = job.running(2, above=before["generation"])
    assert [m["worker_id"] for m in after["members"]] == ["a.0.0", "a.1.1"]


def test_a_second_replica_waits_and_takes_over_when_the_leader_resigns(cluster: Make) -> None:
    job = cluster()
    first = job.rendezvous()
    job.agent()
    before = job.running(2)
    second = job.rendezvous()
    wait_for("two replicas", lambda: len(job.events("listening")), lambda n: n == 2)
    first.terminate()
    assert first.wait(PATIENCE_S) == 128 + signal.SIGTERM
    after = job.wait("the second replica to lead", lambda s: s["term"] > before["term"] and all(pids(s).values()))
    assert (after["generation"], pids(after)) == (before["generation"], pids(before))
    assert second.poll() is None


@pytest.mark.long
def test_a_frozen_worker_is_expelled_while_it_stands_still_and_comes_back_as_a_newcomer(cluster: Make) -> None:
    job = cluster(workers=3)
    job.rendezvous()
    job.agent(slots=3)
    before = job.running(3)
    frozen = pids(before)["a.2.0"]
    thaw = signals.freeze([frozen])
    try:
        after = job.running(2, above=before["generation"])
        assert "a.2.0" not in pids(after)
    finally:
        thaw()
    (found,) = job.events("worker_frozen")
    assert found["worker_id"] == "a.2.0" and "stopped by a signal" in found["because"]
    back = job.running(3, above=after["generation"])
    assert [m["worker_id"] for m in back["members"]] == ["a.0.0", "a.1.0", "a.2.1"]
    assert "fenced" in job.events("worker_exited")[0]["because"]


def test_a_finished_job_leaves_its_result_and_nothing_else(cluster: Make, etcd: EmbeddedEtcd) -> None:
    job = cluster()
    rendezvous, agent = job.rendezvous(), job.agent()
    workers = pids(job.running(2))
    (job.dir / "finish").touch()
    assert job.result() == {
        "exit_code": 0, "because": "all members have finished", "digest": "digest", "generation": 1,
    }  # fmt: skip
    assert (agent.wait(PATIENCE_S), rendezvous.wait(PATIENCE_S)) == (0, 0)
    assert not any(lives(pid) for pid in workers.values())
    assert not list(job.dir.glob("*.sock"))
    with etcd.connect() as store:
        keys = [item.key for item in store.prefix(f"/elastic/{job.spec.name}/", timeout_s=5).items]
        assert f"/elastic/{job.spec.name}/leader" not in keys
        late = Candidate(store, job.spec.name, "late:1", time.monotonic)
        late.stand()
        assert (late.result() or {})["exit_code"] == 0
        late.resign()


@pytest.mark.long
def test_every_step_is_in_the_ledger_once_though_each_member_reports_it(cluster: Make) -> None:
    job = cluster()
    job.rendezvous()
    agent = job.agent()
    job.running(2)
    (job.dir / "finish").touch()
    agent.wait(PATIENCE_S)
    assert [line["step"] for line in ledger.read(job.dir / "steps.jsonl")] == [0]
    assert not list((job.dir / "spill").glob("*")) if (job.dir / "spill").exists() else True


@pytest.mark.long
def test_only_the_leading_workers_lines_reach_the_agents_stdout(cluster: Make) -> None:
    job = cluster()
    job.rendezvous()
    agent = job.agent()
    job.running(2)
    (job.dir / "print").touch()
    for worker in ("a.0.0", "a.1.0"):
        log = job.dir / "logs" / f"{worker}.log"
        wait_for(f"a line in {log}", log.read_text, lambda text: "line of" in text)
    (job.dir / "finish").touch()
    out, _ = agent.communicate(timeout=PATIENCE_S)
    assert out == b"line of a.0.0\n"


def test_a_killed_agent_takes_its_workers_with_it_and_the_next_one_says_so(cluster: Make) -> None:
    job = cluster()
    job.rendezvous()
    agent = job.agent()
    before = pids(job.running(2))
    job.wait("that the leader has heard of a step", lambda s: s.get("applied", 0) > 0)  # else nothing is lost
    agent.kill()
    wait_for("the workers to be gone", lambda: [p for p in before.values() if lives(p)], lambda alive: not alive)
    job.agent()
    result = job.result()
    assert result["exit_code"] == 4, "with one node there is no copy of the state elsewhere"
    started = [line["worker_id"] for line in job.events("worker_started")]
    assert len(started) == len(set(started)), "a worker id was given twice"


@pytest.mark.long
def test_a_stopped_agent_stops_its_workers_within_five_seconds(cluster: Make) -> None:
    job = cluster()
    job.rendezvous()
    agent = job.agent()
    workers = pids(job.running(2))
    asked_s = time.monotonic()
    agent.terminate()
    assert agent.wait(PATIENCE_S) == 143
    assert time.monotonic() - asked_s < STOPPED_S + SLACK_S
    assert not any(lives(pid) for pid in workers.values())


@pytest.mark.long
def test_a_worker_that_ignores_sigterm_is_killed_within_five_seconds_with_its_children(cluster: Make) -> None:
    script = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "print('pids', child.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    job = cluster((sys.executable, "-c", script), workers=1, timing=Timing(stop_grace_s=1.5))
    agent = job.agent(slots=1)
    log = job.dir / "logs" / "a.0.0.log"
    text = wait_for("the child", lambda: log.read_text() if log.exists() else "", lambda said: said.endswith("\n"))
    child = int(text.split()[1])
    asked_s = time.monotonic()
    agent.send_signal(signal.SIGINT)
    assert agent.wait(PATIENCE_S) == 130
    assert time.monotonic() - asked_s < STOPPED_S + SLACK_S
    wait_for("the child to be gone", lambda: lives(child), lambda alive: not alive)


@pytest.mark.parametrize(
    ("script", "exit_code", "because"),
    [
        ("pass", 2, "the script never called elastic.join()"),
        ("raise ValueError('boom at import')", 1, "boom at import"),
    ],
)
def test_a_script_that_cannot_work_ends_the_job_and_says_why(
    cluster: Make, script: str, exit_code: int, because: str
) -> None:
    job = cluster((sys.executable, "-c", script), workers=1)
    rendezvous, agent = job.rendezvous(), job.agent(slots=1)
    result = job.result()
    assert (result["exit_code"], because in result["because"]) == (exit_code, True), result
    assert (agent.wait(PATIENCE_S), rendezvous.wait(PATIENCE_S)) == (exit_code, 0)


@pytest.mark.long
def test_a_program_that_does_not_exist_ends_the_job_as_bad_input(cluster: Make) -> None:
    job = cluster(("no-such-program",), workers=1)
    job.rendezvous()
    assert job.agent(slots=1).wait(PATIENCE_S) == 2
    assert "no-such-program" in job.result()["because"]


@pytest.mark.long
def test_a_job_directory_has_one_agent_at_a_time(cluster: Make) -> None:
    job = cluster()
    job.rendezvous()
    job.agent()
    job.running(2)
    second = job.agent()
    _, said = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 2
    assert b"is in use by a running agent" in said


@pytest.mark.long
def test_a_job_that_is_over_is_not_led_again(cluster: Make) -> None:
    job = cluster()
    job.rendezvous()
    job.agent()
    job.running(2)
    (job.dir / "finish").touch()
    first = job.result()
    (job.dir / "result.json").unlink()  # as if the leader that stored the end had died before it wrote this
    late = job.rendezvous()
    assert late.wait(PATIENCE_S) == 0
    assert job.result() == first


@pytest.mark.long
def test_a_job_waits_beyond_its_window_for_workers_that_are_still_starting(cluster: Make) -> None:
    slow = ("sh", "-c", f'until [ -e "$ELASTIC_JOB_DIR/go" ]; do sleep 0.05; done; exec {" ".join(PAPER)}')
    job = cluster(command=slow, min_workers=2, timing=Timing(join_window_s=3.0))
    job.agent()  # first, because a window in which no agent comes at all ends the job
    wait_for("its workers", lambda: len(job.events("worker_started")) == 2, bool)
    job.rendezvous()
    job.wait("it says for whom it waits", lambda s: "waiting for those starting: 2 on a" in s.get("because", ""))
    (job.dir / "go").touch()
    job.running(2)


@pytest.mark.long
def test_workers_without_any_leader_park_and_the_next_leader_rebuilds_their_ring(cluster: Make) -> None:
    """After orphan_limit_s a leader elsewhere may take the ring for gone, so even a healthy one must have stopped."""
    timing = Timing(control_silence_s=3.0, orphan_limit_s=4.0, orphan_margin_s=3.0)
    job = cluster(timing=timing)
    rendezvous = job.rendezvous()
    job.agent()
    before = job.running(2)
    rendezvous.kill()
    rendezvous.wait()
    wait_for("the workers to park", lambda: job.events("parked"), bool)
    job.rendezvous()
    after = job.running(2, above=before["generation"])
    assert pids(after) == pids(before)
