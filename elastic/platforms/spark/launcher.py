"""`elastic.spark.run`: jobs of Spark, each of one task that is an agent, from the start of our job to its end."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from elastic.errors import ConfigError, ElasticError
from elastic.platforms.common.job_driver import JobDriver, JobResult, NodeTask
from elastic.platforms.common.job_request import JobRequest
from elastic.platforms.common.node_task import TaskOutcome, Ticket
from elastic.platforms.spark.executor_task import attend

POLL_S = 0.25
EXTRA = "spark"
CHECKPOINTS = "~/elastic-jobs"
SPECULATION = "spark.speculation"
STOPPED = "the Spark session was stopped while the job trained"


def run(
    what: Callable[..., Any] | str | Sequence[str],
    *arguments: Any,
    workers: int | tuple[int, int],
    workers_per_node: int = 1,
    name: str = "",
    checkpoint_dir: str | os.PathLike[str] = CHECKPOINTS,
    **options: Any,
) -> JobResult:
    """Train on the executors of the active Spark session, and return what has come of it.

    what: a function, which calls elastic.join() and trains, with its `arguments`; or the words of a script, which the
    executors have. workers: how many, or (at least, at most): training begins with the first number, and takes what
    Spark gives up to the second. workers_per_node: how many are below one task of Spark. name: of the job; a later call
    with the same name and checkpoint_dir goes on from its newest checkpoint, by whatever the job was ended ("": each
    call is a new job). checkpoint_dir: an absolute path that all executors see, or a URL (default: ~/elastic-jobs).
    options: fields of a job file, such as checkpoint_every="500 steps", spares=1, env={"NAME": "value"},
    timing={"pause_limit_s": 3600}.

    Raises ConfigError, also without a session; NameInUse while another call trains a job of this name;
    LaunchFailed if the job ends in another way than by its end, with the traceback of the function as a note.
    """
    root = os.fspath(checkpoint_dir)
    request = JobRequest(
        what=what,
        arguments=arguments,
        workers=workers,
        workers_per_node=workers_per_node,
        name=name,
        checkpoint_dir=root if "://" in root else str(Path(root).expanduser().absolute()),
        options=options,
    )
    context = active_context()
    with JobDriver(request, str(context.getConf().get("spark.driver.host")), EXTRA) as driver:
        tasks = _Tasks(driver, context)
        try:
            while not driver.poll():
                tasks.step()
                time.sleep(POLL_S)  # another process decides: there is nothing to wait on
            tasks.finish()
        except BaseException as error:
            tasks.cancel()
            if context._jsc is None and isinstance(error, Exception) and not isinstance(error, ElasticError):
                raise ElasticError(STOPPED) from error
            raise
        return driver.result()


def active_context() -> Any:
    """The SparkContext of the active session. Raises ConfigError without one."""
    try:
        from pyspark import SparkContext
    except ImportError:
        raise ConfigError("elastic.spark needs PySpark, of an extra: pip install 'elastic-ring[spark]'") from None
    context = SparkContext._active_spark_context  # getOrCreate would start one
    if context is None:
        raise ConfigError("elastic.spark.run() needs a session: SparkSession.builder...getOrCreate() before it")
    if context.getConf().get(SPECULATION, "false").strip().lower() == "true":  # as Spark reads it; Python writes True
        raise ConfigError(f"{SPECULATION} would start agents twice; start the session without it")
    return context


class _Tasks:
    """The jobs of Spark, each with a thread that waits for it."""

    def __init__(self, driver: JobDriver, context: Any) -> None:
        self._driver = driver
        self._context = context
        self._tasks = {number: NodeTask(number) for number in range(driver.request.nodes)}
        self._serving: dict[int, str] = {}
        """Number of a task -> Spark's group of its job."""
        self._over: queue.SimpleQueue[tuple[int, TaskOutcome | Exception]] = queue.SimpleQueue()

    def step(self) -> None:
        """Take in what has ended, and start what is missing. Raises ElasticError if the session was stopped, or what
        Spark raises while that happens."""
        if self._context._jsc is None:  # nothing public says so
            raise ElasticError(STOPPED)
        self._take_in()
        for number, task in self._tasks.items():
            if number not in self._serving and task.due_s <= time.monotonic():
                self._start(number)

    def finish(self) -> None:
        """The job is over: wait for those that serve it; those that Spark has found no place for are given up."""
        while self._serving:
            for group in self._serving.values():
                if not self._runs(group):
                    self._context.cancelJobGroup(group)
            time.sleep(POLL_S)
            self._take_in()

    def cancel(self) -> None:
        """All of them, at once."""
        if self._context._jsc is not None:
            for group in self._serving.values():
                self._context.cancelJobGroup(group)

    def _take_in(self) -> None:
        while not self._over.empty():
            number, outcome = self._over.get()
            del self._serving[number]
            self._driver.ended(self._tasks[number], outcome)

    def _start(self, number: int) -> None:
        from pyspark import InheritableThread

        task = self._tasks[number]
        ticket = self._driver.ticket(task)
        group = self._serving[number] = f"{self._driver.job} {task.node}"
        InheritableThread(target=self._submit, args=(number, group, ticket), daemon=True).start()

    def _submit(self, number: int, group: str, ticket: Ticket) -> None:
        outcome: TaskOutcome | Exception
        try:
            self._context.setJobGroup(group, f"elastic: {group}", interruptOnCancel=True)
            found: TaskOutcome | None
            (found,) = self._context.parallelize([ticket], 1).mapPartitions(attend).collect()
            outcome = found or ElasticError("Spark has lost its task")
        except Exception as error:  # py4j has a dozen
            outcome = error
        self._over.put((number, outcome))

    def _runs(self, group: str) -> bool:
        """Whether an executor has its task."""
        tracker = self._context.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
        stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
        return any(stage.numActiveTasks + stage.numCompletedTasks for stage in stages if stage is not None)
