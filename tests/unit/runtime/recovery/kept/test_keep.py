"""elastic.keep in one process: what is kept comes back, to the bit, and nothing else is loaded."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.two_tensor import TwoTensor

import elastic
from elastic.errors import CheckpointCorrupt, ConfigError, Disagree, NotCarried, OtherState, UsageError
from runtime.allreduce.fixed_point import conversion
from runtime.recovery.kept import comparison, copying
from runtime.recovery.kept import keep as keeping
from runtime.recovery.kept.agreed_end import AgreedEnd
from runtime.recovery.kept.boxes import Box
from runtime.recovery.kept.choice import NO_ROUND, HeldSegment, KeptStep, KnownStep, RoundNumber, newest_whole
from runtime.recovery.kept.content import named, state_of
from runtime.recovery.kept.copying import StepCopy
from runtime.recovery.kept.keep import KeptScript, shortage
from runtime.recovery.kept.loading import SavedTensor, Stored
from runtime.recovery.kept.look import KeptHere
from runtime.recovery.kept.place import KNOWN, LEFT_OUT, KeptPlace, directory_of, rounds_in
from runtime.recovery.kept.reading import StateReader
from runtime.recovery.kept.segment import HEADER_BYTES, Segment, SegmentFile, SegmentWriter, read_header, segments_in
from runtime.recovery.kept.step_log import FILE_STEPS_MAX, STEPS_MAX, LoggedStep, StepLog, StepLogs
from runtime.recovery.transfer.checksum import FilledBody
from runtime.recovery.transfer.connection import CopyFailed

compiled = pytest.mark.skipif(conversion.kernel() is None, reason="there is no compiler here")
FIRST, SECOND, THIRD = (RoundNumber(0, generation) for generation in (1, 2, 3))


class Loader:
    """Something else with a state."""

    def __init__(self) -> None:
        self.position = 0
        self.order: torch.Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.order = state["position"], state["order"]


class Model(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.down = nn.Linear(width, 2, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.norm(self.up(x)))


class Script:
    """A script: a model, AdamW with two groups, a schedule and a loader."""

    def __init__(self, *, shard: bool, width: int = 4, seed: int = 0, kind: Any = Model) -> None:
        torch.manual_seed(seed)
        self.model: Any = kind(width)
        if shard:
            fully_shard(self.model.up)
            fully_shard(self.model)
        weights = [p for p in self.model.parameters() if p.ndim > 1]
        rest = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.5**step)
        self.loader = Loader()

    def keep(self) -> KeptScript:
        return elastic.keep(self.model, self.optimizer, self.schedule, loader=self.loader)

    def step(self, kept: KeptScript) -> None:
        generator = torch.Generator().manual_seed(kept.step)
        self.model(torch.randn(5, 3, generator=generator)).square().sum().backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.loader.position += 5
        self.loader.order = torch.randperm(4, generator=generator)
        kept.done()

    def values(self) -> list[Any]:
        """All that the script has, bit by bit."""
        states = [self.optimizer.state[parameter] for parameter in self.model.parameters()]
        tensors = [*self.model.state_dict().values(), *(state[key] for state in states for key in sorted(state))]
        whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in tensors]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        order = None if self.loader.order is None else self.loader.order.tolist()
        return [[one.tolist() for one in whole], rates, self.schedule.state_dict(), self.loader.position, order]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Job:
    """The worker of a job of one on this machine."""

    def __init__(self, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory = memory
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.here = KeptHere(str(memory), cast(Any, self))
        self._patch = monkeypatch
        for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
            monkeypatch.setenv(name, "0")
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, "1")

    def note(self, event: str, **fields: Any) -> None:
        """As Session."""
        self.notes.append((event, fields))

    def begin(self, number: RoundNumber, because: str = "", *, own: bool = False) -> KeptStep | None:
        """Begin a round: what the script is told. own: with --ranks."""
        self.here.void()
        source = newest_whole(self.here.check(0, 1))
        for name, value in KeptPlace(str(self.memory), number, source, because, own=own).to_environment().items():
            self._patch.setenv(name, value)
        return source

    def files(self, number: RoundNumber) -> dict[int, Path]:
        """Step -> file."""
        paths = segments_in(directory_of(str(self.memory), number))
        return {header.step: path for path in paths if (header := read_header(path)) is not None}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(keeping, "available_bytes", lambda: 1 << 40)
    return Job(tmp_path, monkeypatch)


def after(steps: int, *, shard: bool) -> list[Any]:
    """The values of a quiet script."""
    script = Script(shard=shard)
    kept = KeptScript({})
    for _ in range(steps):
        script.step(kept)
    return script.values()


@pytest.mark.parametrize("shard", [True, False])
def test_each_round_goes_on_where_the_one_before_was_killed(job: Job, *, shard: bool) -> None:
    done = 0
    for number, steps in ((FIRST, 3), (SECOND, 1), (THIRD, 2)):
        source = job.begin(number)
        assert source == (KeptStep(done, RoundNumber(0, number.generation - 1), 0) if done else None)
        script = Script(shard=shard, seed=number.generation)
        torch.manual_seed(0)
        if not done:
            script = Script(shard=shard)
        kept = script.keep()
        assert kept.step == done
        if done:
            assert script.values() == after(done, shard=shard)
        for _ in range(steps):
            script.step(kept)
        kept.wait()
        done += steps
        assert job.here.follow(number, 0, 0) == (done, f"step {done} kept")
        job.here.settle(number)
        assert rounds_in(str(job.memory)) == [number]
    assert script.values() == after(6, shard=shard)
    assert job.notes == []


def test_every_tenth_step_is_kept_and_the_first_and_last_one_of_a_round(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep(script: Script) -> KeptScript:
        return elastic.keep(script.model, script.optimizer, script.schedule, every=10, loader=script.loader)

    job.begin(FIRST)
    script = Script(shard=True)
    kept = keep(script)
    told = []
    for _ in range(14):
        script.step(kept)
        kept.wait()
        told.append(job.here.follow(FIRST, 0, 0)[0])
    assert told == [1] * 9 + [10] * 5
    ended: list[int] = []
    monkeypatch.setattr(AgreedEnd, "is_last", lambda end, step: step == 13)
    monkeypatch.setattr(AgreedEnd, "arrive", lambda end: ended.append(max(job.files(SECOND))))
    assert job.begin(SECOND) == KeptStep(10, FIRST, 0)
    script = Script(shard=True)
    kept = keep(script)
    assert script.values() == after(10, shard=True)
    for _ in range(3):
        script.step(kept)
    assert ended == [13] and job.begin(THIRD) == KeptStep(13, SECOND, 0)
    with pytest.raises(ConfigError, match=r"every=0"):
        elastic.keep(every=0)


def test_a_step_that_is_not_kept_does_not_wait_for_the_mirror(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.begin(FIRST)
    script = Script(shard=True)
    kept = elastic.keep(script.model, script.optimizer, script.schedule, every=3, loader=script.loader)
    joined: list[int] = []
    join = StepCopy.join

    def seen(copy: StepCopy) -> None:
        join(copy)
        joined.append(copy.step)

    monkeypatch.setattr(StepCopy, "join", seen)
    for _ in range(6):
        script.step(kept)
    assert joined == [1, 3], "each behind a later step that is kept"


def test_a_rank_has_kept_what_its_own_segment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what that of rank 0 says, of a state in parts. Without shards it is the first process of the machine."""
    here = Job(tmp_path, monkeypatch).here
    directory = KeptPlace(str(tmp_path), FIRST).directory()
    for part, step in ((0, 5), (1, 4)):
        file = SegmentWriter(directory, 0, part).oldest()
        file.finish(HeldSegment(step, FIRST, 0, part, 2), file.begin(8), b"[]")
    assert [here.follow(FIRST, rank, 0)[0] for rank in range(2)] == [5, 4]
    file = SegmentWriter(KeptPlace(str(tmp_path), SECOND).directory(), 0, 0).oldest()
    file.finish(HeldSegment(7, SECOND, 0, 0, 1), file.begin(8), b"[]")
    assert [here.follow(SECOND, rank, 0)[0] for rank in range(2)] == [7, 7]


def test_what_a_script_logs_is_there_before_its_step_is_kept(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.begin(FIRST)
    script = Script(shard=True)
    kept = elastic.keep(script.model, script.optimizer, script.schedule, every=2, loader=script.loader)
    found: list[list[LoggedStep]] = []
    keep = StepCopy.__init__

    def copied(copy: StepCopy, *words: Any, **options: Any) -> None:
        found.append(StepLogs(str(job.memory)).left(0, 1))
        keep(copy, *words, **options)

    monkeypatch.setattr(StepCopy, "__init__", copied)
    for step in range(4):
        for value in (step, torch.tensor([2.0 * step])):
            kept.log(loss=value, size=1) if step else None
        script.step(kept)
    steps = [LoggedStep(FIRST, 1, 0, 1, (0.1, 0.1), {})]
    for step in (1, 2, 3):
        values = {"loss": (float(step), 2.0 * step), "size": (1.0, 1.0)}
        steps.append(LoggedStep(FIRST, step + 1, 0, 1, (0.1 * 0.5**step,) * 2, values))
    assert found == [steps[:1], steps[:2], steps]
    logs = StepLogs(str(job.memory))
    assert logs.left(1, 2) == [] and logs.news(FIRST, 0) == steps and logs.news(FIRST, 0) == []
    script.step(kept)
    assert [one.step for one in logs.news(FIRST, 0)] == [5]
    assert [LoggedStep.from_json(json.loads(json.dumps(one.to_json()))) for one in steps] == steps
    with pytest.raises(UsageError, match=r"kept\.log: loss is a str"):
        kept.log(loss=cast(Any, "1"))
    for _ in range(STEPS_MAX):
        script.step(kept)
    assert [one.step for one in StepLogs(str(job.memory)).left(0, 1)] == list(range(6, STEPS_MAX + 6))
    sizes = []
    for _ in range(FILE_STEPS_MAX - STEPS_MAX):
        script.step(kept)
        sizes.append(sum(path.stat().st_size for path in job.memory.glob("*/*/log0")))
    assert sizes[-1] < max(sizes), "the file does not grow for ever"
    assert logs.news(FIRST, 0)[-1].step == STEPS_MAX + 5 + len(sizes)


def test_a_line_that_is_being_written_is_read_later(job: Job) -> None:
    job.begin(FIRST)
    script = Script(shard=True)
    kept = elastic.keep(script.model, script.optimizer, script.schedule, loader=script.loader)
    for _ in range(2):
        script.step(kept)
    (path,) = job.memory.glob("*/*/log0")
    whole = path.read_text()
    logs = StepLogs(str(job.memory))
    path.write_text(whole[:-3])
    assert [one.step for one in logs.news(FIRST, 0)] == [1]
    path.write_text(whole)
    assert [one.step for one in logs.news(FIRST, 0)] == [2]


@pytest.mark.parametrize("steps", [3, FILE_STEPS_MAX])
def test_half_a_line_is_the_last_one(tmp_path: Path, steps: int) -> None:
    """Memory that is full takes a part of a line: in the middle of a file, and at the beginning of the next one."""
    log, logs = StepLog(FIRST, 0, 1), StepLogs(str(tmp_path))
    directory = KeptPlace(str(tmp_path), FIRST).directory()
    for step in range(steps):
        log.write(directory, step + 1)
    size, limits = (directory / "log0").stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    room = size + 10 if steps < FILE_STEPS_MAX else 1000
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            log.write(directory, steps + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert logs.news(FIRST, 0)[-1].step == steps


def test_a_failure_behind_the_copy_ends_the_script(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no failure of a connection, and has to be heard of, though the step is in memory."""
    job.begin(FIRST)
    kept = elastic.keep(Script(shard=False).model)

    def failing(copy: StepCopy, *_: Any) -> None:
        raise NotImplementedError("a mistake")

    monkeypatch.setattr(StepCopy, "_send", failing)
    kept.done()
    with pytest.raises(NotImplementedError, match="a mistake"):
        kept.done()


def test_outside_rounds_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ELASTIC_KEPT", raising=False)
    script = Script(shard=False)
    kept = script.keep()
    for step in range(3):
        assert kept.step == step
        script.step(kept)
    assert script.values() == after(3, shard=False)
    assert os.listdir(tmp_path) == []


def test_a_damaged_segment_is_found_before_it_is_loaded_and_the_step_before_is_taken(job: Job) -> None:
    job.begin(FIRST)
    script = Script(shard=True)
    kept = script.keep()
    for _ in range(4):
        script.step(kept)
    kept.wait()
    path = job.files(FIRST)[4]
    with open(path, "r+b") as file:
        file.seek(HEADER_BYTES + 9)
        file.write(b"?")
    assert job.begin(SECOND) == KeptStep(3, FIRST, 0)
    ((event, fields),) = job.notes
    assert event == "kept_damaged" and fields["segment"] == f"0.1/{path.name}" and "checksum" in fields["because"]
    again = Script(shard=True, seed=5)
    assert again.keep().step == 3
    assert again.values() == after(3, shard=True)


def test_a_segment_that_is_written_anew_while_it_is_looked_at_is_not_called_damaged(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.begin(FIRST)
    script = Script(shard=True)
    kept = script.keep()
    script.step(kept)
    kept.wait()
    path = job.files(FIRST)[1]

    def check(segment: Segment) -> None:
        with open(path, "r+b") as file:
            file.write(bytes(HEADER_BYTES))
        raise CheckpointCorrupt("half old, half new")

    monkeypatch.setattr(Segment, "check", check)
    assert job.here.check(0, 1) == ()
    assert job.notes == []


def other_width(script: Script) -> None:
    script.model.down = nn.Linear(4, 3)


def other_dtype(script: Script) -> None:
    script.model.down.to(torch.float64)


def other_name(script: Script) -> None:
    script.model.lower = script.model.down
    del script.model.down


def other_optimizer(script: Script) -> None:
    script.optimizer = torch.optim.SGD(script.model.parameters(), lr=0.1)  # type: ignore[assignment]


def other_groups(script: Script) -> None:
    script.optimizer = torch.optim.AdamW(script.model.parameters())


def other_schedule(script: Script) -> None:
    script.schedule = torch.optim.lr_scheduler.StepLR(script.optimizer, 3)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_width, r"model.down.weight is float32 \(3, 4\), and was float32 \(2, 4\)"),
        (other_dtype, r"model.down.bias is float64 \(2,\), and was float32"),
        (other_name, "model.lower.weight was not kept"),
        (other_groups, r"the parameter groups of optimizer have \[6\] parameters, and had \[2, 4\]"),
        (other_optimizer, r"the parameter groups of optimizer have \[6\] parameters, and had \[2, 4\]"),
        (other_schedule, r"scheduler has .*'gamma'.*, and had"),
    ],
)
def test_another_state_is_refused_by_name_and_nothing_is_written(
    job: Job, change: Callable[[Script], None], said: str
) -> None:
    job.begin(FIRST)
    script = Script(shard=False)
    kept = script.keep()
    script.step(kept)
    kept.wait()
    job.begin(SECOND)
    other = Script(shard=False, seed=3)
    change(other)
    before = [tensor.clone() for tensor in other.model.state_dict().values()]
    with pytest.raises(OtherState, match=said):
        other.keep()
    assert all(map(torch.equal, before, other.model.state_dict().values()))
    assert not other.optimizer.state


def test_another_number_of_units_is_refused(job: Job) -> None:
    """The bits would be others."""
    for number, units in ((FIRST, 2), (SECOND, 3)):
        job.begin(number)
        script = Script(shard=True)
        if number == SECOND:
            with pytest.raises(OtherState, match=r"units=3, and was units=2\. Build what the job began with"):
                elastic.keep(script.model, script.optimizer, units=units)
            assert not script.optimizer.state
            return
        kept = elastic.keep(script.model, script.optimizer, units=units)
        for _ in kept.units():
            script.model(torch.ones(5, 3)).square().sum().backward()
        script.optimizer.step()
        kept.done()
        kept.wait()


def test_objects_that_are_missing_or_new_are_named(job: Job) -> None:
    job.begin(FIRST)
    script = Script(shard=False)
    kept = script.keep()
    script.step(kept)
    kept.wait()
    job.begin(SECOND)
    with pytest.raises(OtherState, match="loader, scheduler is missing; teacher was not kept"):
        elastic.keep(script.model, script.optimizer, teacher=Model())


def test_two_models_have_two_names(job: Job) -> None:
    """As in a GAN."""
    job.begin(FIRST)
    models = [nn.Linear(2, 2), nn.Linear(2, 3)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in models]
    kept = elastic.keep(*models, *optimizers)
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    kept.done()
    kept.wait()
    job.begin(SECOND)
    others = [nn.Linear(2, 2), nn.Linear(2, 3)]
    again = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in others]
    assert elastic.keep(*others, *again).step == 1
    for model, other in zip(models, others, strict=True):
        assert torch.equal(model.weight, other.weight)
    for one, two in zip(optimizers, again, strict=True):
        buffers = [[state["momentum_buffer"] for state in each.state.values()] for each in (one, two)]
        assert all(map(torch.equal, *buffers))


def test_the_wrappers_of_accelerate_are_kept_as_what_is_in_them() -> None:
    """They have no hooks, and no kind of their own."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def around(name: str, kind: type, one: object) -> Any:
        wrapped: Any = object.__new__(type("Accelerated", (kind,), {"__module__": "accelerate.wrapper"}))
        vars(wrapped)[name] = one
        return wrapped

    wrappers = around("optimizer", torch.optim.Optimizer, optimizer), around("scheduler", object, schedule)
    assert named(wrappers, {}) == {"optimizer": optimizer, "scheduler": schedule}


def test_what_cannot_be_kept_is_named(job: Job) -> None:
    job.begin(FIRST)
    with pytest.raises(ConfigError, match="loader is a list without state_dict"):
        elastic.keep(Model(), loader=[1, 2])
    loader = Loader()
    kept = elastic.keep(Model(), loader=loader)
    loader.position = {1, 2}  # type: ignore[assignment]
    with pytest.raises(NotCarried, match=r"loader\.position is a builtins\.set"):
        kept.done()


def test_weights_that_change_while_they_are_copied_are_not_kept(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job.begin(FIRST)
    script = Script(shard=True)
    kept = elastic.keep(script.model)  # without the optimizer, whose step would wait
    kept.done()
    kept.wait()
    write = StepCopy._write_later

    def changing(copy: StepCopy, body: memoryview) -> tuple[str, int | None]:
        written = write(copy, body)
        with torch.no_grad():
            script.model.up.weight.add_(1.0)
        return written

    monkeypatch.setattr(StepCopy, "_write_later", changing)
    kept.done()
    kept.wait()
    assert sorted(job.files(FIRST)) == [1]
    assert "model.up.weight was changed while it was copied" in capfd.readouterr().err
    monkeypatch.setattr(StepCopy, "_write_later", write)
    kept.done()
    with torch.no_grad():
        script.model.up.weight.add_(1.0)
    kept.wait()
    assert sorted(job.files(FIRST)) == [1, 3], "step 3 was copied in done() itself"


@compiled
def test_weights_whose_memory_moves_while_they_are_copied_are_not_kept(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch moves the memory of tensors that another process gets."""
    job.begin(FIRST)
    script = Script(shard=False)
    kept = elastic.keep(script.model)
    copy = FilledBody.copy

    def moving(body: FilledBody, *pieces: Any) -> None:
        copy(body, *pieces)
        script.model.up.weight.untyped_storage().share_memory_()

    monkeypatch.setattr(FilledBody, "copy", moving)
    kept.done()
    kept.wait()
    assert sorted(job.files(FIRST)) == []
    assert "model.up.weight was changed while it was copied" in capfd.readouterr().err


@pytest.mark.parametrize("native", [pytest.param(True, marks=compiled), False])
def test_what_a_script_does_to_memory_before_it_is_copied_changes_nothing(
    native: bool, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(copying, "kernel", lambda: None)
    job.begin(FIRST)
    script = Script(shard=False)
    kept = script.keep()
    script.step(kept)
    kept.wait()
    free, write = threading.Event(), StepCopy._write_later

    def later(copy: StepCopy, body: memoryview) -> tuple[str, int | None]:
        assert free.wait(60)
        return write(copy, body)

    monkeypatch.setattr(StepCopy, "_write_later", later)
    before = script.values()
    kept.done()
    script.model.up.weight.untyped_storage().share_memory_()
    script.model.down.bias.data = torch.full_like(script.model.down.bias, 7.0)
    for state in script.optimizer.state.values():
        state["exp_avg"].data = torch.full_like(state["exp_avg"], 7.0)
    free.set()
    kept.wait()
    assert sorted(job.files(FIRST)) == [1, 2]
    assert script.values() != before
    job.begin(SECOND)
    other = Script(shard=False, seed=1)
    assert other.keep().step == 2
    assert other.values() == before


def test_weights_that_lie_otherwise_are_kept_beside_others(job: Job) -> None:
    job.begin(FIRST)
    torch.manual_seed(1)
    lies = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    models = [torch.nn.Linear(3, 2), lies, torch.nn.Linear(2, 3)]
    kept = elastic.keep(*models)
    kept.done()
    kept.wait()
    job.begin(SECOND)
    others = [torch.nn.Linear(3, 2), torch.nn.Conv2d(3, 4, 2), torch.nn.Linear(2, 3)]
    elastic.keep(*others)
    for mine, other in zip(models, others, strict=True):
        assert all(map(torch.equal, mine.state_dict().values(), other.state_dict().values()))


def test_a_tensor_that_cannot_be_copied_ends_the_script(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.begin(FIRST)
    kept = elastic.keep(Script(shard=False).model)

    def failing(copy: StepCopy, body: memoryview) -> tuple[str, int | None]:
        raise NotImplementedError("a tensor of some library")

    monkeypatch.setattr(StepCopy, "_write_later", failing)
    kept.done()
    with pytest.raises(NotImplementedError, match="a tensor of some library"):
        kept.wait()


def test_the_step_of_the_optimizer_waits_for_the_copy(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.begin(FIRST)
    script = Script(shard=True)
    kept = script.keep()
    waited: list[str] = []
    wait = StepCopy.wait

    def seen(copy: StepCopy) -> None:
        wait(copy)
        waited.append("waited")

    monkeypatch.setattr(StepCopy, "wait", seen)
    script.step(kept)
    assert waited == []
    script.optimizer.step()
    assert waited == ["waited"]


def test_without_memory_nothing_is_kept_and_what_is_old_is_not_loaded(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job.begin(FIRST)
    script = Script(shard=True)
    kept = script.keep()
    script.step(kept)
    kept.wait()
    assert job.begin(SECOND) == KeptStep(1, FIRST, 0)
    script = Script(shard=True)
    kept = script.keep()
    monkeypatch.setattr(keeping, "available_bytes", lambda: 100)
    script.step(kept)
    assert kept.step == 2
    said = capfd.readouterr().err
    assert "elastic: the state is not kept in memory: " in said and "that are left on this machine" in said
    newest, said = job.here.follow(SECOND, 0, 0)
    assert newest == -1 and said.startswith("not kept: 0 MB for 3 copies in each of 2 rounds")
    assert [job.here.is_off(number) for number in (FIRST, SECOND)] == [False, True]
    assert job.here.void() == SECOND, "the others are told, who may have all parts of the first round"
    assert job.here.void() == SECOND, "and so are other workers of this machine"
    assert job.begin(THIRD) is None, "the script has gone on since, and its own files are newer"
    assert rounds_in(str(job.memory)) == [SECOND] and job.files(SECOND) == {}
    job.here.settle(THIRD)
    assert rounds_in(str(job.memory)) == [] and job.here.void() == NO_ROUND


def test_a_process_whose_memory_alone_is_full_says_so_itself(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is not rank 0, which speaks for all where all keep nothing any more."""
    job.begin(FIRST)
    script = Script(shard=True)
    kept = script.keep()
    script.step(kept)
    assert kept._at is not None
    kept._at = replace(kept._at, rank=1)

    def begin(file: SegmentFile, body: int) -> memoryview:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SegmentFile, "begin", begin)
    script.step(kept)
    kept.wait()
    assert "on rank 1: the state is not kept: " in (said := capfd.readouterr().err) and "No space left" in said
    assert job.here.is_off(FIRST)


def test_a_worker_without_memory_makes_no_directory_for_its_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    KeptPlace("", FIRST).leave_word("off", "there is no directory in memory")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_gone_ends_no_script(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    job.begin(FIRST)
    job.memory.rmdir()
    script = Script(shard=False)
    kept = script.keep()
    for _ in range(2):
        script.step(kept)
    assert kept.step == 2 and "No such file" in capfd.readouterr().err
    assert not job.memory.exists()


@pytest.mark.parametrize("where", ["directory", "free_bytes"])
def test_all_processes_hear_that_one_has_no_memory_to_look_at(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], where: str
) -> None:
    """They would wait for it in the first step for ever."""
    job.begin(FIRST)
    script = Script(shard=False)
    kept = script.keep()
    told: list[str] = []

    def gathered(own: Any) -> list[Any]:
        told.append(str(own))
        return [own]

    def fails(*_: object) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(keeping, "gathered", gathered)
    owner: Any = KeptPlace if where == "directory" else keeping
    monkeypatch.setattr(owner, where, fails)
    for _ in range(2):
        script.step(kept)
    assert any("Input/output error" in one for one in told)
    assert kept.step == 2 and capfd.readouterr().err.count("Input/output error") == 1


def test_a_reason_of_the_worker_is_said_once(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    job.begin(FIRST, "the owner of the machine says so")
    script = Script(shard=False)
    kept = script.keep()
    script.step(kept)
    assert capfd.readouterr().err == "elastic: the state is not kept in memory: the owner of the machine says so\n"
    assert job.files(FIRST) == {}


def other_position(script: Script) -> None:
    script.loader.position = 7


def other_weights(script: Script) -> None:
    with torch.no_grad():
        script.model.down.bias[1] += 1.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_position, "loader.position is 5 on rank 0 and 7 on rank 1"),
        (other_weights, r"model.down.bias is torch.float32 \(2,\) with checksum .* on rank 0 and .* on rank 1"),
    ],
)
def test_what_should_be_the_same_in_all_processes_and_is_not_is_named(
    job: Job, monkeypatch: pytest.MonkeyPatch, change: Callable[[Script], None], said: str
) -> None:
    """This process speaks for both; the second one has another state."""
    script, other = Script(shard=False), Script(shard=False)
    quiet = KeptScript({})
    for one in (script, other):
        one.step(quiet)
    change(other)
    there = state_of(keep_names(other))

    def gathered(own: Any) -> list[Any]:
        other = comparison._digest if isinstance(own, int) else comparison._leaves
        return [own, other(there, own=False)]

    monkeypatch.setattr(comparison, "gathered", gathered)
    job.begin(FIRST)
    kept = script.keep()
    with pytest.raises(Disagree, match=f"elastic.keep: {said}"):
        kept.done()


def keep_names(script: Script) -> dict[str, Any]:
    return named((script.model, script.optimizer, script.schedule), {"loader": script.loader})


@pytest.mark.parametrize(("free", "wanted"), [(240_000, ""), (238_000, "would take more than half of the 0 MB")])
def test_memory_for_the_copies_of_two_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, wanted: str
) -> None:
    (tmp_path / "0.1").mkdir()
    (tmp_path / "0.1" / "0.0.0").write_bytes(bytes(1000))
    monkeypatch.setattr(keeping, "available_bytes", lambda: free - 1000)
    assert wanted in shortage(20_000, tmp_path / "0.1") and bool(wanted) == bool(shortage(20_000, tmp_path / "0.1"))


# ------------------------------------------------------------------------------------------------- other worlds


@st.composite
def worlds(draw: st.DrawFn) -> tuple[tuple[int, int], list[Box], list[Box]]:
    """A tensor, and its division into shards along one dimension in two worlds, as torch divides."""
    shape = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    writing, reading = (_division(shape, draw(st.integers(0, 1)), draw(st.integers(1, 5))) for _ in range(2))
    return shape, writing, reading


def _division(shape: tuple[int, int], dim: int, ranks: int) -> list[Box]:
    """Ranks beyond the last row have an empty shard."""
    size, boxes = -(-shape[dim] // ranks), []
    for rank in range(ranks):
        start = min(rank * size, shape[dim])
        extent = min(size, shape[dim] - start)
        boxes.append(Box((start, 0), (extent, shape[1])) if dim == 0 else Box((0, start), (shape[0], extent)))
    return boxes


@given(worlds(), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_any_world_reads_what_any_other_has_written(
    given: tuple[tuple[int, int], list[Box], list[Box]], dtype: torch.dtype
) -> None:
    shape, writing, reading = given
    whole = torch.arange(shape[0] * shape[1]).view(shape).to(dtype)
    saved = SavedTensor("x", str(dtype).removeprefix("torch."), shape, True, "cpu")
    for box in writing:
        saved.boxes.append(_stored(whole, box))
    for box in reading:
        into = torch.full(box.shape, 100, dtype=dtype)
        saved.fill(into, box)
        assert torch.equal(into, whole[box.within(Box.whole(shape))])


class _Read:
    """A segment in memory, with one tensor behind 64 other bytes."""

    def __init__(self, body: bytes) -> None:
        self._body = memoryview(bytearray(64) + bytearray(body))

    def read(self, at: int, size: int) -> memoryview:
        return self._body[at : at + size]


def _stored(whole: torch.Tensor, box: Box) -> Stored:
    part = whole[box.within(Box.whole(whole.shape))].contiguous()
    body = part.reshape(-1).view(torch.uint8).numpy().tobytes() if part.numel() else b""
    return Stored(_Read(body), box, 64)  # type: ignore[arg-type]


def test_a_mirror_that_fails_is_said_once_and_training_goes_on(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The connection to the next machine breaks with the second step."""

    class Breaks:
        sent = 0

        def send(self, *segment: object) -> None:
            self.sent += 1
            if self.sent > 1:
                raise CopyFailed("the other side is gone")

    job.begin(FIRST)
    script = Script(shard=True)
    kept = script.keep()
    script.step(kept)
    mirror = Breaks()
    kept._mirrors = [cast(Any, mirror)]
    for _ in range(4):
        script.step(kept)
    kept.wait()
    assert mirror.sent == 2
    said = "elastic: the state is on one machine alone until the next round: the other side is gone\n"
    assert capfd.readouterr().err == said
    for _ in range(2):
        assert job.here.follow(FIRST, 0, 0) == (5, "step 5 kept, on this machine alone")
    assert job.notes == [("kept_thin", {"step": 5, "parts": 1})]


def test_done_waits_for_the_mirror_of_the_step_before_and_optimizers_do_not(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a step is at most one behind on the other machine."""
    sending, arrived = threading.Event(), threading.Event()

    class Slow:
        def send(self, *segment: object) -> None:
            sending.set()
            assert arrived.wait(60.0)

    job.begin(FIRST)
    script = Script(shard=True)
    kept = script.keep()
    script.step(kept)
    kept._mirrors = [cast(Any, Slow())]
    script.step(kept)
    assert sending.wait(60.0)
    script.optimizer.step()
    finished: list[int] = []

    def done() -> None:
        kept.done()
        finished.append(kept.step)

    waiting = threading.Thread(target=done)
    waiting.start()
    assert finished == [] and kept.step == 2
    arrived.set()
    waiting.join()
    assert finished == [3]


def test_workers_of_a_machine_divide_what_they_check(tmp_path: Path) -> None:
    directory = KeptPlace(str(tmp_path), FIRST).directory()
    for part in range(5):
        writer = SegmentWriter(directory, 0, part)
        for step in (1, 2):
            buffer = writer.oldest()
            buffer.finish(HeldSegment(step, FIRST, 0, part, 5), buffer.begin(10), b"{}")
    here = KeptHere(str(tmp_path), cast(Any, None))
    shares = [here.check(share, 3) for share in range(3)]
    assert sorted(one.part for share in shares for one in share) == sorted([*range(5), *range(5)])
    assert newest_whole(one for share in shares for one in share) == KeptStep(2, FIRST, 0)
    nothing = KeptHere("", cast(Any, None))
    assert nothing.check(0, 1) == () and nothing.void() == NO_ROUND and not nothing.is_off(FIRST)


def test_a_machine_remembers_what_its_workers_knew_of_kept_steps(tmp_path: Path) -> None:
    first, second = KnownStep(RoundNumber(0, 3), 7, ("a", "b")), KnownStep(RoundNumber(0, 12), 5, ("a",))
    here, new = (KeptHere(str(tmp_path), cast(Any, None)) for _ in range(2))
    here.remember(first)
    assert new.remembered() is None and rounds_in(str(tmp_path)) == [], "nothing was kept here"
    KeptPlace(str(tmp_path), first.round).directory()
    for known in (None, first, replace(first, step=8), second):
        here.remember(known)
    assert new.remembered() == replace(second, nodes=())
    assert list(segments_in(directory_of(str(tmp_path), second.round))) == []
    (directory_of(str(tmp_path), second.round) / KNOWN).write_text("[")
    assert new.remembered() == replace(first, step=8, nodes=())
    shutil.rmtree(tmp_path)
    here.remember(first)
    assert new.remembered() is None and KeptHere("", cast(Any, None)).remembered() is None


class Optimizers(torch.optim.Optimizer):
    """Holds others, as torchtitan's does: its state has the names of parameters, and shards before it is loaded."""

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        self.model, self.optimizers = model, optimizers
        super().__init__([p for one in optimizers for group in one.param_groups for p in group["params"]], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.optimizers:
            one.step(closure)

    def state_dict(self) -> dict[str, Any]:
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        return dict(get_optimizer_state_dict(self.model, self.optimizers, options=flat))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        set_optimizer_state_dict(self.model, self.optimizers, state, options=flat)


class Contained(Script):
    def __init__(self, *, width: int = 4, kind: Any = Model) -> None:
        super().__init__(shard=True, width=width, kind=kind)
        self.optimizers = Optimizers(self.model, self.optimizer)

    def keep(self) -> KeptScript:
        return elastic.keep(self.model, self.optimizers, self.schedule, loader=self.loader)


def test_an_optimizer_that_holds_others_is_kept_by_the_form_of_its_own_state(job: Job) -> None:
    job.begin(FIRST)
    script = Contained()
    kept = script.keep()
    for _ in range(3):
        script.step(kept)
    kept.wait()
    job.begin(SECOND)
    script = Contained()
    assert script.keep().step == 3
    assert script.values() == after(3, shard=True)
    job.begin(THIRD)
    mixed = Contained()
    mixed.optimizers = Contained(width=5).optimizers
    with pytest.raises(OtherState, match=r"optimizer\.state\.up\.weight\.exp_avg has shape \(5, 3\), and had \(4, 3\)"):
        mixed.keep()


class Numbered(nn.Sequential):
    """The names of its layers are numbers."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))

    @property
    def up(self) -> nn.Module:
        return self[0]


def test_an_optimizer_that_holds_others_of_layers_whose_names_are_numbers(job: Job) -> None:
    """These are not the numbers of parameters."""
    job.begin(FIRST)
    script = Contained(kind=Numbered)
    kept = script.keep()
    for _ in range(3):
        script.step(kept)
    kept.wait()
    job.begin(SECOND)
    again = Contained(kind=Numbered)
    more = again.keep()
    assert again.values() == script.values()
    again.step(more)


class WideMoments(torch.optim.Optimizer):
    """Its moments have float32 and its counter int64, whatever the parameters have."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["count"] = torch.zeros((), dtype=torch.int64)
                state["moments"] = [torch.zeros_like(parameter, dtype=torch.float32)]
            state["count"] += 1
            state["moments"][0].mul_(0.9).add_(parameter.grad.float())
            parameter.copy_(parameter.float() - 0.05 * state["moments"][0])


def states_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Dtype and bits of all tensors of its state."""
    found = [one for state in optimizer.state.values() for one in state.values()]
    tensors = [tensor for one in found for tensor in (one if isinstance(one, list) else [one])]
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in tensors]
    return [(one.dtype, one.tolist()) for one in whole]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, WideMoments])
@pytest.mark.parametrize("shard", [True, False])
def test_the_state_of_an_optimizer_keeps_its_dtypes(job: Job, kind: Any, dtype: torch.dtype, *, shard: bool) -> None:
    """load_state_dict() casts it to the dtype of the parameter."""

    def begin(number: RoundNumber) -> tuple[KeptScript, nn.Module, torch.optim.Optimizer]:
        job.begin(number)
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to(dtype)
        if shard:
            fully_shard(model)
        optimizer = kind(model.parameters())
        return elastic.keep(model, optimizer), model, optimizer

    kept, model, optimizer = begin(FIRST)
    for _ in range(3):
        model(torch.ones(2, 4, dtype=dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    kept.done()
    kept.wait()
    _, _, again = begin(SECOND)
    assert len(states_of(again)) > 2 and states_of(again) == states_of(optimizer)


class Copied(nn.Linear):
    """Its state_dict() has copies of its tensors, and a name of its own for one of them."""

    def state_dict(self, *args: Any, **more: Any) -> dict[str, Any]:  # type: ignore[override]
        found = {key: value.clone() for key, value in super().state_dict(*args, **more).items()}
        return {"first": found.pop("weight"), **found}

    def load_state_dict(self, state_dict: Any, *args: Any, **more: Any) -> Any:
        return super().load_state_dict({"weight": state_dict["first"], "bias": state_dict["bias"]}, *args, **more)


def hooked(width: int) -> nn.Module:
    """The state of its norm is copied by a hook."""
    model = Model(width)
    nn.init.normal_(model.norm.weight)
    model.register_buffer("sparse", torch.eye(2).to_sparse(), persistent=False)

    def hook(module: nn.Module, found: dict[str, Any], prefix: str, metadata: object) -> None:
        found.update({key: value.clone() for key, value in found.items() if key.startswith(prefix)})

    model.norm.register_state_dict_post_hook(hook)
    return model


def sharded(width: int) -> nn.Module:
    """The same with shards."""
    model = hooked(width)
    fully_shard(model)
    return model


@pytest.mark.parametrize("make", [lambda width: Copied(3, width), hooked, sharded])
def test_a_module_whose_state_dict_has_copies_of_its_tensors_is_filled(
    job: Job, make: Callable[[int], nn.Module]
) -> None:
    def begin(number: RoundNumber) -> nn.Module:
        job.begin(number)
        torch.manual_seed(number.generation)
        model = make(4)
        kept = elastic.keep(model)
        if number == FIRST:
            kept.done()
            kept.wait()
        return model

    model, again = begin(FIRST), begin(SECOND)
    for mine, other in zip(model.parameters(), again.parameters(), strict=True):
        mine, other = (one.full_tensor() if isinstance(one, DTensor) else one for one in (mine, other))
        assert torch.equal(mine, other)


def test_plain_values_that_json_lacks_are_told_before_the_script_is_filled(job: Job) -> None:
    """Of a script over what accelerate prepares, they are put into its names as they are."""
    job.begin(FIRST, own=True)
    loader = Loader()
    loader.position = cast(Any, [math.inf, {1: (-math.inf, b"x")}])
    loader.order = torch.ones(3)
    kept = elastic.keep(loader=loader)
    kept.done()
    kept.wait()
    job.begin(SECOND, own=True)
    before = keeping.kept_before("loader")
    assert before["position"] == loader.position and before["order"].numel() == 0
    assert keeping.kept_before("other") is None


def test_a_buffer_whose_elements_share_memory_goes_on(job: Job) -> None:
    def begin(number: RoundNumber) -> tuple[nn.Module, KeptScript]:
        job.begin(number)
        model = nn.Linear(2, 2)
        model.register_buffer("places", torch.full((1, 4), float(number.generation)).expand(3, 4))
        return model, elastic.keep(model)

    model, kept = begin(FIRST)
    kept.done()
    kept.wait()
    again, kept = begin(SECOND)
    assert torch.equal(again.get_buffer("places"), torch.ones(3, 4))
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def test_a_tensor_that_holds_others_is_refused_by_name(job: Job) -> None:
    """It would come back as a plain tensor; so would a shard."""
    two: Any = TwoTensor(torch.ones(2), torch.zeros(2))
    mesh = init_device_mesh("cpu", (1,))
    for number, one in ((FIRST, two), (SECOND, DTensor.from_local(two, mesh, [Replicate()], run_check=False))):
        job.begin(number)
        loader = Loader()
        loader.order = one
        with pytest.raises(NotCarried, match=r"on rank 0: loader\.order is a .*TwoTensor"):
            elastic.keep(loader=loader).done()


class Leaves(nn.Module):
    """Leaves buffers out of its state_dict()."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        for key, value in (
            ("seen", torch.zeros(2, dtype=torch.int64)),
            ("later", None),
            ("cache", torch.zeros(1)),
            ("wide", torch.zeros(1, 2).expand(3, 2)),
            ("sparse", torch.eye(2).to_sparse()),
        ):
            self.register_buffer(key, value, persistent=False)


def test_with_ranks_buffers_that_state_dict_leaves_out_are_kept(job: Job) -> None:
    def begin(number: RoundNumber) -> tuple[Leaves, KeptScript]:
        job.begin(number, own=True)
        model = Leaves()
        return model, elastic.keep(nn.Sequential(model))

    model, kept = begin(FIRST)
    model.seen = torch.tensor([3, 4])
    model.later = torch.ones(2, dtype=torch.bfloat16)
    model.cache = torch.arange(5.0)
    model.wide = torch.full((1, 2), 2.0).expand(3, 2)
    kept.done()
    kept.wait()
    again, kept = begin(SECOND)
    for key in ("seen", "later", "cache", "wide"):
        mine, other = model.get_buffer(key), again.get_buffer(key)
        assert torch.equal(mine, other) and mine.dtype == other.dtype and key in again._non_persistent_buffers_set
    assert torch.equal(again.get_buffer("sparse").to_dense(), torch.eye(2))
    again.cache = torch.eye(2).to_sparse()
    kept.done()  # what cannot be carried is left out, also if a script has made it so later
    kept.wait()
    assert torch.equal(begin(THIRD)[0].get_buffer("cache"), torch.zeros(1)), "as the script makes it"


def test_a_step_that_was_kept_without_such_buffers_is_loaded(job: Job) -> None:
    """By an older version, before the scripts of this job are started again."""
    job.begin(FIRST, own=True)
    model = Leaves()
    kept = elastic.keep(model)
    with torch.no_grad():
        model.weight.fill_(5.0)
    kept._objects = {name: one for name, one in kept._objects.items() if name != LEFT_OUT}
    kept._reader = StateReader(kept._objects)
    kept.done()
    kept.wait()
    job.begin(SECOND, own=True)
    again = Leaves()
    assert elastic.keep(again).step == 1
    assert torch.equal(again.weight, model.weight)
