"""Several machines, several jobs: which nodes offer slots, which jobs wait, and where each job runs.

    operator --Ask: submit, stop, drain-->  rendezvous, 1..3 replicas  <--Attend: what to run--  node daemon
                                               |  all that lasts: etcd                              |  a process each
                                            the leader of each job  <---------Attend---------  elastic.agent of a job

`elastic rendezvous` is one replica (replica/server.py). All replicas read the same documents from the store; one of
them, elected, is the fleet's leader: it alone changes the documents, and the node daemons attend it. For each job that
has a place every replica also stands for election as the job's leader (elastic/rendezvous/job_replica.py), so jobs do
not depend on each other, and a running job does not depend on the fleet's leader.

`elastic agent` is the daemon of a node, with a stream to the leader. For each job that it is told to run it starts an
agent of that job, the same program as under `elastic run`, which attends the job's leader by itself.

    documents.py      what the store keeps: submissions, sizes, placements, cordons, grants. Pure
    queue/            which job gets which slots, which is preempted, and what the others wait for. Pure
    rolling_upgrade.py  what `elastic upgrade` does next. Pure
    findings.py       what `elastic doctor` makes of the facts: add a check there. Pure
    registry.py       the documents in the store
    replica/          one replica: what `elastic rendezvous` runs
    node/             the daemon of a node: what `elastic agent` runs
    client.py         how an operator asks a fleet
    remote_logs.py    logs and journals of a job, collected from its nodes
    probes.py         facts that replicas and nodes find: etcd, disks, ports, versions
"""
