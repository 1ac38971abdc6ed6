"""The verbs of a fleet refuse what cannot be meant before anything is started or said."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any, cast

import pytest

from elastic import cli
from elastic.cli import parser
from elastic.cli.fleet import daemons
from elastic.cli.fleet.daemons import default_slots
from elastic.cli.fleet.jobs import overview_text
from elastic.config import JobSpec
from elastic.errors import ConfigError, ElasticError, ExitCode
from elastic.fleet import client as client_module
from elastic.fleet import remote_logs
from elastic.fleet.client import FleetClient, Log
from elastic.fleet.remote_logs import DirectoryLogs, FleetLogs, is_worker, show
from elastic.protocol.worker_id import node_name
from elastic.rendezvous import endpoint
from elastic.wire import elastic_pb2 as pb
from tests.unit.elastic.cli.test_cli import code_of

HERE = ["--rendezvous", "127.0.0.1:1"]
JOB = 'name = "t"\ncommand = ["python", "t.py"]\nworkers = 2\n'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rendezvous", "--listen", "127.0.0.1:0"], "--etcd"),
        (["rendezvous", "--etcd", "127.0.0.1", "--listen", "127.0.0.1:0"], "--etcd '127.0.0.1' must be HOST:PORT"),
        (["rendezvous", "--etcd", "127.0.0.1:2379", "--listen", "0.0.0.0:7070"], "is every address"),
        (["rendezvous", "--etcd", "127.0.0.1:2379", "--listen", "10.0.0.1:7070"], "--insecure"),
        (
            ["rendezvous", "--etcd", "10.0.0.1:2379", "--listen", "127.0.0.1:7070"],
            "machines reach --etcd 10.0.0.1:2379",
        ),
        (["rendezvous", "--etcd", "127.0.0.1:1", "--listen", "127.0.0.1:1,127.0.0.1:2"], "takes one address, not 2"),
        (["agent"], "--rendezvous"),
        (["agent", "--rendezvous", "127.0.0.1:0"], "must be HOST:PORT"),
        (["agent", "--rendezvous", " , "], "is empty"),
        (["agent", "--rendezvous", "10.0.0.1:7070"], "anybody who reaches the port can run commands as this user"),
        (
            ["agent", "--rendezvous", "10.0.0.1:7070", "--insecure", "--address", "127.0.0.1"],
            "only this machine reaches --address 127.0.0.1",
        ),
        (
            ["agent", "--rendezvous", "no.such.host.invalid:7070", "--insecure"],
            "has no route to the rendezvous (no.such",
        ),
        (["agent", *HERE, "--slots", "0"], "--slots=0 must be >= 1"),
        (["agent", *HERE, "--node", "GPU 7"], "'gpu-7'"),
        (["agent", *HERE, "--label", "fast"], "--label: 'fast' must be NAME=VALUE"),
        (["agent", *HERE, "--address", "0.0.0.0"], "is every address"),
        (["agent", *HERE, "--address", "192.0.2.1"], "is not an address of this machine"),
        (["agent", *HERE, "--address", "no.such.host.invalid"], "is not known"),
        (["agent", *HERE, "--grace", "-1"], "--grace -1 must be a positive number"),
        (["submit", "absent.toml", *HERE], "absent.toml cannot be read"),
        (["jobs", "--rendezvous", "gpu-7.example.com:70"], "--insecure"),
        (["status", "train", "--job-dir", "x"], "give JOB with --rendezvous only"),
        (["status"], "there is no job in"),
        (["drain"], "one of the arguments --job-dir --rendezvous is required"),
        (["drain", *HERE], "name the node with --node"),
        (["scale", "train", str(10**20), *HERE], "100000000000000000000 is too large a number"),
        (["quota", "ann", str(-(10**20)), *HERE], "-100000000000000000000 is too large a number"),
        (["status", "tr\udcffin", *HERE], "'tr\\udcffin' is no text in UTF-8"),
        (["drain", "--node", "n\udcff", *HERE], "'n\\udcff' is no text in UTF-8"),
        (["logs", "--job-dir", "x"], "holds no job"),
        (["stop", *HERE], "JOB"),
    ],
)
def test_bad_input_gets_one_paragraph_and_exit_code_2(
    arguments: list[str], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(arguments) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert said in error
    assert list(here.iterdir()) == [], "something was made"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", "checkpoint_dir='' must be an absolute path that all nodes share"),
        ('checkpoint_dir = "runs/7"', "checkpoint_dir='runs/7' must be an absolute path"),
        ('checkpoint_dir = "/x"\ndirectory = "train"', "directory='train' must be an absolute path"),
        ('checkpoint_dir = "/x"\nring = "mpi"', "ring='mpi' connects the workers of one machine"),
        ('checkpoint_dir = "/x"\npriority = -1', "job.toml, line 5: priority=-1 must be >= 0"),
        ('checkpoint_dir = "/x"\nowner = "Ann B"', "job.toml, line 5: owner='Ann B' must be 1 to 63 lower-case"),
        ("wokers = 3", "job.toml, line 4: unknown field wokers; did you mean workers?"),
    ],
)
def test_a_job_that_several_machines_cannot_run_is_refused_here(
    more: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "job.toml").write_text(JOB + more)
    assert code_of(["submit", "job.toml", *HERE]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("verb", ["rendezvous", "agent", "submit", "jobs", "logs", "stop", "status", "drain", "certs"])
def test_every_verb_shows_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of([verb, "--help"]) == 0
    assert f"elastic {verb} " in capsys.readouterr().out.partition("examples:")[2]


def test_a_node_is_reached_where_it_reaches_the_rendezvous() -> None:
    assert endpoint.address_towards(["127.0.0.1:7070", "localhost:7071"]) == "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 7070))
        except OSError:
            pytest.skip("this machine has no way to others")
        own = probe.getsockname()[0]
    assert endpoint.address_towards(["127.0.0.1:7070", "192.0.2.1:7070"]) == own


@pytest.mark.parametrize(
    ("environment", "slots"),
    [
        ({}, 1),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "16"}, 8),
        ({"SLURM_GPUS_ON_NODE": "0", "SLURM_CPUS_PER_TASK": "16"}, 16),
        ({"SLURM_GPUS_ON_NODE": "gpu:2"}, 1),
    ],
)
def test_an_agent_takes_as_many_workers_as_slurm_has_given_it(environment: dict[str, str], slots: int) -> None:
    assert default_slots(environment) == slots


def test_an_agent_in_a_job_of_slurm_has_the_name_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "GPU-7.cluster")
    options = cli.parser(["agent"]).parse_args(["agent", *HERE])
    assert daemons._node_of(options) == "gpu-7"


def test_what_is_said_to_this_machine_alone_may_be_plain() -> None:
    endpoint.check_plain("--x", ["127.0.0.9:1", "localhost:2", "[::1]:3", "127.0.0.1"], allowed=False)
    endpoint.check_plain("--x", ["10.0.0.1:1"], allowed=True)
    for address in ("10.0.0.1:1", "host:1", "[fe80::1]:1"):
        with pytest.raises(ConfigError, match="without certificates anybody who reaches"):
            endpoint.check_plain("--x", [address], allowed=False)


@pytest.mark.parametrize("text", ["a", "a:", "a:70000", ":1", "a b:1", "a:1:2", "http://a:1", "a:-1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be HOST:PORT"):
        endpoint.parse("--x", text)


def test_a_node_is_named_after_its_host() -> None:
    assert [node_name(host) for host in ("gpu-7.cluster.local", "My_Host", "___")] == ["gpu-7", "my-host", "node"]


def test_logs_of_workers_are_told_from_others(here: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    names = ["a.0.0", "gpu-7.1.12", "agent", "fork-server-a", "stdout", "a.0", "a.b.c", "journal/a.0.0"]
    assert [is_worker(name) for name in names] == [True, True, *[False] * 6]
    (here / "logs").mkdir()
    (here / "job.json").write_text("{}")
    for name in ("a.0.0", "b.0.0", "agent"):
        (here / "logs" / f"{name}.log").write_bytes(f"{name} says \xe9\n".encode())
    show(DirectoryLogs(here), None, follow=False, as_json=False)
    show(DirectoryLogs(here), "b.0.0", follow=False, as_json=False)
    shown = capfdbinary.readouterr().out.decode()
    assert shown == "==> a.0.0 <==\na.0.0 says é\n==> b.0.0 <==\nb.0.0 says é\nb.0.0 says é\n"
    with pytest.raises(ConfigError, match=r"no log of c.0.0; there are a.0.0, b.0.0"):
        show(DirectoryLogs(here), "c.0.0", follow=False, as_json=False)


def test_what_comes_while_following_is_shown_once(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_logs, "FOLLOW_POLL_S", 0.0)

    class Growing:
        text = b""
        looks = 0

        def names(self) -> list[str]:
            self.looks += 1
            if self.looks == 4:
                raise KeyboardInterrupt
            self.text += b"%d\n" % self.looks
            return ["a.0.0"]

        def read(self, name: str, offset: int) -> Log:
            piece = self.text[offset : offset + 1]
            return Log(piece, offset + len(piece), len(self.text))

    with pytest.raises(KeyboardInterrupt):
        show(Growing(), "a.0.0", follow=True, as_json=False)
    assert capfdbinary.readouterr().out == b"1\n2\n3\n"


def test_the_overview_says_what_a_job_waits_for_and_what_is_wrong() -> None:
    job: dict[str, Any] = {"workers": 2, "slots": {}, "because": "", "troubles": []}
    overview: dict[str, Any] = {
        "jobs": [
            {**job, "job": "a-1", "state": "ended", "exit_code": 6, "because": "drained\nmore"},
            {
                **job,
                "job": "b-2",
                "state": "placed",
                "slots": {"n": 2},
                "troubles": [{"because": "on n it ends", "advice": "look"}],
            },
            {**job, "job": "c-3", "state": "waits", "because": "needs 2 free slots at once"},
        ],
        "nodes": [
            {"node": "m", "up": False, "slots": 0, "labels": [], "because": "is away", "jobs": {}},
            {"node": "n", "up": True, "slots": 2, "labels": ["gpu=h100"], "because": "", "jobs": {"b-2": 2}},
        ],
        "troubles": [
            {"because": "on n it ends", "advice": "look"},
            {"because": "the certificate of agent m ends on Monday", "advice": "renew it"},
        ],
    }
    assert overview_text(overview).splitlines() == [
        "a-1                  ended     exit 6: drained",
        "b-2                  placed    2 on n",
        "  trouble: on n it ends; look",
        "c-3                  waits     2 workers: needs 2 free slots at once",
        "node m               away",
        "node n               2 of 2 slots taken, gpu=h100",
        "trouble: the certificate of agent m ends on Monday; renew it",
    ]


def test_a_submission_that_is_asked_again_has_the_same_token(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: list[str] = []

    def asked(channel: object, question: pb.Question) -> pb.Answer:
        tokens.append(question.submit.token)
        if len(tokens) == 1:
            raise ElasticError("nobody leads the job at the moment")
        return pb.Answer(leading=True, document='{"job": "train-1"}')

    monkeypatch.setattr(client_module, "ask_leader", lambda replicas, ask, channels: ask(None))
    monkeypatch.setattr(client_module, "_asked", asked)
    client = client_module.FleetClient(["here:1"])
    spec = JobSpec(name="train", command=("train",), workers=1)
    assert [client.submit(spec)["job"], client.submit(spec)["job"]] == ["train-1", "train-1"]
    first, again, other = tokens
    assert first == again != other and first


def test_submit_says_when_a_job_is_larger_than_the_fleet(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    larger = "larger than the fleet, which has 1 slot on 1 node: needs 2 at once, and holds up nobody"
    monkeypatch.setattr(FleetClient, "_ask", lambda client, question: {"job": "t-1", "larger": larger})
    (here / "job.toml").write_text(JOB + 'checkpoint_dir = "/x"')
    assert code_of(["submit", "job.toml", *HERE]) == 0
    told = capsys.readouterr()
    assert (told.out, told.err) == ("t-1\n", f"elastic: t-1 waits, and is {larger}\n")
    monkeypatch.setattr(FleetClient, "_ask", lambda client, question: {"job": "t-1", "larger": ""})
    assert code_of(["submit", "job.toml", "--json", *HERE]) == 0
    told = capsys.readouterr()
    assert (json.loads(told.out), told.err) == ({"job": "t-1", "larger": ""}, "")


class OneAway:
    """A fleet whose node b attends and does not answer."""

    def overview(self) -> dict[str, Any]:
        return {"nodes": [{"node": "a", "up": True}, {"node": "b", "up": True}]}

    def log(self, job: str, node: str, log: str, offset: int) -> Log:
        if node == "b":
            return Log(b"", offset, -1, away=True)
        text = b"said" if log else b"a.0.0\nagent"
        return Log(text[offset:], len(text), len(text))


def test_a_node_that_is_away_hides_no_log_of_the_others_and_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = FleetLogs(cast(FleetClient, OneAway()), "train-1")
    for _ in range(2):
        show(nodes, None, follow=False, as_json=False)
    assert nodes.read("b.0.0", 7) == Log(b"", 7, -1, away=True)
    told = capsys.readouterr()
    assert told.out.count("==> a.0.0 <==\nsaid") == 2
    assert told.err == "elastic: node b is away, and its logs with it\n"


def test_a_node_is_not_called_empty_while_a_job_of_it_has_no_leader(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fleet takes a node out of a job's placement at once; the workers take their time."""

    def nobody(*_: object) -> None:
        raise ElasticError("no replica leads train-1")

    job = {"job": "train-1", "state": "placed", "workers": 2, "min_workers": 1, "slots": {"b": 1}}
    node = {"node": "a", "up": True, "slots": 1, "jobs": {}, "because": ""}
    overview = {"jobs": [job], "nodes": [node]}
    monkeypatch.setattr(FleetClient, "cordon", lambda *_, **__: None)
    monkeypatch.setattr(FleetClient, "overview", lambda _: overview)
    monkeypatch.setattr(client_module, "fetch_status", nobody)
    assert code_of(["drain", *HERE, "--node", "a", "--budget", "0.1"]) == ExitCode.BELOW_QUORUM
    assert "perhaps some of train-1, which nobody leads" in capsys.readouterr().err


def test_replicas_are_those_of_the_environment_unless_others_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_RENDEZVOUS", "10.0.0.1:7070")
    assert parser().parse_args(["jobs"]).rendezvous == "10.0.0.1:7070"
    assert parser().parse_args(["status", "train"]).rendezvous == "10.0.0.1:7070"
    assert parser().parse_args(["status", "--rendezvous", "10.0.0.2:7070"]).rendezvous == "10.0.0.2:7070"
    assert str(parser().parse_args(["status", "--job-dir", "job"]).job_dir) == "job"
    assert parser().parse_args(["doctor"]).exact is False
    monkeypatch.setenv("ELASTIC_RENDEZVOUS", "")
    for words in (["jobs"], ["drain"], ["doctor"]):
        with pytest.raises(SystemExit):
            parser().parse_args(words)


def test_who_waits_for_a_job_ends_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    running = {"job": "t-1", "state": "placed"}
    told = [
        running,
        ElasticError("nobody leads"),
        {**running, "state": "ended", "exit_code": 6, "because": "x", "digest": ""},
    ]

    def job(client: FleetClient, name: str) -> dict[str, Any]:
        entry = told.pop(0)
        if isinstance(entry, ElasticError):
            raise entry
        return cast(dict[str, Any], entry)

    monkeypatch.setattr(FleetClient, "job", job)
    assert code_of(["jobs", "--wait", "t-1", *HERE]) == ExitCode.DRAINED
    assert told == [] and capsys.readouterr().out == "t-1 is over, exit 6: x\n"
