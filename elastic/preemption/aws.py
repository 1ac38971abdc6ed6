"""Amazon EC2: spot interruption notices and rebalance recommendations, from the instance metadata service (IMDSv2).

    PUT /latest/api/token                                   a token for some hours; 401 later means: a new one, please
    GET /latest/meta-data/spot/instance-action              404, or {"action": "terminate", "time": "...Z"}
    GET /latest/meta-data/events/recommendations/rebalance  404, or {"noticeTime": "...Z"}

An interruption notice comes two minutes before the end, but hibernation begins with it. A recommendation only says
that the risk has grown; leaving costs nothing also when the real notice comes, so nobody leaves because of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from elastic.preemption.metadata_http import MetadataAnswer, ask
from elastic.preemption.notice import Notice, NoticeKind, seconds_until, utc
from elastic.preemption.provider import NoticeSource

ENDPOINT = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""Environment variable, as in Amazon's SDKs: "http://host:port" instead of the link-local address."""
DISABLED = "AWS_EC2_METADATA_DISABLED"
"""Environment variable, as in Amazon's SDKs: "true" keeps `auto` away."""
ADDRESS = "http://169.254.169.254"

WARNING_S = 120.0
TOKEN_S = 21_600
TIMEOUT_S = 2.0
TOKEN_PATH = "/latest/api/token"
ACTION_PATH = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"


def interruption(document: Mapping[str, Any], now: datetime) -> Notice:
    """The notice in a spot/instance-action document. Raises ValueError, KeyError or TypeError for another one.

    An action that is none of terminate, stop and hibernate ends the instance all the same.
    """
    action, time = document["action"], document["time"]
    left_s = 0.0 if action == "hibernate" else seconds_until(utc(time), now, WARNING_S)
    return Notice(NoticeKind.RECLAIM, left_s, f"EC2 will {action} this spot instance at {time}")


def recommendation(document: Mapping[str, Any]) -> Notice:
    """The advice in an events/recommendations/rebalance document. Raises KeyError for another one."""
    return Notice(
        NoticeKind.ADVICE, math.inf, f"EC2 recommends to leave this spot instance since {document['noticeTime']}"
    )


class Aws(NoticeSource):
    name = "EC2"
    pause_s = 5.0

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._base = environment.get(ENDPOINT) or ADDRESS
        self._token = ""

    def look(self) -> Notice | None:
        answer = self._get(ACTION_PATH)
        try:
            if answer.status == 200:
                return interruption(answer.json(), answer.now)
            answer = self._get(REBALANCE_PATH)
            return recommendation(answer.json()) if answer.status == 200 else None
        except (ValueError, KeyError, TypeError) as error:
            raise answer.trouble(f"not understood ({error!r})") from error

    def _get(self, path: str) -> MetadataAnswer:
        """200 or 404. A token that is no longer taken is replaced once."""
        fresh = not self._token
        self._token = self._token or self._new_token()
        answer = ask(self._base, path, timeout_s=TIMEOUT_S, headers={"X-aws-ec2-metadata-token": self._token})
        if answer.status == 401:
            self._token = ""
            if not fresh:
                return self._get(path)
        if answer.status not in (200, 404):
            raise answer.trouble("neither 200 nor 404")
        return answer

    def _new_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
        answer = ask(self._base, TOKEN_PATH, method="PUT", timeout_s=TIMEOUT_S, headers=headers)
        if answer.status != 200 or not answer.text.isascii() or not answer.text.isprintable():
            raise answer.trouble("no token")
        return answer.text
