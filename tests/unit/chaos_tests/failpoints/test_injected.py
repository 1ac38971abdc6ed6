"""Faults at a place within a worker: an order is carried out once, by whom and where it says."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from chaos_tests.failpoints import injected
from chaos_tests.failpoints.orders import FailpointOrders
from chaos_tests.scenario import failpoints
from chaos_tests.scenario.catalogue import CATALOGUE
from chaos_tests.scenario.failpoints import Act, FailpointOrder
from chaos_tests.scenario.faults import When
from chaos_tests.scenario.schedule import PRESETS, plan

ME = "local.1.0"


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FailpointOrders:
    monkeypatch.setenv("ELASTIC_WORKER_ID", ME)
    return FailpointOrders(tmp_path / "failpoints")


def look(orders: FailpointOrders, point: str, step: int = 7) -> bool:
    """Whether this process was struck there."""
    injected._Place.step = step
    try:
        injected._look_in(orders.environment("")[failpoints.FAILPOINTS_VARIABLE])(point)
    except injected.FailpointError:
        return True
    return False


def test_an_order_is_carried_out_once_at_its_point(orders: FailpointOrders) -> None:
    orders.give(FailpointOrder(3, failpoints.IN_SHARD, Act.RAISE), ME)
    assert not look(orders, failpoints.BETWEEN) and orders.carried_out() == []
    assert look(orders, failpoints.IN_SHARD) and not look(orders, failpoints.IN_SHARD)
    (done,) = orders.carried_out()
    assert (done["number"], done["worker_id"], done["pid"]) == (3, ME, os.getpid())
    assert not orders.withdraw(FailpointOrder(3, failpoints.IN_SHARD, Act.RAISE), ME), "it is too late"


def test_an_order_for_another_worker_or_step_is_left(orders: FailpointOrders) -> None:
    other, later = (
        FailpointOrder(1, failpoints.IN_SHARD, Act.RAISE),
        FailpointOrder(2, failpoints.IN_SHARD, Act.RAISE, step=9),
    )
    orders.give(other, "local.1.01")
    orders.give(later)
    assert not look(orders, failpoints.IN_SHARD)
    assert orders.withdraw(other, "local.1.01")
    assert look(orders, failpoints.IN_SHARD, step=9)


def test_what_is_no_order_disturbs_nobody(orders: FailpointOrders, tmp_path: Path) -> None:
    for name, content in (("a", b""), ("b", b"[]"), ("c", b'{"act": "dance"}'), ("d", b"\xff")):
        (tmp_path / "failpoints" / "pending" / f"{ME}-{name}").write_bytes(content)
    assert not look(orders, failpoints.IN_SHARD)


HANGS = """
import faulthandler, signal, sys
from chaos_tests.failpoints import injected
from chaos_tests.scenario.failpoints import Act, FailpointOrder
faulthandler.register(signal.SIGUSR1, file=sys.stderr)
print("begins", flush=True)
injected._act(FailpointOrder(1, "", Act.HANG_GIL))
print("goes on", flush=True)
"""


def test_a_hang_with_pythons_lock_outlasts_the_question_for_stacks() -> None:
    words = [sys.executable, "-c", HANGS]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as hung:
        assert hung.stdout is not None and hung.stderr is not None
        try:
            assert hung.stdout.readline() == "begins\n"
            while "_wait_with_the_lock" not in stacks(hung):
                pass  # it was asked before it was there
            stacks(hung)
            assert not select.select([hung.stdout], [], [], 0.5)[0]
        finally:
            hung.kill()


def stacks(of: subprocess.Popen[str]) -> str:
    """Of its one thread; the last line is that of the module."""
    assert of.stderr is not None
    of.send_signal(signal.SIGUSR1)
    told = line = of.stderr.readline()
    while line and "<module>" not in line:
        line = of.stderr.readline()
        told += line
    assert line, "it has ended"
    return told


class Disk:
    """As the product's storage, as far as it is patched."""

    synced = 0

    def __init__(self, home: Path) -> None:
        self._home = home

    def _sync(self, descriptor: int) -> None:
        self.synced += 1

    def sync(self, name: str) -> None:
        path = self._home / name
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            self._sync(file.fileno())


@pytest.fixture
def disk(orders: FailpointOrders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(injected._Disk, "until_s", 0.0)
    monkeypatch.setattr(injected, "SLOW_S", 0.2)

    class Made(Disk):
        """Patched for this test alone."""

    injected._in_storage(
        SimpleNamespace(LocalStorage=Made), injected._look_in(orders.environment("")[failpoints.FAILPOINTS_VARIABLE])
    )
    return Made(tmp_path)


def test_a_disk_that_fails_answers_with_errors_for_a_while(orders: FailpointOrders, disk: Disk) -> None:
    disk.sync("_periodic/part-0")
    orders.give(FailpointOrder(4, failpoints.IN_WRITE, Act.DISK_FAILS, for_s=600.0), ME)
    for _ in range(3):
        with pytest.raises(OSError, match="by the chaos harness") as failed:
            disk.sync("_periodic/part-0")
        assert failed.value.errno == errno.EIO
    assert disk.synced == 1
    disk.sync("best/part-0")
    assert disk.synced == 2, "the script has asked for it, and would be told"
    injected._Disk.until_s = 0.0
    disk.sync("_periodic/part-0")
    assert disk.synced == 3
    assert len(orders.carried_out()) == 1


def test_a_slow_disk_takes_its_time_and_does_what_it_is_asked(orders: FailpointOrders, disk: Disk) -> None:
    orders.give(FailpointOrder(4, failpoints.IN_WRITE, Act.DISK_SLOW, for_s=600.0), ME)
    begun_s = time.monotonic()
    disk.sync("_periodic/part-0")
    disk.sync("_periodic/part-1")
    assert time.monotonic() - begun_s >= 0.4 and disk.synced == 2


def test_a_process_of_the_job_has_the_points_and_its_own_sitecustomize(orders: FailpointOrders, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['HIDDEN'] = 'found'")
    program = """
import json, os, sys
from elastic.checkpoints import storage
from runtime.recovery.checkpoint import saver
from runtime.allreduce.reduction import slice_sums
from runtime.allreduce.ring import ring_set
from runtime.recovery.transfer import connection
from runtime.worker import donor, exchange, operations, progress_report
patched = [operations.OperationLoop.next_unit, operations.OperationLoop.unit_done,
    exchange.RingExchange.exchange, progress_report.ProgressReporter.gathered,
    slice_sums.SliceSums._sum, ring_set.Rings._mesh, donor.send_parts, connection.CopyConnection._receive_blob,
    saver.put, saver.Saver._publish, storage.LocalStorage._sync]
print(json.dumps([os.environ.get("HIDDEN"), [one.__module__ for one in patched]]))
"""
    environment = {**os.environ, **orders.environment(str(tmp_path))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    hidden, modules = json.loads(done.stdout)
    assert hidden == "found"
    assert modules == ["chaos_tests.failpoints.injected"] * 11


@pytest.mark.parametrize("kind", [kind for kind, fault in CATALOGUE.items() if "act" in fault.given])
def test_a_failpoint_of_a_fault_is_one_that_there_is(kind: str) -> None:
    places = CATALOGUE[kind].places
    known = {value for name, value in vars(failpoints).items() if name.isupper() and isinstance(value, str)}
    assert places and set(places) <= known


def test_the_first_and_the_last_step_come_once() -> None:
    for seed in range(5):
        planned = plan(PRESETS["places"], seed, 600.0)
        for when in When:
            times = [one for one in planned if one.fault.step is when]
            assert len(times) == 1
