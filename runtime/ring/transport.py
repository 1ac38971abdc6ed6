"""What carries the tensors of a reduction beside the mesh, where the mesh would have to copy them first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

from torch import Tensor


class Transport(Protocol):
    """Belongs to the ring of one generation, and lives and dies with it. Ranks are those of that ring.

    It need not notice that a member is gone: then the ring is aborted, and the ring aborts it. It says nothing about
    who is where either; what is exchanged was agreed upon over the mesh.
    """

    def attempt(self) -> AbstractContextManager[None]:
        """Around all exchanges of one reduction, in the thread that computes.

        Tensors that were computed before may be read inside. Left without an exception, everything is done: what was
        received, and what was computed from it inside, may be used anywhere, and what was sent may change. Raises
        RingBroken when it is entered or left after an abort; then nothing in here reads or writes these tensors any
        more.
        """
        ...

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Send to each of these ranks, and receive from each of those, all at once. Inside an attempt only.

        Every member calls this equally often, also with nothing to send or to receive, and what one sends in its n-th
        call the other receives in its n-th: 1-D contiguous tensors of the same dtype and length on both sides. What is
        computed next in this thread, on this device, finds the tensors received; the host may have to wait until the
        attempt is over. Raises RingBroken on an abort and for whatever goes wrong underneath.
        """
        ...

    def abort(self) -> None:
        """Make every exchange, running or later, raise RingBroken soon. Any thread; at once; more than once."""
        ...

    def close(self) -> None:
        """Abort and free everything; returns when no attempt uses it any more. Any thread; more than once."""
        ...


class Meeting(Protocol):
    """How the transports of a generation's members find each other, as one of them sees it. Used by one thread."""

    @property
    def offer(self) -> str:
        """What rank 0 has to tell the others. It is told to them while the mesh is built."""
        ...

    @property
    def because(self) -> str:
        """Why `connect` has given None; empty otherwise."""
        ...

    def connect(self, offer: str) -> Transport | None:
        """Once the mesh is there; every member calls it, with the offer of rank 0. Takes as long as it takes. None, for
        all of them alike: the mesh has to do.

        Raises BuildFailed, saying what to do, when the members cannot be connected in this way.
        """
        ...

    def abort(self) -> None:
        """Make `connect`, running in another thread, raise soon, as far as that can be done."""
        ...


Meet: TypeAlias = Callable[[int, Sequence[str], int], AbstractContextManager[Meeting]]
"""A meeting for (generation, members in rank order, own rank); left as soon as it has succeeded or failed. What was
offered need not be there any longer then. Raises BuildFailed."""
