"""A fetching process: what it says when something in it goes wrong."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from runtime.data.fetch_process import Fetcher, FetcherEnded


class Unpicklable(Exception):
    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{number}: {text}")


@contextmanager
def fetcher(fetch: Callable[[int, int, int], Any]) -> Iterator[Fetcher]:
    made = Fetcher(fetch, [])
    try:
        yield made
    finally:
        made.end()


def test_answers_come_in_the_order_of_the_questions() -> None:
    with fetcher(lambda *key: key) as process:
        for step in range(5):
            process.ask((0, step, 1), step)
        assert [(label, outcome.get()) for label, outcome in (process.take() for _ in range(5))] == [
            (step, (0, step, 1)) for step in range(5)
        ]


def test_what_cannot_be_sent_is_an_error_of_that_batch_and_the_process_goes_on() -> None:
    with fetcher(lambda _, step, __: (lambda: 0) if step == 0 else step) as process:
        process.ask((0, 0, 0), "bad")
        process.ask((0, 1, 0), "good")
        with pytest.raises(Exception, match="pickle"):
            process.take()[1].get()
        assert process.take()[1].get() == 1


def test_an_error_that_cannot_be_sent_is_told_in_words() -> None:
    def fetch(*_: int) -> None:
        raise Unpicklable(7, "broken")

    with fetcher(fetch) as process:
        process.ask((0, 0, 0), None)
        with pytest.raises(RuntimeError, match="Unpicklable: 7: broken"):
            process.take()[1].get()


def test_a_broken_connection_of_the_dataset_is_an_error_of_that_batch() -> None:
    def fetch(_: int, step: int, __: int) -> int:
        if step == 0:
            raise ConnectionResetError("the object store hung up")
        return step

    with fetcher(fetch) as process:
        process.ask((0, 0, 0), "bad")
        process.ask((0, 1, 0), "good")
        with pytest.raises(ConnectionResetError, match="hung up"):
            process.take()[1].get()
        assert process.take()[1].get() == 1


def test_an_error_says_where_in_the_dataset_it_was_raised() -> None:
    def damaged_sample(*_: int) -> None:
        raise ArithmeticError("sample 3")

    with fetcher(damaged_sample) as process:
        process.ask((0, 0, 0), None)
        with pytest.raises(ArithmeticError, match="sample 3") as raised:
            process.take()[1].get()
    assert "in damaged_sample" in raised.value.__notes__[0]


def test_a_process_that_exits_by_itself_is_told_with_its_code() -> None:
    with fetcher(lambda *_: os._exit(3)) as process:
        process.ask((0, 0, 0), None)
        with pytest.raises(FetcherEnded, match="exit code 3"):
            process.take()
        with pytest.raises(FetcherEnded, match="exit code 3"):
            process.ask((0, 0, 0), None)


def test_too_many_open_files_are_said() -> None:
    with fetcher(lambda *key: key) as process:
        process.ask((0, 0, 0), None)
        while not process.ready():
            pass
        before, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        opened = []
        try:
            opened.append(os.open(os.devnull, os.O_RDONLY))
            resource.setrlimit(resource.RLIMIT_NOFILE, (opened[0] + 1, _))
            with pytest.raises(OSError, match="ulimit -n"):
                process.take()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (before, _))
            os.close(opened[0])


def test_threads_of_openmp_work_in_the_process() -> None:
    """They did not survive the fork. Large enough for torch to use them."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        expected = float(torch.ones(3_000_000).sum())
        with fetcher(lambda *_: (torch.get_num_threads(), float(torch.ones(3_000_000).sum()))) as process:
            process.ask((0, 0, 0), None)
            assert process.take()[1].get() == (2, expected)
    finally:
        torch.set_num_threads(before)


HELD = """
import os, signal, sys
from runtime.data.fetch_process import Fetcher
from elastic.agent.worker import held_signals

if sys.argv[1] == "holds":
    signal.signal(signal.SIGTERM, lambda *_: print("the handler of the script"))
    held_signals.hold()
ended = 0
for _ in range(5):
    fetcher = Fetcher(lambda *key: key, [])
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        os.kill(fetcher._process.pid, number)
    try:
        fetcher.ask((0, 1, 2), "label")
        assert fetcher.take()[1].get() == (0, 1, 2)
    except Exception:
        ended += 1
    fetcher.end()
print(ended)
"""


@pytest.mark.parametrize(("parent", "ended"), [("holds", "0"), ("does not hold", "5")])
def test_signals_to_stop_end_it_unless_its_parent_holds_them_back(parent: str, ended: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", HELD, parent]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == (f"{ended}\n", 0), done.stderr
