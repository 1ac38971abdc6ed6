"""Google Compute Engine: preemption and host maintenance, from the metadata server.

    GET /computeMetadata/v1/instance/preempted?wait_for_change=true          TRUE or FALSE
    GET /computeMetadata/v1/instance/maintenance-event?wait_for_change=true  NONE, MIGRATE_... or TERMINATE_ON_HOST_...

Both questions wait on the server until the value changes or timeout_sec is over; the answer's ETag is the value's
version. A preempted machine has 30 s from the change. A maintenance event is announced 60 s before; live migration is
a pause of a second or so, which a job survives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from urllib.parse import quote

from elastic.preemption.metadata_http import ask
from elastic.preemption.notice import Notice, NoticeKind
from elastic.preemption.provider import NoticeSource

HOST = "GCE_METADATA_HOST"
"""Environment variable, as in Google's SDKs: "host:port" instead of the metadata server's address."""
DISABLED = "NO_GCE_CHECK"
"""Environment variable, as in Google's SDKs: "true" keeps `auto` away."""
ADDRESS = "169.254.169.254"

PREEMPTION_S = 30.0
MAINTENANCE_S = 60.0
WAIT_S = 30
TIMEOUT_S = 5.0
FLAVOR = "Google"
PREEMPTED = "preempted"
MAINTENANCE = "maintenance-event"


def preemption(value: str) -> Notice | None:
    """The notice in a value of instance/preempted. Raises ValueError for an unknown one."""
    match value:
        case "TRUE":
            return Notice(NoticeKind.RECLAIM, PREEMPTION_S, "Compute Engine preempts this machine")
        case "FALSE":
            return None
    raise ValueError(f"neither TRUE nor FALSE: {value!r}")


def maintenance(value: str) -> Notice | None:
    """The notice in a value of instance/maintenance-event. Raises ValueError for an unknown one."""
    match value:
        case "NONE":
            return None
        case "MIGRATE_ON_HOST_MAINTENANCE":
            return Notice(
                NoticeKind.ADVICE, math.inf, "Compute Engine moves this machine to another host while it runs"
            )
        case "TERMINATE_ON_HOST_MAINTENANCE":
            return Notice(
                NoticeKind.MAINTENANCE, MAINTENANCE_S, "Compute Engine stops this machine for host maintenance"
            )
    raise ValueError(f"an unknown maintenance event: {value!r}")


PARSERS = {PREEMPTED: preemption, MAINTENANCE: maintenance}


class Gcp(NoticeSource):
    """One of the two values: the server holds each question until its answer changes, so each needs a thread."""

    pause_s = 0.5

    def __init__(self, environment: Mapping[str, str], key: str) -> None:
        self.name = f"Compute Engine {key}"
        self._base = f"http://{environment.get(HOST) or ADDRESS}"
        self._key = key
        self._etag = ""

    def look(self) -> Notice | None:
        wait_s = WAIT_S if self._etag else 0
        path = f"/computeMetadata/v1/instance/{self._key}"
        if wait_s:
            path += f"?wait_for_change=true&timeout_sec={wait_s}&last_etag={quote(self._etag)}"
        answer = ask(self._base, path, timeout_s=wait_s + TIMEOUT_S, headers={"Metadata-Flavor": FLAVOR})
        if answer.status != 200 or answer.headers.get("metadata-flavor") != FLAVOR:
            self._etag = ""
            raise answer.trouble("no value of a Compute Engine metadata server")
        try:
            notice = PARSERS[self._key](answer.text)
        except ValueError as error:
            self._etag = ""
            raise answer.trouble(str(error)) from error
        self._etag = answer.headers.get("etag", "")
        return notice
