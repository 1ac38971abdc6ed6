"""The loops as job.epochs, job.steps and `for batch in step`."""

from __future__ import annotations

import ast

from elastic.adopt.edits import Edits
from elastic.adopt.script import Script
from elastic.adopt.training_loop import TrainingLoop


def write_loops(script: Script, edits: Edits, loop: TrainingLoop, job: str, step: str, log: str, remade: str) -> None:
    """log: what a shard does behind backward(); remade: the line behind the shards, or "". Raises Refused."""
    inner, outer = script.indent(loop.batches.body[0]), script.indent(loop.batches)
    if not inner.startswith(outer) or not all(script.alone(one) for one in loop.batches.body):
        script.end(loop.batches, "the body of this loop is not on lines of its own", "put each statement on a line")
    unit, last = inner[len(outer) :], loop.shard[-1]
    batch = edits.render(loop.batch)
    batch = batch[1:-1] if isinstance(loop.batch, ast.Tuple) and batch.startswith("(") else batch
    ahead = [script.text[slice(*_lines(script, statement))].strip() for statement in loop.moved]
    for statement in loop.moved:
        edits.delete(statement)
    edits.replace(loop.batches.target, step)
    for node in script.around(loop.loader):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "enumerate":
            edits.keep_only(node, node.args[0])
    edits.replace(loop.loader, f"{job}.steps({loop.loader.id}{'' if loop.epochs is not None else ', epochs=1'})")

    counter = _counter(script, edits, loop, step)
    before = [node.id for one in (*loop.head, *loop.shard) for node in ast.walk(one) if isinstance(node, ast.Name)]
    early = loop.number is not None and loop.number.id in before
    if early and loop.head:
        edits.before(loop.head[0], *counter)
    elif early:
        ahead = [*counter, *ahead]
    start = (loop.head[-1].end_lineno or 0) + 1 if loop.head else _header_end(script, loop.batches) + 1
    edits.lines_at(start, inner, *ahead, f"for {batch} in {step}:")
    edits.indent(start, last.end_lineno or last.lineno, unit, loop.shard)
    edits.behind(last, inner + unit, log)
    edits.behind(last, inner, *([remade] if remade else []), *([] if early else counter))
    if loop.epochs is not None:
        _write_epochs(script, edits, loop.epochs, job)


def _lines(script: Script, statement: ast.stmt) -> tuple[int, int]:
    """With its comment."""
    return script.begin_of(statement.lineno), script.begin_of((statement.end_lineno or statement.lineno) + 1)


def _header_end(script: Script, loop: ast.For) -> int:
    """The line of the colon."""
    line = loop.iter.end_lineno or loop.lineno
    column = script.span(loop.iter)[1] - script.begin_of(line)
    while ":" not in script.lines[line - 1][column:].partition("#")[0]:
        line, column = line + 1, 0
    return line


def _counter(script: Script, edits: Edits, loop: TrainingLoop, step: str) -> list[str]:
    """What enumerate() has counted, which a newcomer would not have: it comes in the middle."""
    number = loop.number
    if number is None or all(isinstance(use.ctx, ast.Store) for use in script.uses(loop.scope, number.id)):
        return []
    first = f" + {edits.render(loop.first)}" if loop.first is not None else ""
    return [f"{number.id} = {step}.index % len({loop.loader.id}){first}"]


def _write_epochs(script: Script, edits: Edits, loop: ast.For, job: str) -> None:
    counts = [
        node
        for node in ast.walk(loop.iter)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("range", "trange") and not node.keywords
    ]
    match counts:
        case [ast.Call(args=[stop] | [ast.Constant(0), stop])]:
            count = edits.render(stop)
        case [ast.Call(args=[ast.Constant(int(first)), stop])] if isinstance(loop.target, ast.Name):
            match stop:
                case ast.BinOp(left, ast.Add(), ast.Constant(more)) if more == first:
                    count = edits.render(left)
                case ast.Constant(int(end)):
                    count = str(end - first)
                case _:
                    count = f"{edits.render(stop)} - {first}"
            edits.before(loop.body[0], f"{loop.target.id} += {first}")
        case [ast.Call()]:
            script.end(
                loop,
                "the epochs begin with another one than the first",
                "write range(n): a job that is started again goes on from its last checkpoint by itself",
            )
        case _:
            script.end(loop, "the epochs are not counted by range()", "write `for epoch in range(n):`")
    edits.replace(counts[0], f"{job}.epochs({count})")
