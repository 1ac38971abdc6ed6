"""Gradients of sharded models (FSDP2) with the same bits in any world.

A step has a fixed number of *units*, which are dealt to the ranks in turns. FSDP sums the gradients of all ranks after
each of them; here it sums integers, multiples of 2**-SCALE, whose sum is the same in any order. They stay here until
the last turn of the step: FSDP gets zeros before it, and the sum of all units then, so that the loop of the script is
as it was. Where the units are not a multiple of the ranks, some ranks compute a unit that does not count in the last
turn, because all ranks have to take part in each sum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad

from elastic.errors import ConfigError, UsageError
from runtime import torch_names
from runtime.allreduce.fixed_point.conversion import NONFINITE, NOTHING, decode, encode

SCALE = 48
"""A gradient that is summed is a multiple of 2**-48 (4e-15)."""
BITS = 61
"""Below 2**61 a sum of int64 has room for the sign, and for rounding."""


NOT_BY_ELEMENTS = ("Adafactor", "LBFGS", "Muon")
"""Optimizers of torch that sum over the elements of a parameter, or of several."""

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Its name of torch 2.13, or the older one."""


@dataclass(frozen=True, slots=True)
class DealtUnit:
    """A unit that a rank computes in a turn. idle: another rank computes it, and here it does not count."""

    index: int
    idle: bool


def dealt(units: int, rank: int, world: int) -> tuple[DealtUnit, ...]:
    """The units of a rank, one for each turn of a step."""
    turns = -(-units // world)
    places = (turn * world + rank for turn in range(turns))
    return tuple(DealtUnit(min(place, units - 1), place >= units) for place in places)


@dataclass(frozen=True, slots=True)
class UnitRanks:
    """Whom units are dealt to. rank, world: of this process among those that compute different units. parallel: so many
    ranks compute each unit together, by tensor parallelism."""

    rank: int
    world: int
    parallel: int = 1

    @classmethod
    def of(cls, objects: Mapping[str, Any], rank: int, world: int) -> UnitRanks:
        """rank, world: of the process group."""
        models = (one for one in objects.values() if isinstance(one, torch.nn.Module))
        for parameter in (parameter for model in models for parameter in model.parameters()):
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None and _is_parallel(parameter) and mesh.size() == world:
                return cls(mesh.get_local_rank(0), mesh.size(0), mesh.size(1))
        return cls(rank, world)


def _is_parallel(parameter: Any) -> bool:
    """Whether the second dimension of its mesh is of tensor parallelism, and the first one of shards of FSDP2."""
    return parameter.device_mesh.ndim == 2 and not parameter.placements[0].is_replicate()


@dataclass(slots=True)
class UnitTurn:
    """The turn in progress, of all sums of a step. number: 0: none is."""

    number: int = 0
    idle: bool = False
    last: bool = False


@dataclass(slots=True)
class UnitSums:
    """The sums of one FSDP module: it takes the place of its reduce-scatter. units: of a step. replicas: the processes
    that have the same shard as this one; None: no other one has. leads: it is the first of them. FSDP sums what the
    replicas have as floats: the first one gives it the sum of all, and the others zeros.
    """

    name: str
    units: int
    turn: UnitTurn
    replicas: Any = None
    leads: bool = True
    _total: Tensor | None = None
    """int64: what the turns of this step have given, and at the end how many units cannot be summed."""
    _turns: list[int] = field(default_factory=list)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As torch's own."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: object, async_op: bool = False
    ) -> None:
        """Of several ranks."""
        ints = self._integers(input_tensor, output_tensor.numel())
        mine = torch.empty(output_tensor.numel() + 1, dtype=torch.int64, device=ints.device)
        _reduce_scatter(mine, ints, group=group)
        if self.replicas is not None:
            dist.all_reduce(mine, group=self.replicas)
        self._take(mine, output_tensor)
        if self.turn.last and not self.leads and not bool(output_tensor.isnan().any()):
            output_tensor.zero_()

    def hook(self, reduce_output: Tensor) -> None:
        """Of a single rank, which FSDP gives no reduce-scatter."""
        self._take(self._integers(reduce_output, reduce_output.numel()), reduce_output)

    def begin(self) -> None:
        """Begin a step; one that was left by an exception leaves nothing."""
        self._total = None
        self._turns.clear()

    def check(self, turns: int) -> None:
        """Raise UsageError unless the step had a sum in each turn, or in none."""
        if self._turns and len(self._turns) != turns:
            raise UsageError(
                f"the gradients of {self.name} came in turns {self._turns} of the {turns} of this step, and exact sums "
                "need all of them: leave out set_requires_gradient_sync(False), and let each unit use all parameters"
            )

    def _integers(self, values: Tensor, share: int) -> Tensor:
        """The gradients as integers: for each rank its share, and behind it whether they cannot be summed."""
        turn = self.turn
        if turn.number == 0 or turn.number in self._turns:
            raise UsageError(
                f"backward() gave gradients of {self.name} "
                + ("twice in a unit" if turn.number else "outside `for unit in kept.units()`")
                + "; exact sums take one backward() for each unit"
            )
        self._turns.append(turn.number)
        ranks = values.numel() // share if share else 1
        ints = torch.zeros(ranks * (share + 1), dtype=torch.int64, device=values.device)
        if turn.idle or not share:
            return ints
        exponent = torch.tensor([SCALE], dtype=torch.int16, device=values.device)
        exact = values if values.dtype in (torch.float32, torch.float64) else values.float()
        tops = [
            encode(exact[rank * share :][:share], exponent, share, ints[rank * (share + 1) :][:share])
            for rank in range(ranks)
        ]
        top = int(torch.cat(tops).max())
        if top == NONFINITE or (top != NOTHING and top + SCALE + math.ceil(math.log2(self.units)) > BITS):
            ints.zero_()
            ints[share :: share + 1] = 1
        return ints

    def _take(self, ints: Tensor, into: Tensor) -> None:
        self._total = ints if self._total is None else self._total.add_(ints)
        if not self.turn.last:
            into.zero_()
            return
        total, self._total = self._total, None
        if int(total[-1]):
            into.fill_(math.nan)
        elif into.numel():
            exponent = torch.tensor([SCALE], dtype=torch.int16, device=total.device)
            found = (
                into if into.dtype in (torch.float32, torch.float64) else torch.empty_like(into, dtype=torch.float32)
            )
            decode(total[:-1], exponent, into.numel(), found)
            into.copy_(found)


class ExactUnits:
    """The units of a script, and the sums of all its FSDP modules."""

    def __init__(self, objects: dict[str, Any], units: int) -> None:
        """Raises ConfigError for what would not have the same bits in any world."""
        if isinstance(units, bool) or not isinstance(units, int) or not 1 <= units <= 1 << 12:
            raise ConfigError(f"elastic.keep: units={units!r} must be an integer from 1 to 4096")
        for name, one in objects.items():
            if isinstance(one, torch.optim.Optimizer) and any(group.get("fused") for group in one.param_groups):
                raise ConfigError(
                    f"elastic.keep: {name} has fused=True, whose results depend on how its parameters are sharded; "
                    "with units= give it foreach=True, or neither"
                )
            if kind := next((kind.__name__ for kind in type(one).__mro__ if kind.__name__ in NOT_BY_ELEMENTS), ""):
                raise ConfigError(
                    f"elastic.keep: {name} is {kind}, which does not compute each element of a parameter for itself: "
                    "its results depend on how parameters are sharded; with units= take SGD or Adam"
                )
        _refuse_norm_of_floats()
        ready = dist.is_available() and dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)
        ranks = UnitRanks.of(objects, rank, world)
        self._turn = UnitTurn()
        self._dealt = dealt(units, ranks.rank, ranks.world)
        self._sums = list(_placed(objects, units, self._turn, ranks))
        self._state = {"units": units, "tensor_parallel": ranks.parallel}
        if not self._sums:
            raise ConfigError(
                "elastic.keep: units= is for models of FSDP2, and none of the objects has a module with fully_shard()"
            )

    def state_dict(self) -> dict[str, int]:
        """What the bits depend on, so it has to be the same in all rounds."""
        return self._state

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """It was compared already, before anything was loaded."""

    @property
    def idle(self) -> bool:
        """Whether the unit in progress does not count, as another rank computes it, too."""
        return self._turn.number > 0 and self._turn.idle

    def turns(self, begin: Callable[[int], object]) -> Iterator[int]:
        """The units of this rank in one step. begin: is called with each before it is handed out."""
        for sums in self._sums:
            sums.begin()
        try:
            for number, unit in enumerate(self._dealt, 1):
                self._turn.number, self._turn.idle = number, unit.idle
                self._turn.last = number == len(self._dealt)
                begin(unit.index)
                yield unit.index
        finally:
            self._turn.number = 0
        for sums in self._sums:
            sums.check(len(self._dealt))


def _placed(objects: dict[str, Any], units: int, turn: UnitTurn, ranks: UnitRanks) -> Iterator[UnitSums]:
    """The sums of each FSDP module, put into the place of its own."""
    from torch.distributed.fsdp import FSDPModule

    for name, one in objects.items():
        modules = list(one.named_modules()) if isinstance(one, torch.nn.Module) else []
        _check_all_of_fsdp(name, one, [found for _, found in modules if isinstance(found, FSDPModule)])
        for path, found in modules:
            if isinstance(found, FSDPModule):
                module: Any = found  # also a Module, and it takes whatever is called like torch's own
                where = f"{name}.{path}".rstrip(".")
                _check_mesh(where, module, ranks)
                sums = UnitSums(where, units, turn, *_replicas_of(module))
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                if ranks.world > 1:
                    module.set_custom_reduce_scatter(sums)
                else:
                    module.set_all_reduce_hook(sums.hook)
                yield sums


@functools.cache
def _refuse_norm_of_floats() -> None:
    """Have torch's clip_grad_norm_ raise UsageError for sharded gradients, also where a script has imported it before:
    its norm is a sum of floats, whose order depends on the world. Once in a process."""
    torch_names.check(torch_names.OF_SHARDS)
    original = clip_grad._get_total_norm

    @functools.wraps(original)
    def norm(tensors: Any, *rest: Any, **options: Any) -> Tensor:
        gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if any(hasattr(gradient, "to_local") for gradient in gradients):
            raise UsageError(
                "torch.nn.utils.clip_grad_norm_ sums floats, in an order that depends on the number of ranks; with "
                "elastic.keep(..., units=N) write kept.clip_norm(limit)"
            )
        return original(gradients, *rest, **options)

    clip_grad._get_total_norm = norm


def _check_all_of_fsdp(name: str, one: Any, modules: Sequence[Any]) -> None:
    """Raise ConfigError for a parameter that is sharded by something else."""
    summed = {id(parameter) for module in modules for parameter in module.parameters()}
    for path, parameter in one.named_parameters() if isinstance(one, torch.nn.Module) else ():
        if hasattr(parameter, "device_mesh") and id(parameter) not in summed:
            raise ConfigError(
                f"elastic.keep: {name}.{path} is sharded without fully_shard(), as by tensor parallelism, whose sums "
                "are of floats; leave units out"
            )


def _check_mesh(name: str, module: torch.nn.Module, ranks: UnitRanks) -> None:
    """Raise ConfigError where units would not be dealt to all ranks that sum."""
    parameters: list[Any] = list(module.parameters())
    for parameter in parameters:
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None or (mesh.ndim == 1 and mesh.size() == ranks.world):
            continue
        if mesh.ndim == 2 and _is_parallel(parameter):
            sums = (mesh.size(0), mesh.size(1)) == (ranks.world, ranks.parallel)
        else:
            sums = mesh.ndim == 2 and ranks.parallel == 1 and mesh.size() == ranks.world
            sums = sums and (mesh.size(1) > 1 or ranks.world == 1)
        if not sums:
            raise ConfigError(
                f"elastic.keep: {name} is sharded over {mesh}, and units= needs fully_shard() over all "
                f"{ranks.world * ranks.parallel} ranks in one dimension, or in two: replicas and then 2 shards at "
                "least, or shards and then tensor parallelism, the same of all modules; leave units out"
            )


def _replicas_of(module: torch.nn.Module) -> tuple[Any, bool]:
    """Of UnitSums: replicas, leads."""
    mesh = next((p.device_mesh for p in module.parameters() if hasattr(p, "device_mesh") and not _is_parallel(p)), None)
    if mesh is None or mesh.ndim == 1 or mesh.size() == 1:
        return None, True
    return mesh.get_group(0), mesh.get_local_rank(0) == 0


@torch.no_grad()
def clip_norm(parameters: Iterable[Tensor], limit: float) -> float:
    """Scale the gradients so that their norm is at most that; returns the norm. The same bits in any world. What the
    ranks of tensor parallelism have alike counts once.

    The square of a float32 is exact in float64. It is cut into two integers below the largest of all squares, whose
    sums are the same in any order. Infinities and NaN make all gradients NaN, on all ranks.
    """
    shards: list[Any] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not all(hasattr(shard, "to_local") for shard in shards):
        raise ConfigError("clip_norm is for parameters of FSDP2, and a gradient is no DTensor")
    if not shards:
        return 0.0
    local = [shard.to_local() for shard in shards]
    one: Any = max(shards, key=lambda shard: shard.device_mesh.ndim)
    mesh, parallel = one.device_mesh, _is_parallel(one)
    if mesh.ndim > 2:
        raise ConfigError(f"clip_norm is for shards in one dimension, or two with units=, and this is {mesh}")
    groups = [mesh.get_group(0), mesh.get_group(1)] if parallel else [mesh.get_group(mesh.ndim - 1)]
    first = not parallel or mesh.get_local_rank(1) == 0
    squares = [
        each.double().square_()
        for shard, each in zip(shards, local, strict=True)
        if each.numel() and (first or (shard.device_mesh.ndim == 2 and not shard.placements[1].is_replicate()))
    ]
    top = (
        torch.stack([each.max() for each in squares]).max() if squares else local[0].new_zeros((), dtype=torch.float64)
    )
    top = torch.where(torch.isfinite(top), top, math.inf)
    for group in groups:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    norm = math.sqrt(_sum_below(squares, float(top), groups)) if math.isfinite(top) else math.nan
    if not norm <= limit:
        factor = limit / (norm + 1e-6)
        for each in local:
            each.mul_(factor)
    return norm


def _sum_below(squares: Sequence[Tensor], top: float, groups: Iterable[Any]) -> float:
    """The sum of all squares of all ranks, each rounded to 61 bits below the largest one."""
    if top == 0.0:
        return 0.0
    high = 2.0 ** (30 - math.frexp(top)[1])
    limbs = torch.zeros(2, dtype=torch.int64, device=squares[0].device if squares else None)
    for each in squares:
        whole = each.mul(high).floor_()
        limbs[0] += whole.to(torch.int64).sum()
        limbs[1] += each.mul(high).sub_(whole).mul_(2.0**31).round_().to(torch.int64).sum()
    for group in groups:
        dist.all_reduce(limbs, group=group)
    return (float(limbs[0]) + float(limbs[1]) * 2.0**-31) / high
