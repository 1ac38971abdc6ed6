"""Spans of a job, and the two forms in which they leave."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from elastic import cli
from elastic.errors import ConfigError, ElasticError, ExitCode
from elastic.observability.timeline import chrome_trace, otlp, spans
from elastic.observability.timeline.spans import Instant, Span
from elastic.records.flight_recorder import Flight, FlightEvent, FlightNote

MS = 1_000_000
WALL_S = 1_000.0


def line(at_ms: int, event: str, worker: str = "", generation: int = 0, **fields: object) -> dict[str, Any]:
    common = {"t_mono_ns": at_ms * MS, "t_wall": WALL_S + at_ms / 1e3, "generation": generation, "worker_id": worker}
    return {**common, "who": "test", "node": "a", "event": event, **fields}


JOB = [
    *[line(0, "entered", worker, 1, members=["a.0.0", "a.1.0"]) for worker in ("a.0.0", "a.1.0")],
    line(50, "checkpoint_part_written", "a.0.0", 1, seconds=0.02, bytes=7, stall_ms=1.5),
    line(100, "fault_injected", "a.1.0", fault="SIGKILL"),
    line(102, "worker_exited", "a.1.0"),
    line(103, "member_lost", "a.1.0", because="SIGKILL"),
    line(104, "quiesce_started", generation=1, because="a.1.0 lost"),
    line(106, "quiesce_complete"),
    line(109, "committed", generation=2, kind="loss", members=["a.0.0"]),
    line(110, "published", generation=2, kind="loss"),
    line(112, "entered", "a.0.0", 2, members=["a.0.0"]),
    line(114, "ring_up", "a.0.0", 2),
    line(115, "redo_started", "a.0.0", 2),
    line(130, "op_complete", "a.0.0", 2),
    line(140, "invited", "a.1.1"),
    line(180, "state_copied", "a.1.1", 0, op=9),
    line(200, "entered", "a.0.0", 3, members=["a.0.0", "a.1.1"]),
    line(300, "job_ended", exit_code=0),
]


def of_kind(kind: str, found: list[Span | Instant]) -> list[Any]:
    return [it for it in found if it.kind == kind]


def ms(at_ns: int) -> int:
    return round((at_ns - WALL_S * 1e9) / MS)


def test_generations_follow_each_other() -> None:
    found = of_kind("generation", spans.of_job(JOB, []))
    assert [(it.name, ms(it.start_ns), ms(it.end_ns)) for it in found] == [
        ("generation 1, 2 workers", 0, 112),
        ("generation 2, 1 workers", 112, 200),
        ("generation 3, 2 workers", 200, 300),
    ]


def test_a_job_that_goes_on_has_a_last_generation() -> None:
    (*_, last) = of_kind("generation", spans.of_job(JOB[:-1], []))
    assert (last.name, ms(last.end_ns)) == ("generation 3, 2 workers", 200)
    assert spans.of_job([], []) == []


def test_a_recovery_is_where_it_was_with_its_phases_in_it() -> None:
    found = spans.of_job(JOB, [])
    (recovery,) = of_kind("recovery", found)
    assert (recovery.name, ms(recovery.start_ns), ms(recovery.end_ns)) == ("recovery of a.1.0", 100, 130)
    phases = [it for it in found if isinstance(it, Span) and it.track == "phases"]
    assert [(it.name, ms(it.start_ns), ms(it.end_ns)) for it in phases] == [
        ("detect", 100, 104),
        ("abort", 104, 106),
        ("decide", 106, 110),
        ("build", 110, 114),
        ("redo", 114, 130),
    ]


def test_copies_and_checkpoints_lie_on_their_workers_track() -> None:
    found = spans.of_job(JOB, [])
    ((copy,), (written,)) = of_kind("copy", found), of_kind("checkpoint", found)
    assert (copy.node, copy.track, ms(copy.start_ns), ms(copy.end_ns)) == ("a", "a.1.1", 140, 180)
    assert (written.track, ms(written.start_ns), ms(written.end_ns), written.about["bytes"]) == ("a.0.0", 30, 50, 7)
    (fault,) = of_kind("fault_injected", found)
    assert (fault.name, ms(fault.at_ns)) == ("a.1.0 is hit by SIGKILL", 100)


def note(number: int, at_ms: int, event: FlightEvent, text: str = "") -> FlightNote:
    return FlightNote(number, at_ms * MS, 1, 4, -1, event, text)


FLIGHT = Flight(
    "a.0.0",
    7,
    int(WALL_S * 1e9),
    (
        note(1, 10, FlightEvent.BEGUN, "pass 0 of step 3"),
        note(2, 11, FlightEvent.COMPUTES, "shard 1 in pass 0 of step 3"),
        note(3, 20, FlightEvent.COMPUTED),
        note(4, 21, FlightEvent.WAITS, "pass 0 of step 3"),
        note(5, 25, FlightEvent.BROKEN, "a.1.0 has gone"),
        note(6, 26, FlightEvent.GATHERED),
        note(7, 29, FlightEvent.REDUCED),
        note(8, 30, FlightEvent.DONE, "pass 0 of step 3"),
    ),
)


def test_a_flight_is_told_from_note_to_note() -> None:
    told = [
        (it.kind, it.name, ms(it.start_ns), ms(it.end_ns)) if isinstance(it, Span) else (it.kind, it.name, ms(it.at_ns))
        for it in spans.of_flight(FLIGHT)
    ]
    assert told == [
        ("computes", "computes shard 1 in pass 0 of step 3", 11, 20),
        ("waits", "waits for the others in pass 0 of step 3", 21, 25),
        ("broken", "a.1.0 has gone", 25),
        ("exchange", "exchanges the sums", 26, 29),
        ("last", "last note: runs the script between two operations", 30),
    ]


WAITING = Flight("b.0.0", 8, int(WALL_S * 1e9), (note(1, 24, FlightEvent.WAITS, "pass 0 of step 3"),))
HUNG = Flight("b.1.0", 9, int(WALL_S * 1e9), (note(1, 12, FlightEvent.COMPUTES, "shard 2 in pass 0 of step 3"),))
RUNNING = [
    line(0, "entered", one, 1, members=["b.0.0", "b.1.0"], rank=rank) for rank, one in enumerate(("b.0.0", "b.1.0"))
]


def at(ms_: int) -> int:
    return int(WALL_S * 1e9) + ms_ * MS


def test_what_lasts_when_it_is_looked_at_is_open_and_says_who_is_waited_for() -> None:
    found = spans.of_job(RUNNING, [WAITING, HUNG], {"b.0.0", "b.1.0"}, at(500))
    told = {(it.track, it.kind): it for it in found if isinstance(it, Span)}
    assert all(it.open and ms(it.end_ns) == 500 for it in told.values())
    assert told.keys() == {("job", "generation"), ("awaited", "awaited"), ("b.0.0", "waits"), ("b.1.0", "computes")}
    awaited = told["awaited", "awaited"]
    assert (awaited.name, ms(awaited.start_ns)) == ("rank 1 (b.1.0) computes shard 2 in pass 0 of step 3", 12)
    place = {"generation": 1, "operation": 4}
    assert told["b.1.0", "computes"].about == {**place, "rank": 1, "awaited": True}
    assert told["b.0.0", "waits"].about == {**place, "rank": 0, "waits_for": ["rank 1 (b.1.0)"]}
    events = chrome_trace.document(found, "gpt")["traceEvents"]
    assert {it["ph"] for it in events} == {"M", "B"} and not any("dur" in it for it in events)


def test_what_a_worker_did_when_it_ended_lasts_until_then_and_nobody_waits_for_it() -> None:
    ended = [*RUNNING, line(90, "worker_exited", "b.1.0")]
    found = spans.of_job(ended, [WAITING, HUNG], {"b.0.0"}, at(500))
    (hung,) = of_kind("computes", found)
    assert (ms(hung.start_ns), ms(hung.end_ns), hung.open) == (12, 90, False)
    assert of_kind("awaited", found) == []
    (waits,) = of_kind("waits", found)
    assert waits.open and "waits_for" not in waits.about
    assert {it.kind for it in spans.of_job(RUNNING, [WAITING, HUNG])} == {"generation", "last"}, (
        "nobody knows for how long"
    )


def test_a_copy_that_lasts_is_open() -> None:
    (copy,) = of_kind("copy", spans.of_job(JOB[:15], [], {"a.1.1"}, at(170)))
    assert (copy.open, ms(copy.start_ns), ms(copy.end_ns)) == (True, 140, 170)


def test_the_document_names_every_track_and_ends_no_span_before_it_begins() -> None:
    document = json.loads(json.dumps(chrome_trace.document(spans.of_job(JOB, [FLIGHT]), "gpt")))
    events = document["traceEvents"]
    named = {(it["pid"], it["tid"]): it["args"]["name"] for it in events if it["name"] == "thread_name"}
    processes = {it["pid"]: it["args"]["name"] for it in events if it["name"] == "process_name"}
    assert processes == {0: "job gpt", 1: "node a"}
    assert set(named.values()) == {"job", "recoveries", "phases", "a.0.0", "a.1.0", "a.1.1"}
    shown = [it for it in events if it["ph"] != "M"]
    assert {(it["pid"], it["tid"]) for it in shown} == set(named)
    assert all(it["dur"] >= 0 for it in shown if it["ph"] == "X")
    assert [it["ts"] for it in shown] == sorted(it["ts"] for it in shown)


# OTLP


class Collector:
    def __init__(self, status: int) -> None:
        outer = self
        self.requests: list[ExportTraceServiceRequest] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(status if self.path == "/v1/traces" else 404)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing is shown."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector(200)
    yield made
    made.close()


def test_a_collector_has_one_trace_with_the_times_of_the_job(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "BATCH", 5)
    found = spans.of_job(JOB, [FLIGHT])
    sent = otlp.export(found, "gpt", collector.url + "/")
    resources = [of for request in collector.requests for of in request.resource_spans]
    received = [span for of in resources for scope in of.scope_spans for span in scope.spans]
    assert len(received) == sent == 1 + sum(isinstance(it, Span) for it in found)
    assert len(collector.requests) == -(-sent // 5)
    assert len({span.trace_id for span in received}) == 1
    (whole,) = [span for span in received if not span.parent_span_id]
    assert (whole.name, ms(whole.start_time_unix_nano), ms(whole.end_time_unix_nano)) == ("job gpt", 0, 300)
    assert {event.name for event in whole.events} >= {"a.1.0 is hit by SIGKILL"}
    (recovery,) = [span for span in received if span.name.startswith("recovery")]
    assert recovery.parent_span_id == whole.span_id
    assert ms(recovery.end_time_unix_nano) - ms(recovery.start_time_unix_nano) == 30
    named = {it.key: it.value.string_value for it in resources[0].resource.attributes}
    assert (named["service.name"], named["elastic.job"]) == ("elastic", "gpt")


def test_a_collector_has_an_open_span_until_now_and_hears_that_it_is_open(collector: Collector) -> None:
    otlp.export(spans.of_job(RUNNING, [WAITING, HUNG], {"b.0.0", "b.1.0"}, at(500)), "gpt", collector.url)
    resources = [of for request in collector.requests for of in request.resource_spans]
    received = [span for of in resources for scope in of.scope_spans for span in scope.spans]
    (hung,) = [span for span in received if span.name == "computes shard 2 in pass 0 of step 3"]
    about = {it.key: it.value for it in hung.attributes}
    assert (ms(hung.end_time_unix_nano), about["open"].bool_value, about["rank"].string_value) == (500, True, "1")


def test_a_collector_that_refuses_is_an_error() -> None:
    made = Collector(400)
    try:
        with pytest.raises(ElasticError, match=f"the collector at {made.url} has not taken the spans"):
            otlp.export(spans.of_job(JOB, []), "gpt", made.url)
    finally:
        made.close()


def test_a_url_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="such as http:"):
        otlp.export([], "gpt", "127.0.0.1:4318")


# The verb


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--job-dir", "nowhere"], "nowhere holds no job"),
        (["--job-dir", ".", "--otlp", "http://127.0.0.1:1", "--output", "x"], "give one of them"),
    ],
)
def test_bad_input(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.json").write_text("{}")
    assert cli.main(["trace", *words]) == ExitCode.BAD_INPUT
    assert said in capsys.readouterr().err


def test_a_job_without_a_line_yet_is_an_empty_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.json").write_text('{"name": "gpt"}')
    assert cli.main(["trace", "--job-dir", str(tmp_path)]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["otherData"] == {"job": "gpt"}


def test_directories_of_several_machines_are_told_by_the_wall_clock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["trace"]
    for node, since_boot_ms in (("a", 0), ("b", -3_000_000_000)):
        path = tmp_path / node / "journal" / "one.jsonl"
        path.parent.mkdir(parents=True)
        (tmp_path / node / "job.json").write_text('{"name": "gpt"}')
        own = [one for one in JOB if (one["event"] in ("fault_injected", "worker_exited")) == (node == "b")]
        told = [{**one, "t_mono_ns": one["t_mono_ns"] + since_boot_ms * MS} for one in own]
        path.write_text("".join(json.dumps(one) + "\n" for one in told))
        words += ["--job-dir", str(tmp_path / node)]
    assert cli.main(words) == ExitCode.DONE
    found = json.loads(capsys.readouterr().out)["traceEvents"]
    assert [round(it["dur"] / 1e3) for it in found if it["name"] == "detect" and it["ph"] == "X"] == [4]
