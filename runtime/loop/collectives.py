"""One worker among others: its rank and world, and the calls that all workers make between passes."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast, overload

import torch
from torch import nn

from elastic.agent.worker.node_notice import NodeNotice
from elastic.checkpoints.naming import check_series
from runtime.allreduce.reduction.partial_sum import Json, Partial
from runtime.data.random_state import randomness_kept
from runtime.loop.evaluation import Score, evaluate
from runtime.loop.hooks.leader_values import noted, pack_note, unpack_note, value_noted
from runtime.loop.node_lock import node_lock
from runtime.loop.training import Training, empty_leaf
from runtime.recovery.state import small_values
from runtime.recovery.state.small_values import Number
from runtime.session import OpKind, Session

T = TypeVar("T")


class Collectives:
    """The part of Job that concerns the other workers."""

    def __init__(self, session: Session, training: Training) -> None:
        self._session = session
        self._training = training

    # Rank, world and device

    @property
    def rank(self) -> int:
        """0..world_size-1 in the current generation; it can change between two steps."""
        return self._session.rank

    @property
    def world_size(self) -> int:
        """Members of the current generation; it can change between two steps."""
        return self._session.world_size

    @property
    def local_rank(self) -> int:
        """This worker's slot on its node; constant."""
        return self._session.local_rank

    @property
    def generation(self) -> int:
        """Number of the current member list; only grows."""
        return self._session.generation

    @property
    def worker_id(self) -> str:
        """`<node>.<slot>.<incarnation>`; constant, and new for each process."""
        return self._session.worker_id

    @property
    def device(self) -> torch.device:
        """The device on which the loader puts batches and to which the model belongs."""
        return self._training.registered.device

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0 now."""
        return self._session.rank == 0

    @property
    def restarted(self) -> bool:
        """Whether this process replaces an earlier one."""
        return self._session.restarted

    @property
    def notice(self) -> NodeNotice | None:
        """The notice that this worker's node has to go, or None: there is none, or it was taken back.

        The workers of one node have it, and those of other nodes do not, so nothing that training depends on may follow
        from it. It may be read at any time, also inside a pass.
        """
        return self._session.going

    # Between passes

    def evaluate(
        self, fn: Score, dataset: Any, *, batch_size: int = 64, models: nn.Module | Sequence[nn.Module] | None = None
    ) -> dict[str, float]:
        """Means of `fn(*batch) -> {name: mean of the batch}` over a map-style dataset, the same on every worker.

        Runs in evaluation mode (models: default all registered ones) without gradients; both are put back, and so are
        the RNGs. The parts are spread over the workers. Raises ConfigError and UsageError.
        """
        return evaluate(self._training, fn, dataset, batch_size=batch_size, models=models)

    def once(self, fn: Callable[..., T], *args: Any) -> T:
        """`fn(*args)` run by the leader; all workers get its value: JSON, also with tensors of one element (on
        job.device).

        If the leader dies, the next leader repeats fn, so it must be idempotent. Raises NotCarried for another value.
        """
        label = f"once({getattr(fn, '__name__', type(fn).__name__)})"
        return cast(T, unpack_note(self._once(label, lambda: pack_note(fn(*args), label)), self.device))

    def save(self, name: str) -> str:
        """Save a checkpoint of this moment under a name, atomically, while training goes on; all workers call it.

        Once complete, it replaces the name's older checkpoint. Returns the directory of the name's checkpoints;
        `elastic checkpoints export NAME` makes plain files of the newest. If it cannot be written, a message says so at
        once, the old one stays, and close() raises CheckpointError. Raises ConfigError for a bad name.
        """
        training, series = self._training, check_series(name)
        elsewhere = training.at.elsewhere
        plan = self._once(f"save({series})", training.saves.plan)
        if not elsewhere:
            training.saves.save(series, cast(dict[str, Any], plan))
        return f"{training.checkpoints.root}/{series}"

    def shared(self, name: str, fn: Callable[[], T]) -> T:
        """`fn()` run by the leader once in a job; all workers, all newcomers, and later runs of the job get its value.

        A run that goes on from a checkpoint takes the value from there; a run that was interrupted before its first
        checkpoint calls fn again. Call it before the loop, where no other collective call is allowed, for a run's id or
        a path that was prepared. The value must be JSON. If the leader dies, the next leader repeats fn, so it must be
        idempotent. Raises NotCarried for another value, UsageError for a new name once the loop has begun.
        """
        label = f"shared({name})"
        with randomness_kept():
            return cast(T, self._training.calls.shared(name, noted(label, fn), value_noted))

    def node_lock(self, name: str) -> AbstractContextManager[None]:
        """`with job.node_lock("data"):` runs in one process of this machine and user at a time, over all jobs.

        For work that a machine needs once; check inside the block whether it is done. Raises ConfigError.
        """
        return node_lock(name)

    def agree(self, x: T) -> T:
        """The leader's x on every worker: anything that job.state takes, tensors up to 64 KiB (on job.device).

        If the leader dies meanwhile, it is the next leader's x. Raises NotCarried for another value, ConfigError if
        large.
        """
        packed = small_values.pack(x, "job.agree(x)")
        document = self._training.calls.collective(
            OpKind.ONCE, "agree(x)", 1, lambda unit: Partial(unit, unit + 1, note=packed), lambda result: result.note
        )
        return cast(T, small_values.unpack(document, lambda _: self.device))

    @overload
    def allreduce(self, x: torch.Tensor, op: small_values.Op = "mean") -> torch.Tensor: ...
    @overload
    def allreduce(self, x: float, op: small_values.Op = "mean") -> float: ...
    def allreduce(self, x: Number, op: small_values.Op = "mean") -> Number:
        """The mean, sum, max or min over the workers of a value that each worker has: a time, a cache's hit rate.

        The result is not exact: there is one value per worker, so it changes with the number of workers, and the value
        of a worker that dies is lost. Log it, but let training depend on nothing of it; sums over the shards belong
        into step.log. x: a real number (gives a float), or a tensor of up to 64 KiB, of one dtype and shape on all
        workers (gives a tensor of the same). Raises ConfigError, UsageError for a value that cannot be reduced,
        Disagree for different kinds.
        """
        value = small_values.check_reducible(x, op)
        own = small_values.pack(value, "job.allreduce(x)")
        document = self._training.calls.collective(
            OpKind.ALLREDUCE,
            f"allreduce({op}) of {small_values.described(value)}",
            1,
            empty_leaf,
            lambda result: result.note,
            own,
        )
        device = x.device if isinstance(x, torch.Tensor) else self.device
        found = cast(dict[str, Json], document)
        values = {worker: small_values.unpack(other, lambda _: device) for worker, other in found.items()}
        return small_values.reduce(values, op)

    def _once(self, label: str, fn: Callable[[], Any]) -> Json:
        with randomness_kept():
            return self._training.calls.collective(OpKind.ONCE, label, 1, noted(label, fn), value_noted)

    def print(self, *values: object, sep: str = " ", end: str = "\n") -> None:
        """print() on the leader only."""
        if self.is_leader:
            builtins.print(*values, sep=sep, end=end, flush=True)
