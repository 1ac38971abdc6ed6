"""What `elastic horovodrun` makes of its options on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from elastic import cli
from elastic.cli.platforms import horovodrun
from elastic.errors import ConfigError


def asked(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    """The words of the `elastic run` that it becomes."""
    found: list[list[str]] = []

    def run(given: list[str]) -> int:
        found.append(given)
        return 0

    monkeypatch.setattr(cli, "main", run)
    parser = argparse.ArgumentParser()
    horovodrun.add(parser.add_subparsers())
    options = parser.parse_args(["horovodrun", *words])
    assert options.verb(options) == 0
    return found[0]


def test_how_long_a_job_waits_for_workers_is_said_to_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ("-np", "2", "--min-np", "1", "--job-dir", str(tmp_path))
    given = asked(monkeypatch, *words, "--elastic-timeout", "90", "python", "train.py")
    assert given[given.index("--pause-limit") + 1] == "90"
    given = asked(monkeypatch, *words, "python", "train.py")
    assert given[given.index("--pause-limit") + 1] == "600"


def test_a_config_file_says_what_the_command_line_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "horovod.yaml"
    config.write_text("num-proc: 2\nelastic-timeout: 45\n")
    words = ("--config-file", str(config), "--job-dir", str(tmp_path))
    given = asked(monkeypatch, *words, "python", "train.py")
    assert given[given.index("--workers") + 1] == "2"
    assert given[given.index("--pause-limit") + 1] == "45"
    given = asked(monkeypatch, *words, "--elastic-timeout", "50", "python", "train.py")
    assert given[given.index("--pause-limit") + 1] == "50"


def test_a_config_file_says_for_how_long_a_host_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "horovod.yaml"
    words = ("-np", "2", "--config-file", str(config), "--job-dir", str(tmp_path), "python", "train.py")
    config.write_text("blacklist-cooldown-range: [10, 100]\n")
    asked(monkeypatch, *words)
    assert "--blacklist-cooldown-range are not used: there is one host" in capsys.readouterr().err
    for wrong in ("[10]", "10", "[ten, 20]", "[20, 10]"):
        config.write_text(f"blacklist-cooldown-range: {wrong}\n")
        with pytest.raises(ConfigError, match="blacklist-cooldown-range"):
            asked(monkeypatch, *words)
