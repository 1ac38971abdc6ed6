"""accelerate, in place: scripts with a loop of their own over what Accelerator.prepare() gives.

The script's loop has turns, as that of a script for DistributedDataParallel (see frontends/ddp). What is done here is
what accelerate itself keeps: the batches of a prepared DataLoader are those of the turn's rank, the accumulation counts
batches of a rank and not turns, an evaluation's loop may gather, and trackers begin in the worker that becomes the
leader.

Private names of accelerate, seen in the versions TESTED: utils.operations._gpu_gather and _gpu_gather_object.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch

from elastic.errors import ConfigError
from runtime.frontends.ddp import mistakes
from runtime.frontends.ddp.evaluation.gathering_loop import GatheringLoop
from runtime.frontends.ddp.rank_script import RankScript, Turn
from runtime.frontends.ddp.seams import Seams
from runtime.frontends.frameworks.accelerate_batches import PreparedBatches, PreparedTraining, operations
from runtime.frontends.frameworks.plain_state import plain_row
from runtime.frontends.frameworks.step_loop import AtHandOut
from runtime.frontends.frameworks.trackers import runs
from runtime.frontends.frameworks.trackers.rows import KeptRows

TESTED = ("1.15",)
"""Versions with which the tests ran."""

PRIVATE = ("_gpu_gather", "_gpu_gather_object")
ROWS = "tracker_rows"
"""Kind of what the script has logged, among the objects that it has made."""
REFUSED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "TP", "XLA")
"""Names of distributed types that cannot train in place."""


def install(seams: Seams, accelerate: Any) -> None:
    """accelerate: the package. Raises ConfigError if it lacks a private name that is needed."""
    functions = operations()
    if missing := [name for name in PRIVATE if not hasattr(functions, name)]:
        raise ConfigError(
            f"accelerate.utils.operations has no {', '.join(missing)}: version {accelerate.__version__} cannot "
            f"train in place, {', '.join(TESTED)} can; or start the script with --restart"
        )
    seams.wrap(accelerate.PartialState, "__init__", _state_made)
    seams.wrap(accelerate.Accelerator, "__init__", _made)
    for name in ("save_state", "save_model"):
        seams.wrap(accelerate.Accelerator, name, _saved)
    seams.wrap(accelerate.Accelerator, "init_trackers", _init_trackers)
    seams.wrap(accelerate.Accelerator, "log", _log)
    seams.wrap(accelerate.data_loader.DataLoaderShard, "__iter__", _iterate)
    seams.wrap(accelerate.data_loader.DataLoaderDispatcher, "__iter__", _dispatched)
    seams.wrap(accelerate.scheduler.AcceleratedScheduler, "step", _scheduler_step)
    seams.wrap(functions, "_gpu_gather", _gather)
    seams.wrap(functions, "_gpu_gather_object", _gather_object)
    for module in (functions, accelerate.utils, accelerate.accelerator):
        seams.wrap(module, "pad_across_processes", _pad)
    for name in ("notebook_launcher", "debug_launcher"):
        seams.wrap(accelerate, name, _launched)
    seams.wrap(accelerate.PartialState, "split_between_processes", _split)
    local = accelerate.PartialState.is_local_main_process.fget
    seams.replace(accelerate.PartialState, "is_local_main_process", property(lambda self: _is_local_main(self, local)))


class Accelerated:
    """What the script's accelerators count, and its schedulers with them. Registered with the job."""

    def __init__(self, script: RankScript) -> None:
        self._script = script
        self.accelerators: list[Any] = []
        self._at_pass = AtHandOut(self)
        self._unsynced: dict[int, int] = {}
        """Calls of a scheduler's step() in this turn that belong to no step of its optimizer: id -> number."""
        self._trackers: list[Callable[[], None]] = []
        """What makes the trackers that this worker has not made, because another one is the leader."""
        self._tracked: tuple[Any, KeptRows] | None = None
        """The accelerator that has trackers, and what it has logged."""
        self._rows_at_pass: AtHandOut | None = None
        self._opened = 0
        """Calls of init_trackers() for trackers that have runs."""
        self.came_later = comes_later(script)
        script.job.on_lead(self._lead)

    @classmethod
    def of(cls, script: RankScript) -> Accelerated | None:
        """What this script's accelerators count; None: the script has made no Accelerator."""
        found = script.objects.by_kind.get("accelerate")
        return cast(Accelerated, found[0].kept) if found else None

    def add(self, accelerator: Any) -> None:
        """The script has made an Accelerator. Raises ConfigError for what cannot train in place."""
        kind = accelerator.distributed_type.value
        if kind in REFUSED:
            raise ConfigError(f"accelerate with {kind} cannot train in place; start the script with --restart")
        if self._script.begun:
            return  # made for an evaluation: a newcomer would not have it
        if not self.accelerators:
            self._script.made("accelerate", self._at_pass)
        self.accelerators.append(accelerator)
        self._at_pass.note()

    def remove(self, accelerator: Any) -> None:
        """It belongs to a framework that has a loop of its own."""
        self.accelerators = [own for own in self.accelerators if own is not accelerator]
        if not self.accelerators:
            self._script.objects.by_kind.pop("accelerate", None)

    # State, as it was when a pass began

    def state_dict(self) -> dict[str, Any]:
        return {"accelerators": list(map(counts_of, self.accelerators))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for own, kept in zip(self.accelerators, state["accelerators"], strict=True):
            is_set = own.flag_tensor is not None and int(own.flag_tensor)
            set_counts(own, {**kept, "flag": int(own.flag_tensor) if is_set else kept["flag"]})  # by any rank

    def note(self) -> None:
        self._unsynced.clear()
        self._at_pass.note()
        if self._rows_at_pass is not None:
            self._rows_at_pass.note()

    def put_back(self) -> None:
        self._unsynced.clear()
        self._at_pass.load_state_dict(self._at_pass.state_dict())

    # Schedulers

    def scheduler_step(self, scheduler: Any) -> None:
        """A step() of a batch whose gradients are only added up, which accelerate counts."""
        self._unsynced[id(scheduler)] = self._unsynced.get(id(scheduler), 0) + 1

    def settle(self, scheduler: Any) -> None:
        """Its optimizer is about to step: what was counted in this turn holds."""
        if scheduler.gradient_state.adjust_scheduler:
            scheduler.scheduler._step_count += self._unsynced.pop(id(scheduler), 0)

    # Trackers

    def run_ids(self, accelerator: Any, open_runs: Callable[[], None]) -> dict[str, str]:
        """Tracker -> the id of its run, for trackers that have runs. The leader opens them, once in a job."""
        script = self._script
        if script.begun or not runs.asked_for(accelerator):
            return {}

        def opened() -> dict[str, str]:
            open_runs()
            return runs.ids_of(accelerator)

        self._opened += 1
        return script.job.shared(f"runs of accelerate's trackers {self._opened}", opened)

    def tracked(self, accelerator: Any, begin: Callable[[], None]) -> None:
        """The script has asked for trackers, which accelerate makes in the main process only. begin: makes them."""
        script = self._script
        if script.rank_now != 0:
            self._trackers.append(begin)
        if self._tracked is not None or script.begun:
            return
        rows = KeptRows()
        self._tracked, self._rows_at_pass = (accelerator, rows), AtHandOut(rows)
        script.made(ROWS, self._rows_at_pass)
        script.training.carrier.leave_undigested(ROWS)  # there may be times in them
        if script.rank_now != 0 or script.training.checkpoints.found is not None:
            self._trackers.append(lambda: _write_again(accelerator, rows))

    def logged(self, accelerator: Any, values: Mapping[str, Any], step: int | None) -> None:
        """The script logs. A leader that has died since the step began may have written this row, or not."""
        script = self._script
        if script.begun and script.rank_now == 0:
            self._lead()
        if self._tracked is not None and self._tracked[0] is accelerator and step is not None and not script.mute:
            self._tracked[1].add(step, plain_row(values))

    def _lead(self) -> None:
        """This worker is the leader from now on."""
        while self._trackers:
            self._trackers.pop(0)()


def comes_later(script: RankScript) -> bool:
    """Whether the job has trained before this worker has come: steps that it does may be done again."""
    return script.training.at.joining or script.training.checkpoints.found is not None


def counts_of(accelerator: Any) -> dict[str, int | None]:
    """What an Accelerator counts, and its trigger."""
    return {
        "step": accelerator.step,
        "saves": accelerator.project_configuration.iteration,
        "flag": None if accelerator.flag_tensor is None else int(accelerator.flag_tensor),
    }


def set_counts(accelerator: Any, counts: Mapping[str, int | None]) -> None:
    """Give an Accelerator what `counts_of` has told."""
    accelerator.step = counts["step"]
    accelerator.project_configuration.iteration = counts["saves"]
    flag = counts["flag"]
    accelerator.flag_tensor = None if flag is None else torch.tensor(flag, device=accelerator.device)


def _state_made(script: RankScript, original: Any, self: Any, /, cpu: bool = False, **kwargs: Any) -> None:
    """On a machine without a GPU accelerate has one process unless it is told to use the CPU."""
    original(self, cpu or script.job.device.type == "cpu", **kwargs)


def _made(script: RankScript, original: Any, self: Any, /, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if script.turn is not Turn.ELSEWHERE:
        (Accelerated.of(script) or Accelerated(script)).add(self)


def _iterate(script: RankScript, original: Any, loader: Any) -> Any:
    state = Accelerated.of(script)
    if state is None or script.turn is Turn.ELSEWHERE:
        return original(loader)
    if torch.is_grad_enabled() and all(model.training for model in script.objects.wrapped):
        return PreparedTraining(script, loader, state)
    return GatheringLoop(script, loader, PreparedBatches.of_evaluation(loader, script)).batches()


def _dispatched(script: RankScript, original: Any, loader: Any) -> Any:
    if Accelerated.of(script) is None or script.turn is Turn.ELSEWHERE:
        return original(loader)
    raise ConfigError(
        f"a DataLoader of {type(loader.dataset).__name__} whose batches rank 0 hands out to the others: nobody could "
        "give a lost worker's samples to another one. Use a dataset with __len__ and __getitem__, and leave "
        "dispatch_batches out"
    )


def _scheduler_step(script: RankScript, original: Any, self: Any, /, *args: Any, **kwargs: Any) -> None:
    state = Accelerated.of(script)
    if state is None or not self.step_with_optimizer or script.turn in (Turn.OUTSIDE, Turn.ELSEWHERE):
        original(self, *args, **kwargs)
    elif not self.gradient_state.sync_gradients:
        if script.turn is not Turn.ENDED:
            state.scheduler_step(self)
        elif not script.silent:
            original(self, *args, **kwargs)
    elif not script.holds_back(self, "step"):
        state.settle(self)
        original(self, *args, **kwargs)


def _saved(script: RankScript, original: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Nothing is written in a silent turn, and by a newcomer that passes by old epochs. Where accelerate numbers the
    directories, a worker that comes into the step copies no files: the others have written them."""
    if script.silent or script.passing:
        return None
    settings, state = self.project_configuration, Accelerated.of(script)
    if original.__name__ == "save_state" and settings.automatic_checkpoint_naming and state is not None:
        directory = Path(self.project_dir, "checkpoints", f"checkpoint_{self.save_iteration}")
        if script.training.at.joining:
            settings.iteration += 1
            return str(directory)
        if state.came_later:
            _clear(directory)
    return original(self, *args, **kwargs)


def _clear(directory: Path) -> None:
    """Remove what a step has saved that was lost, and is done again. It moves away at once, as all workers do this
    before accelerate's barrier, behind which the leader writes."""
    lost = directory.parents[1] / f".lost-{directory.name}-{secrets.token_hex(4)}"
    with suppress(FileNotFoundError):
        directory.rename(lost)
        shutil.rmtree(lost, ignore_errors=True)


def _init_trackers(
    script: RankScript,
    original: Any,
    self: Any,
    /,
    project_name: str,
    config: Any = None,
    init_kwargs: Any = None,
) -> None:
    state = Accelerated.of(script)
    if state is None:
        original(self, project_name, config, init_kwargs)
        return
    before = len(self.trackers)
    ids = state.run_ids(self, lambda: original(self, project_name, config, init_kwargs))
    options = runs.with_ids(init_kwargs, ids)
    if len(self.trackers) == before:  # in the leader they are open
        original(self, project_name, None if ids else config, options)
    # The configuration is logged already.
    state.tracked(self, lambda: original(self, project_name, None, options))


def _log(
    script: RankScript, original: Any, self: Any, /, values: Any, step: int | None = None, log_kwargs: Any = None
) -> None:
    if (state := Accelerated.of(script)) is not None:
        state.logged(self, values, step)
    original(self, values, step, log_kwargs)


def _write_again(accelerator: Any, kept: KeptRows) -> None:
    """In accelerate's trackers: what a leader that has died may not have written."""
    again = kept.rewrite()
    for tracker in accelerator.trackers:
        if tracker.name in (runs.WANDB, runs.MLFLOW):
            runs.send_again(tracker, kept)
        if any(kind.__name__ == "TensorBoardTracker" for kind in type(tracker).__mro__):
            kind, options = type(tracker.writer), {**tracker.init_kwargs, "purge_step": again.purge_step}
            tracker.writer.close()
            tracker.writer = kind(tracker.logging_dir, **options)
            for step, row in again.rows:
                tracker.log(row, step=step)


def _gather(script: RankScript, original: Any, tensor: Any) -> Any:
    loop = script.evaluations.loop
    if not isinstance(loop, GatheringLoop):
        return original(tensor)
    return operations().recursively_apply(loop.gather, tensor, error_on_other_type=True)


def _gather_object(script: RankScript, original: Any, thing: Any) -> Any:
    loop = script.evaluations.loop
    return loop.gather_object(thing) if isinstance(loop, GatheringLoop) else original(thing)


def _pad(
    script: RankScript,
    original: Any,
    tensor: Any,
    dim: int = 0,
    pad_index: int = 0,
    pad_first: bool = False,
) -> Any:
    loop = script.evaluations.loop
    if not isinstance(loop, GatheringLoop):
        return original(tensor, dim, pad_index, pad_first)
    with loop.padding(dim, pad_index, pad_first) as padded:
        found = original(tensor, dim, pad_index, pad_first)
        operations().recursively_apply(padded, found)
    return found


def _launched(script: RankScript, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    raise mistakes.not_in_place(
        f"accelerate.{original.__name__}()", "Call the function itself: this process is one of the job's workers."
    )


def _split(script: RankScript, original: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    raise mistakes.not_in_place(
        "split_between_processes()", "Use a DataLoader that accelerator.prepare() has made, and gather()."
    )


def _is_local_main(self: Any, local: Any) -> bool:
    """All ranks are of one node, as LOCAL_WORLD_SIZE says."""
    return bool(local(self) if RankScript.current() is None else self.is_main_process)
