"""Averages of the weights, and other tensors, that a script keeps itself: the same in every world, or named."""

from __future__ import annotations

import copy
import functools
import io
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from elastic.errors import ConfigError, NotInPlace
from runtime.frontends.ddp.frames.model_copies import ModelCopies
from runtime.frontends.ddp.frames.places import ScriptFrames
from runtime.frontends.ddp.rank_script import RankScript
from tests.unit.runtime.frontends.ddp import threads
from tests.unit.runtime.frontends.ddp.test_mistakes import BATCHES, Setup
from tests.unit.runtime.frontends.ddp.threads import Main
from tests.unit.thoroughness import some

AVERAGES: list[str] = []
"""What scripts have told when they ended, one for each worker."""


@pytest.fixture(autouse=True)
def seams() -> Iterator[None]:
    AVERAGES.clear()
    with threads.seams():
        yield


def tell(*tensors: torch.Tensor, also: object = None) -> None:
    AVERAGES.append(repr((torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).tolist(), also)))


def unwrapped(setup: Setup) -> nn.Module:
    module: nn.Module = setup.model.module
    return module


def a_deep_copy() -> None:
    setup = Setup(norm=True)
    ema = copy.deepcopy(setup.model.module)
    for x, y in setup.loader:
        setup.step(x, y)
        with torch.no_grad():
            for mine, theirs in zip(ema.parameters(), setup.model.module.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
            for mine, theirs in zip(ema.buffers(), setup.model.module.buffers(), strict=True):
                mine.copy_(theirs)
    tell(*ema.parameters())


class Shadow:
    """As libraries write it: a warmed-up decay, and a dict of tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.updates = 0
        self.shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        decay = min(0.9, (1 + self.updates) / (10 + self.updates))
        for name, parameter in model.named_parameters():
            self.shadow[name] = decay * self.shadow[name] + (1.0 - decay) * parameter.detach()


def a_shadow() -> None:
    setup = Setup()
    ema = Shadow(unwrapped(setup))
    for x, y in setup.loader:
        setup.step(x, y)
        ema.update(unwrapped(setup))
    tell(*ema.shadow.values(), also=ema.updates)


def a_list_in_a_trainer() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.setup = Setup()
            self.parameters = list(self.setup.model.parameters())
            self.averages = [parameter.detach().clone() for parameter in self.parameters]

        def train(self) -> None:
            for x, y in self.setup.loader:
                self.setup.step(x, y)
                torch._foreach_lerp_(self.averages, [parameter.detach() for parameter in self.parameters], 0.2)

    trainer = Trainer()
    trainer.train()
    tell(*trainer.averages)


def a_flat_vector() -> None:
    setup = Setup()
    average = nn.utils.parameters_to_vector(setup.model.parameters()).detach()
    for x, y in setup.loader:
        setup.step(x, y)
        average = 0.9 * average + 0.1 * nn.utils.parameters_to_vector(setup.model.parameters()).detach()
    tell(average)


class Average(nn.Module):
    """A module with a counter, as of timm."""

    count: torch.Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.total = torch.zeros(3)

    def update(self, model: nn.Module) -> None:
        with torch.no_grad():
            self.count += 1
            self.total += 1.0
            for mine, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 1.0 / (1.0 + self.count.item()))


def a_module_in_a_list() -> None:
    setup = Setup()
    averages: list[Any] = [Average(unwrapped(setup))]
    for x, y in setup.loader:
        setup.step(x, y)
        for average in averages:
            average.update(unwrapped(setup))
    tell(*averages[0].parameters(), averages[0].total, also=averages[0].count.item())


def under_accumulation(*, each_batch: bool = False, average: type[Shadow] = Shadow) -> None:
    setup = Setup(batch_size=2)
    ema = average(unwrapped(setup))
    for i, (x, y) in enumerate(setup.loader):
        if i % 2 == 0 and i + 1 < len(setup.loader):
            with setup.model.no_sync():
                setup.loss(x, y).backward()
            if not each_batch:
                continue
        else:
            setup.loss(x, y).backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()
        ema.update(unwrapped(setup))
    tell(*ema.shadow.values(), also=ema.updates)


def a_copy_through_data(*, replaced: bool = False) -> None:
    """As older libraries write it. No version of a tensor rises, and the average is a part of what is trained."""
    setup = Setup()
    ema = copy.deepcopy(setup.model.module)
    for x, y in setup.loader:
        with torch.no_grad():
            target = ema(x)
        setup.step(x, y + 0.1 * target)
        for mine, theirs in zip(ema.parameters(), setup.model.module.parameters(), strict=True):
            if replaced:
                mine.data = mine.data * 0.9 + theirs.data * 0.1
            else:
                mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
    tell(*ema.parameters())


def a_copy_with_new_data() -> None:
    a_copy_through_data(replaced=True)


def a_matrix_of_counts() -> None:
    """No copy of the model, and too large to be a plain value."""
    setup = Setup()
    counts = torch.zeros(40, 40)
    for x, y in setup.loader:
        setup.step(x, y)
        counts[0, 0] += 1
        counts = counts + 1
    if not RankScript.running().training.at.joining:
        tell(counts[:1, :2])


KEPT = [
    a_deep_copy,
    a_shadow,
    a_list_in_a_trainer,
    a_flat_vector,
    a_module_in_a_list,
    under_accumulation,
    a_copy_through_data,
    a_copy_with_new_data,
]


@functools.cache
def quiet(main: Main) -> tuple[str, str]:
    """The digest and the averages of a job with a worker for each rank, in which no turn is silent."""
    outcome = threads.together(4, main)
    assert outcome.errors == {}
    (digest,), (told,) = set(outcome.digests.values()), set(AVERAGES)
    AVERAGES.clear()
    return digest, told


def same(main: Main, expected: tuple[str, str], workers: int, **how: Any) -> None:
    outcome = threads.together(workers, main, **how)
    assert outcome.errors == {}
    assert (set(outcome.digests.values()), set(AVERAGES)) == ({expected[0]}, {expected[1]})
    AVERAGES.clear()


@pytest.mark.parametrize("main", [*KEPT, a_matrix_of_counts])
def test_they_are_the_same_in_every_world_and_through_deaths(main: Main) -> None:
    expected = quiet(main)
    for workers in some((1, 2, 3, 5), 1, main.__name__):
        same(main, expected, workers)
    for operation, shards in some(list(itertools.product((2, 3, 5), (0, 1))), 1, main.__name__):
        same(main, expected, 4, kills={"w1": (operation, shards)})


@pytest.mark.parametrize("main", KEPT)
def test_newcomers_copy_them(main: Main) -> None:
    expected = quiet(main)
    for admitted in some((1, 3), 1, main.__name__):
        same(main, expected, 2, newcomers=1, asked_at=0, admit_at=admitted)
    same(main, expected, 2, kills={"w0": (4, 0)}, newcomers=1, asked_at=0, admit_at=1)


def test_what_a_newcomer_reads_is_not_changed_by_a_silent_turn() -> None:
    model = nn.Linear(2, 2)
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    copies = ModelCopies(ScriptFrames(), [model])
    copies.step(0)
    before = [tensor.tolist() for tensor in average.values()]
    read = copies.state_dict()
    copies.keep()
    for tensor in average.values():
        tensor += 1.0
    assert [tensor.tolist() for tensor in read.values()] == before
    assert [tensor.tolist() for tensor in copies.state_dict().values()] == before
    copies.put_back()
    assert [tensor.tolist() for tensor in average.values()] == before


@pytest.mark.parametrize("average", [False, True])
def test_a_snapshot_that_was_loaded_is_none_of_them(average: bool, tmp_path: Path) -> None:
    """A newcomer has loaded one that was saved after the others began."""
    file = tmp_path / "snapshot.pt"

    def main() -> None:
        setup = Setup()
        model = unwrapped(setup)
        shadow = Shadow(model)
        snapshot = torch.load(file) if RankScript.running().training.at.joining else None
        if snapshot is not None:
            model.load_state_dict(snapshot["model"])
            shadow.shadow = snapshot["shadow"] if average else shadow.shadow
        for x, y in setup.loader:
            setup.step(x, y)
            if average:
                shadow.update(model)
        torch.save({"model": model.state_dict(), "shadow": shadow.shadow}, file)
        tell(*model.parameters(), *shadow.shadow.values())

    expected = quiet(main)
    same(main, expected, 2, newcomers=1, asked_at=0, admit_at=1)


@pytest.mark.parametrize("main", KEPT)
def test_digests_count_them(main: Main) -> None:
    digests = set()
    for start in (0.0, 1.0):

        def changed(start: float = start) -> None:
            """What the script kept when its loop began is in the digest of its end."""
            main()
            copies = RankScript.running()._kept.copies
            assert copies.found
            for tensor in copies.tensors.values():
                tensor.data += int(start)

        digests.add(threads.alone(changed)[0])
    assert len(digests) == 2


def made_later(make: Callable[[nn.Module], Any]) -> Main:
    def main() -> None:
        setup = Setup()
        ema = None
        for x, y in setup.loader:
            setup.step(x, y)
            if ema is None:
                ema = make(unwrapped(setup))
            ema.update(unwrapped(setup))

    return main


class InPlace(Shadow):
    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.shadow[name].lerp_(parameter.detach(), 0.1)


class ThroughData(Shadow):
    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.shadow[name].data.lerp_(parameter.data, 0.1)


@pytest.mark.parametrize("make", [Average, InPlace, ThroughData])
@pytest.mark.parametrize("workers", [1, 4])
def test_an_average_that_a_newcomer_would_not_have_is_named(make: Callable[[nn.Module], Any], workers: int) -> None:
    errors = threads.together(workers, made_later(make)).errors
    assert errors
    for error in errors.values():
        assert isinstance(error, ConfigError)
        assert "ema" in str(error)
        assert "make it before the first epoch" in str(error)


def large_and_changed() -> None:
    setup = Setup()
    bank = torch.zeros(2**20 + 1)
    for x, y in setup.loader:
        setup.step(x, y)
        bank[0] += 1.0


def large_and_left_alone() -> None:
    setup = Setup()
    bank = torch.zeros(2**20 + 1)
    for x, y in setup.loader:
        setup.step(x, y)
    assert not bank.any()


def saved_as_a_view() -> None:
    """As many scripts save: what state_dict() gives shares its memory with the average, which goes on."""
    setup = Setup()
    ema = copy.deepcopy(setup.model.module)
    for x, y in setup.loader:
        setup.step(x, y)
        with torch.no_grad():
            for mine, theirs in zip(ema.parameters(), setup.model.module.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
        if RankScript.running().training.at.step == 1:
            checkpoint = {"ema": ema.state_dict(), "model": setup.model.module.state_dict()}
            assert checkpoint["ema"].keys() == checkpoint["model"].keys()
    tell(*ema.parameters())


def saved_as_it_is() -> None:
    """The name of the checkpoint is there before the average is made."""
    setup = Setup()
    checkpoint: dict[str, Any] | None = None
    ema = Shadow(unwrapped(setup))
    for x, y in setup.loader:
        setup.step(x, y)
        ema.update(unwrapped(setup))
        checkpoint = {"ema": ema.shadow}
    assert checkpoint is not None
    tell(*ema.shadow.values())


def saved_before_the_loop_as_a_view() -> None:
    """The checkpoint is gone when a newcomer copies."""
    setup = Setup()
    ema = copy.deepcopy(setup.model.module)
    checkpoint: dict[str, Any] | None = {"ema": ema.state_dict()}
    for x, y in setup.loader:
        setup.step(x, y)
        with torch.no_grad():
            for mine, theirs in zip(ema.parameters(), setup.model.module.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
        checkpoint = None
    assert checkpoint is None
    tell(*ema.parameters())


def saved_before_the_loop_as_it_is() -> None:
    setup = Setup()
    checkpoint: dict[str, Any] | None = None
    ema = Shadow(unwrapped(setup))
    checkpoint = {"ema": ema.shadow}
    for x, y in setup.loader:
        setup.step(x, y)
        ema.update(unwrapped(setup))
        checkpoint = None
    assert checkpoint is None
    tell(*ema.shadow.values())


SAVED = [saved_as_a_view, saved_as_it_is, saved_before_the_loop_as_a_view, saved_before_the_loop_as_it_is]


@pytest.mark.parametrize("main", SAVED)
def test_an_average_in_a_checkpoint_that_the_script_makes_is_no_new_one(main: Main) -> None:
    expected = quiet(main)
    for workers in some((1, 3), 1, main.__name__):
        same(main, expected, workers)
    for admitted in some((3, 1), 1, main.__name__):
        same(main, expected, 2, newcomers=1, asked_at=0, admit_at=admitted)


def test_a_tensor_too_large_to_be_kept_is_named_if_a_silent_turn_changes_it() -> None:
    with pytest.raises(
        NotInPlace, match=r"bank in large_and_changed, a tensor of 1,048,577 elements, was changed.*buffer of the model"
    ):
        threads.alone(large_and_changed)
    assert threads.together(4, large_and_changed).errors == {}
    threads.alone(large_and_left_alone)


@pytest.mark.parametrize("average", [Shadow, ThroughData])
def test_an_average_that_changes_before_the_gradients_are_reduced_is_named(average: type[Shadow]) -> None:
    for workers in (1, 4):
        outcome = threads.together(workers, lambda: under_accumulation(each_batch=True, average=average))
        assert outcome.errors
        for error in outcome.errors.values():
            assert isinstance(error, NotInPlace)
            assert ", an average of the weights, behind a backward() under no_sync()" in str(error)


class Wide(Setup):
    """Its weights are too long to be plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.model = DDP(nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 1)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)


def best_weights(*, before: bool, copied: Callable[[nn.Module], Any], use: Callable[[Wide, Any], object]) -> Main:
    """The best epoch is the second one."""

    def main() -> None:
        setup = Wide()
        best = copied(unwrapped(setup)) if before else None
        for epoch in range(3):
            setup.sampler.set_epoch(epoch)
            for x, y in setup.loader:
                setup.step(x, y)
            if epoch == 1:
                best = copied(unwrapped(setup))
        use(setup, best)
        tell(*setup.model.parameters())

    return main


def weights(model: nn.Module) -> Any:
    return copy.deepcopy(model.state_dict())


def load(setup: Wide, best: Any) -> None:
    unwrapped(setup).load_state_dict(best)


def load_of_a_copy(setup: Wide, best: Any) -> None:
    unwrapped(setup).load_state_dict(state_dict=best.state_dict())


def save(setup: Wide, best: Any) -> None:
    torch.save({"model": best}, io.BytesIO())


def test_best_weights_with_a_copy_before_the_loop_are_given_to_newcomers() -> None:
    main = best_weights(before=True, copied=weights, use=load)
    expected = quiet(main)
    for workers in (1, 2):
        same(main, expected, workers)
    for asked in (0, BATCHES, 2 * BATCHES):
        same(main, expected, 2, newcomers=1, asked_at=asked, admit_at=asked + 1)


@pytest.mark.parametrize(("copied", "use"), [(weights, load), (copy.deepcopy, load_of_a_copy), (weights, save)])
def test_best_weights_of_an_epoch_that_a_newcomer_has_passed_by_are_named(
    copied: Callable[[nn.Module], Any], use: Callable[[Wide, Any], object]
) -> None:
    main = best_weights(before=False, copied=copied, use=use)
    expected = quiet(main)
    same(main, expected, 2)
    same(main, expected, 2, newcomers=1, asked_at=BATCHES, admit_at=BATCHES + 1)
    errors = threads.together(2, main, newcomers=1, asked_at=2 * BATCHES, admit_at=2 * BATCHES + 1).errors
    assert isinstance(errors["n0"], ConfigError)
    assert "best.0.weight in best_weights.<locals>.main" in str(errors["n0"])
    assert "`best = copy.deepcopy(model.state_dict())`" in str(errors["n0"])


def test_weights_that_a_newcomer_has_loaded_are_not_named(tmp_path: Path) -> None:
    def main() -> None:
        setup = Wide()
        for epoch in range(3):
            setup.sampler.set_epoch(epoch)
            for x, y in setup.loader:
                setup.step(x, y)
            torch.save(unwrapped(setup).state_dict(), tmp_path / "best.pt")
        best = torch.load(tmp_path / "best.pt")
        unwrapped(setup).load_state_dict(best)
        tell(*setup.model.parameters())

    same(main, quiet(main), 2, newcomers=1, asked_at=2 * BATCHES, admit_at=2 * BATCHES + 1)
