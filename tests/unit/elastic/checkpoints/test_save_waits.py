"""job.save() behind a save that is still being written: it waits, so that memory does not fill with copies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic.checkpoints.naming import EntryName
from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import FileSink, LocalStorage, storage_at
from elastic.errors import CheckpointError
from runtime.recovery.checkpoint import coordinator
from runtime.recovery.checkpoint import saver as saver_module
from runtime.recovery.checkpoint.saver import SaverTask
from tests.unit.jobs import Recorded, Setup, make_job, set_up, train
from tests.unit.worlds import FakeMember, Killed, World


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    settings = Settings(root=str(tmp_path / "checkpoints"), job="train", job_id="feed", every="off")
    for name, value in settings.to_environment().items():
        monkeypatch.setenv(name, value)
    return settings.root


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written before it is set."""
    create, opened = LocalStorage.create, threading.Event()

    @contextmanager
    def slow(self: LocalStorage, path: str) -> Iterator[FileSink]:
        assert opened.wait(30)
        with create(self, path) as sink:
            yield sink

    monkeypatch.setattr(LocalStorage, "create", slow)
    return opened


class Waiting(Recorded):
    """then: called when a save begins to wait."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self.then = then
        self.waited: list[str] = []
        self.noted: list[dict[str, object]] = []

    def takes_time(self, what: str) -> None:
        self.waited.append(what)
        self.then()

    def note(self, event: str, **fields: object) -> None:
        super().note(event, **fields)
        if event == "checkpoint_part_written":
            self.noted.append(fields)


def begun(session: Waiting) -> Setup:
    setup = set_up(make_job(session))
    next(iter(setup.job.epochs(1)))
    return setup


def whole(root: str, name: str) -> bool:
    found, _ = Series(storage_at(root), name).newest("feed")
    return found is not None


def test_a_save_waits_for_the_one_before(root: str, gate: threading.Event) -> None:
    session = Waiting(gate.set)
    setup = begun(session)
    saver = setup.job._training.checkpoints._saver
    setup.job.save("one")
    assert session.waited == [] and not gate.is_set()
    setup.job.save("two")
    assert session.waited == ["in save('two'): the one before is still being written"]
    assert whole(root, "one") and saver.pending <= 2  # the second one, and that older ones of "one" may be removed
    setup.job.close()
    assert whole(root, "two")
    assert [line["series"] for line in session.noted] == ["one", "two"]


def test_the_time_is_that_of_the_stall(root: str, gate: threading.Event) -> None:
    session = Waiting(lambda: threading.Timer(0.3, gate.set).start())
    setup = begun(session)
    setup.job.save("one")
    setup.job.save("two")
    setup.job.close()
    stall_ms = session.noted[1]["stall_ms"]
    assert isinstance(stall_ms, float) and stall_ms >= 300


def test_a_save_that_fails_ends_the_wait(root: str, gate: threading.Event) -> None:
    def fail() -> None:
        Path(root).write_text("in the way")
        gate.set()

    session = Waiting(fail)
    setup = begun(session)
    setup.job.save("one")
    setup.job.save("two")
    setup.job._training.checkpoints.finish()
    assert len(setup.job._training.checkpoints.failures) == 2
    setup.job._detach()


def test_it_does_not_wait_while_workers_come_or_go_or_all_stop(root: str, gate: threading.Event) -> None:
    def leave() -> None:
        session.due = True

    session = Waiting(leave)
    setup = begun(session)
    setup.job.save("one")
    setup.job.save("two")
    assert not gate.is_set() and setup.job._training.checkpoints._saver.pending == 2
    gate.set()
    setup.job.close()
    assert whole(root, "one") and whole(root, "two")


def test_a_storage_that_does_not_answer_costs_the_save(
    root: str, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    session = Waiting(lambda: monkeypatch.setattr(coordinator, "FINISH_S", 0.0))
    setup = begun(session)
    setup.job.save("one")
    setup.job.save("two")
    assert "the save before it was still being written after 0 s" in capfd.readouterr().err
    monkeypatch.undo()
    gate.set()
    setup.job._training.checkpoints.finish()
    (failure,) = setup.job._training.checkpoints.failures
    assert failure.startswith("save('two') after step 0: CheckpointError")
    setup.job._detach()
    assert whole(root, "one") and not whole(root, "two")


def test_a_save_that_found_no_room_has_failed_also_when_the_one_before_is_complete(
    root: str, gate: threading.Event
) -> None:
    setup = begun(Waiting(lambda: None))
    saver = setup.job._training.checkpoints._saver
    setup.job.save("one")
    saver.failed("one", EntryName(7, 0, 1, "feed"), CheckpointError("late"))
    gate.set()
    setup.job._training.checkpoints.finish()
    assert setup.job._training.checkpoints.failures == ["save('one') after step 7: CheckpointError: late"]
    assert whole(root, "one")
    setup.job._detach()


def test_parts_of_others_that_never_come_do_not_keep_copies_of_the_state(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """w1 cannot write. w0 keeps the parts of all ranks of two saves at most: the newest one and the one before."""
    monkeypatch.setattr(saver_module, "OTHERS_S", 0.0)
    held: list[int] = []

    def script(session: FakeMember) -> str:
        job = make_job(session)
        saver = job._training.checkpoints._saver

        def full(task: SaverTask, rank: int) -> int:
            raise OSError(28, "No space left on device")

        if session.worker_id == "w1":
            saver._write_part = full  # type: ignore[method-assign]

        def body(setup: Setup) -> None:
            setup.job.save(f"at-{setup.job._training.at.step}")
            while saver.pending:
                session.world.lock.wait(0.01)  # the other one runs meanwhile
            if session.worker_id == "w0":
                held.append(len(saver._whole))

        return train(set_up(job), epochs=4, body=body)

    world = World(2)
    world.run(script)
    assert len(held) > 2 and max(held) == 2, (held, world.errors)


def test_the_parts_of_a_dead_worker_are_written_before_their_copy_goes(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """w1 has died before its part of the first save was written, and w2 writes none later. w0 looks before the third
    save at the latest, and writes the part of w1."""
    monkeypatch.setattr(saver_module, "OTHERS_S", 0.0)
    monkeypatch.setattr(saver_module, "NOTES_POLL_S", 20.0)  # no other look
    states: list[bool] = []

    def script(session: FakeMember) -> str:
        job = make_job(session)
        saver = job._training.checkpoints._saver
        put = saver.put

        def silent(task: SaverTask) -> None:
            if session.worker_id == "w2" and task.name.step == 3:
                put(task)

        if session.worker_id != "w0":
            saver.put = silent  # type: ignore[method-assign]

        def body(setup: Setup) -> None:
            if session.worker_id == "w1" and setup.job._training.at.step == 6:
                raise Killed
            setup.job.save(f"at-{setup.job._training.at.step}")
            while saver.pending:
                session.world.lock.wait(0.01)
            if session.worker_id == "w0":
                states.append(whole(root, "at-3"))

        return train(set_up(job), epochs=4, body=body)

    World(3).run(script)
    assert states == [False, False, True, True]
