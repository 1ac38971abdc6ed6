"""One pass on one worker: random numbers, buffers and gradients of each shard, and the merged result.

A shard's bits depend on (seed, step, pass, shard) and on the state before the pass, never on the process that runs it
or on what that process ran before. A partial sum is one flat tensor per dtype group, so that exchanging it is one large
operation; a leaf may still be in parts (see unpacked_leaf.py):

    gradients, times the weight | "mean" buffers, times the weight | "rows" | "first" buffers | a changed flag for each
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Literal, cast, get_args

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from elastic.config import Compression
from elastic.errors import NotCarried
from runtime.allreduce.fixed_point.exponents import BlockExponents
from runtime.allreduce.reduction.buffers import Buffer, Merge, Modes, changed, clones, copy_all
from runtime.allreduce.reduction.flat_pool import CPU, Flats
from runtime.allreduce.reduction.host_copies import device_copies, host_copies
from runtime.allreduce.reduction.leaves.early_leaf import EarlyLeaf
from runtime.allreduce.reduction.leaves.fixed_leaves import FixedPoint
from runtime.allreduce.reduction.leaves.layout import FlatGroup
from runtime.allreduce.reduction.leaves.leaf_format import LeafFormat
from runtime.allreduce.reduction.leaves.narrow_leaves import NarrowLeaves
from runtime.allreduce.reduction.leaves.unpacked_leaf import Loose
from runtime.allreduce.reduction.partial_sum import Json, Partial, Scalars
from runtime.data.random_state import seed_all, seed_shard

_GROUP_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.float32,
    "float16": torch.float32,
}


class Harvest:
    """Runs shards from a common start and turns them into leaves, and a result into gradients.

    A pass is `begin_pass`, then for each own shard `before` and `leaf` (or `drop_shard`), then `install`.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        float_buffers: Sequence[Buffer] = (),
        int_buffers: Sequence[Buffer] = (),
        *,
        modes: Modes | None = None,
        device: torch.device = CPU,
        fixed: BlockExponents | None = None,
        compression: Compression = Compression.NONE,
    ) -> None:
        """parameters: those that get gradients, the same on every worker. modes: those of the modules whose mode a
        shard may change (default: none). device: that of leaves and results, which differs from the parameters' if a
        ring of CPUs carries the gradients of GPUs. fixed: leaves and results are integers with these exponents.
        compression: if fixed is None, what they are rounded to. Raises NotCarried for a dtype that is not summed.
        """
        self.parameters = parameters
        self._parameters = [parameter for _, parameter in parameters]
        self._floats = list(float_buffers)
        self._integers = list(int_buffers)
        self._modes = modes or Modes()
        self._groups: dict[str, FlatGroup] = {}
        for i, (name, parameter) in enumerate(parameters):
            group = self._group(name, parameter.dtype)
            group.numbers.append(i)
            group.parameters.append(parameter)
        for buffer in sorted(self._floats, key=lambda buffer: get_args(Merge).index(buffer.merge)):
            self._group(buffer.name, buffer.live.dtype).buffers.append(buffer)
        self._device = device
        self._staged = device.type == "cpu" and any(parameter.is_cuda for parameter in self._parameters)
        """Whether gradients of GPUs are summed on the CPU, through pinned memory."""
        self._flats = {
            name: Flats(group.dtype, group.elements, like=group.like, device=device, pinned=self._staged)
            for name, group in self._groups.items()
        }
        self._converts: LeafFormat | None = None
        if fixed is not None:
            self._converts = FixedPoint(fixed, self._groups, device)
        elif compression is not Compression.NONE:
            self._converts = NarrowLeaves(compression, self._groups, device)
        self.early = EarlyLeaf(self._groups, self.groups(), self._flats, self._converts, device)
        """Gives a shard's gradients away as they come; to be told after `before`."""
        self._at = (0, 0, 0)
        self._installed: list[range] = []
        """The addresses in the flat tensors of the last `install`."""
        self._uploads: list[tuple[torch.cuda.Event, torch.Tensor]] = []
        """Flat tensors that a GPU may still copy, so that their memory must not be used again, until the event."""
        self._installed_alone: set[int] = set()
        """Those of its gradients that are in none of them."""

    def _group(self, name: str, dtype: torch.dtype) -> FlatGroup:
        wide = _GROUP_DTYPES.get(str(dtype).removeprefix("torch."))
        if wide is None:
            raise NotCarried(
                f"{name} has dtype {dtype}, which is not summed; use float32, float64, bfloat16 or float16"
            )
        return self._groups.setdefault(str(wide).removeprefix("torch."), FlatGroup(wide))

    def groups(self) -> dict[str, int]:
        """Elements of a leaf's flat tensor by dtype group: "float32" (also bfloat16, float16) and "float64"; or
        those of a LeafFormat."""
        if self._converts is not None:
            return dict(self._converts.sizes)
        return {name: group.elements for name, group in self._groups.items()}

    def begin_pass(self, seed: int, step: int, pass_no: int) -> None:
        """Keep the buffers and modes from which every shard starts, drop old gradients, seed the random numbers."""
        self._at = (seed, step, pass_no)
        self._installed, self._installed_alone = [], set()
        if self._converts is not None:
            self._converts.begin(pass_no)
        self._modes.begin()
        with torch.no_grad():
            buffers = [*self._floats, *self._integers]
            for buffer, base in zip(buffers, clones([buffer.live.detach() for buffer in buffers]), strict=True):
                buffer.base = base
        self._clear_gradients()
        seed_all(*self._at, "begin")

    def before(self, shard: int) -> int:
        """Reset everything that a shard may read to the start of the pass, and seed its random numbers. Returns the
        seed. There is no gradient: `begin_pass`, `leaf` and `drop_shard` leave none."""
        self._restore()
        return seed_shard(*self._at, shard)

    def has_gradient(self) -> bool:
        """Whether any parameter has a gradient now."""
        return any(parameter.grad is not None for parameter in self._parameters)

    def drop_shard(self) -> None:
        """Undo a shard that does not count: a rehearsal, or a shard whose script raised."""
        self.early.forget()
        self._restore()
        self._clear_gradients()
        seed_all(*self._at, "begin")

    def leaf(self, shard: int, weight: float, scalars: Scalars) -> Partial:
        """Take this shard's gradients and buffers: weight * gradient, in float32 or in float64.

        weight 0: nothing of this shard counts. Gradients are None afterwards. The flat tensors' memory is reused once
        nothing refers to them, so do not keep a partial sum that was folded. A group is left loose if every parameter
        of it has a gradient of its own, in the group's dtype.
        """
        self.early.forget()
        for buffer in (*self._floats, *self._integers):
            buffer.check_kind()
        leaf = Partial(shard, shard + 1, weight=weight, scalars=scalars)
        with torch.no_grad():
            for name, group in self._groups.items():
                loose = weight and self._converts is None and self._device.type == "cpu"
                if loose and group.may_stay_loose():
                    leaf.loose[name] = self._loosen(name, group, shard, weight)
                    leaf.has_grad |= group.bits
                else:
                    leaf.flats[name], has_grad = self._pack(name, group, shard, weight)
                    leaf.has_grad |= has_grad
            if self._converts is not None:
                self._converts.encode(leaf)
        leaf.note = self._changed_integers(shard) if weight else None
        self._clear_gradients()
        return leaf

    def misfits(self, result: Partial) -> bool:
        """Whether the result means nothing, because a leaf was too large for its integers. Then all members find that,
        and compute the pass again, from another `before` on, with integers that fit it."""
        if self._converts is None or not self._converts.misfits(result):
            return False
        self._converts.begin(self._at[2])
        self._restore()
        return True

    def install(
        self,
        result: Partial,
        gradients: Literal["mean", "sum"],
        accept: Callable[[list[str]], bool] = lambda nonfinite: True,
    ) -> None:
        """Write the reduced gradients (None if no shard had one) and merged buffers; seed the random numbers.

        "mean" divides the gradients by the total weight, once; buffers are always a mean. result is not changed.
        accept: called before anything is written, with the names of the parameters whose reduced gradient has an
        infinity or NaN, if there are any; if it returns False, `leave_out` is done instead.
        """
        with torch.no_grad():
            if self._converts is not None:
                result = self._converts.decode(result, self._flats)
            nonfinite = self._nonfinite(result, gradients)
            if nonfinite and not accept(nonfinite):
                self.leave_out()
                return
            for name in self._groups:
                self._install_gradients(name, result, gradients)
                self._install_buffers(name, result)
            self._install_integers(result.note)
        self._end()

    def installed(self, address: int) -> bool:
        """Whether the last `install` has put a gradient at this address."""
        return address in self._installed_alone or any(address in flat for flat in self._installed)

    def leave_out(self) -> None:
        """Instead of `install`: leave no gradients, and the buffers with which the pass began."""
        self._restore()
        self._clear_gradients()
        self._end()

    def _loosen(self, name: str, group: FlatGroup, shard: int, weight: float) -> Loose:
        gradients = [gradient for parameter in group.parameters if (gradient := parameter.grad) is not None]
        if weight != 1 and gradients:  # a group of buffers alone has none
            torch._foreach_mul_(gradients, weight)
        rest = torch.empty(group.elements - group.gradients, dtype=group.dtype)
        self._fill_buffers(group, rest, shard, weight)
        return Loose([*gradients, rest], self._flats[name])

    def _pack(self, name: str, group: FlatGroup, shard: int, weight: float) -> tuple[torch.Tensor, int]:
        """A filled flat tensor, and which parameters have a gradient, as in Partial.has_grad."""
        if weight == 0:
            return self._flats[name].take().zero_(), 0
        sources = [gradient for parameter in group.parameters if (gradient := parameter.grad) is not None]
        has_grad = group.bits
        flat = self._concatenate(group, sources) if self._device.type != "cpu" else None
        if flat is None:
            flat, has_grad = self._fill(name, group, sources)
        if weight != 1:
            flat[: group.gradients].mul_(weight)
        self._fill_buffers(group, flat[group.gradients :], shard, weight)
        return flat, has_grad

    def _fill(self, name: str, group: FlatGroup, sources: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        """A flat tensor with these gradients, and zeros where a parameter has none; and has_grad as `_pack` has it."""
        has_grad = group.bits
        flat = self._flats[name].take()
        targets = self._flats[name].parts(flat)[:-1]
        if len(sources) < len(targets):
            present = [parameter.grad is not None for parameter in group.parameters]
            torch._foreach_zero_([target for target, here in zip(targets, present, strict=True) if not here])
            targets = list(compress(targets, present))
            has_grad = sum(1 << i for i in compress(group.numbers, present))
        try:
            self._copy(targets, sources)
        except RuntimeError:  # not all are dense; to ask each gradient would take a tenth of the time of the copy
            self._copy(targets, [gradient.to_dense() for gradient in sources])
        return flat, has_grad

    def _concatenate(self, group: FlatGroup, gradients: list[torch.Tensor]) -> torch.Tensor | None:
        """A flat tensor of a GPU with these gradients of all its parameters. Their places in it are not made: the GPU
        would wait for that, as memory of a GPU is not kept and so has no places yet. None: it has to be filled."""
        if len(gradients) < len(group.parameters):
            return None
        rest = torch.empty(group.elements - group.gradients, dtype=group.dtype, device=self._device)
        try:
            whole = torch._C._nn.flatten_dense_tensors([*gradients, rest])
        except RuntimeError:  # not all are dense, or on this device
            return None
        return whole if whole.dtype is group.dtype else None

    def _copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=self._staged)
            if self._staged:
                for gpu in {source.device for source in sources if source.is_cuda}:
                    torch.cuda.current_stream(gpu).synchronize()  # the copies run asynchronously

    def _fill_buffers(self, group: FlatGroup, rest: torch.Tensor, shard: int, weight: float) -> None:
        """Fill in the buffers. rest: the part of a flat tensor after the gradients."""
        if not group.buffers:
            return
        parts, flags = group.buffer_parts(rest)
        counts = [buffer.merge != "first" or shard == 0 for buffer in group.buffers]
        counting = list(compress(group.buffers, counts))  # the first ones
        flags[len(counting) :].zero_()
        if counting:
            differ = changed(counting).to(flags.dtype)
            self._copy([*compress(parts, counts), flags[: len(counting)]], [*(b.live for b in counting), differ])
        if absent := [part for part, counts_here in zip(parts, counts, strict=True) if not counts_here]:
            torch._foreach_zero_(absent)
        for number in group.rows:
            parts[number][:shard].zero_()
            parts[number][shard + 1 :].zero_()
        if weight != 1:
            rest[: group.weighted - group.gradients].mul_(weight)

    def _nonfinite(self, result: Partial, gradients: Literal["mean", "sum"]) -> list[str]:
        """Names of the parameters whose reduced gradient has an infinity or NaN; nearly always none.

        Then the sum of all elements is not finite. The sum may also overflow, so each parameter is checked then. A
        "sum" of float16 gradients may be finite here and infinite in float16, so each parameter is also checked where
        an element is too large for the narrowest dtype. The host waits once for each group.
        """
        found: list[str] = []
        for name, group in self._groups.items():
            flat = self._here(result, name)
            whole, dtypes = flat[: group.gradients], {parameter.dtype for parameter in group.parameters}
            if gradients == "sum" and dtypes - {group.dtype} and group.gradients:
                fits = whole.abs().amax().item() <= min(torch.finfo(dtype).max for dtype in dtypes)
            else:
                fits = math.isfinite(whole.sum().item())
            if not fits:
                for i, parameter, part in zip(group.numbers, group.parameters, group.gradient_parts(flat), strict=True):
                    seen = part.to(parameter.dtype) if gradients == "sum" else part
                    if not bool(seen.isfinite().all()):
                        found.append(self.parameters[i][0])
        return found

    def _install_gradients(self, name: str, result: Partial, gradients: Literal["mean", "sum"]) -> None:
        group = self._groups[name]
        flat = self._flats[name].take()
        if gradients == "mean":
            torch.div(self._here(result, name), _divisor(result, flat), out=flat)
        else:
            flat.copy_(result.flats[name])
        homes = {parameter.device for parameter in group.parameters}
        if self._staged and len(homes) == 1:
            flat = self._upload(flat, homes.pop())
        self._installed.append(range(flat.data_ptr(), flat.data_ptr() + flat.nbytes))
        dtype, device = flat.dtype, flat.get_device()
        for i, parameter, part in zip(group.numbers, group.parameters, self._flats[name].parts(flat), strict=False):
            if not result.has_grad >> i & 1:
                parameter.grad = None
            elif parameter.dtype is dtype and parameter.get_device() == device and parameter.is_contiguous():
                parameter.grad = part.data  # sooner made than detach()
            else:
                # With the parameter's strides: optimizers are slow on a gradient with other strides.
                parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(part)
                self._installed_alone.add(parameter.grad.data_ptr())

    def _upload(self, flat: torch.Tensor, gpu: torch.device) -> torch.Tensor:
        """A copy of a pinned flat tensor on the GPU, for which the host does not wait."""
        there = flat.to(gpu, non_blocking=True)
        self._uploads = [(event, still) for event, still in self._uploads if not event.query()]
        self._uploads.append((torch.cuda.current_stream(gpu).record_event(), flat))
        return there

    def _install_buffers(self, name: str, result: Partial) -> None:
        group = self._groups[name]
        if not group.buffers:
            return
        merged = self._here(result, name)[group.gradients :].clone()
        merged[: group.weighted - group.gradients].div_(_divisor(result, merged))
        differ = group.buffer_parts(merged)[1].tolist()
        (merged,) = device_copies([merged], group.buffers[0].live.device)
        parts, _ = group.buffer_parts(merged)
        sources = zip(group.buffers, parts, differ, strict=True)
        copy_all(
            [_quietly(buffer.live) for buffer in group.buffers],
            [part if differs else buffer.start for buffer, part, differs in sources],
        )

    def _here(self, result: Partial, name: str) -> torch.Tensor:
        """A group of a result on this device; a result from another member has come through the CPU."""
        return result.flats[name].to(self._device)

    def _changed_integers(self, shard: int) -> Json:
        """The values of the integer buffers that this shard has changed, by name; None: there are none. A shard other
        than the first tells of BatchNorm's counters alone, which count the step if the first shard is skipped."""
        counting = [buffer for buffer in self._integers if shard == 0 or isinstance(buffer.owner, _NormBase)]
        if not counting:
            return None
        found = host_copies([tensor for buffer in counting for tensor in (buffer.live, buffer.start)])
        differ: dict[str, Json] = {
            buffer.name: live.tolist()
            for buffer, live, base in zip(counting, found[::2], found[1::2], strict=True)
            if not torch.equal(live, base)
        }
        return {"integers": differ} if differ else None

    def _install_integers(self, note: Json) -> None:
        differ = cast(dict[str, Json], note.get("integers", {})) if isinstance(note, dict) else {}
        if not self._integers:
            return
        values = [
            buffer.start if (value := differ.get(buffer.name)) is None else torch.tensor(value, dtype=buffer.live.dtype)
            for buffer in self._integers
        ]
        copy_all(
            [_quietly(buffer.live) for buffer in self._integers], device_copies(values, self._integers[0].live.device)
        )

    def _end(self) -> None:
        for buffer in (*self._floats, *self._integers):
            buffer.base = None
        self._modes.end()
        seed_all(*self._at, "end")

    def _restore(self) -> None:
        self._modes.restore()
        if not (self._floats or self._integers):
            return
        with torch.no_grad():
            buffers = [*self._floats, *self._integers]
            copy_all([_quietly(buffer.live) for buffer in buffers], [buffer.start for buffer in buffers])

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def _divisor(result: Partial, flat: torch.Tensor) -> float | torch.Tensor:
    """The weight, as a tensor on a GPU: there a division by a plain number is a multiplication by its inverse, with
    other bits than the CPU's division."""
    return torch.full((), result.weight, dtype=flat.dtype, device=flat.device) if flat.is_cuda else result.weight


def _quietly(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory with a version counter of its own: a graph that spans shards may have saved the buffer."""
    return tensor.data
