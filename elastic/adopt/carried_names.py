"""What goes on from step to step. A newcomer copies what is registered, and job.state; a variable it would not have.

A name is carried if a turn of the loop reads it before it has given it a value, and gives it one at all.
"""

from __future__ import annotations

import ast
from collections.abc import Collection

from elastic.adopt.edits import Edits
from elastic.adopt.flow import early
from elastic.adopt.script import Script
from elastic.adopt.training_loop import CLOCKS, PROGRESS, TrainingLoop

_MUTATORS = frozenset({"append", "extend", "insert", "update", "add", "pop", "clear", "setdefault", "remove"})
_TAKEN = frozenset({"keys", "items", "setdefault", "was_read", "forget_reads", "lock", "unlock", "replace", "rewind"})
"""Names that job.state has itself."""


def _carried(script: Script, loop: TrainingLoop) -> set[tuple[str, ast.AST]]:
    """Each with its scope."""
    turn = [*loop.head, *loop.moved, *loop.shard, *loop.rest]
    names = _changed(script, loop.scope, [*loop.head, *loop.moved, *loop.rest]) - loop.bound
    known = {loop.number.id} if loop.number is not None else set()
    found = {(name.id, loop.scope) for name in early(script, loop.scope, names, turn, known)}
    if loop.epochs is not None:
        names = _changed(script, loop.outer, loop.epochs.body) - (loop.bound if loop.scope is loop.outer else set())
        known = Script.stored([loop.epochs.target])
        found |= {(name.id, loop.outer) for name in early(script, loop.outer, names, loop.epochs.body, known)}
    return found


def _changed(script: Script, scope: ast.AST, body: list[ast.stmt]) -> set[str]:
    """Names of that scope to which something is done: a value is given, or a list made longer."""
    every = {name for statement in body for name in ast.walk(statement) if isinstance(name, ast.Name)}
    found = {name for name in every if isinstance(name.ctx, ast.Store)}
    for statement in Script.inside(body):
        match statement:
            case ast.Expr(ast.Call(ast.Attribute(value, attr))) if attr in _MUTATORS or _is_own(script, value):
                changed: list[ast.expr] = [value]
            case ast.Assign(targets):
                changed = [target for target in targets if isinstance(target, ast.Subscript | ast.Attribute)]
            case ast.AugAssign(ast.Subscript() | ast.Attribute() as target):
                changed = [target]
            case _:
                changed = []
        found |= {root for root in map(Script.root, changed) if root is not None}
    return {name.id for name in found if script.scope(name) is scope}


def _is_own(script: Script, node: ast.expr) -> bool:
    """Whether this is an object of one of the script's own classes."""
    made = script.origin(node)
    names = {one.name for one in ast.walk(script.tree) if isinstance(one, ast.ClassDef)}
    return isinstance(made, ast.Call) and isinstance(made.func, ast.Name) and made.func.id in names


def step_counters(script: Script, loop: TrainingLoop) -> dict[str, tuple[ast.stmt, ast.stmt]]:
    """Names that are 0 before the loops, and one more after each step, and read from there on: these two statements."""
    found: dict[str, tuple[ast.stmt, ast.stmt]] = {}
    for statement in loop.rest:
        match statement:
            case ast.AugAssign(ast.Name(name) as target, ast.Add(), ast.Constant(1)):
                uses = script.uses(script.scope(target), name)
                first = script.statement(uses[0])
                changes = [use for use in uses if isinstance(use.ctx, ast.Store)]
                begin = isinstance(first, ast.Assign) and len(first.targets) == 1 and ast.unparse(first.value) == "0"
                outside = _is_before(script, loop, uses[0]) and script.scope(target) is loop.scope
                late = all(use.lineno > loop.batches.lineno for use in uses[1:])
                if begin and outside and late and changes == [uses[0], target]:
                    found[name] = first, statement
    return found


def count_by_step(script: Script, edits: Edits, loop: TrainingLoop, step: str) -> None:
    """Those become step.index, or one more."""
    for name, (first, last) in step_counters(script, loop).items():
        for use in script.uses(loop.scope, name):
            if use.lineno < last.lineno:
                text = f"{step}.index"
            else:
                sum_ = isinstance(script.parents[use], ast.BinOp | ast.UnaryOp)
                text = f"({step}.index + 1)" if sum_ else f"{step}.index + 1"
            if isinstance(use.ctx, ast.Load):
                edits.replace(use, text)
        edits.delete(first)
        edits.delete(last)


def keep_in_state(script: Script, edits: Edits, loop: TrainingLoop, job: str, left_out: Collection[str]) -> None:
    """Each carried name becomes a value of job.state, or is refused. left_out: what is carried otherwise."""
    first: dict[ast.stmt, list[str]] = {}
    carried = _carried(script, loop)
    for name, scope in sorted(carried, key=lambda one: one[0]):
        uses = script.uses(scope, name)
        if scope is not loop.outer and (name, loop.outer) in carried:
            script.refuse(uses[0], f"{name} is another one in the function of the epochs", "rename one: both are kept")
        lifted = script.lifted(uses[0], loop.outer)
        values = script.values(uses[0])
        if (lifted is not None and lifted.id in left_out) or all(_is_outside(script, value) for value in values):
            continue
        start = next((use for use in uses if isinstance(use.ctx, ast.Store)), uses[0])
        statement, before = script.statement(start), _is_before(script, loop, start)
        new = name if name not in _TAKEN and not name.startswith("_") else f"{name.strip('_')}_"
        changes = [getattr(script.statement(use), "value", None) for use in uses if isinstance(use.ctx, ast.Store)]
        if any(_is_outside(script, value) for value in changes):
            script.refuse(
                start, f"{name} is made of times, which differ from worker to worker", "measure it in one step"
            )
        if not _is_plain(values[0]) or not isinstance(statement, ast.Assign | ast.AnnAssign):
            script.refuse(
                start,
                f"{name} changes from step to step, and is no number, string or list: a newcomer would not have it",
                "keep numbers in it, log with step.log(), or register it if it has a state_dict()",
            )
            continue
        if before:
            first.setdefault(statement, []).append(name)
        for use in uses:
            if isinstance(script.parents[use], ast.NamedExpr):
                script.refuse(use, f"{name} is kept in job.state, which `:=` cannot set", "give it its value before")
            if not (before and script.statement(use) is statement):
                edits.replace(use, f"{job}.state.{new}")
    for statement, kept in first.items():
        _begin(script, edits, statement, kept, job)


def _is_outside(script: Script, value: ast.expr | None) -> bool:
    """What a process has for itself: a time, a progress bar."""
    calls = [node.func for node in ast.walk(value) if isinstance(node, ast.Call)] if value is not None else []
    paths = [script.path(func) for func in calls]
    return any(path.startswith(CLOCKS) or path.rpartition(".")[2] in PROGRESS for path in paths)


def _is_before(script: Script, loop: TrainingLoop, use: ast.Name) -> bool:
    """Whether the name has this value before the loops; else it gets it anew in each epoch."""
    if loop.scope is not loop.outer and script.scope(use) is loop.scope:
        return False
    return loop.epochs is None or loop.epochs not in (*script.around(use),)


def _is_plain(value: ast.expr | None) -> bool:
    match value:
        case ast.Constant(value=bytes()) | None:
            return False
        case ast.Constant():
            return True
        case ast.UnaryOp(operand=operand):
            return _is_plain(operand)
        case ast.List(parts) | ast.Tuple(parts):
            return all(map(_is_plain, parts))
        case ast.Dict(keys, values):
            return all(map(_is_plain, [*keys, *values]))
        case ast.Call(ast.Name("float"), [ast.Constant()]):
            return True
        case ast.Attribute(ast.Name("math" | "np" | "numpy"), "inf"):
            return True
    return False


def _begin(script: Script, edits: Edits, statement: ast.stmt, kept: list[str], job: str) -> None:
    """job.state.setdefault() in the place of a statement; what else it does stays."""
    assert isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
    whole = isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple)
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    values = statement.value.elts if isinstance(statement.value, ast.Tuple) and whole else [statement.value]
    pairs = [(ast.unparse(one), edits.render(value)) for one, value in zip(targets, values, strict=True)]
    if isinstance(statement, ast.Assign) and len(statement.targets) > 1:
        script.refuse(statement, "several names get one value here, and job.state keeps it", "write a line for each")
    others = [pair for pair in pairs if pair[0] not in kept]
    lines = [f"{', '.join(name for name, _ in others)} = {', '.join(value for _, value in others)}"] if others else []
    defaults = ", ".join(f"{name}={value}" for name, value in pairs if name in kept)
    edits.instead(statement, *lines, f"{job}.state.setdefault({defaults})")
