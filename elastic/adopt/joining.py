"""elastic.join() and job.register(): where they stand, and what is registered."""

from __future__ import annotations

import ast

from elastic.adopt.edits import Edits
from elastic.adopt.ranks import DistributedUse
from elastic.adopt.script import Script
from elastic.adopt.training_loop import TrainingLoop, is_main

_SEEDS = frozenset({"manual_seed", "manual_seed_all", "seed", "set_seed", "seed_everything"})
"""Imported functions of these names seed."""
_ACTING = frozenset({"step", "zero_grad", "update_parameters"})
"""Methods of optimizers, schedulers, scalers and averages of the weights."""


def to_register(script: Script, loop: TrainingLoop, group: DistributedUse) -> list[str]:
    """Models, and what acts in the loops; as they are called where the epochs are."""
    made = {(script.scope(name), name.id) for name in script.names if group.wraps_model(name)}
    acting, scalers = [], set()
    for node in ast.walk(script.tree):
        match node:
            case ast.Call(ast.Attribute(ast.Name() as name, "parameters" | "named_parameters")):
                made.add((script.scope(name), name.id))
            case ast.Call(ast.Attribute(ast.Name(name), "scale")):
                scalers.add(name)
    for root in {loop.epochs or loop.batches, loop.batches}:
        for node in ast.walk(root):
            match node:
                case ast.Expr(ast.Call(ast.Attribute(ast.Name() as name, attr), arguments)) if attr in _ACTING:
                    acting += [name, *(one for one in arguments if name.id in scalers and isinstance(one, ast.Name))]
                case ast.Expr(ast.Call(ast.Attribute(value, attr))) if attr in _ACTING:
                    script.refuse(node, f"{ast.unparse(value)} has no name of its own", "give it one, to register it")
    scopes = (loop.scope, loop.outer, script.tree)
    models = [name for name in script.names if script.scope(name) in scopes and _is_one_of(script, name, made)]
    if not models:
        script.refuse(
            loop.batches, "it is not seen which is the model", "make the model and the optimizer beside the loop"
        )
    found = {script.lifted(name, loop.outer): None for name in (*models, *sorted(acting, key=lambda one: one.lineno))}
    names = {name.id: name for name in found if name is not None}
    for name in [name for name in names.values() if group.wraps_model(name)]:
        for made_of in script.values(name):
            inside = {one.id for one in ast.walk(made_of or name) if isinstance(one, ast.Name)}
            names = {each: one for each, one in names.items() if each == name.id or each not in inside}
    return list(names)


def _is_one_of(script: Script, name: ast.Name, made: set[tuple[ast.AST, str]], calls: int = 8) -> bool:
    """Whether the name has, by itself or as a parameter, the value of one of these."""
    if (script.scope(name), name.id) in made:
        return True
    values = script.values(name) if calls else []
    return any(isinstance(value, ast.Name) and _is_one_of(script, value, made, calls - 1) for value in values)


def write_register(edits: Edits, loop: TrainingLoop, job: str, names: list[str]) -> None:
    """In front of the loops."""
    objects = ", ".join(f"{name}={name}" for name in names)
    edits.before(loop.epochs if loop.epochs is not None else loop.batches, f"{job}.register({objects})")


def write_join(script: Script, edits: Edits, loop: TrainingLoop, group: DistributedUse, job: str) -> None:
    """In the place of the process group, or at the beginning: before anything needs the job, and before the script
    seeds, because join() seeds too. Raises Refused."""
    for other in group.starts[1:]:
        script.refuse(other, "there is a second process group", "start one")
    at = script.statement(group.starts[0]) if group.starts else loop.epochs if loop.epochs is not None else loop.batches
    body, scope = script.block(at), script.scope(at)
    uses = [script.innermost(line) for line in edits.places_of(f"{job}.")]
    calls = [node for node in ast.walk(script.tree) if isinstance(node, ast.Call)]
    seeds = [script.statement(call) for call in calls if _seeds(script, call, scope)]
    mine = [node for node in (*uses, *seeds) if script.scope(node) is scope]
    while not (group.starts or (_is_outermost(script, body) and all(_is_in(script, node, body) for node in mine))):
        body = script.block(script.statement(script.parents[body[0]]))
    if not _is_outermost(script, body):
        script.end(at, "the process group is started under a condition", "take it out of there")
    place = at if group.starts else _behind_arguments(body)
    for needs in (*uses, *seeds):
        around = [one for one in body if needs is one or one in (*script.around(needs),)]
        if script.scope(needs) is scope and around and around[0].lineno < place.lineno:
            place = around[0]
    for node in (*uses, *seeds):
        owner = script.scope(node)
        late = any(
            one.lineno > node.lineno for one in calls if script.scope(one) is owner and script.function_of(one) is scope
        )
        if owner is not scope and (late or isinstance(owner, ast.Module)):
            script.refuse(
                node, "this needs the job, or seeds, before elastic.join() does", f"move it behind line {at.lineno}"
            )
    others = any(script.scope(node) is not scope for node in uses)
    lines = [
        *([f"global {job}"] if others and not isinstance(scope, ast.Module) else []),
        f"{job} = elastic.join(seed=0)",
    ]
    if place is at and group.starts:
        edits.instead(at, *lines)
    else:
        edits.before(place, *lines)
        if group.starts:
            edits.delete(at)
    imports = [one for one in script.tree.body if _imports_torch(one)]
    if not imports:
        script.end(script.tree, "torch is not imported at the top of the script", "import it there")
    edits.before(imports[0], "import elastic")


def _is_outermost(script: Script, body: list[ast.stmt]) -> bool:
    """Whether this is all of a function or of the script, or of its `if __name__`."""
    parent = script.parents[body[0]]
    return isinstance(parent, ast.Module | ast.FunctionDef) or is_main(parent)


def _is_in(script: Script, node: ast.stmt, body: list[ast.stmt]) -> bool:
    return any(one is node or one in script.around(node) for one in body)


def _behind_arguments(body: list[ast.stmt]) -> ast.stmt:
    """The first statement behind the reading of arguments that is no import and no definition."""
    plain = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    parsed = [n for n, one in enumerate(body) if not isinstance(one, plain) and "parse_args(" in ast.unparse(one)]
    rest = [one for one in body[max(parsed, default=-1) + 1 :] if not isinstance(one, plain)]
    return next(one for one in rest if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)))


def _seeds(script: Script, call: ast.Call, join: ast.AST) -> bool:
    """Whether it seeds, itself or as a function of the script. join: where the job is joined; who calls that does not
    count."""
    function = script.function_of(call)
    inner = [node for node in ast.walk(function or call) if isinstance(node, ast.Call)]
    if function is join or any(script.function_of(one) is join for one in inner if function is not None):
        return False
    return any(script.path(one.func).rpartition(".")[2] in _SEEDS for one in inner)


def _imports_torch(node: ast.stmt) -> bool:
    match node:
        case ast.Import(names):
            return any(alias.name.partition(".")[0] == "torch" for alias in names)
        case ast.ImportFrom(module=str(module)):
            return module.partition(".")[0] == "torch"
    return False
