"""`elastic agent --upgrade`: this program takes the place of a daemon that runs."""

from __future__ import annotations

import json
import time
from pathlib import Path

from elastic.agent.handover import CALM_POLL_S, UpgradeRefused, UpgradeRequestFiles, of_this_program
from elastic.errors import ConfigError, ElasticError, ExitCode

PATIENCE_S = 300.0
"""The agents of all jobs come first, one after the other."""


def upgrade(jobs_dir: Path, node: str, *, as_json: bool) -> int:
    """Until it is done. Raises ConfigError if there is nothing to upgrade or it was refused, and ElasticError if the
    daemon does not answer."""
    try:
        return _upgrade(UpgradeRequestFiles(jobs_dir.absolute(), node), jobs_dir, node, as_json=as_json)
    except UpgradeRefused as refused:  # by the files, before anything was asked
        raise ConfigError(f"the agent of node {node} cannot be asked: {refused}") from refused


def _upgrade(place: UpgradeRequestFiles, jobs_dir: Path, node: str, *, as_json: bool) -> int:
    request, running = of_this_program(), place.running()
    if running is None:
        raise ConfigError(
            f"no `elastic agent` of node {node} runs in {jobs_dir}; give the --jobs-dir and --node with which it was "
            "started"
        )
    place.ask(running, request)
    deadline_s = time.monotonic() + PATIENCE_S
    while (answer := place.answer(request)) is None:
        if place.running() is None:
            raise ElasticError(f"the agent of node {node}, process {running.pid}, has ended meanwhile")
        if time.monotonic() > deadline_s:
            raise ElasticError(
                f"the agent of node {node}, process {running.pid}, has not answered within {PATIENCE_S:g} s; its "
                f"journal says how far it is: {jobs_dir}/journal"
            )
        time.sleep(CALM_POLL_S)  # another process and its files: there is nothing to wait on
    if answer["refused"]:
        raise ConfigError(f"nothing was lost, and node {node} goes on with {running.version}: {answer['refused']}")
    told = {"node": node, "pid": running.pid, "from": running.version, "to": answer["version"], "jobs": answer["jobs"]}
    if as_json:
        print(json.dumps(told))
    else:
        jobs = ", ".join(answer["jobs"]) or "no job"
        print(f"node {node}, process {running.pid}: {running.version} -> {answer['version']}; goes on with {jobs}")
    return ExitCode.DONE
