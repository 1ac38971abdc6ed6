"""What `elastic chaos run` and `replay` are asked for: scenarios, jobs in TOML, reports; nothing is started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from chaos_tests import cli
from chaos_tests.checkers import Judgement, judge
from chaos_tests.report import documents
from chaos_tests.run import publish, request
from chaos_tests.run.campaign import (
    Campaign,
    differences,
    from_document,
    ground,
    planned,
    quiet_run_in,
    read_report,
    specification,
)
from chaos_tests.scenario.faults import Ground
from chaos_tests.scenario.scenario import scenario_from_toml, seconds_of
from chaos_tests.scenario.schedule import Planned
from chaos_tests.support.json_lines import Journals, Tail
from elastic.cli import main, parser
from elastic.errors import ConfigError, ExitCode
from tests.unit.histories import event, good, with_events, with_result, with_step, without

FAULTS = """\
seed = 5
[[fault]]
at = "1m"
kind = "kill"
[[fault]]
at = 3
kind = "kill-in-recovery"
place = "ring_up"
"""

JOB = """\
name = "mlp"
checkpoint_dir = "s3://mine"
command = ["python", "train.py"]
workers = 4
[timing]
suspect_s = 0.9
"""


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


def asked(*words: str) -> Campaign:
    scenario, script = request.scenario_of(parser().parse_args(["chaos", "run", *words]))
    return request.campaign_of(scenario, script, Path("/home"))


@pytest.mark.parametrize("code", [0, 1, 6])
def test_nothing_is_compared_with_a_run_that_did_not_end_well(
    tmp_path: Path, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    (quiet / "result.json").write_text(json.dumps({"exit_code": code, "digest": ""}))
    if code == 0:
        assert quiet_run_in(tmp_path) == quiet
        return
    words = ["chaos", "run", "--quiet-run", str(tmp_path), "--job-dir", str(tmp_path / "new"), "--", "train.py"]
    assert main(words) == ExitCode.BAD_INPUT and "nothing can be compared" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("words", "said"), [(["trian.py"], "the script trian.py does not exist"), (["-m", "trian"], "no module trian")]
)
def test_a_script_that_does_not_exist_is_bad_input_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["chaos", "run", "--job-dir", str(tmp_path / "new"), "--", *words]) == ExitCode.BAD_INPUT
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "new").exists()
    assert asked("--", "-m", "json.tool").command == ("-m", "json.tool")


def test_the_faults_of_a_scenario_come_by_their_times() -> None:
    assert scenario_from_toml(FAULTS, "s.toml").faults == (
        Planned(2, 3.0, "kill-in-recovery", "ring_up"),
        Planned(1, 60.0, "kill"),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("preset", "not valid TOML"),
        ("presets = 3", "unknown field 'presets'; known are preset, seed"),
        ('preset = "kill"\n[[fault]]\nat = 1\nkind = "kill"', "give one of preset, trace and"),
        ('[[fault]]\nat = 1\nkind = "gremlin"', "no kind 'gremlin'"),
        ('[[fault]]\nkind = "kill"', "at is missing"),
        ('[[fault]]\nat = 1\nkind = "kill-donor"\nplace = "attic"', "its places are announced, state_copied, joined"),
        ("fault = 3", "write [[fault]]"),
        ('seed = "x"', "seed must be a whole number"),
        ('duration = "soon"', "write 90, 90s, 2m or 1h"),
        ("duration = true", "duration must be"),
        ("restart = 1", "restart must be true or false"),
        ("job = 3", "put it into quotes"),
        ('trace = "x.csv"\nspeed = 0', "speed must be a number above 0"),
        ("speed = 2", "speed is that of a trace"),
        ("divide = 2", "divide is that of a trace"),
        ('trace = "x.csv"\ndivide = 0', "divide must be a whole number of nodes"),
    ],
)
def test_a_bad_scenario_says_what_to_write(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scenario_from_toml(text, "s.toml")
    assert "s.toml" in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("250ms", 0.25), ("1.5h", 5400.0)])
def test_durations_are_read(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


def test_the_command_line_wins_over_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(FAULTS)
    scenario = str(tmp_path / "s.toml")
    plain = asked(scenario, "--", "train.py", "--seed", "9")
    assert (plain.seed, plain.command) == (5, ("train.py", "--seed", "9"))
    assert [one.kind for one in plain.plan] == ["kill-in-recovery", "kill"]
    other = asked(scenario, "--seed", "6", "--preset", "flap", "--", "train.py")
    assert (other.seed, other.preset, other.plan) == (6, "flap", ())
    assert asked("--seed", "6", "--", "train.py").preset == "kill"


def test_a_script_in_rounds_is_asked_for_by_an_option_or_a_scenario(tmp_path: Path) -> None:
    assert asked("--restart", "--", "train.py").restart and not asked("--", "train.py").restart
    (tmp_path / "s.toml").write_text('restart = true\npreset = "rounds"')
    assert asked(str(tmp_path / "s.toml"), "--", "train.py").restart
    both = asked("--restart", "--ranks", "4", "--", "train.py")
    assert (both.restart, both.ranks) == (True, 4)
    (tmp_path / "job.toml").write_text(JOB)
    with pytest.raises(ConfigError, match="write restart = true in it"):
        asked("--restart", "--job", str(tmp_path / "job.toml"))
    hangs = Campaign(tmp_path, ("t.py",), 3, "rounds", 7, None, (Planned(1, 1.0, "hang-script"),), restart=True)
    assert (hangs.hang_s, asked("--", "train.py").hang_s) == (30.0, 600.0)


@pytest.mark.parametrize(
    ("timing", "kind", "hang_s"),
    [
        ("", "hang-script", 30.0),
        ("hang_s = 25.0\nprogress_s = 20.0", "hang-script", 25.0),
        ("progress_s = 45.0", "hang-script", 45.0),
        ("hang_s = 700.0", "kill", 700.0),
    ],
)
def test_the_script_of_a_job_file_hangs_no_longer_than_its_fault_lasts(
    tmp_path: Path, timing: str, kind: str, hang_s: float
) -> None:
    fields = 'name = "t"\ncommand = ["t.py"]\nworkers = 3\nrestart = true'
    (tmp_path / "job.toml").write_text(f"{fields}\n[timing]\n{timing}")
    campaign = replace(asked("--job", str(tmp_path / "job.toml")), plan=(Planned(1, 1.0, kind),))
    assert specification(campaign).timing.hang_s == hang_s


def test_slots_ask_for_several_nodes_which_workers_fill(tmp_path: Path) -> None:
    two = asked("--preset", "everything", "--workers", "4", "--slots", "2", "--", "train.py")
    assert (two.slots, ground(two)) == (2, Ground.CLUSTER)
    assert ground(replace(two, preset="partition")) is Ground.NETWORK, "it needs links, too"
    assert ground(asked("--preset", "everything", "--", "train.py")) is Ground.MACHINE
    (tmp_path / "s.toml").write_text("slots = 1\n" + FAULTS)
    assert asked(str(tmp_path / "s.toml"), "--", "train.py").slots == 1
    for words in (("--slots", "2"), ("--slots", "3"), ("--slots", "0")):
        with pytest.raises(ConfigError, match="do not fill two nodes or more"):
            asked(*words, "--", "train.py")


def test_faults_with_times_of_their_own_have_no_duration(tmp_path: Path) -> None:
    scenario = tmp_path / "s.toml"
    scenario.write_text(FAULTS)
    with pytest.raises(ConfigError, match="duration is that of a preset or a trace"):
        asked(str(scenario), "--duration", "5s", "--", "train.py")


def test_a_job_in_toml_keeps_its_fields_and_finds_its_file_beside_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "s.toml").write_text('job = "job.toml"\n' + FAULTS)
    campaign = asked(str(tmp_path / "s.toml"))
    spec = json.loads(campaign.job)
    assert campaign.command == ("python", "train.py")
    assert (spec["workers"], spec["timing"]["suspect_s"], spec["checkpoint_dir"]) == (4, 0.9, "")
    assert json.loads(asked("--job", str(tmp_path / "job.toml"), "--workers", "2").job)["workers"] == 2
    with pytest.raises(ConfigError, match="leave out"):
        asked("--job", str(tmp_path / "job.toml"), "--", "train.py")
    with pytest.raises(ConfigError, match="at least 2"):
        asked("--job", str(tmp_path / "job.toml"), "--workers", "1")


def report_of(home: Path, **changes: object) -> Path:
    """A report of a good history, as a run writes it."""
    planned = {"number": 1, "at_s": 1.0, "kind": "kill", "place": ""}
    fields = {"command": ["t.py"], "workers": 3, "preset": "kill", "seed": 7, "duration_s": None, "plan": [planned]}
    document = documents.document({**fields, "home": "/x"}, good(), judge(good()), [])
    home.mkdir(exist_ok=True)
    (home / "report.json").write_text(json.dumps({**document, **changes}))
    return home / "report.json"


def test_a_report_says_how_to_run_it_again(tmp_path: Path) -> None:
    report = read_report(report_of(tmp_path))
    assert report == read_report(tmp_path)
    again = from_document(tmp_path / "again", report["asked"])
    assert again == Campaign(tmp_path / "again", ("t.py",), 3, "kill", 7, None, (Planned(1, 1.0, "kill"),))
    assert from_document(again.home, report["asked"]) == again


def test_what_may_stay_undecided_is_allowed_in_reports_and_replays_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    undecided = without(good(), "checkpoint_read", "pointer_moved")

    def report(campaign: Campaign) -> tuple[Judgement, ...]:
        document = documents.document({**asdict(campaign), "home": ""}, undecided, judge(undecided), [])
        (campaign.home / "report.json").write_text(json.dumps(document))
        return judge(undecided)

    monkeypatch.setattr(publish, "report", report)
    monkeypatch.setattr(cli, "_both_runs", lambda asked, earlier: asked)
    (tmp_path / "t.py").touch()
    asked_for = Campaign(tmp_path, ("t.py",), 3, "kill", 7, 5.0, directory=str(tmp_path), allowed=("I14",))
    run = planned(asked_for, 5.0)
    assert main(["chaos", "report", str(tmp_path)]) == ExitCode.DONE
    assert main(["chaos", "report", str(tmp_path), "--allow-unknown", ""]) == cli.NOT_TRUE
    report(run)
    capsys.readouterr()
    assert main(["chaos", "replay", str(tmp_path), "--job-dir", str(tmp_path / "again")]) == ExitCode.DONE
    assert "PASSED (unknown, as allowed: I14)" in capsys.readouterr().out
    (tmp_path / "t.py").unlink()
    assert main(["chaos", "replay", str(tmp_path), "--job-dir", str(tmp_path / "third")]) == ExitCode.BAD_INPUT
    assert f"the script t.py does not exist (looked from {tmp_path})" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "third").exists()


def test_a_job_over_several_nodes_has_the_script_of_its_directory(tmp_path: Path) -> None:
    (tmp_path / "beside.py").touch()
    asked_for = Campaign(tmp_path, ("beside.py", "--fast"), 3, "cluster", 7, 5.0, directory=str(tmp_path))
    assert specification(asked_for).command[1:] == ("beside.py", "--fast")
    with pytest.raises(ConfigError, match="where the job ran, cannot be entered"):
        specification(replace(asked_for, directory=str(tmp_path / "gone")))


def test_the_same_outcome_is_told_from_another(tmp_path: Path) -> None:
    before = read_report(report_of(tmp_path))
    assert list(differences(before, before)) == []
    spoiled = with_result(with_step(good(), 1, scalars={"loss": 0.6}), digest="e" * 64)
    after = documents.document({}, spoiled, judge(spoiled), [])
    after["faults"][0]["fault"] = "freeze-long"
    said = "\n".join(differences(before, after))
    for part in (
        "I10 is false, was true",
        "digest is eeeeeeeeeeeeeeee, was dddddddddddddddd",
        "fault 1 is freeze-long",
    ):
        assert part in said


def test_an_incomplete_fault_was_not_done(tmp_path: Path) -> None:
    before = read_report(report_of(tmp_path))
    missed = event(3, "fault_incomplete", "harness", number=1, because="nobody came")
    half = with_events(good(), missed)
    after = documents.document({}, half, judge(half), [])
    assert after["skipped"] == [{"number": 1, "fault": "kill", "because": "only its first part was done: nobody came"}]
    assert "fault 1 is not done, was kill" in list(differences(before, after))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"asked": {}}', "[" * 100_000, '{"asked": {"plan": [{}], "command": [], "workers": 3}}']
)
def test_what_is_no_report_is_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").write_text(text)
    assert main(["chaos", "replay", str(tmp_path)]) == ExitCode.BAD_INPUT
    assert "is no report" in " ".join(capsys.readouterr().err.split())
    assert main(["chaos", "replay", str(tmp_path / "nowhere.json")]) == ExitCode.BAD_INPUT


def test_a_line_that_a_kill_has_torn_is_passed_over(tmp_path: Path) -> None:
    line = b'{"t_mono_ns":5,"t_wall":1.5,"generation":0,"worker_id":"","who":"a","event":"%s"}\n'
    (tmp_path / "a.jsonl").write_bytes(line % b"one" + b'{"t_mono_ns":6,"gen\n' + line % b"two" + b'{"t_mo')
    tail = Tail(tmp_path / "a.jsonl")
    assert [one["event"] for one in tail.lines()] == ["one", "two"]
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(b"no_ns\n" + line % b"three")
    assert [one["event"] for one in tail.lines()] == ["three"]


def test_lines_of_journals_that_come_late_stand_where_they_belong(tmp_path: Path) -> None:
    def write(name: str, *times_ns: int) -> None:
        with (tmp_path / f"{name}.jsonl").open("a") as file:
            file.writelines(
                f'{{"t_mono_ns":{time_ns},"t_wall":1.5,"generation":0,"worker_id":"","who":"{name}","event":"e"}}\n'
                for time_ns in times_ns
            )

    def told(lines: list[dict[str, Any]]) -> list[tuple[str, int]]:
        return [(line["who"], line["t_mono_ns"]) for line in lines]

    journals = Journals(lambda: tmp_path.glob("*.jsonl"))
    assert journals.all() == []
    write("a", 1, 4)
    assert told(journals.new()) == [("a", 1), ("a", 4)]
    write("b", 2, 3)
    write("a", 5)
    assert told(journals.new()) == [("b", 2), ("b", 3), ("a", 5)]
    assert told(journals.all()) == [("a", 1), ("b", 2), ("b", 3), ("a", 4), ("a", 5)]
    assert journals.new() == []


def test_journals_that_are_put_aside_while_they_are_looked_for_are_there_the_next_time(tmp_path: Path) -> None:
    line = '{"t_mono_ns":1,"t_wall":1.5,"generation":0,"worker_id":"","who":"a","event":"one"}'
    (tmp_path / "a.jsonl").write_text(f"{line}\n")
    looks = iter([False, True])

    def paths() -> Iterator[Path]:
        if not next(looks):
            raise FileNotFoundError(tmp_path / "journal")
        yield from tmp_path.glob("*.jsonl")

    journals = Journals(paths)
    assert journals.new() == []
    assert [line["event"] for line in journals.new()] == ["one"]
