"""Notes which arms of the pure machines are taken, by a mark written into their code as it is imported.

An *arm* is a body that may be entered or not: of a function, of an `if` and of its `else` (also where none is written),
of a `case`, of a loop. What a machine does with an event in a state is the arms it goes through, so whoever has taken
every arm has made every transition that the code knows; and nobody has to keep a table of them. An arm that only
raises an AssertionError is a claim that it is never taken, and is none.

Names do not hold line numbers: `protocol/membership/loss.py decide: if not chosen` is the first arm of that text in
that function, `... #2` the second.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

MACHINES = (
    "elastic.protocol.failure_detector",
    "elastic.protocol.loop_state",
    "elastic.protocol.membership",
    "elastic.protocol.recovery_plan",
    "elastic.protocol.worker_state",
    "elastic.agent.standing_words",
    "elastic.protocol.worker_slot",
)
"""Modules, and packages with all that is in them."""

TAKEN: list[int] = []
"""1: taken since the last `forget`."""

NAMES: list[str] = []
"""Of the same arms."""

LONGEST = 100


def install() -> None:
    """Before any of the machines is imported."""
    loaded = [name for name in sys.modules if _is_machine(name)]
    if loaded:
        raise RuntimeError(f"{loaded[0]} is imported already; install() comes first")
    sys.meta_path.insert(0, _Finder())


def forget() -> None:
    TAKEN[:] = [0] * len(TAKEN)


def taken() -> list[str]:
    return [name for name, mark in zip(NAMES, TAKEN, strict=True) if mark]


def _is_machine(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in MACHINES)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _is_machine(fullname):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Never from a cache, which would be found by those who look for no marks."""
        path = self.get_filename(fullname)
        _, _, place = fullname.partition(".")
        tree = instrument(ast.parse(self.get_data(path), path), place.replace(".", "/") + ".py")
        return compile(tree, path, "exec")


def instrument(tree: ast.Module, place: str) -> ast.Module:
    """The same program, which makes marks. place: the file, as arms are named after it."""
    _Marks(place).visit(tree)
    after = 1 + max(
        (i for i, node in enumerate(tree.body) if isinstance(node, ast.ImportFrom) and node.module == "__future__"),
        default=0 if ast.get_docstring(tree) is not None else -1,
    )
    tree.body.insert(after, ast.parse("from tests.sim.arms import TAKEN as __arms__").body[0])
    return ast.fix_missing_locations(tree)


class _Marks(ast.NodeTransformer):
    def __init__(self, place: str) -> None:
        self._place = place
        self._function = ""
        self._seen: Counter[str] = Counter()

    def _mark(self, what: str) -> ast.stmt:
        name = f"{self._place} {self._function}" + (f": {what[:LONGEST]}" if what else "")
        self._seen[name] += 1
        if self._seen[name] > 1:
            name += f" #{self._seen[name]}"
        TAKEN.append(0)
        NAMES.append(name)
        return ast.parse(f"__arms__[{len(TAKEN) - 1}] = 1").body[0]

    def _arm(self, body: list[ast.stmt], what: str) -> list[ast.stmt]:
        if len(body) == 1 and isinstance(body[0], ast.Raise) and "AssertionError" in ast.unparse(body[0]):
            return body
        mark = self._mark(what)
        return [mark, *(self.visit(statement) for statement in body)]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outer, self._function = self._function, f"{self._function}.{node.name}".lstrip(".")
        node.body = self._arm(node.body, "")
        self._function = outer
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        outer, self._function = self._function, node.name
        self.generic_visit(node)
        self._function = outer
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return node
        test = ast.unparse(node.test)
        node.body = self._arm(node.body, f"if {test}")
        if len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
            node.orelse = [self.visit(node.orelse[0])]
        else:
            node.orelse = self._arm(node.orelse, f"not if {test}")
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        node.body = self._arm(node.body, f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}")
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        node.body = self._arm(node.body, f"while {ast.unparse(node.test)}")
        return node

    def visit_match_case(self, node: ast.match_case) -> ast.AST:
        guard = f" if {ast.unparse(node.guard)}" if node.guard else ""
        node.body = self._arm(node.body, f"case {ast.unparse(node.pattern)}{guard}")
        return node
