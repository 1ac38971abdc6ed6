"""The statements of a body in the order in which they run, and which names have been given a value by then."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator

from elastic.adopt.script import Scope, Script


class Flow:
    """read: called with each expression, also each name that `+=` changes, and the names that have a value there."""

    def __init__(self, read: Callable[[ast.AST, set[str]], None]) -> None:
        self._read = read

    def run(self, body: Iterable[ast.stmt], known: set[str]) -> set[str]:
        """Returns the names that have a value behind it. Loops are taken to run at least once."""
        for statement in body:
            known = self._statement(statement, known)
        return known

    def _statement(self, statement: ast.stmt, known: set[str]) -> set[str]:
        match statement:
            case ast.If(test, body, orelse):
                self._read(test, known)
                return self.run(body, known) & self.run(orelse, known)
            case ast.For(target, over, body, orelse):
                self._read(over, known)
                return self.run([*body, *orelse], known | Script.stored([target]))
            case ast.While(test, body, orelse):
                self._read(test, known)
                return self.run([*body, *orelse], known | Script.stored([test]))
            case ast.With(items, body):
                for item in items:
                    self._read(item.context_expr, known)
                return self.run(body, known | Script.stored(items))
            case ast.Try(body, handlers, orelse, finalbody):
                after = self.run([*body, *orelse], known)
                for handler in handlers:
                    after &= self.run(handler.body, known)
                return self.run(finalbody, after)
            case ast.AugAssign(target, value=value):
                self._read(value, known)
                self._read(target, known)
            case _:
                self._read(statement, known)
        return known | Script.stored([statement])


def behind(script: Script, at: ast.stmt) -> Iterator[ast.stmt]:
    """What its function does behind a statement: the rest of each block around it; of a loop also the next turn, up to
    it."""
    while True:
        block, parent = script.block(at), script.parents[at]
        if not isinstance(parent, ast.stmt | ast.Module):  # a handler of exceptions, or a case
            parent = script.parents[parent]
        yield from block[block.index(at) + 1 :]
        if isinstance(parent, ast.For | ast.While):
            yield from block[: block.index(at)]
        if isinstance(parent, Scope):
            return
        assert isinstance(parent, ast.stmt)
        at = parent


def early(script: Script, scope: ast.AST, names: set[str], body: Iterable[ast.stmt], known: set[str]) -> list[ast.Name]:
    """Where one of these names is read before the body has given it a value. known: those that have one already."""
    found: list[ast.Name] = []

    def read(part: ast.AST, known: set[str]) -> None:
        for name in ast.walk(part):
            loads = isinstance(name, ast.Name) and (isinstance(name.ctx, ast.Load) or name is part)
            if loads and isinstance(name, ast.Name) and name.id in names - known and script.scope(name) is scope:
                found.append(name)

    Flow(read).run(body, known)
    return found
