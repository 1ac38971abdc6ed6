"""The command line refuses bad input with one paragraph and exit code 2 before anything is started."""

from __future__ import annotations

import argparse
import fcntl
import importlib.metadata
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest

import elastic
from elastic import cli
from elastic.checkpoints.storage import Storage, put
from elastic.cli.job.run import add_job_options, chosen, in_a_file, misplaced
from elastic.cli.job.status import status_text
from elastic.config import JobSpec, Stragglers, Timing, job_from_toml
from elastic.errors import ConfigError, ElasticError, ExitCode
from elastic.platforms.local import job_run
from elastic.platforms.local.interrupts import Signals
from elastic.records import job_directory
from elastic.records.journal import Journal, journal_path
from elastic.rendezvous.job_status import job_status
from elastic.store import embedded


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[JobSpec, Path]]:
    """What would have been run."""
    runs: list[tuple[JobSpec, Path]] = []

    def record(spec: JobSpec, job_dir: Path, signals: Signals, **_: Any) -> job_run.RunOutcome:
        runs.append((spec, job_dir))
        return job_run.RunOutcome(ExitCode.DONE, "all members have finished")

    monkeypatch.setattr(job_run, "attempt", record)
    return runs


def code_of(arguments: list[str]) -> int:
    try:
        return cli.main(arguments)
    except SystemExit as exit_:
        return int(exit_.code or 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["frobnicate"], "there is no command frobnicate. See `elastic --help`"),
        (["run"], "no script given"),
        (["run", "--"], "no script given"),
        (["run", "-m"], "no script given"),
        (["run", "absent.py"], "absent.py does not exist"),
        (["run", "."], "directory"),
        (["run", "-m", "absent_module.train"], "no module absent_module"),
        (["run", "-m", "./train.py"], "leave out -m"),
        (["run", "--workers", "0", "train.py"], "workers=0 must be >= min_workers=1"),
        (["run", "--workers", "2", "--min-workers", "3", "train.py"], "min_workers=3"),
        (["run", "--max-workers", "4", "train.py"], "--workers 2 is the largest number"),
        (["run", "--spares", "-1", "train.py"], "spares=-1 must be >= 0"),
        (["run", "--spares", "1", "--no-replace", "train.py"], "replace=False forbids it"),
        (["run", "--threads", "0", "train.py"], "threads=0"),
        (["run", "--grace", "0", "train.py"], "--grace 0 must be a positive number"),
        (["run", "--grace", "inf", "train.py"], "--grace inf must be a positive number"),
        (["run", "--workers", "many", "train.py"], "invalid int value: 'many'"),
        (["run", "--reduction", "fast", "train.py"], "invalid choice: 'fast'"),
        (["run", "--name", "My Job", "train.py"], "'my-job'"),
        (["run", "--work", "2", "train.py"], "--work"),
        (["status"], "--job-dir"),
        (["status", "--job-dir", "absent"], "holds no job"),
    ],
)
def test_bad_input_gets_one_paragraph_and_exit_code_2(
    arguments: list[str], said: str, here: Path, started: list[tuple[JobSpec, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(arguments) == ExitCode.BAD_INPUT
    out, err = capsys.readouterr()
    assert said in " ".join(err.split())
    assert err.startswith("elastic: ")
    assert "\n\n" not in err
    assert "Traceback" not in err
    assert out == ""
    assert started == []
    assert sorted(path.name for path in here.iterdir()) == ["train.py"]


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(["--version"]) == 0
    assert capsys.readouterr().out == f"elastic {elastic.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["status", "--help"]])
def test_help_says_how_to_go_on(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(arguments) == 0
    text = capsys.readouterr().out
    assert "usage: elastic" in text
    assert "examples:" in text or "commands:" in text


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["train.py", "--workers", "9"], ("train.py", "--workers", "9")),
        (["--", "train.py", "--", "-x"], ("train.py", "--", "-x")),
        (["--workers", "2", "--", "train.py", "-m"], ("train.py", "-m")),
        (["--", "-t.py", "-m"], ("./-t.py", "-m")),
        (["-m", "json.tool", "--json"], ("-m", "json.tool", "--json")),
        (["--workers", "2", "-m", "json.tool"], ("-m", "json.tool")),
    ],
)
def test_what_follows_the_script_is_the_scripts(
    words: list[str], command: tuple[str, ...], here: Path, started: list[tuple[JobSpec, Path]]
) -> None:
    (here / "-t.py").write_text("")
    assert cli.main(["run", *words]) == 0
    ((spec, _),) = started
    assert spec.command == (sys.executable, *command)
    assert spec.workers == 2


def test_jobs_without_a_directory_get_numbered_ones(here: Path, started: list[tuple[JobSpec, Path]]) -> None:
    assert cli.main(["run", "train.py"]) == cli.main(["run", "--name", "other", "train.py"]) == 0
    assert cli.main(["run", "train.py"]) == 0
    assert [(spec.name, job_dir) for spec, job_dir in started] == [
        ("train", here / "elastic-jobs" / "train-1"),
        ("other", here / "elastic-jobs" / "other-1"),
        ("train", here / "elastic-jobs" / "train-2"),
    ]


def test_a_completed_job_is_refused_and_moved_aside_only_when_asked(
    here: Path, started: list[tuple[JobSpec, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", "--job-dir", "job", "train.py"]
    assert cli.main(arguments) == 0
    (here / "job" / "steps.jsonl").write_text("{}\n")
    (here / "job" / "result.json").write_text('{"exit_code": 0}')
    assert cli.main(arguments) == ExitCode.BAD_INPUT
    assert "completed job" in (said := " ".join(capsys.readouterr().err.split()))
    assert "--fresh" in said
    for number in (1, 2):
        assert cli.main(["run", "--job-dir", "job", "--fresh", "train.py"]) == 0
        assert (here / f"job.old-{number}" / "job.json").exists()
    assert (here / "job.old-1" / "steps.jsonl").read_text() == "{}\n"
    assert not (here / "job" / "steps.jsonl").exists()
    assert len(started) == 3


@pytest.mark.parametrize("result", [None, '{"exit_code": 4}'])
def test_the_same_command_goes_on_with_an_interrupted_or_failed_job(
    result: str | None, here: Path, started: list[tuple[JobSpec, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", "--job-dir", "job", "train.py"]
    assert cli.main(arguments) == 0
    line = {"step": 0, "epoch": 0, "lr": [], "scalars": {}, "samples": []}
    (here / "job" / "steps.jsonl").write_text(json.dumps(line) + "\n")
    if result is not None:
        (here / "job" / "result.json").write_text(result)
    assert cli.main(["run", "--workers", "3", *arguments[1:]]) == 0
    assert "starts again from its first step, because no checkpoint was ever completed; steps 0 to 0 are done" in (
        capsys.readouterr().err
    )
    assert [spec.workers for spec, _ in started] == [2, 3]
    assert json.loads((here / "job" / "job.json").read_text())["workers"] == 3
    (record,) = map(json.loads, (here / "job" / "resumes.jsonl").read_text().splitlines())
    assert (record["run"], record["checkpoint"], record["redone"]) == (2, "", [0, 0])
    assert not (here / "job" / "result.json").exists()


def test_an_interrupted_job_of_another_name_is_not_gone_on_with(
    here: Path, started: list[tuple[JobSpec, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "--job-dir", "job", "train.py"]) == 0
    assert cli.main(["run", "--job-dir", "job", "--name", "other", "train.py"]) == ExitCode.BAD_INPUT
    assert "holds the interrupted job train" in " ".join(capsys.readouterr().err.split())
    assert len(started) == 1


@pytest.mark.parametrize("every", ["auto", "off"])
def test_two_jobs_cannot_share_a_checkpoint_directory(
    here: Path, started: list[tuple[JobSpec, Path]], capsys: pytest.CaptureFixture[str], every: str
) -> None:
    """Without periodic checkpoints job.save writes there."""
    words = ["--checkpoint-every", every, "--checkpoint-dir", "shared", "train.py"]
    assert cli.main(["run", "--job-dir", "a", *words]) == 0
    for fresh in ([], ["--fresh"]):
        assert cli.main(["run", *fresh, "--job-dir", "b", *words]) == ExitCode.BAD_INPUT
        assert "holds the checkpoints of another job, train" in " ".join(capsys.readouterr().err.split())
    assert cli.main(["run", "--fresh", "--job-dir", "a", *words]) == ExitCode.BAD_INPUT
    assert "that --fresh would move aside" in " ".join(capsys.readouterr().err.split())
    assert cli.main(["run", "--job-dir", "a", *words]) == 0


def test_a_fresh_start_that_is_refused_moves_nothing(
    here: Path, started: list[tuple[JobSpec, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "--job-dir", "other", "--checkpoint-dir", "theirs", "train.py"]) == 0
    arguments = ["run", "--job-dir", "job", "--checkpoint-dir", "ours", "train.py"]
    assert cli.main(arguments) == 0
    for directory, because in {
        "ours": "/ours belongs to the job that --fresh would move aside; give another --checkpoint-dir, too",
        "theirs": "/theirs holds the checkpoints of another job, train",
        "/sys/checkpoints": "/sys/checkpoints cannot be used",
    }.items():
        fresh = ["run", "--fresh", "--job-dir", "job", "--checkpoint-dir", directory, "train.py"]
        assert cli.main(fresh) == ExitCode.BAD_INPUT
        assert because in " ".join(capsys.readouterr().err.split())
        assert sorted(path.name for path in here.iterdir()) == ["job", "other", "ours", "theirs", "train.py"]
    assert cli.main(arguments) == 0
    for number, directory in enumerate(("new", "job/checkpoints", "job/checkpoints"), 1):
        fresh = ["run", "--fresh", "--job-dir", "job", "--checkpoint-dir", directory, "train.py"]
        assert cli.main(fresh) == 0
        assert (here / f"job.old-{number}").exists()
        assert [path.name for path in (here / directory).iterdir()] == ["owner.json"]


def test_a_checkpoint_directory_that_cannot_be_written_is_said_at_the_start(
    here: Path, started: list[tuple[JobSpec, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", "--checkpoint-dir", "/sys/checkpoints", "train.py"]
    assert cli.main(arguments) == ExitCode.BAD_INPUT
    assert "/sys/checkpoints cannot be used" in " ".join(capsys.readouterr().err.split())
    assert started == []


def test_a_full_disk_is_said_at_the_start(
    here: Path, started: list[tuple[JobSpec, Path]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("elastic.records.resume.write_atomically", full)
    assert cli.main(["run", "--job-dir", "job", "train.py"]) == ExitCode.BAD_INPUT
    assert "checkpoints.json for a run: No space left on device" in " ".join(capsys.readouterr().err.split())
    assert started == []


def test_of_two_jobs_that_found_a_checkpoint_directory_without_an_owner_one_is_refused(
    here: Path, started: list[tuple[JobSpec, Path]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def put_and_lose(storage: Storage, path: str, content: bytes) -> None:
        put(storage, path, content)
        put(storage, path, json.dumps({"job": "other", "job_id": "beef"}).encode())

    monkeypatch.setattr("elastic.records.resume.put", put_and_lose)
    assert cli.main(["run", "--job-dir", "a", "--checkpoint-dir", "shared", "train.py"]) == ExitCode.BAD_INPUT
    assert "holds the checkpoints of another job, other (beef)" in " ".join(capsys.readouterr().err.split())
    assert started == []


@pytest.mark.parametrize("fresh", [[], ["--fresh"]])
def test_a_live_job_is_never_moved(
    fresh: list[str], here: Path, started: list[tuple[JobSpec, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "--job-dir", "job", "train.py"]) == 0
    with (here / "job" / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cli.main(["run", "--job-dir", "job", *fresh, "train.py"]) == ExitCode.BAD_INPUT
    assert "in use by a live job" in " ".join(capsys.readouterr().err.split())
    assert not job_directory.is_live(here / "job")
    assert len(started) == 1


@pytest.mark.parametrize("fresh", [[], ["--fresh"]])
def test_a_directory_of_something_else_is_never_touched(
    fresh: list[str], here: Path, started: list[tuple[JobSpec, Path]]
) -> None:
    (here / "thesis").mkdir()
    (here / "thesis" / "chapter.tex").write_text("x")
    assert cli.main(["run", "--job-dir", "thesis", *fresh, "train.py"]) == ExitCode.BAD_INPUT
    assert cli.main(["run", "--job-dir", "train.py", *fresh, "train.py"]) == ExitCode.BAD_INPUT
    assert [path.name for path in (here / "thesis").iterdir()] == ["chapter.tex"]
    assert started == []


@pytest.mark.parametrize("name", ["--job-dir", "--checkpoint-dir", "the working directory", "the script", "TMPDIR"])
def test_a_name_that_is_not_utf_8_is_refused_before_anything_is_made(
    name: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = here / os.fsdecode(b"n\xff")
    odd.mkdir()
    script, options = "train.py", ["--job-dir", "job"]
    match name:
        case "the script":
            script = str(odd / "train.py")
        case "the working directory":
            options = []
            monkeypatch.chdir(odd)
        case "TMPDIR":
            monkeypatch.setattr(tempfile, "tempdir", str(odd))
        case _:
            options = [name, str(odd / "job")]
    for place in (here, odd):
        (place / "train.py").write_text("")
    code = code_of(["run", "--quiet", *options, script])
    assert code == (ExitCode.BELOW_QUORUM if name == "TMPDIR" else ExitCode.BAD_INPUT)
    said = capsys.readouterr().err
    assert "n\\udcff" in said and "is not UTF-8; rename it, or give another" in " ".join(said.split())
    assert [path.name for path in odd.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("soft", "hard", "said"),
    [
        (64, 4096, "a process may open 64 files here (`ulimit -n`), and 192 are needed; say `ulimit -n 192` first"),
        (64, 64, "192 are needed; the hard limit is 64"),
        (-1, -1, ""),
        (192, 192, ""),
    ],
)
def test_too_few_descriptors_are_said_before_anything_is_started(
    soft: int,
    hard: int,
    said: str,
    here: Path,
    started: list[tuple[JobSpec, Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    assert code_of(["run", "--job-dir", "job", "train.py"]) == (ExitCode.BAD_INPUT if said else ExitCode.DONE)
    assert said in " ".join(capsys.readouterr().err.split())
    assert bool(started) == (here / "job").exists() == (not said)


def test_no_etcd_is_said_before_anything_is_made(
    here: Path, started: list[tuple[JobSpec, Path]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing() -> str:
        raise ConfigError("no etcd found: install one")

    monkeypatch.setattr(embedded, "find_binary", nothing)
    assert cli.main(["run", "train.py"]) == ExitCode.BELOW_QUORUM
    assert "no etcd found" in capsys.readouterr().err
    assert not (here / "elastic-jobs").exists()


def test_options_behind_a_script_that_does_not_know_them_are_named(tmp_path: Path) -> None:
    """A script may have options of the same name, spelled in one of several ways."""
    script, known = tmp_path / "train.py", frozenset(("--ranks", "--workers", "--min-workers", "--help"))
    words = ["--ranks", "4", "--lr=3", "--min-workers=2", "--help", "workers"]
    for text, wanted in {
        '"""elastic run --ranks 4 train.py"""': ["--ranks", "--min-workers"],
        'parser.add_argument("--ranks", type=int)': ["--min-workers"],
        "class Options:\n    ranks: int = 2\n    min_workers: int = 1": [],
        "def main(ranks=2, num_workers=1): ...": ["--min-workers"],
    }.items():
        script.write_text(text)
        assert misplaced(words, known, script) == wanted
    assert misplaced(["4"], known, tmp_path / "no-file") == misplaced(words, known, tmp_path) == []


def test_a_torch_that_was_not_tested_is_told_once_a_job(
    here: Path, started: list[tuple[JobSpec, Path]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for version, told in (("9.1.0+cu140", 1), ("2.13.0+cpu", 0)):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, version=version: version)
        assert cli.main(["run", "--fresh", "--job-dir", "job", "train.py"]) == 0
        assert capsys.readouterr().err.count("elastic: torch 9.1.0+cu140 is newer than all that elastic-ring ") == told
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.1.0")
    assert cli.main(["run", "--fresh", "--job-dir", "job", "--quiet", "train.py"]) == 0
    assert "newer" not in capsys.readouterr().err


def test_status_counts_spares_apart_from_members() -> None:
    member = {"worker_id": "local.0.0", "node": "local", "pid": 7, "rank": 0, "applied": 9}
    facts = {"job": "train", "state": "running", "generation": 3, "because": "fine", "applied": 9, "members": [member]}
    assert "spare" not in status_text(facts)
    in_rounds = {**member, "phase": "script running, idle for 40 s of 300 s"}
    kept = {**facts, "members": [in_rounds], "restart": True}
    assert status_text(kept).startswith("train: running, round 3, 9 steps\n"), "it keeps its state"
    assert status_text({**facts, "applied": 0, "members": [in_rounds], "restart": True}).splitlines() == [
        "train: running, round 3",
        "because fine",
        "  rank 0  local.0.0  on local  pid 7  script running, idle for 40 s of 300 s",
    ]
    assert "shard" not in status_text(facts), "nobody knows yet how fast it is"
    assert status_text({**facts, "spares": ["local.2.0"]}).splitlines()[-1].split() == ["spare", "local.2.0"]
    in_vain = {**facts, "in_vain": ["local.2"]}
    assert "waited for slot local.2 to copy the state" in status_text(in_vain).splitlines()[-1]
    given_up = {**facts, "given_up": {"local.2": "no such program"}}
    assert status_text(given_up).splitlines()[-1] == "trouble: slot local.2 gets no worker any more: no such program"
    outer = {"drift": 0.0312, "summed_bytes": 2.5e6}
    assert status_text({**facts, "outer": outer}).splitlines()[2] == "last outer step: drift 0.0312, 2.5 MB summed"
    counts = {"replicas": 3.0, "late": 1.0, "lost": 0.0, "inner_steps": 107.0}
    shown = status_text({**facts, "outer": outer | counts}).splitlines()[2]
    assert shown.endswith("; 3 replicas, 1 late, 0 lost; 107 inner steps")
    phase = {"updates": 8.0, "staleness": 1.5, "staleness_max": 4.0, "dropped": 0.0, "lost_updates": 1.0}
    assert status_text({**facts, "phase": phase}).splitlines()[2] == (
        "last phase: 8 updates, staleness 1.5 (at most 4), 1 lost"
    )
    pairs = {"updates": 8.0, "consensus": 0.25, "skipped": 2.0, "lost_updates": 0.0, "pieces_fell_back": 1.0}
    assert status_text({**facts, "phase": pairs}).splitlines()[2] == (
        "last phase: 8 updates, consensus 0.25, 2 without a partner, 1 pieces fell back"
    )
    told = {"about": "newcomers", "where": "local.2", "because": "it waited 300 s", "advice": "look"}
    assert "waited for slot" not in status_text({**in_vain, "troubles": [told]}), "what is told is not told again"


@pytest.mark.parametrize(
    ("ring", "shown"),
    [
        ({"asked": "mpi", "over": "", "because": ""}, []),
        ({"asked": "tcp", "over": "tcp", "because": ""}, ["gradients over tcp"]),
        ({"asked": "mpi", "over": "tcp", "because": "b has no rank"}, ["gradients over tcp, not mpi: b has no rank"]),
    ],
)
def test_status_says_what_carries_the_gradients(ring: dict[str, str], shown: list[str]) -> None:
    facts = {"job": "train", "state": "running", "generation": 3, "because": "fine", "applied": 9, "members": []}
    assert status_text({**facts, "ring": ring}).splitlines()[2:] == shown


def test_status_says_how_fast_members_are_and_who_is_too_slow() -> None:
    fast = {
        "worker_id": "local.0.0",
        "node": "local",
        "pid": 7,
        "rank": 0,
        "applied": 9,
        "shards": 7,
        "shard_ms": 20.93,
    }
    slow = fast | {"worker_id": "local.1.0", "rank": 1, "shards": 1, "shard_ms": 61.254}
    facts = {"job": "train", "state": "running", "generation": 3, "because": "fine", "applied": 9}
    named = {"local.1.0": "a shard takes it 61.3 ms"}
    lines = status_text({**facts, "members": [fast, slow], "stragglers": named}).splitlines()
    assert [line.rpartition("steps")[2].strip() for line in lines[2:4]] == ["7 shards of 20.9 ms", "1 shard of 61.3 ms"]
    assert lines[4].split(maxsplit=1) == ["straggler", "local.1.0: a shard takes it 61.3 ms"]
    slowest = facts | {"members": [fast | {"shard_ms": 1053.2}]}
    assert status_text(slowest).endswith("7 shards of 1053 ms")


def test_status_of_an_ended_job_comes_from_its_directory(here: Path, started: list[tuple[JobSpec, Path]]) -> None:
    assert cli.main(["run", "--job-dir", "job", "train.py"]) == 0
    result = {"exit_code": 0, "because": "all members have finished", "digest": "ab", "generation": 3}
    (here / "job" / "result.json").write_text(json.dumps(result))
    (here / "job" / "steps.jsonl").write_text(json.dumps({"step": 0, "samples": [[1]]}) + "\n")
    assert job_status(here / "job") == {
        "job": "train",
        "state": "closed",
        "applied": 1,
        "restart": False,
        "members": [],
        **result,
    }
    assert status_text(job_status(here / "job")).splitlines()[-1] == "exit 0, digest ab"


def test_status_of_an_interrupted_job_says_so(here: Path, started: list[tuple[JobSpec, Path]]) -> None:
    assert cli.main(["run", "--job-dir", "job", "train.py"]) == 0
    with pytest.raises(ElasticError, match="was interrupted"):
        job_status(here / "job", wait_s=0.0)


def test_the_command_line_does_not_load_torch() -> None:
    """Starting an agent or asking for a status must not cost seconds and 200 MB."""
    program = "import sys, elastic.cli, elastic.platforms.local.job_run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


HEAVY = {
    *("torch", "numpy", "rich", "cryptography", "etcd3", "tenacity", "fsspec", "tomllib"),
    *(
        "elastic.wire.codec",
        "elastic.config",
        "elastic.protocol.messages",
        "elastic.store.base",
        "elastic.records.ledger",
        "chaos_tests",
    ),
}
"""What no command needs that only asks: the documents of jobs, drawing, certificates, etcd."""

ASKED = {
    "logs --job-dir JOB": "grpc",
    "story 1 --job-dir JOB": "grpc",
    "status --job-dir JOB": "",
    "drain --job-dir JOB": "",
    "top --rendezvous 127.0.0.1:1 --looks 1": "",
    "jobs --rendezvous 127.0.0.1:1": "",
    "story 1 --rendezvous 127.0.0.1:1": "",
    "drain --node n --rendezvous 127.0.0.1:1": "",
}
"""The question, with what it needs not load besides."""

PROBE = """
import json, os, sys, traceback
from elastic import cli
for words in sys.argv[1:]:
    if os.fork() == 0:  # what one command loads, the next has not
        if "--rendezvous" in words:  # nobody answers, and nobody waits for that
            import elastic.fleet.client
            defaults = elastic.fleet.client.FleetClient.__init__.__defaults__
            elastic.fleet.client.FleetClient.__init__.__defaults__ = (0.0, *defaults[1:])
        try:
            cli.main(words.split())
        except Exception:
            traceback.print_exc()
        except SystemExit:
            pass
        print("loaded", json.dumps([words, sorted(sys.modules)]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Question -> the modules that the command line has loaded when it has answered."""
    job = tmp_path_factory.mktemp("job")
    (job / "logs").mkdir()
    (job / "journal").mkdir()
    (job / "job.json").write_text('{"name": "train"}')
    (job / "result.json").write_text('{"exit_code": 0, "because": "done", "digest": "", "generation": 1}')
    questions = {words.replace("JOB", str(job)): words for words in (*ASKED, "--help")}
    done = subprocess.run([sys.executable, "-c", PROBE, *questions], capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stderr, done.stderr
    lines = [line.removeprefix("loaded ") for line in done.stdout.splitlines() if line.startswith("loaded ")]
    return {questions[words]: set(modules) for words, modules in map(json.loads, lines)}


@pytest.mark.parametrize("words", ASKED)
def test_a_command_that_only_asks_loads_only_what_asking_needs(words: str, loaded: dict[str, set[str]]) -> None:
    assert loaded[words] & {*HEAVY, ASKED[words]} == set()


def test_help_loads_nothing_that_an_answer_would_need(loaded: dict[str, set[str]]) -> None:
    """Of all verbs: their modules import what they need when it is needed."""
    heavy = {"grpc", "torch", "numpy", "cryptography", "etcd3", "rich", "elastic.wire.elastic_pb2"}
    ours = {"elastic.protocol.messages", "chaos_tests.cluster", "chaos_tests.run"}
    assert loaded["--help"] & (heavy | ours) == set()


def test_each_verb_is_found_in_its_module_and_in_the_help_in_that_order() -> None:
    (verbs,) = [action for action in cli.parser()._actions if isinstance(action, argparse._SubParsersAction)]
    assert list(verbs.choices) == list(cli.MODULES)
    for verb in cli.MODULES:
        (alone,) = [a for a in cli.parser([verb])._actions if isinstance(a, argparse._SubParsersAction)]
        assert verb in alone.choices and len(alone.choices) <= 2
        assert alone.choices[verb].format_help() == verbs.choices[verb].format_help()


@pytest.fixture
def jobs_here(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Makes jobs in ./elastic-jobs, one after the other; running: its lock is held."""
    monkeypatch.delenv("ELASTIC_RENDEZVOUS", raising=False)
    held: list[BinaryIO] = []
    times = itertools.count(1)

    def make(name: str, *, running: bool = False) -> Path:
        job_dir = here / "elastic-jobs" / name
        for part in ("logs", "journal"):
            (job_dir / part).mkdir(parents=True)
        (job_dir / "job.json").write_text(json.dumps({"name": name, "workers": 2}))
        os.utime(job_dir / "job.json", (at_s := next(times), at_s))
        (job_dir / "logs" / "local.0.0.log").write_text(f"of {name}\n")
        with Journal(journal_path(job_dir, "leader"), name, "leader", "local") as journal:
            journal.write("committed", generation=1, kind="form", members=[f"local.0.{name}"], because=f"of {name}")
        if running:
            held.append((job_dir / "run.lock").open("ab"))
            fcntl.flock(held[-1], fcntl.LOCK_EX)
        else:
            ended = {"exit_code": 0, "because": f"{name} is done", "digest": "", "generation": 1}
            (job_dir / "result.json").write_text(json.dumps(ended))
        return job_dir

    yield make
    for lock in held:
        lock.close()


def test_without_a_directory_the_newest_is_meant(
    jobs_here: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    jobs_here("one")
    assert cli.main(["status"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("one: closed") and told.err == "", "there is no other"
    jobs_here("two")
    for words, said in ((["status"], "two is done"), (["logs"], "of two"), (["story", "1"], "of two")):
        assert cli.main(words) == 0
        told = capsys.readouterr()
        assert said in told.out and "of one" not in told.out
        assert told.err == "elastic: elastic-jobs/two, the newest of 2\n"
    assert cli.main(["status", "--job-dir", "elastic-jobs/one"]) == 0
    told = capsys.readouterr()
    assert "one is done" in told.out and told.err == ""


def test_a_job_that_runs_is_meant_before_newer_ones_that_do_not_and_of_several_it_is_said(
    jobs_here: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    jobs_here("old", running=True)
    jobs_here("over")
    assert cli.main(["logs"]) == 0
    told = capsys.readouterr()
    assert "of old" in told.out and told.err == "elastic: elastic-jobs/old, the only one of the jobs here that runs\n"
    jobs_here("new", running=True)
    assert cli.main(["logs", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["text"] == "of new\n"
    assert told.err == "elastic: elastic-jobs/new, the newest of 2 that run\n"


@pytest.mark.parametrize("words", [["status"], ["logs"], ["story", "1"], ["top"]])
def test_without_any_job_it_is_said_where_one_was_looked_for(
    words: list[str], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ELASTIC_RENDEZVOUS", raising=False)
    assert cli.main(words) == ExitCode.BAD_INPUT
    said = " ".join(capsys.readouterr().err.split())
    assert f"there is no job in {here / 'elastic-jobs'}; give --job-dir DIR" in said


@pytest.mark.parametrize("words", [["status", "train"], ["logs", "--job", "train"], ["story", "1", "--job", "train"]])
def test_a_job_by_name_is_one_of_a_fleet(
    words: list[str], jobs_here: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    jobs_here("train")
    assert cli.main(words) == ExitCode.BAD_INPUT
    assert "train: give the job's fleet with --rendezvous" in capsys.readouterr().err


def test_drain_does_not_guess_what_to_drain(jobs_here: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    jobs_here("one", running=True)
    assert code_of(["drain"]) == ExitCode.BAD_INPUT
    assert "--job-dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("drain --job-dir elastic-jobs/one --budget 1e300", "--budget 1e+300 must be a positive number of seconds"),
        ("top --every 1e11", "--every 1e+11 must be a positive number of seconds, of at most 31536000, a year"),
        ("top --every nan", "--every nan must be a positive number of seconds"),
        ("story ²", "there is no worker ² in the journals"),
    ],
)
def test_odd_numbers_are_refused_by_name(
    words: str, said: str, jobs_here: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    jobs_here("one")
    assert cli.main(words.split()) == ExitCode.BAD_INPUT
    assert said in " ".join(capsys.readouterr().err.split())


def test_top_shows_the_jobs_of_this_machine(
    jobs_here: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs_here("over")
    assert cli.main(["top", "--looks", "1", "--json"]) == 0
    (over,) = json.loads(capsys.readouterr().out)["jobs"]
    assert (over["job"], over["state"], over["exit_code"], over["because"]) == ("over", "ended", 0, "over is done")

    steps = itertools.count(100, 10)

    def asked(job_dir: Path, wait_s: float) -> dict[str, Any]:
        if job_dir.name == "starts":
            raise ElasticError("the job is being started; nobody leads it yet")
        applied = next(steps)
        member = {"worker_id": "local.0.0", "rank": 0, "applied": applied, "phase": "shard 1"}
        fields = {"state": "running", "because": "all are here", "generation": 1}
        return {"job": "live", **fields, "applied": applied, "members": [member]}

    monkeypatch.setattr("elastic.cli.job.top.job_status", asked)
    jobs_here("live", running=True)
    jobs_here("starts", running=True)
    assert cli.main(["top", "--looks", "2", "--every", "0.01"]) == 0
    head, starts, live = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert head.split()[:3] == ["JOB", "STATE", "MEMBERS"]
    assert starts.split()[:3] == ["starts", "unknown", "0/2"] and "nobody leads it yet" in starts
    assert live.split()[:5] == ["live", "running", "1/2", "1", "110"] and float(live.split()[5]) > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("statsu", "no command statsu; did you mean status? See `elastic --help`"),
        ("--verison", "no option --verison; did you mean --version? See `elastic --help`"),
        ("run --worker 4 train.py", "no option --worker; did you mean --workers? See `elastic run --help`"),
        ("run --job_dir=x train.py", "no option --job_dir; did you mean --job-dir? See `elastic run --help`"),
        ("run --quite train.py --quiet", "no option --quite; did you mean --quiet? See `elastic run --help`"),
        ("run --name x --fesh -m pkg", "no option --fesh; did you mean --fresh? See `elastic run --help`"),
        ("run -w 4 train.py", "no option -w"),
        ("run --max-worker 4 train.py", "did you mean --min-workers? See `elastic run --help`"),
        ("status --jsn", "no option --jsn; did you mean --json? See `elastic status --help`"),
        ("jobs --rendevous 127.0.0.1:1", "did you mean --rendezvous? See `elastic jobs --help`"),
        ("status one two", "unrecognized arguments: two. See `elastic status --help`"),
        ("scale train -2 --jsno", "no option --jsno; did you mean --json? See `elastic scale --help`"),
        ("chaos rnu", "no command rnu; did you mean run? See `elastic chaos --help`"),
        ("chaos run --sed 3 -- train.py", "did you mean --seed? See `elastic chaos run --help`"),
        ("doctor --exact --stps 3 train.py", "did you mean --steps? See `elastic doctor --help`"),
    ],
)
def test_a_typo_gets_the_nearest_name_and_the_help_of_its_verb(
    words: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(words.split()) == ExitCode.BAD_INPUT
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "words",
    [
        "run --name x --workers 1 train.py --worker 4 --lr=1",
        "run -- train.py --worker",
        "run --keep last-2 -m pkg -w 3",
        "logs -f --json",
        "scale train -2 --rendezvous 127.0.0.1:1",
        "chaos run --seed 3 -- train.py --sed 4",
        "checkpoints list --job-dir x",
    ],
)
def test_what_is_no_typo_is_taken(words: str) -> None:
    cli.parser(words.split()).parse_args(words.split())


# ------------------------------------------------------------------------------------------- the options of a job


def test_what_no_option_says_is_as_the_fields_have_it() -> None:
    parser = argparse.ArgumentParser()
    add_job_options(parser)
    plain = JobSpec(name="train", command=("python",), workers=2)
    assert JobSpec(name="train", command=("python",), workers=2, **chosen(parser.parse_args([]))) == plain
    words = "--no-replace --cold-start --no-retain-results --slow-factor 3 --stragglers demote --hang-limit 700"
    given = chosen(parser.parse_args(words.split()))
    assert (given["replace"], given["fork"], given["retain_results"]) == (False, False, False)
    assert (given["slow_factor"], given["stragglers"], given["timing"]) == (3.0, Stragglers.DEMOTE, Timing(hang_s=700))


def test_the_fields_that_help_shows_make_a_job_file() -> None:
    """All of them at once, each with the value that is shown."""
    shown = [line.strip() for line in in_a_file().splitlines() if not line.startswith("      ")]
    spec = job_from_toml("\n".join(['name = "train"', 'command = ["python"]', "workers = 2", *shown]), "help")
    plain = JobSpec(name="train", command=("python",), workers=2)
    assert spec == replace(plain, replace=False, fork=False, retain_results=False, restart=True)
    assert {line.partition(" =")[0] for line in shown} >= {"slow_factor", "checkpoint_keep", "pause_limit_s"}


@pytest.mark.parametrize("content", ["", "[", "[]", "{}"])
@pytest.mark.parametrize("verb", [["status"], ["top", "--looks", "1"]])
def test_a_damaged_file_of_a_job_is_named(
    content: str, verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.json").write_text("{}")
    (tmp_path / "result.json").write_text(content)
    assert cli.main([*verb, "--job-dir", str(tmp_path)]) == ExitCode.BAD_INPUT
    assert f"{tmp_path}/result.json is damaged: " in " ".join(capsys.readouterr().err.split())
