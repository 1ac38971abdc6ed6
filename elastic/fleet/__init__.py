"""Several machines, several jobs: who offers slots, which jobs wait, and where each of them runs.

    operator --Ask: submit, stop, drain-->  rendezvous, 1..3 replicas  <--Attend: what to run--  node daemon
                                               |  all that lasts: etcd                              |  a process each
                                            one elastic.replica.Part for each job  <--Attend--  elastic.agent of a job

`elastic rendezvous` is one replica (server.py). All replicas read the same documents from the store (registry.py);
one of them, elected, is the fleet's leader (office.py): it alone changes the documents, and the node daemons attend
it. For each job that has a place every replica stands for election besides, as for a job alone (elastic/replica.py), so
jobs do not depend on each other, nor a running one on the fleet's leader.

`elastic agent` is the daemon of a node (daemon.py), with a stream to the leader (attendance.py). For each job that it
is told to run it starts an agent of that job (charge.py), the same program as under `elastic run`, which attends the
job's leader by itself.

    documents.py     P  what is kept: submissions, sizes, placements, cordons
    schedule.py      P  which job gets which slots, and what the others wait for
    succession.py       what a daemon hands to the program that takes its place
    client.py           how an operator asks a fleet
    addresses.py        addresses as they are given; devices.py: which GPUs a job gets
    board.py            a node's notices: asked for once, shown to all its jobs
    archive.py          logs and journals, read from afar; logs.py and journals.py put them together
    surroundings.py     what a replica or a node finds around itself; survey.py asks all of them
    findings.py      P  what `elastic doctor` makes of it: add a check there
    top.py              one look after another

P = pure: standard library only; no clock, thread, socket or file.
"""
