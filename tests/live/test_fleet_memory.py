"""All workers of a fleet's job are killed at once: it goes on from what the memory of its nodes holds."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic.checkpoints.naming import EntryName
from elastic.records import ledger
from elastic.records.host_memory import PARENT
from tests.live.conftest import Quiet
from tests.live.fleet import Fleet, Line

DURABLE = 60
"""Before this step a checkpoint is taken, and before each multiple."""


def kill_all(status: Line, *emptied: Path, damaged: Sequence[Path] = ()) -> None:
    """emptied: directories of snapshots that are gone then; damaged: those in which a bit of each is another one."""
    for number in (signal.SIGSTOP, signal.SIGKILL):  # what is stopped writes nothing more
        for member in status["members"]:
            os.kill(member["pid"], number)
        for directory in emptied:
            shutil.rmtree(directory / "_periodic", ignore_errors=True)
    for part in (part for directory in damaged for part in directory.glob("_periodic/*/*.safetensors")):
        content = bytearray(part.read_bytes())
        content[-1] ^= 1
        part.write_bytes(content)


def memory_of(fleet: Fleet, node: str, job: str) -> Path:
    """Where that node keeps the job's snapshots."""
    settings = (fleet.home / node / job / "checkpoints.json").read_text()
    return next(path for path in PARENT.glob("elastic-*") if str(path) in settings)


def await_snapshot(fleet: Fleet, after: int, *nodes: str) -> None:
    """Each has completed one of a later step."""

    def there() -> bool:
        complete = fleet.events("snapshot_complete")
        return set(nodes) <= {line["node"] for line in complete if line["step"] > after}

    fleet.until(f"a snapshot after step {after} on {nodes}", there)


@pytest.mark.long
def test_a_job_whose_workers_are_all_killed_goes_on_from_memory_and_ends_with_the_quiet_bits(
    tmp_path: Path, quiet: Quiet
) -> None:
    with Fleet(tmp_path, replicas=1) as fleet:
        fleet.node("a")
        fleet.node("b")
        fleet.await_nodes("a", "b")
        fleet.pace(0.02)
        job = fleet.train("train", workers=2, snapshot_every="4 steps", checkpoint_every=f"{DURABLE} steps")
        first = fleet.await_members(job, "a.0.0", "b.0.0")
        memory = {node: memory_of(fleet, node, job) for node in ("a", "b")}
        await_snapshot(fleet, 0, "a", "b")
        kill_all(first)

        second = fleet.await_members(job, "a.0.1", "b.0.1")
        (formed,) = fleet.events("published", kind="form", generation=second["generation"])
        assert "snapshot in memory" in formed["because"]
        restored = fleet.events("state_restored")
        assert {line["node"] for line in restored} == {"a", "b"}

        await_snapshot(fleet, restored[0]["step"], "a", "b")
        kill_all(second, memory["b"])
        third = fleet.await_members(job, "a.0.2", "b.0.2")
        restored = fleet.events("state_restored")
        assert [line["node"] for line in restored][2:] == ["a"], "the other one joined, and copied"

        fleet.pace(0.005)
        fleet.until("a checkpoint", lambda: fleet.events("pointer_moved", series="_periodic"))
        fleet.pace(0.05)
        kill_all(third, *memory.values())
        fleet.await_members(job, "a.0.3", "b.0.3")
        steps = [line["step"] for line in fleet.events("state_restored")][3:]
        # A checkpoint that is due while the one before is being written is of a later step.
        saved = [EntryName.of(line["entry"]) for line in fleet.events("pointer_moved", series="_periodic")]
        newest = max(entry.step for entry in saved if entry.generation <= third["generation"])
        assert steps == [newest, newest] and newest >= DURABLE, "of the newest checkpoint"

        fleet.pace(0.0)
        ended = fleet.await_end(job)
        assert (ended["exit_code"], ended["digest"]) == (0, quiet.digest), ended["because"]
        assert ledger.compare(fleet.steps(job), quiet.steps) is None
        fleet.until("the memory to be free", lambda: not any(path.exists() for path in memory.values()))
        assert fleet.end("a", signal.SIGTERM) == fleet.end("b", signal.SIGTERM) == 128 + signal.SIGTERM


@pytest.mark.long
def test_damage_that_is_found_only_while_the_state_is_loaded_costs_no_job(tmp_path: Path, quiet: Quiet) -> None:
    """First what one of two nodes keeps is damaged, then what both keep, then the checkpoint that was taken instead."""
    with Fleet(tmp_path, replicas=1) as fleet:
        fleet.node("a")
        fleet.node("b")
        fleet.await_nodes("a", "b")
        fleet.pace(0.01)
        job = fleet.train("train", workers=2, snapshot_every="4 steps", checkpoint_every="15 steps")  # none of "best"
        first = fleet.await_members(job, "a.0.0", "b.0.0")
        memory = [memory_of(fleet, node, job) for node in ("a", "b")]
        fleet.until("two checkpoints", lambda: len(fleet.events("pointer_moved", series="_periodic")) >= 2)
        await_snapshot(fleet, 40, "a", "b")
        fleet.pace(0.05)
        kill_all(first, damaged=memory[1:])

        second = fleet.await_members(job, "a.0.1", "b.0.2")
        assert [line["node"] for line in fleet.events("snapshot_set_aside")] == ["b"]
        (restored,) = fleet.events("state_restored")
        assert restored["node"] == "a" and restored["step"] > 40

        await_snapshot(fleet, restored["step"], "a", "b")
        newest = max(line["entry"] for line in fleet.events("pointer_moved", series="_periodic"))
        kill_all(second, damaged=memory)
        part = next((fleet.home / "checkpoints").glob(f"*/_periodic/{newest}/*.safetensors"))
        part.write_bytes(part.read_bytes()[:-1] + b"\x7f")
        aside, *_ = fleet.until("the checkpoint to be set aside", lambda: fleet.events("checkpoint_set_aside"))
        assert (aside["entry"], "" < aside["instead"] < newest) == (newest, True)

        def formed() -> list[str]:
            said = [str(line["because"]) for line in fleet.events("published", kind="form")]
            return said if f"checkpoint {aside['instead']}" in said[-1] else []

        # Not always in the last one: an older snapshot may have been there too, and damaged with the others.
        said = fleet.until("the one before to be gone on from", formed)
        assert any(f"{newest} cannot be read" in because for because in said)

        fleet.finish(job, quiet.digest, quiet.steps)
