"""What an old program does when it is asked: it waits for a suitable moment, tries the new program, or refuses."""

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
"""Seconds to wait for a moment in which another program can take over."""

CALM_POLL_S = 0.05


async def prepared(
    place: UpgradeRequestFiles,
    journal: Journal,
    trial: Trial,
    state: Callable[[], Mapping[str, Any]],
    in_the_way: Callable[[], str],
    others: Callable[[UpgradeRequest], Awaitable[str]] | None = None,
) -> UpgradeRequest | None:
    """The request, if another program can take over now; else None, after the refusal was written.

    trial, state: see `check`. in_the_way: why no other program can take over now, or "". others: replaces the processes
    that come first; returns why that failed, or "".
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
    """Answer a request with a refusal; on a full disk the refusal is in the journal alone."""
    try:
        place.say(request, refused=because)
    except OSError as error:
        journal.write("handover_not_answered", because=str(error))


def refuse_another(place: UpgradeRequestFiles, journal: Journal) -> None:
    """Answer a request that comes while a takeover is under way."""
    try:
        refuse(place, journal, place.request(), "another program is taking over at this moment; ask again after that")
    except UpgradeRefused as refused:
        journal.write("handover_refused", because=str(refused))


async def until(reached: Callable[[], bool], within_s: float) -> bool:
    """Poll until `reached` is true, or the time is over: other processes' files cannot be waited for."""
    deadline_s = time.monotonic() + within_s
    while not reached():
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(CALM_POLL_S)
    return True
