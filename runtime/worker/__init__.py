"""A worker under an agent, whose operations survive the death of other members; and the sessions of a job of one.

Threads: the user's thread runs the operations; a control thread hears the leader's orders; each ring is built, and each
copy is served, by a thread of its own. They share one lock, `SharedWorkerState.changed`:

- It guards the worker's state, the sums, the leader's orders, and what donors serve. They are read and written under it
  only.
- It is reentrant. Each `post` notifies all waiters, so a waiter checks its condition again.
- No thread that holds it waits for the network, a device or another thread: words go to a queue, sockets are shut
  without a wait, sums are added outside. A ring that ends calls `post` from its own thread.
- The rings have a lock of their own, which is taken after this one and never before it.

    worker_session.py   the session of a worker under an agent
    operations.py       a member's way through its operations, until there is a result
    exchange.py         one exchange over the ring: headers, agreement, reduction
    overlap.py          the overlap of a reduction with backward
    state_owner.py      where this worker stands, under one lock
    leader_orders.py    the leader's orders to this worker
    progress_report.py  what beats say about the script: where it is, how fast
    activity.py         what the user's thread does, and for how long
    speed.py            how long a step and a shard take
    joining.py          how a newcomer becomes a member
    donor.py            a member's answers to newcomers and laggards
    held_copy.py        a copy of the state that its donor holds while training goes on
    copy_window.py      when other threads may read the registered tensors
    single.py           a job of one: the session of a script without an agent
    gpu.py              which GPU this worker has, and which exceptions are the GPU's
    recorded_join.py    jobs of one that enter as a newcomer would, or turn the order round, for `elastic doctor`
    isolated_shards.py  a job of one that computes each shard in a process of its own
"""
