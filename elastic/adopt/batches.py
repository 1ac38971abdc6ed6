"""The training DataLoader becomes job.loader, and its DistributedSampler goes."""

from __future__ import annotations

import ast

from elastic.adopt.edits import Edits
from elastic.adopt.script import Script
from elastic.adopt.training_loop import TrainingLoop

_LOADER = (
    *("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory"),
    *("drop_last", "timeout", "worker_init_fn"),
)
_SAMPLER = ("dataset", "num_replicas", "rank", "shuffle", "seed", "drop_last")
"""Parameters in their order, as torch has them."""

_SPEED = frozenset({"pin_memory", "timeout", "prefetch_factor", "persistent_workers", "pin_memory_device"})
"""Arguments that change no batch; job.loader has none of them."""
_KNOWN = frozenset({"dataset", "batch_size", "shuffle", "sampler", "num_workers", "collate_fn", "drop_last"})


class Batches:
    """The training DataLoader of a script. distributed: it was written for several processes, each with batches of its
    own; else its one batch is cut into shards. Raises Refused."""

    def __init__(self, script: Script, edits: Edits, loop: TrainingLoop, *, distributed: bool) -> None:
        self._script, self._edits, self._loop, self._distributed = script, edits, loop, distributed
        made = script.origin(loop.loader)
        assert isinstance(made, ast.Call)
        self.made = made
        if loop.epochs is not None and loop.epochs in script.around(made):
            script.end(made, "the DataLoader is made anew in each epoch", "make it before the loop over the epochs")
        within = script.scope(made)
        if isinstance(within, ast.FunctionDef) and len(script.calls_of(within)) > 1:
            script.end(made, f"{within.name}() makes other loaders too", "make that for training in its own place")
        self._given = _arguments(script, made, _LOADER)
        self.sampler = script.origin(self._given.get("sampler"))
        """What made the sampler, or None."""
        for name in self._given.keys() - _SPEED - _KNOWN:
            script.refuse(
                self._given[name],
                f"DataLoader({name}=...): the job decides which samples a worker gets, and seeds by their place",
                "leave it out, or write job.loader(weights=...) or job.stream() by hand",
            )

    def write(self, ranks: int, job: str) -> None:
        """job.loader() in the place of DataLoader(). What is in it has been changed before."""
        given, edits = self._given, self._edits
        arguments = [edits.render(given["dataset"])] if "dataset" in given else []
        size = edits.render(given["batch_size"]) if "batch_size" in given else "1"
        if self._distributed:
            simple = isinstance(given.get("batch_size"), ast.Name | ast.Attribute | ast.Constant | None)
            size = f"{size} * {ranks}" if simple else f"({size}) * {ranks}"
        arguments += [f"batch_size={size}", f"shards={ranks}"]
        drawn = _arguments(self._script, self.sampler, _SAMPLER) if isinstance(self.sampler, ast.Call) else {}
        shuffle = drawn.get("shuffle", ast.Constant(True)) if self._distributed else given.get("shuffle")
        named = {"shuffle": shuffle, "seed": drawn.get("seed")}
        named |= {"collate": given.get("collate_fn"), "workers": given.get("num_workers")}
        for name, value in named.items():
            if value is not None and ast.unparse(value) not in ("0", "None", "False"):
                arguments.append(f"{name}={edits.render(value) if value in self._script.parents else 'True'}")
        drop = ast.unparse(given.get("drop_last", ast.Constant(False)))
        if drop != "True":
            arguments.append('tail="pad"' if drop == "False" else f'tail="drop" if {drop} else "pad"')
        edits.put(*self._script.span(self.made), f"{job}.loader({', '.join(arguments)})")

    def drop_sampler(self) -> None:
        """Its statements are deleted."""
        script, edits, given = self._script, self._edits, self._given.get("sampler")
        gone: list[ast.stmt] = []
        if given is None or ast.unparse(given) == "None":
            if self._distributed:
                script.refuse(
                    self.made,
                    "this DataLoader has no DistributedSampler, so each rank trains with all samples",
                    "write DataLoader(..., sampler=DistributedSampler(dataset))",
                )
        elif not script.calls_torch(self.sampler, "DistributedSampler"):
            script.refuse(
                given, "this is not known to be a DistributedSampler, made in one place", "write shuffle=True"
            )
        elif isinstance(given, ast.Name) and self.sampler is not None:
            made = script.statement(self.sampler)
            for use in script.uses(script.scope(given), given.id):
                statement = script.statement(use)
                if _sets_epoch(statement, use) or statement is made:
                    gone.append(statement)
                elif use is not given:
                    script.refuse(use, f"{use.id} is used for something else too", "job.loader has no sampler; drop it")
        for node in ast.walk(script.tree):
            match node:
                case ast.Attribute(ast.Name() as name, "sampler") if script.origin(name) is self.made:
                    if _sets_epoch(script.statement(node), node):
                        gone.append(script.statement(node))
        for statement in gone:
            edits.delete(statement)
        edits.drop(*[self.sampler] if self.sampler is not None else [])

    def check_others(self) -> None:
        """Refuse uses of the loader that job.loader does not have, and any other DistributedSampler."""
        script, dataset = self._script, self._given.get("dataset")
        for node in ast.walk(script.tree):
            match node:
                case ast.Attribute(ast.Name() as name, attr) if script.origin(name) is self.made:
                    if attr == "dataset" and isinstance(dataset, ast.Name) and script.sees(node, dataset):
                        self._edits.replace(node, dataset.id)
                    elif node not in self._edits.gone:
                        script.refuse(node, f"job.loader has no .{attr}", "keep it in a variable of its own")
                case ast.Call(ast.Name("iter" | "next" | "list"), [ast.Name() as name, *_]):
                    if script.origin(name) is self.made:
                        script.refuse(node, "the training batches are read besides", "look at the dataset instead")
                case ast.Call(func) if script.is_torch(func, "DistributedSampler") and node is not self.sampler:
                    script.refuse(
                        node,
                        "a second DistributedSampler, which would give each worker one part for ever",
                        "evaluate with job.evaluate(fn, dataset), or with all samples on every worker",
                    )


def _arguments(script: Script, call: ast.Call, names: tuple[str, ...]) -> dict[str, ast.expr]:
    found = dict(zip(names, call.args, strict=False))
    for keyword in call.keywords:
        found[keyword.arg or "**"] = keyword.value
    if "**" in found or any(isinstance(argument, ast.Starred) for argument in call.args):
        script.end(call, f"the arguments of {ast.unparse(call.func)} are not seen here", "write each of them out")
    return found


def _sets_epoch(statement: ast.stmt, of: ast.expr) -> bool:
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(value, "set_epoch"))):
            return value is of
    return False
