"""Lightning's strategy for logical ranks: what its loops ask for, who writes, and what the ranks compute.

At the last place of a step, `optimizer_step` computes this worker's ranks by Lightning's own training step. Then
Lightning calls its closure, as it always does: it gets the loss of all ranks, and has what they have logged.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from elastic.errors import ConfigError
from elastic.protocol.loop_state import ScriptStage
from runtime.frontends.ddp.rank_script import RankScript
from runtime.frontends.frameworks.lightning import parts
from runtime.frontends.frameworks.lightning.evaluation import BatchPlace, EvaluationPlaces, batch_size_of, evaluated
from runtime.frontends.frameworks.lightning.refusals import (
    check_batch,
    check_evaluation,
    check_training,
    check_validations,
)
from runtime.frontends.frameworks.lightning.state import LightningState, LoggerRows, rows_of
from runtime.frontends.frameworks.rank_batches import RankBatches
from runtime.frontends.frameworks.step_loop import StepLoop
from runtime.frontends.frameworks.trackers.runs import share_run
from runtime.loop.step import Step


class LeaderRank(int):
    """In the place of rank_zero_only.rank: at each moment it is 0 in the leader and 1 in all others."""

    leads: Callable[[], bool]

    @property
    def now(self) -> int:
        return 0 if self.leads() else 1

    def __eq__(self, other: object) -> bool:
        return self.now == other

    def __ne__(self, other: object) -> bool:
        return self.now != other

    def __gt__(self, other: int) -> bool:
        return self.now > other

    def __lt__(self, other: int) -> bool:
        return self.now < other

    def __bool__(self) -> bool:
        return self.now != 0

    def __repr__(self) -> str:
        return str(self.now)

    __hash__ = int.__hash__


class FitStage(Enum):
    """How far a call of fit() is."""

    SETS_UP = "modules, optimizers and the checkpoint"
    RUNS = "it sets up its data"
    TRAINS = "it has its training data"


class StepPlaces:
    """The training batches of one epoch, as Lightning's loop asks for them."""

    def __init__(self, loader: DataLoader[Any], take: Callable[[], None]) -> None:
        self.loader = loader
        self.dataset, self.batch_size = loader.dataset, loader.batch_size
        self.sampler, self.batch_sampler = loader.sampler, loader.batch_sampler
        self._batches = len(loader)
        self._take = take

    def __len__(self) -> int:
        """All batches of a rank: Lightning applies its limit to this."""
        return self._batches

    def __iter__(self) -> Iterator[BatchPlace]:
        for number in range(self._batches):
            self._take()
            yield BatchPlace(self, number)


class RankStrategy:
    """The strategy's methods; the class that `install` makes has ParallelStrategy of the imported Lightning behind
    it."""

    base: Any
    _lightning_module: Any
    optimizers: list[Any]
    precision_plugin: Any
    checkpoint_io: Any
    lr_scheduler_configs: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.script = RankScript.running()
        self.loop = StepLoop(self.script, lambda: self._trainer.callbacks)
        self._behind = self.loop.next_goes_on
        """This worker has still to be told what others, or an earlier run, have."""
        self._is_set_up = False
        self._fit = FitStage.SETS_UP
        self._source: RankBatches | None = None
        self._state: LightningState | None = None
        self._files: list[LoggerRows] = []
        self._epoch = -1
        self._entering = False
        self._said: list[parts.Record] | None = None
        self._loss = 0.0
        self._broadcasts = 0
        self._replaced: dict[str, Any] = {}
        """Hooks of the module that are replaced while it trains, each with the one that was set in the instance."""

    # Who this is

    @property
    def root_device(self) -> torch.device:
        return self.script.job.device

    @property
    def is_distributed(self) -> bool:
        """Lightning gives the training loader alone a DistributedSampler: all else is computed once, not by rank."""
        return bool(self._trainer is not None and self._trainer.training)

    @property
    def is_global_zero(self) -> bool:
        if self._behind or self.script.training.session.world_size == 0 or self.script.rank_now != 0:
            return False  # who is no member of any world yet has no rank
        for file in self._files:
            file.lead()  # it may lead since this moment, in the middle of a step
        return True

    @property
    def global_rank(self) -> int:
        return 0 if self.is_global_zero else max(1, self.script.home)

    @property
    def local_rank(self) -> int:
        return int(os.environ["LOCAL_RANK"])

    @property
    def world_size(self) -> int:
        return self.script.ranks

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.script.ranks, "rank": 0}

    @property
    def _trainer(self) -> Any:
        module = self._lightning_module
        return None if module is None else module._trainer

    def set_world_ranks(self) -> None:
        """Called when the strategy is connected with its trainer."""
        rank = LeaderRank()
        rank.leads = lambda: self.is_global_zero
        sys.modules["lightning_utilities.core.rank_zero"].rank_zero_only.rank = rank

    def setup_environment(self) -> None:
        self.base.setup_environment(self)
        trainer = self._trainer
        trainer._signal_connector.register_signal_handlers = lambda: None  # this worker ends by its agent's word
        if self._is_set_up:
            return
        self._is_set_up = True
        self.broadcast("")  # behind it, this worker is a member or a newcomer
        for logger in trainer.loggers:
            if vars(logger).get("_version", "") is None:
                logger._version = self.broadcast(logger.version)
            share_run(logger, self.broadcast)
            if (rows := rows_of(logger, lambda: self.is_global_zero)) is not None:
                self._files.append(rows)

    def model_to_device(self) -> None:
        self._lightning_module.to(self.root_device)

    # What all do together

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """All workers make the same calls, and nobody has to wait."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What the leader has. Between the beginning of a step and its gradients, and in what is done once, it is what
        this worker has: all have the same there."""
        script = self.script
        if not script.begun:
            self._broadcasts += 1
            return script.job.shared(f"Lightning's broadcast {self._broadcasts}", lambda: obj)
        at = script.training.at
        if script.training.calls.leaders is not None:
            return obj
        in_loop = at.stage is not ScriptStage.AFTER_STEPS
        if in_loop and (self._behind or at.early or at.elsewhere or self._epoch < 0):
            return obj
        return script.job.agree(obj)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Every worker has what all ranks have together already."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """A row for the one that stands for all ranks. Raises ConfigError in training_step()."""
        if torch.is_grad_enabled() and self.script.training.at.in_pass:
            raise ConfigError("all_gather() in training_step() cannot train in place; use self.log(), or --restart")
        return tensor.unsqueeze(0)

    # Training

    def process_dataloader(self, dataloader: Any) -> Any:
        trainer = self._trainer
        if isinstance(dataloader, StepPlaces):  # that of an earlier call, which Lightning has put into a CombinedLoader
            dataloader = dataloader.loader
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        if not trainer.training:
            if not isinstance(dataloader, DataLoader) or isinstance(dataloader.dataset, IterableDataset):
                return dataloader  # each worker goes through all of it
            if dataloader.batch_sampler is None:
                return dataloader
            check_evaluation(trainer, self._lightning_module)
            return EvaluationPlaces(dataloader, self.world_size, seed, by_rank=not trainer.predicting)
        if self._fit is FitStage.SETS_UP:  # a hook asks for trainer.estimated_stepping_batches
            sized = isinstance(dataloader, DataLoader) and not isinstance(dataloader.dataset, IterableDataset)
            return StepPlaces(dataloader, self._take) if sized else dataloader
        check_training(self, dataloader, more=self._source is not None)
        limit = trainer.limit_train_batches
        batches = len(dataloader)
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        self._source = RankBatches(dataloader, self.world_size, trainer.accumulate_grad_batches, seed, batches)
        check_validations(trainer, batches)
        self._begin()
        return StepPlaces(dataloader, self._take)

    def _begin(self) -> None:
        trainer, module = self._trainer, self._lightning_module
        objects = parts.objects_of(self, trainer)

        def files_before() -> list[str]:
            return parts.checkpoints_in(trainer.callbacks)

        registered = list(objects.values())
        self._state = LightningState(trainer, self._files, lambda: parts.metrics_of(module), registered, in_place=True)
        if not self.script.begun:
            self._state.before = self.script.job.shared("files before", files_before)
        elif not self._behind:  # else it comes with the state
            self._state.before = self.script.job.once(files_before)
        self._fit, self._epoch = FitStage.TRAINS, -1
        assert self._source is not None
        if not self.loop.begin(self._source, self._state, objects):
            return  # Lightning finds its loop at its end
        # Lightning's closure would set to zero what all ranks have computed. Gradients begin with each rank.
        self._replace(module, "optimizer_zero_grad", lambda *args, **kwargs: None)
        begins = module.on_train_batch_start

        def on_train_batch_start(*args: Any, **kwargs: Any) -> Any:
            answer = begins(*args, **kwargs)
            if answer == -1:  # Lightning ends this epoch
                self.loop.withdraw()
            return answer

        self._replace(module, "on_train_batch_start", on_train_batch_start)

    def _replace(self, module: Any, hook: str, function: Callable[..., Any]) -> None:
        """Have this in the place of a hook of the module, until fit() returns."""
        self._replaced[hook] = vars(module).get(hook)
        setattr(module, hook, function)

    def _take(self) -> None:
        """Lightning's loop asks for a batch: at the first one of a step, the step begins."""
        trainer, loop = self._trainer, self.loop
        fit = trainer.fit_loop
        if not isinstance(fit._combined_loader.iterables, StepPlaces):
            raise ConfigError(
                "Lightning with a list or dictionary of training loaders cannot train in place; give it one DataLoader"
            )
        progress = fit.epoch_loop.batch_progress.current
        assert self._state is not None
        if loop.entered:
            self._entering = True
            loop.enter(self._shard)
            self._state.put_back()
            self._entering = self._behind = loop.entered = False
            self._state.found = None
            fit._data_fetcher.fetched, self._epoch = progress.ready, loop.epoch
        elif progress.ready % trainer.accumulate_grad_batches:
            return
        elif self._epoch != (epoch := fit.epoch_progress.current.processed):
            loop.begin_epoch(epoch, progress.ready // trainer.accumulate_grad_batches)
            self._epoch = epoch
        if not loop.next():
            raise SystemExit(0)  # the job is stopped

    def _shard(self, batches: list[Any], step: Step) -> None:
        """Compute the gradients of one rank in a step. batches: its micro-batches."""
        if self._state is not None and not self.loop.entered:
            self._state.long.look()
        module, ready = self._lightning_module, self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        first = ready if self._entering else ready - 1 - (ready - 1) % self._trainer.accumulate_grad_batches
        means: dict[str, float] = {}
        total = 0.0
        with parts.attributes(module) as changed:  # a micro-batch finds what those before it have left
            for number, batch in enumerate(batches):
                record = parts.Record()
                total += self._micro_batch(batch, first + number, record)
                means.update(parts.tell(step, module, number, record))
        parts.tell(step, module, len(batches) - 1, changed)
        step.log(mean={**means, "loss": total})

    def _micro_batch(self, batch: Any, number: int, record: parts.Record) -> float:
        """Add the gradients of a batch of one rank. number: in its epoch. record: gets what it logs. Returns the
        loss."""
        trainer, module = self._trainer, self._lightning_module
        loop = trainer.fit_loop.epoch_loop
        if batch is None:
            raise ConfigError(
                "the training loader gave None for a batch: Lightning leaves such a batch out in one process only. "
                "Leave these samples out of the dataset"
            )
        batch = self.transferred(batch, 0)
        kwargs = loop._build_kwargs(OrderedDict(), batch, number)
        with parts.logs(record, trainer, module, loop, batch_size_of(trainer, batch)):
            result = loop.automatic_optimization._training_step(kwargs)
            if result.closure_loss is None:
                raise ConfigError(
                    "training_step() returned None: Lightning leaves out such a batch in one process only. Return "
                    "a loss, for example the sum of the outputs times 0.0"
                )
            self.base.backward(self, result.closure_loss, self.optimizers[0])
        return float(result.loss)

    def transferred(self, batch: Any, dataloader_idx: int) -> Any:
        batch = self.precision_plugin.convert_input(batch)
        batch = self._lightning_module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
        return self.batch_to_device(batch, dataloader_idx=dataloader_idx)

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, BatchPlace):
            return batch
        return self.base.batch_to_device(self, batch, device=device, dataloader_idx=dataloader_idx)

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """For a place: the loss of the step, behind its last batch; all ranks' gradients are in place then."""
        if not isinstance(batch, BatchPlace):
            return self.base.training_step(self, batch, *args, **kwargs)
        results = self._trainer.fit_loop.epoch_loop._results
        results.batch_size = batch.loader.batch_size or 1
        if self._said is None:
            return torch.zeros((), device=self.root_device)
        for record in self._said:
            parts.have(self._lightning_module, record)
        return torch.tensor(self._loss * self._trainer.accumulate_grad_batches, device=self.root_device)

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Lightning's own call, behind training_step() for a place: there is nothing to do."""
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        said = self.loop.run(self._shard)
        self._loss = said["loss"]
        self._said = parts.told(self._lightning_module, said, self.world_size)
        try:
            return self.base.optimizer_step(self, optimizer, closure, model, **kwargs)
        finally:
            self._said = None

    def begin_run(self) -> None:
        """Lightning's loop begins. What hooks have asked for before is no part of the training."""
        self._fit = FitStage.RUNS
        self._trainer.fit_loop._combined_loader = None

    def on_train_end(self) -> None:
        self.loop.end()

    def begin_fit(self) -> bool:
        """fit() was called. Returns whether others, or an earlier run, have begun it. Raises ConfigError behind a fit()
        that an exception has ended."""
        if self.script.begun:
            self.script.training.check_between_loops()
        self._behind, self._fit = self.loop.next_goes_on, FitStage.SETS_UP
        return self._behind

    def end_fit(self) -> None:
        """fit() is about to return."""
        if self._fit is not FitStage.TRAINS:
            return
        assert self._source is not None
        self.loop.end()
        self._source.close()
        self._source = None
        for name, own in self._replaced.items():
            delattr(self._lightning_module, name)
            if own is not None:
                setattr(self._lightning_module, name, own)
        self._replaced.clear()
        self.loop.close()
        self._behind = self.loop.next_goes_on

    # Evaluation

    def validation_step(self, batch: Any, *args: Any) -> Any:
        return self._evaluated("validation", batch, args)

    def test_step(self, batch: Any, *args: Any) -> Any:
        return self._evaluated("test", batch, args)

    def predict_step(self, batch: Any, *args: Any) -> Any:
        return self._evaluated("predict", batch, args)

    def _evaluated(self, stage: str, place: Any, args: tuple[Any, ...]) -> Any:
        if isinstance(place, BatchPlace):
            return evaluated(self, stage, place, args)
        check_batch(place, stage)
        return getattr(self.base, f"{stage}_step")(self, place, *args)

    # Checkpoints of Lightning's own

    def file_exists(self, path: str) -> bool:
        """Whether Lightning has to take another name: what this job wrote in steps that were lost does not count."""
        return self._state is not None and (path in self._state.before or path in self._state.written)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Written by the leader; by the next one if it dies meanwhile."""

        def save() -> None:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

        self._by_leader(save)
        if self._state is not None and str(filepath) not in self._state.written:
            self._state.written.append(str(filepath))

    def remove_checkpoint(self, filepath: Any) -> None:
        def remove() -> None:
            self.checkpoint_io.remove_checkpoint(filepath)

        self._by_leader(remove)
        if self._state is not None and str(filepath) in self._state.written:
            self._state.written.remove(str(filepath))

    def _by_leader(self, act: Callable[[], None]) -> None:
        if self.script.training.examiner is not None or self._trainer.state.status == "interrupted":
            return  # others do not come here
        if self.script.passing:
            return  # the others have done it
        if self.script.begun:
            self.script.job.once(act)
        elif self.is_global_zero:
            act()

    def teardown(self) -> None:
        """The model stays on its device: the job writes its last checkpoint from there."""
        self.precision_plugin.teardown()

    # Copies

    def __deepcopy__(self, memo: object) -> RankStrategy:
        """There is one job: the copy of a Trainer has the strategy of its original."""
        return self
