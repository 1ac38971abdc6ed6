"""The job as a training script sees it: `elastic.join()` and the Job that it returns.

There is one Job per process. It checks arguments; Training holds the order of calls, other modules the numbers.

        job.py          the registered state, the loop, hooks, the end
        collectives.py  Job's base class: rank and world, and the calls that all workers make between passes
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

from elastic.agent.worker.environment import RANKS
from elastic.agent.worker.examination import EPOCH_STEPS
from elastic.agent.worker.node_notice import NOTICE_FILE, NodeNotice, kept_in
from elastic.checkpoints.settings import Settings
from elastic.errors import CheckpointError, ConfigError, UsageError
from elastic.protocol import shard_advice
from elastic.protocol.sampling import Tail
from runtime.data.loader import Loader, check_count, check_seed
from runtime.data.parquet import ParquetStream
from runtime.data.stream import Open, Stream
from runtime.guards import checks
from runtime.loop import process_start
from runtime.loop.collectives import Collectives
from runtime.loop.control_scalars import RESERVED
from runtime.loop.hooks.leader_hooks import Sink
from runtime.loop.loops import Epochs, Extent, Steps, shards_of, steps_of
from runtime.loop.passes import Gradients, Nonfinite, PassWork, Source
from runtime.loop.training import Training, empty_leaf
from runtime.outer import DiLoCo
from runtime.recovery.state.script_state import Values
from runtime.recovery.state.small_values import Number, as_number
from runtime.script_end import ScriptEnd
from runtime.session import Op, OpKind, Session

_current: Job | None = None
_latest: Job | None = None


def join(*, seed: int = 0, device: str | torch.device | None = None, threads: int | None = None) -> Job:
    """Become a worker of the job; to be called once, before models are built.

    seed: seeds torch, numpy and random, so that all workers build equal models. device: the device for batches; "cuda"
    is this worker's own CUDA device, and the default if there is CUDA, else "cpu". threads: for torch.set_num_threads;
    the bits of the result depend on it, so the default is the same on every machine: the value of `elastic run
    --threads`, else 1. The job may be used as a context manager; else it is closed when the script ends.

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
    """As `join`, but without seeding the global random generators. close: called when the script ends to end the job
    (default: the job's own `close`)."""
    global _current, _latest
    if _current is not None:
        ranks = os.environ.get(RANKS, "0") != "0"
        raise ConfigError(
            "elastic.join() was called in a script that was started with --ranks; leave --ranks out"
            if ranks
            else "elastic.join() was called twice; call it once and pass the job on"
        )
    threads = process_start.threads(threads)
    check_seed(seed)
    chosen = process_start.device(device)
    torch.set_num_threads(threads)
    checkpoints = Settings.from_environment(os.environ)
    session = process_start.session(threads, chosen)
    job = Job(session, seed=seed, threads=threads, device=chosen, checkpoints=checkpoints)
    job._script_end = ScriptEnd(close or job.close, job._fail)
    _current = _latest = job
    return job


def current() -> Job | None:
    """The one of which this process is a worker."""
    return _current


def latest() -> Job | None:
    """The last one that this process has joined; it may be closed."""
    return _latest


def notice() -> NodeNotice | None:
    """The notice that this worker's node has to go, as `job.notice`, for code that has no job at hand: callbacks of a
    framework, scripts for torchrun, and scripts of --restart, which are processes of their own.

    None: the node stays, or the notice was taken back. None as well before the job is joined, after it is closed, and
    in a process that is no worker.
    """
    if _current is not None:
        return _current.notice
    path = os.environ.get(NOTICE_FILE)
    return kept_in(Path(path)) if path else None


class Job(Collectives):
    """One worker's view of the job. Made by `elastic.join()`."""

    def __init__(
        self, session: Session, *, seed: int, threads: int, device: torch.device, checkpoints: Settings
    ) -> None:
        super().__init__(session, Training(session, seed=seed, threads=threads, device=device, checkpoints=checkpoints))
        self._sources: list[Source] = []
        self._epochs = 0
        self._closed = False
        self._several = session.script.at.joining or session.world_size > 1
        """Whether there were other workers when this one came; they may have ended, or failed, before it does."""
        self._script_end: ScriptEnd | None = None

    # The state, which is copied to newcomers

    @property
    def state(self) -> Values:
        """The script's own values, by attribute; see Values."""
        return self._training.registered.values

    def register(self, *, buffers: Mapping[str, str] | None = None, **objects: object) -> None:
        """Register the objects that belong to the state: models, optimizers, schedulers, anything with state_dict().

        buffers: qualified name ("model.queue") -> "mean" or "first", for buffers other than BatchNorm's that change in
        training. Raises ConfigError (after the first step, a name twice, nothing to train) and NotCarried.
        """
        self._training.registered.register(buffers, objects)

    def digest(self) -> str:
        """SHA-256, in hex, over (name, dtype, shape, bytes) of everything registered and job.state, in name order."""
        self._training.calls.check_outside_pass("digest()")
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

        batch_size: samples of ONE optimizer step, over all workers. shards: number of parts of a batch; it limits the
        number of workers that can help, and is fixed for the job. seed: seed of the order (default: the job's).
        collate: list of samples -> batch. transform: sample -> sample, with seeded RNGs. tail: what happens to samples
        that fill no whole step: "drop", or "pad" with samples from the start of the epoch's order. weights: one number
        per sample, shape (samples,): samples are drawn by weight, with replacement; weight 0 is never drawn. workers:
        number of processes that fetch ahead, over epochs and changes of the world; 0: this process fetches. Raises
        ConfigError.
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
            # Under examination shards run in copies of this process, which cannot share the fetching processes.
            workers=0 if self._training.examiner is not None else workers,
            device=self.device,
        )
        first = self._training.agreement.shards is None
        self._training.agreement.claim_shards(shards)
        self._sources.append(loader)
        self.print(loader.describe())
        worlds = process_start.worlds() if first and self.is_leader else None
        if worlds is not None and (said := shard_advice.advice(shards, batch_size, worlds)):
            self.print(f"elastic: {said}; see docs/data.md")
        return loader

    def stream(self, open: Open | ParquetStream, *, shards: int) -> Stream:
        """Data that is read from front to back, one stream per shard; give it to steps() like a loader.

        open: `open(shard, epoch)` returns an iterator over the batches of that shard in that epoch; `open(shard, epoch,
        skip)` one without the first `skip`; or an elastic.ParquetStream. Any worker may call it at any step, and must
        get the same batches each time. Random numbers drawn while a batch is read belong to that batch, so an open()
        that gets `skip` must not draw any for what it skips. An iterator that is no longer needed is closed, if it has
        close().
        An epoch ends for all shards with the last batch of the shortest shard. Raises ConfigError.
        """
        stream = Stream(open, shards=shards, seed=self._training.seed, device=self.device)
        self._training.agreement.claim_shards(shards)
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
        outer: DiLoCo | None = None,
    ) -> Steps:
        """The loop over optimizer steps, `for step in job.steps(train)`.

        Inside epochs(): one epoch of the data. Alone: `total=` steps or `epochs=` epochs; with a stream at most
        `total=` steps of its epoch 0. Without data: `shards=` and `total=` (inside epochs(): per epoch), and the body
        draws its own batches from the seeded RNGs. gradients: "mean" over the shards by weight, or their "sum".
        nonfinite: what happens to a pass whose reduced gradient has an infinity or NaN: "pass" it on, as GradScaler
        needs it; "skip" it, so that parameters have no gradient and buffers stay; or "stop" the job with NonFinite. All
        workers decide alike, and the step's metrics count it as "elastic.nonfinite". allow: names of guards to turn
        off. outer: a step is a round of inner steps of each replica and one outer step (see DiLoCo); the inner loop
        hands out the batch of one inner step of one replica, and its body calls optimizer.step(). None: as `elastic run
        --outer` says, else no rounds.
        Raises ConfigError for arguments that do not go together, SecondLoop for a second loop.
        """
        training = self._training
        shards = shards_of(data, shards)
        if gradients not in ("mean", "sum"):
            raise ConfigError(f'gradients={gradients!r} must be "mean" or "sum"')
        if nonfinite not in get_args(Nonfinite):
            raise ConfigError(f'nonfinite={nonfinite!r} must be "pass", "skip" or "stop"')
        data = training.registered.rounds_of(data, gradients, outer)
        work = PassWork(shards, data, gradients, checks.check_allow(allow), nonfinite, training.registered.inner_steps)
        inside = training.at.in_epochs
        per_epoch, count = steps_of(data, total, epochs, inside)
        if inside and training.examiner is not None:
            count = min(EPOCH_STEPS, count or EPOCH_STEPS)
            per_epoch = count if per_epoch is not None else None
        training.agreement.claim_shards(shards)
        first = training.begin_steps(data.about() if data is not None else None)
        if first == 0 and self.world_size > shards:
            idle = self.world_size - shards
            self.print(f"{self.world_size} workers for {shards} shards: {idle} are idle, without a shard")
        if training.registered.outer is not None and first == 0:
            self.print(training.registered.outer.describe(self.world_size))
        if inside:
            left = self._epochs - training.at.epoch
            last = None if per_epoch is None else first + left * per_epoch
            extent = Extent(first, training.at.epoch, per_epoch, count, last)
        else:
            extent = Extent(first, 0, per_epoch, count, count)
        training.agreement.plan_steps(extent.total, shards)
        return Steps(training, work, extent)

    def log(self, **values: Number) -> None:
        """Record scalars of the whole job, such as an evaluation's, for the step in progress or, between two steps, for
        the last one: together with those of `step.log`, in `steps.jsonl` and in all sinks.

        All workers call it with the same values, as `evaluate`, `step.metrics`, `once` and `agree` give them: numbers,
        or tensors of one element. Values logged before the first step are in its record. A record is closed when the
        next step is handed out, or the script ends. Raises UsageError inside a pass, before the loop, and for a name
        that was logged for this step already; Disagree if the workers' values differ.
        """
        for name in values:
            if name.startswith(RESERVED):
                raise UsageError(f"job.log: names that start with {RESERVED!r} are reserved; rename {name!r}")
        self._training.log({name: as_number(value, f"job.log: {name}") for name, value in values.items()})

    def stop(self, because: str) -> None:
        """End the training: the next reduction carries the wish; all workers leave both loops after the same step."""
        self._training.stop(str(because))

    # Hooks and sinks

    def on_resize(self, hook: Callable[[int, int, str], None]) -> None:
        """`hook(old, new, because)` on every member between two steps, after a change of the world size.

        The global batch, the learning rate and the bits do not depend on the size; the hook is for observers only.
        """
        self._training.changes.resize_hooks.append(hook)

    def on_drain(self, hook: Callable[[float, str], None]) -> None:
        """`hook(seconds_left, because)` on a worker whose node has to go, once for each notice.

        The hook is called between two steps, or, if the job goes on without this worker before that, when the worker
        leaves: then the parameters are those with which the step in progress began. After seconds_left the machine may
        be gone. A notice may be withdrawn, and this worker then goes on.
        """
        self._training.changes.drain_hooks.append(hook)

    def on_checkpoint(self, hook: Callable[[Path, int], None]) -> None:
        """`hook(directory, step)` on rank 0 when a checkpoint is taken: files written there become part of it."""
        self._training.checkpoints.checkpoint_hooks.append(hook)

    def on_restore(self, hook: Callable[[dict[str, Any]], None]) -> None:
        """`hook({"step", "epoch", "state"})` on a newcomer and in a resumed run, before tensors are copied: rebuild
        here what the script changes while it trains (unfreeze layers, add parameter groups). state: name -> value of
        job.state, without values that hold tensors."""
        self._training.checkpoints.restore_hooks.append(hook)

    def log_to(self, sink: Sink) -> None:
        """Give the record of every applied step to a sink, once and in order: `elastic.JsonLines(path)`,
        `elastic.TensorBoard(directory)`, or an object with the three methods of Sink of
        runtime/loop/hooks/leader_hooks.py.

        All workers call it, before the loop; the leader writes. When the leader dies, the next one goes on where the
        sink ended, and takes missing steps from the ledger. Raises ConfigError if the sink holds another run.
        """
        if self._training.examiner is None:  # steps of an examination do not belong to the run
            self._training.leading.add(sink, self)

    def on_lead(self, hook: Callable[[], None]) -> None:
        """`hook()` on a worker that has become the leader (also the first one), between steps or before the first.

        The hook must make no call that needs all workers, and change nothing that training depends on.
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
        """Leave the job together with all workers; called automatically when the script or the `with` block ends.

        Raises NoGradient if the last pass was left before its end, NoSteps if several workers have done nothing
        together, CheckpointError if a save() was not written.
        """
        if self._closed:
            return
        try:
            self._training.leave_step()
            self._training.calls.check_outside_pass("close()")
            if self._several and self._training.calls.idle:
                raise checks.no_steps()
            self._training.checkpoints.finish()
            if not self._training.at.joining:
                at = self._training.at
                op = Op(OpKind.LEAVE, 1, at.epoch, at.step)
                self._training.calls.run(op, self._training.scope.logged(), empty_leaf)
                self._training.close_record()
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
        """The script ends with an exception: nothing more is applied, and this worker waits for no other."""
        if self._closed:
            return
        self._detach()
        if self._training.examiner is not None:
            self._training.examiner.failed(error)
        self._session.failed(error, self._training.at.step, self._training.calls.running)

    def _detach(self) -> None:
        global _current
        self._closed = True
        for source in self._sources:
            source.close()
        self._training.registered.close()
        if self._script_end is not None:
            self._script_end.ignore()
            self._script_end = None
        if _current is self:
            _current = None
