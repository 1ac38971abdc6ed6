"""The batch scripts: what they say to sbatch, and that words reach programs as they were given."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from elastic import cli
from elastic.errors import ConfigError
from elastic.platforms.slurm import allocation
from elastic.platforms.slurm.batch_options import BatchOptions
from elastic.platforms.slurm.batch_scripts import AgentsOptions, FleetOptions, agents_script, fleet_script

BATCH = BatchOptions(name="train", nodes=3, programs="/opt/it's/bin", directory="/data/a b", grace_s=20)
AGENTS = AgentsOptions(batch=BATCH, rendezvous=("10.0.0.1:7070", "10.0.0.2:7070"), certs="/c's/x")
FLEET = FleetOptions(batch=BATCH, python="/opt/it's/bin/python3", job="/data/a b/job.toml", anew=False)
SCRIPTS = {"agents": agents_script(AGENTS), "fleet": fleet_script(FLEET)}
JOB = 'name = "t"\ncommand = ["python", "t.py"]\nworkers = 2\ncheckpoint_dir = "/x"\n'


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def program(directory: Path, name: str, script: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(f"#!/bin/sh\n{script}\n")
    (directory / name).chmod(0o755)


def test_an_agent_is_a_task_of_an_array_that_has_its_node_alone_and_is_requeued() -> None:
    assert directives(SCRIPTS["agents"]) == [
        "--job-name=train",
        "--array=1-3",
        "--nodes=1",
        "--ntasks=1",
        "--signal=B:USR1@120",
        "--exclusive",
        "--requeue",
        "--open-mode=append",
    ]


def test_an_allocation_outlives_its_nodes_and_hears_of_its_end_with_time_for_the_grace() -> None:
    said = directives(SCRIPTS["fleet"])
    assert {"--nodes=3", "--ntasks-per-node=1", "--no-kill", "--signal=B:USR1@25", "--exclusive", "--requeue"} < {*said}


def test_what_is_said_to_sbatch_comes_last_and_so_counts_more() -> None:
    words = ("--partition=spot", "-p", "a b", "--comment", "it's # one", "--gres=gpu:8")
    said = directives(agents_script(replace(AGENTS, batch=replace(BATCH, sbatch=words))))
    quoted = "'it'\"'\"'s # one'"
    assert said[-4:] == ["--partition=spot", "-p 'a b'", f"--comment {quoted}", "--gres=gpu:8"]


@pytest.mark.parametrize(
    "change",
    [{"nodes": 0}, {"grace_s": 0}, {"slots": 0}, {"name": "a\nb"}, {"sbatch": ("--x=\n#SBATCH",)}, {"sbatch": ("x",)}],
)
def test_what_no_script_can_have_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        replace(BATCH, **change)  # type: ignore[arg-type]


def test_the_agent_gets_its_words_whatever_is_in_them(tmp_path: Path) -> None:
    program(tmp_path / "it's", "elastic", 'for word in "$@"; do printf "%s\\n" "$word"; done')
    batch = replace(BATCH, programs=str(tmp_path / "it's"), directory="/data/$(exit 7)/a b", slots=2)
    environment = {**os.environ, "SLURMD_NODENAME": "n 1"}
    script = agents_script(replace(AGENTS, batch=batch, insecure=True))
    done = subprocess.run(["bash"], input=script, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *("agent", "--rendezvous", "10.0.0.1:7070,10.0.0.2:7070", "--notices", "slurm:requeue"),
        *("--grace", "20", "--slots", "2", "--insecure"),
        *("--jobs-dir", "/data/$(exit 7)/a b/n 1", "--certs", "/c's/x/n 1"),
    ]


@pytest.mark.parametrize("kind", SCRIPTS)
def test_the_shell_understands_the_script(kind: str) -> None:
    done = subprocess.run(["bash", "-n"], input=SCRIPTS[kind], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("kind", SCRIPTS)
def test_shellcheck_has_nothing_to_say(kind: str) -> None:
    checker = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([checker, "-"], input=SCRIPTS[kind], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_program_of_an_allocation_gets_its_words_whatever_is_in_them(tmp_path: Path) -> None:
    program(tmp_path / "it's", "python3", 'for word in "$@"; do printf "%s\\n" "$word"; done')
    batch = replace(BATCH, directory="/data/$(exit 7)/a b", slots=2)
    options = FleetOptions(batch=batch, python=str(tmp_path / "it's" / "python3"), job="/it's/job.toml", anew=True)
    environment = {**os.environ, "SLURM_JOB_ID": "71"}
    script = fleet_script(options)
    done = subprocess.run(["bash"], input=script, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *("-P", "-m", allocation.MODULE, "fleet", "/it's/job.toml", "/data/$(exit 7)/a b/71", "20", "--slots", "2")
    ]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("ELASTIC_CERTS", "ELASTIC_RENDEZVOUS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


def test_a_fleet_has_a_directory_for_each_job_of_slurm_or_goes_on_in_one(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["slurm", "fleet", "job.toml", "--nodes", "2"]) == 0
    assert f" {here}/job.toml {here}/elastic-slurm/$SLURM_JOB_ID 25\n" in capsys.readouterr().out
    assert cli.main(["slurm", "fleet", "job.toml", "--nodes", "2", "--dir", "runs/7", "--", "--time=1:00"]) == 0
    told = capsys.readouterr().out
    assert f" {here}/runs/7 25\n" in told and directives(told)[-1] == "--time=1:00"
    assert directives(told)[0] == "--job-name=t"


def test_sbatch_gets_the_script_and_its_id_is_printed(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program(here / "bin", "sbatch", f'echo "$@" > {here}/words; cat > {here}/script; echo "71;cluster"')
    words = ["slurm", "agents", "--nodes", "2", "--rendezvous", "127.0.0.1:7070"]
    monkeypatch.setenv("PATH", str(here / "bin"), prepend=os.pathsep)
    assert cli.main([*words, "--submit"]) == 0
    assert capsys.readouterr().out == "71\n"
    assert (here / "words").read_text() == "--parsable\n"
    assert cli.main(words) == 0
    assert (here / "script").read_text() == capsys.readouterr().out
    program(here / "bin", "sbatch", "echo 'sbatch: error: invalid partition specified: gold' >&2; exit 1")
    assert cli.main([*words, "--submit"]) == 3
    assert "invalid partition specified: gold" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["agents", "--nodes", "2"], "--rendezvous"),
        (["agents", "--nodes", "2", "--rendezvous", "10.0.0.1:7070"], "anybody who reaches the port can run commands"),
        (["agents", "--nodes", "2", "--rendezvous", "10.0.0.1:7070", "--certs", "no"], "--certs no is no directory"),
        (["agents", "--nodes", "0", "--rendezvous", "127.0.0.1:7070"], "--nodes 0 must be at least 1"),
        (["agents", "--nodes", "2", "--rendezvous", "127.0.0.1:7070", "--submit"], "sbatch is not in PATH"),
        (["agents", "--nodes", "2", "--rendezvous", "127.0.0.1:7070", "--", "spot"], "is no option of sbatch"),
        (["fleet", "absent.toml", "--nodes", "2"], "absent.toml cannot be read"),
        (["fleet", "job.toml"], "--nodes"),
    ],
)
def test_bad_input_is_said_before_anything_is_submitted(
    words: list[str], said: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(here))
    try:
        code = cli.main(["slurm", *words])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    assert code == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("words", [["slurm"], ["slurm", "agents"], ["slurm", "fleet"]])
def test_help_shows_examples(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*words, "--help"])
    assert "elastic slurm fleet job.toml" in capsys.readouterr().out.partition("examples:")[2]
