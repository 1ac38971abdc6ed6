"""Azure: Scheduled Events, from the instance metadata service.

    GET  /metadata/scheduledevents?api-version=...         {"DocumentIncarnation": n, "Events": [{...}]}
    POST the same, {"StartRequests": [{"EventId": "..."}]}  we are done: the event need not wait until NotBefore
    GET  /metadata/instance/compute/name?...&format=text   which of the event's Resources is this machine

Events of other machines of the same scale set are in the document too. The first question ever asked on a machine
switches the service on and may take two minutes. A Freeze is a pause of seconds with the memory kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from elastic.preemption.metadata_http import ask, date_of
from elastic.preemption.notice import Notice, NoticeKind, seconds_until
from elastic.preemption.provider import NoticeSource

HOST = "AZURE_POD_IDENTITY_AUTHORITY_HOST"
"""Environment variable, as in Azure's SDKs: "http://host:port" instead of the link-local address."""
ADDRESS = "http://169.254.169.254"

EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
HEADERS = {"Metadata": "true"}
WARNING_S = {"Preempt": 30.0, "Reboot": 900.0, "Redeploy": 600.0, "Terminate": 900.0}
"""Event type -> the longest warning that Azure documents for it."""
FIRST_TIMEOUT_S = 130.0
TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Scheduled:
    """An event about this machine."""

    event_id: str
    notice: Notice


def events(document: Mapping[str, Any], machine: str, now: datetime) -> list[Scheduled]:
    """Those of this machine in a Scheduled Events document. Raises ValueError, KeyError or TypeError for another."""
    return [
        Scheduled(event["EventId"], _notice(event, now))
        for event in document["Events"]
        if machine in event["Resources"] and event["EventStatus"] in ("Scheduled", "Started")
    ]


def _notice(event: Mapping[str, Any], now: datetime) -> Notice:
    kind, not_before = event["EventType"], event["NotBefore"]
    when = f"not before {not_before}" if not_before else "now"
    because = f"Azure event {event['EventId']}: {kind} of this machine, {when}"
    if kind not in WARNING_S:  # Freeze, or a type that is newer than this list: it must not hide the others
        return Notice(NoticeKind.ADVICE, math.inf, because)
    left_s = 0.0
    if not_before:
        left_s = seconds_until(date_of(not_before), now, WARNING_S[kind])
    return Notice(NoticeKind.RECLAIM if kind == "Preempt" else NoticeKind.MAINTENANCE, left_s, because)


def most_urgent(scheduled: Iterable[Scheduled]) -> Scheduled | None:
    """The event that comes first; those which make the node leave before all others."""
    return min(scheduled, key=lambda event: (not event.notice.leaves, event.notice.seconds_left), default=None)


class Azure(NoticeSource):
    name = "Azure Scheduled Events"
    pause_s = 1.0

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._base = environment.get(HOST) or ADDRESS
        self._machine = ""
        self._answered = False
        self._awaited: tuple[str, ...] = ()

    def look(self) -> Notice | None:
        self._machine = self._machine or self._ask_name()
        timeout_s = TIMEOUT_S if self._answered else FIRST_TIMEOUT_S
        answer = ask(self._base, EVENTS_PATH, timeout_s=timeout_s, headers=HEADERS)
        if answer.status != 200:
            raise answer.trouble("no events")
        self._answered = True
        try:
            found = events(answer.json(), self._machine, answer.now)
        except (ValueError, KeyError, TypeError) as error:
            raise answer.trouble(f"not understood ({error!r})") from error
        self._awaited = tuple(event.event_id for event in found if event.notice.leaves)
        urgent = most_urgent(found)
        return urgent.notice if urgent else None

    def left(self) -> None:
        """Approve the events that the node has left for."""
        if not self._awaited:
            return
        body = json.dumps({"StartRequests": [{"EventId": event_id} for event_id in self._awaited]}).encode()
        headers = {**HEADERS, "Content-Type": "application/json"}
        answer = ask(self._base, EVENTS_PATH, method="POST", timeout_s=TIMEOUT_S, headers=headers, body=body)
        if answer.status != 200:
            raise answer.trouble("the events were not approved")

    def _ask_name(self) -> str:
        answer = ask(self._base, NAME_PATH, timeout_s=TIMEOUT_S, headers=HEADERS)
        if answer.status != 200 or not answer.text:
            raise answer.trouble("no name of this machine")
        return answer.text
