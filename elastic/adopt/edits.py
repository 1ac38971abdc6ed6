"""Changes of a script's text. Where they overlap, the larger one holds; what nobody has changed stays as it was."""

from __future__ import annotations

import ast

from elastic.adopt.script import Script, Span


class Edits:
    """All changes of one script."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._changes: list[tuple[int, int, str]] = []
        self._deleted: set[ast.stmt] = set()
        self.gone: set[ast.AST] = set()
        self.newline = "\r\n" if "\r\n" in script.text else "\n"

    def put(self, begin: int, end: int, text: str) -> None:
        """This text in place of that part."""
        self._changes.append((begin, end, text))

    def replace(self, node: ast.expr, text: str) -> None:
        """Refuses what cannot be found in the text, as it happens in f-strings before Python 3.12."""
        begin, end = self._script.span(node)
        try:
            found = ast.dump(ast.parse(f"({self._script.text[begin:end]}\n)", mode="eval").body)
        except SyntaxError:
            found = ""
        if found.replace("Store()", "Load()") != ast.dump(node).replace("Store()", "Load()"):
            self._script.refuse(node, f"{ast.unparse(node)} is in an f-string of several lines", "put it on one line")
        self.put(begin, end, text)

    def keep_only(self, node: ast.expr, part: ast.expr) -> None:
        """The part in place of the whole."""
        begin, end = self._script.span(node)
        first, last = self._script.span(part)
        self.put(begin, first, "")
        self.put(last, end, "")

    def delete(self, statement: ast.stmt) -> None:
        """With its lines. Where a function would be left empty, `pass` stands for it."""
        self._deleted.add(statement)
        self.drop(statement)
        block, begin = self._script.block(statement), self._script.begin_of(statement.lineno)
        end = self._script.begin_of((statement.end_lineno or statement.lineno) + 1)
        text = ""
        if set(block) <= self._deleted:
            text = f"{self._script.indent(statement)}pass{self.newline}"
            if not isinstance(self._script.parents[statement], ast.FunctionDef):
                self._script.refuse(statement, "nothing would be left of this block", "take it out of there")
        if not self._script.alone(statement):
            self._script.refuse(statement, "there are several statements on this line", "put it on a line of its own")
        self.put(begin, end, text)

    def drop(self, *nodes: ast.AST, but: ast.AST | None = None) -> None:
        """They will not be in the text any more, except for `but`, so nothing is to be said of what is in them."""
        for node in nodes:
            self.gone |= set(ast.walk(node)) - (set(ast.walk(but)) if but is not None else set())

    def before(self, statement: ast.stmt, *lines: str) -> None:
        """Lines of their own, indented like the statement."""
        if self._script.indent(statement).strip():
            self._script.refuse(statement, "there are several statements on this line", "put it on a line of its own")
        self.lines_at(statement.lineno, self._script.indent(statement), *lines)

    def behind(self, statement: ast.stmt, indent: str, *lines: str) -> None:
        """Lines of their own behind the last one of the statement."""
        if not self._script.alone(statement):
            self._script.refuse(statement, "there are several statements on this line", "put it on a line of its own")
        self.lines_at(_last(statement) + 1, indent, *lines)

    def lines_at(self, line: int, indent: str, *lines: str) -> None:
        """Lines of their own before that one."""
        at = self._script.begin_of(line)
        first = "" if not at or self._script.text[at - 1] in "\r\n" else self.newline
        self.put(at, at, first + "".join(f"{indent}{text}{self.newline}" for text in lines))

    def indent(self, first: int, last: int, unit: str, body: list[ast.stmt]) -> None:
        """Deeper by a unit: the lines from first to last. body: what is on them; its strings stay as they are."""
        kept = {line for statement in self._deleted for line in range(statement.lineno, _last(statement) + 1)}
        for node in (node for statement in body for node in ast.walk(statement)):
            if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                kept |= set(range(node.lineno + 1, _last(node) + 1))
        for line in range(first, last + 1):
            if line not in kept and self._script.lines[line - 1].strip():
                self.put(self._script.begin_of(line), self._script.begin_of(line), unit)

    def instead(self, statement: ast.stmt, *lines: str) -> None:
        """Lines in the place of a statement."""
        begin, end = self._script.span(statement)
        self.put(begin, end, f"{self.newline}{self._script.indent(statement)}".join(lines))

    def places_of(self, word: str) -> list[int]:
        """The lines, as they were, where it has come in."""
        return [self._script.text.count("\n", 0, begin) + 1 for begin, _, text in self._changes if word in text]

    def render(self, node: ast.AST | Span | None = None) -> str:
        """The text of this part, or of all, as it is by now."""
        script = self._script
        begin, end = (0, len(script.text)) if node is None else node if isinstance(node, tuple) else script.span(node)
        inside = [change for change in self._changes if begin <= change[0] and change[1] <= end]
        parts, at = [], begin
        for first, last, text in sorted(inside, key=lambda change: (change[0], change[0] != change[1], -change[1])):
            if first >= at and not (first == last and first in (begin, end) and node is not None):
                parts += [script.text[at:first], text]
                at = last
        return "".join([*parts, script.text[at:end]])


def _last(node: ast.stmt | ast.expr) -> int:
    return node.end_lineno or node.lineno
