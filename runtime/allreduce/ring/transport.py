"""The interface of a transport, which carries the tensors of a reduction if the mesh would have to copy them first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

from torch import Tensor


class Transport(Protocol):
    """A transport belongs to the ring of one generation, and ends with it. Ranks are those of that ring.

    It need not notice that a member is gone: then the ring is aborted, and the ring aborts its transport. Nor does it
    compare what members do; all exchanges were agreed upon over the mesh.
    """

    adds: bool
    """Whether it has `add_up`."""

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by the sum of all members', or by the largest values where it is int16. Inside an attempt
        only; every member calls it, with integers of the same dtypes and lengths. Raises as `exchange`."""

    def attempt(self) -> AbstractContextManager[None]:
        """A context around all exchanges of one reduction, in the thread that computes.

        Tensors that were computed before may be read inside. After an exit without an exception, all work is done:
        received tensors, and tensors computed from them inside, may be used anywhere, and sent tensors may change.
        Raises RingBroken when it is entered or left after an abort; then it does not use these tensors any more.
        """

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Send to the ranks of sends, and receive from the ranks of receives, all at once. Inside an attempt only.

        Every member calls this equally often, also with nothing to send or to receive, and a tensor that is sent in the
        n-th call is received in the n-th call: 1-D contiguous tensors of the same dtype and length on both sides. The
        next computation in this thread, on this device, finds the received tensors; the host may have to wait until the
        attempt is over. Raises RingBroken on an abort and for every error underneath.
        """

    def abort(self) -> None:
        """Make every exchange, running or later, raise RingBroken soon. Any thread; at once; may be called again."""

    def close(self) -> None:
        """Abort and free everything; returns when no attempt uses it any more. Any thread; may be called again."""


class Meeting(Protocol):
    """How the transports of a generation's members find each other, on the side of one member. Used by one thread."""

    @property
    def offer(self) -> str:
        """What rank 0 has to tell the others, which is sent to them while the mesh is built."""

    @property
    def because(self) -> str:
        """Why `connect` has returned None; "" otherwise."""

    def connect(self, offer: str) -> Transport | None:
        """Connect the transport, once the mesh is built; every member calls it with the offer of rank 0. It may take
        any time. None, on all members alike: the mesh carries the tensors.

        Raises BuildFailed, saying what to do, if the members cannot be connected in this way.
        """

    def abort(self) -> None:
        """Make `connect`, running in another thread, raise soon, as far as possible."""


Meet: TypeAlias = Callable[[int, Sequence[str], int], AbstractContextManager[Meeting]]
"""Makes a meeting from (generation, members in rank order, own rank). It is left as soon as it has succeeded or failed;
the offer need not be valid after that. Raises BuildFailed."""
