"""`elastic.spark` on executors that are processes of their own (local-cluster)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic
from chaos_tests.support.processes import command_line, living
from elastic.errors import ConfigError, ElasticError, LaunchFailed, NameInUse
from elastic.platforms.common.job_driver import JobResult
from elastic.spark import run
from tests.engines.training import DEADLINE_S, SOON_ORPHANS, STEPS, Course, train
from tests.live.jobs import ROOT

pyspark = pytest.importorskip("pyspark", reason="make test-engines installs it")

pytestmark = [pytest.mark.timeout(1200), pytest.mark.filterwarnings("default")]


ETCD = "--name=embedded"


@contextmanager
def session(executors: int, home: Path, path: str = "") -> Iterator[Any]:
    """With one task on each executor at a time. path: where executors look for modules first."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local-cluster[{executors},1,512]")
    settings = {
        "spark.ui.enabled": "false",
        "spark.executor.memory": "512m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.warehouse.dir": str(home / "warehouse"),
        "spark.local.dir": str(home),
        "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={home} -XX:-UsePerfData",
        "spark.executor.extraJavaOptions": f"-Djava.io.tmpdir={home} -XX:-UsePerfData",
        "spark.ui.showConsoleProgress": "false",
    }
    if path:
        settings["spark.executorEnv.PYTHONPATH"] = f"{path}:{ROOT}"
    for name, value in settings.items():
        builder = builder.config(name, value)
    found = builder.getOrCreate()
    try:
        yield found
    finally:
        found.stop()
        gateway = pyspark.SparkContext._gateway
        if gateway is not None:  # the JVM outlives a session, and has this test's environment
            gateway.shutdown()
            gateway.proc.stdin.close()
            gateway.proc.wait()
            pyspark.SparkContext._gateway = pyspark.SparkContext._jvm = None


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_WORKER_DIR", str(tmp_path / "work"))
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)


def training(
    course: Course, workers: tuple[int, int] = (1, 2), config: dict[str, Any] | None = None, **options: Any
) -> JobResult:
    checkpoints = course.home / "checkpoints"
    return run(train, str(course.home), config or {}, workers=workers, checkpoint_dir=checkpoints, **options)


def executors(mark: str) -> list[int]:
    return processes(mark, "CoarseGrainedExecutorBackend")


def processes(mark: str, words: str) -> list[int]:
    """Those whose command line has these words."""
    return [pid for pid in living(mark) if words in command_line(pid)]


def of_the_job(mark: str) -> list[str]:
    lines = [command_line(pid) for pid in living(mark)]
    return [line for line in lines if "-m elastic" in line or ETCD in line]


def await_checkpoint(course: Course) -> None:
    course.until("a checkpoint", lambda: list(course.home.glob("checkpoints/*/_periodic/step-*/manifest.json")))


def test_an_executor_is_killed_and_its_successor_joins_and_the_bits_are_those_of_the_quiet_run(
    course: Course, mark: str, quiet: str
) -> None:
    with session(2, course.home), ThreadPoolExecutor(1) as pool:
        running = pool.submit(training, course)
        try:
            course.await_world(2)
            os.kill(executors(mark)[0], signal.SIGKILL)
            course.await_world(1, "after an executor was killed")
            course.await_world(2, "after Spark has started another one")
        finally:
            course.pace(0.0)
        result = running.result(DEADLINE_S)
    assert result.digest == quiet == result.value[0]
    assert [step for step, _ in course.worlds] == list(range(STEPS))


def test_etcd_and_the_python_processes_of_an_executor_are_killed_and_the_bits_are_those_of_the_quiet_run(
    course: Course, mark: str, quiet: str
) -> None:
    with session(2, course.home), ThreadPoolExecutor(1) as pool:
        running = pool.submit(training, course)
        try:
            course.await_world(2)
            (etcd,) = processes(mark, ETCD)
            os.kill(etcd, signal.SIGKILL)
            begun = len(course.worlds)
            (again,) = course.until("etcd again", lambda: [pid for pid in processes(mark, ETCD) if pid != etcd])
            course.until("steps after that", lambda: len(course.worlds) > begun + 10)
            for pid in processes(mark, "pyspark.daemon")[:1]:
                os.killpg(os.getpgid(pid), signal.SIGKILL)
            course.await_world(1, "after the Python processes of an executor were killed")
            course.await_world(2, "after Spark was given the task again")
        finally:
            course.pace(0.0)
        result = running.result(DEADLINE_S)
    assert result.digest == quiet and again != etcd
    assert [step for step, _ in course.worlds] == list(range(STEPS))


def test_all_executors_are_killed_and_the_job_goes_on_from_its_checkpoint(
    course: Course, mark: str, quiet: str
) -> None:
    with session(2, course.home), ThreadPoolExecutor(1) as pool:
        running = pool.submit(training, course, checkpoint_every="20 steps", timing=SOON_ORPHANS)
        try:
            course.await_world(2)
            await_checkpoint(course)
            for pid in executors(mark):
                os.kill(pid, signal.SIGKILL)
            begun = len(course.worlds)
            course.until("steps after all were lost", lambda: len(course.worlds) > begun + 3)
        finally:
            course.pace(0.0)
        result = running.result(DEADLINE_S)
    assert result.digest == quiet and result.steps == STEPS
    assert min(step for step, _ in course.worlds[begun:]) > 0, "it did not begin again"


def test_the_rendezvous_is_killed_and_the_call_says_so_and_nothing_is_left(course: Course, mark: str) -> None:
    with session(2, course.home) as spark:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(training, course)
            course.await_world(2)
            (host,) = processes(mark, "elastic.platforms.common.fleet_host")
            os.kill(host, signal.SIGKILL)
            with pytest.raises(ElasticError, match="the rendezvous of this job has ended with -9"):
                running.result(DEADLINE_S)
        course.until("no process of the job", lambda: not of_the_job(mark))
        tracker = spark.sparkContext.statusTracker()
        course.until("no job of Spark", lambda: list(tracker.getActiveJobsIds()) == [])
        assert len(executors(mark)) == 2, "they are there for others"


def test_the_session_is_stopped_and_the_call_says_so_and_nothing_is_left(course: Course, mark: str) -> None:
    with session(1, course.home) as spark, ThreadPoolExecutor(1) as pool:
        running = pool.submit(training, course)
        course.await_world(1)
        spark.stop()
        with pytest.raises(ElasticError, match="session was stopped while the job trained"):
            running.result(DEADLINE_S)
        course.until("no process of the job", lambda: not of_the_job(mark))


def test_the_driver_is_killed_and_another_call_goes_on_from_the_newest_checkpoint(
    course: Course, mark: str, quiet: str
) -> None:
    program = (
        "from pathlib import Path; from tests.engines.test_spark import Course, session, training\n"
        f"course = Course(Path({str(course.home)!r}))\n"
        "with session(2, course.home):\n"
        "    training(course, name='long', checkpoint_every='20 steps')"
    )
    driver = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    try:
        course.await_world(2)
        await_checkpoint(course)
    finally:
        driver.kill()
        driver.wait()
    course.until("nothing of Spark and of the job", lambda: not living(mark))
    done = len(course.worlds)
    course.pace(0.0)
    with session(1, course.home):
        result = training(course, name="long", checkpoint_every="20 steps")
    assert result.digest == quiet == result.value[0] and result.steps == STEPS
    began, *_ = (step for step, _ in course.worlds[done:])
    assert began % 20 == 0 and 0 < began <= done


def test_a_second_call_with_a_name_is_refused_while_the_first_one_trains(course: Course, mark: str, quiet: str) -> None:
    with session(1, course.home), ThreadPoolExecutor(1) as pool:
        running = pool.submit(training, course, workers=(1, 1), name="long")
        course.await_world(1)
        with pytest.raises(NameInUse, match=r"job long now, .*another name"):
            training(course, workers=(1, 1), name="long")
        course.pace(0.0)
        result = running.result(DEADLINE_S)
    assert result.digest == quiet and result.steps == STEPS


def test_more_tasks_than_executors_begin_with_what_there_is_and_leave_nothing_waiting(
    course: Course, mark: str, quiet: str
) -> None:
    course.pace(0.0)
    with session(1, course.home) as spark:
        result = training(course, workers=(1, 3))
        assert result.digest == quiet
        assert list(spark.sparkContext.statusTracker().getActiveJobsIds()) == []


def test_agents_that_take_longer_than_the_join_window_are_waited_for(course: Course, mark: str, quiet: str) -> None:
    course.pace(0.0)
    with session(1, course.home):
        result = training(course, workers=(1, 1), timing={"join_window_s": 0.1})
    assert result.digest == quiet


def test_an_exception_of_the_function_is_told_with_its_traceback(course: Course, mark: str) -> None:
    course.pace(0.0)
    with session(1, course.home), pytest.raises(LaunchFailed) as caught:
        training(course, workers=(1, 1), config={"fails": 3})
    assert any("ArithmeticError: the step is too much" in note for note in caught.value.__notes__)


def fit_rows(table: str) -> tuple[str, float]:
    """Learns y = 2 x + 1 from a table."""
    job = elastic.join(seed=0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.register(model=model, optimizer=optimizer)
    stream = job.stream(elastic.ParquetStream(table, batch_size=16, shuffle=True), shards=4)
    for _ in job.epochs(3):
        for step in job.steps(stream):
            for batch in step:
                x, y = batch["x"][:, None], batch["y"][:, None]
                loss = (model(x) - y).square().mean()
                loss.backward()
                step.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    return job.digest(), float(model.weight)


def test_a_data_frame_is_written_once_and_read_by_all(course: Course, mark: str) -> None:
    table = str(course.home / "table.parquet")
    with session(2, course.home) as spark:
        frame = spark.range(4000).selectExpr("float(id % 100 / 100) AS x", "float(id % 100 / 50 + 1) AS y")
        frame.write.mode("ignore").parquet(table)
        result = run(fit_rows, table, workers=(1, 2), checkpoint_dir=course.home / "checkpoints")
    digest, weight = result.value
    assert digest == elastic.launch(fit_rows, table, workers=1, job_dir=course.home / "alone", quiet=True)[0]
    assert result.steps == 3 * (4000 // 64) and 1.5 < weight < 2.5


def test_what_cannot_be_a_job_is_said_before_anything_starts(course: Course) -> None:
    with pytest.raises(ConfigError, match="needs a session"):
        training(course)
    with pytest.raises(ConfigError, match="unknown option slots"):
        run(train, workers=2, slots=3)


def test_executors_that_lack_something_are_not_tried_for_ever(course: Course, mark: str) -> None:
    broken = course.home / "broken"
    (broken / "grpc").mkdir(parents=True)
    (broken / "grpc" / "__init__.py").write_text("raise ImportError('not on this machine')")
    with (
        session(1, course.home, str(broken)),
        pytest.raises(ElasticError, match="each attempt fails: ImportError: not on this"),
    ):
        training(course, workers=(1, 1))
