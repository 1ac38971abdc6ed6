"""The page of a job in a real Chromium: what it shows by itself, and what its buttons do."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from chaos_tests.support.processes import Command
from elastic.observability.dashboard.job_history import LIVE_STEPS
from elastic.records import flight_recorder, journal, last_notes
from tests.live.dashboard_page import address_in
from tests.live.jobs import ROOT, TRAINER, Job, run_alone
from tests.unit.elastic.observability.dashboard.test_app import write_job

pytest.importorskip("selenium", reason="`make test-browser` installs it")

from tests.browser.chromium import BROWSER, DRIVER, Chromium

pytestmark = pytest.mark.skipif(BROWSER is None or DRIVER is None, reason="no chromium here; `make test-browser`")

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


NOTE_LOSSES = """
window.seen = [];
new MutationObserver(() => {
  const count = document.querySelectorAll("#moments [data-event=member_lost]").length;
  while (seen.length < count) seen.push(Date.now() / 1000);
}).observe(document.body, {childList: true, subtree: true});
"""
"""When the page has shown each loss."""

NOTE_FRAMES = """
window.frameTimes = [];
let last = performance.now();
const tick = (now) => {
  frameTimes.push(now - last);
  last = now;
  if (frameTimes.length < 120) requestAnimationFrame(tick);
};
requestAnimationFrame(tick);
"""


def lost(page: Chromium) -> int:
    return len(page.all("#moments [data-event=member_lost]"))


def step_of(page: Chromium) -> int:
    """The step that the page shows; -1 before the first one."""
    shown = page.all("#tiles dd")[0]
    return int(shown) if shown.isdecimal() else -1


def kill(page: Chromium, worker: str) -> None:
    page.click(f"button[aria-label='Kill {worker}']")
    page.click("#ask-yes")


def test_two_kills_by_the_pages_own_button_are_watched_to_the_end_of_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--workers", "3", "--dashboard", "--checkpoint-every", "5s")
    with Job(tmp_path, *options, str(TRAINER)) as job, Chromium() as page:
        job.shut("end")
        page.open(job.until("its address", lambda: address_in(job.output)))
        assert "key=" not in page.driver.current_url
        members = job.await_world(3)
        page.count("#members tr[data-worker]", 3)
        page.run(NOTE_LOSSES)
        for number, worker in enumerate(members[1:], 1):
            kill(page, worker)
            page.count("#moments [data-event=member_lost]", number)
            page.count("#recoveries tr button", number)
            job.await_world(3)
            page.count("#members tr[data-worker]", 3)
        delays = [
            seen_s - line["t_wall"]
            for seen_s, line in zip(page.run("return window.seen"), job.events("member_lost"), strict=True)
        ]
        with capsys.disabled():
            print(f"\nfrom the line in the journal to the page: {', '.join(f'{delay:.2f} s' for delay in delays)}")
        assert all(worker in page.text("#recoveries") for worker in members[1:])
        page.screenshot("job-running")
        page.click("#recoveries tr:last-child button")
        page.until("its story", lambda: members[1] in page.text("#panel"))
        page.screenshot("recovery")
        assert "about=" in page.driver.current_url
        page.click("#panel button.push")
        worker = page.all("#members td button.link")[0]
        page.click("#members td button.link")
        page.click("#ask-stacks")
        page.until("the stacks", lambda: "most recent call first" in page.text("#stacks"))
        page.screenshot("worker")
        assert f"worker={worker}" in page.driver.current_url
        page.click("#panel button.push")
        job.open("end")
        assert job.wait() == 0
        page.until("the end", lambda: page.text("#state") == "closed")
        page.until("the digest", lambda: job.result["digest"] in page.text("#top"))
        assert page.foreign() == [] and [one for one in page.console() if "net::ERR" not in one] == []
        assert job.left_behind() == {}


def test_the_documented_example_is_watched_from_its_start_to_its_end_through_two_kills(tmp_path: Path) -> None:
    """The command of the README, with its dashboard."""
    example = ROOT / "docs" / "examples" / "train_gpt.py"
    with Chromium() as page, Job(tmp_path, "--workers", "3", "--dashboard", str(example)) as job:
        page.open(job.until("its address", lambda: address_in(job.output)))
        page.run(NOTE_LOSSES)
        page.count("#members tr[data-worker]", 3)
        page.until("the first steps", lambda: step_of(page) > 5)
        for number in (1, 2):
            victim = page.all("#members td button.link")[number]
            kill(page, victim)
            page.count("#recoveries tr button", number)
            assert victim in page.text("#recoveries")
            page.count("#moments [data-event=joined]", number)
            page.count("#members tr[data-worker]", 3)
        at_the_second = step_of(page)
        page.until("the end", lambda: page.text("#state") == "closed")
        page.until("the digest", lambda: job.result["digest"] in page.text("#top"))
        assert "exit 0" in page.text("#top") and job.wait() == 0
        assert step_of(page) == 199 and at_the_second < 190
        assert len(page.run("return window.seen")) == lost(page) == 2
        assert [step["step"] for step in job.steps()] == list(range(200))
        page.screenshot("example")
        assert page.foreign() == [] and [one for one in page.console() if "net::ERR" not in one] == []
        assert job.left_behind() == {}
    assert f"digest {job.result['digest']}" in run_alone(tmp_path, example), (
        "the bits of a run in which nothing happened"
    )


def test_a_page_that_was_away_and_one_that_is_loaded_anew_show_what_a_third_has_seen(tmp_path: Path) -> None:
    with Job(tmp_path, "--workers", "2", "--dashboard", str(TRAINER)) as job, Chromium() as page, Chromium() as other:
        job.shut("end")
        address = job.until("its address", lambda: address_in(job.output))
        page.open(address)
        other.open(address)
        _, second = job.await_world(2)
        page.count("#connection.good", 1)
        other.count("#connection.good", 1)
        away = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        page.driver.execute_cdp_cmd("Network.enable", {})
        page.driver.execute_cdp_cmd("Network.emulateNetworkConditions", away)
        job.send(second)
        job.await_event("joined")
        other.until("the newcomer", lambda: other.all("#moments [data-event=joined]"))
        back = {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        page.driver.execute_cdp_cmd("Network.emulateNetworkConditions", back)
        page.until("the newcomer", lambda: page.all("#moments [data-event=joined]"))
        _, second = job.await_world(2)
        job.send(second)
        other.until("the second loss", lambda: lost(other) == 2)
        page.until("the same", lambda: page.all("#moments li") == other.all("#moments li"))
        seen = page.all("#moments li")
        page.driver.refresh()
        page.until("it again", lambda: set(seen) <= set(page.all("#moments li")) and lost(page) == 2)
        job.open("end")
        assert job.wait() == 0


def test_what_a_script_says_is_text_on_the_page(tmp_path: Path) -> None:
    script = tmp_path / "hostile.py"
    script.write_text(
        "import elastic, sys\n"
        "job = elastic.join(seed=0)\n"
        f"print({HOSTILE!r}, file=sys.stderr, flush=True)\n"
        f"raise RuntimeError({HOSTILE!r})\n"
    )
    with Job(tmp_path, "--workers", "1", str(script)) as job:
        assert job.wait() == 1
    words = [sys.executable, "-m", "elastic.cli", "dashboard", "--job-dir", str(job.dir), "--listen", "0"]
    with Command(words, tmp_path / "page.out", environment={"PYTHONPATH": str(ROOT)}) as command, Chromium() as page:
        address = page.until("its address", lambda: address_in(command.output))
        page.open(address)
        page.until("the reason", lambda: HOSTILE in page.text("#top") + page.text("#moments"))
        page.open(f"{address.partition('?')[0]}?worker=local.0.0")
        page.until("the log", lambda: HOSTILE in page.text("#log"))
        assert page.run("return document.images.length") == 0
        assert page.run("return document.querySelectorAll('main script, dialog script').length") == 0
        assert page.console() == []


def metrics(job: Job) -> str:
    """What a scraper gets."""
    found = job.until("the address of its metrics", lambda: re.search(r"metrics at (http://\S+)", job.output))
    with urllib.request.urlopen(found[1], timeout=60) as answer:
        text: str = answer.read().decode()
    return text


def trace(job: Job) -> list[dict[str, Any]]:
    words = [sys.executable, "-m", "elastic.cli", "trace", "--job-dir", str(job.dir)]
    told = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    events: list[dict[str, Any]] = json.loads(told)["traceEvents"]
    return events


def last_note(job: Job, worker: str) -> last_notes.LastNote:
    """By the flight recorder."""
    ranks = last_notes.ranks(journal.read_all(job.dir, ("entered",)))
    told = last_notes.last_notes(flight_recorder.read_all(job.dir), time.time_ns(), ranks)
    return next(one for one in told if one.worker_id == worker)


HANGS = ("--workers", "3", "--dashboard", "--metrics", "0")


def test_a_member_that_a_signal_has_stopped_is_told_by_page_metrics_trace_and_flight_recorder(tmp_path: Path) -> None:
    with Job(tmp_path, *HANGS, str(TRAINER)) as job, Chromium() as page:
        job.shut("end")
        page.open(job.until("its address", lambda: address_in(job.output)))
        stopped = job.await_world(3)[1]
        page.count("#members tr[data-worker]", 3)
        job.send(stopped, signal.SIGSTOP)
        frozen = job.await_event("worker_frozen", worker_id=stopped)
        last = last_note(job, stopped)
        place = f"in operation {last.operation} it {last.said}"
        assert last.rank == 1
        assert "stopped by a signal" in frozen["because"] and frozen["because"].endswith(place)
        page.count("#moments [data-event=member_lost]", 1)
        for event, sentence in (
            ("worker_frozen", f"{stopped} is frozen"),
            ("member_lost", f"{stopped}, rank 1, is lost"),
        ):
            (said,) = page.all(f"#moments [data-event={event}]")
            assert sentence in said and place in said
        page.count("#recoveries tr button", 1)
        page.screenshot("stopped")
        counted = 'elastic_job_hangs_total{elastic_job="trainer",rank="1"} 1.0'
        job.until("the count of its rank", lambda: counted in metrics(job))
        assert metrics(job).count("elastic_job_hangs_total{") == 3
        job.await_event("worker_exited", worker_id=stopped)
        job.await_world(3)
        traced = trace(job)
        (track,) = {event["tid"] for event in traced if event.get("args", {}).get("name") == stopped}
        *_, hang = [event for event in traced if event["ph"] == "X" and event["tid"] == track]
        assert hang["name"] == last.said and hang["dur"] > 5e6, "until it was killed"
        assert (hang["args"]["generation"], hang["args"]["operation"]) == (last.generation, last.operation)
        told = {event["cat"]: event for event in traced if event["ph"] == "i" and event["tid"] == track}
        assert "rank 1" in told["member_lost"]["name"] and told["member_lost"]["args"]["because"].endswith(place)
        job.open("end")
        assert job.wait() == 0


def test_a_worker_that_gets_nowhere_is_named_with_its_place_by_page_metrics_trace_and_flight_recorder(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, *HANGS, str(TRAINER)) as job, Chromium() as page:
        job.shut("end")
        page.open(job.until("its address", lambda: address_in(job.output)))
        _, second, _ = job.await_world(3)
        (job.gates / "shard.new").write_text(second)
        (job.gates / "shard.new").rename(job.gates / "shard")
        job.await_held("shard")
        page.until("it is named", lambda: f"{second}: " in page.text("#troubles") and "wait" in page.text("#troubles"))
        (row,) = page.all(f"#members tr[data-worker='{second}']")
        assert "in pass 0 of step" in row
        page.screenshot("hang")
        page.click("#members-card .head button.push")
        page.until("who waits", lambda: f"the first to look at is rank 1 ({second})" in page.text("#panel"))
        last = last_note(job, second)
        assert last.awaited and last.said.removeprefix("computes ") in row and last.said in page.text("#panel")
        job.until("its rank", lambda: 'elastic_job_awaited_rank{elastic_job="trainer",rank="1"} 1.0' in metrics(job))
        assert metrics(job).count("elastic_job_awaited_rank{") == 1
        traced = [event for event in trace(job) if event["ph"] == "B"]
        (shown,) = [event for event in traced if event["cat"] == "awaited"]
        assert shown["name"] == f"rank 1 ({second}) {last.said}" and shown["args"]["operation"] == last.operation
        assert [event["args"].get("waits_for") for event in traced].count([f"rank 1 ({second})"]) == 2
        (job.gates / "shard").unlink()
        job.open("end")
        assert job.wait() == 0


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1440])
def test_a_large_job_fits_the_window_and_is_drawn_in_bounded_pieces(tmp_path: Path, width: int, dark: bool) -> None:
    words = [sys.executable, "-m", "tests.browser.programs.large_job", str(tmp_path / "large")]
    with (
        Command(words, tmp_path / "page.out", environment={"PYTHONPATH": str(ROOT)}) as command,
        Chromium(width, dark=dark) as page,
    ):
        page.open(page.until("its address", lambda: address_in(command.output)))
        page.until("all steps", lambda: "9999" in page.text("#tiles"))
        page.until("the charts", lambda: page.run("return document.querySelectorAll('canvas').length") >= 2)
        assert page.overflow() <= 0
        assert len(page.all("#members tr")) == 200 and len(page.all("#moments li")) == 300
        page.click("#all-members")
        page.count("#members tr", 1000)
        before = page.all("#members tr:last-child td")
        page.until("they move on", lambda: page.all("#members tr:last-child td") != before)
        page.run(NOTE_FRAMES)
        frames = page.until("frames", lambda: f if len(f := page.run("return window.frameTimes")) >= 120 else None)
        print(f"{width} px: the longest of 120 frames took {max(frames):.0f} ms")
        page.run("scrollTo(0, 0)")
        page.screenshot(f"large-{width}-{'dark' if dark else 'light'}")
        assert page.console() == []


def test_everything_is_reached_by_the_keyboard_and_the_focus_comes_back(tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    with Job(tmp_path, "--workers", "2", "--dashboard", str(TRAINER)) as job, Chromium() as page:
        job.shut("end")
        page.open(job.until("its address", lambda: address_in(job.output)))
        first, _ = job.await_world(2)
        page.count("#members tr[data-worker]", 2)
        reached: list[str] = []
        while f"Kill {first}" not in reached:
            assert len(reached) < 60, reached
            page.keys(Keys.TAB)
            reached.append(page.focused())
        assert reached[0] == "Skip to the content" and "Stop…" in reached and first in reached
        page.keys(Keys.ENTER)
        page.until("the question", lambda: page.run("return document.querySelector('#ask').open"))
        assert page.focused() == "Kill"
        page.keys(Keys.ESCAPE)
        page.until("it is closed", lambda: not page.run("return document.querySelector('#ask').open"))
        assert page.focused() == f"Kill {first}"
        steps = len(job.steps())
        job.await_steps(steps + 5)
        page.until("the page has moved on", lambda: step_of(page) > steps)
        assert page.focused() == f"Kill {first}", "what is drawn anew must not take the focus"
        assert set(job.members()) == {first, job.members()[1]} and not job.events("member_lost")
        job.open("end")
        assert job.wait() == 0
        assert json.loads((job.dir / "result.json").read_bytes())["exit_code"] == 0


def test_a_scalar_may_have_any_name_also_one_that_javascript_uses(tmp_path: Path) -> None:
    write_job(tmp_path / "odd % & \"name'")
    words = [sys.executable, "-m", "elastic.cli", "dashboard", "--listen", "[::1]:0", "--job-dir"]
    words.append(str(tmp_path / "odd % & \"name'"))
    with Command(words, tmp_path / "page.out", environment={"PYTHONPATH": str(ROOT)}) as command, Chromium() as page:
        page.open(page.until("its address", lambda: address_in(command.output)))
        page.until("all steps", lambda: page.all("#tiles dd")[:1] == ["4"])
        names = ["constructor", "__proto__", "toString", HOSTILE]
        for step in range(5, 8):
            line = {"step": step, "scalars": dict.fromkeys(names, 1.0), "samples": [[step]]}
            with (tmp_path / "odd % & \"name'" / "steps.jsonl").open("a") as ledger:
                ledger.write(json.dumps(line) + "\n")
        page.until("the new steps", lambda: page.all("#tiles dd")[:1] == ["7"])
        page.until("their names", lambda: set(page.all("#scalar option")) == {"loss", *names})
        assert page.console() == []


def test_a_page_that_has_had_events_reads_the_document_anew_when_told_so_and_says_that_the_dashboard_has_ended(
    tmp_path: Path,
) -> None:
    """More steps in one look than are news are told by the document alone. Neither word has a number of its own."""
    write_job(tmp_path / "job")
    words = [sys.executable, "-m", "elastic.cli", "dashboard", "--listen", "0", "--job-dir", str(tmp_path / "job")]

    def append(steps: range) -> None:
        lines = (json.dumps({"step": step, "scalars": {"loss": 1.0}, "samples": [[step]]}) + "\n" for step in steps)
        with (tmp_path / "job" / "steps.jsonl").open("a", buffering=1 << 24) as ledger:
            ledger.writelines(lines)

    with Command(words, tmp_path / "page.out", environment={"PYTHONPATH": str(ROOT)}) as command, Chromium() as page:
        page.open(page.until("its address", lambda: address_in(command.output)))
        page.until("all steps", lambda: page.all("#tiles dd")[:1] == ["4"])
        append(range(5, 6))
        page.until("an event", lambda: page.all("#tiles dd")[:1] == ["5"])
        append(range(6, 4 * LIVE_STEPS))
        page.until("the document anew", lambda: page.all("#tiles dd")[:1] == [str(4 * LIVE_STEPS - 1)])
        append(range(4 * LIVE_STEPS, 4 * LIVE_STEPS + 1))
        page.until("an event behind it", lambda: page.all("#tiles dd")[:1] == [str(4 * LIVE_STEPS)])
        command.process.terminate()
        page.until("the end", lambda: page.text("#connection") == "the dashboard has ended")
