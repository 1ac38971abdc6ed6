"""elastic horovodrun: lists of hosts, options, and discovery scripts, also those that misbehave."""

from __future__ import annotations

import errno
import math
import os
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.cli import main
from elastic.errors import ConfigError, ExitCode
from elastic.platforms.common.node_task import Ticket
from elastic.platforms.horovod import discovery, host_task, hosts, launcher, option_mapping
from elastic.platforms.horovod.discovery import DiscoveryFailed, HostWatch
from elastic.platforms.horovod.hosts import Changes
from elastic.process import children


def test_lists_of_hosts_are_read_in_their_three_spellings() -> None:
    assert hosts.of_option("gpu-1:2,gpu-2:4") == {"gpu-1": 2, "gpu-2": 4}
    assert hosts.of_file("# mine\ngpu-1 slots=2\n\ngpu-2:4 # new\n", "hosts") == {"gpu-1": 2, "gpu-2": 4}
    assert hosts.of_script("gpu-1:2\ngpu-2\n", "hosts.sh", 4) == {"gpu-1": 2, "gpu-2": 4}
    assert hosts.of_script("", "hosts.sh", None) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpu-1:2\ngpu-1:2\n", "gpu-1 is there twice"),
        ("gpu-1\n", "no number of slots"),
        ("gpu-1:none\n", "number of slots from 1"),
        ("gpu-1:0\n", "number of slots from 1"),
        (f"gpu-1:{'1' * 5000}\n", "number of slots from 1"),
        ("-oProxyCommand=evil:1\n", "is no host"),
        ("Traceback (most recent call last):\n", "is no host"),
        ("\x00\x01\n", "is no host"),
        ("gpu-1;rm:1\n", "is no host"),
    ],
)
def test_a_script_that_prints_something_else_is_told_what(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        hosts.of_script(text, "hosts.sh", None)


def test_no_more_workers_than_slots() -> None:
    hosts.check_enough({"a": 2}, 2)
    with pytest.raises(ConfigError, match=r"-np 3, and the hosts have 2 slots"):
        hosts.check_enough({"a": 2}, 3)
    assert hosts.limited({"a": 2, "b": 2, "c": 1}, 3) == {"a": 2, "b": 1}


def test_hosts_that_have_workers_keep_them_when_others_come_and_go() -> None:
    slots = {"a": 2, "b": 2, "c": 1}
    assert hosts.limited(slots, 3, {"c": 1, "b": 2}) == {"b": 2, "c": 1}, "a comes back, and finds no place"
    assert hosts.limited({"b": 2, "a": 2}, 3, {"a": 2, "b": 1}) == {"a": 2, "b": 1}, "the order of a list may change"
    assert hosts.limited({"b": 2}, 3, {"a": 2, "b": 1}) == {"b": 1}, "the last host with workers is not begun anew"
    assert hosts.limited({"b": 2}, 3, {"a": 2, "b": 1}, least=2) == {"b": 2}
    assert hosts.limited({"b": 2, "c": 4}, 3, {"a": 2, "b": 1}) == {"b": 1, "c": 2}


def test_a_new_list_leaves_the_hosts_that_are_in_both() -> None:
    assert hosts.changes({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 1}) == Changes(ends=("b",), begins=("b", "c"))
    assert hosts.changes({"a": 1}, {"a": 1}) == Changes((), ())


def test_a_host_that_has_lost_a_worker_is_left_for_longer_each_time() -> None:
    left = hosts.Blacklist((10.0, 25.0))
    both = {"a": 1, "b": 2}
    assert left.usable(both, 0.0) == both
    assert left.lost("a", 0.0) == 10.0
    assert (left.usable(both, 9.0), left.usable(both, 10.0)) == ({"b": 2}, both)
    assert [left.lost("a", 20.0), left.lost("a", 50.0), left.lost("b", 50.0)] == [20.0, 25.0, 10.0]
    assert left.usable(both, 50.0) == {} and not left.has_all(both), "they come back"
    for_good = hosts.Blacklist((math.inf, math.inf))
    assert for_good.lost("a", 0.0) == math.inf and not for_good.has_all(both)
    assert (for_good.lost("b", 1.0), for_good.has_all(both), for_good.has_all({})) == (math.inf, True, False)
    kept = hosts.Blacklist(None)
    assert kept.lost("a", 0.0) == 0.0 and kept.usable(both, 0.0) == both


def test_options_say_which_mode_is_meant() -> None:
    def asked(*numbers: int | None, discovers: bool = False, restart: bool = False) -> tuple[int, int, int | None]:
        found = option_mapping.wanted(*numbers, discovers=discovers, restart=restart)
        return found.least, found.most, found.ranks

    assert asked(4, None, None, None) == (1, 4, 4)
    assert asked(4, 2, 8, None) == (2, 8, None)
    assert asked(4, None, None, None, discovers=True) == (1, 4, None)
    assert asked(4, None, None, None, restart=True) == (4, 4, None)
    assert asked(3, 2, None, 8) == (2, 3, 8)
    free = option_mapping.wanted(2, 1, None, None, discovers=False, restart=False)
    bound = option_mapping.wanted(2, 1, 3, None, discovers=False, restart=False)
    exact = option_mapping.wanted(2, None, None, None, discovers=False, restart=False)
    listed = {"a": 2, "b": 2}
    assert [one.among(listed).most for one in (free, bound, exact)] == [4, 3, 2] and free.among(None).most == 2
    wrongs: dict[str, tuple[int | None, ...]] = {
        "-np": (None,) * 4,
        "ascending": (4, 5, None, None),
        "at least 1": (0,),
    }
    for said, wrong in wrongs.items():
        with pytest.raises(ConfigError, match=said):
            asked(*(*wrong, None, None, None)[:4])
    with pytest.raises(ConfigError, match="one of them"):
        asked(4, None, None, 4, restart=True)


def test_a_file_of_options_is_flattened() -> None:
    document = {
        "params": {"fusion_threshold_mb": 32},
        "timeline": {"filename": "t.json"},
        "autotune": {"enabled": True},
    }
    found = option_mapping.of_config(document, "c.yaml")
    assert found == {"fusion-threshold-mb": 32, "timeline-filename": "t.json", "autotune": True}
    with pytest.raises(ConfigError, match="no options"):
        option_mapping.of_config("x", "c.yaml")


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return shlex.quote(str(path))


def test_a_script_that_fails_or_hangs_is_named(tmp_path: Path) -> None:
    assert discovery.ask(script(tmp_path / "good", "echo gpu-1:2"), None) == {"gpu-1": 2}
    with pytest.raises(DiscoveryFailed, match="ended with 3: no cloud"):
        discovery.ask(script(tmp_path / "bad", "echo no cloud >&2; exit 3"), None)
    with pytest.raises(DiscoveryFailed, match=r"within 0.2 s, and was killed"):
        discovery.ask(script(tmp_path / "slow", "exec sleep 60"), None, timeout_s=0.2)
    with pytest.raises(DiscoveryFailed, match=r"within 0.2 s, and was killed"):
        discovery.ask(script(tmp_path / "left", "sleep 60; echo a:1"), None, timeout_s=0.2)
    with pytest.raises(DiscoveryFailed, match=r"within 0.2 s, and was killed"):
        discovery.ask(script(tmp_path / "behind", "echo a:1; sleep 60 &"), None, timeout_s=0.2)
    with pytest.raises(DiscoveryFailed, match="ended with 127"):
        discovery.ask(str(tmp_path / "none"), None)
    with pytest.raises(ConfigError, match="no such file"):
        discovery.check_script(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="twice"):
        discovery.ask(script(tmp_path / "twice", "echo a:1; echo a:1"), None)


def test_a_script_that_cannot_be_started_is_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(children, "start", start)
    with pytest.raises(DiscoveryFailed, match=r"hosts.sh cannot be started: .*temporarily"):
        discovery.ask("hosts.sh", None)


def test_the_last_list_holds_while_a_script_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "EVERY_S", 0.01)
    answer = tmp_path / "answer"
    answer.write_text("echo a:1")
    watch = HostWatch(f"sh {shlex.quote(str(answer))}", None)

    def says(text: str) -> None:
        # A rename, as a script that is read while it is written is an empty one: a valid list without hosts.
        new = tmp_path / "new"
        new.write_text(text)
        new.replace(answer)

    def until(reached: object) -> None:
        assert callable(reached)
        for _ in range(3000):
            if reached():
                return
            watch._over.wait(0.01)
        raise AssertionError("not in time")

    try:
        says("echo nonsense; exit 1")
        until(lambda: watch._failure is not None)
        assert watch.now() == {"a": 1}
        says("echo b:2")
        until(lambda: watch.now() == {"b": 2})
        monkeypatch.setattr(discovery, "PATIENCE_S", 0.0)
        says("exit 1")
        with pytest.raises(DiscoveryFailed, match="no list of hosts"):
            until(lambda: watch.now() == {})
    finally:
        watch.close()


def test_a_ticket_goes_over_the_input_and_an_outcome_comes_back() -> None:
    ticket = Ticket("h:1", "job-1", "host-0-1", 2, 30.0, {"key": b"\x00\xff"}, None)
    for sent in (ticket, replace(ticket, function=b"\x80\x05", leaves_after_loss=True)):
        assert host_task.of_line(host_task.to_line(sent)) == sent
    for wrong in (b"", b"{}", b"[]", b'{"certificates": {}}'):
        with pytest.raises((ValueError, TypeError, KeyError)):
            host_task.of_line(wrong)
    outcome = host_task.outcome_of(b'{"over": true, "values": {"1": "gAU="}, "last": {"step": 3}}')
    assert (outcome.last, outcome.values) == ({"step": 3}, {1: b"\x80\x05"})


def test_another_host_is_reached_by_ssh_in_the_same_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    command = launcher.command_of("gpu-2", ["ssh", "-o", "ServerAliveInterval=5"])
    assert command[4:7] == ["/usr/bin/ssh", "-o", "ServerAliveInterval=5"], "the first value counts"
    options = [option.partition("=")[0] for option in command[8:-2:2]]
    assert options == ["BatchMode", "ConnectTimeout", "ServerAliveInterval", "ServerAliveCountMax"]
    assert command[-2] == "gpu-2" and sys.executable in command[-1] and command[-1].startswith("cd /")
    assert "host_task" in launcher.command_of("localhost", ["ssh"])[-1]
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "ssh" else f"/usr/bin/{name}")
    with pytest.raises(ConfigError, match="there is no ssh"):
        launcher.command_of("gpu-2", ["ssh"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-np", "3", "-H", "localhost:2", "python", "x.py"], "-np 3, and the hosts have 2 slots"),
        (["-np", "2", "-H", "a:1,a:1", "python", "x.py"], "a is there twice"),
        (["-np", "2", "ls"], "write `python SCRIPT`"),
        (["python", "x.py"], "give -np"),
        (["-np", "2", "-H", "a:2", "--hostfile", "b", "python", "x.py"], "give one of them"),
        (["-np", "2", "--host-discovery-script", "/none", "python", "x.py"], "there is no such file"),
        (["-np", "2", "--config-file", "/none", "python", "x.py"], "--config-file"),
        (["-np", "2", "--blacklist-cooldown-range", "9", "3", "python", "x.py"], "--blacklist-cooldown-range 9 3"),
        (["-np", "2", "--blacklist-cooldown-range", "nan", "3", "python", "x.py"], "--blacklist-cooldown-range nan"),
        (["-np", "2", "--start-timeout", "nan", "python", "x.py"], "--start-timeout nan must be a number"),
        (["-np", "2", "--reset-limit=-1", "python", "x.py"], "--reset-limit -1 must be a number of at least 0"),
        (["-np", "2", "--slots-per-host", "0", "python", "x.py"], "--slots-per-host 0 must be a number of at least 1"),
    ],
)
def test_the_command_refuses_bad_input(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["horovodrun", *words]) == ExitCode.BAD_INPUT
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("printed", "code", "said"),
    [
        ("echo Traceback most recent call last", ExitCode.BAD_INPUT, "is no host"),
        ("echo a:1; echo a:1", ExitCode.BAD_INPUT, "a is there twice"),
        ("echo no quota left >&2; exit 4", ExitCode.BELOW_QUORUM, "ended with 4: no quota left"),
        ("exec sleep 60", ExitCode.BELOW_QUORUM, "no list of hosts within 0.2 s, and was killed"),
    ],
)
def test_a_job_does_not_begin_with_a_script_that_lists_no_hosts(
    printed: str,
    code: ExitCode,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(discovery.ask, "__defaults__", (0.2 if "sleep" in printed else 10.0,))
    lists = script(tmp_path / "hosts", printed)
    assert main(["horovodrun", "-np", "1", "--host-discovery-script", lists, "python", "x.py"]) == code
    assert said in " ".join(capsys.readouterr().err.split())


def test_options_that_mean_nothing_here_are_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["horovodrun", "--check-build", "--autotune", "--cycle-time-ms", "3.5", "--cache-capacity", "3"]) == 0
    said = capsys.readouterr().err
    assert [said.count(name) for name in ("--autotune is", "--cycle-time-ms is", "--cache-capacity is")] == [1, 1, 1]
