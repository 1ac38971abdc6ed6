"""Fetching ahead: what is guessed, and that a wrong guess costs time and no bit."""

from __future__ import annotations

import functools
import logging
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import count, islice
from multiprocessing import active_children
from typing import Any

import numpy as np
import pytest
import torch

from elastic.errors import ConfigError, DataWorkerDied
from runtime.data.prefetcher import AHEAD, Habit, Prefetcher, Wanted
from tests.unit.jobs import make_job

SAMPLES, SHARDS = 96, 4
ALL = tuple(range(SHARDS))


class Noisy:
    """Samples with random noise; says which process made them, and refuses one of them."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.bad:
            raise ArithmeticError(f"sample {index} is damaged")
        return torch.rand(3) + index, os.getpid()


MADE: list[Any] = []


def loader(workers: int, data: Any = None) -> Any:
    MADE.append(make_job().loader(data or Noisy(), 24, shards=SHARDS, shuffle=True, workers=workers))
    return MADE[-1]


def wanted(step: int, shard: int, pass_no: int = 0, epoch: int = 0) -> Wanted:
    return Wanted(epoch, step, pass_no, shard)


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    yield
    while MADE:
        MADE.pop().close()
    assert active_children() == []


def test_guesses_are_the_own_shards_step_after_step() -> None:
    habit = Habit(own=(2, 3), steps=3)
    guesses = list(islice(habit.after(wanted(1, 2)), 5))
    assert guesses == [wanted(1, 3), wanted(2, 2), wanted(2, 3), wanted(0, 2, epoch=1), wanted(0, 3, epoch=1)]


def test_the_passes_of_a_step_each_want_their_own() -> None:
    habit = Habit(own=(0, 1), steps=9, passes=2)
    guesses = list(islice(habit.after(wanted(0, 0)), 5))
    assert guesses == [wanted(0, 1), wanted(0, 0, 1), wanted(0, 1, 1), wanted(1, 0), wanted(1, 1)]


def test_an_idle_member_guesses_that_it_keeps_what_it_has_inherited() -> None:
    habit = Habit(own=(), steps=9)
    assert list(islice(habit.after(wanted(0, 0)), 2)) == [wanted(1, 0), wanted(2, 0)]


def test_the_batches_are_those_of_this_process_whatever_becomes_of_the_world() -> None:
    """The own shards change, a dead worker's shards are inherited, a shard is asked for twice."""
    ahead, here = loader(2), loader(0)
    asked = [(wanted(0, s), ALL) for s in range(4)] + [(wanted(1, s), (2,)) for s in (2, 0, 3)]
    asked += [(wanted(step, s), (0, 1)) for step in (2, 3) for s in (0, 1)] + [(wanted(3, 0), (0, 1))]
    asked += [(wanted(0, s, pass_no, epoch=1), (0, 1)) for pass_no in (0, 1) for s in (0, 1)]
    for want, own in asked:
        (ours, _), (theirs, _) = ahead.batch(want, own), here.batch(want, own)
        assert torch.equal(ours, theirs), want


def test_what_was_guessed_was_fetched_by_the_processes() -> None:
    ahead = loader(2)
    fetched = [ahead.batch(wanted(step, s), (0, 1))[1] for step in range(4) for s in (0, 1)]
    makers = {int(pid) for pids in fetched[1:] for pid in pids}
    assert os.getpid() not in makers
    assert len(makers) == 2, "the same two processes for all of it"


def here() -> tuple[Prefetcher, list[int]]:
    """A prefetcher, and the steps of the batches which this process had to fetch because nobody had guessed them."""
    missed: list[int] = []

    def fetch(epoch: int, step: int, shard: int) -> tuple[int, int]:
        missed.append(step)  # in the processes, to a copy
        return step, shard

    MADE.append(Prefetcher(fetch, 2))
    return MADE[-1], missed


def test_a_prefetcher_can_leave_each_fetch_to_its_processes() -> None:
    """Whatever is asked for: other shards, an earlier step, another pass, a shard twice."""
    value = [1]

    def fetch(epoch: int, step: int, shard: int) -> tuple[int, int, int, int]:
        return os.getpid(), value[0], step, shard

    MADE.append(Prefetcher(fetch, 2, here=False))
    asked = [(0, 0, 0, (0, 1)), (0, 1, 0, (0, 1)), (0, 3, 0, ALL), (7, 2, 0, ALL), (7, 3, 0, ALL), (2, 0, 0, (0,))]
    asked += [(2, 0, 1, (0,)), (2, 0, 1, (0,)), (3, 1, 0, (1,)), (3, 3, 0, (3,)), (3, 2, 0, (2,)), (4, 1, 0, (1,))]
    for step, shard, pass_no, own in asked:
        pid, found, *place = MADE[-1].get(wanted(step, shard, pass_no), Habit(own, 99))
        value[0] += 1
        assert pid != os.getpid() and found == 1 and place == [step, shard]


def answered(prefetcher: Prefetcher) -> None:
    """Wait until each process has answered what it was asked first."""
    for fetcher in prefetcher._fetchers:
        if fetcher.asked:
            ready, _, _ = select.select([fetcher._socket], [], [], 60.0)
            assert ready


def held(prefetcher: Prefetcher) -> int:
    """Batches that are here, and those that the processes make or have made."""
    return len(prefetcher._received) + sum(len(fetcher.asked) for fetcher in prefetcher._fetchers)


def test_after_a_change_of_the_world_the_guesses_are_right_again() -> None:
    prefetcher, missed = here()
    for step in range(6):
        own = ALL if step < 3 else (2, 3)
        for shard in own:
            assert prefetcher.get(wanted(step, shard), Habit(own, 99)) == (step, shard)
    assert len(missed) <= 2, "the first of all, and the first after the change"


def test_a_second_pass_is_guessed_from_the_second_step_on() -> None:
    prefetcher, missed = here()
    habit = Habit(own=(0, 1), steps=9)
    for step in range(5):
        for pass_no in range(2):
            for shard in range(2):
                assert prefetcher.get(wanted(step, shard, pass_no), habit) == (step, shard)
    assert not [step for step in missed if step > 1]


def test_a_world_that_changes_with_every_batch_does_not_pile_up_work() -> None:
    prefetcher, _ = here()
    for step in range(0, 60, 3):
        prefetcher.get(wanted(step, 0), Habit(ALL[: 4 - 2 * (step % 2)], 99))
        assert all(len(fetcher.asked) <= 2 * AHEAD for fetcher in prefetcher._fetchers)


def test_quick_processes_are_no_further_ahead_than_slow_ones() -> None:
    prefetcher, missed = here()
    for step in range(20):
        prefetcher.get(wanted(step, 0), Habit(ALL[:1], 99))
        answered(prefetcher)
        assert held(prefetcher) <= AHEAD * 2
    assert len(missed) == 1, "the first one"


def test_wrong_guesses_that_are_here_do_not_take_the_places_of_those_that_are_wanted() -> None:
    """The shards of a lost worker; a step that is done again; other passes, another epoch."""
    prefetcher, missed = here()
    places: list[tuple[Wanted, tuple[int, ...]]]
    places = [(wanted(step, shard, epoch=1), (2, 3)) for step in range(9) for shard in (2, 3)]
    places += [(wanted(step, shard, epoch=1), ALL) for step in range(9, 18) for shard in ALL]
    places += [(wanted(step, 3, pass_no), (3,)) for step in range(9) for pass_no in (0, 1)]
    places += [(wanted(step, shard), (0, 3)) for step in range(50, 59) for shard in (0, 3)]
    for want, own in places:
        assert prefetcher.get(want, Habit(own, 99)) == (want.step, want.shard)
        answered(prefetcher)
        assert held(prefetcher) <= AHEAD * 2 + 2 * AHEAD * 2, "and what was under way when the guesses changed"
    late = [step for step in missed if step not in (0, 9, 50)]
    assert missed and late == [], "all but those of the moments of the changes are guessed"


def test_a_damaged_sample_raises_where_it_is_wanted_and_nowhere_else() -> None:
    damaged = loader(0).plan.indices(0, 1, 1)[0]
    ahead = loader(1, Noisy(bad=damaged))
    ahead.batch(wanted(0, 0), ALL)
    for shard in range(1, 4):
        ahead.batch(wanted(0, shard), ALL)
    ahead.batch(wanted(1, 0), ALL)
    ahead.batch(wanted(1, 2), ALL)  # somebody else has the damaged one; here it was fetched in vain
    with pytest.raises(ArithmeticError, match=f"sample {damaged} is damaged") as raised:
        ahead.batch(wanted(1, 1), ALL)
    assert f"dataset[{damaged}] raised, for shard 1 of step 1 in epoch 0" in "\n".join(raised.value.__notes__)


def test_a_killed_process_is_named_with_what_to_do() -> None:
    ahead = loader(1)
    ahead.batch(wanted(0, 0), ALL)
    (child,) = active_children()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(DataWorkerDied, match=r"loader\(workers=1\) has ended.*killed by SIGKILL.*Lower workers="):
        for step in range(1, 4):
            for shard in range(4):
                ahead.batch(wanted(step, shard), ALL)
    assert active_children() == []


def test_a_process_killed_at_any_moment_keeps_nobody_waiting() -> None:
    """In the middle of a batch, of an answer, of its own start."""
    killed, moments = 0, random.Random(1)
    for _ in range(25):
        prefetcher, _ = here()
        prefetcher.get(wanted(0, 0), Habit(ALL, 99))
        victim = moments.choice(active_children())
        assert victim.pid is not None
        time.sleep(moments.random() * 1e-3)
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(DataWorkerDied):
            for step in count(1):  # it is gone soon, not at once
                prefetcher.get(wanted(step, 0), Habit(ALL, sys.maxsize))
        killed += 1
    assert killed == 25 and active_children() == []


def test_processes_end_when_nobody_can_ask_them_any_more() -> None:
    """A parent that was killed cannot end them."""
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        prefetcher = Prefetcher(lambda *_: 0, 2)
        prefetcher.get(wanted(0, 0), Habit(ALL, 99))
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writer)
    os.waitpid(parent, 0)
    ended, _, _ = select.select([reader], [], [], 60.0)
    assert ended and os.read(reader, 1) == b"", "the processes have closed what they inherited"
    os.close(reader)


def test_closing_ends_the_processes_at_once_and_the_next_batch_starts_others() -> None:
    ahead = loader(2)
    ahead.batch(wanted(0, 0), ALL)
    assert len(active_children()) == 2
    ahead.close()
    assert active_children() == []
    ahead.batch(wanted(0, 1), ALL)
    assert len(active_children()) == 2


@pytest.mark.parametrize("workers", [-1, 1.5, True, "2"])
def test_workers_is_a_count(workers: Any) -> None:
    with pytest.raises(ConfigError, match="workers="):
        loader(workers)


class Staged(Noisy):
    """Its script makes the samples harder from epoch to epoch; it counts what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.scales, self.asked = [torch.ones(())], 0
        self.options = {"shift": [0.0]}

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.asked += 1
        return torch.full((3,), float(self.scales[0]) * index + self.options["shift"][0]), os.getpid()


@pytest.mark.parametrize("workers", [0, 2])
def test_what_the_script_changes_in_its_dataset_holds_from_the_next_step_on(workers: int) -> None:
    data, plain = Staged(), Staged()
    data_loader, plain_loader = loader(workers, data), loader(0, plain)
    makers: list[set[int]] = []
    for epoch in range(3):
        data.scales[0].fill_(epoch + 1)
        plain.scales[0].fill_(epoch + 1)
        makers.append(set())
        for step, shard in ((step, shard) for step in range(4) for shard in ALL):
            x, made_by = data_loader.batch(wanted(step, shard, epoch=epoch), ALL)
            assert torch.equal(x, plain_loader.batch(wanted(step, shard, epoch=epoch), ALL)[0])
            makers[-1] |= set(made_by.tolist()) - {os.getpid()}
    assert [len(made) for made in makers] == [workers] * 3
    assert not (makers[0] & makers[1])


def test_a_change_in_the_middle_of_a_step_is_seen_although_this_process_fetches_a_batch_itself() -> None:
    data, plain = Staged(), Staged()
    ahead = loader(2, data)
    ahead.batch(wanted(0, 0), ALL[:1])
    data.scales[0].fill_(5.0)
    plain.scales[0].fill_(5.0)
    ahead.batch(wanted(0, 1), ALL[:2])  # nobody has guessed that this worker would take shard 1 over
    makers = set[int]()
    for step, shard in ((1, 0), (1, 1), (2, 0), (2, 1)):
        x, made_by = ahead.batch(wanted(step, shard), ALL[:2])
        assert torch.equal(x, loader(0, plain).batch(wanted(step, shard), ALL[:2])[0])
        makers |= set(made_by.tolist())
    assert makers - {os.getpid()}


def test_a_change_of_an_entry_of_a_dict_is_seen() -> None:
    data, plain = Staged(), Staged()
    ahead = loader(2, data)
    for step in range(3):
        data.options["shift"][0] = plain.options["shift"][0] = float(step)
        x, _ = ahead.batch(wanted(step, 0), ALL[:1])
        assert torch.equal(x, loader(0, plain).batch(wanted(step, 0), ALL[:1])[0])


class Level(Enum):
    EASY, HARD = 0, 1


class Levelled:
    level: Any = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, str]:
        return torch.zeros(3), repr(self.level)


@pytest.mark.parametrize(
    "levels",
    [
        tuple(map(np.int64, range(3))),
        (np.float32(0), (1, 2), np.float32(1)),
        (Level.EASY, Level.HARD),
        (b"easy", b"hard"),
        (1j, 2j),
    ],
)
def test_a_change_of_any_plain_value_is_seen(levels: tuple[Any, ...]) -> None:
    data = Levelled()
    ahead = loader(2, data)
    for step, data.level in enumerate(levels):
        _, seen = ahead.batch(wanted(step, 0), ALL[:1])
        assert set(seen) == {repr(data.level)}


class Scaling:
    """A collator; it has what decides no batch, too."""

    def __init__(self) -> None:
        self.scale, self.model = 1.0, torch.nn.Linear(2, 2)
        self.model.register_buffer("seen", torch.zeros(1))
        self.logger = logging.getLogger("a collator's")

    def __call__(self, samples: list[Any]) -> Any:
        return torch.tensor([index * self.scale for index in samples]), os.getpid()

    def collated(self, samples: list[Any]) -> Any:
        return self(samples)


HOW: dict[str, Callable[[Scaling], Callable[[list[Any]], Any]]] = {
    "object": lambda scaling: scaling,
    "method": lambda scaling: scaling.collated,
    "partial": lambda scaling: functools.partial(scaling),
    "argument": lambda scaling: functools.partial(Scaling.collated, scaling),
}


@pytest.mark.parametrize("how", HOW)
def test_what_the_script_changes_in_its_collator_holds_from_the_next_step_on(how: str) -> None:
    scaling = Scaling()
    MADE.append(
        make_job().loader(range(SAMPLES), 24, shards=SHARDS, shuffle=False, collate=HOW[how](scaling), workers=1)
    )
    makers: list[set[int]] = []
    for step in range(3):
        scaling.scale = step + 1.0
        found = [MADE[-1].batch(wanted(step, shard), ALL) for shard in ALL]
        x = torch.cat([batch for batch, _ in found])
        assert torch.equal(x, (step + 1.0) * torch.arange(24 * step, 24 * step + 24))
        makers.append({made_by for _, made_by in found} - {os.getpid()})
    assert [len(made) for made in makers] == [1] * 3 and not (makers[0] & makers[1])


@pytest.mark.parametrize("how", HOW)
def test_what_decides_no_batch_ends_no_process(how: str) -> None:
    """Weights of a model that is trained, and a library that makes its logger late."""
    scaling = Scaling()
    MADE.append(
        make_job().loader(range(SAMPLES), 24, shards=SHARDS, shuffle=False, collate=HOW[how](scaling), workers=1)
    )
    makers = set[int]()
    for step in range(4):
        makers |= {MADE[-1].batch(wanted(step, shard), ALL)[1] for shard in ALL}
        with torch.no_grad():
            scaling.model.weight.add_(1.0)
            scaling.model.get_buffer("seen").add_(1.0)
        scaling.model.train(step % 2 == 1)
        logging.getLogger(f"{how} {step}")
    assert len(makers - {os.getpid()}) == 1


class Counting(torch.nn.Module):
    """A model whose own method collates."""

    steps = 0

    def collated(self, samples: list[Any]) -> Any:
        return os.getpid()


def test_a_model_that_counts_its_steps_ends_no_process_although_it_collates() -> None:
    model = Counting()
    MADE.append(make_job().loader(range(SAMPLES), 24, shards=SHARDS, shuffle=False, collate=model.collated, workers=1))
    makers = set[int]()
    for step in range(4):
        model.steps = step
        makers |= {MADE[-1].batch(wanted(step, shard), ALL) for shard in ALL}
    assert len(makers - {os.getpid()}) == 1


def test_a_dataset_may_hold_tensors_of_inference_mode() -> None:
    data = Staged()
    with torch.inference_mode():
        data.scales = [torch.full((), 3.0)]
    x, _ = loader(1, data).batch(wanted(0, 0), ALL[:1])
    assert torch.equal(x, loader(0, data).batch(wanted(0, 0), ALL[:1])[0])
