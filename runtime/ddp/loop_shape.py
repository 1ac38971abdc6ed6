"""What counts the turns of a training loop beside the script's own variables: a range(), a zip(), an islice().

Their place is kept inside the interpreter, where silent turns cannot be undone: a loop over range(1000) would end after
a thousand turns, which are fewer steps.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterable
from types import FrameType

COUNTING = frozenset({"range", "trange", "zip", "islice"})


def counting_loop(frames: Iterable[FrameType]) -> str | None:
    """Where the innermost loop around a call is one whose turns are counted so: "train.py:12: for i in range(1000)".
    frames: innermost first. None: it is not, or its text cannot be read."""
    for frame in frames:
        loop = _innermost(_loops(frame.f_code.co_filename), frame.f_lineno)
        if loop is None:
            continue
        if isinstance(loop, ast.For) and (name := _called(loop.iter)) in COUNTING:
            target = ast.unparse(loop.target)
            return f"{frame.f_code.co_filename}:{loop.lineno}: for {target} in {name}(...)"
        return None
    return None


@functools.lru_cache(maxsize=16)
def _loops(filename: str) -> list[ast.For | ast.While]:
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)]


def _innermost(loops: Iterable[ast.For | ast.While], line: int) -> ast.For | ast.While | None:
    around = [loop for loop in loops if loop.lineno <= line <= (loop.end_lineno or loop.lineno)]
    return max(around, key=lambda loop: loop.lineno, default=None)


def _called(node: ast.expr) -> str | None:
    """The name of what a call calls; of enumerate(), tqdm() and the like what stands inside."""
    if not isinstance(node, ast.Call):
        return None
    function = node.func
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", None)
    if name in COUNTING or not node.args:
        return name
    return _called(node.args[0])
