"""What nobody needs any more once a script is adopted: imports, and names that held a rank."""

from __future__ import annotations

import ast

from elastic.adopt.edits import Edits
from elastic.adopt.script import Script


def without(text: str, before: Script, ranks: set[str]) -> str:
    """before: the script as it was; what was of no use there stays. ranks: names that held a rank."""
    script = Script(text)
    edits = Edits(script)
    used = {name.id for name in script.names if isinstance(name.ctx, ast.Load)}
    unused = {name.id for name in before.names if isinstance(name.ctx, ast.Load)} - used
    for node in ast.walk(script.tree):
        match node:
            case ast.Import(aliases) | ast.ImportFrom(names=aliases):
                kept = [alias for alias in aliases if (alias.asname or alias.name) not in unused]
                _keep(edits, script, node, aliases, kept)
            case ast.Assign([ast.Name(name)]) if name in ranks - used:
                edits.delete(node)
            case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)) if len(targets) == len(values):
                gone = [isinstance(one, ast.Name) and one.id in ranks - used for one in targets]
                rest = [pair for pair, drop in zip(zip(targets, values, strict=True), gone, strict=True) if not drop]
                if not rest:
                    edits.delete(node)
                elif any(gone):
                    names = ", ".join(edits.render(target) for target, _ in rest)
                    edits.instead(node, f"{names} = {', '.join(edits.render(value) for _, value in rest)}")
    return edits.render()


def _keep(
    edits: Edits, script: Script, node: ast.Import | ast.ImportFrom, before: list[ast.alias], kept: list[ast.alias]
) -> None:
    if kept == before:
        return
    if not kept:
        edits.delete(node)
        return
    head = f"from {'.' * node.level}{node.module or ''} import " if isinstance(node, ast.ImportFrom) else "import "
    names = [script.text[slice(*script.span(alias))] for alias in kept]
    edits.instead(node, f"{head}{', '.join(names)}")
