"""From the text of a script to that with job.steps(): what is where, what goes, and what comes in its place."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from elastic.adopt import carried_names, joining, one_process, training_loop
from elastic.adopt.batches import Batches
from elastic.adopt.edits import Edits
from elastic.adopt.leftovers import without
from elastic.adopt.loop_text import write_loops
from elastic.adopt.ranks import DistributedUse
from elastic.adopt.script import Refusal, Refused, Script
from elastic.adopt.shard_values import ShardValues

_TRAINERS = frozenset({"accelerate", "lightning", "pytorch_lightning", "deepspeed", "horovod", "fairscale", "ignite"})
"""Packages with training loops, or ranks, of their own."""


@dataclass(frozen=True, slots=True)
class Adoption:
    """text: the script as it is to be; as it was, if something is refused, or it has a job already."""

    text: str
    refusals: tuple[Refusal, ...]


def adopt(text: str, ranks: int) -> Adoption:
    """ranks: for how many processes the script was written, or into how many shards the batch of one is cut. Raises
    SyntaxError or ValueError for what is no Python."""
    script = Script(text)
    if "elastic" in script.imported():
        return Adoption(text, ())
    try:
        found = _adopted(script, ranks)
    except Refused:
        found = text
    except SyntaxError as error:
        script.refusals.add(
            Refusal(1, f"what would come out is no Python: {error}", "write it by hand, by docs/api.md")
        )
    return Adoption(text if script.refusals else found, tuple(sorted(script.refusals)))


def _adopted(script: Script, ranks: int) -> str:
    edits, job = Edits(script), script.free_name("job")
    script.check_imports()
    for path in script.imported():
        if path.partition(".")[0] in _TRAINERS:
            script.end(script.tree, f"{path} has ranks or a loop of its own", "write the loop in plain PyTorch")
    if script.free_name("elastic") != "elastic":
        script.refuse(script.tree, "there is something called elastic, as is what has to be imported", "rename it")
    loop = training_loop.find(script)
    counters = carried_names.step_counters(script, loop)
    step = "step" if "step" in counters else script.free_name("step")
    group = DistributedUse(script, edits, ranks, job)
    batches = Batches(script, edits, loop, distributed=group.distributed)
    group.unwrap()
    batches.drop_sampler()
    values = ShardValues(script, edits, loop, step, distributed=group.distributed)
    values.find()
    names = joining.to_register(script, loop, group)
    held = group.adopt(values, loop.shard)
    carried_names.count_by_step(script, edits, loop, step)
    carried_names.keep_in_state(script, edits, loop, job, {*names, *counters})
    if not group.distributed:
        one_process.check_mean(script, loop)
        one_process.leave_to_leader(script, edits, loop, job)
    batches.check_others()
    batches.write(ranks, job)
    log, remade = values.write()
    write_loops(script, edits, loop, job, step, log, remade)
    joining.write_register(edits, loop, job, names)
    joining.write_join(script, edits, loop, group, job)
    return script.text if script.refusals else without(edits.render(), script, held)


def diff(name: str, before: str, after: str) -> str:
    """Unified, as patch(1) takes it."""
    old, new = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in (before, after))
    lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
