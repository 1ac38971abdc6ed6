"""Whether all ranks have made the same call, as they say it to each other. Pure.

Ranks of torch.distributed that are in different collectives wait for each other for ever, or take bytes of one
thing for another. So each says first what it is about to do: JSON, which is checked as all that comes from a network.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

from runtime.frontends.horovod.arithmetic import ReduceOp
from runtime.frontends.horovod.interrupts import CallsDiffer
from runtime.frontends.horovod.world import Call

JOIN = Call("join")
"""What a rank says that has no more data."""

MAY_BE_JOINED = frozenset({"allreduce", "grouped_allreduce", "barrier"})
"""Calls that go on without the ranks that have joined, as in Horovod: these bring zeros."""


def said(call: Call) -> bytes:
    """What a rank says."""
    fields = asdict(replace(call, group=None))
    del fields["group"]
    return json.dumps(fields).encode()


def heard(message: bytes) -> Call:
    """What another rank has said. Raises CallsDiffer for anything else."""
    try:
        fields = json.loads(message)
        tensors = tuple((str(dtype), tuple(int(size) for size in shape)) for dtype, shape in fields.pop("tensors"))
        op = fields.pop("op")
        return Call(**fields, op=None if op is None else ReduceOp(op), tensors=tensors)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CallsDiffer(f"a rank sent something that is no collective: {message[:60]!r}") from error


def agreed(calls: Sequence[Call]) -> Call:
    """The call that all ranks make, but for those that have joined; JOIN if all have. calls: of each rank. Raises
    CallsDiffer."""
    going = {rank: call for rank, call in enumerate(calls) if call != JOIN}
    if not going:
        return JOIN
    found = next(iter(going.values()))
    if any(call != found for call in going.values()):
        told = "; ".join(f"rank {rank}: {call.text}" for rank, call in enumerate(calls))
        raise CallsDiffer(
            f"the ranks are in different collectives ({told}). All ranks have to make the same calls in one order, "
            "with tensors of one shape and dtype: not under `if hvd.rank() == 0`"
        )
    if len(going) < len(calls) and found.kind not in MAY_BE_JOINED:
        joined = sorted(set(range(len(calls))) - going.keys())
        raise CallsDiffer(f"{found.text}: ranks {joined} have called hvd.join(), and only an allreduce goes on then")
    return found
