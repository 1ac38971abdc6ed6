"""What a batch has given, used behind backward(): there it is one shard's, of one worker. The mean over all shards is
in step.metrics, once the shard has logged it.

The loss alone may be used as a tensor: it is made of the mean anew. Of other tensors only numbers: x.item(), len(x),
x.size(0), x.shape[0].
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from elastic.adopt.edits import Edits
from elastic.adopt.flow import Flow, behind
from elastic.adopt.script import Script
from elastic.adopt.training_loop import TrainingLoop

_LINEAR = frozenset({"item", "detach", "clone", "cpu", "cuda", "to", "float", "double", "tensor"})
"""Functions and methods that a mean may be taken before or behind."""


class ShardValues:
    """The values of one loop that belong to a shard. distributed: what a rank had is now the mean over all ranks; else
    a value is that of the whole batch, and only the loss is known to be a mean."""

    def __init__(self, script: Script, edits: Edits, loop: TrainingLoop, step: str, *, distributed: bool) -> None:
        self._script, self._edits, self._loop, self._step = script, edits, loop, step
        self._distributed = distributed
        self._loss = loop.loss.id if loop.loss is not None else ""
        self._logged: dict[str, tuple[str, ast.expr | None]] = {}
        """What a shard logs, in the script's words -> the name of the metric, and where it stands (None: the loss)."""
        self._numbers: list[tuple[ast.expr, str]] = []
        """Where a metric is used, and which."""
        self._means: set[ast.AST] = set()
        """Expressions whose value differed from rank to rank."""
        self._remade = False

    def find(self) -> None:
        """Refuses what is neither a number nor the loss."""
        if self._loss:
            self._logged[self._loss] = self._metric(self._loss), None
        Flow(self._look).run([*self._loop.rest, *behind(self._script, self._loop.batches)], set())
        self._check_functions()

    def write(self) -> tuple[str, str]:
        """Returns what each shard logs, and the line behind the shards that makes the loss anew, or "". What is in it
        has been changed before."""
        logs = []
        for text, (metric, node) in self._logged.items():
            logs.append(
                f"{metric}={self._edits.render(node) if node is not None and not text.startswith('len(') else text}"
            )
        for node, text in self._numbers:
            metric = f"{self._step}.metrics[{self._quoted(node, self._logged[text][0])}]"
            if not (self._remade and text == self._loss):
                self._edits.replace(node, f"int({metric})" if text.startswith("len(") else metric)
        log = f"{self._step}.log({', '.join(logs)})"
        if not self._remade:
            return log, ""
        torch = [name.id for name in self._script.names if self._script.path(name) == "torch"]
        if not torch:
            self._script.refuse(self._loop.batches, "the loss is used as a tensor", "import torch")
        made = f'{"".join(torch[:1])}.tensor({self._step}.metrics["{self._logged[self._loss][0]}"])'
        return log, f"{self._loss} = {made}"

    # ------------------------------------------------------------------------------------------------ where it is used

    def _check_functions(self) -> None:
        """Functions that were made before the loop read the loop's names too, and are not seen on the way."""
        script, loop = self._script, self._loop
        seen = {name for one in (loop.batches, *behind(script, loop.batches)) for name in _names(one)}
        for name in script.names:
            mine = name.id in loop.bound and self._is_ours(name) and isinstance(name.ctx, ast.Load)
            if mine and name not in seen and script.scope(script.statement(name)) is not loop.scope:
                script.refuse(name, f"{name.id} is a batch's, and read in a function", "give it as an argument")

    def _is_ours(self, name: ast.Name) -> bool:
        return self._script.scope(name) is self._loop.scope

    def _look(self, node: ast.AST, known: set[str]) -> None:
        """What of it is a shard's becomes a metric. known: names that have got another value since."""
        names = [name for name in _names(node) if self._is_ours(name)]
        names = [name for name in names if not isinstance(name.ctx, ast.Store) or name is node]
        used = {name.id for name in names} & self._loop.bound - known
        if not used:
            return
        of_loss = isinstance(node, ast.expr) and self._is_loss(node)
        if isinstance(node, ast.expr) and _is_number(node) and (of_loss or used != {self._loss}):
            self._number(node, {name.id for name in names})
        elif isinstance(node, ast.Name):
            self._tensor(node)
        else:
            for part in ast.iter_child_nodes(node):
                self._look(part, known)

    def _is_loss(self, node: ast.expr) -> bool:
        """Whether this is its number."""
        return ast.unparse(node) in (f"{self._loss}.item()", f"{self._loss}.detach().item()", f"float({self._loss})")

    def _tensor(self, name: ast.Name) -> None:
        if name.id == self._loss:
            self._remade = True
            self._means.add(name)
            return
        self._script.refuse(
            name,
            f"{name.id} is one shard's, and behind backward() all shards of the step count",
            f"make a number of it, {name.id}.item(), or use it before backward()",
        )

    def _number(self, node: ast.expr, names: set[str]) -> None:
        text = ast.unparse(node)
        if self._is_loss(node):
            self._means |= {node, *_names(node)}
            self._numbers.append((node, self._loss))
            return
        calls = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
        if not self._distributed:
            self._script.refuse(
                node,
                f"{text} is one shard's: whether the step wants the mean or the sum is not known",
                'log it yourself: step.log(acc=...), or step.log(sum={"correct": ...}), and step.metrics["acc"]',
            )
        elif names & Script.stored(self._loop.rest) - self._loop.bound or any(
            isinstance(func, ast.Name) and func.id not in ("len", "float") for func in calls
        ):
            self._script.refuse(node, f"{text} is worked out behind backward()", "work it out before, under a name")
        if text.endswith(".item()") or text.startswith("float("):
            self._means.add(node)
        else:  # however it is asked for, the length of a batch
            root = Script.root(node.args[0] if text.startswith("len(") and isinstance(node, ast.Call) else node)
            text = f"len({root.id if root is not None else ''})"
        if text not in self._logged:
            self._logged[text] = self._metric(self._called(node, text)), node
        self._numbers.append((node, text))

    def _called(self, node: ast.expr, text: str) -> str:
        """What a number is called: as the name that it is of, or that it is given or added to."""
        if text.startswith("len("):
            return f"{text[4:-1]}_size"
        match node, self._script.statement(node):
            case (ast.Call(ast.Attribute(ast.Name(name))), _) | (ast.Call(ast.Name("float"), [ast.Name(name)]), _):
                return name
            case _, ast.AugAssign(ast.Name(name)) | ast.Assign([ast.Name(name)]):
                return name
        return "value"

    def _metric(self, name: str) -> str:
        """A name that step.log takes, and that nothing else has."""
        taken = {"mean", "sum", "self", *(metric for metric, _ in self._logged.values())}
        while (name := name.strip("_")) in taken:
            name = f"{name}_of_batch"
        return name

    def _quoted(self, node: ast.expr, metric: str) -> str:
        strings = [one for one in self._script.around(node) if isinstance(one, ast.JoinedStr)]
        text = self._script.text[slice(*self._script.span(strings[-1]))] if strings else ""
        if '"' in text and "'" in text:
            self._script.refuse(
                node, "there are both kinds of quotes in this f-string", "give the number a name before"
            )
        return f"'{metric}'" if '"' in text else f'"{metric}"'

    # --------------------------------------------------------------------------------------------------- what is a sum

    def is_linear(self, node: ast.expr, seen: frozenset[ast.AST] = frozenset()) -> bool:
        """Whether the sum over all ranks of this value is their number times the value made of the means."""
        if not self._depends(node, seen):
            return True
        match node:
            case _ if node in self._means:
                return True
            case ast.Name():
                return all(self.is_linear(value, seen | {node}) for value in self._made_of(node))
            case ast.BinOp(left, ast.Add() | ast.Sub(), right):
                return self.is_linear(left, seen) and self.is_linear(right, seen)
            case ast.BinOp(left, ast.Mult(), right) if not self._depends(left, seen):
                return self.is_linear(right, seen)
            case ast.BinOp(left, ast.Mult() | ast.Div(), right):
                return self.is_linear(left, seen) and not self._depends(right, seen)
            case ast.List(parts) | ast.Tuple(parts):
                return all(self.is_linear(part, seen) for part in parts)
            case ast.Call(func, arguments) if ast.unparse(func).rpartition(".")[2] in _LINEAR:
                parts = [*arguments, func.value] if isinstance(func, ast.Attribute) else arguments
                return all(self.is_linear(part, seen) for part in parts)
        return False

    def _depends(self, node: ast.expr, seen: frozenset[ast.AST]) -> bool:
        """Whether there is something in it that differed from rank to rank."""
        return any(
            inner in self._means
            or (
                isinstance(inner, ast.Name)
                and inner not in seen
                and any(self._depends(value, seen | {inner}) for value in self._made_of(inner))
            )
            for inner in ast.walk(node)
        )

    def _made_of(self, name: ast.Name) -> list[ast.expr]:
        """All that it is given or added to it."""
        scope = self._script.scope(name)
        stores = [use for use in self._script.uses(scope, name.id) if isinstance(use.ctx, ast.Store)]
        found = [getattr(self._script.statement(use), "value", None) for use in stores]
        return [value for value in (*found, *self._script.arguments(scope, name.id)) if isinstance(value, ast.expr)]


def _names(node: ast.AST) -> Iterator[ast.Name]:
    return (inner for inner in ast.walk(node) if isinstance(inner, ast.Name))


def _is_number(node: ast.expr) -> bool:
    match node:
        case ast.Call(ast.Attribute(attr="item"), [], []):
            return True
        case ast.Call(ast.Name("len" | "float"), [ast.Name()], []):
            return True
        case ast.Call(ast.Attribute(ast.Name(), "size"), [ast.Constant(0)]):
            return True
        case ast.Subscript(ast.Attribute(ast.Name(), "shape"), ast.Constant(0)):
            return True
    return False
