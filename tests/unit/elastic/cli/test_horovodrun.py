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


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    horovodrun.add(parser.add_subparsers())
    return parser.parse_args(["horovodrun", *words])


def test_a_zero_of_the_command_line_is_said(tmp_path: Path) -> None:
    config = tmp_path / "horovod.yaml"
    config.write_text("elastic-timeout: 45\nreset-limit: 3\nrestart: true\nhosts:\nhostfile: hosts\n")
    options = parsed("--elastic-timeout", "0", "--reset-limit", "0", "--config-file", str(config))
    horovodrun._take_in_config(options)
    assert (options.elastic_timeout, options.reset_limit, options.restart) == (0.0, 0, True)
    assert (options.hosts, options.hostfile) == (None, Path("hosts"))


@pytest.mark.parametrize(
    ("line", "because"),
    [
        ("hosts: [gpu-1, gpu-2]", "hosts: ['gpu-1', 'gpu-2'] must be text"),
        ("host-discovery-script: 1", "host-discovery-script: 1 must be text"),
        ("hostfile: [a]", "hostfile: ['a'] must be text"),
        ('restart: "no"', "restart: 'no' must be true or false"),
        ("blacklist-hosts: 1", "blacklist-hosts: 1 must be true or false"),
        ("min-np: 2.5", "min-np: 2.5 must be a whole number"),
    ],
)
def test_a_wrong_kind_of_value_in_a_config_file_is_refused_by_name(line: str, because: str, tmp_path: Path) -> None:
    config = tmp_path / "horovod.yaml"
    config.write_text(line)
    with pytest.raises(ConfigError) as refused:
        horovodrun._take_in_config(parsed("--config-file", str(config)))
    assert because in str(refused.value)


def test_of_the_options_of_python_two_are_taken() -> None:
    for words in (["train.py", "-x"], ["-m", "train"]):
        for unbuffered in ([], ["-u"]):
            assert horovodrun._script_of(["python", *unbuffered, *words]) == words
    for refused, because in {
        ("-m",): "python -m: write `python SCRIPT`",
        ("-u",): "python -u: write `python SCRIPT`",
        ("-c", "pass"): "python -c: of Python's options only -m and -u are taken",
        ("-u", "-O", "train.py"): "python -O: of Python's options",
    }.items():
        with pytest.raises(ConfigError) as told:
            horovodrun._script_of(["python", *refused])
        assert because in str(told.value)


def test_a_directory_is_made_only_for_a_script_that_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    script = ("python", "train.py")
    assert "--job-dir" not in asked(monkeypatch, "-np", "1", *script), "`elastic run` makes one when it accepts"
    with pytest.raises(ConfigError, match=r"train\.py does not exist"):
        asked(monkeypatch, "-np", "1", "--timeline-filename", "trace.json", *script)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "train.py").touch()
    given = asked(monkeypatch, "-np", "1", "--timeline-filename", "trace.json", *script)
    assert given[given.index("--job-dir") + 1] == str(tmp_path / "elastic-jobs" / "train-1")
