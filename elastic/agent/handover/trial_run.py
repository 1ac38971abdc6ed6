"""A new program runs once beside the old one before anything is given up."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.agent.handover.exec_in_place import without_option
from elastic.agent.handover.request_files import UpgradeRefused, UpgradeRequest
from elastic.errors import ConfigError
from elastic.wire.codec import WireError

CHECK_S = 60.0


@dataclass(frozen=True, slots=True)
class Trial:
    """What a new program is tried on. function: "module:name"; it gets the words and the state, and checks everything
    that could end the program. words: the command line of the new program."""

    function: str
    words: Sequence[str]


async def check(request: UpgradeRequest, trial: Trial, state: Mapping[str, Any]) -> None:
    """Run the new program beside this one, on the words and the state. Raises UpgradeRefused."""
    command = [request.python, "-P", "-m", "elastic.agent.handover", trial.function]
    given = {"words": without_option(trial.words), "state": state}
    try:
        tried = await asyncio.create_subprocess_exec(
            *command, env=request.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        raise UpgradeRefused(f"the new program does not start: {request.python}: {error.strerror}") from error
    try:
        async with asyncio.timeout(CHECK_S):
            said, _ = await tried.communicate(json.dumps(given).encode())
    except TimeoutError:
        tried.kill()
        await tried.wait()
        raise UpgradeRefused(f"the new program has not started within {CHECK_S:g} s: {' '.join(command)}") from None
    if tried.returncode != 0:
        words = said.decode(errors="replace").strip().splitlines() or [f"it ended with {tried.returncode}"]
        raise UpgradeRefused(f"the new program does not start, or cannot read what it would be handed: {words[-1]}")


def main() -> int:
    """`python -m elastic.agent.handover MODULE:FUNCTION`, the check: the function gets what standard input has."""
    module, _, name = sys.argv[1].partition(":")
    try:
        getattr(importlib.import_module(module), name)(**json.load(sys.stdin))
    except (ImportError, AttributeError, KeyError, TypeError, ValueError, WireError, ConfigError) as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    return 0
