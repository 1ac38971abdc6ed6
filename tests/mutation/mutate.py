"""Where a module can be changed, and its code with one of these changes.

The changes are the usual operators of mutation testing (Offutt et al., "An experimental determination of sufficient
mutant operators", 1996): relational, logical and arithmetic operators, constants, conditions, and statements left out.
Left alone is what decides nothing: annotations, texts, what an error says, assertions, also that of zip (`strict`), and
constants outside of functions, which are somebody's choice.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Add,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}

LONGEST = 90
"""Characters of code in a name."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """number: of all changes of its module, in the order of the text. name: the same as long as the function and the
    changed code are, wherever they stand."""

    module: str
    number: int
    line: int
    name: str


def mutants(module: str, source: str) -> list[Mutant]:
    """All of them."""
    seen: Counter[str] = Counter()
    found = []
    for number, (node, function, what) in enumerate(_changes(ast.parse(source))):
        name = f"{module} {function}: {what}"
        line = node.target.lineno if isinstance(node, ast.comprehension) else node.lineno
        seen[name] += 1
        found.append(Mutant(module, number, line, name + (f" #{seen[name]}" if seen[name] > 1 else "")))
    return found


def mutated(source: str, number: int) -> ast.Module:
    """The module with that change."""
    tree = ast.parse(source)
    for at, _ in enumerate(_changes(tree, number)):
        if at == number:
            return ast.fix_missing_locations(tree)
    raise IndexError(number)


def _changes(tree: ast.Module, make: int = -1) -> Iterator[tuple[Any, str, str]]:
    """Node, function and words of each change; the one with the number `make` is made before it is yielded."""
    number = 0
    for function, owner, name, index, node in list(_places(tree)):
        for what, new in _of(node):
            if number == make:
                if index is None:
                    setattr(owner, name, new)
                else:
                    getattr(owner, name)[index] = new
            yield node, function, what
            number += 1


def _places(tree: ast.Module) -> Iterator[tuple[str, ast.AST, str, int | None, Any]]:
    """What may be changed: function, the node that holds it, in which field, and where in that if it is a list."""

    def within(owner: ast.AST, function: str, inside: bool) -> Iterator[tuple[str, ast.AST, str, int | None, Any]]:
        for name, value in ast.iter_fields(owner):
            if name in ("annotation", "returns", "decorator_list", "args", "type_params") and not isinstance(
                owner, ast.Call
            ):
                continue
            for index, node in enumerate(value) if isinstance(value, list) else ((None, value),):
                if not isinstance(node, ast.AST) or isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
                    continue
                if isinstance(node, ast.keyword) and node.arg == "strict":
                    continue
                below, inner = function, inside
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    below = f"{function}.{node.name}".lstrip(".")
                    inner = inside or not isinstance(node, ast.ClassDef)
                elif inside:
                    yield function, owner, name, index, node
                yield from within(node, below, inner)

    return within(tree, "", inside=False)


def _of(node: Any) -> Iterator[tuple[str, ast.AST]]:
    """Words of each change of this node, and what stands there then."""
    text = " ".join(ast.unparse(node).split())[:LONGEST] if isinstance(node, ast.expr | ast.stmt) else ""
    match node:
        case ast.Compare(left, [operator], right):
            new = COMPARED[type(operator)]
            yield f"{text} | {type(operator).__name__} -> {new.__name__}", ast.Compare(left, [new()], right)
        case ast.BoolOp(operator, values):
            other = ast.Or if isinstance(operator, ast.And) else ast.And
            yield f"{text} | {type(operator).__name__} -> {other.__name__}", ast.BoolOp(other(), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield f"{text} | without not", operand
        case ast.BinOp(left, operator, right) if type(operator) in COMPUTED and not _is_text(left, right):
            made = COMPUTED[type(operator)]
            yield f"{text} | {type(operator).__name__} -> {made.__name__}", ast.BinOp(left, made(), right)
        case ast.Constant(bool() as value):
            yield f"{value} -> {not value}", ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield f"{value} -> {value + 1}", ast.Constant(value + 1)
        case ast.IfExp(test, body, orelse):
            yield f"{text} | the other one", ast.IfExp(test, orelse, body)
        case ast.If(test, body, orelse) if isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.NamedExpr):
            tested = " ".join(ast.unparse(test).split())[:LONGEST]
            yield f"if {tested} | if not", ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.comprehension(target, iterated, [_, *_], is_async):
            where = " ".join(ast.unparse(node).split())[:LONGEST]
            yield f"{where} | without if", ast.comprehension(target, iterated, [], is_async)
        case ast.Return(ast.expr() as value) if ast.unparse(value) not in ("None", "False"):  # None counts as False
            yield f"{text} | None", ast.Return(ast.Constant(None))
        case ast.Expr(ast.Call()) | ast.AugAssign():
            yield f"{text} | left out", ast.Pass()
        case ast.Break() | ast.Continue():
            yield f"{text} | left out", ast.Pass()


def _is_text(*nodes: ast.AST) -> bool:
    return any(
        isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        for node in nodes
    )
