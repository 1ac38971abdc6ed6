"""The sources of the product as syntax trees. Each file is parsed and walked once for all tests that read them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("elastic", "runtime", "chaos_tests")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def product() -> list[Path]:
    """All modules, in the order of their names."""
    return sorted(path for part in PARTS for path in (ROOT / part).rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(walk(parsed(path)))


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """As ast.walk does, without the contexts of names (Load, Store): in half of its time."""
    found = [tree]
    for node in found:  # which grows meanwhile
        yield node
        for name in node._fields:
            value = getattr(node, name, None) if name != "ctx" else None
            if isinstance(value, list):
                found += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST):
                found.append(value)
