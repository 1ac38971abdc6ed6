"""The backend "elastic" of torch.distributed: a process group of all logical ranks, in which this worker is one."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, _create_work_from_future  # type: ignore[attr-defined, unused-ignore]
from torch.distributed import distributed_c10d

from elastic.errors import ConfigError
from runtime.frontends.ddp import collectives, mistakes, rank_values
from runtime.frontends.ddp.rank_script import RankScript, Turn
from runtime.frontends.ddp.rank_values import RankValue
from runtime.frontends.ddp.seams import Seams

NAME = "elastic"
_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.PRODUCT: "product",
}
REFUSED = (
    "_reduce_scatter_base",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "recv",
    "recv_anysource",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
"""What one rank alone sends or gets: the worker that computes it now need not be the one that has the data."""


class LiveRank(int):
    """A rank whose comparison with 0 is answered at the time of the comparison: true on the present leader, false in
    every silent turn. In all other respects it is the rank with which this worker began."""

    def __eq__(self, other: object) -> bool:
        script = RankScript.current()
        if script is None or not isinstance(other, int):
            return int.__eq__(self, other)
        script.asked_for_rank_0 |= int(other) == 0
        return script.rank_now == int(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return self != 0

    __hash__ = int.__hash__

    def __copy__(self) -> LiveRank:
        return self

    def __deepcopy__(self, memo: Any) -> LiveRank:
        return self

    def __reduce__(self) -> Any:
        """What is sent or saved is a number."""
        return int, (int(self),)


class RankGroup(dist.ProcessGroup):
    """All logical ranks. Made by `init_process_group` and by `new_group` without ranks=.

    torch calls these methods in one of several forms; the form without options of its own is not called by it.
    """

    def __init__(self, script: RankScript) -> None:
        super().__init__(script.home, script.ranks)  # type: ignore[call-arg, unused-ignore]  # torch 2.13's stubs lack it
        self._script = script
        self.asked_for = NAME
        """The backend that the script has asked for, which dist.get_backend() gives."""

    def getBackendName(self) -> str:
        return NAME

    def rank(self) -> int:
        return LiveRank(self._script.home)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        op = _op(opts)
        for tensor in tensors:
            values = collectives.exchange(self._script, f"dist.all_reduce({op})", tensor)
            tensor.copy_(self._reduced(values, op))
        return _done(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """The sum goes to every rank, as the root may be computed by any worker."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        if opts is not None and opts.rootRank != 0:
            raise mistakes.not_in_place(f"dist.broadcast from rank {opts.rootRank}", "Broadcast from rank 0.")
        for tensor in tensors:
            tensor.copy_(_leaders(self._script, "dist.broadcast", tensor))
        return _done(tensors)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        for rows, tensor in zip(outputs, inputs, strict=True):
            for row, value in zip(rows, self._by_rank("dist.all_gather", tensor), strict=True):
                row.copy_(value)
        return _done(outputs)

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        rows = self._by_rank("dist.all_gather_into_tensor", tensor)
        output.copy_(torch.cat([row.reshape(-1) for row in rows]).view_as(output))
        return _done([output])

    all_gather_single = _allgather_base  # type: ignore[assignment]  # as the others: any work will do

    def gather(  # type: ignore[override]
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        for number, tensor in enumerate(inputs):
            found = self._by_rank("dist.gather", tensor)
            for row, value in zip(outputs[number] if outputs else [], found, strict=False):
                row.copy_(value)
        return _done(outputs)

    def barrier(self, opts: Any = None) -> Any:
        collectives.exchange(self._script, "dist.barrier", torch.zeros(()))
        return _done([])

    def objects(self, call: str, thing: object) -> list[Any]:
        """What each rank brings. torch would first tell the sizes, which in a silent turn are those of the step
        before."""
        return [as_object(row) for row in self._by_rank(call, as_tensor(thing), "an object")]

    def _by_rank(self, call: str, tensor: torch.Tensor, kind: str = "") -> list[torch.Tensor]:
        one_rank_each = self._script.training.session.world_size == self._script.ranks
        if self._script.evaluations.collected and (
            not one_rank_each or tensor.data_ptr() in self._script.evaluations.summed
        ):
            raise mistakes.not_in_place(
                f"{call} of what an evaluation has collected", "Add up, and use dist.all_reduce."
            )
        values = collectives.exchange(self._script, call, tensor, kind=kind)
        if self._script.turn is not Turn.ENDED:
            values = rank_values.stood_in(values, self._script.ranks)
        try:
            return rank_values.by_rank(values, self._script.ranks)
        except ValueError as why:
            raise mistakes.not_in_place(f"{call} here ({why})", "Use dist.all_reduce.") from why

    def _reduced(self, values: list[RankValue], op: str) -> torch.Tensor:
        if gone := rank_values.lost(values, self._script.ranks):
            print(f"elastic: ranks {gone} were lost in dist.all_reduce({op}): it is that of the others", flush=True)
        return rank_values.reduce(values, op, self._script.ranks)


def _leaders(script: RankScript, call: str, value: torch.Tensor, kind: str = "") -> torch.Tensor:
    """What rank 0 broadcasts. A script that has asked, since backward(), whether it is rank 0 has given the value to
    the leader alone, in its last turn; else each turn has one, and that of rank 0 counts."""
    by_leader = bool(kind) or script.turn is not Turn.ENDED or script.asked_for_rank_0
    values = collectives.exchange(script, call, value, kind=kind, by_leader=by_leader)
    first = next(entry for entry in values if entry.ranks)
    if 0 not in first.ranks:
        print(f"elastic: rank 0 was lost in {call}: it is that of the next worker", flush=True)
    return first.value


def as_tensor(thing: object) -> torch.Tensor:
    """The pickle that torch makes of an object when it sends one."""
    made: torch.Tensor = distributed_c10d._object_to_tensor(thing, torch.device("cpu"), None)[0]
    return made


def as_object(value: torch.Tensor) -> Any:
    """The object of `as_tensor`."""
    return distributed_c10d._tensor_to_object(value, value.numel(), None)


def _refused(name: str) -> Any:
    def refuse(self: RankGroup, *args: Any, **kwargs: Any) -> Any:
        raise mistakes.not_in_place(f"dist.{name.strip('_')}", "Use all_reduce, all_gather, or broadcast from rank 0.")

    return refuse


for _name in REFUSED:
    setattr(RankGroup, _name, _refused(_name))


def _op(opts: Any) -> str:
    if opts is None:
        return "sum"
    found = next((name for op, name in _OPS.items() if opts.reduceOp == op), None)
    if found is None:
        raise mistakes.not_in_place(f"the reduction {opts.reduceOp}", "Use SUM, AVG, MAX, MIN or PRODUCT.")
    return found


def _done(result: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> RankGroup:
    script = RankScript.running()
    if size != script.ranks:
        raise mistakes.not_in_place(f"a group of {size} of {script.ranks} ranks", "Use the whole world.")
    return RankGroup(script)


def install(seams: Seams) -> None:
    """init_process_group, whatever its backend, makes the group of all logical ranks."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])
    for module in (dist, distributed_c10d):
        seams.wrap(module, "init_process_group", _init)
        seams.wrap(module, "new_group", _new_group)
        seams.wrap(module, "destroy_process_group", _destroy)
        seams.wrap(module, "monitored_barrier", _monitored_barrier)
        seams.wrap(module, "all_gather_object", _all_gather_object)
        seams.wrap(module, "gather", _gather)
        seams.wrap(module, "gather_object", _gather_object)
        seams.wrap(module, "broadcast_object_list", _broadcast_object_list)
    # torch itself asks distributed_c10d for the backend that is there.
    seams.wrap(dist, "get_backend", _get_backend)


def _init(
    script: RankScript,
    original: Any,
    backend: Any = None,
    init_method: Any = None,
    timeout: Any = None,
    world_size: int = -1,
    rank: int = -1,
    *,
    device_id: Any = None,
    **_: Any,
) -> None:
    if world_size not in (-1, script.ranks):
        raise ConfigError(
            f"init_process_group(world_size={world_size}), and the job has {script.ranks} ranks: start the script "
            f"with --ranks {world_size}"
        )
    original(NAME, store=HashStore(), rank=script.home, world_size=script.ranks)
    if backend is None and device_id is not None:
        backend = dist.Backend.default_device_backend_map.get(torch.device(device_id).type)
    _group(None).asked_for = dist.Backend(backend or dist.Backend.UNDEFINED)


def _new_group(
    script: RankScript,
    original: Any,
    ranks: Any = None,
    timeout: Any = None,
    backend: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if ranks is not None and sorted(ranks) != list(range(script.ranks)):
        raise mistakes.not_in_place(f"a group of the ranks {sorted(ranks)}", "Use the whole world.")
    group = original(None, timeout, NAME, *args, **kwargs)
    group.asked_for = dist.Backend(backend) if backend else _group(None).asked_for
    return group


def _get_backend(script: RankScript, original: Any, group: Any = None) -> Any:
    """A script chooses the device of what it sends by this name: with gloo the CPU, else often CUDA."""
    original(group)  # raises what it has to raise
    return _group(group).asked_for


def _destroy(script: RankScript, original: Any, group: Any = None) -> None:
    if group is None and sys.exception() is None:  # else the script has failed, or the job is stopped: no end to check
        script.leave()
    original(group)


def _all_gather_object(script: RankScript, original: Any, object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = _group(group).objects("dist.all_gather_object", obj)


def _gather(
    script: RankScript,
    original: Any,
    tensor: torch.Tensor,
    gather_list: Any = None,
    dst: Any = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: Any = None,
) -> Any:
    """torch's own wants a list of one rank alone, and compares with the rank of this moment: a script that has its rank
    from its environment brings a list in a silent turn, and none where another worker answers for rank 0."""
    work = _group(group).gather([gather_list] if gather_list else [], [tensor])
    return work if async_op else None


def _gather_object(
    script: RankScript, original: Any, obj: Any, object_gather_list: Any = None, *args: Any, **kwargs: Any
) -> None:
    found = _group(kwargs.get("group")).objects("dist.gather_object", obj)
    if object_gather_list:
        object_gather_list[:] = found


def _broadcast_object_list(
    script: RankScript, original: Any, object_list: list[Any], src: Any = None, *args: Any, **kwargs: Any
) -> None:
    if src or kwargs.get("group_src"):  # torch's own comes to `broadcast`, which refuses
        original(object_list, src, *args, **kwargs)
        return
    object_list[:] = as_object(_leaders(script, "dist.broadcast_object_list", as_tensor(object_list), "objects"))


def _group(group: Any) -> RankGroup:
    return cast(RankGroup, group or dist.group.WORLD)


def _monitored_barrier(script: RankScript, original: Any, group: Any = None, *args: Any, **kwargs: Any) -> None:
    dist.barrier(group)
