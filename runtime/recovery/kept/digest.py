"""The digest of a step that is kept: of all its tensors, each as a whole, so it is the same however they are sharded.

The workers of the job divide the tensors. Each reads what its tensors have in the segments of other machines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from elastic.errors import CheckpointCorrupt
from runtime.recovery.kept.boxes import Box, missing
from runtime.recovery.kept.loading import SavedTensor, Stored
from runtime.recovery.kept.place import LEFT_OUT, ORDER, RANDOM
from runtime.recovery.kept.remote import RemoteSegment
from runtime.recovery.kept.segment import Segment
from runtime.recovery.state import state_digests
from runtime.recovery.state.encoding import from_blob

_OF_RANK = " of rank "


def leaf_digests(segments: Sequence[Segment | RemoteSegment], share: int, shares: int, *, own: bool) -> dict[str, str]:
    """Name -> 16 hex digits for each tensor of this worker's share. segments: all parts of a step. own: each rank may
    have tensors that the others have not alike (--ranks). Raises CheckpointCorrupt and CopyFailed."""
    found: dict[str, SavedTensor] = {}
    for segment in sorted(segments, key=lambda one: one.header.part):
        rank = segment.header.part
        for path, dtype, shape, offset, extent, at, distributed, device in segment.table()["tensors"]:
            if at < 0 or path.partition(".")[0] in (ORDER, RANDOM, LEFT_OUT):
                continue
            name = path if distributed or not own or not rank else f"{path}{_OF_RANK}{rank}"
            saved = found.setdefault(name, SavedTensor(path, dtype, tuple(shape), distributed, device))
            saved.boxes.append(Stored(segment, Box(tuple(offset), tuple(extent)), at))
    return {name: _digest(found[name]) for name in sorted(found)[share::shares]}


def _digest(saved: SavedTensor) -> str:
    leaf = saved.path, f"{saved.dtype} {list(saved.shape)}", _whole(saved)
    return state_digests.digests([leaf])[saved.path]


def _whole(saved: SavedTensor) -> torch.Tensor:
    box = Box.whole(saved.shape)
    if lacking := missing(box, (stored.box for stored in saved.boxes)):
        raise CheckpointCorrupt(f"{lacking} elements of {saved.path} are in no segment of this step")
    whole = torch.empty(saved.shape, dtype=from_blob(torch.empty(0, dtype=torch.uint8), saved.dtype, (0,)).dtype)
    saved.fill(whole, box)
    return whole


def combined(shares: Iterable[Mapping[str, str]]) -> str:
    """The digest of the step, SHA-256 in hex, of what leaf_digests() gives for all shares; "": of nothing. What a rank
    has as rank 0 has it counts once: which ranks keep it depends on the first step of a round."""
    found = {name: digest for share in shares for name, digest in share.items()}
    leaves = [
        (name, digest, None)
        for name, digest in found.items()
        if _OF_RANK not in name or found.get(name.partition(_OF_RANK)[0]) != digest
    ]
    return state_digests.digest(leaves) if leaves else ""
