"""`elastic upgrade` on a fleet on paper: what it does to each node, what it says, and where it stops."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elastic import cli
from elastic.cli.fleet import upgrade
from elastic.errors import ConfigError, ElasticError, ExitCode
from elastic.fleet.client import FleetClient
from elastic.fleet.rolling_upgrade import BECAUSE
from elastic.version import __version__

HERE = ["--rendezvous", "127.0.0.1:1"]


class PaperFleet:
    """Nodes a, b and c, with a worker each of train-1. installed: the version of agents that start. starts: whether
    agents that have ended start again. leaves: whether the worker of a drained node leaves. log: what was done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.version = dict.fromkeys("abc", "0.0.1")
        self.process = dict.fromkeys("abc", 1)
        self.drained = dict.fromkeys("abc", "")
        self.installed = __version__
        self.is_service = True
        self.starts, self.leaves = True, True
        self.away: set[str] = set()
        self.log: list[str] = []
        self.nobody_leads = 0
        self.interrupts: dict[str, int] = {}
        """What is done -> how many signals come then."""
        for name in ("overview", "status_of", "cordon", "end_agent", "examine"):
            monkeypatch.setattr(FleetClient, name, self._as_of_a_client(name))
        monkeypatch.setattr(upgrade, "UPGRADE_POLL_S", 0.001)

    def _as_of_a_client(self, name: str) -> Callable[..., Any]:
        return lambda client, *words, **named: getattr(self, name)(*words, **named)

    @property
    def on(self) -> list[str]:
        return [node for node in "abc" if not (self.drained[node] and self.leaves)]

    def overview(self) -> dict[str, Any]:
        if self.nobody_leads:
            self.nobody_leads -= 1
            raise ElasticError("nobody leads")
        nodes = [
            {
                "node": node,
                "up": node not in self.away,
                "slots": 1,
                "jobs": {"train-1": 1} if node in self.on else {},
                "because": self.drained[node],
            }
            for node in "abc"
        ]
        if self.starts:
            self.away.clear()
        slots = dict.fromkeys(self.on, 1)
        job = {"job": "train-1", "state": "placed", "workers": 3, "min_workers": 1, "slots": slots}
        return {"nodes": nodes, "jobs": [job]}

    def status_of(self, job: dict[str, Any]) -> dict[str, Any]:
        return {"state": "running", "members": [{"worker_id": f"{node}.0.0"} for node in self.on]}

    def cordon(self, node: str, because: str, *, over: bool) -> None:
        self._did(f"{'undrain' if over else 'drain'} {node}")
        self.drained[node] = because
        self.nobody_leads = 1

    def end_agent(self, node: str, process: str) -> None:
        if process == str(self.process[node]):
            self._did(f"end {node}")
            self.replace(node)

    def replace(self, node: str) -> None:
        self.process[node] += 1
        self.version[node] = self.installed
        self.away.add(node)

    def examine(self, node: str) -> dict[str, Any]:
        if node in self.away:
            raise ElasticError("no answer")
        agent = {"process": str(self.process[node]), "command": f"elastic agent --node {node}"}
        told = {"version": self.version[node], "agent": {**agent, "is_service": self.is_service}}
        if not self.is_service and self.drained[node] and node not in self.on and self.version[node] != self.installed:
            self.replace(node)  # a person does it
        return told

    def _did(self, what: str) -> None:
        self.log.append(what)
        for _ in range(self.interrupts.pop(what, 0)):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[PaperFleet]:
    before = signal.getsignal(signal.SIGINT)
    yield PaperFleet(monkeypatch)
    assert signal.getsignal(signal.SIGINT) is before


def replaced(nodes: str) -> list[str]:
    return [f"{deed} {node}" for node in nodes for deed in ("drain", "end", "undrain")]


def test_nodes_are_replaced_one_after_the_other_and_each_step_is_a_line(
    fleet: PaperFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.version["b"] = __version__
    assert cli.main(["upgrade", *HERE]) == ExitCode.DONE
    assert fleet.log == replaced("ac")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "node a: version 0.0.1; its workers leave between two steps",
        "node a: empty; its agent ends, and its service manager starts the next one",
        f"node a: version {__version__} is here, and takes work again",
    ]
    assert lines[3].startswith("node a: done after ") and lines[3].endswith("all jobs have their workers")
    assert lines[-1] == f"2 of 3 agents are replaced, and have {__version__}"
    assert cli.main(["upgrade", *HERE]) == ExitCode.DONE
    assert capsys.readouterr().out == f"all 3 nodes have {__version__}; --node replaces an agent all the same\n"
    assert cli.main(["upgrade", *HERE, "--node", "b", "--json"]) == ExitCode.DONE
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["event"], line.get("node")) for line in told] == [
        *((event, "b") for event in ("drain", "end_agent", "undrain", "done")),
        ("end", None),
    ]


def test_who_has_to_start_an_agent_is_told_how(fleet: PaperFleet, capsys: pytest.CaptureFixture[str]) -> None:
    fleet.is_service = False
    assert cli.main(["upgrade", *HERE, "--node", "a", "--patience", "60"]) == ExitCode.DONE
    assert fleet.log == ["drain a", "undrain a"]
    said = capsys.readouterr().out
    assert f"end its agent there, and start {__version__} with the same options, as it was started: elastic" in said


def test_an_agent_that_was_started_again_before_its_turn_is_replaced_like_any_other(
    fleet: PaperFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = fleet.end_agent

    def end_agent(node: str, process: str) -> None:
        end(node, process)
        fleet.process["c"] += node == "a"

    monkeypatch.setattr(fleet, "end_agent", end_agent)
    assert cli.main(["upgrade", *HERE]) == ExitCode.DONE
    assert fleet.log == replaced("abc")


def test_a_job_that_is_over_when_its_node_is_back_is_named(
    fleet: PaperFleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = fleet.overview
    monkeypatch.setattr(fleet, "overview", lambda: {**seen(), **({"jobs": []} if "end a" in fleet.log else {})})
    assert cli.main(["upgrade", *HERE, "--node", "a", "--force"]) == ExitCode.DONE
    assert "all jobs have their workers; over meanwhile: train-1\n" in capsys.readouterr().out


def test_nothing_is_begun_where_a_job_would_stop_but_by_force(
    fleet: PaperFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.drained["b"] = fleet.drained["c"] = "for repair"
    assert cli.main(["upgrade", *HERE, "--node", "a"]) == ExitCode.BAD_INPUT
    said = " ".join(capsys.readouterr().err.split())
    assert "nothing was begun: train-1 runs on node a alone: it stops after a step, with a checkpoint" in said
    assert fleet.log == []
    assert cli.main(["upgrade", *HERE, "--node", "b", "--node", "a", "--force"]) == ExitCode.DONE
    assert fleet.log == ["end b", *replaced("a")] or fleet.log == [*replaced("a"), "end b"]
    assert fleet.drained["b"] == "for repair"


def test_ctrl_c_ends_it_after_the_node_in_hand_and_the_same_command_goes_on(
    fleet: PaperFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.interrupts = {"end a": 1}
    assert cli.main(["upgrade", *HERE]) == ExitCode.INTERRUPTED
    assert fleet.log == replaced("a")
    assert "stopped; not replaced yet: b, c; the same command goes on" in capsys.readouterr().err
    assert cli.main(["upgrade", *HERE]) == ExitCode.DONE
    assert fleet.log == replaced("abc")


def test_a_second_ctrl_c_ends_it_at_once_and_a_later_command_begins_there(
    fleet: PaperFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.interrupts = {"drain b": 2}
    assert cli.main(["upgrade", *HERE]) == ExitCode.INTERRUPTED
    said = capsys.readouterr().err
    assert "stopped at node b (" in said and "`elastic drain --node b --cancel` lets it work as it is" in said
    fleet.drained["b"] = BECAUSE
    assert cli.main(["upgrade", *HERE]) == ExitCode.DONE
    assert fleet.log == [*replaced("a"), "drain b", "end b", "undrain b", *replaced("c")]


def test_a_drain_that_an_earlier_command_has_left_is_taken_back(fleet: PaperFleet) -> None:
    fleet.version = dict.fromkeys("abc", __version__)
    fleet.drained["c"] = BECAUSE
    assert cli.main(["upgrade", *HERE]) == ExitCode.DONE
    assert fleet.log == ["undrain c"]


def test_a_node_that_comes_back_with_another_version_works_and_ends_the_command(
    fleet: PaperFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.installed = "0.0.1"
    assert cli.main(["upgrade", *HERE]) == ExitCode.BAD_INPUT
    assert fleet.log == replaced("a")
    said = " ".join(capsys.readouterr().err.split())
    assert f"node a works again, but with 0.0.1, and this command is of {__version__}: install it there" in said


@pytest.mark.parametrize(
    ("what", "log", "because"),
    [
        (
            "leaves",
            ["drain a", "undrain a"],
            "still on node a after 0.05 s: train-1, a.0.0; the node goes on as it was",
        ),
        ("starts", ["drain a", "end a"], "the agent of node a is not back after 0.05 s"),
        ("returns", replaced("a"), f"node a has {__version__}, but after 0.05 s train-1 has 2 slots, and had 3"),
    ],
)
def test_what_takes_too_long_is_named(
    fleet: PaperFleet,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    what: str,
    log: list[str],
    because: str,
) -> None:
    if what == "returns":
        monkeypatch.setattr(PaperFleet, "on", property(lambda own: [n for n in "abc" if n != "a" or not own.log]))
    else:
        setattr(fleet, what, False)
    assert cli.main(["upgrade", *HERE, "--patience", "0.05"]) == ExitCode.BELOW_QUORUM
    assert fleet.log == log
    assert because in " ".join(capsys.readouterr().err.split())


def test_a_fleet_that_nobody_leads_is_not_waited_for_without_end(
    fleet: PaperFleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(node: str, because: str, *, over: bool) -> None:
        fleet.nobody_leads = 10**9

    monkeypatch.setattr(fleet, "cordon", interrupted)
    assert cli.main(["upgrade", *HERE, "--patience", "0.05"]) == ExitCode.BELOW_QUORUM
    assert "nobody leads the fleet" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="must be a positive number"):
        upgrade._upgrade(cli.parser(["upgrade"]).parse_args(["upgrade", *HERE, "--patience", "0"]))
