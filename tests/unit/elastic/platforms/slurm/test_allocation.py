"""What the program of an allocation decides; Slurm's programs are scripts, and no fleet is started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.config import check_name
from elastic.errors import ConfigError, ElasticError, ExitCode
from elastic.platforms.common.agent_child import AgentPlace, Ending, Look
from elastic.platforms.common.private_fleet import KeptFleet
from elastic.platforms.slurm import allocation
from elastic.process import children
from tests.unit.elastic.platforms.slurm.test_scripts import JOB, program

ENDED = {"job": "t-1", "state": "ended", "checkpoints": "/x/t-1", "identity": "i", "digest": "", "because": "drained"}


class Client:
    def __init__(self, entry: dict[str, Any] | None) -> None:
        self._entry = entry

    def job(self, name: str) -> dict[str, Any]:
        if self._entry is None:
            raise ConfigError(f"no job {name!r}")
        return self._entry


class Fleet:
    """answers: to each question about the job; an error: its process has ended then."""

    answers: list[dict[str, Any] | ElasticError | None]
    entered: dict[str, Any] | None = None

    def __init__(self, listen: str, keeps: KeptFleet) -> None:
        self.listen, self.keeps = listen, keeps
        self.address = listen
        self.environment = {"ELASTIC_RENDEZVOUS": listen, "ELASTIC_CERTS": "/c/operator"}
        self.client = Client(self.entered)
        self.issued: list[str] = []
        self.begun = 0

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def issue(self, node: str) -> None:
        self.issued.append(check_name("NAME", node))

    def begin(self) -> None:
        self.begun += 1

    def entry(self, job: str) -> dict[str, Any] | None:
        answer = self.answers.pop(0)
        if isinstance(answer, ElasticError):
            raise answer
        return answer


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Slurm's programs, and `elastic submit`, note what they were asked for in `said`."""
    for name in ("scancel", "srun"):
        program(tmp_path / "bin", name, f'echo {name} "$@" >> {tmp_path}/said')
    known = (
        f'case $2 in hostnames) printf "n1\\nGpu_01.site\\n";; node) cat {tmp_path}/node;; job) cat {tmp_path}/job;;'
    )
    program(tmp_path / "bin", "scontrol", f'{known} *) echo scontrol "$@" >> {tmp_path}/said;; esac')
    submit = f'[ "$ELASTIC_CERTS" ] || exit 9; echo "$@" >> {tmp_path}/said; test -e {tmp_path}/refused && exit 2'
    program(tmp_path / "bin", "elastic.cli", f"{submit}; case $3 in --resume) echo t-2;; *) echo t-1;; esac")
    monkeypatch.setattr(children, "python", lambda *words: list(words))
    (tmp_path / "node").write_text("NodeName=n1 NodeAddr=10.0.0.9 NodeHostName=n1\n")
    (tmp_path / "job").write_text("JobId=7 PreemptTime=None\n")
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    variables = {
        "SLURM_JOB_ID": "5007",
        "SLURMD_NODENAME": "n1",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "LOGNAME": "Ann.Smith",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ELASTIC_ADDRESS", raising=False)
    monkeypatch.setattr(allocation, "POLL_S", 0.0)
    monkeypatch.setattr(allocation, "PrivateFleet", Fleet)
    monkeypatch.setattr(Fleet, "entered", None)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    mask = os.umask(0)
    yield tmp_path
    os.umask(mask)
    for number, handler in before.items():
        signal.signal(number, handler)


def said(here: Path) -> list[str]:
    return (here / "said").read_text().splitlines() if (here / "said").exists() else []


def test_an_allocation_trains_its_job_and_starts_again_what_was_killed(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made: list[Fleet] = []

    class Noted(Fleet):
        def __init__(self, listen: str, keeps: KeptFleet) -> None:
            super().__init__(listen, keeps)
            self.answers = [None, ElasticError("it has ended with -9"), {**ENDED, "exit_code": 0}]
            made.append(self)

    monkeypatch.setattr(allocation, "PrivateFleet", Noted)
    (here / "run" / "certs" / "gone").mkdir(parents=True)
    assert allocation.fleet(here / "job.toml", here / "run", "20", "--slots", "2") == 0
    (own,) = made
    assert own.listen == "10.0.0.9:20014" and own.keeps.operator == "ann-smith" and own.begun == 1
    assert own.issued == ["n1", "gpu-01"] and not (here / "run" / "certs").exists(), "those of an earlier authority"
    told = capfd.readouterr().out.splitlines()
    assert told[0] == "export ELASTIC_RENDEZVOUS=10.0.0.9:20014 ELASTIC_CERTS=/c/operator"
    assert told[-1] == "t-1 is over, exit 0: drained"
    submit, srun = said(here)
    assert submit == f"submit {here}/job.toml"
    assert srun.startswith("srun --no-kill --kill-on-bad-exit=0 --wait=0 ")
    assert srun.endswith(f"{allocation.MODULE} agent {here}/run n1 10.0.0.9:20014 t-1 20 --slots 2")
    assert not (here / "run" / "job").exists(), "nothing to go on with"


@pytest.mark.parametrize("preempted", [False, True])
@pytest.mark.parametrize("near", [False, True])
def test_a_job_that_was_interrupted_is_requeued_at_the_limit_or_where_slurm_has_preempted_it(
    near: bool, preempted: bool, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Limited(Fleet):
        def entry(self, job: str) -> dict[str, Any] | None:
            asked = sum("scancel" in line for line in said(here))
            if near and not asked:
                signal.raise_signal(signal.SIGUSR1)
                return {"state": "placed"}
            return {**ENDED, "exit_code": 6}

    monkeypatch.setattr(allocation, "PrivateFleet", Limited)
    if preempted:
        (here / "job").write_text("JobId=7 PreemptTime=2026-01-01T00:00:00\n")
    assert allocation.fleet(here / "job.toml", here / "run", "20") == 6
    wanted = ["scancel --signal=TERM 5007.0"] * near + ["scontrol requeue 5007"] * (near or preempted)
    assert sorted(line for line in said(here) if line.startswith("sc")) == wanted
    assert (here / "run" / "job").read_text() == "t-1", "an allocation with this directory goes on"


def test_agents_that_have_all_ended_do_not_keep_the_allocation(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "PATIENCE_S", 0.0)
    monkeypatch.setattr(Fleet, "answers", [None] * 100_000, raising=False)
    assert allocation.fleet(here / "job.toml", here / "run", "20") == 3


@pytest.mark.parametrize(("state", "resumed", "job"), [("placed", [], "t-1"), ("ended", [" --resume t-1"], "t-2")])
def test_the_job_of_an_earlier_allocation_goes_on(
    state: str, resumed: list[str], job: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocation, "newest_at", lambda url, identity: f"a checkpoint of {identity} at {url}")
    monkeypatch.setattr(Fleet, "entered", {**ENDED, "state": state})
    own: Any = Fleet("h:1", KeptFleet(here, "", "ann"))
    (here / "kept").write_text("t-1\n")
    assert allocation._begun(own, here / "job.toml", here / "kept") == job
    assert said(here) == [f"submit {here}/job.toml{words}" for words in resumed]
    assert (here / "kept").read_text().strip() == job


def test_a_job_that_ended_without_a_checkpoint_begins_again(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "checkpoints").mkdir()
    monkeypatch.setattr(Fleet, "entered", {**ENDED, "job": "t-9", "checkpoints": str(here / "checkpoints")})
    own: Any = Fleet("h:1", KeptFleet(here, "", "ann"))
    (here / "kept").write_text("t-9\n")
    assert allocation._begun(own, here / "job.toml", here / "kept") == "t-1"
    assert said(here) == [f"submit {here}/job.toml"] and (here / "kept").read_text() == "t-1"
    assert capsys.readouterr().out == "t-9 has ended without a whole checkpoint; the job begins again\n"


def test_a_job_that_is_refused_or_not_known_is_no_silent_new_one(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "kept").write_text("t-1")
    (here / "refused").touch()
    for entry, error in ((ENDED, SystemExit), (None, ConfigError)):
        monkeypatch.setattr(Fleet, "entered", entry)
        own: Any = Fleet("h:1", KeptFleet(here, "", "ann"))
        with pytest.raises(error, match=r"^2$|no job"):
            allocation._begun(own, here / "job.toml", here / "kept")
        assert (here / "kept").read_text() == "t-1"


def test_the_address_may_be_given_and_slurm_may_not_know_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "node").write_text("")
    with pytest.raises(ElasticError, match="ELASTIC_ADDRESS"):
        allocation._address()
    monkeypatch.setenv("ELASTIC_ADDRESS", "10.1.1.1")
    assert allocation._address() == "10.1.1.1"


def test_another_etcd_than_the_one_beside_python_is_taken_if_there_is_one(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocation, "find_binary", lambda: "the one beside Python")
    beside, other = Path(sys.executable).parent, here / "other"
    assert allocation._etcd(f"{beside}:{here}/bin") == "the one beside Python"
    program(other, "etcd", "")
    assert allocation._etcd(f"{beside}:{other}") == str(other / "etcd")


def test_two_allocations_do_not_share_a_directory(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "LOCK_S", 0.0)
    with allocation._lock(here), pytest.raises(ConfigError, match="give another --dir"):
        allocation._lock(here)


@pytest.mark.parametrize(
    ("ending", "code"), [(Ending.OVER, 0), (Ending.ASKED, ExitCode.TERMINATED), (Ending.DIED, ExitCode.TERMINATED)]
)
def test_a_node_has_its_agent_until_the_job_is_over_and_outlives_a_signal_that_is_a_notice_to_it(
    ending: Ending, code: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[AgentPlace] = []

    class Child:
        status = 7

        def __init__(self, place: AgentPlace) -> None:
            places.append(place)

        def obey(self) -> None:
            return None

        def serve(self, look: Look) -> Ending:
            assert callable(signal.getsignal(signal.SIGUSR1)) and not look({})
            return ending

    monkeypatch.setattr(allocation, "AgentChild", Child)
    monkeypatch.setattr(allocation, "_watch", lambda first: None)
    monkeypatch.setenv("SLURMD_NODENAME", "Gpu_01.site")
    assert allocation.agent(here, "n1", "10.0.0.9:20014", "t-1", "20", "--slots", "2") == code
    (place,) = places
    assert (place.node, place.certs, place.jobs_dir) == ("gpu-01", here / "certs" / "gpu-01", here / "Gpu_01.site")
    assert (place.replicas, place.job, place.grace_s) == (("10.0.0.9:20014",), "t-1", 20.0)
    assert place.words == ("--slots", "2") and place.patience_s is None


def test_a_node_requeues_the_job_when_the_first_one_has_left_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([0, 1, 0, 1])

    def sleep(seconds: float) -> None:
        if next(looks):
            raise InterruptedError

    monkeypatch.setattr(time, "sleep", sleep)
    program(here / "bin", "squeue", "echo n[1-2]")
    for first in ("n1", "n7"):
        with pytest.raises(InterruptedError):
            allocation._watch(first)
    assert said(here) == ["scontrol requeue 5007"]


def test_the_program_says_why_it_ends(here: Path) -> None:
    command = [sys.executable, "-m", allocation.MODULE, "fleet", "job.toml", str(here / "run"), "20"]
    variables = {**os.environ, "PATH": str(here)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, "elastic: [Errno 2] No such file or directory: 'scontrol'\n")
