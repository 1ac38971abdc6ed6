"""What a script of several ranks does to be one: it asks for its rank, wraps its model, and talks to the others.

The number of ranks is a constant from now on. Rank 0 is the worker that leads at that moment; a resource of one process
follows the place on the machine, job.local_rank. Nothing else may depend on a rank: workers come and go.
"""

from __future__ import annotations

import ast

from elastic.adopt.edits import Edits
from elastic.adopt.flow import behind, early
from elastic.adopt.script import Script
from elastic.adopt.shard_values import ShardValues
from elastic.adopt.training_loop import PROGRESS

_DIST = "torch.distributed."
_VARIABLES = {"RANK": "rank", "LOCAL_RANK": "local_rank", "WORLD_SIZE": "world"}
_UNKNOWN = {
    "barrier": "leave it out, as workers wait for each other in each step; for a download: with job.node_lock('data'):",
    "broadcast": "leave it out: all workers build the same, and job.agree(x) is the leader's x",
    "no_sync": "call the optimizer for each batch, with as many times the samples in it",
    "is_initialized": "leave it out: there is always a job",
    "record": "leave it out: a worker's errors are in its log",
    "is_available": "leave it out: there is always a job",
}
_CALLS = {
    "spawn": ("the script starts its ranks itself", "call the function: elastic run starts the workers"),
    "start_processes": ("the script starts its ranks itself", "call the function: elastic run starts the workers"),
    "convert_sync_batchnorm": ("the statistics of SyncBatchNorm depend on the world", "leave it out"),
    "DataParallel": ("DataParallel spreads a batch itself", "leave it out: each worker has one device"),
    "set_num_threads": ("the bits depend on the threads", "leave it out, and write elastic.join(threads=...)"),
}
"""Functions of torch -> why not, and what to write."""
_ANYWAY = "write it by hand, with job.agree(x), job.once(fn), job.evaluate(fn, dataset) or step.log(), see docs/api.md"
_TOLD = frozenset({"print", "info", "debug", "warning", "error", "log", "format"})
"""Functions to which a rank is only a word."""


class DistributedUse:
    """The uses of torch.distributed in one script. model: the name of the wrapped model."""

    def __init__(self, script: Script, edits: Edits, ranks: int, job: str) -> None:
        self._script, self._edits, self._ranks, self._job = script, edits, ranks, job
        calls = [node for node in ast.walk(script.tree) if isinstance(node, ast.Call)]
        self.wraps = [call for call in calls if script.is_torch(call.func, "DistributedDataParallel")]
        self.starts = [call for call in calls if script.path(call.func) == f"{_DIST}init_process_group"]
        self._kinds: dict[ast.AST, str] = {}
        self._asked: set[ast.AST] = set()

    @property
    def distributed(self) -> bool:
        return bool(self.wraps or self.starts)

    def wraps_model(self, node: ast.expr) -> bool:
        """Whether this is what DistributedDataParallel gives."""
        if isinstance(node, ast.Call):
            inner = [*node.args, *(keyword.value for keyword in node.keywords)]
            return node in self.wraps or any(isinstance(one, ast.Call) and self.wraps_model(one) for one in inner)
        if not isinstance(node, ast.Name) or node in self._asked:
            return False
        self._asked.add(node)  # of what is made of itself
        found = any(value is not None and self.wraps_model(value) for value in self._script.values(node))
        self._asked.remove(node)
        return found

    # ----------------------------------------------------------------------------------------------------- the group

    def unwrap(self) -> None:
        """The process group and the wrapper go."""
        script, edits = self._script, self._edits
        for call in self.wraps:
            given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "module")]
            statement = script.statement(call)
            if not given:
                script.refuse(call, "it is not seen which model is wrapped", "write DistributedDataParallel(model)")
            elif isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == ast.unparse(given[0]):
                edits.delete(statement)
            else:
                edits.keep_only(call, given[0])
                edits.drop(call, but=given[0])
        for node in list(ast.walk(script.tree)):
            match node:
                case ast.Attribute(value, "module") if self.wraps_model(value):
                    edits.keep_only(node, value)
                case ast.Expr(ast.Call(func)) if script.path(func) in (
                    f"{_DIST}init_process_group",
                    f"{_DIST}destroy_process_group",
                ):
                    edits.drop(node)
                    if "destroy" in script.path(func):
                        edits.delete(node)
        if self.starts and not self.wraps:
            script.refuse(
                self.starts[0],
                "there is a process group, and no DistributedDataParallel: it is not known who reduces gradients",
                "wrap the model in DistributedDataParallel, or write job.steps() by hand",
            )

    def adopt(self, values: ShardValues, shard: list[ast.stmt]) -> set[str]:
        """What is left: ranks, and collectives. Returns the names that held a rank."""
        script = self._script
        calls = [node for statement in shard for node in ast.walk(statement) if isinstance(node, ast.Call)]
        in_shard = {script.function_of(call) for call in calls}
        named: set[str] = set()
        for node in ast.walk(script.tree):
            if node in self._edits.gone:
                continue
            match node:
                case ast.Name(name, ast.Store()) if self._kind_of(script.values(node)):
                    named.add(name)
                case ast.Expr(ast.Call(func) as call) if script.path(func) in (f"{_DIST}all_reduce", f"{_DIST}reduce"):
                    self._reduce(node, call, values, early=script.scope(node) in in_shard)
                case ast.expr() if kind := self.kind(node):
                    self._use(node, kind)
                case ast.Attribute() | ast.Name() if script.path(node).startswith(_DIST):
                    self._refuse_unknown(node)
                case ast.Attribute(value, "no_sync" | "join" | "register_comm_hook" as attr) if self.wraps_model(value):
                    script.refuse(node, f".{attr}() of DistributedDataParallel", _UNKNOWN.get(attr, "leave it out"))
                case ast.Constant(str(word)) if word in _VARIABLES or word.replace("-", "_") == "__local_rank":
                    if not self.kind(script.parents[node]) and not self.kind(script.parents[script.parents[node]]):
                        script.refuse(node, f"{word} is read in a way that is not known", f'int(os.environ["{word}"])')
                case ast.Call(func) if script.is_torch(func, name := script.path(func).rpartition(".")[2]):
                    if name in _CALLS:
                        script.refuse(node, *_CALLS[name])
        return named

    def _refuse_unknown(self, node: ast.expr) -> None:
        name = self._script.path(node).removeprefix(_DIST)
        parent = self._script.parents[node]
        if not isinstance(parent, ast.Attribute) and not self.kind(parent):
            self._script.refuse(
                node, f"torch.distributed.{name} is not known", _UNKNOWN.get(name.rpartition(".")[2], _ANYWAY)
            )

    def _reduce(self, statement: ast.Expr, call: ast.Call, values: ShardValues, *, early: bool) -> None:
        """A sum over the ranks is their number times what each worker has by now: the mean of all of them. early: it is
        done for each shard."""
        script = self._script
        names = ("tensor", "op") if script.path(call.func) == f"{_DIST}all_reduce" else ("tensor", "dst", "op")
        given = dict(zip(names, call.args, strict=False)) | {one.arg: one.value for one in call.keywords}
        target, how = given.get("tensor"), script.path(given["op"]).rpartition(".")[2] if "op" in given else "SUM"
        known = given.keys() <= set(names) and len(call.args) <= len(names)
        self._edits.drop(call.func, *given.values())
        if early:
            script.refuse(statement, "a collective before backward()", "move it behind backward(), or into step.log()")
        elif not known or not isinstance(target, ast.Name) or how not in ("SUM", "AVG"):
            script.refuse(statement, "only sums and averages of one tensor over all ranks are known here", _ANYWAY)
        elif not values.is_linear(target):
            script.refuse(
                statement,
                f"{target.id} is no sum of what the ranks had: made of their mean it would be something else",
                "reduce first, and work it out behind that",
            )
        elif how == "AVG":
            self._edits.delete(statement)
        else:
            begin, end = script.span(statement)
            self._edits.put(begin, end, f"{target.id} *= {self._ranks}")

    # ----------------------------------------------------------------------------------------------------- the rank

    def kind(self, node: ast.AST) -> str:
        """ "rank", "local_rank", "world", "leader": rank == 0, "follower": the others, or "": it is none of them."""
        if node not in self._kinds:
            self._kinds[node] = ""  # of what is made of itself
            self._kinds[node] = self._find_kind(node)
        return self._kinds[node]

    def _find_kind(self, node: ast.AST) -> str:
        script = self._script
        match node:
            case ast.Call(func, [], []) if script.path(func) == f"{_DIST}get_rank":
                return "rank"
            case ast.Call(func, [], []) if script.path(func) == f"{_DIST}get_world_size":
                return "world"
            case ast.Call(ast.Name("int"), [inner]):
                return self._variable(inner)
            case ast.Call():
                returned = script.returned(node)
                return "leader" if returned is not None and self.kind(returned) == "leader" else ""
            case ast.Compare(left, [op], [right]):
                sides = {self.kind(left), self.kind(right)}
                zero = any(ast.unparse(side) in ("0", "[-1, 0]", "(-1, 0)") for side in (left, right))
                if sides == {"rank", ""} and zero and isinstance(op, ast.Eq | ast.NotEq | ast.Gt | ast.In):
                    return "leader" if isinstance(op, ast.Eq | ast.In) else "follower"
            case ast.UnaryOp(ast.Not(), operand):
                return {"rank": "leader", "leader": "follower", "follower": "leader"}.get(self.kind(operand), "")
            case ast.Name(ctx=ast.Load()):
                return self._kind_of(script.values(node))
        return ""

    def _kind_of(self, values: list[ast.expr | None]) -> str:
        """The kind of a name to which the script assigns these values, if all have one; else ""."""
        kinds = {self.kind(value) if value is not None else "" for value in values}
        return kinds.pop() if len(kinds) == 1 else ""

    def _variable(self, node: ast.expr) -> str:
        """The kind of an expression that reads one of torchrun's environment variables; else ""."""
        match node:
            case ast.Subscript(value, ast.Constant(str(name))) if self._script.path(value) == "os.environ":
                return _VARIABLES.get(name, "")
            case ast.Call(func, [ast.Constant(str(name)), *_]) if self._script.path(func) in (
                "os.environ.get",
                "os.getenv",
            ):
                return _VARIABLES.get(name, "")
        return ""

    def _use(self, node: ast.expr, kind: str) -> None:
        script, edits, job = self._script, self._edits, self._job
        parent = script.parents[node]
        if isinstance(parent, ast.expr) and self.kind(parent) and not isinstance(parent, ast.Name):
            return  # the larger one is replaced
        if kind == "world":
            if not isinstance(node, ast.Name):
                edits.replace(node, str(self._ranks))
        elif kind == "local_rank":
            if not isinstance(node, ast.Name):
                edits.replace(node, f"{job}.local_rank")
        elif kind in ("leader", "follower"):
            self._lead(node, kind)
        else:
            self._rank(node)

    def _lead(self, node: ast.expr, kind: str) -> None:
        """A question whether this is rank 0."""
        script, statement = self._script, self._script.statement(node)
        if not (isinstance(node, ast.Call) and self._script.function_of(node)):
            self._edits.replace(node, f"{self._job}.is_leader" if kind == "leader" else f"not {self._job}.is_leader")
        why = "another worker may lead later, and would not have it"
        advice = "do it on every worker; for logs: job.log_to(elastic.TensorBoard(...)), job.on_lead(fn)"
        if isinstance(statement, ast.If) and node in set(ast.walk(statement.test)):
            for inner in Script.inside([*statement.body, *statement.orelse]):
                if isinstance(inner, ast.Return | ast.Break | ast.Continue):
                    script.refuse(
                        inner, "only some workers leave here, by their rank", "let all of them leave, or none"
                    )
            names, body = Script.stored([statement]), [*behind(script, statement), statement]
            for name in early(script, script.scope(statement), names, body, set()):
                script.refuse(statement, f"{name.id} is made by the leader alone: {why}", advice)
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign) and statement.value is not node:
            shown = any(
                isinstance(outer, ast.Call) and ast.unparse(outer.func).rpartition(".")[2] in PROGRESS
                for outer in script.around(node)
            )
            if not shown:
                script.refuse(node, f"what is made here depends on who leads: {why}", advice)

    def _rank(self, node: ast.expr) -> None:
        """The number itself."""
        script, edits, job = self._script, self._edits, self._job
        parent = script.parents[node]
        told = any(isinstance(one, ast.JoinedStr) for one in script.around(node))
        call = next((one for one in script.around(node) if isinstance(one, ast.Call)), None)
        if told or (call is not None and ast.unparse(call.func).rpartition(".")[2] in _TOLD):
            edits.replace(node, f"{job}.rank")
        elif self._is_kept(node) or self._is_passed_on(node, call):
            if not isinstance(node, ast.Name):
                edits.replace(node, f"{job}.rank")
        else:
            script.refuse(
                node,
                f"{ast.unparse(parent)}: something depends on the rank, and workers come and go",
                "write job.device for a device, and the same seed for all: each shard has random numbers of its own",
            )

    def _is_kept(self, node: ast.expr) -> bool:
        """Whether a name is given the rank, or a function returns it."""
        parent = self._script.parents[node]
        if isinstance(parent, ast.Tuple):
            parent = self._script.parents[parent]
        targets = parent.targets if isinstance(parent, ast.Assign) else []
        return isinstance(parent, ast.Return) or any(isinstance(one, ast.Name | ast.Tuple) for one in targets)

    def _is_passed_on(self, node: ast.expr, call: ast.Call | None) -> bool:
        """Whether it is an argument of a function in which it is known as the rank."""
        function = self._script.function_of(call) if call is not None else None
        given = [arg.arg for arg in ast.walk(function.args) if isinstance(arg, ast.arg)] if function else []
        return any(self._kind_of(self._script.values_in(function, name)) == "rank" for name in given if function)
