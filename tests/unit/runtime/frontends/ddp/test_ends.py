"""What ends the loop of a script does not end it in a silent turn, and changes no number in other steps."""

from __future__ import annotations

import argparse
import enum
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from elastic.errors import NotInPlace
from runtime.frontends.ddp.rank_script import RankScript
from tests.unit.runtime.frontends.ddp import threads
from tests.unit.runtime.frontends.ddp.test_mistakes import SEEN, Setup, seams, stopped, tell, trains
from tests.unit.runtime.frontends.ddp.threads import Main

__all__ = ["seams"]  # the fixture


def counted(args: Any) -> Main:
    """A mean over the steps so far, whose number is divided by, and in every third step one over the ranks."""

    def main() -> None:
        setup = Setup()
        options = args
        step, running = 0, 0.0
        for epoch in range(3):
            setup.sampler.set_epoch(epoch)
            for x, y in setup.loader:
                loss = setup.step(x, y)
                running += 1.0
                step += 1
                tell("mean", running / step)
                if step % 3 == 0:
                    dist.all_reduce(loss)
                    tell("loss", loss.item())
                if step >= options.max_steps:
                    break
            if step >= options.max_steps:
                break
        assert set(SEEN["mean"]) == {1.0}

    return main


def ended_by_a_call() -> None:
    """Of which nobody can say what it gives."""
    setup = Setup()
    step, running = 0, 0.0
    for x, y in setup.loader:
        setup.step(x, y)
        running, step = running + 1, step + 1
        tell("mean", running / step)
        if over(step):
            break


def over(step: int) -> bool:
    return step == 4


def means_of_epochs() -> None:
    """Each epoch has a mean over its batches, and ends behind the fifth."""
    setup = Setup()
    args = argparse.Namespace(dry_run=False, last=4)
    for epoch in range(3):
        setup.sampler.set_epoch(epoch)
        total = 0.0
        for i, (x, y) in enumerate(setup.loader):
            setup.step(x, y)
            total += 1.0
            tell("mean", total / (i + 1))
            if args.dry_run or over(i - 100):
                break
            if i == args.last:
                break
    assert set(SEEN["mean"]) == {1.0}


def epochs_of_two_steps() -> None:
    setup = Setup()
    for epoch in range(3):
        setup.sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(setup.loader):
            setup.step(x, y)
            if i >= 1:
                break


class Flag:
    """Of the script's own: what sets it may stand in another file."""

    done = False

    def count(self, step: int) -> None:
        setattr(self, "done", step == 4)  # noqa: B010  # as another file does it


def ended_by_a_flag() -> None:
    setup = Setup()
    flag, step = Flag(), 0
    for x, y in setup.loader:
        setup.step(x, y)
        step = step + 1
        flag.count(step)
        if flag.done:
            break


@pytest.mark.parametrize(
    ("main", "steps"),
    [
        (counted(argparse.Namespace(max_steps=10)), 10),
        (counted(SimpleNamespace(max_steps=10)), 10),
        (ended_by_a_call, 4),
        (means_of_epochs, 15),
        (epochs_of_two_steps, 6),
        (ended_by_a_flag, 4),
    ],
)
def test_numbers_are_those_of_their_step_where_a_loop_may_end(main: Main, steps: int) -> None:
    trains(main, steps, (2, 3, 4))


def ended_by_an_else() -> None:
    setup = Setup()
    it, step = iter(setup.loader), 0
    while True:
        setup.step(*next(it))
        step += 1
        if step < 4:
            pass
        else:
            break


def ended_by_a_case() -> None:
    setup = Setup()
    it, step, kind = iter(setup.loader), 0, "steps"
    while True:
        setup.step(*next(it))
        step += 1
        match kind:
            case "steps":
                if step == 4:
                    break


def ended_in_a_handler() -> None:
    setup = Setup()
    it, step, empty = iter(setup.loader), 0, dict[str, int]()
    while True:
        setup.step(*next(it))
        step += 1
        try:
            empty["log"] += 1
        except KeyError:
            if step == 4:
                break


@pytest.mark.parametrize("main", [ended_by_an_else, ended_by_a_case, ended_in_a_handler])
def test_a_loop_is_left_wherever_its_end_stands(main: Main) -> None:
    trains(main, 4, (2, 3, 4))


class BadSample(Exception):
    pass


def failing_in_a_turn() -> None:
    setup = Setup()
    try:
        for x, y in setup.loader:
            setup.step(x, y)
            raise BadSample
    finally:
        dist.destroy_process_group()


def test_an_error_of_the_script_is_not_hidden_by_the_end_of_its_process_group() -> None:
    with pytest.raises(BadSample):
        threads.alone(failing_in_a_turn)


def test_a_job_that_is_stopped_ends_nothing_else() -> None:
    """SystemExit is on its way through the script's `finally`."""

    def main() -> None:
        setup = Setup()
        script = RankScript.running()
        try:
            for x, y in setup.loader:
                setup.step(x, y)
                raise SystemExit(0)
        finally:
            dist.destroy_process_group()
            assert not script.training.at.is_over

    with pytest.raises(SystemExit):
        threads.alone(main)


def rates() -> Iterator[float]:
    rate = 0.1
    while True:
        yield rate
        rate *= 0.9


def asked_in_the_loop(make: Callable[[], Iterator[float]]) -> Main:
    def main() -> None:
        setup = Setup()
        kept = make()
        for x, y in setup.loader:
            setup.step(x, y)
            setup.optimizer.param_groups[0]["lr"] = next(kept)

    return main


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: itertools.cycle([0.1, 0.3]), "cycle"),
        (rates, "generator"),
        (lambda: map(float, range(100)), "map"),
        (lambda: filter(None, [0.1] * 100), "filter"),
    ],
)
def test_an_iterator_that_goes_on_in_each_turn_is_named(make: Callable[[], Iterator[float]], kind: str) -> None:
    stopped(asked_in_the_loop(make), NotInPlace, rf"^kept, a {kind}, goes on in each turn .*phases\[step %")


class Batches:
    def __init__(self, setup: Setup) -> None:
        self.loader = setup.loader

    def forever(self) -> Iterator[Any]:
        while True:
            yield from self.loader


def moved(batch: Any) -> Any:
    return batch


def asked_for_training_batches(make: Callable[[Setup], Iterator[Any]]) -> Main:
    def main() -> None:
        setup = Setup()
        batches, step, phases = make(setup), 0, [0.1, 0.3]
        while step < 9:
            x, y = next(batches)
            setup.optimizer.param_groups[0]["lr"] = phases[step % len(phases)]
            setup.step(x, y)
            step += 1

    return main


@pytest.mark.parametrize(
    "main",
    [
        asked_for_training_batches(lambda setup: Batches(setup).forever()),
        asked_for_training_batches(lambda setup: map(moved, Batches(setup).forever())),
    ],
)
def test_iterators_of_training_batches_may_go_on(main: Main) -> None:
    trains(main, 9, (2, 3, 4))


class Phase(enum.Enum):
    WHOLE = 1
    TENTH = 2


def in_two_phases(kept: list[Any]) -> Main:
    """Bound in turn to members of an Enum, or to functions."""

    def main() -> None:
        setup = Setup()
        phase: Any = Phase.WHOLE
        scale, other = whole, tenth
        for epoch in range(2):
            setup.sampler.set_epoch(epoch)
            for x, y in setup.loader:
                loss = setup.loss(x, y)
                if "members" in kept:
                    loss = whole(loss) if phase is Phase.WHOLE else tenth(loss)
                    phase = Phase.TENTH if phase is Phase.WHOLE else Phase.WHOLE
                if "functions" in kept:
                    loss = scale(loss)
                    scale, other = other, scale
                setup.update(loss)

    return main


def whole(loss: Any) -> Any:
    return loss


def tenth(loss: Any) -> Any:
    return loss * 0.1


@pytest.mark.parametrize("kept", [["members"], ["functions"]])
def test_names_that_are_bound_in_turn_to_two_objects_change_once_a_step(kept: list[Any]) -> None:
    trains(in_two_phases(kept), None, (4,))


@pytest.mark.parametrize("joins", [2, 9])
def test_a_newcomer_gets_the_member_of_an_enum(joins: int) -> None:
    main = in_two_phases(["members"])
    digest, _ = threads.alone(main)
    outcome = threads.together(4, main, newcomers=1, kills={"w1": (joins - 1, 0)}, asked_at=joins - 1, admit_at=joins)
    assert outcome.errors == {} and outcome.joined == {"n0": joins}
    assert set(outcome.digests.values()) == {digest}
