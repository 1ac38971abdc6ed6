"""A worker's side of operations and generations: ``step(state, event) -> (state, actions)``.

This package decides where a worker stands; it knows neither sockets nor tensors. Two threads of a worker post events
under one lock (the user's thread: what it has computed; the control thread: orders and rings), and the user's thread
asks `next_move` what to do next.

An operation k goes ``READY -> COLLECTING -> READY``: `Begin` starts it, units are computed and folded, an exchange
yields its result (`Obtained`), and only the user's next operation shows that the result was applied. The rules:

* A report is final: after `Quiesce` the ring is aborted first, and a result or copy that arrives later is refused.
* A quiesced worker starts no further unit; the unit that runs is finished and belongs to the next plan.
* The pending generations are read once per attempt (`ReadHeader`), the same for all receivers.
* The donor (rank 0) carries a join only while every newcomer holds the complete state of this operation.
* A planned generation takes effect after k if all headers of k carried it; of two, the newer one. If all headers have
  none in common, nothing changes.
* Draining members do not wait for newcomers: a generation without the newcomers is carried beside the newest.
* The result of k is kept until headers of k + 1 from every member of the current generation are held, or, if results
  are not retained, until this worker has used it (`Used`), unless newcomers came in after k.

    state_machine.py      passes each event to the function that handles it; what became of a ring
    events.py             events of a worker, and the actions that a step asks of its threads
    state.py              where a worker stands
    operation.py          an operation, from its begin to its result
    next_move.py          what the user's thread does next
    pending.py            which pending generations a header carries, and which took effect
    generation_change.py  quiesced, planned, lost, joined
"""

from elastic.protocol.worker_state.events import (
    AbortRings,
    Acknowledge,
    Acknowledged,
    Action,
    AwaitAcknowledgements,
    Begin,
    BuildRing,
    CloseRetired,
    Copied,
    CopyBegun,
    CopyEnded,
    Done,
    DropRoots,
    Event,
    Fetched,
    FetchFailed,
    FreeResult,
    GraceOver,
    HeadersHeld,
    Joined,
    Leave,
    LinksClosed,
    Obtained,
    Outcome,
    ReadHeader,
    RetireRing,
    RingBuilt,
    RingFailed,
    RingLost,
    Say,
    Started,
    Used,
)
from elastic.protocol.worker_state.next_move import (
    AskOutcome,
    Compute,
    CopyResult,
    CopyState,
    Deliver,
    Exchange,
    Linger,
    Move,
    Released,
    Stop,
    Wait,
    next_move,
    seek,
)
from elastic.protocol.worker_state.pending import outcome
from elastic.protocol.worker_state.state import Phase, WorkerState
from elastic.protocol.worker_state.state_machine import step

__all__ = [
    "AbortRings",
    "Acknowledge",
    "Acknowledged",
    "Action",
    "AskOutcome",
    "AwaitAcknowledgements",
    "Begin",
    "BuildRing",
    "CloseRetired",
    "Compute",
    "Copied",
    "CopyBegun",
    "CopyEnded",
    "CopyResult",
    "CopyState",
    "Deliver",
    "Done",
    "DropRoots",
    "Event",
    "Exchange",
    "FetchFailed",
    "Fetched",
    "FreeResult",
    "GraceOver",
    "HeadersHeld",
    "Joined",
    "Leave",
    "Linger",
    "LinksClosed",
    "Move",
    "Obtained",
    "Outcome",
    "Phase",
    "ReadHeader",
    "Released",
    "RetireRing",
    "RingBuilt",
    "RingFailed",
    "RingLost",
    "Say",
    "Started",
    "Stop",
    "Used",
    "Wait",
    "WorkerState",
    "next_move",
    "outcome",
    "seek",
    "step",
]
