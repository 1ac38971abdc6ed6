"""The plan of a chaos run, whom its faults hit, and what its report says; no job is started."""

from __future__ import annotations

import json
import random
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from chaos_tests import cli as chaos
from chaos_tests.checkers import judge
from chaos_tests.checkers.history import Run
from chaos_tests.nemesis import etcd_members
from chaos_tests.nemesis.membership_view import MembershipView
from chaos_tests.report import documents, page
from chaos_tests.report.story import tell
from chaos_tests.run import listing, request
from chaos_tests.scenario.catalogue import CATALOGUE
from chaos_tests.scenario.faults import Aim, Fault, Ground, choose
from chaos_tests.scenario.schedule import PRESETS, ground_of, plan, preset_of
from elastic.cli import main
from elastic.errors import ConfigError, ExitCode
from elastic.observability.dashboard.saved_page import saved_page
from tests.unit.elastic.observability.dashboard.test_app import write_job
from tests.unit.histories import C, event, good, with_events, with_result, with_step, without

HOLDERS = ["a", "b", "c"]
ASKED = {"command": ["train.py", "<&>"], "preset": "kill", "seed": 7}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_names_known_kinds(name: str) -> None:
    assert set(PRESETS[name].weights) <= set(CATALOGUE)


@pytest.mark.parametrize("name", PRESETS)
def test_one_seed_makes_one_plan(name: str) -> None:
    first = plan(PRESETS[name], 3, 120.0)
    assert plan(PRESETS[name], 3, 120.0) == first != plan(PRESETS[name], 4, 120.0)
    assert [planned.number for planned in first] == list(range(1, len(first) + 1))
    assert all(planned.at_s < 120.0 for planned in first)


def test_everything_holds_every_kind_that_a_job_survives_before_one_comes_twice() -> None:
    kinds = [planned.kind for planned in plan(PRESETS["everything"], 1, 600.0)]
    here = (Ground.ANY, Ground.MACHINE)
    usual = {kind for kind, fault in CATALOGUE.items() if fault.ground in here and fault.usual}
    assert set(kinds[: len(usual)]) == usual


def test_kinds_can_be_named_one_by_one() -> None:
    planned = plan(preset_of("kill,freeze-etcd"), 1, 120.0)
    assert {one.kind for one in planned} == {"kill", "freeze-etcd"}
    assert preset_of("flap") is PRESETS["flap"]


@pytest.mark.parametrize("name", ["kill-in-first-step", "kill-in-first-step,kill-in-last-step"])
def test_a_plan_of_faults_that_come_once_has_each_of_them_once(name: str) -> None:
    assert sorted(one.kind for one in plan(preset_of(name), 1, 60.0)) == sorted(name.split(","))


def test_a_fault_with_places_is_planned_at_one_of_them() -> None:
    for planned in plan(PRESETS["kill"], 1, 600.0):
        known = planned.fault.places
        assert planned.place in known if known else planned.place == ""


@pytest.mark.parametrize("kind", CATALOGUE)
def test_a_member_that_holds_the_state_is_always_spared_by_what_ends_it(kind: str) -> None:
    fault = CATALOGUE[kind]
    if fault.aim in (None, Aim.ALL, Aim.HOLDERS):
        return
    for seed in range(20):
        for count in range(4):
            hit = choose(fault, HOLDERS[:count], ["new"], random.Random(seed))
            assert not hit or set(HOLDERS[:count]) - set(hit), (hit, count)


def test_aims() -> None:
    dice = random.Random(1)

    def aimed(aim: Aim, count: int = 1) -> Fault:
        return Fault("", "", "", aim=aim, count=count)

    assert choose(aimed(Aim.LEADER), HOLDERS, [], dice) == ("a",)
    assert choose(aimed(Aim.YOUNGEST), HOLDERS, [], dice) == ("c",)
    assert choose(aimed(Aim.NEWCOMER), HOLDERS, ["new"], dice) == ("new",)
    assert choose(aimed(Aim.NEWCOMER), HOLDERS, [], dice) == ()
    assert len(choose(aimed(Aim.ALL_BUT_ONE), HOLDERS, [], dice)) == 2
    assert set(choose(aimed(Aim.ALL), HOLDERS, [], dice)) == set(HOLDERS)
    assert choose(aimed(Aim.ANY, count=3), HOLDERS, [], dice) == ()
    assert choose(aimed(Aim.HOLDERS), HOLDERS, [], dice) == (), "nobody is fresh"
    assert choose(aimed(Aim.HOLDERS), HOLDERS[:1], ["new"], dice) == ("a",)
    assert choose(aimed(Aim.HOLDERS), HOLDERS, ["new"], dice) == tuple(HOLDERS)


def line(event: str, worker: str = "", generation: int = 0, **fields: object) -> dict[str, object]:
    return {
        "event": event,
        "worker_id": worker,
        "who": worker or "leader",
        "generation": generation,
        "pid": 1,
        **fields,
    }


def test_a_world_knows_who_holds_the_state_and_who_is_on_the_way() -> None:
    world = MembershipView()
    world.feed([line("committed", generation=1, members=["a", "b"])])
    world.feed([line("op_complete", "a", 1), line("op_complete", "b", 1)])
    assert list(world.holders) == ["a", "b"]
    world.feed([line("member_lost", "b", who="leader"), line("announced", "c", entered=0, who="leader")])
    assert list(world.holders) == ["a"]
    assert world.newcomers == {"c"}
    world.feed([line("committed", generation=2, members=["a", "c"]), line("joined", "c", 2)])
    assert list(world.holders) == ["a", "c"]
    assert world.newcomers == set()
    assert not world.over
    world.feed([line("member_lost", "c", who="leader"), line("committed", generation=3, members=["a", "c"])])
    assert list(world.holders) == ["a", "c"], "given up while its node was silent, and there again"
    world.feed([line("finished", "a", who="leader")])
    assert world.over


class Page(HTMLParser):
    """Every tag that is opened is closed, and nothing is loaded from elsewhere. saved: what the page is made of."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words = ""
        self.saved: dict[str, Any] = {}
        self._is_saved = False
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, value in attributes if value != "#main"}
        self._is_saved = ("id", "saved") in attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._is_saved:
            self.saved, self._is_saved = json.loads(data), False
        elif self.open and self.open[-1] not in ("script", "style"):
            self.words += data


def test_the_page_says_what_was_decided_and_who_was_hit() -> None:
    told = Page(page.above(ASKED, good(), judge(good())))
    for word in ("Chaos: ", "PASSED", "train.py <&>", "every sample exactly once"):
        assert word in told.words


def test_the_report_is_the_page_of_the_job_in_one_file_that_asks_the_network_for_nothing(tmp_path: Path) -> None:
    write_job(tmp_path / "faulty")
    text = saved_page(tmp_path / "faulty", "cha os", "<p>above</p>", {"rate": {"at": [1.0], "values": {}}})
    told = Page(text)
    document = told.saved["/api/jobs/cha%20os"]
    assert told.saved["/api/session"]["job"] == "cha os" and not told.saved["/api/session"]["may_act"]
    assert document["moments"] and document["rate"] == {"at": [1.0], "values": {}}
    assert "uPlot" in text and "import {" not in text and "above" in told.words
    assert document["status"]["digest"] == "d" * 64 and document["summary"]["last_step"] == 4
    used = set(re.findall(r"this\.document\.(\w+)", text))
    assert used - document.keys() == {"beside"}, "of the report of a chaos run alone"


def test_the_documents_say_what_was_decided() -> None:
    spoiled = with_step(good(), 1, scalars={"loss": 0.6})
    findings = judge(spoiled)
    document = json.loads(json.dumps(documents.document(ASKED, spoiled, findings, [])))
    assert not document["passed"] and document["headline"] == "NOT PASSED"
    assert {i["number"]: i["answer"] for i in document["invariants"]}["I7"] == "false"
    suite = ElementTree.fromstring(documents.junit(findings, 1.0))
    assert suite.attrib["failures"] == str(len(suite.findall("*/failure"))) == "2"


def test_a_message_with_colours_and_what_is_no_text_does_not_spoil_the_documents() -> None:
    said = "ValueError: \x1b[31mno loss\x1b[0m \0 \udcff \ufffe"
    findings = judge(with_result(good(), exit_code=1, because=said))
    suite = ElementTree.fromstring(documents.junit(findings, 1.0).encode())
    assert any("no loss" in found.attrib["message"] for found in suite.findall("*/failure"))


def own_samples(run: Run) -> Run:
    return replace(run, steps=tuple(replace(step, line={**step.line, "samples": []}) for step in run.steps))


def test_what_cannot_apply_is_said_beside_the_verdict_and_does_not_fail_the_run() -> None:
    history = replace(good(), faulty=own_samples(good().faulty), quiet=own_samples(good().quiet))
    findings = judge(history)
    assert documents.passed(findings)
    assert documents.headline(findings) == "PASSED (not applicable: I8, I9)"
    document = documents.document(ASKED, history, findings, [])
    assert (document["passed"], document["headline"]) == (True, documents.headline(findings))
    assert documents.headline(findings) in Page(page.above(ASKED, history, findings)).words
    suite = ElementTree.fromstring(documents.junit(findings, 1.0))
    said = [case.attrib["message"] for case in suite.findall("*/skipped")]
    assert len(said) == 2 and all(
        because.startswith("not applicable: the script draws its samples") for because in said
    )
    assert (suite.attrib["skipped"], suite.attrib["errors"], suite.attrib["failures"]) == ("2", "0", "0")


@pytest.mark.parametrize(
    ("skipped", "said"),
    [
        ((), "NOT PASSED (no fault was injected)"),
        (
            (("kill", "there were not two members"), ("kill", "the run is over")),
            "NOT PASSED (no fault was injected: 2 skipped, the first because there were not two members)",
        ),
    ],
)
def test_a_run_without_a_fault_says_so_in_its_headline(skipped: tuple[tuple[str, str], ...], said: str) -> None:
    told = [
        event(7, "fault_skipped", "harness", number=number, fault=fault, because=because)
        for number, (fault, because) in enumerate(skipped)
    ]
    history = with_events(without(good(), "fault_injected", "fault_seen", "fault_ended"), *told)
    findings = judge(history)
    assert documents.headline(findings) == documents.headline(findings, frozenset({"I16"})) == said
    assert documents.document(ASKED, history, findings, [])["headline"] == said
    assert f"Chaos: {said}" in Page(page.above(ASKED, history, findings)).words
    suite = ElementTree.fromstring(documents.junit(findings, 1.0))
    assert suite.attrib["name"] == f"chaos: {said}"


def test_what_may_be_unknown_must_still_not_be_false() -> None:
    quiet = replace(good(), quiet=replace(good().quiet, result=None))
    findings = judge(quiet)
    unknown = {finding.invariant.number for finding in findings if finding.verdict.answer == "unknown"}
    assert unknown == {"I10"}
    assert not documents.passed(findings) and documents.passed(findings, frozenset({"I10"}))
    document = documents.document(ASKED, quiet, findings, [], frozenset({"I10"}))
    assert (document["passed"], document["headline"]) == (True, "PASSED (unknown, as allowed: I10)")
    suite = ElementTree.fromstring(documents.junit(findings, 1.0, frozenset({"I10"})))
    assert (suite.attrib["skipped"], suite.attrib["errors"]) == ("1", "0")

    findings = judge(replace(good(), faulty=own_samples(good().faulty)))
    spoiled = {finding.invariant.number for finding in findings if finding.verdict.answer == "false"}
    assert spoiled == {"I7", "I8", "I9", "I10"}, "the quiet run has samples"
    assert not documents.passed(findings, frozenset(spoiled))


def test_a_story_has_the_lives_the_faults_and_the_rates() -> None:
    history = with_events(
        good(),
        event(0.5, "worker_started", "agent-n", worker=C),
        event(6.0, "worker_exited", "agent-n", worker=C, because="killed by <SIGKILL>"),
    )
    story = tell(history.faulty)
    assert [blow.targets for blow in story.blows] == [(C,)]
    assert sum(story.rates) == 3
    assert [number for _, number, _ in story.generations] == [1, 2, 3]
    rows = ElementTree.fromstring(page.lanes(story))
    slot = C.rpartition(".")[0]
    assert {"generation", "fault", slot} <= {row.findtext("th") for row in rows}
    (hit,) = (row for row in rows if row.findtext("th") == slot)
    assert [piece.get("class") for piece in hit.findall("td/span")] == ["starting", "member", "struck"]
    assert hit.find("td/span").get("title") == f"{C}: killed by <SIGKILL>"  # type: ignore[union-attr]
    assert page.rate(history.faulty, 7.0)["values"]["steps_per_s"]["mean"] == list(story.rates)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run"], "no script"),
        (["run", "--preset", "gremlins", "--", "x.py"], "presets are kill"),
        (["run", "--workers", "1", "--", "x.py"], "at least 2"),
        (["run", "--allow-unknown", "I99", "--", "x.py"], "no invariant I99"),
        (["run", "--duration", "soon", "--", "x.py"], "write 90"),
    ],
)
def test_bad_input_says_what_to_change(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    try:
        code = main(["chaos", *words])
    except SystemExit as exit_:
        code = int(str(exit_.code))
    assert code == ExitCode.BAD_INPUT
    assert said in capsys.readouterr().err.replace("\n", " ")


def test_a_directory_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(ConfigError, match="not empty"):
        chaos._home(tmp_path, "train.py")


def test_the_list_names_every_preset_and_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in (*PRESETS, *CATALOGUE))


def test_the_list_as_json_says_what_this_machine_cannot_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "why_not", lambda: "no network here")
    monkeypatch.setattr(etcd_members, "sturdy_binary", lambda: None)
    assert main(["chaos", "list", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [preset["name"] for preset in told["presets"]] == list(PRESETS)
    assert {preset["name"] for preset in told["presets"] if preset["cannot"]} == {"partition"}
    faults = {fault["name"]: fault for fault in told["faults"]}
    assert list(faults) == list(CATALOGUE)
    assert faults["cut-pair"]["cannot"] == "no network here"
    assert {name for name in faults if "etcd" in faults[name]["cannot"]} == {"kill-etcd", "kill-etcd-leader"}
    assert faults["kill-in-copy"]["places"] == ["copy-is-sent", "copy-is-received"]
    assert (faults["kill"]["ground"], faults["reclaim"]["ground"]) == (Ground.ANY, Ground.MACHINE)


def test_a_list_for_people_has_each_name_apart_from_its_text() -> None:
    told = listing.text().splitlines()
    assert all(any(line.startswith(f"  {name} ") for line in told) for name in (*PRESETS, *CATALOGUE))


@pytest.mark.parametrize("action", ["run", "replay", "report"])
def test_what_ends_with_an_exit_code_of_its_own_says_so(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["chaos", action, "--help"])
    assert "exit codes:\n  0 every invariant" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--preset", "partition"], ["--preset", "kill,cut-pair"]])
def test_what_this_machine_cannot_do_is_skipped_with_the_reason_and_nothing_is_begun(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "why_not", lambda: "no network here")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    home = tmp_path / "home"
    assert main(["chaos", "run", *words, "--json", "--job-dir", str(home), "--", "x.py"]) == chaos.SKIPPED
    told = capsys.readouterr()
    assert json.loads(told.out) == {"passed": False, "skipped": "no network here"}
    assert "SKIPPED" in told.err and "no network here" in told.err
    assert not home.exists()


@pytest.mark.parametrize(
    ("preset", "where"),
    [
        ("everything", Ground.MACHINE),
        ("kill,freeze-long", Ground.MACHINE),
        ("cluster", Ground.CLUSTER),
        ("kill-agent,kill", Ground.CLUSTER),
        ("partition", Ground.NETWORK),
        ("kill-agent,cut-node", Ground.NETWORK),
    ],
)
def test_a_job_lies_where_all_its_faults_can_be_done(preset: str, where: Ground) -> None:
    assert ground_of(preset_of(preset).weights) is where
