"""The points at which a worker can be struck, what can be done to it there, and an order to do so."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum

IN_SHARD = "in-shard"
"""A shard was handed out; the script is about to compute it."""
BEFORE_REDUCTION = "before-reduction"
"""All its shards are done, and nothing was sent."""
IN_REDUCTION = "in-reduction"
"""The headers of all members are there; slices are under way."""
BETWEEN = "between-receive-and-send"
"""It has received its slice of every root, and has sent no sum."""
RESULT_HELD = "result-held"
"""It has the result, and is about to update its parameters."""
EARLY_SENT = "early-sent"
"""A part of the gradients of its last shard is being sent, and the rest is not computed yet (--overlap)."""
IN_REPETITION = "in-repetition"
"""A gradient did not fit its integers, and it is about to compute a shard again (--reduction fixed)."""
IN_EVALUATION = "in-evaluation"
GRADIENT_READY = "gradient-ready"
"""The gradients of a shard that several workers compute are there, and nobody has seen them (--verify)."""
IN_SCRIPT = "in-script"
"""While a script of a job in rounds runs."""
SEGMENT_BEGUN = "segment-begun"
"""A script with elastic.keep has made its oldest segment invalid, and is about to write a step into it."""
SEGMENT_WRITTEN = "segment-written"
"""Its tensors are there; table and header are not."""
SEGMENT_KEPT = "segment-kept"
"""The header is there, so the step is kept on this machine; it is not on another one."""
SEGMENT_SENT = "segment-is-sent"
"""To another machine, or from there to a script."""
THIN_COPIED = "thin-part-is-copied"
"""A worker is about to copy what another machine alone has kept."""
IN_REBUILD = "in-rebuild"
"""It is about to connect to the members of a new generation."""
COPY_SENT = "copy-is-sent"
"""By the donor, to a newcomer."""
COPY_RECEIVED = "copy-is-received"
"""By a newcomer, or by one that missed a result."""
PART_WRITTEN = "part-written"
"""Its part of a checkpoint or snapshot is there, and the note that says so is not."""
BEFORE_MANIFEST = "before-manifest"
"""All parts of one are there, and what makes them a checkpoint is not."""
IN_WRITE = "checkpoint-is-written"
"""Something of a checkpoint is about to be made durable on its disk."""

UPDATE_MIRRORED = "update-mirrored"
"""The mirror of a piece has applied an update, and its owner, who is hit, has not."""
UPDATE_COMMITTED = "update-committed"
"""The owner, who is hit, has applied it, too, and has not answered."""
UPDATE_ANSWERED = "update-answered"
"""A worker, which is hit, has all answers to its update, and has not begun the next unit."""
PAIR_MIXED = "pair-mixed"
"""A worker has averaged with another one that has asked, and has not answered."""

FAILPOINTS_VARIABLE = "CHAOS_FAILPOINTS"
"""Environment variable: the directory of the orders."""
ANYBODY = "any"
"""In place of a worker: the worker that comes to the point first."""
DONE = "done.jsonl"
"""In the directory of the orders: what was carried out."""

STEP = (IN_SHARD, BEFORE_REDUCTION, IN_REDUCTION, BETWEEN, RESULT_HELD)
COPY = (COPY_SENT, COPY_RECEIVED)
CHECKPOINT = (PART_WRITTEN, BEFORE_MANIFEST)
DISK = (IN_WRITE,)
UPDATE = (UPDATE_MIRRORED, UPDATE_COMMITTED, UPDATE_ANSWERED)
KEEP = (SEGMENT_BEGUN, SEGMENT_WRITTEN, SEGMENT_KEPT)
MIRROR = (*KEEP, SEGMENT_SENT)
OF_ROUNDS = (*MIRROR, THIN_COPIED, IN_SCRIPT)


class Act(StrEnum):
    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    HANG = "waits for ever, without Python's lock"
    HANG_GIL = "waits for ever, with Python's lock"
    RAISE = "raises"
    INTERRUPT = "gets an exception from another thread"
    NO_MEMORY = "asks for more memory than it may have"
    FLIP_GRADIENT = "has one bit of a gradient flipped"
    FLIP_PARAMETER = "has one bit of a parameter flipped"
    FLIP_MOMENT = "has one bit of its optimizer's state flipped"
    DISK_FAILS = "gets an error for whatever it makes durable on its disk"
    DISK_SLOW = "waits a second more for whatever it makes durable on its disk"


FLIPS = (Act.FLIP_GRADIENT, Act.FLIP_PARAMETER, Act.FLIP_MOMENT)


@dataclass(frozen=True, slots=True)
class FailpointOrder:
    """number: of the fault. step: at this step alone; None: whenever the point is reached. for_s: of what lasts."""

    number: int
    point: str
    act: Act
    step: int | None = None
    for_s: float = 0.0

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, content: bytes) -> FailpointOrder:
        fields = json.loads(content)
        return cls(**{**fields, "act": Act(fields["act"])})
