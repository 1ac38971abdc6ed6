"""One worker's side of a job, on which every way to write a loop stands: job.steps() and job.epochs(), `--ranks`.

A loop tells Training what its script does, in the order that elastic/protocol/loop_state describes, and computes what
it is handed out. Nothing here knows how a loop looks to its user.

training.py    the loop: epochs, steps, passes; what belongs between two of them
registered.py  what the script trains, and the guards that watch it
earlier_loops.py  training loops that are over, in a script that has several
agreement.py   what all workers must have in common
step_scope.py  the step in progress, and its record
calls.py       operations that reduce no gradients: once, agree, evaluate, shared
gathering.py   values of any size that the workers compute together, part by part
vector_sums.py sums of tensors that each worker brings once
saves.py       copies of the state between two steps
newcomer.py    what newcomers are told here, and what this worker does while it is one
"""

from runtime.loop.training.calls import empty_leaf
from runtime.loop.training.training import Training

__all__ = ["Training", "empty_leaf"]
