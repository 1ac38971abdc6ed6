"""The pages and their data over HTTP.

    GET  /                                   the page; with ?key=... it is opened
    GET  /static/NAME                        its script, its style, uPlot
    GET  /api/session                        {"mode": "job" or "fleet", "job", "token", "may_act"}
    GET  /api/fleet, /api/fleet/events       the overview, and each new one
    GET  /api/fleet/findings                 what `elastic doctor` finds now
    GET  /api/jobs/JOB, /api/jobs/JOB/events the document of a job, and what comes after it
    GET  /api/jobs/JOB/story?about=...       a generation or a worker
    GET  /api/jobs/JOB/flight                who waits for whom
    GET  /api/jobs/JOB/workers/W/log?offset= a piece of a worker's log
    POST /api/jobs/JOB/actions               {"action", "worker", "workers"}
    POST /api/nodes/NODE/drain               {"over"}

Events are server-sent events. Their id is "<boot>-<number>", so a browser that lost its connection says what it has got
last, and misses nothing; if that is not kept any more, it gets `reset` and reads the document anew.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict
from http import HTTPStatus
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from elastic.errors import ConfigError, ElasticError
from elastic.fleet.remote_logs import is_worker
from elastic.observability.dashboard.access import HEADERS, Access, HttpRefusal
from elastic.observability.dashboard.feeds import FleetFeed, JobFeed
from elastic.observability.dashboard.saved_page import PAGE, STATIC
from elastic.observability.dashboard.sources import Action
from elastic.records.events import story

HEARTBEAT_S = 15.0
"""Seconds without an event after which a comment is sent: proxies close silent connections, and a page that is gone is
noticed."""

STREAMS = 64
"""Most pages that follow at once."""

BODY_BYTES = 4096
STORY_MOMENTS = 2000
LOG_TAIL = 1 << 16

FILES: Mapping[str, str] = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "charts.js": "text/javascript",
    "vendor/uPlot.iife.min.js": "text/javascript",
    "vendor/uPlot.min.css": "text/css",
    "icon.svg": "image/svg+xml",
}


Answer: TypeAlias = Callable[[Request], Awaitable[Response]]


class Dashboard:
    """The dashboard of one job, or of a fleet. Its methods run on the event loop."""

    def __init__(self, access: Access, job: JobFeed | None, fleet: FleetFeed | None, name: str) -> None:
        """name: of the job, or of the fleet's address, for people. Either job or fleet is given."""
        self._access = access
        self._job = job
        self._fleet = fleet
        self._name = name
        self._examining = asyncio.Lock()
        self._streams = 0
        self._closing = False

    def app(self) -> ASGIApp:
        return _Guarded(
            Starlette(
                routes=[
                    Route("/", self._page),
                    Route("/static/{name:path}", _static),
                    Route("/api/session", self._guarded(self._session)),
                    Route("/api/fleet", self._guarded(self._overview)),
                    Route("/api/fleet/events", self._guarded(self._overviews)),
                    Route("/api/fleet/findings", self._guarded(self._findings)),
                    Route("/api/jobs/{job}", self._guarded(self._document)),
                    Route("/api/jobs/{job}/events", self._guarded(self._events)),
                    Route("/api/jobs/{job}/story", self._guarded(self._story)),
                    Route("/api/jobs/{job}/flight", self._guarded(self._flight)),
                    Route("/api/jobs/{job}/workers/{worker}/log", self._guarded(self._log)),
                    Route("/api/jobs/{job}/actions", self._act(self._job_action), methods=["POST"]),
                    Route("/api/nodes/{node}/drain", self._act(self._drain), methods=["POST"]),
                ]
            ),
            self._access,
        )

    async def close(self) -> None:
        """Tell the pages what there is, and end their streams."""
        if self._job is not None:
            await self._job.poll(ask=True)
        self._closing = True
        for feed in (self._job, self._fleet, *(self._fleet.jobs if self._fleet is not None else ())):
            if feed is not None:
                feed.waiters.wake()

    # ------------------------------------------------------------------------------------------------ access

    async def _page(self, request: Request) -> Response:
        key = request.query_params.get("key")
        opened = key is not None and self._access.opens(key)
        if not opened and (refusal := self._access.of_reader(request.cookies)) is not None:
            return Response(f"{refusal.because}\n", refusal.status, media_type="text/plain")
        page = Response((STATIC / PAGE).read_bytes(), media_type="text/html")
        if opened:
            page.set_cookie(self._access.cookie, self._access.session, httponly=True, samesite="strict", path="/")
        return page

    def _guarded(self, answer: Answer, *, acts: bool = False) -> Answer:
        async def guarded(request: Request) -> Response:
            refusal = self._access.of_reader(request.cookies)
            if acts and refusal is None:
                refusal = self._access.of_actor(request.headers)
            if refusal is not None:
                return _refused(refusal)
            try:
                return await answer(request)
            except ConfigError as error:
                return _refused(HttpRefusal(HTTPStatus.CONFLICT if acts else HTTPStatus.NOT_FOUND, str(error)))
            except (ElasticError, OSError) as error:
                return _refused(HttpRefusal(HTTPStatus.SERVICE_UNAVAILABLE, str(error)))

        return guarded

    def _act(self, act: Callable[[Request, Mapping[str, Any]], Awaitable[str]]) -> Answer:
        async def answer(request: Request) -> Response:
            return _json({"said": await act(request, await _body(request))})

        return self._guarded(answer, acts=True)

    # -------------------------------------------------------------------------------------------------- data

    async def _session(self, request: Request) -> Response:
        fleet = self._fleet
        may_act = fleet.source.may_act if fleet is not None else True
        mode = "job" if fleet is None else "fleet"
        return _json({"mode": mode, "job": self._name, "token": self._access.token, "may_act": may_act})

    async def _feed(self, request: Request) -> JobFeed:
        name = request.path_params["job"]
        if self._fleet is not None:
            return await self._fleet.job(name)
        if self._job is None or name != self._name:
            raise ConfigError(f"this is the dashboard of {self._name}")
        return self._job

    async def _overview(self, request: Request) -> Response:
        return _json(self._of_fleet().overview)

    def _of_fleet(self) -> FleetFeed:
        if self._fleet is None:
            raise ConfigError(f"this is the dashboard of {self._name}, not of a fleet")
        return self._fleet

    async def _findings(self, request: Request) -> Response:
        source = self._of_fleet().source
        async with self._examining:  # each look has a thread for each machine
            found = await asyncio.to_thread(source.findings)
        return _json({"findings": [asdict(finding) for finding in found]})

    async def _overviews(self, request: Request) -> Response:
        fleet = self._of_fleet()

        async def events() -> AsyncIterator[str]:
            version = -1
            while True:
                changed = fleet.waiters.changed
                if fleet.version != version:
                    version = fleet.version
                    yield _event("fleet", fleet.overview)
                if self._closing:
                    yield _event("end", {})
                    return
                if not await _set_within(changed, HEARTBEAT_S):
                    yield ":\n\n"

        return self._streamed(fleet, events())

    async def _document(self, request: Request) -> Response:
        feed = await self._feed(request)
        document = await asyncio.to_thread(feed.history.document)
        actions = [str(action) for action in feed.source.actions]
        return _json({**document, **feed.state, "boot": feed.boot, "actions": actions})

    async def _events(self, request: Request) -> Response:
        feed = await self._feed(request)
        asked = request.headers.get("last-event-id") or request.query_params.get("after", "")
        boot, _, number = asked.partition("-")
        after = int(number) if boot == feed.boot and _is_number(number) else -1

        async def events(number: int) -> AsyncIterator[str]:
            version, said_s = -1, time.monotonic()
            while True:
                changed, ends = feed.waiters.changed, self._closing
                found = feed.history.after(number)
                if found is None:
                    yield _event("reset", {})
                    return
                for event in found:
                    number, said_s = event.number, time.monotonic()
                    yield _event(event.kind, event.data, f"{feed.boot}-{number}")
                if feed.version != version:
                    version, said_s = feed.version, time.monotonic()
                    yield _event("state", feed.state)
                if ends:
                    yield _event("end", {})
                    return
                # The feed wakes its pages at each look, also where it has found nothing.
                if not await _set_within(changed, said_s + HEARTBEAT_S - time.monotonic()) or (
                    time.monotonic() >= said_s + HEARTBEAT_S
                ):
                    said_s = time.monotonic()
                    yield ":\n\n"

        return self._streamed(feed, events(after))

    async def _story(self, request: Request) -> Response:
        feed = await self._feed(request)
        about = request.query_params.get("about", "")
        lines, away = await asyncio.to_thread(feed.source.lines)
        of_number = _is_number(about)
        moments = story.of_generation(lines, int(about)) if of_number else story.of_worker(lines, about)
        shown = [
            {"t": moment.line["t_wall"], "said": moment.said, "because": moment.because}
            for moment in moments[-STORY_MOMENTS:]
        ]
        return _json({"about": about, "moments": shown, "left_out": len(moments) - len(shown), "away": away})

    async def _flight(self, request: Request) -> Response:
        feed = await self._feed(request)
        return _json({"text": await asyncio.to_thread(feed.source.flight)})

    async def _log(self, request: Request) -> Response:
        feed, worker = await self._feed(request), request.path_params["worker"]
        offset = request.query_params.get("offset", "")
        if not is_worker(worker) or not (offset == "" or _is_number(offset)):
            raise ConfigError(f"no log of {worker!r:.80}")
        piece = await asyncio.to_thread(feed.source.logs().read, worker, int(offset or -LOG_TAIL))
        if piece.size < 0:
            raise ConfigError(f"no log of {worker}")
        return _json({"text": piece.text.decode(errors="replace"), "end": piece.end, "size": piece.size})

    # ----------------------------------------------------------------------------------------------- actions

    async def _job_action(self, request: Request, asked: Mapping[str, Any]) -> str:
        feed = await self._feed(request)
        action = next((action for action in feed.source.actions if action == asked.get("action")), None)
        worker, workers = asked.get("worker", ""), asked.get("workers", 0)
        if action is None or not isinstance(worker, str) or type(workers) is not int:
            raise ConfigError(f"{str(asked.get('action'))[:80]!r} is no action here, or not for this user")
        if action is Action.SCALE and workers < 1:
            raise ConfigError("a job has at least 1 worker; Stop ends it")
        if action in (Action.STACKS, Action.KILL) and not is_worker(worker):
            raise ConfigError(f"{worker[:80]!r} is no worker")
        return await asyncio.to_thread(feed.source.act, action, worker, workers)

    async def _drain(self, request: Request, asked: Mapping[str, Any]) -> str:
        if self._fleet is None or not self._fleet.source.may_act:
            raise ConfigError("nodes are drained on the dashboard of a fleet, by an operator")
        over = asked.get("over")
        if not isinstance(over, bool):
            raise ConfigError("say whether the drain is over")
        node = request.path_params["node"]
        known = {entry["node"] for entry in self._fleet.overview.get("nodes", ())}
        if node not in known:
            raise ConfigError(f"the fleet has no node {node[:80]!r}")
        return await asyncio.to_thread(lambda: self._fleet.source.drain(node, over=over) if self._fleet else "")

    def _streamed(self, feed: JobFeed | FleetFeed, events: AsyncIterator[str]) -> Response:
        if self._streams >= STREAMS:
            return _refused(HttpRefusal(HTTPStatus.SERVICE_UNAVAILABLE, f"{STREAMS} pages follow already; close some"))

        async def counted() -> AsyncIterator[str]:
            self._streams += 1
            feed.waiters.pages += 1
            try:
                async for text in events:
                    yield text
            finally:
                self._streams -= 1
                feed.waiters.pages -= 1

        return StreamingResponse(counted(), media_type="text/event-stream")


class _Guarded:
    """Refuses requests for another host, and puts the headers of access.py into every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        refusal = self._access.of_any(Request(scope).headers)
        app: ASGIApp = self._app
        if refusal is not None:
            app = Response(f"{refusal.because}\n", refusal.status, media_type="text/plain")
        await app(scope, receive, with_headers)


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in FILES:
        return Response("no such file\n", HTTPStatus.NOT_FOUND, media_type="text/plain")
    return Response((STATIC / name).read_bytes(), media_type=FILES[name])


async def _body(request: Request) -> Mapping[str, Any]:
    text = b""
    async for piece in request.stream():
        text += piece
        if len(text) > BODY_BYTES:
            raise ConfigError("the request is too large")
    try:
        asked = json.loads(text or b"{}")
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict):
        raise ConfigError("an action is a JSON object")
    return asked


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def _is_number(text: str) -> bool:
    """Whether this is a number that fits into 64 bits."""
    return text.isdecimal() and len(text) <= 18


def _json(document: Mapping[str, Any], status: int = HTTPStatus.OK) -> Response:
    """In ASCII: text from jobs may hold what cannot be encoded, such as the name of a file that is no Unicode."""
    return Response(json.dumps(document, separators=(",", ":")), status, media_type="application/json")


def _event(kind: str, data: Mapping[str, Any], number: str = "") -> str:
    head = f"id: {number}\n" if number else ""
    return f"{head}event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


def _refused(refusal: HttpRefusal) -> Response:
    return _json({"error": refusal.because}, refusal.status)
