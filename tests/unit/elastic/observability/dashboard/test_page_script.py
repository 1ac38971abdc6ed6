"""What the page does with answers and events, in node: without a browser, and without what is drawn."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from elastic.observability.dashboard.saved_page import STATIC

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed here")

HARNESS = r"""
import fs from "fs";
const element = () => new Proxy(function () {}, {
  get: (_, key) => (key === Symbol.toPrimitive ? () => "" : ["children", "options"].includes(key) ? [] : element()),
  set: () => true, apply: () => element(),
});
globalThis.document = { getElementById: (id) => (id === "saved" ? null : element()), createElement: () => element(),
  querySelector: () => element(), visibilityState: "hidden" };
globalThis.location = { href: "http://x/", search: "" };
globalThis.server = { boot: "b", number: 10, generations: [1], values: {}, refuses: [], answers: null };
globalThis.fetch = async () => {
  const status = server.refuses.shift();
  if (status) return { ok: false, status, json: async () => ({ error: "refused" }) };
  const snapshot = JSON.parse(JSON.stringify({ ...server, moments: [], recoveries: [], checkpoints: [], faults: [],
    steps: { at: [], values: server.values }, rate: { at: [], values: {} }, jobs: [], nodes: [] }));
  if (server.answers) await server.answers;
  return { ok: true, json: async () => snapshot };
};
globalThis.streams = [];
globalThis.EventSource = class {
  static CLOSED = 2;
  constructor(url) { this.url = url; this.kinds = {}; this.readyState = 1; streams.push(this); }
  addEventListener(kind, take) { this.kinds[kind] = take; }
  close() { this.readyState = 2; }
  breaks() { this.readyState = 2; this.onerror(); }
  send(kind, data) {
    const lastEventId = `${server.boot}-${server.number}`;
    if (this.readyState === 1) this.kinds[kind]({ lastEventId, data: JSON.stringify(data) });
  }
};
globalThis.happens = (kind, data) => {
  server.number += 1;
  if (kind === "generation") server.generations.push(data);
  streams.at(-1).send(kind, data);
};
globalThis.until = async (holds) => {
  for (const end = Date.now() + 20000; !holds(); ) {
    if (Date.now() > end) throw new Error(`never: ${holds}`);
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
};
let source = fs.readFileSync(process.argv[2], "utf8");
source = source.replace(/import .*charts.js";/, "const forget = () => {}, short = String;");
source = source.slice(0, source.indexOf("place({ key: null });")).replace("RETRY_MS = 1000", "RETRY_MS = 10");
(0, eval)(`{ let session = { may_act: false }; ${source}
  globalThis.JobPage = JobPage; globalThis.FleetPage = FleetPage; }`);
JobPage.prototype.build = FleetPage.prototype.build = () => {};
JobPage.prototype.draw = () => {};
FleetPage.prototype.draw = function (seen) { this.seen = seen; };
globalThis.say = (value) => console.log(JSON.stringify(value));
"""


def told(tmp_path: Path, program: str) -> Any:
    """What the program says; `streams`, `server` and the rest are of the harness."""
    assert NODE is not None
    script = tmp_path / "program.mjs"
    script.write_text(HARNESS + program + "\nprocess.exit(0);")
    page = str(STATIC / "page.js")
    ran = subprocess.run([NODE, str(script), page], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


MANY = "{ at: Array.from({ length: 2001 }, (_, i) => i), scalars: Array(2001).fill({}) }"
"""So many steps that the page reads its document anew."""


def test_what_happens_while_the_document_is_read_anew_is_not_lost(tmp_path: Path) -> None:
    found = told(
        tmp_path,
        f"""
        const page = new JobPage("j", false);
        await page.start();
        let answer;
        server.answers = new Promise((resolve) => {{ answer = resolve; }});
        happens("steps", {MANY});
        happens("generation", 2);
        server.answers = null;
        answer();
        await until(() => streams.length === 2);
        const after = streams[1].url;
        streams[1].kinds.generation({{ lastEventId: "b-12", data: "2" }});
        happens("generation", 3);
        say({{ after, closed: streams[0].readyState, server: server.generations, page: page.document.generations }});
        """,
    )
    assert found["after"].endswith("after=b-11") and found["closed"] == 2
    assert found["page"] == found["server"] == [1, 2, 3]


def test_a_document_that_has_all_that_was_heard_is_taken_without_another_stream(tmp_path: Path) -> None:
    found = told(
        tmp_path,
        f"""
        const page = new JobPage("j", false);
        await page.start();
        const before = page.document;
        happens("steps", {MANY});
        await until(() => page.document !== before);
        happens("generation", 2);
        say({{ streams: streams.length, page: page.document.generations }});
        """,
    )
    assert found == {"streams": 1, "page": [1, 2]}


@pytest.mark.parametrize("word", ["reset", "end"])
def test_a_word_without_a_number_is_obeyed_behind_an_event_that_has_one(tmp_path: Path, word: str) -> None:
    """A browser gives an event without an id that of the event before it."""
    found = told(
        tmp_path,
        f"""
        const page = new JobPage("j", false);
        await page.start();
        happens("generation", 2);
        server.number += 1;
        server.generations.push(3);
        streams[0].kinds.{word}({{ lastEventId: "b-11", data: "{{}}" }});
        if ("{word}" === "reset") await until(() => streams.length === 2);
        say({{ closed: streams[0].readyState, over: page.over, page: page.document.generations }});
        """,
    )
    assert found == {"closed": 2, "over": word == "end", "page": [1, 2] if word == "end" else [1, 2, 3]}


def test_a_page_of_a_job_goes_on_after_an_error_that_may_pass(tmp_path: Path) -> None:
    found = told(
        tmp_path,
        """
        const page = new JobPage("j", false);
        await page.start();
        server.refuses = [503, 500, 409];
        streams[0].breaks();
        await until(() => streams.length === 2);
        happens("generation", 2);
        server.refuses = [404];
        streams[1].breaks();
        await until(() => server.refuses.length === 0);
        await new Promise((resolve) => setTimeout(resolve, 200));
        say({ streams: streams.length, page: page.document.generations });
        """,
    )
    assert found == {"streams": 2, "page": [1, 2]}, "a job that is gone is not asked for again"


def test_a_page_of_a_fleet_whose_stream_was_refused_opens_another_one(tmp_path: Path) -> None:
    found = told(
        tmp_path,
        """
        const page = new FleetPage();
        await page.start();
        server.refuses = [503];
        streams[0].breaks();
        await until(() => streams.length === 2);
        happens("fleet", { jobs: ["j-1"] });
        say({ live: page.live, jobs: page.seen.jobs });
        """,
    )
    assert found == {"live": True, "jobs": ["j-1"]}


def test_a_run_without_the_chosen_scalar_shows_another_one(tmp_path: Path) -> None:
    found = told(
        tmp_path,
        """
        server.values = { accuracy: { mean: [] } };
        const page = new JobPage("j", false);
        await page.start();
        const shown = [page.scalar];
        server.values = {};
        await page.read();
        happens("steps", { at: [0], scalars: [{ perplexity: 1 }] });
        shown.push(page.scalar);
        happens("steps", { at: [1], scalars: [{ loss: 1 }] });
        shown.push(page.scalar);
        say(shown);
        """,
    )
    assert found == ["accuracy", "perplexity", "perplexity"]
