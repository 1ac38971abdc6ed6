"""torch.distributed's collectives, of logical ranks.

Before the training loop a collective is what all workers have in common: a newcomer gets what it gave. Between a batch
and its backward() there is none. Behind backward() each turn brings the value of its rank, and the last turn has the
result; a silent turn is given the result of the step before, so that a loop which goes on by a result goes on.
Elsewhere each of a worker's ranks has the worker's value.
"""

from __future__ import annotations

from typing import cast

import torch

from runtime.allreduce.reduction.partial_sum import Json
from runtime.frontends.ddp import mistakes
from runtime.frontends.ddp.rank_script import RankScript, Turn
from runtime.frontends.ddp.rank_values import RankValue
from runtime.loop.training import empty_leaf
from runtime.recovery.state import small_values
from runtime.session import OpKind

REMEMBERED_MAX = 64
"""Bytes of a value that is kept for those who pass by its epoch later."""


def exchange(
    script: RankScript, call: str, value: torch.Tensor, *, kind: str = "", by_leader: bool = False
) -> list[RankValue]:
    """What all workers bring to this call. In a turn of which nothing stays: what they brought in the step before, or,
    in the first step, as if each rank had this worker's value.

    call: as the script spells it. value: up to 64 KiB. kind: of a value whose size differs between ranks, what it is.
    by_leader: each worker brings one value, under its own rank in the job, not under those that it computes. Raises
    MidShardCollective, ConfigError for a large value.
    """
    if (loop := script.evaluations.loop) is not None:
        return loop.exchange(call, value)
    label = f"{call} of {kind or small_values.described(value)}"
    mine = [RankValue((script.job.rank,), value)]
    if not script.begun:
        own = _packed(mine if by_leader else [RankValue(_owned(script), value)], call)
        name = f"{script.calls.next_number()} {label}"
        note = script.training.calls.shared(name, empty_leaf, lambda result: result.note, OpKind.ALLREDUCE, own)
        return _unpacked(note, value.device)
    if script.training.calls.leaders is not None and call == "dist.barrier":
        return alone(script, value)  # a framework's own call in what the leader alone does
    if script.between:
        raise mistakes.in_turn(call, script.turn)
    if script.evaluations.running:
        raise mistakes.in_evaluation(call)
    occasion = script.occasion(label)
    if script.passing or script.training.at.joining:
        told = script.training.replies.shared.get(occasion)
        return alone(script, value) if told is None else _unpacked(told, value.device)
    number = script.calls.next_number()
    if script.turn is Turn.ENDED and (rank := script.turned[-1]) is not None:
        script.calls.brought.setdefault(number, {})[rank] = value.detach().clone()
    if script.silent:
        call_before, values = script.calls.results.get(number, ("", []))
        return values if call_before == label else alone(script, value)
    own = _packed(mine if by_leader else _brought(script, number, value), call)
    note = script.training.calls.collective(OpKind.ALLREDUCE, label, 1, empty_leaf, lambda result: result.note, own)
    values = _unpacked(note, value.device)
    if value.numel() * value.element_size() <= REMEMBERED_MAX and call != "dist.barrier":
        script.training.replies.remember(occasion, note)
    if script.turn is Turn.ENDED:
        script.calls.results[number] = (label, values)
    return values


def alone(script: RankScript, value: torch.Tensor) -> list[RankValue]:
    """Each rank has this value."""
    return [RankValue(tuple(range(script.ranks)), value.detach().clone())]


def _owned(script: RankScript) -> tuple[int, ...]:
    return script.training.session.owned(script.ranks) or ()


def _brought(script: RankScript, number: int, value: torch.Tensor) -> list[RankValue]:
    """What this worker brings to the n-th collective of a turn that is not silent, or outside of the training loop."""
    if script.turn is Turn.ENDED and not script.evaluations.collected:
        turned = [rank for rank in script.turned if rank is not None]
        rows = script.calls.brought.get(number, {})
        if rows.keys() == set(turned):
            return [RankValue((rank,), rows[rank]) for rank in sorted(rows)]
        return [RankValue(tuple(sorted(turned)), value)]
    return [RankValue(_owned(script), value)]


def _packed(values: list[RankValue], call: str) -> Json:
    document = [[list(entry.ranks), entry.value.detach()] for entry in values if entry.ranks]
    return small_values.pack(document, call)


def _unpacked(note: Json, device: torch.device) -> list[RankValue]:
    """The values of all workers, in rank order."""
    found = [
        RankValue(tuple(ranks), value)
        for own in cast(dict[str, dict[str, Json]], note).values()
        for ranks, value in small_values.unpack(own, lambda _: device)
    ]
    return sorted(found, key=lambda entry: entry.ranks)
