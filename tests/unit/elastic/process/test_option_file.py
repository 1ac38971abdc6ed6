"""Options from a file: those of `elastic agent`, as its parser declares them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from elastic.cli import parser
from elastic.cli.fleet import daemons
from elastic.errors import ConfigError
from tests.live.jobs import ROOT

GOOD = """
rendezvous = "127.0.0.1:1"
slots = 3
label = ["gpu=h100", "zone=a"]
jobs_dir = "jobs"
grace = 5
insecure = true
notices = "none"
log_format = "json"
"""


def settled(tmp_path: Path, text: str, *words: str) -> dict[str, Any]:
    path = tmp_path / "agent.toml"
    path.write_text(text)
    options = parser(["agent"]).parse_args(["agent", "--config", str(path), *words])
    return vars(daemons._settled(options)[0])


def test_a_file_has_options_under_their_names_and_the_command_line_counts_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_RENDEZVOUS", "127.0.0.1:9")
    found = settled(tmp_path, GOOD)
    expected = {
        "rendezvous": "127.0.0.1:1",
        "slots": 3,
        "label": ["gpu=h100", "zone=a"],
        "jobs_dir": Path("jobs"),
        "grace": 5.0,
        "insecure": True,
        "notices": "none",
        "log_format": "json",
        "log_level": "info",
        "address": None,
        "node": None,
    }
    assert {name: found[name] for name in expected} == expected
    assert type(found["grace"]) is float
    over = settled(tmp_path, GOOD, "--slots", "1", "--label", "a=b", "--grace=30", "--log-format", "text")
    assert (over["slots"], over["label"], over["grace"], over["log_format"]) == (1, ["a=b"], 30.0, "text")
    assert settled(tmp_path, "")["rendezvous"] == "127.0.0.1:9", "the environment counts least"
    assert settled(tmp_path, GOOD)["label"] == ["gpu=h100", "zone=a"], "no list is added to"


@pytest.mark.parametrize(
    ("text", "because"),
    [
        ("\nslotz = 2\n", "line 2: unknown field slotz; did you mean slots?"),
        ('jobs-dir = "x"\n', "line 1: unknown field jobs-dir; did you mean jobs_dir?"),
        ("config = 'x'\n", "line 1: unknown field config; "),
        ('slots = "2"\n', "line 1: slots='2' must be a whole number"),
        ("slots = true\n", "line 1: slots=True must be a whole number"),
        ("slots = 2.0\n", "line 1: slots=2.0 must be a whole number"),
        ('grace = "soon"\n', "line 1: grace='soon' must be a number of seconds"),
        ('label = "a=b"\n', "line 1: label='a=b' must be a list of strings"),
        ("label = [1]\n", "line 1: label=[1] must be a list of strings"),
        ("insecure = 1\n", "line 1: insecure=1 must be true or false"),
        ("node = 7\n", "line 1: node=7 must be a string"),
        ('log_level = "loud"\n', "line 1: log_level='loud' must be 'debug' or 'info' or 'warning' or 'error'"),
        ("slots = \n", ": not valid TOML: "),
        ("slots = 1\nslots = 2\n", ": not valid TOML: "),
    ],
)
def test_a_mistake_is_named_with_file_and_line(tmp_path: Path, text: str, because: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settled(tmp_path, text)
    told = str(caught.value)
    assert told.startswith(str(tmp_path / "agent.toml")) and because in told


def check(tmp_path: Path, text: str, *words: str) -> None:
    """All that an agent checks of its options before it begins."""
    path = tmp_path / "agent.toml"
    path.write_text(text)
    where = ("--rendezvous", "127.0.0.1:1", "--jobs-dir", str(tmp_path / "jobs"))
    options, settings = daemons._settled(parser(["agent"]).parse_args(["agent", "--config", str(path), *where, *words]))
    with settings.placing():
        daemons._checked(options)


@pytest.mark.parametrize(
    ("text", "because"),
    [
        ("\nslots = 0\n", "line 2: --slots=0 must be >= 1"),
        ('label = ["gpu"]\n', "line 1: --label: 'gpu' must be NAME=VALUE"),
        ('notices = "file:relative"\n', "line 1: --notices file:relative is none of"),
        ("grace = -1\n", "line 1: --grace -1 must be a positive number"),
        ('node = "A B"\n', "line 1: --node='A B' must be 1 to 63 lower-case letters"),
        ('certs = "/no/where"\n', "/no/where"),
    ],
)
def test_what_an_option_may_be_is_checked_for_the_file_too_and_named_with_its_line(
    tmp_path: Path, text: str, because: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, text)
    assert because in str(caught.value)


def test_a_mistake_of_the_command_line_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--slots=0 must be >= 1$"):
        check(tmp_path, "slots = 2\n", "--slots", "0")


@pytest.mark.parametrize("path", ["absent.toml", "", "fifo"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, path: str) -> None:
    """A daemon that reads it again must not wait for it."""
    os.mkfifo(tmp_path / "fifo")
    options = parser(["agent"]).parse_args(["agent", "--config", str(tmp_path / path)])
    with pytest.raises(ConfigError, match=r"cannot be read: (No such file|this is no file)"):
        daemons._settled(options)


def test_a_file_read_again_changes_what_may_change_and_names_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(GOOD)
    options = parser(["agent"]).parse_args(["agent", "--config", str(path), "--node", "a"])
    _, settings = daemons._settled(options)
    path.write_text(GOOD.replace("slots = 3", "slots = 4").replace("jobs_dir", "address = '::1'\njobs_dir"))
    now = settings.reread()
    assert (now.slots, now.labels, now.notices, now.log_level) == (4, ("gpu=h100", "zone=a"), "none", "info")
    assert now.changed == {"slots": (3, 4)} and now.refused == {"address": (None, "::1")}
    path.write_text("slots = 0\n")
    with pytest.raises(ConfigError, match=r"agent.toml, line 1: --slots=0 must be >= 1"):
        settings.reread()
    path.write_text("[[")
    with pytest.raises(ConfigError, match="not valid TOML"):
        settings.reread()
    path.write_text(GOOD.replace("slots = 3", "slots = 4").replace('label = ["gpu=h100", "zone=a"]', "node = 'b'"))
    now = settings.reread()
    assert now.changed == {"label": (["gpu=h100", "zone=a"], [])}, "the broken files have changed nothing"
    assert now.refused == {}, "the command line names the node, and counts more"


def test_the_file_that_is_shipped_is_one(tmp_path: Path) -> None:
    found = settled(tmp_path, (ROOT / "docs" / "systemd" / "agent.toml").read_text())
    assert found["node"] == "gpu-1" and found["label"] == ["gpu=h100"]
