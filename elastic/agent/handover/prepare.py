"""What an old program does when it is asked: it waits for a moment of calm, has the new one tried, or refuses."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from elastic.agent.handover.request_files import UpgradeRefused, UpgradeRequest, UpgradeRequestFiles
from elastic.agent.handover.trial_run import Trial, check
from elastic.records.journal import Journal
from elastic.version import __version__

CALM_S = 15.0
"""How long a moment is waited for in which another program can take over."""

CALM_POLL_S = 0.05


async def prepared(
    place: UpgradeRequestFiles,
    journal: Journal,
    trial: Trial,
    state: Callable[[], Mapping[str, Any]],
    in_the_way: Callable[[], str],
    others: Callable[[UpgradeRequest], Awaitable[str]] | None = None,
) -> UpgradeRequest | None:
    """What is asked for, if it can be done now; else that is said, and None.

    trial, state: see `check`. in_the_way: why no other program can take over now, or nothing. others: who has to be
    replaced first; why not, or nothing.
    """
    request: UpgradeRequest | None = None
    try:
        request = place.request()
        await until(lambda: not in_the_way(), CALM_S)
        await check(request, trial, state())
        if because := in_the_way() or (await others(request) if others is not None else ""):
            raise UpgradeRefused(because)
        await until(lambda: not in_the_way(), CALM_S)
        if because := in_the_way():
            raise UpgradeRefused(because)
    except (UpgradeRefused, OSError) as refused:
        journal.write("handover_refused", because=str(refused))
        if request is not None:
            refuse(place, journal, request, str(refused))
        return None
    journal.write("handover", version=__version__, caller=f"user {os.geteuid()}", peer="this machine")
    return request


def refuse(place: UpgradeRequestFiles, journal: Journal, request: UpgradeRequest, because: str) -> None:
    """Say so; on a full disk, to the journal alone."""
    try:
        place.say(request, refused=because)
    except OSError as error:
        journal.write("handover_not_answered", because=str(error))


async def until(reached: Callable[[], bool], within_s: float) -> bool:
    """Files of other processes, and moments of calm: there is nothing to wait on."""
    deadline_s = time.monotonic() + within_s
    while not reached():
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(CALM_POLL_S)
    return True
