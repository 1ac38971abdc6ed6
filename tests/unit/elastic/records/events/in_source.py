"""Which events the product writes, with which fields, and which ones it reads: found in its source.

A *writer* is `Journal.write`, `Session.note`, the action `Note` of the leader, and every function that passes a
parameter of its own on as the event of a writer. The event of any other call has to be a literal, or something that
stands for literals alone, so that this reading misses no event.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.unit.sources import ROOT, Function, nodes, parsed, product, walk

IN_EVERY_LINE = frozenset({"t_mono_ns", "t_wall", "job", "generation", "worker_id", "node", "pid", "who", "event"})

OTHERS = {ROOT / "elastic/preemption/kubernetes_api.py", ROOT / "runtime/frontends/restart/script_timers.py"}
"""Modules in which an `event` is of Kubernetes, or of torch."""


@dataclass(frozen=True)
class Fields:
    """open: there may be others, which are no literals."""

    always: frozenset[str] = frozenset()
    perhaps: frozenset[str] = frozenset()
    open: bool = False

    def __or__(self, other: Fields) -> Fields:
        always = self.always | other.always
        return Fields(always, (self.perhaps | other.perhaps) - always, self.open or other.open)

    @property
    def as_perhaps(self) -> Fields:
        return Fields(frozenset(), self.always | self.perhaps, self.open)


@dataclass(frozen=True)
class Written:
    """An event that a call writes. where: file:line."""

    event: str
    fields: Fields
    where: str


@dataclass(frozen=True)
class Writer:
    """name: of the function. place, keyword: of the parameter that is the event. receivers: of which objects it is a
    method, if its name has other meanings. module: None: it is called from everywhere. adds: fields of its own. about:
    the place of a dict with the fields, if they are no keywords. default: the event, if none is given."""

    name: str
    place: int | None
    keyword: str = "event"
    receivers: tuple[str, ...] = ()
    module: Path | None = None
    adds: Fields = Fields()
    about: int | None = None
    default: str = ""

    def event_of(self, call: ast.Call, path: Path) -> ast.expr | None:
        """The argument that is the event, if this is a call of the writer."""
        if _last(call.func) != self.name or self.module not in (None, path):
            return None
        if self.receivers and (
            not isinstance(call.func, ast.Attribute) or _last(call.func.value) not in self.receivers
        ):
            return None
        for given in call.keywords:
            if given.arg == self.keyword:
                return given.value
        return call.args[self.place] if self.place is not None and self.place < len(call.args) else None


FIRST = (
    Writer("write", 0, receivers=("journal", "_journal")),
    Writer("note", 0, receivers=("session", "_session")),
    Writer("Note", 0, about=1),
    Writer("_line", 0, module=ROOT / "elastic" / "records" / "journal.py", about=1),
    Writer("_note", 0, module=ROOT / "runtime" / "recovery" / "checkpoint" / "saver.py"),  # which is given Session.note
)


@cache
def modules() -> tuple[Path, ...]:
    return tuple(path for path in product() if "_pb2" not in path.name)


def _last(node: ast.expr) -> str:
    """`write` of `self._journal.write`."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


@cache
def _calls() -> list[tuple[Path, Function | None, ast.Call]]:
    """(module, the function around it, call)."""
    found = []
    for path in modules():
        around: dict[ast.AST, Function] = {}
        for node in nodes(path):
            if isinstance(node, Function):  # one within another comes after it
                around |= dict.fromkeys(walk(node), node)
        found += [(path, around.get(node), node) for node in nodes(path) if isinstance(node, ast.Call)]
    return found


def _parameters(function: Function) -> list[str]:
    spec = function.args
    return [one.arg for one in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]


def _assigned(name: str, within: Iterable[ast.AST]) -> list[ast.expr]:
    """What a variable, or a class attribute, is set to."""
    found = []
    for node in within:
        match node:
            case ast.Assign(targets=targets, value=value) if any(_last(target) == name for target in targets):
                found.append(value)
            case ast.AnnAssign(target=target, value=ast.expr() as value) if _last(target) == name:
                found.append(value)
    return found


@cache
def _assigned_anywhere(name: str) -> list[ast.expr]:
    return [value for path in modules() for value in _assigned(name, nodes(path))]


def _literals(node: ast.expr, path: Path, around: Function | None) -> set[str] | None:
    """The strings that an expression stands for; None: that cannot be told."""
    match node:
        case ast.Constant(value=str(text)):
            return {text}
        case ast.IfExp(body=one, orelse=other):
            values = [one, other]
        case ast.Attribute(attr=name) if name.endswith("_event"):
            values = _assigned_anywhere(name)
        case ast.Subscript(value=ast.Name(id=name)):
            values = [value for table in _tables(name, path) for value in table.values]
        case ast.Name(id=name) if around is not None:
            values = _assigned(name, walk(around))
        case _:
            return None
    found = [_literals(value, path, around) for value in values]
    return {text for texts in found for text in texts or ()} if found and None not in found else None


def _tables(name: str, path: Path) -> list[ast.Dict]:
    return [value for value in _assigned(name, nodes(path)) if isinstance(value, ast.Dict)]


def _fields(node: ast.expr, around: Function | None) -> Fields:
    """The keys of a dict."""
    match node:
        case ast.Dict(keys=keys, values=values):
            found = Fields()
            for key, value in zip(keys, values, strict=True):
                match key:
                    case None:
                        found |= _fields(value, around)
                    case ast.Constant(value=str(text)):
                        found |= Fields(frozenset({text}))
                    case _:
                        found |= Fields(open=True)
            return found
        case ast.IfExp(body=one, orelse=other):
            return (_fields(one, around) | _fields(other, around)).as_perhaps
        case ast.Name(id=name) if around is not None and (values := _assigned(name, walk(around))):
            found = Fields()
            for value in values:
                found |= _fields(value, around)
            return found | _added_later(name, around)
    return Fields(open=True)


def _added_later(name: str, around: Function) -> Fields:
    """What `name |= {...}` and `name["key"] = ...` add."""
    found = Fields()
    for node in walk(around):
        match node:
            case ast.AugAssign(target=ast.Name(id=target), value=value) if target == name:
                found |= _fields(value, around).as_perhaps
            case ast.Subscript(value=ast.Name(id=target), slice=ast.Constant(value=str(key)), ctx=ast.Store()):
                found |= Fields(perhaps=frozenset({key})) if target == name else Fields()
    return found


def _fields_of(call: ast.Call, writer: Writer, around: Function | None) -> Fields:
    found = writer.adds
    if writer.about is not None:
        return found | _fields(call.args[writer.about], around)
    for given in call.keywords:
        if given.arg is None:
            passed_on = (
                around is not None and around.args.kwarg is not None and _last(given.value) == around.args.kwarg.arg
            )
            found |= Fields() if passed_on else _fields(given.value, around)
        elif given.arg != writer.keyword:
            found |= Fields(frozenset({given.arg}))
    return found


@cache
def writers() -> tuple[Writer, ...]:
    """FIRST, and all functions that pass a parameter on to one of these."""
    known = list(FIRST)
    for writer in known:  # which grows meanwhile
        for path, around, call in _calls():
            event = writer.event_of(call, path)
            if around is None or not isinstance(event, ast.Name) or event.id not in _parameters(around):
                continue
            module = path if around.name.startswith("_") else None
            place, default = _parameter(event.id, around)
            adds = _fields_of(call, writer, around)
            more = Writer(around.name, place, event.id, (), module, adds, None, default)
            if not any((one.name, one.module) in ((more.name, module), (more.name, None)) for one in known):
                known.append(more)
    return tuple(known)


def _parameter(name: str, of: Function) -> tuple[int | None, str]:
    """Its place in a call, None: it is given by its name; and the text that it is if it is not given."""
    positional = [one.arg for one in of.args.args if one.arg != "self"]
    values: list[tuple[str, ast.expr | None]] = [*zip(reversed(positional), reversed(of.args.defaults), strict=False)]
    values += [(one.arg, value) for one, value in zip(of.args.kwonlyargs, of.args.kw_defaults, strict=True)]
    default = next((value.value for one, value in values if one == name and isinstance(value, ast.Constant)), "")
    return positional.index(name) if name in positional else None, str(default)


def _is_passed_on(event: ast.expr, around: Function | None) -> bool:
    """Whether it is a parameter of a function that is a writer itself, or what the leader writes for an action Note."""
    if around is None or not isinstance(event, ast.Name):
        return False
    notes = [node for node in walk(around) if isinstance(node, ast.MatchClass) and _last(node.cls) == "Note"]
    names = [note.patterns[0].name for note in notes if isinstance(note.patterns[0], ast.MatchAs)]
    return event.id in (*_parameters(around), *names)


@cache
def written() -> tuple[Written, ...]:
    """Raises AssertionError for a call whose event is none of the known literals."""
    found = [Written(writer.default, writer.adds, f"{writer.name}()") for writer in writers() if writer.default]
    renamed: list[tuple[ast.Dict, str]] = []
    names_of_writers = {writer.name for writer in writers()}
    for path, around, call in _calls():
        if _last(call.func) not in names_of_writers:
            continue
        where = f"{path.relative_to(ROOT)}:{call.lineno}"
        for writer in writers():
            event = writer.event_of(call, path)
            if event is None or _is_passed_on(event, around):
                continue
            if isinstance(event, ast.Subscript):
                renamed += [(table, where) for table in _tables(_last(event.value), path)]
                continue
            names = _literals(event, path, around)
            assert names, f"{where}: name the event in the call: {ast.unparse(event)}"
            fields = _fields_of(call, writer, around)
            found += [Written(name, fields, where) for name in names]
            break
    for table, where in renamed:
        for before, after in ast.literal_eval(table).items():
            found += [Written(after, one.fields, where) for one in found if one.event == before]
    return tuple(found)


# ---------------------------------------------------------------------------------------------------------- readers


def _is_event(node: ast.expr) -> bool:
    """Whether this is the name of an event of a journal: line["event"], event, event.name."""
    match node:
        case ast.Call(func=ast.Name(id="str"), args=[value]):
            return _is_event(value)
        case ast.Call(func=ast.Attribute(attr="pop"), args=[ast.Constant(value="event")]):
            return True
        case ast.Subscript(slice=ast.Constant(value="event")) | ast.Name(id="event"):
            return True
        case ast.Attribute(value=ast.Name(id="event"), attr="name"):
            return True
    return False


def _constants(node: ast.AST) -> set[str]:
    return {one.value for one in walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def _named(name: str, path: Path) -> list[ast.expr]:
    """The value of a constant of that module, or of one from which it is imported."""
    for node in parsed(path).body:
        if isinstance(node, ast.ImportFrom) and node.module and any(one.name == name for one in node.names):
            source = ROOT / f"{node.module.replace('.', '/')}.py"
            return _named(name, source) if source in modules() else []
    constants = [node for node in parsed(path).body if isinstance(node, ast.Assign | ast.AnnAssign)]
    return [value for node in constants for value in _assigned(name, walk(node))]


def _names_in(node: ast.expr, path: Path) -> set[str]:
    """The strings of a collection, also of a constant; those that a table has as its values are left out."""
    match node:
        case ast.Name(id=name):
            return {text for value in _named(name, path) for text in _names_in(value, path)}
        case ast.Dict(keys=keys):
            return {text for key in keys if key is not None for text in _constants(key)}
        case ast.Tuple(elts=parts) | ast.Set(elts=parts) | ast.List(elts=parts):
            return {text for part in parts for text in _names_in(part, path)}
        case ast.Starred(value=value) | ast.Call(args=[value]):
            return _names_in(value, path)
    return _constants(node)


def _matched(path: Path) -> Iterator[tuple[str, int]]:
    """(event, line)."""
    for node in nodes(path):
        found: set[str] = set()
        match node:
            case ast.MatchMapping(keys=keys, patterns=patterns):
                for key, pattern in zip(keys, patterns, strict=True):
                    found |= _constants(pattern) if isinstance(key, ast.Constant) and key.value == "event" else set()
            case ast.Match(subject=subject, cases=cases):
                parts = subject.elts if isinstance(subject, ast.Tuple) else [subject]
                for place in (place for place, part in enumerate(parts) if _is_event(part)):
                    for pattern in (case.pattern for case in cases):
                        inner = pattern.patterns if isinstance(pattern, ast.MatchSequence) else [pattern]
                        found |= _constants(inner[place])
            case ast.Compare(left=left, comparators=[right]) if _is_event(left):
                found |= _names_in(right, path)
            case ast.comprehension(target=ast.Name(id="event"), iter=ast.Name() as names):
                found |= _names_in(names, path)
            case ast.Call(func=ast.Attribute(value=table, attr="get"), args=[name, *_]) if _is_event(name):
                found |= _names_in(table, path)
            case ast.Call(func=func, args=args, keywords=keywords):
                if _last(func) in ("read_all", "read") and len(args) == 2:
                    found |= _names_in(args[1], path)
                elif _last(func) == "of" and "checkers" in path.parts:
                    found |= {text for one in args for text in _names_in(one, path)}
                found |= {text for one in keywords if one.arg == "awaits_event" for text in _constants(one.value)}
        yield from ((name, getattr(node, "lineno", 0)) for name in found)


@cache
def read() -> Mapping[str, str]:
    """Event -> where a reader matches it, file:line."""
    return {
        name: f"{path.relative_to(ROOT)}:{line}"
        for path in modules()
        if path not in OTHERS
        for name, line in _matched(path)
    }
