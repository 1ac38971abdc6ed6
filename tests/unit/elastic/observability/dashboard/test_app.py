"""The page over HTTP, without a network: a job's directory behind it, and requests as browsers and others send them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elastic.config import JobSpec
from elastic.errors import ElasticError
from elastic.fleet.findings import Finding
from elastic.observability.dashboard import app as app_module
from elastic.observability.dashboard import directory_source, feeds
from elastic.observability.dashboard.access import HEADERS, Access, hosts_at
from elastic.observability.dashboard.app import FILES, Dashboard
from elastic.observability.dashboard.directory_source import DirectorySource
from elastic.observability.dashboard.feeds import FleetFeed, JobFeed
from elastic.observability.dashboard.saved_page import STATIC
from elastic.records.journal import Journal, journal_path
from elastic.wire import codec

PORT = 7171
WRITTEN = 5
"""Events of the job that `write_job` writes: three moments, a generation, and steps."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


class Browser:
    """Sends requests to the app of one job, which is over."""

    def __init__(self, job_dir: Path) -> None:
        write_job(job_dir)
        self.dir = job_dir
        self.access = Access(hosts_at("127.0.0.1", PORT), PORT)
        self.feed = JobFeed(DirectorySource(job_dir, None), 0.01, leader_only=False)
        self.dashboard = Dashboard(self.access, self.feed, None, job_dir.name)
        self.app = self.dashboard.app()
        self.cookie = f"{self.access.cookie}={self.access.session}"
        self.acting = {"origin": f"http://127.0.0.1:{PORT}", "x-elastic-token": self.access.token}
        self.path = f"/api/jobs/{job_dir.name}"

    async def read(self) -> None:
        """Let the dashboard read what write_job has written: a line that is just written waits for the next look."""
        while self.feed.history.document()["number"] < WRITTEN:
            await self.feed.poll()

    async def ask(self, path: str, method: str = "GET", body: bytes = b"", /, **headers: str) -> Answer:
        pieces: list[bytes] = []
        head: dict[str, Any] = {}
        async for message in self.messages(path, method, body, headers):
            if message["type"] == "http.response.start":
                head = message
            else:
                pieces.append(message.get("body", b""))
        told = {name.decode(): value.decode() for name, value in head["headers"]}
        return Answer(head["status"], told, b"".join(pieces))

    async def messages(
        self, path: str, method: str, body: bytes, headers: dict[str, str]
    ) -> AsyncIterator[dict[str, Any]]:
        """What the app sends, until it has sent all or the caller goes away."""
        given = {"host": f"127.0.0.1:{PORT}", "cookie": self.cookie, **headers}
        plain, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": plain,
            "raw_path": plain.encode(),
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "scheme": "http",
            "server": ("127.0.0.1", PORT),
            "client": ("127.0.0.1", 5),
            "root_path": "",
        }
        sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        asked = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if asked:
                return asked.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await sent.put(message)

        async def answer() -> None:
            await self.app(scope, receive, send)
            await sent.put(None)

        task = asyncio.create_task(answer())
        try:
            while (message := await asyncio.wait_for(sent.get(), 60)) is not None:
                yield message
        finally:
            gone.set()
            await asyncio.wait_for(task, 60)

    async def events(self, after: str, count: int, **headers: str) -> list[tuple[str, str, Any]]:
        """The events of a stream: (id, kind, data), until there are so many beside states."""
        found: list[tuple[str, str, Any]] = []
        async for message in self.messages(f"{self.path}/events?after={after}", "GET", b"", headers):
            for text in message.get("body", b"").decode().split("\n\n"):
                fields = dict(re.findall(r"^(\w+): (.*)$", text, re.MULTILINE))
                if fields:
                    found.append((fields.get("id", ""), fields["event"], json.loads(fields["data"])))
            if sum(kind != "state" for _, kind, _ in found) >= count:
                break
        return found


def write_job(job_dir: Path) -> None:
    (job_dir / "logs").mkdir(parents=True)
    (job_dir / "id").write_text("0" * 16)
    (job_dir / "job.json").write_bytes(codec.to_json(JobSpec(name="j", command=("x",), workers=2)))
    with Journal(journal_path(job_dir, "leader"), "j", "leader", "n") as journal:
        journal.write("worker_started", worker_id="n.0.0")
        journal.write("committed", 1, kind="form", members=["n.0.0"], because="all are there")
        journal.write("running", 1)
    lines = [{"step": number, "scalars": {"loss": 1.0 / (number + 1)}, "samples": [[number]]} for number in range(5)]
    (job_dir / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (job_dir / "logs" / "n.0.0.log").write_text("hello <script>alert(1)</script>\n")
    result = {"exit_code": 0, "because": "all members have finished", "digest": "d" * 64, "generation": 1}
    (job_dir / "result.json").write_text(json.dumps(result))


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    return Browser(tmp_path / "train-1")


async def test_the_key_opens_the_page_with_a_cookie_that_scripts_and_other_sites_do_not_get(browser: Browser) -> None:
    refused = await browser.ask("/", cookie="")
    assert refused.status == 403 and b"key" in refused.body
    assert (await browser.ask("/?key=wrong", cookie="")).status == 403
    page = await browser.ask(f"/?key={browser.access.key}", cookie="")
    assert page.status == 200 and b"page.js" in page.body
    cookie = page.headers["set-cookie"]
    assert cookie.startswith(browser.cookie) and "HttpOnly" in cookie and "SameSite=strict" in cookie
    again = await browser.ask("/")
    assert again.status == 200 and "set-cookie" not in again.headers


async def test_nothing_is_told_to_who_has_no_cookie_or_leads_here_by_another_name(browser: Browser) -> None:
    for path in ("/api/session", browser.path, f"{browser.path}/events", f"{browser.path}/workers/n.0.0/log"):
        refused = await browser.ask(path, cookie="")
        assert refused.status == 403 and "train-1" not in refused.body.decode(), path
    for path in ("/", "/static/page.js", "/api/session"):
        assert (await browser.ask(path, host="evil.example:7171")).status == 421


async def test_every_answer_forbids_what_a_page_might_load_and_who_might_show_it(browser: Browser) -> None:
    for path in ("/", "/nothing", "/api/session", "/static/page.css", browser.path):
        for changed in ({}, {"cookie": ""}, {"host": "evil.example"}):
            told = (await browser.ask(path, **changed)).headers
            assert {name.lower(): told[name.lower()] for name in HEADERS} == {
                name.lower(): value for name, value in HEADERS.items()
            }


async def test_an_action_needs_cookie_origin_and_token(browser: Browser) -> None:
    body = b'{"action": "kill", "worker": "n.0.0"}'
    path = f"{browser.path}/actions"
    for changed in ({"cookie": ""}, {"origin": "http://evil.example"}, {"x-elastic-token": "x" * 43}):
        answer = await browser.ask(path, "POST", body, **{**browser.acting, **changed})
        assert answer.status == 403, changed
    assert (await browser.ask(path, "GET", **browser.acting)).status == 405
    answer = await browser.ask(path, "POST", body, **browser.acting)
    assert answer.status == 503 and "nobody leads the job" in answer.document["error"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"action": "stop"}',  # no `elastic run` has started this dashboard
        b'{"action": "scale", "workers": 2}',
        b'{"action": "kill"}',
        b'{"action": "kill", "worker": "../../x"}',
        b'{"action": "kill", "worker": 7}',
        b'{"action": "kill", "worker": "n.0.0", "workers": "2"}',
        b'{"action": ["kill"], "worker": "n.0.0"}',
        b"x" * 5000,
        b"[" * 4000,
    ],
)
def test_what_is_no_action_is_refused_with_a_reason(browser: Browser, body: bytes) -> None:
    answer = asyncio.run(browser.ask(f"{browser.path}/actions", "POST", body, **browser.acting))
    assert answer.status == 409 and answer.document["error"]


async def test_the_document_of_a_job_that_is_over(browser: Browser) -> None:
    await browser.read()
    document = (await browser.ask(browser.path)).document
    assert document["status"]["state"] == "closed" and document["status"]["digest"] == "d" * 64
    assert document["steps"]["at"] == [0, 1, 2, 3, 4] and document["actions"] == ["stacks", "kill"]
    assert [one["generation"] for one in document["generations"]] == [1] and document["problem"] == ""


async def test_two_pages_get_each_event_once_and_a_page_that_comes_back_gets_the_rest(browser: Browser) -> None:
    await browser.read()
    boot, number = browser.feed.boot, browser.feed.history.number
    first = asyncio.create_task(browser.events(f"{boot}-{number}", 3))
    second = asyncio.create_task(browser.events(f"{boot}-{number}", 3))
    while browser.feed.waiters.pages < 2:
        await asyncio.sleep(0)
    with Journal(journal_path(browser.dir, "agent-n"), "j", "agent-n", "n") as journal:
        for worker in ("n.1.0", "n.2.0", "n.3.0"):
            journal.write("worker_started", worker_id=worker)
    while browser.feed.history.number < number + 3:
        await browser.feed.poll()
    told, same = await first, await second
    moments = [(at, data["worker"]) for at, kind, data in told if kind == "moment"]
    assert moments == [(f"{boot}-{number + 1 + at}", f"n.{at + 1}.0") for at in range(3)]
    assert [one for one in same if one[1] == "moment"] == [one for one in told if one[1] == "moment"]
    rest = await browser.events("", 2, **{"last-event-id": moments[0][0]})
    assert [data["worker"] for _, kind, data in rest if kind == "moment"] == ["n.2.0", "n.3.0"]
    for strange in ("other-1", f"{boot}-x", f"{boot}-{number + 99}", ""):
        assert [kind for _, kind, _ in await browser.events(strange, 1)] == ["reset"]
    assert browser.feed.waiters.pages == 0


async def test_when_the_dashboard_ends_its_pages_get_the_last_state_and_are_told(browser: Browser) -> None:
    await browser.read()
    following = asyncio.create_task(browser.events(f"{browser.feed.boot}-{browser.feed.history.number}", 99))
    while not browser.feed.waiters.pages:
        await asyncio.sleep(0)
    (browser.dir / "result.json").write_text(
        json.dumps({"exit_code": 1, "because": "the script has failed", "digest": "", "generation": 1})
    )
    await browser.dashboard.close()
    told = await following
    assert [kind for _, kind, _ in told][-1] == "end"
    states = [data["status"]["because"] for _, kind, data in told if kind == "state"]
    assert states[-1] == "the script has failed"


async def test_no_more_pages_follow_than_the_process_can_serve(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "STREAMS", 1)
    after = f"{browser.feed.boot}-0"
    following = asyncio.create_task(browser.events(after, 99))
    while not browser.feed.waiters.pages:
        await asyncio.sleep(0)
    assert (await browser.ask(f"{browser.path}/events?after={after}")).status == 503
    await browser.dashboard.close()
    await following


async def test_a_log_is_read_by_the_name_of_a_worker_alone(browser: Browser) -> None:
    log = (await browser.ask(f"{browser.path}/workers/n.0.0/log?offset=6")).document
    assert log["text"] == "<script>alert(1)</script>\n" and log["end"] == log["size"]
    for name in ("n.9.0", "..", "..%2f..%2fjob.json", "journal", "leader", "job.json"):
        assert (await browser.ask(f"{browser.path}/workers/{name}/log")).status == 404, name
    assert (await browser.ask(f"{browser.path}/workers/n.0.0/log?offset=-1")).status == 404


async def test_a_story_is_told_of_a_worker_and_of_a_generation(browser: Browser) -> None:
    worker = (await browser.ask(f"{browser.path}/story?about=n.0.0")).document
    assert worker["moments"][0]["said"].startswith("n.0.0 starts")
    generation = (await browser.ask(f"{browser.path}/story?about=1")).document
    assert any("generation 1" in one["said"] for one in generation["moments"])
    assert (await browser.ask(f"{browser.path}/story?about=77")).document["moments"] == []


async def test_only_the_files_of_the_page_are_served(browser: Browser) -> None:
    for name, kind in FILES.items():
        answer = await browser.ask(f"/static/{name}")
        assert answer.status == 200 and answer.headers["content-type"].startswith(kind) and answer.body
    for name in ("page.html", "../app.py", "vendor/README.md", "vendor/../../app.py", ""):
        assert (await browser.ask(f"/static/{name}")).status == 404


async def test_another_job_or_a_fleet_is_not_found_here(browser: Browser) -> None:
    of_fleet = ("/api/fleet", "/api/fleet/events", "/api/fleet/findings")
    for path in ("/api/jobs/other", "/api/jobs/other/events", *of_fleet):
        assert (await browser.ask(path)).status == 404
    drain = await browser.ask("/api/nodes/n/drain", "POST", b'{"over": false}', **browser.acting)
    assert drain.status == 409


def test_the_page_holds_no_script_no_style_and_no_address_of_its_own() -> None:
    page = (STATIC / "page.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\son\w+=", page)
    for name in ("page.html", "page.js", "charts.js", "page.css"):
        text = (STATIC / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(https?:)?//[a-z0-9.-]+\.[a-z]", text), name
        assert "innerHTML" not in text and "eval(" not in text


def test_what_is_not_ours_is_what_its_table_says() -> None:
    table = (STATIC / "vendor" / "README.md").read_text()
    rows = re.findall(r"^\| (\S+) \| .* \| ([0-9a-f]{64}) \|$", table, re.MULTILINE)
    assert dict(rows).keys() == {name.removeprefix("vendor/") for name in FILES if name.startswith("vendor/")}
    for name, digest in rows:
        assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == digest
    assert (STATIC / "vendor" / "uPlot.LICENSE").is_file()


async def test_text_that_is_no_unicode_does_not_keep_the_page_away(browser: Browser) -> None:
    with Journal(journal_path(browser.dir, "agent-n"), "j", "agent-n", "n") as journal:
        journal.write("worker_failed", worker_id="n.0.0", because="no such file: '\udcff'")
    while browser.feed.history.document()["number"] <= WRITTEN:
        await browser.feed.poll()
    story = await browser.ask(f"{browser.path}/story?about=n.0.0")
    assert story.status == 200 and story.document["moments"]
    assert (await browser.ask(browser.path)).document["moments"][-1]["because"] == "no such file: '\udcff'"


async def test_lines_that_no_process_of_ours_has_written_do_not_end_the_dashboard(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "UNSEEN_S", 0.05)
    head = {"t_mono_ns": 1, "t_wall": 1.0, "job": "j", "generation": 1, "worker_id": "", "node": "n", "who": "x"}
    strange = [
        {**head, "event": "committed", "members": 5},
        {**head, "event": "committed", "t_wall": None},
        {name: value for name, value in head.items() if name != "t_wall"} | {"event": "running"},
        {**head, "event": "worker_started", "node": ["n"], "because": {"a": "{b}"}},
        {**head, "event": "snapshot_skipped", "node": {}},
    ]
    lines = [json.dumps(one).encode() for one in strange] + [b'{"event":"running"' + b"[" * 100_000]
    steps = [b'{"step":5,"samples":' + b"[" * 100_000, b'{"step":6,"scalars":[],"samples":[{"n":"x"}]}', b"\xff"]
    steps += [b'{"step":7,"samples":[{"n":1e400}]}', b'{"step":8,"scalars":{"loss":1e400},"samples":[]}']
    (browser.dir / "journal" / "strange.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    with (browser.dir / "steps.jsonl").open("ab") as ledger:
        ledger.write(b"\n".join(steps) + b'\n{"step":9,"scalars":{"loss":0.5},"samples":[]}\n')
    polls = asyncio.create_task(browser.feed.run())
    for _ in range(200):
        document = browser.feed.history.document()
        if polls.done() or (document["number"] >= WRITTEN and 9 in document["steps"]["at"]):
            break
        await asyncio.sleep(0.05)
    assert not polls.done(), polls.exception()
    polls.cancel()
    document = (await browser.ask(browser.path)).document
    assert [one["members"] for one in document["generations"]][-1] == 1
    assert 9 in document["steps"]["at"]


async def test_a_job_of_before_a_reboot_or_of_another_machine_is_shown(browser: Browser) -> None:
    path = browser.dir / "journal" / "leader.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    later = [{**one, "t_mono_ns": one["t_mono_ns"] + 10**16} for one in lines]
    path.write_text("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in later))
    for _ in range(3):
        await browser.feed.poll()
    assert len(browser.feed.history.document()["generations"]) == 1


async def test_the_time_of_a_job_that_was_killed_with_its_command_does_not_go_on(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_source, "STATUS_S", 0.05)
    (browser.dir / "result.json").unlink()
    await browser.read()
    await browser.feed.poll(ask=True)
    await browser.feed.poll()
    assert float(browser.feed.history.summary(time.time() + 3600)["time"]["total_s"]) < 60


async def test_a_number_that_is_too_long_is_refused(browser: Browser) -> None:
    digits = "1" * 5000
    assert (await browser.ask(f"{browser.path}/workers/n.0.0/log?offset={digits}")).status == 404
    assert (await browser.ask(f"{browser.path}/story?about={digits}")).status in (200, 404)
    (told,) = await browser.events(f"{browser.feed.boot}-{digits}", 1)
    assert told[1] == "reset"


async def test_another_job_in_the_same_directory_has_a_page_of_its_own(browser: Browser) -> None:
    await browser.read()
    boot, number = browser.feed.boot, browser.feed.history.number
    browser.dir.rename(browser.dir.with_name("train-1.old-1"))
    await browser.feed.poll(ask=True)
    assert "was removed or moved" in browser.feed.state["problem"]
    write_job(browser.dir)
    (browser.dir / "id").write_text("1" * 16)
    lines = (browser.dir / "steps.jsonl").read_text().splitlines()[:2]
    (browser.dir / "steps.jsonl").write_text("\n".join(lines) + "\n")
    while (document := browser.feed.history.document())["steps"]["at"] != [0, 1] or not document["generations"]:
        await browser.feed.poll()
    assert [kind for _, kind, _ in await browser.events(f"{boot}-{number}", 1)] == ["reset"]
    assert len(document["generations"]) == 1


class OneJobFleet:
    """A fleet of the one job of a directory."""

    may_act = True

    def __init__(self, job_dir: Path) -> None:
        self._dir = job_dir

    def overview(self) -> dict[str, Any]:
        return {"leader": "here", "jobs": [{"job": self._dir.name, "state": "running"}], "nodes": []}

    def findings(self) -> list[Finding]:
        raise ElasticError("nobody answers")

    def job(self, name: str) -> DirectorySource:
        return DirectorySource(self._dir, None)

    def drain(self, node: str, *, over: bool) -> str:
        raise AssertionError(node)


def test_findings_are_told_as_they_are_and_a_fleet_that_does_not_answer_is_said(browser: Browser) -> None:
    class Examined(OneJobFleet):
        def findings(self) -> list[Finding]:
            return [Finding("node", "a", "is away", "start it"), Finding("etcd", "b", "version 3.4")]

    for fleet, status, told in (
        (OneJobFleet(browser.dir), 503, {"error": "nobody answers"}),
        (
            Examined(browser.dir),
            200,
            {
                "findings": [
                    {"about": "node", "where": "a", "said": "is away", "advice": "start it"},
                    {"about": "etcd", "where": "b", "said": "version 3.4", "advice": ""},
                ]
            },
        ),
    ):
        browser.app = Dashboard(browser.access, None, FleetFeed(fleet, 0.01), "fleet").app()
        answer = asyncio.run(browser.ask("/api/fleet/findings"))
        assert (answer.status, json.loads(answer.body)) == (status, told)


async def test_the_page_of_a_job_of_a_fleet_is_told_of_the_end_of_the_dashboard(browser: Browser) -> None:
    fleet = FleetFeed(OneJobFleet(browser.dir), 0.01)
    browser.dashboard = Dashboard(browser.access, None, fleet, "fleet")
    browser.app = browser.dashboard.app()
    polls = asyncio.create_task(fleet.run())
    feeds = await asyncio.gather(*(fleet.job(browser.dir.name) for _ in range(3)))
    assert len({feed.boot for feed in feeds}) == 1  # pages that come together share their feed
    following = asyncio.create_task(browser.events(f"{feeds[0].boot}-{feeds[0].history.number}", 99999))
    while not feeds[0].waiters.pages:
        await asyncio.sleep(0)
    polls.cancel()
    await asyncio.gather(polls, return_exceptions=True)
    await browser.dashboard.close()
    assert [kind for _, kind, _ in await asyncio.wait_for(following, 10)][-1] == "end"


async def test_a_page_that_has_nothing_to_hear_gets_a_sign_of_life_though_the_dashboard_looks_more_often(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy closes a stream on which nothing comes."""
    await browser.read()
    monkeypatch.setattr(app_module, "HEARTBEAT_S", 0.5)
    looks = asyncio.create_task(browser.feed.run())
    after = f"{browser.feed.boot}-{browser.feed.history.number}"
    signs = 0

    async def listen() -> None:
        nonlocal signs
        async for message in browser.messages(f"{browser.path}/events?after={after}", "GET", b"", {}):
            signs += message.get("body", b"").count(b":\n\n")
            if signs == 3:
                return

    try:
        await asyncio.wait_for(listen(), 20)
    finally:
        looks.cancel()
        await asyncio.gather(looks, return_exceptions=True)
    assert signs == 3
