"""Checkpoints as a script meets them: taken at a boundary, whole or not there, and the same bits afterwards."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from elastic.checkpoints.manifest import Manifest
from elastic.checkpoints.naming import MANIFEST, OWN_FILES_PREFIX, EntryName
from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import FileSink, LocalStorage, put, storage_at
from elastic.errors import CheckpointCorrupt, CheckpointError, ConfigError
from elastic.records import temp_dirs
from elastic.records.resume import decide
from runtime.loop.job import Job
from runtime.recovery.checkpoint import coordinator, reader
from runtime.recovery.checkpoint.saver import SaverTask
from tests.unit.jobs import Recorded, Setup, make_job, set_up, train
from tests.unit.sources import ROOT
from tests.unit.worlds import FakeMember, World

Configure = Callable[..., Series]


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Settings of the next job; returns its periodic series."""

    def apply(**settings: Any) -> Series:
        settings = {"root": str(tmp_path / "checkpoints"), "job": "train", "job_id": "feed", **settings}
        for name, value in Settings(**settings).to_environment().items():
            monkeypatch.setenv(name, value)
        return Series(storage_at(settings["root"]))

    return apply


class Dies(Exception):
    """The process is killed here, as far as a test in one process can have it."""


def settle(setup: Setup) -> None:
    """What is being written is written before the next checkpoint is due."""
    setup.job._training.checkpoints.finish()


def dying_at(step: int) -> Callable[[Setup], None]:
    def body(setup: Setup) -> None:
        settle(setup)
        if setup.job._training.at.step >= step:
            raise Dies

    return body


def run_and_die(step: int, epochs: int = 4) -> None:
    """Run until that step; whatever is being written gets finished."""
    job = make_job()
    with pytest.raises(Dies):
        train(set_up(job), epochs=epochs, body=dying_at(step))
    job._training.checkpoints.finish()
    job._detach()


def save_alone(series: Series, **values: Any) -> tuple[Setup, Manifest]:
    """A job of one that has saved itself as "best"."""
    setup = set_up(make_job())
    next(iter(setup.job.epochs(1)))
    for name, value in values.items():
        setattr(setup.job.state, name, value)
    setup.job.save("best")
    setup.job._training.checkpoints.finish()
    setup.job._detach()
    found, skipped = Series(series.storage, "best").newest("feed")
    assert skipped == []
    assert found is not None and found.manifest is not None
    return setup, found.manifest


# What is in it


def test_a_save_holds_every_bit_that_is_registered(configure: Configure) -> None:
    series = configure()
    odd = {"mean": torch.arange(6.0).reshape(2, 3).t(), "none": torch.empty(0, 3), "wave": torch.ones(2) * 1j}
    setup, manifest = save_alone(series, best=0.5, **odd)
    header, blobs = setup.job._training.carrier.capture()
    assert manifest.header == json.loads(json.dumps(header))
    read = reader.read(Series(series.storage, "best"), manifest)
    assert len(read) == len(blobs) > 10
    assert all(torch.equal(one, other) for one, other in zip(read, blobs, strict=True))


def test_other_tools_read_the_files(configure: Configure, tmp_path: Path) -> None:
    """The safetensors library reads a part, and torch's own reader the whole, in any sharding."""
    setup, manifest = save_alone(configure())
    directory = tmp_path / "checkpoints" / "best" / manifest.entry
    weights = setup.model.state_dict()
    part = load_file(directory / "part-00000-of-00001.safetensors")
    assert torch.equal(part["model.0.weight"], weights["0.weight"])
    wanted = {f"model.{name}": torch.zeros_like(value) for name, value in weights.items()}
    theirs, planner = HuggingFaceStorageReader(str(directory)), DefaultLoadPlanner()
    metadata = theirs.read_metadata()
    planner.set_up_planner(wanted, metadata, is_coordinator=True)
    theirs.set_up_storage_reader(metadata, is_coordinator=True)
    theirs.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
    assert all(torch.equal(wanted[f"model.{name}"], value) for name, value in weights.items())


def test_a_resumed_run_does_not_wait_for_the_import_of_distributed_checkpoints() -> None:
    program = "import runtime.recovery.checkpoint.source, sys; sys.exit('torch.distributed.checkpoint' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_the_time_to_read_grows_with_the_number_of_tensors_not_with_its_square(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    series, compared = configure(), list[str]()
    _, manifest = save_alone(series, many=[torch.zeros(1) for _ in range(200)])

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            compared.append(self)
            return str(self) == other

    pieces = [replace(piece, name=Name(piece.name)) for piece in Series(series.storage, "best").pieces(manifest)]
    monkeypatch.setattr(Series, "pieces", lambda self, manifest: pieces)
    reader.read(Series(series.storage, "best"), manifest)
    assert len(compared) < 4 * len(pieces)


def test_saving_again_replaces_the_one_before(configure: Configure) -> None:
    series = configure()
    setup = set_up(make_job())
    next(iter(setup.job.epochs(1)))
    for value in (1, 2, 3):
        setup.job.state.best = value
        assert setup.job.save("best") == f"{series.storage.url}/best"
    setup.job._training.checkpoints.finish()
    setup.job._detach()
    (entry,) = Series(series.storage, "best").all()
    assert entry.manifest is not None
    assert entry.manifest.header["state"] == {"best": 3}


@pytest.mark.parametrize("name", ["", "a/b", "../a", "_periodic", None])
def test_a_bad_name_is_refused_and_nothing_is_written(configure: Configure, name: Any, tmp_path: Path) -> None:
    configure()
    setup = set_up(make_job())
    next(iter(setup.job.epochs(1)))
    with pytest.raises(ConfigError, match="a name has up to 100"):
        setup.job.save(name)
    setup.job._detach()
    assert not (tmp_path / "checkpoints").exists()


def test_files_of_the_script_are_part_of_a_checkpoint(configure: Configure) -> None:
    series = configure()
    setup = set_up(make_job())

    def keep_vocabulary(directory: Path, step: int) -> None:
        (directory / "vocabulary.txt").write_text(f"at {step}")

    setup.job.on_checkpoint(keep_vocabulary)
    next(iter(setup.job.epochs(1)))
    setup.job.save("best")
    setup.job._training.checkpoints.finish()
    setup.job._detach()
    best = Series(series.storage, "best")
    (name,) = best.names()
    assert series.storage.read(best.path(name, "files/vocabulary.txt")) == b"at 0"
    found, _ = best.newest()
    assert found is not None and found.manifest is not None
    assert "files/vocabulary.txt" in [file.name for file in found.manifest.files]


def test_files_of_a_checkpoint_hook_survive_a_sweep_while_they_are_used_and_are_gone_afterwards(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    kept = list[bool]()

    def hook(directory: Path, step: int) -> None:
        (directory / "notes").write_text("x")
        temp_dirs.sweep(tmp_path, OWN_FILES_PREFIX)
        kept.append((directory / "notes").exists())
        if len(kept) == 2:
            raise RuntimeError("the hook")

    configure()
    setup = set_up(make_job())
    setup.job.on_checkpoint(hook)
    next(iter(setup.job.epochs(1)))
    setup.job.save("best")
    setup.job._training.checkpoints.finish()
    with pytest.raises(RuntimeError, match="the hook"):
        setup.job.save("best")
    setup.job._detach()
    assert kept == [True, True] and list(tmp_path.glob(f"{OWN_FILES_PREFIX}*")) == []


def test_no_place_for_the_files_of_a_hook_costs_the_checkpoint_only(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(parent: Path, prefix: str) -> temp_dirs.TempDirectory:
        raise OSError(28, "No space left on device", str(parent))

    series = configure(every="4 steps")
    monkeypatch.setattr(coordinator, "TempDirectory", full)
    setup = set_up(make_job())
    setup.job.on_checkpoint(lambda directory, step: None)
    train(setup, epochs=2)
    assert "checkpoint_failed: OSError: [Errno 28]" in capfd.readouterr().err and series.names() == []
    setup = set_up(make_job())
    setup.job.on_checkpoint(lambda directory, step: None)
    next(iter(setup.job.epochs(1)))
    setup.job.save("best")
    with pytest.raises(CheckpointError, match=r"save\('best'\) after step 0: OSError: \[Errno 28\]"):
        setup.job.close()


def save_as_best(tag: int, *steps: int) -> None:
    """A job of one process, as of `python train.py`, that saves itself behind these steps."""
    setup = set_up(make_job())
    setup.job.state.tag = tag
    for step in setup.job.steps(shards=2, total=9):
        for _ in step:
            setup.model(torch.randn(4, 6)).square().mean().backward()
        setup.optimizer.step()
        setup.optimizer.zero_grad()
        if step.index in steps:
            setup.job.save("best")
    setup.job.close()


def test_a_save_of_a_single_process_replaces_that_of_an_earlier_run_with_more_steps(configure: Configure) -> None:
    best = Series(configure(job_id="").storage, "best")
    save_as_best(1, 8)
    configure(job_id="feed")
    save_as_best(2, 7)
    configure(job_id="")
    save_as_best(3, 1, 2)
    found = [(entry.name.step, entry.manifest.header["state"]["tag"]) for entry in best.all() if entry.manifest]
    assert found == [(7, 2), (2, 3)], "that of a job with an id is not its own"
    assert [entry.name.step for entry in best.all("feed") if not entry.problem] == [7]


def test_a_save_that_is_pruned_late_leaves_the_next_one_of_its_process(two: Series) -> None:
    best = Series(two.storage, "best")
    names = [EntryName(step, 0, 1, token) for step, token in ((1, "ab" * 8), (2, "ab" * 8), (3, "cd" * 8))]
    for name in names:
        put(best.storage, best.path(name, "part"), b"x")
    assert best.replace_with(names[0]) == [], "another process may be writing what has more steps and no manifest"
    assert best.replace_with(names[2]) == [EntryName.of(str(name)) for name in names[:2]]


# Periodic ones, and going on from them


def test_a_resumed_run_ends_in_the_same_bits(configure: Configure) -> None:
    """Steps 0..11; killed after step 9, with checkpoints before steps 4 and 8; the state of step 8 goes on."""
    configure()
    quiet_session = Recorded()
    quiet = train(set_up(make_job(quiet_session)), epochs=4)
    series = configure(every="4 steps")
    run_and_die(9)
    found, skipped = series.newest("feed")
    assert found is not None and found.name.step == 8 and skipped == []
    assert [entry.name.step for entry in series.all()] == [8, 4]
    series = configure(every="4 steps", resume=str(found.name))
    session = Recorded()
    assert train(set_up(make_job(session)), epochs=4) == quiet
    assert [record.step for record in session.records] == [8, 9, 10, 11]
    assert [(r.step, r.epoch, r.scalars, r.samples) for r in session.records] == [
        (r.step, r.epoch, r.scalars, r.samples) for r in quiet_session.records[8:]
    ]


def test_a_stop_that_was_on_its_way_ends_a_resumed_run_after_the_same_step(configure: Configure) -> None:
    def script(job: Job) -> str:
        setup = set_up(job)
        for step in job.steps(shards=4, total=9):
            for _ in step:
                setup.model(torch.randn(4, 6)).square().mean().backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()
            job._training.checkpoints.finish()
            if step.index == 3:
                job.stop("enough")
        job.close()
        return job.digest()

    series = configure(every="1 step", keep="last 9")
    quiet = script(make_job())
    assert [entry.name.step for entry in series.all()] == [4, 3, 2, 1]
    configure(resume=str(series.names()[-1]))
    session = Recorded()
    assert script(make_job(session)) == quiet
    assert [record.step for record in session.records] == [4]


def test_calls_before_the_steps_of_an_epoch_are_not_made_again(configure: Configure) -> None:
    def script(job: Job, calls: list[int]) -> str:
        def number_of(epoch: int) -> int:
            calls.append(epoch)
            return 10 * epoch

        setup = set_up(job)
        for epoch in job.epochs(3):
            number = job.once(number_of, epoch)
            for step in job.steps(shards=4, total=3):
                for _ in step:
                    (setup.model(torch.randn(4, 6)).square().mean() + number).backward()
                setup.optimizer.step()
                setup.optimizer.zero_grad()
                job._training.checkpoints.finish()
        job.close()
        return job.digest()

    series = configure(every="1 step", keep="last 9")
    calls: list[int] = []
    quiet = script(make_job(), calls)
    resumed: list[int] = []
    configure(resume=str(next(entry.name for entry in series.all() if entry.name.step == 4)))
    assert script(make_job(), resumed) == quiet
    assert (calls, resumed) == ([0, 1, 2], [2])


def test_a_run_with_another_seed_or_other_shards_does_not_go_on(two: Series, configure: Configure) -> None:
    name = str(two.names()[-1])
    configure(resume=name)
    with pytest.raises(ConfigError, match="begun with seed=0"):
        train(set_up(make_job(seed=1)))
    configure(resume=name)
    job = make_job()
    set_up(job)
    with pytest.raises(ConfigError, match="begun with shards=4, and the script says shards=3; go on with the old one"):
        next(iter(job.steps(shards=3, total=3)))
    job._detach()
    configure(resume=name)
    job = make_job()
    set_up(job)
    next(epochs := iter(job.epochs(3)))
    with pytest.raises(ConfigError, match="begun with shards=4, and the script says shards=3; go on with the old one"):
        job.steps(shards=3, total=3)
    del epochs


def test_what_the_script_rebuilds_is_rebuilt_before_tensors_are_copied(two: Series, configure: Configure) -> None:
    configure(resume=str(two.names()[-1]))
    setup = set_up(make_job())
    seen: list[dict[str, Any]] = []
    setup.job.on_restore(seen.append)
    next(iter(setup.job.epochs(4)))
    setup.job._detach()
    assert seen == [{"step": 8, "epoch": 2, "state": {"seen": 128}}]


def test_what_job_state_and_buffers_are_is_that_of_the_run_before(configure: Configure) -> None:
    """Dicts come back of their kind and in their order, and so do buffers that state_dict() leaves out."""
    series = configure(every="4 steps")

    def script(job: Job) -> Setup:
        setup = set_up(job)
        setup.model.register_buffer("scale", torch.ones(2), persistent=False)
        job.state.setdefault(counts=defaultdict(list), order={}, ranking=OrderedDict(a=1, b=2))
        return setup

    def body(setup: Setup) -> None:
        setup.model.get_buffer("scale").mul_(2)
        setup.job.state.counts["z"].append(1)
        setup.job.state.order = {str(9 - len(setup.job.state.order)): 0} | setup.job.state.order
        setup.job.state.ranking.move_to_end("a")
        settle(setup)

    train(script(make_job()), epochs=4, body=body)
    configure(resume=str(series.names()[-1]))
    setup = script(make_job())
    assert next(iter(setup.job.epochs(4))) == 2
    state = setup.job.state
    assert setup.model.get_buffer("scale").tolist() == [4.0, 4.0]
    assert repr(state.counts) == "defaultdict(<class 'list'>, {'z': [1, 1]})"
    assert list(state.order) == ["8", "9"] and list(state.ranking) == ["b", "a"]
    setup.job._detach()


def test_a_run_that_goes_on_behind_its_last_step_has_none_left_and_is_no_mistake(configure: Configure) -> None:
    series = configure(every="4 steps")
    train(set_up(make_job()), epochs=4, body=settle)
    configure(resume=str(series.names()[-1]))
    world = World(2)
    world.run(lambda session: train(set_up(make_job(session)), epochs=2))
    assert not world.errors and len(world.digests) == 2
    assert not any(session.records for session in world.sessions.values())


def test_only_the_last_ones_stay(configure: Configure) -> None:
    series = configure(every="3 steps", keep="last 1, every 9 steps")
    train(set_up(make_job()), epochs=4, body=settle)
    assert [entry.name.step for entry in series.all()] == [9, 3]


# Several members


def resumable(job: Job) -> str:
    return train(set_up(job), epochs=4, body=settle)


@cache
def quiet() -> str:
    """The digest of the same training without checkpoints."""
    return resumable(make_job(checkpoints=Settings()))


def test_every_member_writes_its_part_and_any_world_reads_them(configure: Configure) -> None:
    series = configure(every="4 steps")
    world = World(3)
    world.run(lambda session: resumable(make_job(session)))
    assert world.errors == {}
    found, skipped = series.newest("feed")
    assert found is not None and found.manifest is not None and skipped == []
    assert (found.name.step, found.manifest.world) == (8, 3)
    sizes = {file.name: file.size for file in found.manifest.files}
    assert sorted(sizes) == [f"part-0000{rank}-of-00003.safetensors" for rank in range(3)]
    for workers in (1, 2):
        configure(resume=str(found.name))
        world = World(workers)
        world.run(lambda session: resumable(make_job(session)))
        assert world.errors == {}
        assert set(world.digests.values()) == {quiet()}


def test_time_decides_and_the_wish_of_rank_0_reaches_all(configure: Configure) -> None:
    series = configure(every="0.001 s", keep="last 9")
    world = World(3)
    world.run(lambda session: resumable(make_job(session)))
    assert world.errors == {}
    found, _ = series.newest("feed")
    assert found is not None and found.manifest is not None
    assert found.manifest.world == 3


def test_a_member_that_dies_before_its_part_is_written_leaves_no_checkpoint(configure: Configure) -> None:
    """w1 dies in the operation after the boundary, and its part is lost with it."""
    series = configure(every="4 steps")

    def script(session: FakeMember) -> str:
        job = make_job(session)
        if session.worker_id == "w1":
            job._training.checkpoints._saver.put = lambda task: None  # type: ignore[method-assign]
        return resumable(job)

    world = World(2)
    world.run(script)
    assert world.errors == {}
    assert [entry.unfinished for entry in series.all()] == [True, True]
    assert series.newest("feed")[0] is None


def saving(session: FakeMember, silent: str = "") -> str:
    """Saves "best" after the last step; the part of the worker `silent` is never written, and it dies then."""
    job = make_job(session)
    saver = job._training.checkpoints._saver
    if session.worker_id == silent:
        saver._write = lambda task: None  # type: ignore[method-assign]

    def body(setup: Setup) -> None:
        if setup.job._training.at.step == 3:
            setup.job.save("best")
            if session.worker_id == silent:
                raise Dies
            while saver.pending or saver._asked_for:
                session.world.lock.wait(0.01)  # the others run meanwhile

    return train(set_up(job), epochs=1, body=body)


@pytest.mark.parametrize("silent", ["", "w0", "w1", "w2"])
def test_what_a_dead_member_did_not_write_of_a_save_a_survivor_writes(configure: Configure, silent: str) -> None:
    series = configure()
    world = World(3)
    world.run(lambda session: saving(session, silent))
    assert {type(error) for error in world.errors.values()} == ({Dies} if silent else set())
    found, skipped = Series(series.storage, "best").newest("feed")
    assert skipped == []
    assert found is not None and found.manifest is not None
    assert (found.name.step, found.manifest.world) == (3, 3)
    assert all(blob.numel() for blob in reader.read(Series(series.storage, "best"), found.manifest))
    takers = [name for name, member in world.sessions.items() if "checkpoint_part_taken_over" in dict(member.notes)]
    assert len(takers) == bool(silent)


# Faults on the storage


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with two complete checkpoints, of steps 4 and 8, which stays as it is."""
    root = tmp_path_factory.mktemp("taken")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            Settings(root=str(root), job="train", job_id="feed", every="4 steps").to_environment().items()
        ):
            patch.setenv(name, value)
        run_and_die(9)
    return root


@pytest.fixture
def two(configure: Configure, taken: Path, tmp_path: Path) -> Series:
    """A copy of the two."""
    shutil.copytree(taken, tmp_path / "checkpoints")
    series = configure(every="4 steps")
    assert [entry.name.step for entry in series.all("feed")] == [8, 4]
    return series


def file_of(series: Series, name: EntryName, file: str = "part-00000-of-00001.safetensors") -> Path:
    return Path(series.storage.url) / series.path(name, file)


def flip(path: Path, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 4
    path.write_bytes(content)


def manifest_swapped(series: Series, older: EntryName, newer: EntryName) -> None:
    file_of(series, newer, MANIFEST).write_bytes(file_of(series, older, MANIFEST).read_bytes())


def data_swapped(series: Series, older: EntryName, newer: EntryName) -> None:
    file_of(series, newer).write_bytes(file_of(series, older).read_bytes())


def foreign(series: Series, older: EntryName, newer: EntryName) -> None:
    manifest = Manifest.from_json(file_of(series, newer, MANIFEST).read_bytes())
    other = Manifest(**{**{f: getattr(manifest, f) for f in Manifest.__dataclass_fields__}, "job_id": "beef"})
    file_of(series, newer, MANIFEST).write_bytes(other.to_json())


FAULTS: dict[str, tuple[Callable[[Series, EntryName, EntryName], object], str]] = {
    "a bit of the data": (lambda s, _, new: flip(file_of(s, new), 0.6), "SHA-256"),
    "a bit of a data file's header": (lambda s, _, new: flip(file_of(s, new), 0.01), "SHA-256"),
    "the last bit": (lambda s, _, new: flip(file_of(s, new), 1), "SHA-256"),
    "a bit of the manifest": (lambda s, _, new: flip(file_of(s, new, MANIFEST), 0.5), "manifest is damaged"),
    "a truncated data file": (lambda s, _, new: os.truncate(file_of(s, new), 1000), "has 1000 bytes instead of"),
    "an empty data file": (lambda s, _, new: os.truncate(file_of(s, new), 0), "has 0 bytes"),
    "a truncated manifest": (lambda s, _, new: os.truncate(file_of(s, new, MANIFEST), 99), "manifest is damaged"),
    "a missing data file": (lambda s, _, new: file_of(s, new).unlink(), "is missing"),
    "a missing manifest": (lambda s, _, new: file_of(s, new, MANIFEST).unlink(), "never completed"),
    "a manifest of another job": (foreign, "of another job, train (beef)"),
    "the manifest of an older one": (manifest_swapped, "its manifest is that of step-000000000004"),
    "the data of an older one": (data_swapped, "SHA-256"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_checkpoint_is_named_and_skipped(two: Series, fault: str) -> None:
    older, newer = two.names()
    hurt, because = FAULTS[fault]
    hurt(two, older, newer)
    found, skipped = two.newest("feed")
    assert found is not None and found.name == older
    assert [entry.name for entry in skipped] == [newer]
    assert because in skipped[0].problem


def test_a_resumed_job_says_what_is_done_again_and_what_was_skipped(two: Series) -> None:
    older, newer = two.names()
    whole = decide(two, "feed", 11)
    assert (whole.checkpoint, whole.step, whole.redone, whole.skipped) == (str(newer), 8, (8, 10), ())
    assert decide(two, "feed", 8).redone is None
    behind = decide(two, "feed", 5)
    assert (behind.checkpoint, behind.redone) == (str(older), (4, 4))
    assert behind.skipped == ((str(newer), "the ledger ends after 5 steps"),)
    flip(file_of(two, newer), 0.6)
    assert list(decide(two, "feed", 11).sentences()) == [
        f"skipped the checkpoint {newer}: its file part-00000-of-00001.safetensors is damaged: its SHA-256 is not the "
        "one in the manifest",
        f"this job was interrupted; it goes on from step 4, checkpoint {older}; steps 4 to 10 are done again",
    ]


def test_a_job_whose_checkpoints_are_all_damaged_never_starts_from_zero(two: Series) -> None:
    for name in two.names():
        flip(file_of(two, name), 0.6)
    with pytest.raises(ConfigError, match=r"none of its checkpoints can be used .*SHA-256.*--fresh"):
        decide(two, "feed", 11)


def test_a_job_that_never_had_a_checkpoint_starts_again(two: Series) -> None:
    for name in two.names():
        file_of(two, name, MANIFEST).unlink()
    again = decide(two, "feed", 3)
    assert (again.checkpoint, again.step, again.redone) == ("", 0, (0, 2))
    assert len(again.skipped) == 2


def test_damage_after_the_choice_is_noticed_while_reading(two: Series, configure: Configure) -> None:
    newer = two.names()[-1]
    flip(file_of(two, newer), 0.99)
    configure(resume=str(newer))
    with pytest.raises(CheckpointCorrupt, match="SHA-256"):
        next(iter(set_up(make_job()).job.epochs(4)))


def test_a_checkpoint_that_has_vanished_is_not_replaced_by_a_start_from_zero(two: Series, configure: Configure) -> None:
    newer = two.names()[-1]
    two.remove(newer)
    configure(resume=str(newer))
    with pytest.raises(CheckpointCorrupt, match="start the job again"):
        next(iter(set_up(make_job()).job.epochs(4)))


def test_pruning_leaves_other_jobs_and_other_things_alone(two: Series) -> None:
    older, newer = two.names()
    foreign(two, older, older)
    stranger = Path(two.storage.url) / two.name / "notes"
    stranger.mkdir()
    assert two.prune(two_kept(), "feed") == []
    assert [entry.name for entry in two.all()] == [newer, older]
    assert stranger.exists()


def two_kept() -> Any:
    from elastic.checkpoints.policy import Keep

    return Keep(1)


def test_a_read_only_directory_costs_the_checkpoint_and_not_the_training(
    configure: Configure, capfd: pytest.CaptureFixture[str]
) -> None:
    configure(root="/sys/checkpoints", every="4 steps")
    assert resumable(make_job()) == quiet()
    assert "checkpoint_failed: PermissionError" in capfd.readouterr().err


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """No file of this process gets larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_the_checkpoint_and_leaves_the_one_before(
    configure: Configure, capfd: pytest.CaptureFixture[str]
) -> None:
    series = configure(every="4 steps")
    run_and_die(6)
    with disk_of(4096):
        configure(every="4 steps", resume=str(series.names()[0]))
        run_and_die(9)
    assert "checkpoint_failed: OSError: [Errno 27]" in capfd.readouterr().err
    found, skipped = series.newest("feed")
    assert found is not None and found.name.step == 4
    assert [entry.unfinished for entry in skipped] == [True]
    assert series.storage.files(series.path(skipped[0].name)) == {}, "half a file was left behind"


def test_a_disk_that_has_room_again_gets_the_next_checkpoint(
    configure: Configure, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is full while the checkpoint of step 6 is written; those of 3 and 9 are there."""
    with ExitStack() as full:

        def body(setup: Setup) -> None:
            settle(setup)
            if setup.job._training.at.step == 6:
                full.enter_context(disk_of(1024))
            else:
                full.close()

        series = configure(every="3 steps", keep="last 9")
        assert train(set_up(make_job()), epochs=4, body=body) == quiet()
    found, skipped = series.newest("feed")
    assert found is not None and (found.name.step, skipped) == (9, [])
    assert [entry.name.step for entry in series.all() if not entry.problem] == [9, 3]
    assert capfd.readouterr().err.count("checkpoint_failed") == 1


@pytest.mark.parametrize("saves", [False, True])
def test_parts_of_checkpoints_that_one_member_could_not_write_do_not_fill_the_disk(
    configure: Configure, saves: bool
) -> None:
    """w1 has no room at the steps 3 and 6. At 9 it has, and what w0 wrote before is gone already."""
    series, left = configure(every="off" if saves else "3 steps"), dict[int, list[int]]()
    series = Series(series.storage, "best") if saves else series

    def script(session: FakeMember) -> str:
        job = make_job(session)
        saver = job._training.checkpoints._saver
        write = saver._write_part

        def full(task: SaverTask, rank: int) -> int:
            left[task.name.step] = [name.step for name in series.names() if str(name) != str(task.name)]
            if task.name.step < 9:
                raise OSError(28, "No space left on device")
            return write(task, rank)

        if session.worker_id == "w1":
            saver._write_part = full  # type: ignore[method-assign]

        def body(setup: Setup) -> None:
            if saves and setup.job._training.at.step in (3, 6, 9):
                setup.job.save("best")
            while saver.pending:
                session.world.lock.wait(0.01)  # the other one runs meanwhile

        return train(set_up(job), epochs=4, body=body)

    world = World(2)
    world.run(script)
    assert world.errors == {}
    assert left == {3: [], 6: [], 9: []}
    assert [(entry.name.step, entry.problem) for entry in series.all()] == [(9, "")]


def test_training_goes_on_while_a_slow_storage_takes_its_time(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    series, write, gate = configure(every="2 steps"), LocalStorage.create, threading.Event()

    @contextmanager
    def slow(self: LocalStorage, path: str) -> Iterator[FileSink]:
        assert gate.wait(30)
        with write(self, path) as sink:
            yield sink

    monkeypatch.setattr(LocalStorage, "create", slow)
    session = Recorded()

    def body(setup: Setup) -> None:
        if setup.job._training.at.step == 9:
            assert series.names() == []
            gate.set()

    assert train(set_up(make_job(session)), epochs=4, body=body) == quiet()
    assert [record.step for record in session.records] == list(range(12))
    assert series.names()[0].step == 2


def test_a_file_where_the_directory_should_be_costs_the_checkpoint_only(
    configure: Configure, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    configure(every="4 steps")
    job = make_job()
    resumable(job)
    assert "checkpoint_failed: NotADirectoryError" in capfd.readouterr().err


def test_a_save_that_cannot_be_written_is_heard_of_at_the_end(configure: Configure, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    configure()
    setup = set_up(make_job())
    next(iter(setup.job.epochs(1)))
    setup.job.save("final")
    with pytest.raises(CheckpointError, match=r"save\('final'\) after step 0: NotADirectoryError"):
        setup.job.close()


def test_memory_and_other_file_systems_serve_too(configure: Configure) -> None:
    series = configure(root="memory://run/checkpoints", every="4 steps")
    run_and_die(9)
    found, skipped = series.newest("feed")
    assert found is not None and found.name.step == 8 and skipped == []
    configure(root="memory://run/checkpoints", resume=str(found.name))
    assert resumable(make_job()) == quiet()
    series.remove(found.name)
    assert [entry.name.step for entry in series.all()] == [4]


@pytest.mark.parametrize("scheme", ["file", "local"])
def test_a_directory_of_this_machine_may_be_given_as_a_url_and_is_made(tmp_path: Path, scheme: str) -> None:
    put(storage_at(f"{scheme}://{tmp_path}/run/checkpoints"), "a/b", b"x")
    assert (tmp_path / "run" / "checkpoints" / "a" / "b").read_bytes() == b"x"


def test_what_an_object_store_raises_is_an_error_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fsspec's file systems each has its own, such as S3's for missing credentials."""
    storage = storage_at("memory://nowhere")

    class NoCredentials(Exception):
        pass

    def refuse(*_: object, **__: object) -> None:
        raise NoCredentials("there are none")

    for name in ("find", "cat_file", "_open", "rm_file", "rm"):
        monkeypatch.setattr(type(cast(Any, storage)._fs), name, refuse)

    def use(call: Callable[[], AbstractContextManager[object]]) -> None:
        with call():
            pass

    calls: list[Callable[[], object]] = [
        lambda: storage.files("a"),
        lambda: storage.directories("a"),
        lambda: storage.read("a"),
        lambda: storage.remove("a"),
        lambda: storage.remove_directory("a"),
        lambda: use(lambda: storage.open("a")),
        lambda: use(lambda: storage.create("a")),
    ]
    for call in calls:
        with pytest.raises(OSError, match="NoCredentials: there are none") as told:
            call()
        assert told.value.filename == "memory://nowhere"
