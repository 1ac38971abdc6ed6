"""The job as a training script sees it: `elastic.join()` and everything it returns.

One Job a process. It checks arguments, and leaves the order of things to Training and the numbers to the rest.

    job.py       what belongs to the state, the loop, hooks, the end
    collectives.py  who is there, and what all workers do together between passes: Job's base
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike

from elastic.agent.worker.examination import EPOCH_STEPS
from elastic.checkpoints.settings import Settings
from elastic.errors import CheckpointError, ConfigError, UsageError
from elastic.protocol.sampling import Tail
from runtime.data.loader import Loader, check_count, check_seed
from runtime.data.stream import Open, Stream
from runtime.guards import checks
from runtime.job import process_start
from runtime.job.collectives import Collectives
from runtime.job.control_scalars import RESERVED
from runtime.job.leader_hooks import Sink
from runtime.job.loops import Epochs, Extent, Steps, shards_of, steps_of
from runtime.job.passes import Gradients, Nonfinite, PassWork, Source
from runtime.job.training import Loop, Training, empty_leaf
from runtime.script_end import ScriptEnd
from runtime.session import Op, OpKind, Session
from runtime.state.script_state import Values
from runtime.state.small_values import Number, as_number

_current: Job | None = None


def join(*, seed: int = 0, device: str | torch.device | None = None, threads: int | None = None) -> Job:
    """Become a worker of the job; called once, before models are built.

    seed: seeds torch, numpy and random, so that all workers build equal models. device: where batches go; "cuda" is
    this worker's own CUDA device, and the default where there is CUDA, else "cpu". threads: for torch.set_num_threads;
    the bits of the result depend on it, so the default is the same on every machine: what `elastic run --threads`
    says, else 1. Use the job as a context manager, or just use it: it is closed when the script ends.

    Raises ConfigError for bad arguments and a second join, NotUnderElastic under a launcher of many processes.
    """
    job = begin(seed=seed, device=device, threads=threads)
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
    return job


def begin(
    *,
    seed: int = 0,
    device: str | torch.device | None = None,
    threads: int | None = None,
    close: Callable[[], None] | None = None,
) -> Job:
    """As `join`, but the random numbers stay where the script has put them. close: what ends the job when the script
    ends (default: its own `close`)."""
    global _current
    if _current is not None:
        raise ConfigError("elastic.join() was called twice; call it once and pass the job on")
    threads = process_start.threads(threads)
    check_seed(seed)
    chosen = process_start.device(device)
    torch.set_num_threads(threads)
    job = Job(process_start.session(threads, chosen), seed=seed, threads=threads, device=chosen)
    job._script_end = ScriptEnd(close or job.close, job._fail)
    _current = job
    return job


class Job(Collectives):
    """One worker's view of the job. Made by `elastic.join()`."""

    def __init__(self, session: Session, *, seed: int, threads: int, device: torch.device) -> None:
        checkpoints = Settings.from_environment(os.environ)
        super().__init__(session, Training(session, seed=seed, threads=threads, device=device, checkpoints=checkpoints))
        self._sources: list[Source] = []
        self._epochs = 0
        self._closed = False
        self._several = session.joining or session.world_size > 1
        """When it came; the others may have ended, or failed, before it does."""
        self._script_end: ScriptEnd | None = None

    # What is copied to newcomers

    @property
    def state(self) -> Values:
        """The script's own values, by attribute; see Values."""
        return self._training.values

    def register(self, *, buffers: Mapping[str, str] | None = None, **objects: object) -> None:
        """Name what belongs to the state: models, optimizers, schedulers, anything with state_dict().

        buffers: qualified name ("model.queue") -> "mean" or "first", for buffers other than BatchNorm's which change
        in training. Raises ConfigError (after the first step, a name twice, nothing to train) and NotCarried.
        """
        self._training.carrier.register(buffers, **objects)

    def digest(self) -> str:
        """SHA-256, in hex, over (name, dtype, shape, bytes) of everything registered and job.state, in name order."""
        self._training.check_outside_pass("digest()")
        return self._training.carrier.digest()

    # The loop

    def loader(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shards: int,
        shuffle: bool = False,
        seed: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        tail: Tail = "drop",
        weights: ArrayLike | torch.Tensor | None = None,
        workers: int = 0,
    ) -> Loader:
        """Batches of a map-style dataset, split into shards. len() is the number of steps of an epoch.

        batch_size: samples of ONE optimizer step, over all workers. shards: into how many parts it is split, which
        is the largest number of workers that can help, and is fixed for the job. seed: of the order (default: the
        job's). collate: list of samples -> batch. transform: sample -> sample, with seeded RNGs. tail: what happens
        to samples that fill no whole step: "drop", or "pad" with samples from the start of the epoch's order.
        weights: one number a sample, shape (samples,): each place of an epoch draws its sample by them, with
        replacement; 0 is never drawn.
        workers: processes that fetch ahead, kept over epochs and changes of the world; 0: none, this process fetches.
        Raises ConfigError.
        """
        loader = Loader(
            dataset,
            batch_size,
            shards=shards,
            shuffle=shuffle,
            seed=self._training.seed if seed is None else seed,
            collate=collate,
            transform=transform,
            tail=tail,
            weights=weights,
            # Under examination shards run in copies of this process, which cannot share the fetching ones.
            workers=0 if self._training.examiner is not None else workers,
            device=self.device,
        )
        self._training.claim_shards(shards)
        self._sources.append(loader)
        self.print(loader.describe())
        return loader

    def stream(self, open: Open, *, shards: int) -> Stream:
        """Data that is read from front to back, one stream a shard; give it to steps() like a loader.

        open: `open(shard, epoch, skip)` returns an iterator over the batches of that shard in that epoch behind the
        first `skip`, which are used up. Any worker may call it at any step, and must find the same batches each time.
        Random numbers drawn while a batch is read belong to that batch. An iterator that is not needed any more is
        closed, if it has close(). An epoch ends for all shards with the last batch of the shortest one. Raises
        ConfigError.
        """
        stream = Stream(open, shards=shards, seed=self._training.seed, device=self.device)
        self._training.claim_shards(shards)
        self._sources.append(stream)
        self.print(stream.describe())
        return stream

    def epochs(self, n: int) -> Epochs:
        """The outer loop, `for epoch in job.epochs(n)`. A newcomer starts in the epoch that is in progress."""
        self._epochs = check_count("epochs", n)
        return Epochs(self._training, n)

    def steps(
        self,
        data: Source | None = None,
        *,
        shards: int | None = None,
        total: int | None = None,
        epochs: int | None = None,
        gradients: Gradients = "mean",
        nonfinite: Nonfinite = "pass",
        allow: Collection[str] = (),
    ) -> Steps:
        """The loop over optimizer steps, `for step in job.steps(train)`.

        Inside epochs(): one epoch of the data. Alone: `total=` steps or `epochs=` epochs; of a stream at most `total=`
        steps of its epoch 0. Without data: `shards=` and `total=` (inside epochs(): of each epoch), and the body draws
        its own batches from the seeded RNGs.
        gradients: "mean" over the shards by weight, or their "sum". nonfinite: what becomes of a pass whose reduced
        gradient is infinite or undefined somewhere: "pass" it on, as GradScaler needs it; "skip" it, so that parameters
        have no gradient and buffers stay; or "stop" the job with NonFinite. All workers decide alike, and the step's
        metrics count it as "elastic.nonfinite". allow: guards to turn off, by name.
        Raises ConfigError for arguments that do not go together, SecondLoop for a loop after another.
        """
        training = self._training
        shards = shards_of(data, shards)
        if gradients not in ("mean", "sum"):
            raise ConfigError(f'gradients={gradients!r} must be "mean" or "sum"')
        if nonfinite not in get_args(Nonfinite):
            raise ConfigError(f'nonfinite={nonfinite!r} must be "pass", "skip" or "stop"')
        work = PassWork(shards, data, gradients, checks.check_allow(allow), nonfinite)
        inside = training.loop is Loop.EPOCHS
        per_epoch, count = steps_of(data, total, epochs, inside)
        if inside and training.examiner is not None:
            count = min(EPOCH_STEPS, count or EPOCH_STEPS)
            per_epoch = count if per_epoch is not None else None
        training.claim_shards(shards)
        first = training.begin_steps(data.about() if data is not None else None)
        if first == 0 and self.world_size > shards:
            idle = self.world_size - shards
            self.print(f"{self.world_size} workers for {shards} shards: {idle} are idle, without a shard")
        if inside:
            left = self._epochs - training.epoch
            last = None if per_epoch is None else first + left * per_epoch
            extent = Extent(first, training.epoch, per_epoch, count, last)
        else:
            extent = Extent(first, 0, per_epoch, count, count)
        training.plan_steps(extent.total, shards)
        return Steps(training, work, extent)

    def log(self, **values: Number) -> None:
        """Record scalars of the whole job, say of an evaluation, in the record of the step in progress or, between two,
        of the last one: beside what `step.log` gave, and so in `steps.jsonl` and in all sinks.

        All workers call it with the same values, as `evaluate`, `step.metrics`, `once` and `agree` give them: numbers,
        or tensors of one element. What is logged before the first step is in its record. A record is closed when the
        next step is handed out, or the script ends. Raises UsageError inside a pass, before the loop, and for a name
        that was logged for this step already; Disagree if the workers' values differ.
        """
        for name in values:
            if name.startswith(RESERVED):
                raise UsageError(f"job.log: names that start with {RESERVED!r} are reserved; rename {name!r}")
        self._training.log({name: as_number(value, f"job.log: {name}") for name, value in values.items()})

    def stop(self, because: str) -> None:
        """End the training: travels with the next reduction; all workers leave both loops after the same step."""
        self._training.riders.stop(str(because))

    # What it wants to be told

    def on_resize(self, hook: Callable[[int, int, str], None]) -> None:
        """`hook(old, new, because)` on every member between two steps, when the world has another size since the last.

        The global batch, the learning rate and the bits do not depend on the size; this is for what only watches.
        """
        self._training.changes.resize_hooks.append(hook)

    def on_drain(self, hook: Callable[[float, str], None]) -> None:
        """`hook(seconds_left, because)` on a worker whose node has to go, once for each notice.

        Called between two steps, or, if the job goes on without this worker before that, when it leaves: then the
        parameters are those with which the step in progress began. After seconds_left the machine may be gone. The
        notice may come to nothing, and this worker go on.
        """
        self._training.changes.drain_hooks.append(hook)

    def on_checkpoint(self, hook: Callable[[Path, int], None]) -> None:
        """`hook(directory, step)` on rank 0 when a checkpoint is taken: files it leaves there become part of it."""
        self._training.checkpoints.checkpoint_hooks.append(hook)

    def on_restore(self, hook: Callable[[dict[str, Any]], None]) -> None:
        """`hook({"step", "epoch", "state"})` on a newcomer and in a resumed run, before tensors are copied: rebuild
        here what the script changes while it trains (unfreeze layers, add parameter groups). state: the values of
        job.state that hold no tensors, by name."""
        self._training.checkpoints.restore_hooks.append(hook)

    def log_to(self, sink: Sink) -> None:
        """Give the record of every applied step to a sink, once and in order: `elastic.JsonLines(path)`,
        `elastic.TensorBoard(directory)`, or your own with the three methods of Sink in runtime/job/leader_hooks.py.

        All workers call it, before the loop; the leader writes, and when it dies the next one goes on where the sink
        ended, with what is missing taken from the ledger. Raises ConfigError if the sink holds another run.
        """
        if self._training.examiner is None:  # steps of an examination are not the run's
            self._training.leading.add(sink, self)

    def on_lead(self, hook: Callable[[], None]) -> None:
        """`hook()` on a worker that has become the leader, the first one too, between two steps or before the first.

        Nothing that needs all workers may be called in it, and nothing changed that training depends on.
        """
        self._training.leading.hooks.append(hook)

    # The end

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.close()
        else:
            self._fail(error)
        return False

    def close(self) -> None:
        """Leave the job together with all workers; called by itself when the script or the `with` block ends.

        Raises NoGradient if the last pass was left before its end, NoSteps if there are several workers and they have
        done nothing together, CheckpointError if a save() was not written.
        """
        if self._closed:
            return
        try:
            self._training.leave_step()
            self._training.check_outside_pass("close()")
            if self._several and self._training.idle:
                raise checks.no_steps()
            self._training.checkpoints.finish()
            if not self._session.joining:
                op = Op(OpKind.LEAVE, 1, self._training.epoch, self._training.next_step)
                self._training.run(op, self._training.logged(), empty_leaf)
                self._training.tell()
                self._training.lead()
                self._training.leading.close()
            self._session.close(self._training.carrier.digest())
        except BaseException as error:
            self._fail(error)
            raise
        self._detach()
        if failures := self._training.checkpoints.failures:
            raise CheckpointError("; ".join(failures))

    def _fail(self, error: BaseException) -> None:
        """The script ends with an exception: nothing is applied any more, and nobody waits for the others."""
        if self._closed:
            return
        self._detach()
        self._session.failed(error, self._training.next_step, self._training.running)

    def _detach(self) -> None:
        global _current
        self._closed = True
        for source in self._sources:
            source.close()
        self._training.close()
        if self._script_end is not None:
            self._script_end.ignore()
            self._script_end = None
        if _current is self:
            _current = None
