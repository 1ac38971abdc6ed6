"""`elastic doctor --ranks 4` on real scripts: those that qualify, those that a guard refuses, with the line, and those
whose bits depend on what no newcomer gets."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from chaos_tests.support.processes import Command, await_exits, living
from elastic.errors import ExitCode
from tests.live.jobs import DEADLINE_S, ROOT

SCRIPTS = ROOT / "tests" / "ddp_scripts"
RUNS = 4
"""Of a script that qualifies, one after another, each a process that imports torch."""


def start(home: Path, *words: str, environment: dict[str, str] | None = None) -> Command:
    """stdout and stderr in one file; temporary files below `home`."""
    (home / "tmp").mkdir(exist_ok=True)
    variables = {"PYTHONPATH": str(ROOT), "TMPDIR": str(home / "tmp"), **(environment or {})}
    command = [sys.executable, "-m", "elastic.cli", "doctor", "--ranks", "4", *words]
    return Command(command, home / "doctor.out", environment=variables, cwd=home)


def examined(home: Path, *words: str, environment: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    """Exit code and document."""
    with start(home, "--json", *words, environment=environment) as command:
        code = command.process.wait(RUNS * DEADLINE_S)
        assert not await_exits(living(command.mark), 5.0)
        assert list((home / "tmp").glob("elastic-*")) == []
        return code, json.loads(next(line for line in command.output.splitlines() if line.startswith("{")))


@pytest.mark.long
@pytest.mark.parametrize(
    "script",
    [
        f"{name}.py"
        for name in ("accumulation", "plain", "early", "endless", "evaluated", "drawn", "trainer", "reduced")
    ],
)
@pytest.mark.timeout(int(RUNS * DEADLINE_S) + 60)
def test_a_script_that_keeps_the_rules_qualifies(script: str, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot.pt"
    code, found = examined(tmp_path, str(SCRIPTS / script), "3", environment={"SNAPSHOT": str(snapshot)})
    assert (code, found["qualifies"], found["steps"]) == (ExitCode.DONE, True, 6), found
    assert {rule["state"] for rule in found["rules"]} == {"ok"}
    assert [(check["tried"], check["difference"]) for check in found["checks"]] == [(True, None)] * 3
    assert not snapshot.exists()


def broken(home: Path, *changes: tuple[str, str]) -> tuple[Path, int]:
    """plain.py with these replacements, and the line at which the last one begins."""
    text, line = (SCRIPTS / "plain.py").read_text(), 0
    for old, new in changes:
        assert old in text
        line = text[: text.index(old)].count("\n") + 1
        text = text.replace(old, new, 1)
    path = home / "broken.py"
    path.write_text(text)
    return path, line


BACKWARD = "            loss.backward()\n"
LOOP = "        for bx, by in loader:\n"


@pytest.mark.parametrize(
    ("changes", "rule", "further", "words"),
    [
        pytest.param(
            [(BACKWARD, f"            dist.all_reduce(loss.detach())\n{BACKWARD}")],
            "MidShardCollective",
            0,
            "Call it behind",
            marks=pytest.mark.long,
        ),
        (
            [(LOOP, "        it = iter(loader)\n        for _ in range(7):\n            bx, by = next(it)\n")],
            "NotInPlace",
            2,
            "for _ in range(...) counts the turns",
        ),
        pytest.param(
            [("            loss = ", '            optimizer.param_groups[0]["lr"] *= 0.9\n            loss = ')],
            "StateChanged",
            2,
            "before, 0.006",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_script_that_breaks_a_rule_is_refused_at_its_line(
    changes: Sequence[tuple[str, str]], rule: str, further: int, words: str, tmp_path: Path
) -> None:
    """further: how many lines behind the change the error comes up."""
    script, line = broken(tmp_path, *changes)
    code, found = examined(tmp_path, str(script), "3")
    assert (code, found["qualifies"]) == (1, False)
    (refusal,) = found["refusals"]
    assert (refusal["rule"], refusal["place"]) == (rule, f"{script.name}:{line + further}")
    assert words in refusal["message"]
    assert {"refused", "open"} == {state["state"] for state in found["rules"]}


@pytest.mark.long
@pytest.mark.timeout(int(RUNS * DEADLINE_S) + 60)
def test_a_tensor_that_no_newcomer_gets_is_named(tmp_path: Path) -> None:
    script, _ = broken(
        tmp_path,
        ("    for epoch in", "    center = torch.zeros(8, 24)\n    for epoch in"),
        (BACKWARD, "            (loss * (1 + center.mean())).backward()\n            center.add_(0.1)\n"),
    )
    code, found = examined(tmp_path, str(script), "3")
    assert (code, found["refusals"]) == (1, [])
    backwards, joins, _ = found["checks"]
    assert backwards["difference"] is None
    assert "a newcomer does not get center in main" in joins["difference"]["because"]
    assert [(limit["what"], limit["size"], limit["most"]) for limit in found["limits"]] == [("center in main", 192, 64)]


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """A shell that starts pytest in the background lets it, and all below it, ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.long
@pytest.mark.usefixtures("_interruptible")
def test_ctrl_c_leaves_neither_a_process_nor_a_file(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(
        "import pathlib, subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "pathlib.Path('there').touch()\n"
        "time.sleep(600)\n"
    )
    with start(tmp_path, str(script)) as command:
        while not (tmp_path / "there").exists():
            assert command.process.poll() is None, command.output
        command.process.send_signal(signal.SIGINT)
        assert command.process.wait(DEADLINE_S) == ExitCode.INTERRUPTED
        assert not await_exits(living(command.mark), 5.0)
    assert list((tmp_path / "tmp").glob("elastic-*")) == []
