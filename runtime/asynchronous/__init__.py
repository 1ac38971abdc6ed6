"""Training in which no worker waits for another one: through a store of parameters, or in pairs without a centre.

ownership.py       which worker owns a piece of the parameters, and which mirrors it. Pure
units_left.py      the work that is left, and who takes which part of it. Pure
update_rules.py    delayed Nesterov momentum, and what a late update counts
piece_copies.py    the pieces that a worker holds: a state machine without sockets and clocks
member_calls.py    questions to other members while they train
store.py           the store: pushes, mirrors, generations
phase_notes.py     what workers say at the end of a phase, and what follows from it
own_values.py      learning rates and schedulers, of which each worker has its own
own_buffers.py     statistics of BatchNorm and the like, of which each worker has its own in a phase
local_training.py  what all ways have in common
gossip_schedule.py who averages with whom. Pure
gossip.py          elastic.Gossip
through_store.py   elastic.Asynchronous
loop.py            elastic.asynchronous: the loop of a script
"""

from runtime.asynchronous.gossip import Gossip
from runtime.asynchronous.loop import asynchronous
from runtime.asynchronous.through_store import Asynchronous

__all__ = ["Asynchronous", "Gossip", "asynchronous"]
