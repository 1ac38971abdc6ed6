"""The dashboard of a job of this machine, or of a fleet: its source, its feed, and its server until that is stopped."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from elastic.fleet.client import FleetClient
from elastic.observability.dashboard import server
from elastic.observability.dashboard.app import Dashboard
from elastic.observability.dashboard.directory_source import DirectorySource
from elastic.observability.dashboard.feeds import FleetFeed, JobFeed
from elastic.observability.dashboard.fleet_source import FleetClientSource

POLL_S = 0.25
"""Seconds between two looks at the files of a job of this machine, while a page shows it."""

FLEET_POLL_S = 1.0


def serve_directory(job_dir: Path, listen: str | None, run: int | None, say: Callable[[str], None]) -> None:
    """The page of one job of this machine. run: as of DirectorySource. Raises ConfigError."""
    feed = JobFeed(DirectorySource(job_dir, run), POLL_S, leader_only=False)
    name = Path(os.path.abspath(job_dir)).name  # also of "..", which no browser asks for
    server.serve(server.listen(listen), lambda access: Dashboard(access, feed, None, name), feed.run, say)


def serve_fleet(
    client: FleetClient, listen: str | None, name: str, say: Callable[[str], None], *, may_act: bool
) -> None:
    """The page of a fleet. name: what the page calls it. may_act: whether the client has the rights of an operator.
    Raises ConfigError."""
    feed = FleetFeed(FleetClientSource(client, may_act=may_act), FLEET_POLL_S)
    server.serve(server.listen(listen), lambda access: Dashboard(access, None, feed, name), feed.run, say)
