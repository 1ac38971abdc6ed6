"""Why an agent that is a child ends, and when; the agent is a script, the fleet a list of answers."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic.errors import ConfigError, ElasticError
from elastic.platforms.common import agent_child
from elastic.platforms.common.agent_child import AgentChild, AgentPlace, Ending
from elastic.process import children
from elastic.records.files import TOKEN

RUNS, OVER = {"state": "placed"}, {"state": "ended"}
STAYS = """
import os, signal, sys
from elastic.process import stop_signals
for number in stop_signals.obeyed():
    signal.signal(number, lambda *_: {at_stop})
stop_signals.begin()
open({told!r}, "w").write(str(os.getpid()))
while True:
    signal.pause()
"""


def stays(entry: Mapping[str, Any]) -> bool:
    return False


class Node:
    """answers: of the fleet, the last one again and again. agent: its program. at_stop: what that does then."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: list[dict[str, str] | ElasticError] = [RUNS]
        self.told = home / "told"
        self.agent, self.at_stop = STAYS, "sys.exit(7)"
        self.job_dir = home / "jobs" / "t-1"
        (self.job_dir / "logs").mkdir(parents=True)
        self.words: list[str] = []
        monkeypatch.setattr(agent_child, "ASK_S", 0.0)
        monkeypatch.setattr(agent_child, "SELDOM_S", 0.0)
        monkeypatch.setattr(agent_child, "POLL_S", 0.01)
        monkeypatch.setattr(agent_child, "of_role", lambda certs, role: None)
        monkeypatch.setattr(children, "python", self._command)
        self._home = home
        self._patch = monkeypatch

    def _command(self, module: str, *words: str) -> list[str]:
        self.words = [module, *words]
        return [sys.executable, "-c", self.agent.format(told=str(self.told), at_stop=self.at_stop)]

    @property
    def pid(self) -> int:
        """Of the agent that has begun; 0: none has."""
        return int(self.told.read_text() or 0) if self.told.exists() else 0

    def child(self, patience_s: float | None = None, grace_s: float = 60.0) -> AgentChild:
        place = AgentPlace(
            replicas=("10.0.0.1:7070", "10.0.0.2:7070"),
            certs=self._home,
            node="n1",
            job="t-1",
            jobs_dir=self._home / "jobs",
            grace_s=grace_s,
            words=("--slots", "2"),
            patience_s=patience_s,
        )
        child = AgentChild(place)
        self._patch.setattr(child._client, "job", self._answer)
        return child

    def _answer(self, job: str) -> dict[str, str]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, ElasticError):
            raise answer
        return answer


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


def test_it_ends_with_the_job_and_not_before_the_agent_of_the_job_has_gone(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    token = node.job_dir / TOKEN
    token.touch()
    output = node.job_dir / "logs" / "stdout.log"
    output.write_text("of an earlier start\n")
    node.answers = [ElasticError("nobody leads"), RUNS]
    child = node.child()
    looks: list[str] = []

    def look(entry: Mapping[str, Any]) -> bool:
        if node.pid and node.answers != [OVER]:
            output.write_text(f"{output.read_text()}loss 0.5\n")
            node.answers = [OVER]
        if entry == OVER:
            looks.append("over")
            token.unlink()
        return False

    assert child.serve(look) is Ending.OVER
    assert looks == ["over"] and child.entry == OVER and child.status == 7
    assert capsys.readouterr().out == "loss 0.5\n"
    assert node.words[:4] == ["elastic.cli", "agent", "--rendezvous", "10.0.0.1:7070,10.0.0.2:7070"]
    assert node.words[-4:] == ["--grace", "60.0", "--slots", "2"]


def test_the_fleet_is_asked_seldom_while_the_job_is_on_the_node_and_at_once_when_it_has_left(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_child, "SELDOM_S", 3600.0)
    token = node.job_dir / TOKEN
    token.touch()
    looks: list[Mapping[str, Any]] = []

    def look(entry: Mapping[str, Any]) -> bool:
        looks.append(entry)
        node.answers = [OVER]
        if len(looks) == 5:
            token.unlink()
        return False

    assert node.child().serve(look) is Ending.OVER
    assert looks == [RUNS] * 5 + [OVER], "the first answer, and the next one when the job was gone"


def test_it_ends_where_the_job_has_left_if_it_is_to_leave(node: Node) -> None:
    notice = {"kind": "reclaim", "because": "spot", "ends_s": 7.0}
    looks: list[str] = []

    def look(entry: Mapping[str, Any]) -> bool:
        looks.append("look")
        match len(looks):
            case 2:
                (node.job_dir / "left.json").write_text(json.dumps({"round": 3}))
            case 3:
                told = {"round": 4, "notices": [{**notice, "ends_s": None}, notice]}
                (node.job_dir / "notices.json").write_text(json.dumps(told))
            case 5:
                (node.job_dir / "left.json").write_text(json.dumps({"round": 4}))
        return len(looks) > 6

    assert node.child().serve(look) is Ending.LEFT
    assert len(looks) == 7, "the round of the notice, and only when the caller wants to leave"


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(("at_stop", "times", "status"), [("sys.exit(7)", 1, 7), ("None", 2, -signal.SIGKILL)])
def test_it_is_asked_to_end_and_the_agent_has_its_grace_until_it_is_asked_again(
    at_stop: str, times: int, status: int, node: Node
) -> None:
    node.at_stop = at_stop
    child = node.child(grace_s=600.0)
    child.obey()

    def look(entry: Mapping[str, Any]) -> bool:
        for _ in range(times if node.pid else 0):
            signal.raise_signal(signal.SIGTERM)
        return False

    assert child.serve(look) is Ending.ASKED
    assert child.status == status


def test_an_agent_that_ends_by_itself_is_told(node: Node) -> None:
    node.agent = "import sys; sys.exit(5)"
    child = node.child()
    assert child.serve(stays) is Ending.DIED
    assert child.status == 5


def test_a_node_that_has_to_go_does_not_wait_for_a_fleet_that_is_gone(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_child, "LEAVING_S", 0.0, raising=False)
    node.answers = [ElasticError("nobody leads")]
    looks: list[str] = []

    def look(entry: Mapping[str, Any]) -> bool:
        looks.append("look")
        assert len(looks) < 9, "it is silent"
        return len(looks) == 5

    with pytest.raises(ElasticError, match="is gone"):
        node.child(patience_s=3600.0).serve(look)
    assert len(looks) == 5


def test_a_fleet_that_is_silent_for_too_long_is_gone_and_one_that_refuses_too(node: Node) -> None:
    node.answers = [ElasticError("nobody leads")]
    with pytest.raises(ElasticError, match=r"10\.0\.0\.1:7070,10\.0\.0\.2:7070 is gone"):
        node.child(patience_s=0.05).serve(stays)
    node.answers = [ConfigError("no job")]
    with pytest.raises(ConfigError, match="no job"):
        node.child(patience_s=60.0).serve(stays)
    node.answers = [ConfigError("no job"), ConfigError("no job"), OVER]
    assert node.child().serve(stays) is Ending.OVER


def test_no_agent_is_left(node: Node) -> None:
    def look(entry: Mapping[str, Any]) -> bool:
        if node.pid:
            os.kill(node.pid, 0)
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        node.child().serve(look)
    with pytest.raises(ProcessLookupError):
        os.kill(node.pid, 0)
