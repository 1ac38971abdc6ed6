"""What a script that is started again in each round (--restart) keeps of its state in memory: `elastic.keep`.

After each step every process writes its part of the state into a *segment*, a file in the job's directory in memory.
The segments of a step belong together. They outlive the scripts and the workers of the machine. Before the scripts of
the next round start, the workers check all segments and agree on the newest *whole* step, of which all parts are there.
The scripts load it, each what it needs, so the world may have another size.

boxes.py       where a shard lies in its tensor, and what it shares with another one. Pure
choice.py      which step the next round goes on from. Pure
segment.py     one segment: its file, how it is written so that a kill leaves no half of it, and how it is checked; the
               thread that writes
content.py     the objects of a script as tensors and plain values
reading.py     the same again and again, without making anew what has not changed
comparison.py  what of them all processes have alike
loading.py     these objects filled from the segments of a step, for any world
place.py       what a worker tells its script, and where segments lie
look.py        what a worker sees of the segments on its machine
remote.py      segments on other machines: mirrored, read, and copied
agreed_end.py  the step behind which all scripts of a round end as planned
ddp_order.py   in which order DDP sums, for a process that goes on from a later step
exact_sums.py  gradients of sharded models with the same bits in any world
copying.py     one step on its way into memory
step_log.py    what each process says of its steps, and what of it a worker has not read yet
digest.py      the digest of a step
keep.py        elastic.keep, and the object that it returns
"""
