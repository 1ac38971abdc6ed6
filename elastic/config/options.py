"""The values that options of a job choose from, and how a field is described as an option of `elastic run`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any


class Reduction(StrEnum):
    """How gradients are summed."""

    EXACT = "exact"
    """In the order of the canonical tree: the same bits for every world size."""
    ALLREDUCE = "allreduce"
    """In rank order: fastest, not bit-stable across world sizes."""
    FIXED = "fixed"
    """As integers, in any order: the same bits for every world size, and no more bytes than allreduce sends. Of 32 bits
    for float32 up to 64 shards a step, else of 64 bits."""
    FIXED64 = "fixed64"
    """The same, with 64 bits always: twice the bytes, and closer to the true sum than float32 can be."""

    @property
    def stable(self) -> bool:
        """Whether the bits of a sum are the same for every world size."""
        return self is not Reduction.ALLREDUCE

    @property
    def of_integers(self) -> bool:
        """Whether integers are summed, in any order."""
        return self in (Reduction.FIXED, Reduction.FIXED64)


class Compression(StrEnum):
    """What a shard's gradients of float32, bfloat16 and float16 are rounded to before they are summed. So is each sum
    of two of them, at its place in the tree: the same bits for every world size."""

    NONE = "none"
    BF16 = "bf16"
    """bfloat16: half of the bytes."""
    FP16 = "fp16"
    """float16: half of the bytes, 3 bits more than bfloat16, and sums of weighted gradients below 65504."""
    INT8 = "int8"
    """Integers of 8 bits and a step for each 252 of them: a quarter of the bytes. Rounded up or down at random."""


class Stragglers(StrEnum):
    """What becomes of a worker that is much slower than the others."""

    IGNORE = "ignore"
    """Nothing; all compute equally many shards, however fast they are."""
    NAME = "name"
    """Shards follow speed, and it is named."""
    DEMOTE = "demote"
    """Shards follow speed, and the slow worker gives its place to a spare, if a spare is ready."""


class Overlap(StrEnum):
    """Whether gradients are summed while backward goes on."""

    AUTO = "auto"
    """On if the workers are on several machines: within one, sending takes the processors from the training."""
    ON = "on"
    OFF = "off"


class RingKind(StrEnum):
    """What carries the gradients from worker to worker."""

    TCP = "tcp"
    """Summed on CPUs, also where the workers train on GPUs."""
    NCCL = "nccl"
    """Summed on GPUs, one of which each worker has to itself."""
    MPI = "mpi"
    """MPI between the CPUs of one machine, started by an mpirun of the job's own."""


@dataclass(frozen=True, slots=True)
class Option:
    """How a field is set: by a job file under its own name, by `elastic run` under this one. unit: stands for its value
    in the help. text: what it does, for both."""

    name: str
    unit: str
    text: str

    @classmethod
    def of(cls, owner: type, name: str) -> Option | None:
        """That of a field; None if only a job file sets it."""
        found = next(spec.metadata.get("option") for spec in fields(owner) if spec.name == name)
        assert found is None or isinstance(found, cls)
        return found


def option(name: str, unit: str, default: Any, text: str) -> Any:
    """A field with an Option. A flag, which has no unit, sets the value that is not the default."""
    return field(default=default, metadata={"option": Option(name, unit, text)})
