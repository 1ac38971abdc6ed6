"""Who may read what a job leaves behind, and where its environment is written."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic.agent.process.process_start import Outlets
from elastic.checkpoints.storage import LocalStorage, put
from elastic.config import JobSpec, job_from_toml
from elastic.errors import ConfigError, ElasticError
from elastic.fleet.documents import check_for_fleet
from elastic.fleet.node import job_environment
from elastic.preemption import relay
from elastic.process import file_modes
from elastic.records import job_directory, job_files
from elastic.records.journal import Journal, journal_path
from elastic.records.ledger import Ledger
from elastic.wire import codec

SECRET = "correct horse"


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def spec(**fields: object) -> JobSpec:
    return JobSpec(**{"name": "train", "command": ("python", "t.py"), "workers": 1, **fields})  # type: ignore[arg-type]


def left_in(parent: Path) -> dict[str, int]:
    """The mode of everything that a job writes, by its name."""
    job = job_directory.claim(spec(env=(f"KEY={SECRET}",)), parent / "jobs" / "train-1", fresh=False).path
    with Journal(journal_path(job, "who"), "train", "who", "local") as journal:
        journal.write("begun")
    Ledger(job / "steps.jsonl").close()
    Outlets(job / "logs" / "worker.log").close()
    put(LocalStorage(str(job / "checkpoints")), "_periodic/entry/file", b"weights")
    with job_directory.running(job):
        return {
            str(path.relative_to(parent)): path.stat().st_mode & 0o777 for path in parent.rglob("*") if path.exists()
        }


def test_what_a_job_leaves_is_for_its_owners_eyes(tmp_path: Path) -> None:
    found = left_in(tmp_path)
    assert {"jobs/train-1/job.json", "jobs/train-1/steps.jsonl", "jobs/train-1/checkpoints/_periodic/entry/file"} < {
        *found
    }
    wide = {name: oct(mode) for name, mode in found.items() if mode & 0o077}
    assert wide == {}


def test_others_may_look_where_the_mask_says_so_but_not_at_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(file_modes.UMASK_VARIABLE, "027")
    found = left_in(tmp_path)
    assert found.pop("jobs/train-1/job.json") == 0o600
    assert {mode for mode in found.values()} == {0o640, 0o750}


def test_what_is_there_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(0o755)
    file_modes.make_directory(tmp_path / "mine" / "deep" / "deeper")
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "mine", tmp_path / "mine" / "deep")] == [0o755, 0o700]


@pytest.mark.parametrize("value", ["", "x", "9", "1777", "-7", "0o27", " 027"])
def test_a_mask_that_is_none_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(file_modes.UMASK_VARIABLE, value)
    with pytest.raises(ConfigError, match="ELASTIC_UMASK"):
        file_modes.mask()


# ------------------------------------------------------------------------------------------------- environment

TOML = 'name = "train"\ncommand = ["t"]\nworkers = 1\ncheckpoint_dir = "/c"\n'


@pytest.mark.parametrize("name", ['"A=B"', '""', '"A\\u0000"', '"1A"', '"A B"'])
def test_a_name_that_no_variable_has_is_refused_and_no_value_is_said(name: str) -> None:
    with pytest.raises(ConfigError, match=r"job\.toml, line 5: env: .* cannot be the name") as refused:
        job_from_toml(f'{TOML}[env]\n{name} = "{SECRET}"\n', "job.toml")
    assert SECRET not in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        spec(env=(f"={SECRET}",))
    assert SECRET not in str(refused.value)


def test_a_file_on_the_node_is_added_and_the_jobs_own_values_count_more(tmp_path: Path) -> None:
    file = tmp_path / "secrets.env"
    file.write_text(f'# of the team\n\nKEY={SECRET}\nURL=http://a?b=c\nQUOTED="x"\nEMPTY=\nOWN=file\r\n')
    found = job_environment.with_environment(spec(env=("OWN=job",), env_from=str(file)), "gpu-1")
    assert found.environment == {"OWN": "job", "KEY": SECRET, "URL": "http://a?b=c", "QUOTED": '"x"', "EMPTY": ""}
    assert found.env_from == ""
    assert job_environment.with_environment(spec(env=("A=b",)), "gpu-1") == spec(env=("A=b",))


@pytest.mark.parametrize(
    ("content", "because"),
    [
        (None, "No such file"),
        (b"A=b\nKEY correct horse\n", "line 2"),
        (b"A=b\n=correct horse\n", "line 2"),
        (b"A=b\nA=correct horse\n", "twice"),
        (b"A=correct\0horse\n", "line 1"),
        (b"\xff\xfe=correct horse", "UTF-8"),
        (b"#" * (job_environment.BYTES_MAX + 1), "larger than"),
    ],
)
def test_a_file_that_cannot_be_taken_is_named_with_its_node_and_no_value(
    content: bytes | None, because: str, tmp_path: Path
) -> None:
    file = tmp_path / "secrets.env"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"env_from={file} on gpu-1.*{because}") as refused:
        job_environment.with_environment(spec(env_from=str(file)), "gpu-1")
    assert "horse" not in str(refused.value)


def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ConfigError, match="on gpu-1"):
            job_environment.with_environment(spec(env_from=str(path)), "gpu-1")


def test_a_fleet_wants_an_absolute_path() -> None:
    with pytest.raises(ConfigError, match=r"env_from='secrets\.env' must be an absolute path"):
        check_for_fleet(job_from_toml(f'{TOML}env_from = "secrets.env"\n', "job.toml"))


def test_the_file_is_part_of_a_jobs_document() -> None:
    there = spec(env_from="/a")
    assert codec.job_from_json(codec.to_json(there), "job.json") == there


READS: dict[str, Callable[[Path], object]] = {
    "logs/a.0.0.log": lambda job: job_files.read(job.parent, job.name, "a.0.0", 0),
    "steps.jsonl": lambda job: job_files.read(job.parent, job.name, job_files.LEDGER, 0),
    "left.json": lambda job: relay.has_left(job, 1),
}
"""What a node's daemon reads in the directory of a job, which may be another user's."""


@pytest.mark.parametrize("name", READS)
def test_a_daemon_does_not_wait_for_a_fifo_that_a_job_has_put_in_the_place_of_a_file(tmp_path: Path, name: str) -> None:
    job = tmp_path / "train-1"
    (job / "logs").mkdir(parents=True)
    os.mkfifo(job / name)
    ended = threading.Event()

    def read() -> None:
        with contextlib.suppress(OSError, ElasticError):
            READS[name](job)
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    assert ended.wait(10.0)
