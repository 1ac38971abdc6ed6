"""The contract between an agent and the workers that it starts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from elastic.agent.worker.environment import WorkerEnvironment
from elastic.config import JobSpec, Reduction, RingKind, Timing
from elastic.errors import ConfigError
from elastic.protocol.shard_advice import Worlds
from elastic.protocol.worker_slot import Spawn

SPEC = JobSpec(
    name="gpt",
    command=("python", "train.py"),
    workers=2,
    threads=3,
    reduction=Reduction.EXACT,
    retain_results=False,
    outer="diloco:H=50",
    ring=RingKind.TCP,
    timing=Timing(beat_s=0.25),
)


def told(**changes: Any) -> WorkerEnvironment:
    wanted = Spawn("gpu-7.1.4", changes.pop("restarted", True), changes.pop("device", ""))
    values = {"agent_socket": "/run/a.sock", "address": "10.0.0.7", "certs": Path("/etc/certs")}
    values["worlds"] = Worlds(1, 4, 2)
    return WorkerEnvironment.of_job(SPEC, Path("/jobs/gpt"), 1, wanted, **{**values, **changes})


@pytest.mark.parametrize("changes", [{}, {"certs": None}, {"restarted": False}, {"worlds": None}, {"device": "GPU-a"}])
def test_a_worker_knows_what_its_agent_has_told(changes: dict[str, Any]) -> None:
    environ = {**os.environ, "ELASTIC_CERTS": "/of/the/command", **told(**changes).to_environ()}
    assert WorkerEnvironment.from_environ(environ) == told(**changes)
    assert (environ["ELASTIC_NODE"], environ["ELASTIC_SLOT"]) == ("gpu-7", "1")


def test_every_variable_but_three_must_be_there_and_is_named() -> None:
    environ = told().to_environ()
    for name in environ.keys() - {"ELASTIC_NODE", "ELASTIC_CERTS", "ELASTIC_DEVICE"}:
        with pytest.raises(ConfigError, match=f"^{name} is not set; start the script with `elastic run`"):
            WorkerEnvironment.from_environ({other: value for other, value in environ.items() if other != name})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ELASTIC_SLOT", "one", "'one'"),
        ("ELASTIC_RING", "pigeons", "'pigeons'"),
        ("ELASTIC_TIMING", '{"beat": 1}', "beat"),
        ("ELASTIC_TIMING", "{", "Expecting property name"),
        ("ELASTIC_WORLDS", '{"fewest": 1}', "most"),
    ],
)
def test_a_damaged_variable_is_refused(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        WorkerEnvironment.from_environ({**told().to_environ(), name: value})
