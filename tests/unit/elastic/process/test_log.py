"""Lines of a daemon's log: each has its time, level and logger, whoever speaks and however much is read of it."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic.process import log
from elastic.process.log_line import FIELDS, LineFormatter, LogFormat, message

PATIENCE_S = 60.0
LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) ([A-Z]+) ([\w.]+): (.*)")


def record(text: str, *args: object, level: int = logging.INFO, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("elastic.part", level, "part.py", 1, text, args, None)
    made.created, made.msecs = 1_700_000_000.25, 250.0
    if fields:
        setattr(made, FIELDS, fields)
    return made


def raising() -> logging.LogRecord:
    made = record("it ends", level=logging.ERROR)
    try:
        raise ValueError("first line\nsecond line")
    except ValueError:
        made.exc_info = sys.exc_info()
    return made


def parsed(line: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", document["ts"])
    assert document["level"] in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL") and document["logger"]
    return document


def test_a_record_is_a_line_with_time_level_logger_and_fields() -> None:
    made = record("attending_fleet", term=3, address="10.0.0.1:7070", because="it says no", jobs=["a", "b"], nothing="")
    assert LineFormatter(LogFormat.TEXT).format(made) == (
        "2023-11-14T22:13:20.250Z INFO elastic.part: attending_fleet term=3 address=10.0.0.1:7070 "
        'because="it says no" jobs=["a", "b"] nothing=""'
    )
    assert json.loads(LineFormatter(LogFormat.JSON).format(made)) == {
        "ts": "2023-11-14T22:13:20.250Z",
        "level": "INFO",
        "logger": "elastic.part",
        "msg": "attending_fleet",
        "term": 3,
        "address": "10.0.0.1:7070",
        "because": "it says no",
        "jobs": ["a", "b"],
        "nothing": "",
    }


def test_a_traceback_is_one_object_or_lines_that_all_begin_alike() -> None:
    (line,) = LineFormatter(LogFormat.JSON).format(raising()).splitlines()
    document = parsed(line)
    assert document["msg"] == "it ends" and document["traceback"].endswith("ValueError: first line\nsecond line")
    lines = LineFormatter(LogFormat.TEXT).format(raising()).splitlines()
    found = [LINE.fullmatch(line) for line in lines]
    assert len(lines) > 4 and all(found)
    assert {match[3] for match in found if match} == {"elastic.part"}
    assert lines[-1].endswith("elastic.part: second line")


@pytest.mark.parametrize("form", LogFormat)
def test_nobody_forges_a_line_or_moves_a_cursor(form: LogFormat) -> None:
    """By a name that a stranger gives, or a reason of his."""
    bad = "x\n2023-11-14T22:13:20.250Z INFO elastic: forged\r\x1b[2J\u2028y\udc80"
    shown = LineFormatter(form).format(record("%s", bad, node=bad))
    lines = shown.splitlines()
    assert all(line.startswith(("2023-11-14T22:13:20.250Z INFO elastic.part: ", '{"ts"')) for line in lines)
    assert "\x1b" not in shown and "\r" not in shown
    shown.encode(errors="backslashreplace")
    assert form is LogFormat.TEXT or len(lines) == 1


def test_a_field_does_not_hide_what_every_line_has() -> None:
    document = json.loads(LineFormatter(LogFormat.JSON).format(record("m", level=logging.WARNING, msg=1, ts=2)))
    assert (document["msg"], document["msg_"], document["ts_"]) == ("m", 1, 2)


@pytest.mark.parametrize("form", LogFormat)
def test_the_message_of_a_line_is_found_again(form: LogFormat) -> None:
    assert message(LineFormatter(form).format(record("the replica ends: %s", "port 1: taken"))) == (
        "the replica ends: port 1: taken"
    )
    for other in ("Traceback (most recent call last):", "{}", '{"ts": 1', "", "{'ts'", '{"ts": ' + "[" * 200_000):
        assert message(other) == other


def test_options_that_are_the_default_are_not_passed_on() -> None:
    assert log.words("text", "info") == {}
    assert log.words("json", "debug") == {"--log-format": "json", "--log-level": "debug"}


BEGIN = """
import asyncio, logging, os, signal, sys, threading, time, warnings
from elastic.process import log
from elastic.process.log_line import LogFormat
log.beginning(LogFormat(sys.argv[1]), sys.argv[2])()
own = logging.getLogger("elastic.part")
"""


def start(program: str, *words: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", BEGIN + program, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        cwd=Path(__file__).resolve().parents[4],
    )


def said(program: str, *words: str) -> tuple[int, list[str]]:
    with start(program, *words) as process:
        _, told = process.communicate(timeout=PATIENCE_S)
    return process.returncode, told.decode().splitlines()


EVERYBODY = """
own.info("begins")
logging.getLogger("grpc._cython.cygrpc").error("of grpc")
warnings.warn("of a library")
thread = threading.Thread(target=lambda: 1 / 0, name="worker")
thread.start()
thread.join()
class Late:
    def __del__(self):
        raise KeyError("late")
Late()
async def forgotten():
    async def fails():
        raise RuntimeError("in a task")
    task = asyncio.create_task(fails())
    await asyncio.sleep(0.01)
    del task
asyncio.run(forgotten())
own.info("%d is not formatted", "x")
raise OSError(28, "No space left")
"""


def test_whoever_speaks_says_it_in_lines_of_the_log() -> None:
    code, lines = said(EVERYBODY, "json", "info")
    assert code == 1
    told = [parsed(line) for line in lines]
    assert [line["logger"] for line in told] == [
        *(
            "elastic.part",
            "grpc._cython.cygrpc",
            "py.warnings",
            "elastic",
            "elastic",
            "asyncio",
            "elastic.part",
            "elastic",
        )
    ]
    texts = [
        "begins",
        "of grpc",
        "of a library",
        "thread worker ends",
        "__del__",
        "never retrieved",
        "cannot be formatted",
    ]
    assert all(text in line["msg"] for text, line in zip(texts, told, strict=False))
    assert "No space left" in told[-1]["msg"] and told[-1]["level"] == "CRITICAL"
    ends = ("ZeroDivisionError: division by zero", "KeyError: 'late'", "RuntimeError: in a task", "No space left")
    traced = [line["traceback"] for line in told if "traceback" in line]
    assert len(traced) == 4 and all(end in text for end, text in zip(ends, traced, strict=True))
    code, lines = said(EVERYBODY, "text", "warning")
    assert code == 1 and all(map(LINE.fullmatch, lines)) and not any("begins" in line for line in lines)


LEVELS = """
def tell():
    own.debug("debug of ours")
    logging.getLogger("botocore.auth").debug("Authorization: AWS4-HMAC-SHA256 ...")
    own.info("info of ours")
for line in sys.stdin:
    tell()
    print("told", flush=True)
"""


def test_signals_change_the_level_and_the_log_says_so() -> None:
    """Libraries stay at INFO: below it some tell what they authenticate by."""
    with start(LEVELS, "json", "warning") as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None

        def ask() -> None:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"told\n"

        ask()
        process.send_signal(log.DEBUG_ON)
        first = parsed(process.stderr.readline().decode())
        ask()
        debug, info = (parsed(process.stderr.readline().decode()) for _ in range(2))
        process.send_signal(log.DEBUG_OFF)
        last = parsed(process.stderr.readline().decode())
        ask()
        process.stdin.close()
        assert process.stderr.read() == b""
        assert process.wait(PATIENCE_S) == 0
    assert first["msg"] == "the log level is debug now: SIGRTMIN+22 was sent"
    assert (debug["msg"], info["msg"]) == ("debug of ours", "info of ours")
    assert last["msg"] == "the log level is warning now: SIGRTMIN+23 was sent" and last["level"] == "WARNING"


MUCH = """
for number in range(3000):
    own.info("%d %s", number, "x" * 100)
own.info("long %s", "y" * 300_000)
print("done", flush=True)
sys.stdin.readline()
own.info("after")
own.info("last")
"""


def test_a_reader_that_does_not_read_holds_up_nobody_and_misses_counted_lines() -> None:
    reading, writing = os.pipe()
    with start(MUCH, "json", "info", stderr=writing) as process, os.fdopen(reading, "rb") as reader:
        os.close(writing)
        assert process.stdout is not None and process.stdin is not None
        assert select.select([process.stdout], [], [], PATIENCE_S)[0], "it waits for who does not read"
        assert process.stdout.readline() == b"done\n"
        os.set_blocking(reading, False)
        read = b""
        while (part := reader.read(65_536)) is not None and select.select([reader], [], [], 0)[0]:
            read += part
        read += part or b""
        os.set_blocking(reading, True)
        process.stdin.write(b"\n")
        process.stdin.flush()
        read += reader.read()
        assert process.wait(PATIENCE_S) == 0
    told = [parsed(line) for line in read.decode().splitlines()]
    *_, gap, after, last = told
    missing = int(re.match(r"(\d+) lines are missing here", gap["msg"])[1])  # type: ignore[index]
    assert (after["msg"], last["msg"], gap["level"]) == ("after", "last", "WARNING")
    assert len(told) - 3 + missing == 3001 and missing > 0


@pytest.mark.parametrize("place", ["/dev/full", "a closed pipe"])
def test_a_log_that_takes_no_line_ends_nobody(place: str) -> None:
    if place == "/dev/full":
        writing = os.open(place, os.O_WRONLY)
    else:
        reading, writing = os.pipe()
        os.close(reading)
    try:
        with start(MUCH, "text", "info", stderr=writing) as process:
            out, _ = process.communicate(b"\n", timeout=PATIENCE_S)
    finally:
        os.close(writing)
    assert (process.returncode, out) == (0, b"done\n")


def test_a_crash_says_where_it_was() -> None:
    code, lines = said("os.kill(os.getpid(), signal.SIGSEGV)", "json", "info")
    assert code == -signal.SIGSEGV
    assert any("Segmentation fault" in line for line in lines) and any('File "<string>"' in line for line in lines)


def test_what_a_library_writes_by_itself_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = said(
        'log.foreign("E1122 03:20:46.801114   27797 other.cc:1] broken")\nlog.foreign("anything")', "json", "info"
    )
    assert code == 0
    told = [parsed(line) for line in lines]
    assert [(line["logger"], line["level"], line["msg"]) for line in told] == [
        ("grpc", "ERROR", "other.cc:1] broken"),
        ("stderr", "WARNING", "anything"),
    ]
