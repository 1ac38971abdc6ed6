"""Writes the state behind one step into a segment of this machine's memory, and sends the segment to other machines.

A thread that copied tensors one by one would take Python's lock for each of them, and the script would wait for it. So
tensors on the CPU are copied in one call, which does without the lock. It makes the checksum in the same walk through
memory, because the script needs that memory, too. Tensors on a GPU are copied in parts, on a stream of the thread,
after what the script's stream had to do in done(). Neither the script nor its stream waits for this copy.
"""

from __future__ import annotations

import functools
import json
import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from runtime.allreduce.fixed_point.conversion import kernel
from runtime.recovery.kept.boxes import Box
from runtime.recovery.kept.choice import HeldSegment
from runtime.recovery.kept.content import CurrentState, Ends, Piece, StateOfObject, sample
from runtime.recovery.kept.remote import SegmentMirror
from runtime.recovery.kept.segment import CopyThread, Header, SegmentFile, aligned
from runtime.recovery.state.encoding import dtype_name
from runtime.recovery.state.host_bytes import DONE, HostBytes, StreamMark
from runtime.recovery.transfer.checksum import FilledBody, Numbers
from runtime.recovery.transfer.connection import CopyFailed

GROUP_BYTES = 16_000_000
"""A call of kernel.c copies tensors until they have this many bytes or more. The call takes some milliseconds, and
longer if its last tensor is large."""


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """A piece that is written into a body, from byte `at` on."""

    piece: Piece
    at: int


class PlacedPart:
    """The pieces of one object: those that this process writes, and where. Bytes `begin` to `end` of the body."""

    def __init__(self, pieces: tuple[Piece, ...], begin: int, rule: WriteRule) -> None:
        self.pieces, self.begin = pieces, begin
        placed, at = [], begin
        entries = []
        for piece in pieces:
            writes = rule.writes(piece)
            entries.append(_entry_of(piece, at if writes else -1))
            if writes:
                placed.append(PlacedPiece(piece, at))
                at = aligned(at + piece.bytes)
        self.end = at
        self.entries = ",".join(entries)
        """What the table says of all pieces."""
        self.ends = Ends(filter(rule.is_alike, pieces)) if rule.samples else Ends(())
        lists: dict[tuple[bool, str], list[PlacedPiece]] = {}
        for one in placed:
            kind = one.piece.tensor.device.type
            if one.piece.bytes:
                lists.setdefault((one.piece.steady and kind in ("cpu", "cuda"), kind), []).append(one)
        self.steady = [CopyList(found) for (steady, _), found in lists.items() if steady]
        """What a thread may copy while the script goes on."""
        self.others = [CopyList(found) for (steady, _), found in lists.items() if not steady]


@dataclass(frozen=True, slots=True)
class WriteRule:
    """What this process writes, the same in each step of a round. is_alike: whether all processes have a piece alike.
    samples: whether the table says a checksum of these."""

    writes: Callable[[Piece], bool]
    is_alike: Callable[[Piece], bool]
    samples: bool


class CopyList:
    """Pieces of one kind of device that are copied together."""

    def __init__(self, placed: Sequence[PlacedPiece]) -> None:
        """placed: one at least."""
        self._placed = placed
        self.on_gpu = placed[0].piece.tensor.is_cuda
        self.paths = [one.piece.path for one in placed]
        self.tensors = [_alias(one.piece.tensor) for one in placed]
        """What they are in done(), also if the script puts other data in a tensor before it is copied."""
        self.sources = [one.piece.source for one in placed]
        self._into: dict[str, tuple[mmap.mmap, list[torch.Tensor]]] = {}
        """File -> its memory, and the places there."""

    @functools.cached_property
    def groups(self) -> list[NativeGroup]:
        """What kernel.c copies; none: torch copies them all."""
        if kernel() is None or not all(_is_plain(one) and _is_as_it_lies(one) for one in self.tensors):
            return []
        found, size = [NativeGroup([], [], [])], 0
        for one, path, tensor in zip(self._placed, self.paths, self.tensors, strict=True):
            if size >= GROUP_BYTES:
                found.append(NativeGroup([], [], []))
                size = 0
            found[-1].paths.append(path)
            found[-1].tensors.append(tensor)
            found[-1].at.append(one.at)
            size += tensor.nbytes
        return found

    def into(self, file: SegmentFile) -> list[torch.Tensor]:
        """The places of the tensors in a file that has room for them."""
        memory, found = self._into.get(file.name, (None, []))
        if memory is not file.memory:
            found = [_place(file, one) for one in self._placed]
            self._into[file.name] = file.memory, found
        return found


@dataclass(frozen=True)
class NativeGroup:
    """Tensors that kernel.c copies in one call. Their memory may move: torch moves what another process gets, as by
    share_memory(). So addresses are read right before, and a group is small. at: where in the body each begins."""

    paths: list[str]
    tensors: list[torch.Tensor]
    at: list[int]

    @functools.cached_property
    def _numbers(self) -> tuple[Numbers, Numbers]:
        return np.array(self.at, np.int64), np.array([one.nbytes for one in self.tensors], np.int64)

    def copy(self, body: FilledBody) -> str:
        """Returns the path of a tensor whose memory has moved meanwhile; "": none has."""
        sources = self._addresses()
        body.copy(sources, *self._numbers)
        moved = np.flatnonzero(self._addresses() != sources)
        return self.paths[moved[0]] if len(moved) else ""

    def _addresses(self) -> Numbers:
        return np.fromiter(map(torch.Tensor.data_ptr, self.tensors), np.int64, len(self.tensors))


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if _is_plain(tensor) else tensor


def _place(file: SegmentFile, placed: PlacedPiece) -> torch.Tensor:
    tensor = placed.piece.tensor
    place = torch.frombuffer(file.body(placed.at, tensor.nbytes), dtype=torch.uint8)
    return place.view(tensor.dtype).view(tensor.shape)


def _entry_of(piece: Piece, at: int) -> str:
    kind = piece.tensor.device.type
    return _entry(piece.path, dtype_name(piece.tensor), piece.shape, piece.box, at, piece.distributed, kind)


@functools.lru_cache(maxsize=100_000)
def _entry(path: str, dtype: str, shape: tuple[int, ...], box: Box, at: int, distributed: bool, device: str) -> str:
    """The same in most steps."""
    return json.dumps([path, dtype, shape, box.offset, box.shape, at, distributed, device], separators=(",", ":"))


class BodyLayout:
    """Where the pieces of a state lie in the body of a segment. What has not changed is not placed anew."""

    def __init__(self, rule: WriteRule) -> None:
        self._rule = rule
        self._parts: dict[str, PlacedPart] = {}

    def place(self, state: CurrentState) -> list[PlacedPart]:
        """For each object."""
        found: list[PlacedPart] = []
        for part in state.parts:
            begin = found[-1].end if found else 0
            placed = self._parts.get(part.name)
            if placed is None or placed.pieces is not part.pieces or placed.begin != begin:
                placed = self._parts[part.name] = PlacedPart(part.pieces, begin, self._rule)
            found.append(placed)
        return found


def size_of(parts: Sequence[PlacedPart]) -> int:
    """Bytes of the body."""
    return parts[-1].end if parts else 0


def table(parts: Sequence[StateOfObject], placed: Sequence[PlacedPart], *, plain: bool) -> str:
    """What the table of a segment says, as JSON but for its sample: of each tensor path, dtype and whole shape, offset
    and shape of the box, its place in the body or -1, whether it is a DTensor, and the kind of its device. plain: with
    plain values."""
    values = ",".join(f"{json.dumps(part.name)}:{part.text}" for part in parts) if plain else ""
    tensors = ",".join(part.entries for part in placed if part.entries)
    return f'{{"plain":{{{values}}},"tensors":[{tensors}],"sample":'


@dataclass(frozen=True, slots=True)
class NewSegment:
    """A segment that is to be written. file: where. held: which part of which step it is. parts: the tensors of its
    body. begin: the beginning of its table, as table() returns it."""

    file: SegmentFile
    held: HeldSegment
    parts: Sequence[PlacedPart]
    begin: str

    @property
    def samples_gpu(self) -> bool:
        """Whether the table says a checksum of what is on a GPU."""
        return any(tensor.is_cuda for part in self.parts for tensor in part.ends.others)

    def table(self, mark: StreamMark) -> bytes:
        """The whole table. mark: behind which the state is complete."""
        with mark.behind():
            return f"{self.begin}{sample(part.ends for part in self.parts)}}}".encode()


class StepCopy:
    """Writes a segment with a thread, while the script goes on, and sends it to the mirrors."""

    def __init__(
        self,
        segment: NewSegment,
        mirrors: Sequence[SegmentMirror],
        thread: CopyThread,
        *,
        at_once: bool,
        gpu_at_once: bool,
    ) -> None:
        """at_once: copy all tensors here, and leave the checksum and the mirrors to the thread. gpu_at_once: do so with
        tensors on a GPU. Otherwise the thread copies what only the step of an optimizer changes. Other tensors on a GPU
        are copied on the GPU first, and from there by the thread. Raises OSError."""
        self.step = segment.held.step
        self.error: OSError | None = None
        self._failure: BaseException | None = None
        """What the copy of a tensor raised, or the sending, but for CopyFailed: wait() and join() raise it in the
        script."""
        self.torn = ""
        """The path of a tensor that was changed while it was copied; the step is not kept then."""
        self.unsent: list[tuple[SegmentMirror, str]] = []
        """Mirrors that do not have it, and why."""
        self.seen = False
        """Whether the script knows of its end here."""
        self.stepped = False
        """Whether an optimizer that waits for it has begun a step since. A replayed CUDA graph makes steps unheard."""
        self._segment, self._mirrors = segment, mirrors
        self._size = size_of(segment.parts)
        segment.file.begin(self._size)
        self._mark = DONE
        self._later = [one for part in segment.parts for one in part.steady]
        self._clones: list[tuple[CopyList, list[torch.Tensor]]] = []
        """Copies on a GPU, which are complete behind the mark."""
        for one in (one for part in segment.parts for one in part.others):
            clones = _clones_of(one.tensors) if one.on_gpu and not (at_once or gpu_at_once) else None
            if clones is None:
                self._write(one, one.tensors)
            else:
                self._clones.append((one, clones))
        gpus = {tensor.device for part in segment.parts for tensor in part.ends.others}
        gpus |= {tensor.device for one in self._later if one.on_gpu for tensor in one.tensors}
        self._mark = StreamMark(gpus | {tensor.device for _, clones in self._clones for tensor in clones})
        self._table = b"" if segment.samples_gpu and not (at_once or gpu_at_once) else segment.table(self._mark)
        for one in [one for one in self._later if at_once or (gpu_at_once and one.on_gpu)]:
            self._write(one, one.tensors)
            self._later.remove(one)
        self._versions = [_versions(one) for one in self._later]
        self._here, self._sent = threading.Event(), threading.Event()
        thread.call(self._run)

    def wait(self) -> None:
        """Until it is in the memory of this machine, or cannot be. Raises what a tensor raised that was copied."""
        self._here.wait()
        if self._failure is not None:
            raise self._failure

    def join(self) -> None:
        """Until it is on the other machines, too, or cannot be. Raises as wait(), and what the sending has raised."""
        self._sent.wait()
        if self._failure is not None:
            raise self._failure

    def _write(self, one: CopyList, tensors: list[torch.Tensor]) -> None:
        """tensors: its own, or their clones."""
        into = one.into(self._segment.file)
        if one.on_gpu:
            HostBytes(tensors, self._mark).copy_to([place.reshape(-1).view(torch.uint8) for place in into])
        else:
            copy_all(into, tensors)

    def _run(self) -> None:
        body = self._segment.file.body(0, self._size)
        try:
            header = self._write_all(body)
            self._here.set()
            if header is not None:
                self._send(header, body)
        except BaseException as error:  # the script has to hear of it; SystemExit would end the thread for later steps
            self._failure = error
        finally:
            self._here.set()
            self._sent.set()

    def _write_all(self, body: memoryview) -> Header | None:
        """None: there is no whole segment."""
        segment = self._segment
        try:
            for one, clones in self._clones:
                self._write(one, clones)
            self._clones = []
            moved, summed = self._write_later(body)
            self._table = self._table or segment.table(self._mark)
            self.torn = moved or self._changed()
            return None if self.torn else segment.file.finish(segment.held, body, self._table, summed=summed)
        except OSError as error:
            self.error = error
            return None

    def _send(self, header: Header, body: memoryview) -> None:
        for mirror in self._mirrors:
            try:
                mirror.send(self._segment.file.name, header, body, self._table)
            except CopyFailed as error:
                self.unsent.append((mirror, str(error)))

    def _write_later(self, body: memoryview) -> tuple[str, int | None]:
        """What the thread copies of the script's own tensors, behind all else. Returns the path of a tensor whose
        memory has moved meanwhile, or ""; and the checksum of the body, if it is known."""
        for one in self._later:
            if not one.groups:
                self._write(one, one.tensors)
        if not any(one.groups for one in self._later):
            return "", None
        filled, moved = FilledBody(body), ""
        for one in self._later:
            for group in one.groups:
                moved = group.copy(filled) or moved
        return moved, filled.checksum()

    def _changed(self) -> str:
        """The path of a tensor that is no more as it was when the copy began; "": all are."""
        for one, then in zip(self._later, self._versions, strict=True):
            if (now := _versions(one)) != then:
                return next(path for path, *both in zip(one.paths, now, then, strict=True) if both[0] != both[1])
        return ""


def _versions(one: CopyList) -> list[int]:
    return [source._version for source in one.sources]


def _clones_of(tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Copies of them on their GPU, which are complete after what its stream has to do; None: it has no memory."""
    try:
        return [tensor.detach().clone() for tensor in tensors]
    except torch.OutOfMemoryError:
        return None


def copy_all(into: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    """Copy each tensor into its place. Those of the CPU in one call, for which Python's lock is not needed."""
    with torch.no_grad():
        if into and all(map(_is_plain, tensors)):
            torch._foreach_copy_(into, tensors)
        else:
            for place, tensor in zip(into, tensors, strict=True):
                place.copy_(tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements are in the memory of the CPU, as torch says."""
    return tensor.is_cpu and type(tensor) in (torch.Tensor, nn.Parameter)


def _is_as_it_lies(tensor: torch.Tensor) -> bool:
    """Whether its elements are those of its memory, one behind the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
