"""`elastic upgrade`: other programs for the agents of a fleet, node by node, while its jobs train.

What is next is decided in elastic/fleet/rolling_upgrade.py.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from elastic.cli.options import add_replicas, check_seconds, client_of
from elastic.errors import ConfigError, ElasticError, ExitCode
from elastic.version import __version__

if TYPE_CHECKING:
    from elastic.fleet.client import FleetClient
    from elastic.fleet.rolling_upgrade import AgentFacts, FleetView, NodeUpgrade, UpgradeAction

UPGRADE_POLL_S = 0.2

PATIENCE_S = 600.0

EXAMPLES = """\
examples:
  elastic upgrade --rendezvous 127.0.0.1:7070                          all agents of another version than this command
  elastic upgrade --rendezvous 127.0.0.1:7070 --node gpu-7             this one, whatever its version
  elastic upgrade --rendezvous 127.0.0.1:7070 --json | jq .event

First install the new version on the nodes, and run the command of the new version. Node by node: the node is drained
between two steps; its agent ends, and its service manager starts the program that is installed there now; the node
takes work again; its jobs have their workers again. An agent that no service manager has started is waited for: the
line says how it was started.

Ctrl-C ends the command after the node in hand, a second one at once. The same command goes on.

exit codes:
  0 done    2 bad input, or refused    3 nobody answers, or the time is over    130, 143 interrupted
"""


def add(verbs: Any) -> None:
    verb = verbs.add_parser(
        "upgrade",
        help="replace the agents of a fleet by another version, node by node, while its jobs train",
        description="Replace the agents of a fleet, node by node, while its jobs train on the other nodes. No step is "
        "lost.",
        epilog=EXAMPLES,
    )
    add_replicas(verb)
    verb.add_argument(
        "--node",
        action="append",
        default=[],
        metavar="N",
        help="only this node, whatever version its agent has; repeatable (default: all nodes whose agents have another "
        "version than this command)",
    )
    verb.add_argument(
        "--force",
        action="store_true",
        help="begin also while workers are missing, or where a job has no other node: it stops with a checkpoint, and "
        "has to be submitted again with --resume",
    )
    verb.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        metavar="S",
        help="most seconds until a node is empty, until its agent is back, and until its jobs have their workers again "
        "(default %(default)g); a person is waited for without end",
    )
    verb.add_argument("--json", action="store_true", help="a JSON line for each step of a node, and one for the end")
    verb.set_defaults(verb=_upgrade)


def _upgrade(options: argparse.Namespace) -> int:
    from elastic.fleet import rolling_upgrade

    check_seconds("--patience", options.patience)
    from elastic.fleet.client import ASKED_AT_ONCE

    client, told = client_of(options), UpgradeReport(as_json=options.json)
    fleet = _look(client)
    with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
        up = [node for node, known in fleet.nodes.items() if known.is_up]
        answers = dict(zip(up, threads.map(lambda node: _agent(client, node), up), strict=True))
    agents = {node: agent for node, agent in answers.items() if agent is not None}
    nodes = rolling_upgrade.chosen(fleet, agents, __version__, options.node)
    if not nodes:
        told.end(nodes, f"all {len(fleet.nodes)} nodes have {__version__}; --node replaces an agent all the same")
        return ExitCode.DONE
    if not options.force and (because := rolling_upgrade.objections(fleet, agents, nodes)):
        raise ConfigError(f"nothing was begun: {'; '.join(because)}; --force begins all the same")
    with stop_requests() as stop:
        for number, node in enumerate(nodes):
            if stop:
                left = ", ".join(nodes[number:])
                print(f"elastic: stopped; not replaced yet: {left}; the same command goes on", file=sys.stderr)
                return 128 + stop[0]
            # An earlier command has drained the node and has replaced its agent: only the drain is to be taken back.
            is_replaced = not options.node and node in agents and agents[node].version == __version__
            NodeReplacement(client, node, told, options.patience, is_replaced=is_replaced).run()
    told.end(nodes, f"{len(nodes)} of {len(fleet.nodes)} agents are replaced, and have {__version__}")
    return ExitCode.DONE


class NodeReplacement:
    """Replaces the agent of one node. is_replaced: that was done, and the drain is left."""

    def __init__(
        self, client: FleetClient, node: str, told: UpgradeReport, patience_s: float, *, is_replaced: bool
    ) -> None:
        from elastic.fleet.rolling_upgrade import AgentFacts

        self._client = client
        self._node = node
        self._told = told
        self._is_replaced = is_replaced
        self._before = AgentFacts("")
        """The agent at the first look, unless it did not answer, or was replaced earlier."""
        self._patience_s = patience_s
        self._began_s = self._since_s = time.monotonic()
        self._totals: Mapping[str, int] | None = None
        """Job -> its slots at the first look."""
        self._over: Sequence[str] = ()
        """Jobs that are over since then."""
        self._keeps_drain = False
        self._lacks = ""
        self._left: Sequence[str] = ()
        self._version = ""

    def run(self) -> None:
        """Raises ConfigError if another version comes back, ElasticError if something takes longer than patience_s."""
        from elastic.fleet.rolling_upgrade import UpgradeAction, next_action

        action: UpgradeAction | None = None
        try:
            while action is not UpgradeAction.DONE:
                if (seen := self._see()) is not None:
                    following = next_action(seen)
                    self._act(following)
                    if following is not action:
                        self._since_s = time.monotonic()
                        self._tell(following)
                    action = following
                if action is not UpgradeAction.DONE:
                    self._check_patience(action, is_led=seen is not None)
                    time.sleep(UPGRADE_POLL_S)  # remote processes: there is nothing to wait on
        except KeyboardInterrupt:
            print(
                f"elastic: stopped at node {self._node} ({action or 'not begun'}); the same command goes on with it, "
                f"`elastic drain --node {self._node} --cancel` lets it work as it is",
                file=sys.stderr,
            )
            raise

    def _see(self) -> NodeUpgrade | None:
        """None: nobody leads the fleet at the moment."""
        from elastic.fleet.rolling_upgrade import BECAUSE, NodeUpgrade, not_whole

        try:
            fleet = _look(self._client)
        except ConfigError:
            raise
        except ElasticError:
            return None
        known = fleet.nodes.get(self._node)
        drained = known.drained if known is not None else ""
        agent = _agent(self._client, self._node) if known is not None and known.is_up else None
        if self._totals is None:
            self._totals, self._keeps_drain = fleet.totals(), drained not in ("", BECAUSE)
            self._before = self._before if agent is None or self._is_replaced else agent
        if agent is not None:
            self._version = agent.version
        self._over = sorted(self._totals.keys() - fleet.totals().keys())
        self._left, self._lacks = fleet.left_on(self._node), not_whole(fleet, self._totals) or ""
        return NodeUpgrade(
            before=self._before,
            agent=agent,
            is_drained=bool(drained) or known is None,
            keeps_drain=self._keeps_drain,
            is_empty=not self._left,
            is_whole=not self._lacks,
            target=__version__,
        )

    def _act(self, action: UpgradeAction) -> None:
        """What may be done at each look until the next one shows that it was done."""
        from elastic.fleet.rolling_upgrade import BECAUSE, UpgradeAction

        match action:
            case UpgradeAction.DRAIN:
                self._client.cordon(self._node, BECAUSE, over=False)
                self._keeps_drain = False
            case UpgradeAction.END_AGENT:
                self._client.end_agent(self._node, self._before.process)
            case UpgradeAction.UNDRAIN:
                self._client.cordon(self._node, "", over=True)
            case UpgradeAction.OTHER_VERSION:
                raise ConfigError(
                    f"node {self._node} works again, but with {self._version}, and this command is of {__version__}: "
                    "install it there, and give the same command again"
                )

    def _tell(self, action: UpgradeAction) -> None:
        from elastic.fleet.rolling_upgrade import UpgradeAction

        match action:
            case UpgradeAction.DRAIN:
                sentence = f"version {self._version}; its workers leave between two steps"
            case UpgradeAction.END_AGENT:
                sentence = "empty; its agent ends, and its service manager starts the next one"
            case UpgradeAction.AWAIT_OPERATOR:
                how = f", as it was started: {self._before.command}" if self._before.command else ""
                sentence = f"empty; end its agent there, and start {__version__} with the same options{how}"
            case UpgradeAction.UNDRAIN:
                sentence = f"version {self._version} is here, and takes work again"
            case UpgradeAction.DONE:
                sentence = f"done after {time.monotonic() - self._began_s:.1f} s; all jobs have their workers"
                sentence += f"; over meanwhile: {', '.join(self._over)}" if self._over else ""
            case _:
                return
        self._told.say(self._node, str(action), self._version, sentence)

    def _check_patience(self, action: UpgradeAction | None, *, is_led: bool) -> None:
        from elastic.fleet.rolling_upgrade import UpgradeAction

        if time.monotonic() < self._since_s + self._patience_s or action is UpgradeAction.AWAIT_OPERATOR:
            return
        node, late = self._node, f"after {self._patience_s:g} s"
        if not is_led:
            raise ElasticError(f"nobody leads the fleet {late}; the same command goes on with node {node}")
        match action:
            case UpgradeAction.AWAIT_EMPTY:
                if not self._keeps_drain:
                    self._client.cordon(node, "", over=True)
                raise ElasticError(f"still on node {node} {late}: {', '.join(self._left)}; the node goes on as it was")
            case UpgradeAction.AWAIT_WORKERS:
                raise ElasticError(
                    f"node {node} has {self._version}, but {late} {self._lacks}; `elastic status` says why"
                )
        raise ElasticError(
            f"the agent of node {node} is not back {late}; look at its log there; the node is drained, and the same "
            "command goes on when the agent is back"
        )


class UpgradeReport:
    """A line for each step of a node, and one for the end."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def say(self, node: str, event: str, version: str, sentence: str) -> None:
        self._print({"event": event, "node": node, "version": version, "because": sentence}, f"node {node}: {sentence}")

    def end(self, nodes: Sequence[str], sentence: str) -> None:
        self._print({"event": "end", "nodes": list(nodes), "version": __version__, "because": sentence}, sentence)

    def _print(self, document: object, line: str) -> None:
        print(json.dumps(document) if self._as_json else line, flush=True)


def _look(client: FleetClient) -> FleetView:
    from elastic.fleet.rolling_upgrade import FleetView

    seen = client.look()
    return FleetView.of(seen, seen["statuses"])


def _agent(client: FleetClient, node: str) -> AgentFacts | None:
    """What the node's agent says of itself; None if it does not answer."""
    from elastic.fleet.rolling_upgrade import AgentFacts

    try:
        return AgentFacts.of(client.examine(node=node))
    except ConfigError:
        raise
    except ElasticError:
        return None


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """SIGINT and SIGTERM that have come; the second one raises KeyboardInterrupt."""
    come: list[int] = []

    def hear(number: int, frame: object) -> None:
        come.append(number)
        if len(come) > 1:
            raise KeyboardInterrupt
        print("elastic: stops after the node in hand; once more stops at once", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield come
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
