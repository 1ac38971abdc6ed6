"""`elastic.ray.Trainer`: placement groups and actors, from the start of a job to its end."""

from __future__ import annotations

import contextlib
import copy
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic.errors import ConfigError, ElasticError
from elastic.platforms.common.job_driver import JobDriver, JobResult, NodeTask
from elastic.platforms.common.job_request import JobRequest
from elastic.platforms.common.node_task import TaskOutcome
from elastic.platforms.ray.agent_actor import ElasticAgent
from elastic.platforms.ray.bundles import GroupState, Seat, actor_options, bundle_of, next_steps, state_of
from elastic.platforms.ray.trial import trainable

POLL_S = 0.25
METRICS_S = 1.0
PLACE_S = 60.0
"""How long an actor may still find no place when the job is over: its node is lost, and Ray may not find another."""

EXTRA = "ray"
CHECKPOINTS = "~/elastic-jobs"


class Trainer:
    """A job on a Ray cluster.

    what: a function, which calls elastic.join() and trains, with its `arguments`; or the words of a script, which the
    nodes have. workers: how many, or (at least, at most): training begins with the first number, and takes what Ray
    finds up to the second. workers_per_node: how many share one agent and one placement group; a node may have several.
    resources_per_worker: as Ray names them (default: {"CPU": 1}). name: of the job; a later call with the same name and
    checkpoint_dir goes on from its newest checkpoint, by whatever the job was ended ("": each call is a new job).
    checkpoint_dir: an absolute path that all nodes see, or a URL (default: ~/elastic-jobs). options: fields of a job
    file, such as checkpoint_every="500 steps", spares=1, env={"NAME": "value"}, timing={"pause_limit_s": 3600}.

    Nothing of Ray happens before fit(). Raises ConfigError.
    """

    def __init__(
        self,
        what: Callable[..., Any] | str | Sequence[str],
        *arguments: Any,
        workers: int | tuple[int, int],
        workers_per_node: int = 1,
        resources_per_worker: Mapping[str, float] | None = None,
        name: str = "",
        checkpoint_dir: str | os.PathLike[str] = CHECKPOINTS,
        **options: Any,
    ) -> None:
        root = os.fspath(checkpoint_dir)
        self._request = JobRequest(
            what=what,
            arguments=arguments,
            workers=workers,
            workers_per_node=workers_per_node,
            name=name,
            checkpoint_dir=root if "://" in root else str(Path(root).expanduser().absolute()),
            options=options,
        )
        self._request.spec()
        self._bundle = bundle_of(resources_per_worker or {"CPU": 1}, workers_per_node)

    def fit(self, on_metrics: Callable[[int, Mapping[str, Any]], None] | None = None) -> JobResult:
        """Train, and return what has come of it. on_metrics(step, metrics): called about once a second with what was
        logged in the newest step.

        Connects to Ray, or starts it here, if that has not happened. Raises NameInUse while another call trains a job
        of this name, and LaunchFailed if the job ends in another way than by its end, with the traceback of the
        function as a note.
        """
        ray = imported()
        if not ray.is_initialized():
            ray.init()
        with (
            JobDriver(self._request, ray.util.get_node_ip_address(), EXTRA) as driver,
            _Seats(driver, self._bundle) as seats,
        ):
            told, asks_s = -1, 0.0
            while not driver.poll():
                if not ray.is_initialized():  # its functions would connect again
                    raise ElasticError("Ray was shut down in this process while the job trained")
                seats.step()
                if on_metrics is not None and time.monotonic() >= asks_s:
                    asks_s = time.monotonic() + METRICS_S
                    if (line := driver.newest_step()) and line["step"] > told:
                        told = int(line["step"])
                        on_metrics(told, line["scalars"])
                time.sleep(POLL_S)  # files and other processes: there is nothing to wait on
            seats.finish()
            return driver.result()

    def as_trainable(self) -> Any:
        """For tune.Tuner: each trial is a job of its own, and the function's last argument is the configuration of the
        trial. Raises ConfigError for a script."""
        if not callable(self._request.what):
            raise ConfigError("a trial gives its configuration to a function, and a script has none")
        imported()
        return trainable(self._of)

    def _of(self, config: Mapping[str, Any]) -> Trainer:
        """As this one, with a last argument more. A name of the trainer is a prefix of those of its trials."""
        other, name = copy.copy(self), self._request.name
        other._request = replace(
            self._request,
            arguments=(*self._request.arguments, dict(config)),
            name=f"{name}-{secrets.token_hex(3)}" if name else "",
        )
        return other


def imported() -> Any:
    """Ray. Raises ConfigError without it."""
    try:
        import ray
        import ray.util
    except ImportError:
        raise ConfigError("elastic.ray needs Ray, of an extra: pip install 'elastic-ring[ray]'") from None
    return ray


class _Seats:
    """Groups and actors of a job. A context manager: at its end all are gone."""

    def __init__(self, driver: JobDriver, bundle: Mapping[str, float]) -> None:
        from ray.util.placement_group import placement_group_table, remove_placement_group

        self._ray = imported()
        self._driver = driver
        self._bundle = dict(bundle)
        self._actor = self._ray.remote(**actor_options(bundle))(ElasticAgent)
        self._table, self._remove = placement_group_table, remove_placement_group
        self._tasks = {number: NodeTask(number) for number in range(driver.request.nodes)}
        self._groups: dict[int, Any] = {}
        self._actors: dict[int, Any] = {}
        self._serving: dict[int, Any] = {}

    def __enter__(self) -> _Seats:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._ray.is_initialized():
            return
        for number in list(self._actors):
            self._end(number)
        for number in list(self._groups):
            self._give_back(number)

    def step(self) -> None:
        """Take in what has ended, and start what is missing."""
        self._take_in()
        now_s = time.monotonic()
        seats = [
            Seat(number, self._place(number), number in self._serving, task.due_s <= now_s)
            for number, task in self._tasks.items()
        ]
        steps = next_steps(seats)
        for number in steps.ask:
            self._ask(number)
        for number in steps.start:
            self._start(number)

    def finish(self) -> None:
        """The job is over: wait for the actors that serve it. Those without a place are given up after PLACE_S."""
        deadline_s = time.monotonic() + PLACE_S
        while self._serving:
            self._ray.wait(list(self._serving.values()), timeout=POLL_S)
            self._take_in()
            if time.monotonic() >= deadline_s:
                for number in list(self._serving):
                    if state_of(self._table(self._groups[number])) is not GroupState.READY:
                        self._ended(number, ElasticError("Ray has no place for it"))

    def _take_in(self) -> None:
        ready = self._ray.wait(list(self._serving.values()), num_returns=len(self._serving), timeout=0)[0]
        for number in [number for number, ref in self._serving.items() if ref in ready]:
            outcome: TaskOutcome | Exception
            try:
                outcome = self._ray.get(self._serving[number])
            except self._ray.exceptions.RayError as error:
                outcome = error
            self._ended(number, outcome)

    def _ended(self, number: int, outcome: TaskOutcome | Exception) -> None:
        del self._serving[number]
        self._driver.ended(self._tasks[number], outcome)
        self._end(number)
        # Ray still takes a node for a good one that has just died, or is about to: the next place may be elsewhere.
        self._give_back(number)

    def _place(self, number: int) -> GroupState | None:
        if number in self._serving:
            return GroupState.READY  # Ray is not asked while all is well: its head may be away
        group = self._groups.get(number)
        return None if group is None else state_of(self._table(group))

    def _ask(self, number: int) -> None:
        from ray.util.placement_group import placement_group

        self._groups[number] = placement_group([self._bundle], name=f"elastic {self._driver.job} {number}")

    def _start(self, number: int) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._groups[number], placement_group_bundle_index=0)
        ticket = self._driver.ticket(self._tasks[number])
        actor = self._actors[number] = self._actor.options(scheduling_strategy=where, name=None).remote()
        self._serving[number] = actor.serve.remote(ticket)

    def _end(self, number: int) -> None:
        actor = self._actors.pop(number, None)
        if actor is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)

    def _give_back(self, number: int) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._remove(self._groups.pop(number))
