"""Faults at a place within a worker: an order is carried out once, by whom and where it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chaos_tests.harness.ambush import inside, points
from chaos_tests.harness.ambush.orders import Orders
from chaos_tests.harness.ambush.points import Act, Order
from chaos_tests.harness.catalogue import CATALOGUE
from chaos_tests.harness.faults import Ambush, When
from chaos_tests.harness.schedule import PRESETS, plan

ME = "local.1.0"


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Orders:
    monkeypatch.setenv("ELASTIC_WORKER_ID", ME)
    return Orders(tmp_path / "ambush")


def look(orders: Orders, point: str, step: int = 7) -> bool:
    """Whether this process was struck there."""
    inside._Place.step = step
    try:
        inside._look_in(orders.environment("")[points.VARIABLE])(point)
    except inside.Ambushed:
        return True
    return False


def test_an_order_is_carried_out_once_at_its_point(orders: Orders) -> None:
    orders.give(Order(3, points.IN_SHARD, Act.RAISE), ME)
    assert not look(orders, points.BETWEEN) and orders.carried_out() == []
    assert look(orders, points.IN_SHARD) and not look(orders, points.IN_SHARD)
    (done,) = orders.carried_out()
    assert (done["number"], done["worker_id"], done["pid"]) == (3, ME, os.getpid())
    assert not orders.withdraw(Order(3, points.IN_SHARD, Act.RAISE), ME), "it is too late"


def test_an_order_for_another_worker_or_step_is_left(orders: Orders) -> None:
    other, later = Order(1, points.IN_SHARD, Act.RAISE), Order(2, points.IN_SHARD, Act.RAISE, step=9)
    orders.give(other, "local.1.01")
    orders.give(later)
    assert not look(orders, points.IN_SHARD)
    assert orders.withdraw(other, "local.1.01")
    assert look(orders, points.IN_SHARD, step=9)


def test_what_is_no_order_disturbs_nobody(orders: Orders, tmp_path: Path) -> None:
    for name, content in (("a", b""), ("b", b"[]"), ("c", b'{"act": "dance"}'), ("d", b"\xff")):
        (tmp_path / "ambush" / "pending" / f"{ME}-{name}").write_bytes(content)
    assert not look(orders, points.IN_SHARD)


def test_a_process_of_the_job_has_the_points_and_its_own_sitecustomize(orders: Orders, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['HIDDEN'] = 'found'")
    program = """
import json, os, sys
import runtime.walk, runtime.turn, runtime.gauge, runtime.reduce, runtime.rings, runtime.donor, runtime.copy
import runtime.checkpoint.saver as saver
patched = [runtime.walk.Walk.next_unit, runtime.walk.Walk.unit_done, runtime.turn.Turn.exchange,
    runtime.gauge.Gauge.gathered, runtime.reduce._Reduction._sum, runtime.rings.Rings._mesh, runtime.donor.send_parts,
    runtime.copy.CopyConnection._receive_blob, saver.put, saver.Saver._publish]
print(json.dumps([os.environ.get("HIDDEN"), [one.__module__ for one in patched]]))
"""
    environment = {**os.environ, **orders.environment(str(tmp_path))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    hidden, modules = json.loads(done.stdout)
    assert hidden == "found"
    assert modules == ["chaos_tests.harness.ambush.inside"] * 10


@pytest.mark.parametrize("kind", [kind for kind, it in CATALOGUE.items() if isinstance(it.fault, Ambush)])
def test_an_ambush_is_at_points_that_there_are(kind: str) -> None:
    fault = CATALOGUE[kind].fault
    known = {value for name, value in vars(points).items() if name.isupper() and isinstance(value, str)}
    assert isinstance(fault, Ambush) and fault.places and set(fault.places) <= known


def test_the_first_and_the_last_step_come_once() -> None:
    for seed in range(5):
        planned = plan(PRESETS["places"], seed, 600.0, 3)
        for when in When:
            times = [one for one in planned if getattr(CATALOGUE[one.kind].fault, "step", None) is when]
            assert len(times) == 1
