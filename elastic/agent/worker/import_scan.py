"""The modules that a training script is going to import, read from its source before it runs.

Pure: text in, decisions out. The plain imports at the top of the script can be done beforehand without an effect on the
script, up to the first statement that could change what an import does. A script may change the environment before its
last import and for it (OMP_NUM_THREADS is read when torch is loaded), so then nothing is imported beforehand.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elastic.errors import ColdStart

READING = frozenset({"copy", "get", "items", "keys", "values"})
"""Methods of os.environ that change nothing."""

ENVIRONMENTS = frozenset({"environ", "environb"})
CHANGING = frozenset({"putenv", "unsetenv", "load_dotenv"})


@dataclass(frozen=True, slots=True)
class Program:
    """What `python SCRIPT ARGUMENTS...` or `python -m MODULE ARGUMENTS...` runs."""

    target: str
    is_module: bool
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Import:
    """`import module`, or `from module import names`."""

    module: str
    names: tuple[str, ...] = ()

    @property
    def outermost(self) -> str:
        return self.module.partition(".")[0]


def program_of(command: Sequence[str]) -> Program:
    """The program of a worker's command, the interpreter first. Raises ColdStart if it runs no script or module."""
    match tuple(command[1:]):
        case ("-m", module, *arguments):
            return Program(module, True, tuple(arguments))
        case (script, *arguments) if not script.startswith("-"):
            return Program(script, False, tuple(arguments))
    raise ColdStart("the command is neither `python SCRIPT` nor `python -m MODULE`")


def leading_imports(sources: Sequence[tuple[str, str]]) -> tuple[Import, ...]:
    """The imports that can be done beforehand, in order, none twice.

    sources: (file name, text) of what runs, in order: packages around a module come before it. Raises ColdStart for a
    program that may change the environment before its last import, or does not compile.
    """
    modules = [_parsed(where, text) for where, text in sources]
    last_import = max(((n, line) for n, module in enumerate(modules) for line in _import_lines(module)), default=(0, 0))
    for n, module in enumerate(modules):
        for line in sorted(_changing_lines(module)):
            if (n, line) < last_import:
                raise ColdStart(f"{sources[n][0]}:{line} may change the environment for an import after it")
    found: dict[Import, None] = {}
    for module in modules:
        for statement in module.body:
            if not _is_harmless(statement):
                return tuple(found)
            found.update(dict.fromkeys(_plain(statement)))
    return tuple(found)


def names_in(sources: Sequence[tuple[str, str]]) -> frozenset[str]:
    """All names, attributes and imported names in these texts, as `leading_imports` takes them. Raises ColdStart for a
    program that does not compile."""
    found = set[str]()
    for where, text in sources:
        for node in ast.walk(_parsed(where, text)):
            match node:
                case ast.Name(name) | ast.Attribute(attr=name) | ast.alias(name):
                    found.update(name.split("."))
    return frozenset(found)


def _parsed(where: str, text: str) -> ast.Module:
    try:
        return ast.parse(text, where)
    except (SyntaxError, ValueError) as error:
        raise ColdStart(f"{where} does not compile: {error}") from error


def _plain(statement: ast.stmt) -> Iterator[Import]:
    match statement:
        case ast.Import(names):
            yield from (Import(alias.name) for alias in names)
        case ast.ImportFrom(str(module), names, 0):
            yield Import(module, tuple(alias.name for alias in names if alias.name != "*"))


def _is_harmless(statement: ast.stmt) -> bool:
    """Whether this is an import, a docstring, or a definition that runs nothing yet."""
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Expr(ast.Constant()):
            return True
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return not statement.decorator_list
    return False


def _import_lines(node: ast.AST) -> Iterator[int]:
    """The lines of imports that are done when the module runs, not when one of its functions is called."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child.lineno
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _import_lines(child)


def _changing_lines(module: ast.Module) -> Iterator[int]:
    """Lines where the environment may be changed: code that passes os.environ on may do so, code that reads it not."""
    read: set[int] = set()
    for node in ast.walk(module):
        match node:
            case ast.Subscript(value=value, ctx=ast.Load()):
                read.add(id(value))
            case ast.Attribute(value=value, attr=attr) if attr in READING:
                read.add(id(value))
            case ast.Compare(comparators=comparators):
                read |= {id(other) for other in comparators}
    for node in ast.walk(module):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name):
                if name in CHANGING or (name in ENVIRONMENTS and id(node) not in read):
                    yield node.lineno
