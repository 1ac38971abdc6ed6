"""Where a script trains: the loop over epochs, the loop over batches, and its body in three parts.

head     what a step does before it looks at a batch: zero_grad(), a learning rate
shard    up to backward(): what is done for each shard
rest     what is done once a step, with the gradients of all shards
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.adopt.flow import early
from elastic.adopt.script import Script

PROGRESS = frozenset({"tqdm", "track"})
"""Functions that hand on what they are given, and show how far it is."""
CLOCKS = ("time.", "datetime.")
_SHARDS = (
    "drop the condition, and the division of the loss, and adopt it then; k times the batch_size and k times the "
    "shards of job.loader are what k batches were"
)


@dataclass(frozen=True, slots=True)
class TrainingLoop:
    """loader: its name where it is looped over; batch: what a batch is called; number: what counts them, from `first`
    on. moved: statements of the shard part that belong into the head. epochs: None: there is one epoch. epoch: in its
    body, or that of the function, the statement that runs the batches."""

    batches: ast.For
    loader: ast.Name
    batch: ast.expr
    number: ast.Name | None
    first: ast.expr | None
    head: list[ast.stmt]
    shard: list[ast.stmt]
    moved: list[ast.stmt]
    rest: list[ast.stmt]
    loss: ast.Name | None
    scope: ast.AST
    epochs: ast.For | None
    epoch: ast.stmt
    outer: ast.AST

    @property
    def bound(self) -> set[str]:
        """Names that belong to one shard."""
        return Script.stored([self.batch, *self.shard])


def find(script: Script) -> TrainingLoop:
    """Raises Refused if there is no such loop."""
    backward = _backward(script)
    batches = _batch_loop(script, backward)
    epochs, epoch = _epoch_loop(script, batches)
    number, first, batch, loader = _target(script, batches)
    place = next(n for n, one in enumerate(batches.body) if any(node is backward for node in ast.walk(one)))
    before, rest = batches.body[: place + 1], batches.body[place + 1 :]
    head = _head(script, before, Script.stored([batch]))
    moved = [one for one in before[len(head) :] if _calls(one, "zero_grad")]
    shard = [one for one in before[len(head) :] if one not in moved]
    outer = script.scope(epoch)
    loss = _loss(script, backward)
    scope = script.scope(batches)
    loop = TrainingLoop(
        batches, loader, batch, number, first, head, shard, moved, rest, loss, scope, epochs, epoch, outer
    )
    _check_epochs(script, loop)
    _check_shard(script, loop)
    _check_rest(script, loop)
    return loop


# ------------------------------------------------------------------------------------------------------- where it is


def _backward(script: Script) -> ast.Call:
    calls = [
        node
        for node in ast.walk(script.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"
    ]
    calls = sorted(calls, key=lambda call: call.lineno)
    if not calls:
        script.end(script.tree, "there is no loss.backward() in this file", "name the file with the training loop")
    for call in calls[1:]:
        script.refuse(
            call,
            f"a second backward(), after that of line {calls[0].lineno}: it cannot be told what belongs to a shard",
            "add the losses up, or write job.steps() by hand, with a pass for each optimizer",
        )
    return calls[0]


def _loss(script: Script, backward: ast.Call) -> ast.Name | None:
    """Its name, also inside scaler.scale(loss)."""
    assert isinstance(backward.func, ast.Attribute)
    match backward.func.value:
        case ast.Name() as loss:
            found: ast.Name | None = loss
        case ast.Call(ast.Attribute(attr="scale"), [ast.Name() as loss]):
            found = loss
        case _:
            found = None
    if backward.args or found is None:
        script.refuse(backward, "what is differentiated here has no name", "write loss = ..., and loss.backward()")
    return found


def _batch_loop(script: Script, backward: ast.Call) -> ast.For:
    at = script.statement(backward)
    for node in script.around(at):
        if isinstance(node, ast.With) and script.block(at)[-1] is not at:
            behind = script.block(at)[script.block(at).index(at) + 1]
            script.end(behind, "this is in the same `with` as backward()", "let the `with` end behind backward()")
        at = node if isinstance(node, ast.stmt) else at
        match node:
            case ast.For(orelse=[]):
                return node
            case ast.For() | ast.AsyncFor() | ast.While():
                script.end(node, "this is no loop over a DataLoader, or it has an else", "write `for batch in loader:`")
            case ast.If() | ast.Try() | ast.Match():
                script.end(node, "backward() is under a condition here", _SHARDS)
            case ast.With(items):
                if any("no_sync" in ast.unparse(item) for item in items):
                    script.end(node, "gradients are accumulated under no_sync()", _SHARDS)
            case ast.FunctionDef(name):
                script.end(
                    backward,
                    f"backward() is in {name}(), and the loop over the batches is not",
                    f"write what {name}() does into the loop",
                )
    script.end(backward, "backward() is in no loop over batches", "write `for batch in loader:` around it")


def _target(script: Script, batches: ast.For) -> tuple[ast.Name | None, ast.expr | None, ast.expr, ast.Name]:
    """(counter, its first value, batch, loader)."""
    number, first, batch, node = None, None, batches.target, batches.iter
    while True:
        match node:
            case ast.Name() if script.calls_torch(script.origin(node), "DataLoader"):
                return number, first, batch, node
            case ast.Name() if isinstance(made := script.origin(node), ast.Call) and _shows_progress(made):
                node = made
            case ast.Call(ast.Name("enumerate"), [inner, *start], keywords):
                if not isinstance(batch, ast.Tuple) or not isinstance(batch.elts[0], ast.Name):
                    script.end(batches, "what enumerate() counts has no name", "write `for i, batch in enumerate(...)`")
                first = next(iter([*start, *(keyword.value for keyword in keywords)]), None)
                number, batch, node = batch.elts[0], batch.elts[1], inner
            case ast.Call(args=[inner, *_]) if _shows_progress(node):
                node = inner
            case _:
                script.end(
                    batches,
                    f"it cannot be seen that {ast.unparse(node)} is a DataLoader, made in one place",
                    "write loader = DataLoader(...), and loop over loader, enumerate(loader) or tqdm(loader)",
                )


def _shows_progress(call: ast.Call) -> bool:
    return ast.unparse(call.func).rpartition(".")[2] in PROGRESS


def _epoch_loop(script: Script, batches: ast.For) -> tuple[ast.For | None, ast.stmt]:
    """(the loop, the statement of its function that runs the batches); in the function of the batches, or in the one
    that calls it."""
    at: ast.stmt = batches
    for level in range(4):
        for node in script.around(at):
            match node:
                case ast.For(orelse=[]) if level < 2:
                    return node, at
                case ast.For() | ast.AsyncFor() | ast.While():
                    script.end(
                        node,
                        "the epochs are counted by a loop that is not known, or too far from the batches",
                        "write `for epoch in range(n):` around them, or around a call of their function",
                    )
                case ast.If() if not is_main(node) and level == 0:
                    script.end(node, "the loop over the batches is under a condition", "take it out of there")
                case ast.FunctionDef(name):
                    if isinstance(script.parents[node], ast.ClassDef):
                        script.end(
                            batches,
                            f"the training loop is in a class, {ast.unparse(script.parents[node]).splitlines()[0]}",
                            "write it as a function: only plain names are known here, and no attributes",
                        )
                    calls = script.calls_of(node)
                    if len(calls) > 1:
                        script.end(calls[1], f"{name}(), which trains, is called a second time", "call it in one place")
                    if not calls or not isinstance(calls[0], ast.Call):
                        return None, batches
                    at = script.statement(calls[0])
    return None, batches


def is_main(node: ast.AST) -> bool:
    """Whether this is `if __name__ == "__main__"`."""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def _check_epochs(script: Script, loop: TrainingLoop) -> None:
    body = loop.epochs.body if loop.epochs is not None else []
    for node in script.around(loop.epochs) if loop.epochs is not None else ():
        if isinstance(node, ast.For | ast.While):
            script.refuse(node, "there is a loop around that of the epochs", "train once in a script")
    for statement in Script.inside(body, loops=False):
        if isinstance(statement, ast.Break | ast.Return | ast.Continue):
            script.refuse(
                statement,
                "the loop over the epochs is left, or gone on with, in its middle",
                'write job.stop("why") as the last thing of an epoch, by a value that is the same on all workers',
            )
    within = loop.scope.body if isinstance(loop.scope, ast.FunctionDef) and loop.scope is not loop.outer else []
    for part, end in ((body, loop.epoch), (within, loop.batches)):
        for statement in Script.inside(part):
            if _calls(statement, "step") and statement.lineno < end.lineno:
                script.refuse(
                    statement,
                    "this is done before the batches of an epoch, where a run that goes on in its middle comes twice",
                    "move it behind the loop over the batches",
                )


# ------------------------------------------------------------------------------------------------- the parts of a body


def _calls(statement: ast.stmt, *methods: str) -> bool:
    """Whether the statement is nothing but such a call."""
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(attr=attr))):
            return attr in methods
    return False


def _head(script: Script, before: Sequence[ast.stmt], batch: set[str]) -> list[ast.stmt]:
    """The first statements, as far as they are for the whole step."""
    head: list[ast.stmt] = []
    for statement in before[:-1]:
        later = {
            node.id
            for one in before[len(head) + 1 :]
            if not _sets_rate(one)
            for node in ast.walk(one)
            if isinstance(node, ast.Name)
        }
        mine = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        known = _calls(statement, "zero_grad", "train") or _sets_rate(statement) or isinstance(statement, ast.Assign)
        if mine & batch or not known or Script.stored([statement]) & later:
            break
        head.append(statement)
    return head


def _sets_rate(statement: ast.stmt) -> bool:
    """Whether it gives the optimizer's groups a learning rate, or whatever else."""
    return isinstance(statement, ast.For | ast.Assign) and "param_groups" in ast.unparse(statement)


def _check_shard(script: Script, loop: TrainingLoop) -> None:
    """A shard may be computed again by another worker: it gives names values, and nothing else."""
    behind = "move it behind backward(), where it is done once a step"
    for statement in Script.inside(loop.shard, loops=False):
        if isinstance(statement, ast.Break | ast.Continue | ast.Return):
            script.refuse(statement, "a batch is left before its backward()", "train with every batch")
    for name in early(script, loop.scope, loop.bound, loop.shard, Script.stored([loop.batch])):
        script.refuse(name, f"{name.id} goes on from batch to batch, and that before backward()", behind)
    for statement in Script.inside(loop.shard):
        match statement:
            case ast.Expr(ast.Call(func)) if not (_calls(statement, "backward", "train") or _is_own(func, loop)):
                script.refuse(statement, f"{ast.unparse(func)}() is called before backward()", behind)
            case ast.For() | ast.Assign() if _sets_rate(statement):
                script.refuse(statement, "the learning rate is set behind the batch", "set it first in the loop's body")
            case ast.Assign([ast.Attribute() | ast.Subscript() as target]) | ast.AugAssign(
                ast.Attribute() | ast.Subscript() as target
            ) if not _is_own(target, loop):
                script.refuse(statement, f"{ast.unparse(target)} is changed before backward()", behind)


def _is_own(node: ast.expr, loop: TrainingLoop) -> bool:
    """Whether it hangs on something that belongs to the shard."""
    root = Script.root(node)
    return isinstance(node, ast.Attribute | ast.Subscript) and root is not None and root.id in loop.bound


def _check_rest(script: Script, loop: TrainingLoop) -> None:
    whole = [*loop.head, *loop.moved, *loop.rest]
    for statement in Script.inside(loop.rest, loops=False):
        if isinstance(statement, ast.Break | ast.Return):
            script.refuse(
                statement,
                "the loop over the batches is left before its end",
                'write job.stop("why"), by a value that is the same on all workers',
            )
    nested = [one for one in Script.inside(loop.rest) if _calls(one, "step", "zero_grad") and one not in loop.rest]
    for statement in nested[:1]:
        script.refuse(statement, "the optimizer does not act for each batch: gradients are accumulated", _SHARDS)
    for method in ("step", "zero_grad"):
        if not any(_calls(statement, method) for statement in Script.inside(whole)):
            script.refuse(loop.batches, f"no optimizer.{method}() in this loop, on a line of its own", "call it there")
