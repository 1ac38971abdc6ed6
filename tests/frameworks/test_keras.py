"""Scripts with fit() of Keras on torch, as they are written for one process: deaths, joins and resumed runs leave no
trace in weights, histories and files. And a model of Keras in a loop of torch."""

from __future__ import annotations

import functools
import io
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from elastic.records import ledger
from tests.frameworks.fates import everything_killed, two_deaths_and_two_joins
from tests.frameworks.test_hugging_face import SCRIPTS
from tests.live.jobs import DEADLINE_S, Job
from tests.live.test_ddp import digest

pytest.importorskip("h5py", reason="frameworks are installed by `make test-frameworks`")

KINDS = ("keras_classification", "keras_language_model", "keras_fine_tuning")


def environment(home: Path, **more: str) -> dict[str, str]:
    return {"KERAS_BACKEND": "torch", "KERAS_HOME": str(home), **more}


@dataclass(frozen=True)
class Run:
    digest: str
    files: dict[str, Any]
    """Text files, and the arrays in files of weights."""
    steps: list[Any]
    """Of the ledger."""
    printed: list[str]


def words(kind: str, workers: int, output: Path, *more: str) -> tuple[str, ...]:
    options = ("--workers", str(workers), "--ranks", "4", "--checkpoint-every", "4 steps")
    return (*options, str(SCRIPTS / f"{kind}.py"), str(output), *more)


def content(path: Path) -> Any:
    if path.suffix == ".keras":  # its metadata have the date
        with zipfile.ZipFile(path) as archive:
            return arrays(io.BytesIO(archive.read("model.weights.h5")))
    return arrays(path) if path.suffix == ".h5" else path.read_bytes()


def arrays(file: Any) -> dict[str, Any]:
    """Name -> (dtype, shape, bytes) of each array in an HDF5 file."""
    import h5py  # type: ignore[import-not-found, unused-ignore]

    found: dict[str, Any] = {}

    def note(name: str, thing: Any) -> None:
        if hasattr(thing, "shape"):
            found[name] = (str(thing.dtype), thing.shape, thing[()].tobytes())

    with h5py.File(file) as opened:
        opened.visititems(note)
    return found


def ended(job: Job, output: Path) -> Run:
    """What a job has left that has ended well."""
    assert job.wait() == 0, job.output
    files = {str(path.relative_to(output)): content(path) for path in sorted(output.rglob("*")) if path.is_file()}
    printed = [line for line in job.output.splitlines() if line.startswith(("epoch ", "history", "evaluated"))]
    return Run(digest(job), files, ledger.read(job.dir / "steps.jsonl"), printed)


def same(run: Run, wanted: Run) -> None:
    assert run.digest == wanted.digest
    assert ledger.compare(run.steps, wanted.steps) is None
    assert run.files == wanted.files
    assert set(run.printed) == set(wanted.printed)  # the next leader may say again what the one before it has said


@functools.cache
def quiet(kind: str, home: Path) -> Run:
    """One worker that has all ranks, without a fault."""
    with Job(home, *words(kind, 1, home / kind), name=f"quiet-{kind}", environment=environment(home)) as job:
        return ended(job, home / kind)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quiet")


@pytest.mark.parametrize("kind", KINDS)
def test_two_deaths_and_two_joins_leave_no_trace(kind: str, home: Path, tmp_path: Path) -> None:
    wanted, output = quiet(kind, home), tmp_path / "output"
    with Job(tmp_path, *words(kind, 3, output), environment=environment(tmp_path)) as job:
        two_deaths_and_two_joins(job, 3, 12)
        same(ended(job, output), wanted)
        assert not job.events("script_failed"), job.output


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_when_everything_was_killed(kind: str, home: Path, tmp_path: Path) -> None:
    wanted, output = quiet(kind, home), tmp_path / "output"
    with Job(tmp_path, *words(kind, 2, output), environment=environment(tmp_path)) as job:
        everything_killed(job, 17)
    with Job(tmp_path, *words(kind, 3, output), environment=environment(tmp_path)) as job:
        job.pace(0)
        run = ended(job, output)
    assert run.digest == wanted.digest
    assert ledger.compare(run.steps, wanted.steps) is None
    assert run.files == wanted.files


def test_a_backup_goes_on_with_the_batches_of_a_generator_that_come_next(home: Path, tmp_path: Path) -> None:
    """Keras's own snapshot, in a job that knows nothing of the one before it: weights, moments and data go on from the
    end of an epoch, also through two deaths and joins."""
    kind, output = "keras_backup", tmp_path / "output"
    wanted, variables = quiet(kind, home), environment(tmp_path)
    with Job(tmp_path, *words(kind, 2, output), name="first", environment=variables) as job:
        everything_killed(job, 11)
    over = json.loads((output / "backup" / "training_metadata.json").read_text())["epoch"]
    assert 2 <= over <= 4
    with Job(tmp_path, *words(kind, 3, output), name="second", environment=variables) as job:
        two_deaths_and_two_joins(job, 2, 6)
        run = ended(job, output)
        assert not job.events("script_failed"), job.output
    assert len(run.steps) == 5 * (6 - over)
    assert run.files == wanted.files


def test_losses_and_metrics_are_those_of_one_process(tmp_path: Path) -> None:
    """Keras has no data parallelism on torch: fit() in one process is what a job is compared with."""
    script = SCRIPTS / "keras_one_process.py"
    with Job(tmp_path, "--workers", "2", "--ranks", "4", str(script), environment=environment(tmp_path)) as job:
        assert job.wait() == 0, job.output
        ours = next(line for line in job.output.splitlines() if line.startswith("history "))
    variables = {**os.environ, **environment(tmp_path), "OMP_NUM_THREADS": "1"}
    plain = subprocess.run(
        [sys.executable, str(script)], env=variables, check=True, capture_output=True, text=True, timeout=DEADLINE_S
    ).stdout
    theirs = next(line for line in plain.splitlines() if line.startswith("history "))
    mine, other = (dict(item.split("=") for item in line.split()[1:]) for line in (ours, theirs))
    assert mine.keys() == other.keys() and len(mine) == 50 + 6
    for name, value in mine.items():
        assert float(value) == pytest.approx(float(other[name]), rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(
    ("way", "said"), [("changed", "clipnorm="), ("twice", "apply() twice"), ("never", "has not called optimizer.apply")]
)
def test_what_cannot_train_in_place_is_refused_with_what_to_write(way: str, said: str, tmp_path: Path) -> None:
    options = ("--workers", "1", "--ranks", "2", "--no-replace")
    script = str(SCRIPTS / "keras_refused.py")
    with Job(tmp_path, *options, script, way, environment=environment(tmp_path)) as job:
        assert job.wait() == 1, job.output
        refused = [line for line in job.output.splitlines() if line.startswith("refused: ")]
    names = (
        "steps_per_execution",
        'reduction="sum"',
        "no trainable weights",
        said,
        "has ended with an error",
        "train_on_batch()",
    )
    assert len(refused) == len(names), job.output
    for name, line in zip(names, refused, strict=True):
        assert name in line


# A loop of torch

SCRIPT = str(SCRIPTS / "keras_loop.py")


def start(home: Path, name: str, workers: int, *words: str) -> Job:
    options = ("--workers", str(workers), "--ranks", "4")
    return Job(home, *options, *words, name=name, environment=environment(home))


def test_a_death_leaves_no_trace_in_a_loop_of_torch(tmp_path: Path) -> None:
    with start(tmp_path, "quiet", 1, SCRIPT) as job:
        assert job.wait() == 0, job.output
        wanted = digest(job)
    with start(tmp_path, "job", 3, SCRIPT) as job:
        job.pace(0.3)
        job.await_steps(4)
        job.send(job.members()[0])
        job.await_event("member_lost")
        job.pace(0)
        assert job.wait() == 0, job.output
        assert digest(job) == wanted


def test_statistics_of_batches_are_refused_by_name_in_a_loop_of_torch(tmp_path: Path) -> None:
    """They are parameters that are not trained, and the loop does not say how those of several ranks become one."""
    with start(tmp_path, "job", 1, "--max-restarts", "0", SCRIPT, "batchnorm") as job:
        assert job.wait() != 0
        assert "StateChanged" in job.output and "batch_normalization/moving_mean" in job.output


def test_keras_still_has_no_distribution_on_torch() -> None:
    """When this fails, its data parallelism may be a better place for the adapter: docs/decisions/keras.md."""
    origin = find_spec("keras")
    assert origin is not None and origin.origin is not None
    torch_backend = Path(origin.origin).parent / "src" / "backend" / "torch"
    assert (torch_backend / "trainer.py").exists() and not (torch_backend / "distribution_lib.py").exists()
