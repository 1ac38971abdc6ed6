"""`elastic.ray` on a real Ray cluster of several nodes on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chaos_tests.support.processes import command_line, living
from elastic.errors import ConfigError, ElasticError, LaunchFailed, NameInUse
from elastic.ray import JobResult, Trainer
from tests.engines.training import DEADLINE_S, SOON_ORPHANS, STEPS, Course, train
from tests.live.jobs import ROOT

ray = pytest.importorskip("ray", reason="make test-engines installs it")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = [pytest.mark.timeout(1200), pytest.mark.filterwarnings("default")]

ETCD = "--name=embedded"
SMALL = {"object_store_memory": 80 << 20, "include_dashboard": False}


@pytest.fixture(autouse=True)
def own_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray keeps what it has logged; sockets are below, so its path has to be short."""
    with tempfile.TemporaryDirectory(prefix="ray") as directory:
        monkeypatch.setenv("RAY_TMPDIR", directory)
        yield


class RayNodes:
    """A cluster, whose head has no room for workers, and its other nodes with room for one each. drives: this process
    is a driver."""

    def __init__(self, nodes: int, *, drives: bool = True) -> None:
        self.cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **SMALL})
        try:
            self.nodes = [self.add() for _ in range(nodes)]
            if drives:
                ray.init(address=self.cluster.address, log_to_driver=False)
        except BaseException:
            self.close()
            raise

    def add(self) -> Any:
        return self.cluster.add_node(num_cpus=1, object_store_memory=SMALL["object_store_memory"])

    def remove(self, node: Any) -> None:
        """As by its power switch."""
        self.cluster.remove_node(node, allow_graceful=False)

    def node_with_worker(self, place: int) -> Any:
        return self.nodes[place]

    def close(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()


@contextmanager
def nodes(count: int, *, drives: bool = True) -> Iterator[RayNodes]:
    found = RayNodes(count, drives=drives)
    try:
        yield found
    finally:
        found.close()


def trainer(
    course: Course, *, workers: tuple[int, int] = (1, 3), config: dict[str, Any] | None = None, **more: Any
) -> Trainer:
    return Trainer(
        train, str(course.home), config or {}, workers=workers, checkpoint_dir=course.home / "checkpoints", **more
    )


def fitting(of: Trainer) -> Future[JobResult]:
    """Beside this thread, which alone may add nodes to a cluster; it ends with the cluster."""
    found: Future[JobResult] = Future()

    def fit() -> None:
        try:
            found.set_result(of.fit())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=fit, daemon=True).start()
    return found


def test_a_node_is_lost_and_another_one_comes_and_the_bits_are_those_of_the_quiet_run(
    course: Course, mark: str, quiet: str
) -> None:
    with nodes(3) as cluster:
        training = fitting(trainer(course))
        course.await_world(3)
        cluster.remove(cluster.nodes[1])
        course.await_world(2, "after a loss")
        cluster.add()
        course.await_world(3, "after a node has come")
        course.pace(0.0)
        result = training.result(DEADLINE_S)
    assert result.value == (quiet, result.value[1]) and result.digest == quiet
    assert result.steps == STEPS and 0 < result.metrics["loss"] < 10
    assert result.checkpoint is None or Path(result.checkpoint).exists()
    assert [step for step, _ in course.worlds] == list(range(STEPS))


def test_a_node_that_ray_drains_leaves_in_order_and_another_one_takes_its_place(
    course: Course, mark: str, quiet: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with nodes(3) as cluster:
        training = fitting(trainer(course, workers=(1, 2)))
        course.await_world(2)
        (busy, *_) = (node for node in cluster.nodes if holds_an_agent(node))
        options = ("--node-id", busy.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot")
        drain = ("drain-node", "--address", cluster.cluster.address, *options, "--deadline-remaining-seconds", "90")
        subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *drain], check=True, timeout=DEADLINE_S)
        course.await_world(1, "after the drain")
        course.await_world(2, "when another node has its place")
        course.pace(0.0)
        result = training.result(DEADLINE_S)
    assert result.digest == quiet
    assert "has left the job, as its machine has to go" in capfd.readouterr().err
    assert [step for step, _ in course.worlds] == list(range(STEPS))


def test_all_nodes_are_lost_and_the_job_goes_on_from_its_checkpoint_when_others_come(
    course: Course, mark: str, quiet: str
) -> None:
    with nodes(2) as cluster:
        training = fitting(trainer(course, workers=(1, 2), checkpoint_every="20 steps", timing=SOON_ORPHANS))
        course.await_world(2)
        await_checkpoint(course)
        for node in cluster.nodes:
            cluster.remove(node)
        cluster.add()
        course.await_world(1, "after all were lost")
        course.pace(0.0)
        result = training.result(DEADLINE_S)
    assert result.digest == quiet and result.steps == STEPS
    assert result.checkpoint is not None and Path(result.checkpoint).exists()


def test_no_node_comes_in_time_and_the_job_goes_on_under_another_number(
    course: Course, mark: str, quiet: str, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def goes_on() -> bool:
        said.append(capfd.readouterr().err)
        return "goes on as train-" in "".join(said)

    with nodes(2) as cluster:
        training = fitting(trainer(course, workers=(1, 2), checkpoint_every="20 steps", timing=SOON_ORPHANS))
        course.await_world(2)
        await_checkpoint(course)
        begun = len(course.worlds)
        for node in cluster.nodes:
            cluster.remove(node)
        course.until("the job that goes on", goes_on)
        course.pace(0.0)
        cluster.add()
        result = training.result(DEADLINE_S)
    assert result.digest == quiet and result.steps == STEPS
    assert min(step for step, _ in course.worlds[begun:]) > 0, "it did not begin again"


def test_the_head_is_started_again_on_what_redis_has_and_training_does_not_notice(
    course: Course, mark: str, quiet: str, redis: None
) -> None:
    with nodes(2) as cluster:
        training = fitting(trainer(course, workers=(1, 2)))
        course.await_world(2)
        head = cluster.cluster.head_node
        head.kill_gcs_server(check_alive=False)
        begun = len(course.worlds)
        course.until("steps without a head", lambda: len(course.worlds) > begun + 20)
        head.start_gcs_server()
        course.until("steps with a head", lambda: len(course.worlds) > begun + 40)
        cluster.remove(cluster.nodes[0])
        cluster.add()
        course.await_world(1, "after a node was lost")
        course.await_world(2, "after a node has come")
        course.pace(0.0)
        result = training.result(DEADLINE_S)
    assert result.digest == quiet


@pytest.fixture
def redis(tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What Ray's head keeps its state in."""
    server = shutil.which("redis-server")
    assert server is not None, "apt-get install redis-server; make test-engines does it"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    monkeypatch.setenv("RAY_REDIS_ADDRESS", f"127.0.0.1:{port}")
    yield
    process.kill()
    process.wait()


@pytest.mark.parametrize("comes_back", [False, True])
def test_the_head_is_lost_without_redis_and_all_of_ray_ends_and_another_call_goes_on(
    comes_back: bool, course: Course, mark: str, quiet: str
) -> None:
    with nodes(2, drives=False) as cluster:
        driver = driver_of_another_process(cluster, course, "name='long', checkpoint_every='20 steps'")
        try:
            course.await_world(2)
            await_checkpoint(course)
            cluster.cluster.head_node.kill_gcs_server(check_alive=False)
            begun = len(course.worlds)
            course.until("steps without a head", lambda: len(course.worlds) > begun + 20)
            course.pace(0.5)  # it is not complete before Ray gives up
            if comes_back:
                cluster.cluster.head_node.start_gcs_server()
            assert driver.wait(DEADLINE_S) != 0, "Ray ends it"
        finally:
            driver.kill()
            driver.wait()
        course.until("no process of the job", lambda: not of_the_job(mark))
    goes_on(course, quiet)


def test_etcd_of_a_job_is_killed_and_comes_back_and_training_does_not_notice(
    course: Course, mark: str, quiet: str
) -> None:
    with nodes(2) as cluster:
        training = fitting(trainer(course, workers=(1, 2)))
        course.await_world(2)
        (etcd,) = processes(mark, ETCD)
        os.kill(etcd, signal.SIGKILL)
        begun = len(course.worlds)
        course.until("etcd again", lambda: [pid for pid in processes(mark, ETCD) if pid != etcd])
        course.until("steps after that", lambda: len(course.worlds) > begun + 10)
        assert {world for _, world in course.worlds[begun:]} == {2}
        cluster.remove(cluster.nodes[0])  # what the leader decides now is durable again
        course.await_world(1, "after a node was lost")
        course.pace(0.0)
        result = training.result(DEADLINE_S)
    assert result.digest == quiet
    assert [step for step, _ in course.worlds] == list(range(STEPS))


def test_the_rendezvous_of_a_job_is_killed_and_the_call_says_so_and_another_one_goes_on(
    course: Course, mark: str, quiet: str
) -> None:
    with nodes(2):
        training = fitting(trainer(course, workers=(1, 2), name="long", checkpoint_every="20 steps"))
        course.await_world(2)
        await_checkpoint(course)
        (host,) = processes(mark, "elastic.platforms.common.fleet_host")
        os.kill(host, signal.SIGKILL)
        with pytest.raises(ElasticError, match="the rendezvous of this job has ended with -9"):
            training.result(DEADLINE_S)
        course.until("no process of the job", lambda: not of_the_job(mark))
    goes_on(course, quiet)


def goes_on(course: Course, quiet: str) -> None:
    """A later call with the name goes on from a checkpoint, on a cluster of its own."""
    done = len(course.worlds)
    course.pace(0.0)
    with nodes(1):
        result = trainer(course, workers=(1, 2), name="long", checkpoint_every="20 steps").fit()
    assert result.digest == quiet == result.value[0] and result.steps == STEPS
    began, *_ = (step for step, _ in course.worlds[done:])
    assert began % 20 == 0 and 0 < began <= done
    assert [step for step, _ in course.worlds[done:]] == list(range(began, STEPS))


def await_checkpoint(course: Course) -> None:
    course.until("a checkpoint", lambda: list(course.home.glob("checkpoints/*/_periodic/step-*/manifest.json")))


def processes(mark: str, words: str) -> list[int]:
    """Those whose command line has these words."""
    return [pid for pid in living(mark) if words in command_line(pid)]


def test_the_driver_is_killed_and_leaves_nothing(course: Course, mark: str) -> None:
    with nodes(2) as cluster:
        driver = driver_of_another_process(cluster, course, "")
        try:
            course.await_world(2)
        finally:
            driver.kill()
            driver.wait()
        course.until("no process of the job", lambda: not of_the_job(mark))


def test_a_job_that_is_lost_with_its_driver_and_all_of_ray_goes_on_by_another_call(
    course: Course, mark: str, quiet: str, capfd: pytest.CaptureFixture[str]
) -> None:
    again = trainer(course, workers=(1, 2), name="long", checkpoint_every="20 steps")
    with nodes(2) as cluster:
        driver = driver_of_another_process(cluster, course, "name='long', checkpoint_every='20 steps'")
        try:
            course.await_world(2)
            checkpoints = course.home / "checkpoints" / "long-1" / "_periodic"
            course.until("a checkpoint", lambda: list(checkpoints.glob("step-*/manifest.json")))
        finally:
            driver.kill()
            driver.wait()
        course.until("no process of the job", lambda: not of_the_job(mark))
    done = len(course.worlds)
    course.pace(0.0)
    with nodes(1):
        result = again.fit()
        assert result.digest == quiet and result.value[0] == quiet and result.steps == STEPS
        began, *_ = (step for step, _ in course.worlds[done:])
        assert began % 20 == 0 and 0 < began <= done
        assert [step for step, _ in course.worlds[done:]] == list(range(began, STEPS))
        once_more = again.fit()
    assert (once_more.digest, once_more.value[0], once_more.steps) == (quiet, quiet, STEPS)
    told = capfd.readouterr().err
    assert f"long-1 was begun before; it goes on from step {began}, checkpoint step-" in told


def test_a_second_call_with_a_name_is_refused_while_the_first_one_trains(course: Course, mark: str, quiet: str) -> None:
    with nodes(1), ThreadPoolExecutor(1) as pool:
        running = pool.submit(trainer(course, workers=(1, 1), name="long").fit)
        course.await_world(1)
        with pytest.raises(NameInUse, match=rf"job long now, process {os.getpid()} on .*another name"):
            trainer(course, workers=(1, 1), name="long").fit()
        course.pace(0.0)
        result = running.result(DEADLINE_S)
    assert result.digest == quiet and result.steps == STEPS


def driver_of_another_process(cluster: RayNodes, course: Course, options: str) -> subprocess.Popen[bytes]:
    program = (
        f"import ray; ray.init(address={cluster.cluster.address!r}, log_to_driver=False)\n"
        "from elastic.ray import Trainer; from tests.engines.training import train\n"
        f"checkpoints = {str(course.home / 'checkpoints')!r}\n"
        f"Trainer(train, {str(course.home)!r}, {{}}, workers=(1, 2), checkpoint_dir=checkpoints, {options}).fit()"
    )
    return subprocess.Popen([sys.executable, "-c", program], start_new_session=True)


def of_the_job(mark: str) -> list[str]:
    lines = [command_line(pid) for pid in living(mark)]
    return [line for line in lines if "elastic" in line or ETCD in line]


def test_an_exception_of_the_function_is_told_with_its_traceback(course: Course, mark: str) -> None:
    course.pace(0.0)
    with nodes(1), pytest.raises(LaunchFailed) as caught:
        trainer(course, workers=(1, 1), config={"fails": 3}, max_restarts=0).fit()
    assert caught.value.exit_code == 1
    assert any("ArithmeticError: the step is too much" in note for note in caught.value.__notes__)


def test_trials_of_tune_take_what_others_leave_and_one_that_is_stopped_leaves_nothing(
    course: Course, mark: str, quiet: str
) -> None:
    from ray import tune

    homes = {lr: course.home / str(lr) for lr in (1e-3, 1.0)}
    for home in homes.values():
        home.mkdir()
    courses = {lr: Course(home) for lr, home in homes.items()}
    places = course.home / "checkpoints"
    search = Trainer(train_of_trial, str(course.home), workers=(1, 2), name="search", checkpoint_dir=places)
    with nodes(3), ThreadPoolExecutor(1) as pool:
        tuner = tune.Tuner(
            search.as_trainable(),
            param_space={"lr": tune.grid_search([1e-3, 1.0])},
            run_config=tune.RunConfig(storage_path=str(course.home / "ray"), verbose=0, stop=stops),
        )
        searching = pool.submit(tuner.fit)
        course.until("two trials", lambda: all(courses[lr].worlds for lr in (1e-3, 1.0)))
        courses[1e-3].await_world(2, "when the other trial was stopped")
        courses[1e-3].pace(0.0)
        found = {one.config["lr"]: one for one in searching.result(DEADLINE_S)}
    assert found[1e-3].metrics["digest"] == quiet
    assert len(list(places.glob("search-*-1"))) == 2, "each trial is a job of its own"
    assert found[1.0].metrics["step"] >= 20 and "digest" not in found[1.0].metrics
    assert sum(max(world for _, world in courses[lr].worlds[:5]) for lr in (1e-3, 1.0)) <= 3


def train_of_trial(home: str, config: dict[str, Any]) -> tuple[str, int]:
    return train(f"{home}/{config['lr']}", config)


def stops(trial: str, result: dict[str, Any]) -> bool:
    return bool(result["config"]["lr"] == 1.0 and result["step"] >= 20)


def holds_an_agent(node: Any) -> bool:
    """Whether this node of the cluster has a place of a job."""
    groups = ray.util.placement_group_table().values()
    return node.node_id in {where for group in groups for where in group["bundles_to_node_id"].values()}


def test_nodes_that_lack_something_are_not_tried_for_ever(course: Course, mark: str) -> None:
    broken = course.home / "broken"
    (broken / "grpc").mkdir(parents=True)
    (broken / "grpc" / "__init__.py").write_text("raise ImportError('not on this machine')")
    with nodes(1, drives=False) as cluster:
        where = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(broken), str(ROOT)])}}
        ray.init(address=cluster.cluster.address, log_to_driver=False, runtime_env=where)
        with pytest.raises(ElasticError, match="each attempt fails: ImportError: not on this"):
            trainer(course, workers=(1, 1)).fit()
        course.until("no process of the job", lambda: not of_the_job(mark))


def test_what_cannot_be_a_job_is_said_before_ray_is_asked(course: Course) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        trainer(course, workers=(0, 2))
    with pytest.raises(ConfigError, match="unknown option worker_count"):
        trainer(course, worker_count=3)
    with pytest.raises(ConfigError, match="resources_per_worker"):
        trainer(course, resources_per_worker={"GPU": -1})
    with pytest.raises(ConfigError, match="a script has none"):
        Trainer("train.py", workers=2).as_trainable()
    assert not ray.is_initialized()
