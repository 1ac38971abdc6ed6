"""Which sessions of Spark are refused before anything is started in them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.errors import ConfigError
from elastic.platforms.spark import launcher


def session(monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]) -> Any:
    context = SimpleNamespace(getConf=lambda: settings)
    active = SimpleNamespace(SparkContext=SimpleNamespace(_active_spark_context=context))
    monkeypatch.setitem(sys.modules, "pyspark", active)
    return context


@pytest.mark.parametrize("said", ["true", "True", " TRUE "])
def test_a_session_with_speculation_is_refused_however_it_is_spelled(
    monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    session(monkeypatch, {"spark.speculation": said})
    with pytest.raises(ConfigError, match=r"spark\.speculation"):
        launcher.active_context()


@pytest.mark.parametrize("settings", [{}, {"spark.speculation": "False"}])
def test_a_session_without_it_is_taken(monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]) -> None:
    assert session(monkeypatch, settings) is launcher.active_context()
