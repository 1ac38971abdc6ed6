"""An agent with a good certificate on a node where the job has no place stays outside, and the job does not notice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from chaos_tests.support.processes import MARK
from elastic.errors import ExitCode
from elastic.records.files import TOKEN
from tests.live.conftest import Quiet
from tests.live.fleet import Fleet, pids
from tests.live.jobs import DEADLINE_S

NOT_PLACED, NOT_ITS_TOKEN = (
    "the fleet has not placed this job on this node",
    "the token is not that of this job's place",
)


def try_to_join(fleet: Fleet, job: str, node: str, token: str, because: str) -> None:
    """As a process on that node that can read its certificates."""
    own = fleet.home / "stranger" / node
    shutil.rmtree(own, ignore_errors=True)
    (own / "journal").mkdir(parents=True)
    (own / "logs").mkdir()
    victim = fleet.home / "a" / job
    for file in ("job.json", "id"):
        (own / file).write_bytes((victim / file).read_bytes())
    settings = json.loads((victim / "checkpoints.json").read_text())
    (own / "checkpoints.json").write_text(json.dumps({**settings, "memory": "", "every": "off"}))
    if token:
        (own / TOKEN).write_text(token)
    words = {
        "--job-dir": str(own),
        "--node": node,
        "--slots": "1",
        "--rendezvous": ",".join(fleet.client.replicas),
        "--address": fleet.hosts.add(node),
        "--certs": str(fleet.home / "certs" / node),
        "--notices": "none",
    }
    command = [sys.executable, "-P", "-m", "elastic.agent", *(word for option in words.items() for word in option)]
    environment = {**os.environ, MARK: fleet.mark}
    done = subprocess.run(
        [*fleet.hosts.within(node), *command], capture_output=True, text=True, timeout=DEADLINE_S, env=environment
    )
    assert done.returncode == ExitCode.BAD_INPUT, done.stderr
    assert f"the leader of {job} does not admit the agent of {node}: {because}" in done.stderr
    known = {"at": "Attend", "caller": f"agent {node}", "job": job}
    fleet.until("a line of it", lambda: [one for one in fleet.events("refused", **known) if because in one["because"]])


@pytest.mark.long
def test_a_stranger_is_refused_on_any_node_with_any_token_and_the_bits_are_the_quiet_ones(
    quiet: Quiet, tmp_path: Path
) -> None:
    with Fleet(tmp_path, certs=True) as fleet:
        for node, kind in (("a", "ours"), ("b", "ours"), ("c", "theirs")):
            fleet.node(node, "--label", f"kind={kind}")
        fleet.await_nodes("a", "b", "c")
        fleet.pace(0.05)
        job = fleet.train("guarded", workers=2, labels=["kind=ours"])
        before = fleet.await_members(job, "a.0.0", "b.0.0")
        token = (fleet.home / "b" / job / TOKEN).read_text()

        try_to_join(fleet, job, "c", "", NOT_PLACED)
        try_to_join(fleet, job, "c", token, NOT_PLACED)
        try_to_join(fleet, job, "b", "", NOT_ITS_TOKEN)

        fleet.end(leader := fleet.leader_of(job))
        term = before["term"]
        fleet.until("another leader", lambda: fleet.status(job).get("term", 0) > term)
        fleet.until("its members", lambda: pids(fleet.status(job)) == pids(before))
        fleet.replica(leader)
        try_to_join(fleet, job, "c", token, NOT_PLACED)

        assert fleet.run("drain", "--node", "b").returncode == 0
        fleet.await_members(job, "a.0.0")
        assert not fleet.events("member_lost", worker_id="b.0.0"), "it was admitted until it had left"
        fleet.until("its agent to end", lambda: not (fleet.home / "b" / job / TOKEN).exists())
        try_to_join(fleet, job, "b", "", NOT_PLACED)
        try_to_join(fleet, job, "b", token, NOT_PLACED)

        assert fleet.run("drain", "--node", "b", "--cancel").returncode == 0
        again = fleet.await_slots(job, "a.0", "b.0")
        other = (fleet.home / "b" / job / TOKEN).read_text()
        assert other not in ("", token)
        try_to_join(fleet, job, "b", token, NOT_ITS_TOKEN)
        assert pids(fleet.status(job)) == pids(again), "nor did it end the stream of the agent there"

        fleet.finish(job, quiet.digest, quiet.steps)
        assert not fleet.events("not_admitted", job=job, node="a")
        written = [fleet.home.glob("*.log"), fleet.home.rglob("*.jsonl"), fleet.home.rglob("logs/*")]
        text = b"".join(path.read_bytes() for paths in written for path in paths if path.is_file())
        assert token.encode() not in text and other.encode() not in text
