"""What a worker answers while it is being set up."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.agent.worker.environment import WorkerEnvironment
from elastic.config import JobSpec
from elastic.protocol.worker_slot import Spawn
from runtime.allreduce.ring.handshake import Hello
from runtime.allreduce.ring.listener import Listener
from runtime.worker import worker_session
from tests.unit.rings import GENEROUS_S, JOB, called, rest_of


class SetUp(Exception):
    """The rest needs an agent."""


def test_a_worker_that_is_called_before_it_has_heard_of_any_generation_says_that_it_knows_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[bytes] = []

    class CalledAtOnce(Listener):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            with socket.create_connection(self.address) as caller:
                caller.settimeout(GENEROUS_S)
                called(caller, Hello(JOB, 1, "b.0.0", "a.0.0", "copy", "plan"))
                said.append(rest_of(caller))
            self.close()
            raise SetUp

    monkeypatch.setattr(worker_session, "Listener", CalledAtOnce)
    told = WorkerEnvironment.of_job(
        JobSpec(name=JOB, command=("train",), workers=1),
        tmp_path,
        0,
        Spawn("a.0.0", restarted=False),
        agent_socket="nobody",
        address="127.0.0.1",
        certs=None,
        worlds=None,
    )
    with pytest.raises(SetUp):
        worker_session.WorkerSession(told.to_environ(), 1, torch.device("cpu"))
    assert b"a.0.0 does not know generation 1" in said[0]
