"""A framework is adapted when the script imports it, once."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from runtime.frontends.ddp.rank_script import RankScript
from runtime.frontends.frameworks.imports import FRAMEWORKS, AfterImport
from tests.unit.runtime.frontends.ddp import threads


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of adapted modules; a package `framework_of_tests` can be imported."""
    package = tmp_path / "framework_of_tests"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "trainer.py").write_text("value = 1\n")
    (package / "broken.py").write_text("raise OSError('no GPU')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    yield []
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.startswith("framework_of_tests")]:
        del sys.modules[name]


def adapt(found: list[str]) -> AfterImport:
    def note(module: ModuleType) -> None:
        found.append(f"{module.__name__} {vars(module).get('value')}")

    names = ("framework_of_tests.trainer", "framework_of_tests.broken", "framework_of_tests.absent")
    return AfterImport(dict.fromkeys(names, note))


def test_a_module_is_adapted_behind_its_import_and_only_once(found: list[str]) -> None:
    adapt(found).install()
    assert found == []
    module = importlib.import_module("framework_of_tests.trainer")
    assert found == ["framework_of_tests.trainer 1"]
    assert module.__spec__ is not None and module.__spec__.origin == module.__file__
    importlib.reload(module)
    assert found == ["framework_of_tests.trainer 1"]


def test_a_library_may_look_whether_another_one_is_there(found: list[str]) -> None:
    adapt(found).install()
    for _ in range(2):
        assert importlib.util.find_spec("framework_of_tests.trainer") is not None
    assert found == []
    importlib.import_module("framework_of_tests.trainer")
    assert found == ["framework_of_tests.trainer 1"]


def test_what_is_imported_already_is_adapted_at_once(found: list[str]) -> None:
    importlib.import_module("framework_of_tests.trainer")
    adapt(found).install()
    assert found == ["framework_of_tests.trainer 1"]


def test_errors_of_the_module_are_its_own(found: list[str]) -> None:
    adapt(found).install()
    with pytest.raises(OSError, match="no GPU"):
        importlib.import_module("framework_of_tests.broken")
    with pytest.raises(ModuleNotFoundError, match="absent"):
        importlib.import_module("framework_of_tests.absent")
    assert found == []


class PrefetchLoader:
    """As timm's: it takes a batch before it gives the one before, and changes what it gives."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.scale = loader, 2

    def __iter__(self) -> Iterator[int]:
        before = None
        for batch in self.loader:
            if before is not None:
                yield before
            before = batch * self.scale
        if before is not None:
            yield before


def test_the_loader_of_timm_takes_each_batch_behind_the_one_before() -> None:
    class Taken:
        def __init__(self) -> None:
            self.order: list[str] = []

        def __iter__(self) -> Iterator[int]:
            for batch in (1, 2, 3):
                self.order.append(f"taken {batch}")
                yield batch

    def run() -> list[str]:
        taken = Taken()
        for batch in PrefetchLoader(taken):
            taken.order.append(f"given {batch}")
        return taken.order

    module: Any = SimpleNamespace(PrefetchLoader=PrefetchLoader)
    with threads.seams():
        FRAMEWORKS["timm.data.loader"](module)
        script = RankScript(2)
        before = run()
        script.enter()
        assert run() == [
            f"{what} {batch}" for number in (1, 2, 3) for what, batch in (("taken", number), ("given", 2 * number))
        ]
    assert before[:3] == ["taken 1", "taken 2", "given 2"], "a thread without a script has what timm gives"
