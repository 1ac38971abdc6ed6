"""The messages of workers, agents and leaders, and all decisions. Pure: no clock, socket, file or thread.

The state machines are fed events and answer with actions; the simulator runs the same code under virtual time.

    membership/          the job's state machine, which its leader owns
    worker_state/        a worker's side of operations and generations
    loop_state/          the life of a script in one worker: where it is in its loop, and how a newcomer gets the state
    messages/            words (up, from workers and agents) and orders (down, from the leader), as frozen values
    recovery_plan.py     who survives a loss, in which order of ranks, and who computes what again
    shard_assignment.py  how many units each member owns
    shard_advice.py      which number of shards lets nodes send fewer bytes
    reduction_tree.py    which leaves are added to which, on any worker
    sampling.py          which samples a shard gets
    failure_detector.py  which workers are alive, suspect or frozen; which agents are silent
    failures.py          what repeated failures prove: of the script, the data, the memory, a node
    worker_slot.py       a slot of an agent: whether and when another worker starts in it
    outer_round.py       a round of replicas with a quorum: when it is over, and what becomes of the late
    local_phase.py       a phase in which no worker waits: what is told of it
    worker_id.py         what the id of a worker says
"""
