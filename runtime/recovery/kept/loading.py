"""The objects of a script, filled from the segments of a step. All is compared before anything is written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from elastic.errors import CheckpointCorrupt, Disagree, OtherState
from runtime.allreduce.reduction.partial_sum import Json
from runtime.allreduce.ring.tls import TlsContexts
from runtime.recovery.kept.boxes import Box, missing
from runtime.recovery.kept.choice import HeldSegment, KeptStep
from runtime.recovery.kept.content import Piece, box_of, is_distributed, parameters_of, state_of
from runtime.recovery.kept.look import segments_of
from runtime.recovery.kept.place import EXACT
from runtime.recovery.kept.remote import OtherMachines, RemoteSegment
from runtime.recovery.kept.segment import Segment
from runtime.recovery.state.encoding import decode, from_blob
from runtime.recovery.state.object_copies import load_optimizer, nonpersistent
from runtime.recovery.transfer.connection import CopyConnection

NAMED = 5
"""How many differences a refusal names."""


@contextmanager
def opened(
    memory: str,
    source: KeptStep,
    others: OtherMachines | None,
    seal: TlsContexts,
    parts: Collection[int] | None = None,
) -> Iterator[list[Segment | RemoteSegment]]:
    """The parts of a step, by number; those of other machines over connections that stay open in the block. parts:
    numbers of those that are wanted; None: all. Raises CheckpointCorrupt and CopyFailed."""
    elsewhere = others.parts if others is not None else {}
    found: list[Segment | RemoteSegment] = [
        one for one in segments_of(memory, source, elsewhere) if parts is None or one.header.part in parts
    ]
    with ExitStack() as stack:
        connections: dict[str, CopyConnection] = {}
        for part, worker in elsewhere.items():
            assert others is not None
            if parts is not None and part not in parts:
                continue
            if worker not in connections:
                connections[worker] = stack.enter_context(closing(others.dial.open(worker, seal)))
            held = HeldSegment(source.step, source.round, source.group, part, others.count)
            found.append(RemoteSegment(connections[worker], held))
        yield sorted(found, key=lambda one: one.header.part)


@dataclass(frozen=True, slots=True)
class Stored:
    """A box of a tensor in a segment."""

    segment: Segment | RemoteSegment
    box: Box
    at: int

    def tensor(self, dtype: str, size: int) -> torch.Tensor:
        """The box, sharing the memory of the segment. size: bytes of an element."""
        body = self.segment.read(self.at, self.box.elements * size)
        blob = torch.frombuffer(body, dtype=torch.uint8) if body.nbytes else torch.empty(0, dtype=torch.uint8)
        return from_blob(blob, dtype, self.box.shape)


@dataclass(slots=True)
class SavedTensor:
    """A tensor as it was kept."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    distributed: bool
    device: str
    boxes: list[Stored] = field(default_factory=list)

    def fill(self, into: torch.Tensor, box: Box) -> None:
        """Write the elements of that box of the whole tensor."""
        for stored in self.boxes:
            if (common := stored.box.common(box)) is not None:
                found = stored.tensor(self.dtype, into.element_size())
                into[common.within(box)].copy_(found[common.within(stored.box)])


@dataclass(frozen=True, slots=True)
class SavedState:
    """All segments of one step, as one state. tensors: in the order of encoding.py."""

    plain: dict[str, Json]
    tensors: tuple[SavedTensor, ...]

    @classmethod
    def of(cls, segments: Sequence[Segment | RemoteSegment]) -> SavedState:
        """segments: all parts of a step, in any order. Raises CheckpointCorrupt."""
        plain: dict[str, Json] = {}
        found: dict[str, SavedTensor] = {}
        for segment in sorted(segments, key=lambda one: one.header.part):
            table = segment.table()
            plain |= table["plain"]
            for path, dtype, shape, offset, extent, at, distributed, device in table["tensors"]:
                saved = found.setdefault(path, SavedTensor(path, dtype, tuple(shape), distributed, device))
                if at >= 0:
                    saved.boxes.append(Stored(segment, Box(tuple(offset), tuple(extent)), at))
        return cls(plain, tuple(found.values()))

    @classmethod
    def of_rank(cls, first: Segment | RemoteSegment, mine: Segment | RemoteSegment) -> SavedState:
        """What one rank had. mine: its own segment. first: that of rank 0, which has what all ranks have. Raises
        CheckpointCorrupt, and Disagree if they have not the same weights and states of optimizers any more."""
        ours, table = first.table(), mine.table()
        if ours["sample"] != table["sample"]:
            raise Disagree(
                f"elastic.keep: the weights of rank {mine.header.part}, or what its optimizers have, are not those of "
                "rank 0 any more, as they were behind the first step: what all ranks have is kept once. Average the "
                "weights in each step, and give elastic.keep the models of all parameters"
            )
        shared = {entry[0]: entry for entry in ours["tensors"]}
        tensors = []
        for path, dtype, shape, offset, extent, at, distributed, device in table["tensors"]:
            saved = SavedTensor(path, dtype, tuple(shape), distributed, device)
            if at >= 0:
                saved.boxes.append(Stored(mine, Box(tuple(offset), tuple(extent)), at))
            elif path in shared and shared[path][5] >= 0:
                _, _, _, offset, extent, at, _, _ = shared[path]
                saved.boxes.append(Stored(first, Box(tuple(offset), tuple(extent)), at))
            tensors.append(saved)
        return cls(table["plain"], tuple(tensors))


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a saved tensor goes. into: this process's shard, or the whole. value: what the object gets."""

    saved: SavedTensor
    into: torch.Tensor
    box: Box
    value: torch.Tensor


def load(objects: Mapping[str, Any], saved: SavedState) -> None:
    """Fill the objects. Raises OtherState if they are not like those that were kept, and CheckpointCorrupt if a part of
    a tensor is missing; then nothing has been written."""
    for one in objects.values():
        if isinstance(one, nn.Module):
            _unfold(one)
    own = state_of(objects)
    differing = list(_differences(objects, {piece.path: piece for piece in own.pieces}, own.plain, saved))
    if differing:
        more = f"; and {len(differing) - NAMED} more" if len(differing) > NAMED else ""
        raise OtherState(
            "elastic.keep was given another state than the one that the job has kept: "
            f"{'; '.join(differing[:NAMED])}{more}. Build what the job began with, or start a new job"
        )
    pieces = {piece.path: piece for piece in own.pieces}
    numbered = {name for name, one in objects.items() if _has_groups(one, saved.plain[name])}
    devices = {piece.tensor.device.type: piece.tensor.device for piece in own.pieces}
    targets = [
        _target(one, objects[_owner(one.path)], pieces.get(one.path), devices, numbered=_owner(one.path) in numbered)
        for one in saved.tensors
    ]
    for target in targets:
        if lacking := missing(target.box, (stored.box for stored in target.saved.boxes)):
            raise CheckpointCorrupt(f"{lacking} elements of {target.saved.path} are in no segment of this step")
    with torch.no_grad():
        for target in targets:
            target.saved.fill(target.into, target.box)
    for name, one in objects.items():
        value = decode(saved.plain[name], lambda number: targets[number].value)
        if isinstance(one, nn.Module):
            if _is_live(one, [piece for piece in own.pieces if _owner(piece.path) == name]):
                _set_extra_state(one, value)
            else:
                one.load_state_dict(value)
        elif name in numbered:
            load_optimizer(one, value)
        else:
            one.load_state_dict(value)


def _unfold(module: nn.Module) -> None:
    """Give each element of a buffer memory of its own, so that it can be written: those of expand() share it."""
    for owner in module.modules():
        for key, buffer in owner._buffers.items():
            if buffer is None or buffer.layout != torch.strided or is_distributed(buffer):
                continue
            if torch._debug_has_internal_overlap(buffer) == 1:
                owner._buffers[key] = buffer.contiguous()


def _is_live(module: nn.Module, pieces: Iterable[Piece]) -> bool:
    """Whether these tensors of its state_dict() are in the memory of its parameters and buffers, or have all of their
    memory and more, so that who has filled them has filled the module. A state_dict() of its own, or a hook, may have
    made copies."""
    every = chain(module.parameters(), module.buffers())
    memory = {_memory(one) for one in every if one.layout == torch.strided}
    left_out = {_memory(one) for *_, one in nonpersistent(module) if one is not None and one.layout == torch.strided}
    mine = {_memory(one.tensor) for one in pieces if one.bytes and "_extra_state" not in one.path.split(".")}
    return mine <= memory or memory - left_out - {0} <= mine


def _memory(tensor: Any) -> int:
    return int((tensor.to_local() if is_distributed(tensor) else tensor).untyped_storage().data_ptr())


def _set_extra_state(module: nn.Module, value: Mapping[str, Any]) -> None:
    """What get_extra_state() of modules below has given is no tensor of theirs."""
    for key, item in value.items():
        path, _, last = key.rpartition(".")
        if last == "_extra_state":
            module.get_submodule(path).set_extra_state(item)


def _owner(path: str) -> str:
    return path.partition(".")[0]


def _differences(
    objects: Mapping[str, Any], own: Mapping[str, Piece], plain: Mapping[str, Json], saved: SavedState
) -> Iterator[str]:
    """What differs, in words. Only modules have their tensors before they are loaded: an optimizer makes them in its
    first step."""
    if lacking := sorted(saved.plain.keys() - objects.keys()):
        yield f"{', '.join(lacking)} is missing"
    if more := sorted(objects.keys() - saved.plain.keys()):
        yield f"{', '.join(more)} was not kept"
    kept = {one.path: one for one in saved.tensors}
    for name, one in objects.items():
        if name not in saved.plain:
            continue
        if isinstance(one, nn.Module):
            yield from _of_module(name, own, kept)
        elif _has_groups(one, plain[name]) and _has_groups(one, saved.plain[name]):
            yield from _of_optimizer(name, one, plain[name], saved)
        elif isinstance(one, LRScheduler) and _keys(plain[name]) != _keys(saved.plain[name]):
            yield f"{name} has {_keys(plain[name])}, and had {_keys(saved.plain[name])}"
        elif name == EXACT and plain[name] != saved.plain[name]:
            yield f"{name}{_units(plain[name])}, and was {name}{_units(saved.plain[name])}"
        else:
            yield from _of_shards(name, own, kept)


def _units(plain: Any) -> str:
    parallel = plain["tensor_parallel"]
    return f"{plain['units']}{f' with tensor parallelism of {parallel}' if parallel > 1 else ''}"


def _has_groups(one: Any, plain: Json) -> bool:
    """Whether it is an optimizer whose state has the form of torch's own: one that holds several others, as
    torchtitan's, has another one."""
    return isinstance(one, torch.optim.Optimizer) and isinstance(plain, dict) and "param_groups" in plain


def _of_shards(name: str, own: Mapping[str, Piece], kept: Mapping[str, SavedTensor]) -> Iterator[str]:
    """Of an object that has shards before it is loaded, too: the tensors that it has then and had."""
    for path, piece in own.items():
        if _owner(path) == name and piece.distributed and path in kept and piece.shape != kept[path].shape:
            yield f"{path} has shape {piece.shape}, and had {kept[path].shape}"


def _of_module(name: str, own: Mapping[str, Piece], kept: Mapping[str, SavedTensor]) -> Iterator[str]:
    mine = {path: piece for path, piece in own.items() if _owner(path) == name}
    theirs = {path: one for path, one in kept.items() if _owner(path) == name}
    yield from (f"{path} was not kept" for path in mine if path not in theirs)
    yield from (f"{path} is missing" for path in theirs if path not in mine)
    for path, piece in mine.items():
        if path not in theirs:
            continue
        was = f"{theirs[path].dtype} {theirs[path].shape}"
        now = f"{str(piece.tensor.dtype).removeprefix('torch.')} {piece.shape}"
        if now != was:
            yield f"{path} is {now}, and was {was}"


def _of_optimizer(name: str, one: torch.optim.Optimizer, plain: Json, saved: SavedState) -> Iterator[str]:
    groups, were = _groups(plain), _groups(saved.plain[name])
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in were]:
        now, then = (str([len(group["params"]) for group in found]) for found in (groups, were))
        yield f"the parameter groups of {name} have {now} parameters, and had {then}"
        return
    if (keys := list(map(_keys, groups))) != (kept := list(map(_keys, were))):
        yield f"the parameter groups of {name} have {keys}, and had {kept}"
    parameters = parameters_of(one)
    for tensor in saved.tensors:
        if _owner(tensor.path) == name and tensor.distributed:
            found = _parameter_of(tensor, parameters)
            if found is None or not is_distributed(found) or tuple(found.shape) != tensor.shape:
                shape = "no parameter" if found is None else f"a parameter of shape {tuple(found.shape)}"
                yield f"{tensor.path} has shape {tensor.shape}, and belongs to {shape}"


def _groups(plain: Any) -> list[Any]:
    return list(plain["param_groups"])


def _keys(plain: Json) -> list[str]:
    return sorted(plain) if isinstance(plain, dict) else []


def _parameter_of(tensor: SavedTensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The parameter to which a tensor of an optimizer's state belongs: NAME.state.NUMBER.KEY."""
    words = tensor.path.split(".")
    if len(words) < 4 or words[1] != "state" or not words[2].isdigit() or int(words[2]) >= len(parameters):
        return None
    return parameters[int(words[2])]


def _target(
    saved: SavedTensor, one: Any, piece: Piece | None, devices: Mapping[str, torch.device], *, numbered: bool
) -> _Target:
    """Where a saved tensor goes: into the tensor of a module, or into a new one that load_state_dict() is given.
    devices: of this process, by their kind, for tensors that have no counterpart yet.
    numbered: it is of an optimizer whose state has the numbers of parameters, and not their names, which may be numbers
    too, as in an nn.Sequential."""
    if isinstance(one, nn.Module) and piece is not None:
        return _Target(saved, piece.tensor, piece.box, piece.source)
    like = _parameter_of(saved, parameters_of(one)) if numbered else None
    if like is None and piece is not None and piece.distributed and saved.distributed:
        like = piece.source
    device = torch.device("cpu")
    if like is not None and saved.device != "cpu":
        device = like.device
    elif piece is not None:
        device = piece.tensor.device
    else:
        device = devices.get(saved.device, device)
    kind = from_blob(torch.empty(0, dtype=torch.uint8), saved.dtype, (0,)).dtype
    if like is not None and tuple(like.shape) == saved.shape and (saved.distributed or device == like.device):
        made: Any = torch.zeros_like(like.detach(), dtype=kind)
        if is_distributed(made):
            box, _ = box_of(made, saved.path)
            return _Target(saved, made.to_local(), box, made)
        return _Target(saved, made, Box.whole(saved.shape), made)
    plain = torch.empty(saved.shape, dtype=kind, device=device)
    return _Target(saved, plain, Box.whole(saved.shape), plain)
