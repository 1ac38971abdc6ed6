"""A real Prometheus, as a test sees it: what to scrape, and what it answers to PromQL."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from chaos_tests.support.processes import Command
from tests.live.jobs import ROOT

ALERTS = ROOT / "docs" / "metrics" / "alerts.yml"
CALL_S = 60.0


def binary(name: str) -> str | None:
    """prometheus or promtool: what make unpacked, else what is on PATH; None if there is none."""
    own = Path(sys.prefix) / "prometheus" / "usr" / "bin" / name
    return str(own) if os.access(own, os.X_OK) else shutil.which(name)


class Prometheus:
    """Scrapes each second, and evaluates the shipped alert rules, or those in the file rules. scrapes: entries of
    `scrape_configs`. A context manager; nothing is left of it."""

    def __init__(self, home: Path, port: int, scrapes: list[dict[str, Any]], rules: Path = ALERTS) -> None:
        program = binary("prometheus")
        assert program is not None
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": scrapes,
        }
        (home / "prometheus.yml").write_text(json.dumps(config))  # YAML has JSON in it
        self._url = f"http://127.0.0.1:{port}"
        words = [
            program, f"--config.file={home}/prometheus.yml", f"--storage.tsdb.path={home}/tsdb",
            f"--web.listen-address=127.0.0.1:{port}", "--web.console.libraries=", "--web.console.templates=",
        ]  # fmt: skip
        self.command = Command(words, home / "prometheus.out", environment={}, cwd=home)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            error.add_note(self.command.output[-3000:])
        self.command.stop()

    def ask(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer of its API; {} while it is being started."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=CALL_S) as answer:
                return json.loads(answer.read())["data"]
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
                return {}
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error
        except OSError:
            return {}

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query, now."""
        found: list[dict[str, Any]] = self.ask("query", query=expression).get("result", [])
        return found

    def value(self, expression: str) -> float | None:
        """That of the only series; None: there is none."""
        found = self.query(expression)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None


def promtool(*words: str) -> str:
    program = binary("promtool")
    assert program is not None
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=CALL_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
