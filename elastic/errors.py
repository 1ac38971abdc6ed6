"""Every error this project raises, named by what the caller does next.

ElasticError
├── ConfigError               fix the input; nothing was started
│   ├── CheckpointDirTaken    give another checkpoint directory
│   ├── CertificateOver       issue another certificate
│   └── UnsupportedTorch      install a version of torch that was tested
├── StoreError
│   ├── StoreUnavailable      try again until the deadline; read first if the failed call was `ambiguous`
│   ├── StoreRefused          fix the request or the rights; trying again cannot help
│   ├── CompareFailed         read again; someone else wrote
│   └── LeaseExpired          take a new lease; what hung on the old one is gone
├── GenerationEnded           leave the ring; wait for the next generation
│   ├── RingBroken            report it; it accuses nobody
│   │   └── LinkSilent        the same; nothing comes back from a peer's host
│   └── BuildFailed           report who was unreachable
├── NotAdmitted               end; the fleet has no place for this job on this node any more
├── LaunchFailed              see how the job ended; the same job_dir goes on where it can
├── NameInUse                 wait until the other call has ended, or give this job another name
├── LinkTooSlow               use a faster link, or train less over it
├── JoinMissed                exit; the agent starts a new process for the slot
├── DeviceHung                the same
├── ColdStart                 start the worker with an interpreter of its own; journal why
├── StateLost                 stop the job; restart it from a checkpoint by hand
├── NoMemory                  give the process more memory, or keep a smaller state
├── DataWorkerDied            give the loader's processes more memory, or fewer of them
├── CheckpointError
│   ├── CheckpointCorrupt     use the one before
│   └── NoCheckpoint          start from step 0
└── UsageError                change the training script as the message says
    ├── NoSteps               write the loop with job.steps(), or start one worker
    ├── TimedKernels          set torch.backends.cudnn.benchmark = False
    ├── NoGradient            call backward() in every shard, or step.skip()
    ├── GraphCaptured         leave the inner loop out of the CUDA graph
    ├── TooEarly              move optimizer.step() behind the inner loop
    ├── StateChanged          change registered state only between passes
    ├── LossDivided           drop the division by the number of shards
    ├── StrayGradient         call zero_grad() before the pass
    ├── NonFinite             look at the loss of that step, or let steps(nonfinite=...) leave it out
    ├── Unregistered          add the object to job.register()
    ├── BufferChanged         declare the buffer in job.register(buffers=...)
    ├── Disagree              make every worker compute the same values
    ├── LeftAlone             let every worker leave the loop after the same step
    ├── NotUnderElastic       start the script with `elastic run`
    ├── SecondLoop            wrap the loops in job.epochs()
    ├── LeaderOnly            call it where every worker passes
    ├── NotCarried            replace what cannot be copied to newcomers
    ├── ReadAhead             with --ranks: call backward() for each batch before taking the next
    ├── MidShardCollective    with --ranks: call it behind the step, or before the loop
    ├── TwoBackwards          with --ranks: call backward() once a batch
    ├── LeftPass              with --ranks: leave the loop where all ranks do
    ├── UnknownBatches        with --ranks: give the training loader a DistributedSampler
    ├── NotInPlace            with --ranks: leave the call out, or start the script in another way
    └── OtherState            with elastic.keep: build the model with which the job began, or start a new job
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Any


class ExitCode(IntEnum):
    """Exit status of the command line and of a worker."""

    DONE = 0
    SCRIPT_FAILED = 1
    BAD_INPUT = 2
    BELOW_QUORUM = 3
    """Fewer than `min_workers`, no etcd, or a link that carries next to nothing."""
    STATE_LOST = 4
    """Every copy of the state is gone."""
    DISAGREE = 5
    DRAINED = 6
    """Every node had to go: stopped in order after a step, to be started again elsewhere."""
    FENCED = 75
    """A worker's exit code, never the command line's: its generation went on without it."""
    INTERRUPTED = 130
    TERMINATED = 143


class ElasticError(Exception):
    """Base of all; catch it only to report and leave."""


class ConfigError(ElasticError):
    """Fix the input as the message says; nothing was started and nothing overwritten."""


class CheckpointDirTaken(ConfigError):
    """Give this job another checkpoint directory; the message names the job whose checkpoints are there."""


class CertificateOver(ConfigError):
    """Issue another certificate, or set the clock; a worker may wait for that."""


class UnsupportedTorch(ConfigError):
    """Install a version of torch that was tested; the message says which, and what this one lacks."""


class StoreError(ElasticError):
    """The store did not do what was asked; the subclass says whether to try again."""


class StoreUnavailable(StoreError):
    """Try again until the deadline. `ambiguous`: the write may have happened, so read before writing again."""

    def __init__(self, message: str, *, ambiguous: bool = False) -> None:
        super().__init__(message)
        self.ambiguous = ambiguous


class StoreRefused(StoreError):
    """Fix the request, the credentials or the server's quota; trying again cannot help."""


class CompareFailed(StoreError):
    """Read again and decide anew; someone else wrote."""


class LeaseExpired(StoreError):
    """Take a new lease and assume that what hung on the old one is gone."""


class GenerationEnded(ElasticError):
    """Leave the ring and wait for the next generation."""


class RingBroken(GenerationEnded):
    """Report it and wait for orders; a broken connection accuses nobody, `peer` is only where it was seen."""

    def __init__(self, message: str = "the ring was aborted", *, peer: str | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class LinkSilent(RingBroken):
    """As RingBroken: nothing comes back from the host of `peer`. The message has what the link has carried before."""


class BuildFailed(GenerationEnded):
    """Report the members in `unreachable` (worker ids) and wait for the next generation."""

    def __init__(self, message: str = "", *, unreachable: Sequence[str] = ()) -> None:
        super().__init__(message or f"could not build the ring: no connection to {', '.join(unreachable)}")
        self.unreachable = tuple(unreachable)


class NotAdmitted(ElasticError):
    """End: the job's leader does not admit this agent, as the fleet has not placed the job on its node."""


class LaunchFailed(ElasticError):
    """The job of elastic.launch(), or one on Ray or Spark, has ended in another way than by its end; `exit_code` is
    that of `elastic run`, and a note has the traceback if the function raised."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class NameInUse(ElasticError):
    """Wait until the other call has ended, or give this job another name: one call at a time trains it."""


class LinkTooSlow(ElasticError):
    """Use a faster or a better link between the two machines; the message names it, with the rate that was measured."""


class JoinMissed(ElasticError):
    """Exit; the generation this newcomer copied for is void, and its agent starts a fresh process."""


class DeviceHung(ElasticError):
    """Exit; this process cannot use its device any more, and its agent starts a fresh process."""


class ColdStart(ElasticError):
    """Start the worker with an interpreter of its own; the message says why it cannot be forked."""


class StateLost(ElasticError):
    """Stop the job: no living process holds the state of the last applied step."""


class NoMemory(ElasticError):
    """Give the process more memory, or keep a smaller state; what was to be copied is not."""


class DataWorkerDied(ElasticError):
    """A process of `job.loader(workers=...)` has ended by itself or was killed."""


class CheckpointError(ElasticError):
    """A checkpoint cannot be used; the subclass says what to use instead."""


class CheckpointCorrupt(CheckpointError):
    """Name it, skip it, and use the one before."""


class NoCheckpoint(CheckpointError):
    """Start from step 0."""


class UsageError(ElasticError):
    """Change the training script as the message says."""

    operations: Mapping[str, Any] = MappingProxyType({})
    """Where workers have done different things: worker -> the operation, of runtime/session.py, that it was at."""


class NoSteps(UsageError):
    """Write the training loop with job.steps(), or start one worker: several have trained, each for itself."""


class GraphCaptured(UsageError):
    """Leave the inner loop out of the CUDA graph: torch.cuda.make_graphed_callables() captures the model alone."""


class TimedKernels(UsageError):
    """Set torch.backends.cudnn.benchmark = False, or start the job with --reduction allreduce."""


class NoGradient(UsageError):
    """Call backward() in every shard, or step.skip() to leave one out."""


class TooEarly(UsageError):
    """Move optimizer.step() behind the inner loop, where the gradients are reduced."""


class StateChanged(UsageError):
    """Change weights, learning rates and job.state only between passes."""

    names = ""
    """What has changed, as "parameter model.0.weight"; "": nothing, an assignment was refused."""
    in_forward = ""
    """A sentence for a layer that changes its weights in forward(), if it may have been one."""


class LossDivided(UsageError):
    """Drop the division by the number of shards; the reduction already takes the mean."""


class StrayGradient(UsageError):
    """Call optimizer.zero_grad() before the pass; a gradient from before it would be counted."""


class NonFinite(UsageError):
    """Look at the loss and the samples of the step named, or leave such steps out: job.steps(nonfinite="skip")."""


class Unregistered(UsageError):
    """Add the module, optimizer or scheduler to job.register(), or newcomers will not have it."""


class BufferChanged(UsageError):
    """Declare how the buffer is merged: job.register(buffers={"name": "mean"}) or "first"."""

    names = ""
    """What has changed, as "buffer model.1.running_mean"."""


class Disagree(UsageError):
    """Make every worker take the same decisions; the message names the workers and their values."""


class LeftAlone(UsageError):
    """Let every worker leave the loop after the same step: job.stop() instead of break."""


class NotUnderElastic(UsageError):
    """Start the script with `elastic run`, not with another launcher of many processes."""


class SecondLoop(UsageError):
    """Wrap the loops in job.epochs(); a newcomer could not tell which bare loop it belongs to."""


class LeaderOnly(UsageError):
    """Call it where every worker passes, not inside `if job.is_leader`."""


class NotCarried(UsageError):
    """Replace what cannot be copied to newcomers bit by bit, as the message says."""


class ReadAhead(UsageError):
    """With logical ranks: call backward() for each batch of the training loader before taking the next."""


class MidShardCollective(UsageError):
    """With logical ranks: call it behind the step or before the loop, not between a batch and its backward()."""


class TwoBackwards(UsageError):
    """With logical ranks: call backward() once a batch, or all but the last under no_sync()."""


class LeftPass(UsageError):
    """With logical ranks: leave the training loop only where all ranks do, with all gradients reduced."""


class UnknownBatches(UsageError):
    """With logical ranks: give the training DataLoader a DistributedSampler."""


class NotInPlace(UsageError):
    """With logical ranks: leave out what the message names, or start the script in another way."""


class OtherState(UsageError):
    """With elastic.keep: build the model and the optimizer with which the job began, or start a new job."""
