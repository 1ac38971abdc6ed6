"""The batches of a DataLoader that accelerate has prepared, for any rank, and the training loop over them."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from elastic.errors import ConfigError, ReadAhead
from runtime.data.loader import seed_fetch
from runtime.data.random_state import randomness_kept
from runtime.frontends.ddp import mistakes
from runtime.frontends.ddp.batches import TrainingBatches
from runtime.frontends.ddp.rank_script import RankScript, Turn
from runtime.frontends.ddp.rank_source import Position
from runtime.frontends.ddp.sampler_source import ListedSource, seed_again
from runtime.frontends.frameworks.rank_batches import split

AGAIN = "again"
"""Name of what a source says for those who come later: how often loops have begun with its epoch before."""


class TurnState(Protocol):
    """What accelerate counts in a turn."""

    def note(self) -> None:
        """A pass begins."""

    def put_back(self) -> None:
        """Another turn of this pass begins."""


class PreparedBatches(ListedSource):
    """One epoch of a DataLoader that accelerate has prepared. Its samplers draw once, when this object is made."""

    def __init__(self, loader: Any, ranks: int, position: Position, again: int = 0) -> None:
        """again: how often a loop has begun with the loader's epoch before this one, as behind one that was left by
        `break`, which accelerate does not count. Raises ConfigError for ranks with unequally many batches."""
        self._epoch = int(loader.iteration)
        self._again = again
        self._prepared = loader
        with randomness_kept():
            seed_fetch(self.seed, self._epoch, -1, 0)  # some draw from the global generators, alike in all ranks
            batches = drawn(loader, ranks)
        if len({len(own) for own in batches}) != 1:
            raise ConfigError(f"the ranks have {list(map(len, batches))} batches; leave even_batches on")
        super().__init__(loader, batches, position)

    @classmethod
    def of_evaluation(cls, loader: Any, script: RankScript) -> PreparedBatches:
        """For an evaluation. Its order depends on the step, and not on how often a sampler has drawn: newcomers, and
        workers with fewer ranks, draw less often."""
        if not script.begun:
            return cls(loader, script.ranks, Position())
        sampler = sampler_within(loader)
        generator, epoch = getattr(sampler, "generator", None), getattr(sampler, "epoch", None)
        state = generator.get_state() if generator is not None else None
        if generator is not None:
            generator.manual_seed(script.training.seed + script.training.at.step)
        try:
            return cls(loader, script.ranks, Position())
        finally:
            if generator is not None:
                generator.set_state(state)
            if epoch is not None:
                sampler.set_epoch(epoch)

    @property
    def seed(self) -> int:
        return seed_again(0, self._again)

    @property
    def epoch(self) -> int:
        return self._epoch

    def about(self) -> dict[str, Any]:
        about = super().about()
        return {**about, AGAIN: self._again} if self._again else about

    def fetch_ahead(self, number: int, rank: int, own: tuple[int, ...] | None) -> Any:
        return self.to_device(super().fetch_ahead(number, rank, own))

    def to_device(self, batch: Any) -> Any:
        """The batch on the loader's device, where processes that fetch ahead put nothing."""
        loader = self._prepared
        if loader.device is None:
            return batch
        return operations().send_to_device(batch, loader.device, non_blocking=loader._non_blocking)


def operations() -> Any:
    """accelerate's module of that name, which the script has imported."""
    return sys.modules["accelerate.utils.operations"]


def sampler_within(loader: Any) -> Any:
    """The sampler that draws the samples of all ranks."""
    found = loader.batch_sampler
    while hasattr(found, "batch_sampler"):
        found = found.batch_sampler
    return getattr(found, "sampler", None)


def drawn(loader: Any, ranks: int) -> list[list[list[int]]]:
    """Rank -> its batches of the next epoch, each a list of indices. Raises ConfigError for a loader whose batches
    accelerate has not split."""
    sharded, skipped = loader.batch_sampler, 0
    while type(sharded).__name__ == "SkipBatchSampler":
        sharded, skipped = sharded.batch_sampler, skipped + sharded.skip_batches
    if not hasattr(sharded, "process_index"):
        if ranks > 1:
            raise ConfigError(
                f"accelerate has not split the batches of this DataLoader of {type(loader.dataset).__name__}: give "
                "accelerator.prepare() one with a batch_size, of a dataset with __len__ and __getitem__, and leave "
                "dispatch_batches out"
            )
        return [[list(batch) for batch in sharded][skipped:]]
    if sharded.num_processes != ranks:
        raise ConfigError(f"the DataLoader was prepared for {sharded.num_processes} processes, and the job has {ranks}")
    return [batches[skipped:] for batches in split(sharded, ranks)]


class PreparedTraining(TrainingBatches):
    """One epoch of training batches, with what accelerate says of each."""

    def __init__(self, script: RankScript, loader: Any, state: TurnState) -> None:
        loader.begin()
        loader.set_epoch(loader.iteration)
        self._loader = loader
        self._state = state
        self._source: PreparedBatches | None = None
        self._again = script.epochs.again(loader, int(loader.iteration))
        super().__init__(script, self._made)

    def _made(self, position: Position) -> PreparedBatches:
        """A worker that comes later does not know which of the earlier epochs the script has left early: accelerate
        does not count those."""
        there = self._script.data_of_others
        if there is not None and "sampler_epoch" in there:
            self._loader.set_epoch(there["sampler_epoch"])
            self._again = int(there.get(AGAIN, 0))
            self._script.epochs.told(self._loader, there["sampler_epoch"], self._again)
        self._source = PreparedBatches(self._loader, self._script.ranks, position, self._again)
        return self._source

    def __next__(self) -> Any:
        script, loader = self._script, self._loader
        try:
            batch = super().__next__()
        except StopIteration:
            loader.iteration += 1
            loader.end()
            raise
        except ReadAhead:
            if script.objects.wrapped:
                raise
            raise mistakes.not_in_place(
                "A loop over a DataLoader that accelerate has prepared, where it has prepared no model,",
                "If the loop trains, give the model to accelerator.prepare() before it; if not, write it under "
                "torch.no_grad(), as an evaluation, and not inside of another one.",
            ) from None
        source = self._source
        assert source is not None
        number = script.number
        loader.end_of_dataloader = number == len(source) - 1
        if script.turn is Turn.OFFERED or (source.before and len(script.turned) == 1):
            self._state.note()
        elif script.turn is Turn.OPEN and number == source.first + source.before:
            self._state.put_back()
        return batch
