"""What a pod does: an agent as its child, until the job is over, the node has to go, or the pod is ended.

The pod ends with the job's exit code, so that its Job is complete when the job is. Where it ends because it has left,
it ends with another one, by which its Job starts another pod.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic.errors import ConfigError, ExitCode
from elastic.platforms.common.agent_child import AgentChild, AgentPlace, Ending
from elastic.platforms.k8s.agent_pods import JOB_STOPPED
from elastic.platforms.k8s.entrance import JOB_FILE
from elastic.platforms.k8s.trainer_status import TrainerStatus

AGENT_DIED = 70
"""Exit code of a pod whose agent has ended by itself: its Job counts it as a failure, and starts another pod."""


def job_of(own: Path) -> str:
    """The job of this pod. own: what `elastic k8s enter` has left. Raises ConfigError."""
    try:
        return (own / JOB_FILE).read_text()
    except OSError as error:
        raise ConfigError(f"{own / JOB_FILE}: {error.strerror}; `elastic k8s enter` writes it") from error


def serve(place: AgentPlace) -> int:
    """Returns the exit code of the pod. place: its node is the name of the pod. Main thread only."""
    tells = place.node

    def look(entry: Mapping[str, Any]) -> bool:
        nonlocal tells
        tells = speaker(entry, tells)
        return True

    agent = AgentChild(place)
    agent.obey()
    progress = TrainerStatus(os.environ, place.job_dir, lambda: tells == place.node)
    ending = agent.serve(look)
    progress.close()
    match ending:
        case Ending.OVER:
            return exit_code(agent.entry)
        case Ending.ASKED:
            return ExitCode.TERMINATED
        case Ending.LEFT:
            print("elastic: the node has to go, and the workers have left it", file=sys.stderr, flush=True)
            return ExitCode.DRAINED
    print(f"elastic: the agent has ended with {agent.status}", file=sys.stderr, flush=True)
    return AGENT_DIED


def exit_code(ended: Mapping[str, Any]) -> int:
    """With which a pod ends when its job has. ended: the fleet's entry of the job."""
    return JOB_STOPPED if ended["stopped"] else int(ended["exit_code"])


def speaker(entry: Mapping[str, Any], before: str) -> str:
    """Which node tells of the progress: the first of those that train. While none trains, and when the job has ended,
    it is the one of before: others may have left long ago, and their ledgers end there."""
    return min(entry.get("slots", {}), default=before)
