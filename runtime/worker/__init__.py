"""A worker under an agent: its operations survive the death of other members. And the sessions of a job of one.

Threads: the user's runs the operations; a control thread hears the leader's orders and builds rings; others serve
copies. They share one lock, which state_owner.py keeps.

    worker_session.py   the session of a worker under an agent
    operations.py       a member's way through its operations, until there is a result
    exchange.py         one exchange over the ring: headers, agreement, reduction
    state_owner.py      where this worker stands, under one lock
    leader_orders.py    what the leader has told this worker
    progress_report.py  what beats say of the script: where it is, how fast
    activity.py         what the user's thread does, and for how long
    speed.py            how long a step and a shard take
    joining.py          how a newcomer becomes a member
    donor.py            what a member serves to newcomers and laggards
    held_copy.py        a copy of the state that its donor holds while training goes on
    copy_window.py      when other threads may read the registered tensors
    single.py           a job of one: the session of a script without an agent
    recorded_join.py    a job of one that enters as a newcomer would, for `elastic doctor --exact`
    isolated_shards.py  a job of one that computes each shard in a process of its own
"""
