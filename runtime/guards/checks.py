"""Guards against mistakes in a training loop that would silently train something else.

Each function or class recognises one kind of mistake and raises the UsageError of elastic.errors that names what
happened, where, and what to write instead. Nothing here changes how a correct script trains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from elastic import errors
from runtime.allreduce.reduction.host_copies import host_copies
from runtime.guards.module_attributes import ABSENT, Changed
from runtime.session import Op, OpKind

_BETWEEN_PASSES = (OpKind.ONCE, OpKind.EVALUATE, OpKind.ALLREDUCE)
"""How the advice for parameters begins."""
LAUNCHERS = {"WORLD_SIZE": "torchrun", "SLURM_NTASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun"}
"""Environment variable -> the launcher that sets it to its number of processes."""

OPTIONAL = frozenset({"LossDivided", "NoGradient", "StateChanged", "StrayGradient", "Unregistered"})
"""Guards that `steps(..., allow=...)` can turn off; the others protect the protocol itself."""


def check_launcher(environment: Mapping[str, str]) -> None:
    """Raise NotUnderElastic in one of several processes that do not know each other."""
    for variable, launcher in LAUNCHERS.items():
        value = environment.get(variable, "").strip()
        if value not in ("", "0", "1"):
            raise errors.NotUnderElastic(
                f"{variable}={value}, so {launcher} started several processes, but none of them has an elastic agent: "
                f"each would train alone. Start the script with `elastic run --workers {value} SCRIPT` instead "
                f"of {launcher}, or unset {variable} if this is one process on purpose."
            )


def check_allow(allow: Collection[str]) -> frozenset[str]:
    """The guards turned off by `steps(allow=...)`. Raises ConfigError for a name that cannot be turned off."""
    if isinstance(allow, str):
        raise errors.ConfigError(f"allow={allow!r} is a string; write allow={{{allow!r}}}")
    if unknown := sorted(set(allow) - OPTIONAL):
        raise errors.ConfigError(
            f"allow names {', '.join(unknown)}; only {', '.join(sorted(OPTIONAL))} can be turned off"
        )
    return frozenset(allow)


def check_threads(expected: int) -> None:
    """Raise NotCarried if torch's thread count is not that of join(): the bits of a sum depend on it."""
    if (threads := torch.get_num_threads()) != expected:
        raise errors.NotCarried(
            f"torch.get_num_threads() is {threads}, but the job was joined with threads={expected}. The last bits of a "
            f"gradient depend on it, and a newcomer would start with {expected}. "
            f"Remove the call to torch.set_num_threads and write elastic.join(threads={threads}) in its place."
        )


def check_timed_kernels(device: torch.device) -> None:
    """Raise TimedKernels if cuDNN chooses its algorithms by a race, which each process may decide in another way."""
    if device.type == "cuda" and torch.backends.cudnn.benchmark:
        raise errors.TimedKernels(
            "torch.backends.cudnn.benchmark is True. cuDNN then chooses the algorithm of each convolution by its time, "
            "each process for itself, and algorithms differ in their last bits: the result would depend on how many "
            "workers there are, and on faults. Set torch.backends.cudnn.benchmark = False in the script; or start the "
            "job with --reduction allreduce, which promises no bits."
        )


def check_capture(where: str) -> None:
    """Raise GraphCaptured if a CUDA graph is being captured: the end of a shard and the sum cannot be replayed."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise errors.GraphCaptured(
            f"a CUDA graph is being captured around {where}. The loop hands out shards, takes their gradients and adds "
            "them with other workers, which a replay cannot do. Capture the model alone, before the loop: "
            "model = torch.cuda.make_graphed_callables(model, samples)."
        )


def no_gradient(where: str) -> errors.NoGradient:
    """The error for a shard that ended without a gradient of any parameter."""
    return errors.NoGradient(
        f"{where} ended without any gradient, so the sum over the shards would miss it. Usual causes: `continue` or "
        "`break` before loss.backward(), zero_grad() after backward(), a loss built under no_grad, batches read "
        "ahead (list(step), zip, prefetching), or the replay of a CUDA graph that was captured with its backward(), "
        "which writes into memory of its own (torch.cuda.make_graphed_callables() does not). Call loss.backward() once "
        "a shard, or step.skip() to leave one out."
    )


def no_inner_step(where: str) -> errors.NoGradient:
    """The error for a replica that has made no inner step."""
    return errors.NoGradient(
        f"{where} ended without a step of the inner optimizer, so the replica has not trained. With outer= the inner "
        "loop has the whole of a training step: loss.backward(), optimizer.step(), optimizer.zero_grad()."
    )


def no_steps() -> errors.NoSteps:
    """The error for one of several workers at the end of the script if they have done nothing together."""
    return errors.NoSteps(
        "the script has ended without one step of job.steps(), and this is one of several workers: each has done the "
        "whole of it for itself, and nothing was put together. A library's own loop (Trainer.fit, model.fit) does not "
        "know of the job. Write the loop yourself, `for step in job.steps(train, total=1000):` and in it `for batch in "
        "step:`, or start the script with --workers 1."
    )


def other_data(here: Mapping[str, Any] | None, there: Mapping[str, Any] | None, *, resumed: bool) -> errors.ConfigError:
    """The error for an epoch with other samples than the members' or an earlier run's. here, there:
    SamplePlan.about."""
    mine, theirs = dict(here or {}), dict(there or {})
    differing = [name for name in {**theirs, **mine} if mine.get(name) != theirs.get(name)]
    shown = "; ".join(f"{name}: {mine.get(name)} here, {theirs.get(name)} there" for name in differing)
    if resumed:
        return errors.ConfigError(
            f"this job was begun with other data ({shown}), so an epoch would use samples twice and leave out others. "
            "Go on with the data and the arguments of job.loader() as they were, or start anew with --fresh."
        )
    return errors.ConfigError(
        f"this worker would have other samples than the members ({shown}). Is its dataset complete, and the same files?"
    )


def changed_attribute(where: str, changed: Sequence[Changed]) -> errors.Unregistered:
    """The error for attributes of registered modules that differ from a newcomer's, and that the step has not set."""
    first = changed[0]
    module, _, key = first.name.rpartition(".")
    others = f" (and so did {_first([one.name for one in changed[1:]])})" if changed[1:] else ""
    was, now = ("not there" if value is ABSENT else repr(value) for value in (first.was, first.now))
    return errors.Unregistered(
        f"{first.name} has changed{others}: it is {now} in {where}, where a newcomer and a run that goes on from a "
        f"checkpoint would find it {was}, because plain attributes of a module are not carried. Keep the value in "
        "job.state, and set it in every step between `for step in job.steps(...)` and the inner loop: "
        f"({module}).{key} = job.state.{key}; or work it out there from step.index. If nothing depends on it: "
        'job.steps(..., allow={"Unregistered"}).'
    )


def nonfinite(where: str, parameters: Sequence[str]) -> errors.NonFinite:
    """The error for a pass whose reduced gradient has an infinity or NaN."""
    return errors.NonFinite(
        f"the gradient of {_first(parameters)} is infinite or undefined in {where}: look at the loss of that step. "
        'job.steps(..., nonfinite="skip") leaves such a pass out on all workers, and the step\'s line in steps.jsonl '
        "says which samples it had."
    )


def other_gradients(where: str) -> errors.UsageError:
    """The error for a pass that did not fit its integers again, after its exponents were made to fit."""
    return errors.UsageError(
        f"the gradients of {where} were much larger when the pass was computed again. A shard must have the same "
        "gradients each time: draw random numbers from those of torch, numpy and random, or from step.shard.generator"
    )


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def state_changed(where: str, changed: Sequence[str], fixed: Collection[str] = ()) -> errors.UsageError:
    """The error for registered state that changed between the beginning and the end of a pass.

    changed: the names, as in Carrier.changed. fixed: parameters that are not trained. Returns BufferChanged for buffers
    only.
    """
    names = _first(changed)
    if all(name.startswith("buffer ") for name in changed):
        of_buffer = errors.BufferChanged(
            f"{names} changed in {where}. Each worker runs other shards, so their buffers would part. Say how to merge "
            'it: job.register(buffers={"model.name": "mean"}), or "first" for the value of the first shard.'
        )
        of_buffer.names = names
        return of_buffer
    advice = in_forward = ""
    if set(changed) <= {f"parameter {name}" for name in fixed}:
        advice = (
            " They are parameters that are not trained. If a layer keeps its running statistics in them, as Keras' "
            "BatchNormalization does, declare each of them as a buffer: "
            f'job.register(buffers={{"{changed[0].removeprefix("parameter ")}": "mean"}}), or "first" for integers.'
        )
    elif all(name.startswith("parameter ") for name in changed):
        advice = in_forward = (
            " A layer that changes its weights in forward, as nn.Embedding(max_norm=m) does, has to leave that to you: "
            "without max_norm, and behind optimizer.step() `with torch.no_grad(): layer.weight.renorm_(2, 0, m)`."
        )
    of_state = errors.StateChanged(
        f"{names} changed before {where} was reduced. Workers run different shards and a newcomer copies the state "
        "of this moment, so their models would part. Change weights, learning rates, schedulers and job.state after "
        f"the inner loop, where the gradients are complete.{advice}"
    )
    of_state.names, of_state.in_forward = names, in_forward
    return of_state


class OptimizerGuard:
    """TooEarly and StrayGradient: an optimizer must see the complete reduced gradient of the pass, and nothing else.

    A gradient that exists when the pass begins is *left over*. If no pass and no optimizer has touched it, a backward()
    outside has made it: a StrayGradient at once. Any other is an error only if an optimizer steps on it without
    zero_grad(): in a GAN the generator's pass may well leave gradients in the discriminator.
    """

    def __init__(self) -> None:
        self._parameters: Sequence[tuple[str, torch.nn.Parameter]] = ()
        self._open: str | None = None
        self._allow: frozenset[str] = frozenset()
        self._known: set[int] = set()
        """Addresses of gradients that an optimizer has seen since the last pass began."""
        self._installed: Callable[[int], bool] | None = None
        self._left_over: set[torch.nn.Parameter] = set()
        self._handles: list[RemovableHandle] = []

    def attach(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """Watch the step() of these optimizers."""
        for name, optimizer in optimizers.items():
            self._handles.append(optimizer.register_step_pre_hook(functools.partial(self._before_step, name)))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def begin_pass(
        self, where: str, parameters: Sequence[tuple[str, torch.nn.Parameter]], allow: frozenset[str]
    ) -> None:
        """Check the gradients that are left over from before. Raises StrayGradient. where: "pass 0 of step 7"."""
        self._allow = allow
        self._parameters = parameters
        self._left_over.clear()
        graded = [(name, parameter, grad) for name, parameter in parameters if (grad := parameter.grad) is not None]
        some = host_copies([grad.detach().any() for _, _, grad in graded])
        for (name, parameter, grad), nonzero in zip(graded, some, strict=True):
            if not nonzero:
                continue
            address = grad.data_ptr() if grad.layout == torch.strided else None
            if address is not None and (address in self._known or (self._installed and self._installed(address))):
                self._left_over.add(parameter)
            elif "StrayGradient" not in allow:
                raise errors.StrayGradient(
                    f"{name} has a gradient from before {where}; the pass would throw it away. Only a backward() in "
                    "the inner loop counts: move it there, or call optimizer.zero_grad() before the inner loop."
                )
        self._known.clear()
        self._installed, self._open = None, where

    def open_inside(self) -> None:
        """Optimizers may step before the pass is over: they are inner ones."""
        self._open = None

    def end_pass(self, installed: Callable[[int], bool]) -> None:
        """The reduced gradients are in place, so optimizers may step. installed: whether one is at an address."""
        self._installed, self._open = installed, None

    def close(self) -> None:
        """Remove the hooks from the optimizers."""
        for handle in self._handles:
            handle.remove()

    def _before_step(self, name: str, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if self._open is not None:
            raise errors.TooEarly(
                f"{name}.step() was called in {self._open}, whose gradients are not reduced yet. Move it (and "
                "gradient clipping, scheduler.step() and zero_grad()) behind the inner `for batch in step` loop, and "
                "do not leave that loop with `break`. If each batch is to be an inner step of a replica, as with "
                "DiLoCo, give outer= to job.steps(), or --outer to `elastic run`."
            )
        if "StrayGradient" in self._allow or not self._left_over:
            return
        for parameter in _parameters_of(optimizer):
            if parameter in self._left_over and parameter.grad is not None:
                left = next(known for known, one in self._parameters if one is parameter)
                raise errors.StrayGradient(
                    f"{name}.step(): {left} still had a gradient when the last pass began, so plain "
                    "PyTorch would have added to it, and here only the last pass counts. Call "
                    f"{name}.zero_grad() after each {name}.step(). To accumulate over more samples, raise the "
                    "loader's batch_size and shards: a step has as many shards as you want."
                )

    def _after_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._known.update(_addresses(_parameters_of(optimizer)))


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _addresses(parameters: Iterable[torch.nn.Parameter]) -> list[int]:
    """The addresses of the gradients. No references: zero_grad() must be able to free the memory."""
    strided = torch.strided
    return [
        grad.data_ptr() for parameter in parameters if (grad := parameter.grad) is not None and grad.layout is strided
    ]


@contextmanager
def backward_watched(look: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Show each loss to `look` before its backward(), while the context is open.

    Tensor.backward() resolves torch.autograd.backward at the call, so one replaced name covers both spellings. If other
    code has replaced it meanwhile, that stays, around a function that looks no more.
    """
    original = torch.autograd.backward
    watching = True

    @functools.wraps(original)
    def watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if watching:
            for tensor in (tensors,) if isinstance(tensors, torch.Tensor) else tensors:
                if isinstance(tensor, torch.Tensor):
                    look(tensor)
        original(tensors, *args, **kwargs)

    torch.autograd.backward = watched
    try:
        yield
    finally:
        watching = False
        if torch.autograd.backward is watched:
            torch.autograd.backward = original


def check_loss(loss: torch.Tensor, shards: int) -> None:
    """Raise LossDivided if the last operation of the loss is a division by exactly the number of shards.

    Only a plain Python number counts: a tensor of that value is a count of the data, such as tokens. One multiplication
    by a float32 scalar is looked through, because that is what GradScaler.scale() appends. What is saved is looked at
    as it lies there: the script's hooks of saved tensors may give each of them only once.
    """
    node: Any = loss.grad_fn
    if node is not None and node.name() == "MulBackward0":
        (left, _), (right, _) = node.next_functions
        if _is_scale(node._raw_saved_other.data):
            node = left
        elif _is_scale(node._raw_saved_self.data):
            node = right
    if shards < 2 or node is None or node.name() != "DivBackward0":
        return
    divisor = node._raw_saved_other.data
    if _is_number(divisor) and divisor.item() == shards:
        raise errors.LossDivided(
            f"the loss is divided by {shards}, the number of shards, but the reduction already takes the mean over "
            f"the shards: gradients would be {shards} times too small. Remove the division. If it has another meaning "
            '(a mean over a batch of that size, say), write job.steps(..., allow={"LossDivided"}).'
        )


def _is_number(saved: object) -> bool:
    """Whether this is what autograd keeps of a Python number: a scalar of float64 or int64 whose type gives way to that
    of any tensor beside it."""
    if not isinstance(saved, torch.Tensor) or saved.dim() or saved.dtype not in (torch.int64, torch.float64):
        return False
    narrow = torch.float16 if saved.is_floating_point() else torch.int8
    return torch.result_type(torch.zeros((), dtype=narrow, device="cpu"), saved) != saved.dtype


def _is_scale(factor: object) -> bool:
    return isinstance(factor, torch.Tensor) and factor.numel() == 1 and factor.dtype == torch.float32


def inside_leaders(call: str, code: str) -> errors.LeaderOnly:
    """The error for a call that all workers make together, inside code that only one of them runs."""
    return errors.LeaderOnly(
        f"job.{call} was called inside {code}, which only the leader runs, while it needs every worker. Call it "
        f"before or after {code}."
    )


def inside_unwaiting(call: str) -> errors.UsageError:
    """The error for a call that all workers make together, in the inner loop of elastic.asynchronous()."""
    return errors.UsageError(
        f"job.{call} was called in the inner loop of elastic.asynchronous(), where no worker waits for another one, "
        "while it needs every worker. Call it behind the inner loop, at the end of each phase."
    )


def unfinished(op: Op) -> errors.UsageError:
    """The error for a script that goes on behind a call of all workers that its own function has left by an error."""
    return errors.UsageError(
        f"{describe(op)} was left by an error of its function, which the script has caught; the others still wait for "
        "what this worker was to compute. Catch the error inside the function, and return a value that tells of it."
    )


def disagreement(ops: Mapping[str, Op], leader: str) -> errors.UsageError:
    """The error for workers that do different things at the same place.

    ops: worker_id -> the operation it began. leader: worker_id of rank 0. Returns LeftAlone, LeaderOnly or Disagree.
    """
    error = _disagreement(ops, leader, places(ops))
    error.operations = ops
    return error


def places(ops: Mapping[str, Op], api: str = "job") -> str:
    """Which worker is at which operation. ops: worker_id -> operation. api: as of `describe`."""
    return "; ".join(f"{worker}: {describe(op, api)}" for worker, op in sorted(ops.items()))


def _disagreement(ops: Mapping[str, Op], leader: str, doing: str) -> errors.UsageError:
    gone = sorted(worker for worker, op in ops.items() if op.kind is OpKind.LEAVE)
    if gone and len(gone) < len(ops):
        return errors.LeftAlone(
            f"{', '.join(gone)} left the loop while others go on ({doing}). A `break`, `return` or sys.exit() was "
            "taken on some workers only. Call job.stop(because): then all leave after the same step."
        )
    others = {op for worker, op in ops.items() if worker != leader}
    mine = ops.get(leader)
    if mine is not None and len(others) == 1 and mine not in others and mine.kind in _BETWEEN_PASSES:
        return errors.LeaderOnly(
            f"only the leader called {describe(mine)} ({doing}). Move the call out of `if job.is_leader:`; all "
            "workers make it, and job.save, job.once and job.print already let only the leader write."
        )
    return errors.Disagree(
        f"workers are at different places of the script ({doing}). A condition came out differently on them: make it "
        "depend on step.metrics, job.state or job.evaluate(), which are the same everywhere."
    )


def disagree(fingerprints: Mapping[str, Mapping[str, str]], op: Op) -> errors.Disagree:
    """The error for workers whose state has drifted apart. fingerprints: worker_id -> name -> value."""
    names = sorted({name for values in fingerprints.values() for name in values})
    differing = [name for name in names if len({values.get(name) for values in fingerprints.values()}) > 1]
    shown = "; ".join(
        f"{name}: " + ", ".join(f"{worker}={values.get(name)}" for worker, values in sorted(fingerprints.items()))
        for name in differing
    )
    return errors.Disagree(
        f"workers differ at {describe(op)}: {shown}. Training on would train two models. Something outside the inner "
        "loop used a value that is not the same everywhere: rank, time, files, unseeded random numbers, or a change "
        "to weights, learning rate or job.state on one worker only. Take such a value from job.agree(x), which is the "
        "leader's everywhere, or from step.metrics, job.state or job.evaluate()."
    )


def corrupted(workers: Sequence[str], what: str, op: Op) -> errors.Disagree:
    """Members are of two opinions, and as many are of one as of the other."""
    return errors.Disagree(
        f"{what} differ in {describe(op)} between {' and '.join(workers)}, and nobody can say who is wrong: a third "
        "worker could. Test the memory and processors of their machines, and go on from a checkpoint before this step"
    )


def describe(op: Op, api: str = "job") -> str:
    """An operation in the words of the API. api: whose calls they are in the script."""
    when = "before" if op.early else "after"
    match op.kind:
        case OpKind.SYNC:
            return "the start of the loop"
        case OpKind.PASS:
            return f"pass {op.pass_no} of step {op.step}"
        case OpKind.EVALUATE:
            return f"{api}.evaluate({op.label}) {when} step {op.step}"
        case OpKind.ONCE | OpKind.ALLREDUCE:
            return f"{api}.{op.label} {when} step {op.step}"
        case OpKind.LEAVE:
            return "the end of the script"
