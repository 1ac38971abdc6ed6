"""A training script as text and tree: what a name means, which value it is given, and where a function is called."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

Scope: TypeAlias = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
Span: TypeAlias = tuple[int, int]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_CALLS_MAX = 8
"""How many functions are gone through to where a value is made."""


@dataclass(frozen=True, slots=True, order=True)
class Refusal:
    """What cannot be adopted. line: from 1; write: what to write instead."""

    line: int
    reason: str
    write: str


def in_order(node: ast.AST) -> Iterator[ast.AST]:
    """A tree in the order of its text."""
    yield node
    for child in ast.iter_child_nodes(node):
        yield from in_order(child)


class Refused(Exception):
    """Nothing more can be found out about the script; its refusals say why."""


class Script:
    """text: the whole file. Raises SyntaxError or ValueError for what is no Python."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self.refusals: set[Refusal] = set()
        self.lines: list[str] = _LINE.findall(text)
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line))
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.names = [node for node in ast.walk(self.tree) if isinstance(node, ast.Name)]
        self._given: dict[tuple[ast.AST, str], list[ast.expr | None]] = {}
        self._imported: dict[tuple[ast.AST, str], str] = {}
        self.functions: dict[str, list[ast.FunctionDef]] = {}
        for node in in_order(self.tree):
            self._note(node)
        self._calls: dict[ast.FunctionDef, list[ast.Call]] = {}
        for node in in_order(self.tree):
            if isinstance(node, ast.Call) and (function := self.function_of(node)) is not None:
                self._calls.setdefault(function, []).append(node)

    def _note(self, node: ast.AST) -> None:
        """What this node gives a value to."""
        match node:
            case ast.Import(names) | ast.ImportFrom(names=names):
                module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                for alias in names:
                    outermost = alias.name.partition(".")[0]
                    name = alias.asname or (alias.name if module else outermost)
                    path = module + (alias.name if module or alias.asname else outermost)
                    self._imported[self._inner_scope(node), name] = path
                    if alias.name == "*":
                        self.refuse(node, f"import * of {module[:-1]} hides what names mean", "import the names")
            case ast.Assign(targets, value):
                for target in targets:
                    self._note_target(target, value)
            case ast.AnnAssign(target, value=value) | ast.NamedExpr(target, value) if value is not None:
                self._note_target(target, value)
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                self._give(self._inner_scope(self.parents[node]), name, None)
                if isinstance(node, ast.FunctionDef) and not isinstance(self.parents[node], ast.ClassDef):
                    self.functions.setdefault(name, []).append(node)
            case ast.arg(name):
                self._give(self._inner_scope(node), name, None)
            case ast.ExceptHandler(name=str(name)):
                self._give(self._inner_scope(node), name, None)
            case ast.Global(names) | ast.Nonlocal(names):
                self.refuse(
                    node,
                    f"a function changes {', '.join(names)} of another one, which no newcomer would have",
                    "give the value as an argument, and return it",
                )
            case ast.For(target) | ast.AsyncFor(target) | ast.withitem(optional_vars=target) | ast.AugAssign(target):
                for name in sorted(self.stored([target] if target is not None else [])):
                    self._give(self._inner_scope(node), name, None)

    def _note_target(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            self._give(self._inner_scope(target), target.id, value)
        elif isinstance(target, ast.Tuple):
            for number, part in enumerate(target.elts):
                self._note_target(part, self._part(value, number, len(target.elts)))

    def _give(self, scope: ast.AST, name: str, value: ast.expr | None) -> None:
        self._given.setdefault((scope, name), []).append(value)

    def _part(self, value: ast.expr | None, number: int, count: int) -> ast.expr | None:
        """The element with this number of a tuple of `count`, which may be what a function of the script returns."""
        if isinstance(value, ast.Call) and (returned := self.returned(value)) is not None:
            value = returned
        return value.elts[number] if isinstance(value, ast.Tuple) and len(value.elts) == count else None

    # ------------------------------------------------------------------------------------------------ what is said

    def refuse(self, node: ast.AST, reason: str, write: str) -> None:
        """Go on looking; nothing will be adopted."""
        self.refusals.add(Refusal(getattr(node, "lineno", 1), reason, write))

    def end(self, node: ast.AST, reason: str, write: str) -> NoReturn:
        """There is nothing more to look at. Raises Refused."""
        self.refuse(node, reason, write)
        raise Refused

    # ---------------------------------------------------------------------------------------------------- the text

    def span(self, node: ast.AST) -> Span:
        """(begin, end) in the text."""
        assert isinstance(node, ast.expr | ast.stmt | ast.arg | ast.alias)
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _at(self, line: int, column: int) -> int:
        """column: in bytes, as ast counts."""
        return self._starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def begin_of(self, line: int) -> int:
        """Where a line begins; the one behind the last is the end of the text."""
        return self._starts[line - 1]

    def indent(self, node: ast.stmt) -> str:
        """What stands before a statement."""
        return self.text[self.begin_of(node.lineno) : self.span(node)[0]]

    def alone(self, node: ast.stmt) -> bool:
        """Whether no other statement is on the lines of this one."""
        _, end = self.span(node)
        behind = self.text[end : self.begin_of((node.end_lineno or node.lineno) + 1)].strip()
        return not self.indent(node).strip() and (not behind or behind.startswith("#"))

    # ------------------------------------------------------------------------------------------------------- names

    def scope(self, node: ast.AST) -> ast.AST:
        """The function, class or module whose code this is; of a name: where it has its value, which may be a
        comprehension too."""
        return self._owner(node, node.id) if isinstance(node, ast.Name) else self._inner_scope(node)

    def _inner_scope(self, node: ast.AST) -> Scope:
        while not isinstance(node, Scope):
            node = self.parents[node]
        return node

    def _owner(self, node: ast.AST, name: str) -> ast.AST:
        at: ast.AST = node
        while not isinstance(at, ast.Module):
            child, at = at, self.parents[at]
            if isinstance(at, _COMPREHENSIONS) and name in self.stored(at.generators):
                return at
            inside = isinstance(at, _FUNCTIONS) and child not in getattr(at, "decorator_list", ())
            if (inside or at is self._inner_scope(node)) and self.is_bound(at, name):
                return at
        return at

    def is_bound(self, scope: ast.AST, name: str) -> bool:
        return (scope, name) in self._given or (scope, name) in self._imported

    @staticmethod
    def stored(nodes: Sequence[ast.AST]) -> set[str]:
        """Names that are given values in it."""
        every = (inner for node in nodes for inner in ast.walk(node))
        return {inner.id for inner in every if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)}

    @staticmethod
    def root(node: ast.expr) -> ast.Name | None:
        """The name on which an attribute, an item or the value of a call hangs."""
        at: ast.expr = node
        while isinstance(at, ast.Attribute | ast.Subscript | ast.Call):
            at = at.func if isinstance(at, ast.Call) else at.value
        return at if isinstance(at, ast.Name) else None

    def sees(self, node: ast.AST, name: ast.Name) -> bool:
        """Whether the same name means the same there."""
        return self._owner(node, name.id) is self.scope(name)

    def uses(self, scope: ast.AST, name: str) -> list[ast.Name]:
        """Every place where this name of this scope stands."""
        return [node for node in self.names if node.id == name and self.scope(node) is scope]

    def path(self, node: ast.AST) -> str:
        """The dotted name of something that is imported; else ""."""
        match node:
            case ast.Name(name):
                return self._imported.get((self.scope(node), name), "")
            case ast.Attribute(value, attr):
                inner = self.path(value)
                return f"{inner}.{attr}" if inner else ""
        return ""

    def is_torch(self, node: ast.AST, name: str) -> bool:
        """Whether this names that class of torch, wherever it is imported from."""
        path = self.path(node)
        return path.startswith("torch.") and path.endswith(f".{name}")

    def calls_torch(self, node: ast.AST | None, name: str) -> bool:
        return isinstance(node, ast.Call) and self.is_torch(node.func, name)

    def imported(self) -> set[str]:
        """Dotted names of all that is imported."""
        return set(self._imported.values())

    def check_imports(self) -> None:
        """Refuse names of torch that mean something else too."""
        for (scope, name), path in self._imported.items():
            if path.partition(".")[0] == "torch" and (scope, name) in self._given:
                stores = [use for use in self.names if use.id == name and isinstance(use.ctx, ast.Store)]
                self.refuse(
                    stores[0] if stores else self.tree,
                    f"{name} is also the name of {path}",
                    "give one of them another name",
                )

    def free_name(self, wanted: str) -> str:
        """This one, or one like it that the script does not use."""
        used = {node.id for node in self.names} | {name for _, name in self._given | self._imported}
        while wanted in used:
            wanted = f"this_{wanted}"
        return wanted

    # ------------------------------------------------------------------------------------------------------ values

    def values(self, name: ast.Name) -> list[ast.expr | None]:
        """What it is given, in the order of the text; None: not known. A parameter is what the callers give."""
        return self.values_in(self.scope(name), name.id)

    def values_in(self, scope: ast.AST, name: str) -> list[ast.expr | None]:
        """The same of a name of that scope."""
        found = self._given.get((scope, name), [])
        return self.arguments(scope, name) or found if len(found) == 1 else found

    def arguments(self, scope: ast.AST, name: str) -> list[ast.expr | None]:
        """What a parameter is given by those who call its function; of another name nothing."""
        if not isinstance(scope, ast.FunctionDef) or name not in self._parameters(scope):
            return []
        return [self._argument(call, scope, name) for call in self.calls_of(scope)]

    def origin(self, node: ast.expr | None) -> ast.expr | None:
        """The expression that has made this value; None: it is not one, or not known."""
        for _ in range(_CALLS_MAX):
            if isinstance(node, ast.Name):
                values = self.values(node)
                node = values[0] if len(values) == 1 else None
            elif isinstance(node, ast.Call) and (returned := self.returned(node)) is not None:
                node = returned
            else:
                return node
        return None

    def returned(self, call: ast.Call) -> ast.expr | None:
        """What a function of the script returns, if it has one `return` alone."""
        function = self.function_of(call)
        if function is None:
            return None
        returns = [node for node in self.inside(function.body) if isinstance(node, ast.Return)]
        return returns[0].value if len(returns) == 1 else None

    def function_of(self, call: ast.Call) -> ast.FunctionDef | None:
        """The function of the script that this calls."""
        found = self.functions.get(call.func.id, []) if isinstance(call.func, ast.Name) else []
        return found[0] if len(found) == 1 else None

    def calls_of(self, function: ast.FunctionDef) -> list[ast.Call]:
        return self._calls.get(function, [])

    def run_by(self, statements: Sequence[ast.stmt]) -> Iterator[ast.AST]:
        """All that is in them, and in the functions of the script that they call, directly or not."""
        bodies, seen = [list(statements)], set[ast.FunctionDef]()
        while bodies:
            for node in (node for statement in bodies.pop() for node in ast.walk(statement)):
                yield node
                function = self.function_of(node) if isinstance(node, ast.Call) else None
                if function is not None and function not in seen:
                    seen.add(function)
                    bodies.append(function.body)

    @staticmethod
    def _parameters(function: ast.FunctionDef) -> list[str]:
        given = function.args
        return [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)]

    def _argument(self, call: ast.Call, function: ast.FunctionDef, name: str) -> ast.expr | None:
        for keyword in call.keywords:
            if keyword.arg == name:
                return keyword.value
        place = self._parameters(function).index(name)
        before = call.args[: place + 1]
        return before[place] if len(before) > place and not any(isinstance(a, ast.Starred) for a in before) else None

    def lifted(self, name: ast.Name, scope: ast.AST) -> ast.Name | None:
        """How another function, which calls this one directly or not, calls the same thing; None: it has no name
        there."""
        at: ast.expr | None = name
        for _ in range(_CALLS_MAX):
            if not isinstance(at, ast.Name):
                return None
            owner = self.scope(at)
            if owner is scope or isinstance(owner, ast.Module):
                return at
            values = self.values(at)
            at = values[0] if len(values) == 1 else None
        return None

    # -------------------------------------------------------------------------------------------------- statements

    def statement(self, node: ast.AST) -> ast.stmt:
        """The one that this is a part of."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def block(self, node: ast.stmt) -> list[ast.stmt]:
        """The statements beside this one, and itself."""
        parent = self.parents[node]
        blocks = (getattr(parent, name, None) for name in ("body", "orelse", "finalbody"))
        return next(block for block in blocks if isinstance(block, list) and node in block)

    def innermost(self, line: int) -> ast.stmt:
        """The smallest statement on that line."""
        every = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
        ]
        return min(every, key=lambda node: (node.end_lineno or node.lineno) - node.lineno)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """What it is in, from within, up to its function or module."""
        while not isinstance(node, Scope):
            node = self.parents[node]
            yield node

    @staticmethod
    def inside(body: list[ast.stmt], *, loops: bool = True) -> Iterator[ast.stmt]:
        """All statements of a body, but those of functions and classes in it. loops: also those of loops."""
        for statement in body:
            yield statement
            if isinstance(statement, Scope) or (not loops and isinstance(statement, ast.For | ast.While)):
                continue
            for part in ast.iter_child_nodes(statement):
                inner = [part] if isinstance(part, ast.stmt) else getattr(part, "body", [])
                if isinstance(inner, list):
                    yield from Script.inside([one for one in inner if isinstance(one, ast.stmt)], loops=loops)
