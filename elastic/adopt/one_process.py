"""What a script of one process does, and every worker of a job would: it prints and saves; and what its loss has to be,
so that its batch may be cut."""

from __future__ import annotations

import ast

from elastic.adopt.edits import Edits
from elastic.adopt.script import Script
from elastic.adopt.training_loop import TrainingLoop


def check_mean(script: Script, loop: TrainingLoop) -> None:
    """Refuse a loss that is seen to be a sum over the samples: its gradient would be that of a smaller batch."""
    for node in script.run_by(loop.shard):
        match node:
            case ast.Call(func, _, keywords):
                made = script.origin(func)
                given = [*keywords, *(made.keywords if isinstance(made, ast.Call) else [])]
                sums = any(one.arg == "reduction" and ast.unparse(one.value) == "'sum'" for one in given)
            case ast.Assign([ast.Name(name)], value) if loop.loss is not None and name == loop.loss.id:
                if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div):  # by the size of the batch?
                    ofs = {one.id for one in ast.walk(value.right) if isinstance(one, ast.Name)}
                    value = value.left if not ofs & loop.bound else value
                if isinstance(value, ast.Call):
                    value = script.returned(value) or value
                sums = isinstance(value, ast.Call) and getattr(value.func, "attr", "") == "sum"
            case _:
                sums = False
        if sums:
            script.refuse(
                node,
                "the loss is a sum over the samples, and the mean is taken over the shards",
                'make it a mean, or write by hand: job.steps(..., gradients="sum")',
            )


def leave_to_leader(script: Script, edits: Edits, loop: TrainingLoop, job: str) -> None:
    """print() and torch.save(), from the loops on."""
    begin = (loop.epochs if loop.epochs is not None else loop.batches).lineno
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call) or node in edits.gone:
            continue
        scope, call = script.scope(node), node.value
        plain = isinstance(call.func, ast.Name) and call.func.id == "print"
        if scope not in (loop.scope, loop.outer) or (scope is loop.outer and node.lineno < begin):
            continue
        if plain and {keyword.arg for keyword in call.keywords} <= {"sep", "end"}:
            edits.replace(call.func, f"{job}.print")
        elif plain or script.path(call.func) == "torch.save":
            unit = script.indent(loop.batches.body[0])[len(script.indent(loop.batches)) :]
            edits.before(node, f"if {job}.is_leader:")
            edits.indent(node.lineno, node.end_lineno or node.lineno, unit, [node])
