"""The loop that stands around a script's training step, by its source: what counts its turns, and what ends it.

A range(), zip(), islice() or count() keeps its place inside the interpreter, where silent turns cannot be undone: a
loop over range(1000) would end after a thousand turns, which are fewer steps. One that each turn begins anew, over the
batches that are accumulated, counts nothing but these. And a condition such as `if step == total: break` must not end
the loop in a silent turn.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import itertools
import linecache
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, TypeAlias

from runtime.frontends.ddp.frames.places import is_defined_by_script

COUNTING = frozenset({"range", "trange", "zip", "islice", "count"})
_COUNTERS = (range, zip, itertools.islice, itertools.count)

_UNKNOWN = (ast.Call, ast.Await, ast.NamedExpr)
"""In a condition: what cannot be worked out without doing something."""

Loop: TypeAlias = ast.For | ast.While


@dataclass(frozen=True)
class CountingLoop:
    """A loop whose turns are counted so, and how far it is. said: "train.py:12: for i in range(1000)". at: the
    values of the names that its head binds; equal to no other where they are not plain."""

    said: str
    at: object


def counting_loop(frames: Iterable[FrameType]) -> CountingLoop | None:
    """The innermost loop around a call, if it is one whose turns are counted. frames: innermost first. None: it is not,
    or its text cannot be read."""
    for frame in frames:
        loop = next(iter(_around(frame)), None)
        if loop is None:
            continue
        if isinstance(loop, ast.For) and (counter := _counter(loop.iter, frame)) is not None:
            said = f"{frame.f_code.co_filename}:{loop.lineno}: for {ast.unparse(loop.target)} in {counter}"
            names = [node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)]
            at = tuple(frame.f_locals.get(name) for name in names)
            plain = all(isinstance(value, int | float | str | None) for value in at)
            return CountingLoop(said, at if plain else object())
        return None
    return None


@dataclass(frozen=True)
class Leaving:
    """Why a loop ends, or may end."""

    names: frozenset[str]
    """The local names in its conditions that the loop assigns."""
    certain: bool
    """A condition holds; False: there are only those of which nobody can say whether they do."""


def would_leave(
    frames: Iterable[FrameType], values: Mapping[tuple[FrameType, str], object], changing: Collection[str] = ()
) -> Leaving | None:
    """What ends the innermost loop around a call if the names that the loop assigns have these values, or may end it:
    what a condition calls is not called, and an attribute that changes is not known. A loop whose turns are counted
    ends by itself, and then the loop around it goes on, so both are looked at. None: no condition ends the loop.
    frames: innermost first. changing: attributes and keys that have changed from step to step."""
    found: list[tuple[frozenset[str], bool | None]] = []
    for frame in frames:
        for loop in _around(frame):
            grows = _assigned(loop)
            names = {name: value for (owner, name), value in values.items() if owner is frame and name in grows}
            ends = _ends(frame.f_code.co_filename, loop)
            found += [(end.names & grows, _holds(end, names, frame, changing)) for end in ends]
            if not (isinstance(loop, ast.For) and _counter(loop.iter, frame) is not None):
                return _leaving(found)
    return _leaving(found)


def _leaving(found: Iterable[tuple[frozenset[str], bool | None]]) -> Leaving | None:
    may = [(names, holds) for names, holds in found if holds is not False]
    return Leaving(frozenset().union(*(names for names, _ in may)), any(holds for _, holds in may)) if may else None


def inside(frames: Iterable[FrameType], code: CodeType, loop: Loop) -> bool:
    """Whether a function of these frames is in this loop of its own."""
    return any(frame.f_code is code and _around_line(loop, frame.f_lineno) for frame in frames)


def loop_around(frames: Iterable[FrameType]) -> tuple[CodeType, Loop] | None:
    """The innermost loop around a call, and the code that it is part of. frames: innermost first."""
    return next(((frame.f_code, loop) for frame in frames for loop in _around(frame)), None)


def asked_by_next(frames: Iterable[FrameType]) -> Iterator[tuple[str, object]]:
    """What the innermost loop around a call asks by next(), as it spells it. A loop whose turns are counted may ask
    within the loop around it. frames: innermost first."""
    for frame in frames:
        for loop in _around(frame):
            for spelling, code in _nexts(frame.f_code.co_filename, loop):
                with contextlib.suppress(Exception):  # a name of an inner function, or not bound yet
                    yield spelling, eval(code, frame.f_globals, frame.f_locals)
            if not (isinstance(loop, ast.For) and _counter(loop.iter, frame) is not None):
                return


@functools.lru_cache(maxsize=16)
def _nexts(filename: str, loop: Loop) -> list[tuple[str, CodeType]]:
    """What is asked by next(name) or next(name.attribute)."""
    asked = [
        node.args[0]
        for node in ast.walk(loop)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "next" and node.args
    ]
    return [
        (ast.unparse(part), compile(ast.Expression(part), filename, "eval"))
        for part in asked
        if all(isinstance(node, ast.Name | ast.Attribute | ast.expr_context) for node in ast.walk(part))
    ]


def asked_by_head(frames: Iterable[FrameType]) -> bool:
    """Whether the head of a `for` asks here, which an end of the items ends without an error. frames: innermost
    first."""
    frame = next(iter(frames), None)
    return frame is not None and any(_asks(loop, frame) for loop in _around(frame))


def asked_in_loop(frames: Iterable[FrameType]) -> bool:
    """Whether a `for` or a loop with next() asks here, so that its body has each item; no list(), sum() or
    comprehension. frames: innermost first."""
    frame = next((frame for frame in frames if frame.f_code.co_name != "<genexpr>"), None)
    if frame is None or not linecache.getlines(frame.f_code.co_filename):
        return True
    return any(
        _asks(loop, frame) or any(isinstance(node, ast.Name) and node.id == "next" for node in ast.walk(loop))
        for loop in _around(frame)
    )


@dataclass(frozen=True)
class _End:
    """A condition that ends a loop."""

    code: CodeType | None
    """None: the condition calls something."""
    negated: bool
    """The loop ends when the condition is not true."""
    names: frozenset[str]
    reads: tuple[tuple[CodeType, str], ...] | None
    """The attributes and keys that it reads: of what, and which. None: one of them changes in the loop's file, or it
    is none of a name that the loop leaves alone."""


def _around(frame: FrameType) -> tuple[Loop, ...]:
    """The loops of the frame's function around its current line, innermost first."""
    return _loops_around(frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_lineno)


@functools.lru_cache(maxsize=1024)
def _loops_around(filename: str, first: int, line: int) -> tuple[Loop, ...]:
    around = [loop for loop in _loops(filename) if first <= loop.lineno and _around_line(loop, line)]
    return tuple(sorted(around, key=lambda loop: -loop.lineno))


def _asks(loop: Loop, frame: FrameType) -> bool:
    """Whether the frame is in the head of the loop."""
    return isinstance(loop, ast.For) and frame.f_lineno <= (loop.iter.end_lineno or loop.lineno)


def _around_line(loop: Loop, line: int) -> bool:
    return loop.lineno <= line <= (loop.body[-1].end_lineno or loop.lineno)


@functools.lru_cache(maxsize=16)
def _loops(filename: str) -> list[Loop]:
    return [node for tree in _trees(filename) for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)]


def _trees(filename: str) -> list[ast.Module]:
    """The file's; none if it cannot be read."""
    try:
        return [ast.parse("".join(linecache.getlines(filename)))]
    except SyntaxError:
        return []


def _counter(node: ast.expr, frame: FrameType) -> str | None:
    """What counts, in the head of a loop: also inside enumerate(), tqdm() and the like, and under a name."""
    if isinstance(node, ast.Name):
        value = frame.f_locals.get(node.id, frame.f_globals.get(node.id))
        return f"{node.id}, a {type(value).__name__}," if isinstance(value, _COUNTERS) else None
    if not isinstance(node, ast.Call):
        return None
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", None)
    if name in COUNTING:
        return f"{name}(...)"
    inside = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "iterable")]
    return next((found for part in inside if (found := _counter(part, frame)) is not None), None)


@functools.lru_cache(maxsize=16)
def _ends(filename: str, loop: Loop) -> list[_End]:
    found: list[tuple[ast.expr, bool]] = [(loop.test, True)] if isinstance(loop, ast.While) else []
    for node in _inside(loop.body):
        if isinstance(node, ast.If):
            found += [(node.test, False)] if _leaves(node.body) else []
            one_of_several = len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)  # found by itself
            found += [(node.test, True)] if _leaves(node.orelse) and not one_of_several else []
    return [
        _End(
            _compiled(filename, test),
            negated,
            frozenset(node.id for node in ast.walk(test) if isinstance(node, ast.Name)),
            _reads(filename, test, _assigned(loop)),
        )
        for test, negated in found
    ]


def _assigned(loop: Loop) -> frozenset[str]:
    """The names that the loop gives values to."""
    return frozenset(
        node.id for node in ast.walk(loop) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )


def _inside(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All statements, handlers and cases, but those of inner loops and functions."""
    for statement in body:
        yield statement
        if not isinstance(statement, ast.For | ast.While | ast.FunctionDef | ast.ClassDef):
            for name in ("body", "handlers", "orelse", "finalbody", "cases"):
                yield from _inside(getattr(statement, name, []))


def _leaves(body: Iterable[ast.AST]) -> bool:
    return any(isinstance(statement, ast.Break | ast.Return) for statement in _inside(body))


def _compiled(filename: str, test: ast.expr) -> CodeType | None:
    if any(isinstance(node, _UNKNOWN) for node in ast.walk(test)):
        return None
    return compile(ast.Expression(test), filename, "eval")


def _reads(filename: str, test: ast.expr, assigned: frozenset[str]) -> tuple[tuple[CodeType, str], ...] | None:
    found = []
    for node in ast.walk(test):
        if isinstance(node, ast.Attribute | ast.Subscript):
            key, root = _key(node), node.value
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if key is None or key in _stored(filename) or not isinstance(root, ast.Name) or root.id in assigned:
                return None
            found.append((compile(ast.Expression(node.value), filename, "eval"), key))
    return tuple(found)


def _key(node: ast.Attribute | ast.Subscript) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return str(node.slice.value) if isinstance(node.slice, ast.Constant) else None


@functools.lru_cache(maxsize=16)
def _stored(filename: str) -> frozenset[str | None]:
    """The attributes and keys that a file gives values to."""
    nodes = (node for tree in _trees(filename) for node in ast.walk(tree))
    parts = (node for node in nodes if isinstance(node, ast.Attribute | ast.Subscript))
    return frozenset(_key(node) for node in parts if not isinstance(node.ctx, ast.Load))


def _holds(end: _End, names: Mapping[str, object], frame: FrameType, changing: Collection[str]) -> bool | None:
    """Whether the loop ends if these names have these values. None: it may do so, nobody can say."""
    if end.code is None:
        return None
    if end.reads == () and not names.keys() & end.names:
        return False
    values = {**frame.f_globals, **frame.f_locals, **names, "__builtins__": builtins}
    try:
        holds = bool(eval(end.code, values)) != end.negated
        known = end.reads is not None and all(_stays(eval(of, values), key, changing) for of, key in end.reads)
    except Exception:
        return None
    return holds if holds or known else None


def _stays(owner: Any, key: str, changing: Collection[str]) -> bool:
    """Whether an attribute or a key of this object has the same value until the turn ends. In an object of the
    script's own, True and False may be said by another file, once."""
    value = owner.get(key) if isinstance(owner, dict) else getattr(owner, key, None)
    return key not in changing and not (isinstance(value, bool) and is_defined_by_script(type(owner)))
