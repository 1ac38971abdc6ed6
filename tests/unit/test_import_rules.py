"""Which room may import which: pure rooms decide, the others act, and only one of them imports torch."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def rooms(package: str) -> list[str]:
    """Every file of a package which is pure as a whole."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / package).glob("*.py"))


PURE_ROOMS = [
    *rooms("chaos_tests/harness/checkers"),
    *rooms("chaos_tests/harness/report"),
    "chaos_tests/harness/ambush/points.py",
    "chaos_tests/harness/catalogue.py",
    "chaos_tests/harness/faults.py",
    "chaos_tests/harness/history.py",
    "chaos_tests/harness/scenario.py",
    "chaos_tests/harness/schedule.py",
    "chaos_tests/harness/traces.py",
    "elastic/checkpoints/choose.py",
    "elastic/checkpoints/description.py",
    "elastic/checkpoints/interval.py",
    "elastic/checkpoints/keep.py",
    "elastic/checkpoints/layout.py",
    "elastic/checkpoints/manifest.py",
    "elastic/checkpoints/naming.py",
    "elastic/checkpoints/pointer.py",
    "elastic/checkpoints/ranges.py",
    "elastic/config.py",
    "elastic/deltas.py",
    "elastic/detector.py",
    "elastic/doors/roles.py",
    "elastic/errors.py",
    "elastic/examination.py",
    "elastic/fleet/documents.py",
    "elastic/fleet/findings.py",
    "elastic/fleet/grants.py",
    "elastic/fleet/schedule.py",
    "elastic/ids.py",
    "elastic/launchers.py",
    *rooms("elastic/membership"),
    "elastic/messages.py",
    "elastic/ownership.py",
    "elastic/pieces.py",
    "elastic/plan.py",
    *rooms("elastic/position"),
    "elastic/preload.py",
    "elastic/spot/notice.py",
    "elastic/spot/stay.py",
    "elastic/store.py",
    "elastic/story.py",
    "elastic/supervision.py",
    "elastic/tree.py",
    "elastic/vigil.py",
]

PURE_STDLIB = {
    *("__future__", "abc", "ast", "base64", "bisect", "collections", "collections.abc", "contextlib", "copy"),
    "dataclasses",
    *(
        "difflib",
        "enum",
        "fractions",
        "functools",
        "hashlib",
        "heapq",
        "hmac",
        "html",
        "ipaddress",
        "itertools",
        "json",
        "math",
        "operator",
    ),
    *("random", "re", "signal", "statistics", "string", "struct", "textwrap", "tomllib", "types", "typing"),
    "xml.sax.saxutils",
}
"""What a pure room may use: nothing that reads a clock, a file, the environment or the network, or runs elsewhere.
Of `random` only Random, which has to be given a seed; of `signal` only the numbers."""

IMPURE_BUILTINS = {"open", "input", "print", "breakpoint", "exec", "eval", "__import__"}

RUNTIME_MAY_USE = {
    "elastic.checkpoints.choose",
    "elastic.checkpoints.description",
    "elastic.checkpoints.interval",
    "elastic.checkpoints.keep",
    "elastic.checkpoints.layout",
    "elastic.checkpoints.manifest",
    "elastic.checkpoints.naming",
    "elastic.checkpoints.ranges",
    "elastic.checkpoints.series",
    "elastic.checkpoints.settings",
    "elastic.checkpoints.storage",
    "elastic.client",
    "elastic.config",
    "elastic.data",
    "elastic.errors",
    "elastic.doors.keyring",
    "elastic.doors.refusals",
    "elastic.doors.roles",
    "elastic.examination",
    "elastic.journal",
    "elastic.ledger",
    "elastic.lifeline",
    "elastic.stacks",
    "elastic.membership",
    "elastic.messages",
    "elastic.plan",
    "elastic.position",
    "elastic.preload",
    "elastic.ranks",
    "elastic.retention",
    "elastic.scratch",
    "elastic.tree",
}

WIRE_READERS = (
    {
        f"elastic/{name}.py"
        for name in (
            *(
                "asking",
                "attendance",
                "client",
                "codec",
                "publishing",
                "reign",
                "rendezvous",
                "replica",
                "service",
                "switchboard",
            ),
        )
    }
    | {
        f"elastic/fleet/{name}.py"
        for name in ("attendance", "client", "crossings", "daemon", "desk", "lookout", "office", "server")
    }
    | {"chaos_tests/harness/intruder.py"}
)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of the modules a tree imports, wherever the statement stands, also by import_module("...")."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), level=0, names=names):
                package = ROOT / module.replace(".", "/")
                for alias in names:
                    inside = package / alias.name
                    below = inside.is_dir() or inside.with_suffix(".py").is_file()
                    yield f"{module}.{alias.name}" if below else module
            case ast.ImportFrom(level=level) if level:
                raise AssertionError(f"line {node.lineno}: relative imports hide the room they come from")
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield module


def sources(package: str) -> list[Path]:
    return [path for path in sorted((ROOT / package).rglob("*.py")) if "wire" not in path.relative_to(ROOT).parts]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def importers(package: str, of: str) -> set[str]:
    """Files of the package that import the module `of`, or something below it."""
    return {
        named(path)
        for path in sources(package)
        if any(module == of or module.startswith(f"{of}.") for module in imports(parsed(path)))
    }


@pytest.mark.parametrize("room", PURE_ROOMS)
def test_a_pure_room_uses_pure_modules_only(room: str) -> None:
    pure = PURE_STDLIB | {other.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for other in PURE_ROOMS}
    assert set(imports(parsed(ROOT / room))) - pure == set()


@pytest.mark.parametrize("room", PURE_ROOMS)
def test_a_pure_room_calls_nothing_that_reaches_outside(room: str) -> None:
    for node in ast.walk(parsed(ROOT / room)):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in IMPURE_BUILTINS:
                pytest.fail(f"{room}:{node.lineno} calls {name}()")
            case ast.Attribute(value=ast.Name(id="random"), attr=attr) if attr != "Random":
                pytest.fail(f"{room}:{node.lineno} uses random.{attr}, which has no seed; use random.Random(seed)")
            case ast.Attribute(value=ast.Name(id="signal"), attr=attr) if not attr.startswith(("SIG", "Signals")):
                pytest.fail(f"{room}:{node.lineno} uses signal.{attr}; a pure room only names signals")
            case ast.ImportFrom(module="signal"):
                pytest.fail(f"{room}:{node.lineno} imports from signal; write signal.SIGTERM")
            case ast.ImportFrom(module="random", names=names) if {alias.name for alias in names} != {"Random"}:
                pytest.fail(f"{room}:{node.lineno} imports from random more than Random")
            case ast.Call(func=ast.Attribute(attr="Random") | ast.Name(id="Random"), args=[]):
                pytest.fail(f"{room}:{node.lineno} makes a Random without a seed")


def test_the_modules_allowed_to_pure_rooms_are_of_the_standard_library() -> None:
    assert {module.partition(".")[0] for module in PURE_STDLIB} <= sys.stdlib_module_names


def test_the_control_plane_never_imports_torch() -> None:
    assert importers("elastic", of="torch") == set()


def test_the_control_plane_imports_the_runtime_only_where_the_public_names_are_resolved() -> None:
    assert importers("elastic", of="runtime") <= {"elastic/__init__.py"}


def test_the_public_package_imports_the_runtime_only_at_first_use() -> None:
    """At its top level only under `if TYPE_CHECKING`."""
    for node in parsed(ROOT / "elastic/__init__.py").body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert not any(module.startswith("runtime") for module in imports(node))


def test_the_runtime_uses_of_the_control_plane_only_what_is_listed() -> None:
    used = {
        (named(path), module)
        for path in sources("runtime")
        for module in imports(parsed(path))
        if module.partition(".")[0] == "elastic" and module not in RUNTIME_MAY_USE
    }
    assert used == set()


def test_etcd3_is_imported_in_one_place() -> None:
    places = {
        place for package in ("elastic", "runtime", "chaos_tests", "tests") for place in importers(package, "etcd3")
    }
    assert places == {"elastic/etcd/messages.py"}


def test_the_generated_stubs_are_read_only_by_those_who_speak_the_wire() -> None:
    places = {
        place for package in ("elastic", "runtime", "chaos_tests") for place in importers(package, "elastic.wire")
    }
    assert places <= WIRE_READERS


def test_only_the_command_line_knows_the_chaos_harness() -> None:
    places = importers("elastic", of="chaos_tests") | importers("runtime", of="chaos_tests")
    assert places <= {"elastic/cli/__init__.py"}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.nn as nn", {"torch.nn"}),
        ("from elastic import errors", {"elastic.errors"}),
        ("from elastic.errors import ConfigError", {"elastic.errors"}),
        ("from elastic.position import Phase, moves", {"elastic.position", "elastic.position.moves"}),
        ("def f():\n    import socket", {"socket"}),
        ("import importlib\nimportlib.import_module('etcd3.locks')", {"importlib", "etcd3.locks"}),
    ],
)
def test_every_way_to_import_is_seen(source: str, found: set[str]) -> None:
    assert set(imports(ast.parse(source))) == found


def test_relative_imports_are_refused() -> None:
    with pytest.raises(AssertionError, match="relative"):
        list(imports(ast.parse("from . import errors")))
