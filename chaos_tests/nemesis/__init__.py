"""How the faults of a plan are done to a running job: one module for each thing that they are done to.

The row of a fault (scenario/catalogue.py) names its function. That takes the scene, what is planned, and what the row
gives besides; it writes to the journal what it did, and leaves in `scene.running` what has to be ended. Raises NotNow
or Impossible with nothing done.

    nemesis.py            carries out a plan: waits for each fault's time, has it done, sees it, ends it
    scene.py              what all faults work on
    membership_view.py    who is in the job now, from its journals
    workers.py            workers, from outside
    kept.py               what scripts in rounds have kept in memory
    scripts.py            the scripts of a job in rounds, beside their workers
    failpoints.py         workers, at points of their own work
    signals.py            signals and files of this machine
    out_of_memory.py      a process without memory
    tcp_reset.py          TCP connections, reset
    nodes.py              nodes, the leading replica, all workers; strangers
    links.py              links between hosts
    machine.py            services of a job of one machine, and the machine
    capacity.py           machines that are taken away
    checkpoint_damage.py  checkpoints
    etcd_members.py       members of etcd
    etcd_api.py           a running etcd, by its own interface
"""
