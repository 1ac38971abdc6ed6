"""The leader of a job, and how agents find and attend it: `python -m elastic.rendezvous`.

server.py           the rendezvous service of one job on one machine
job_replica.py      a replica's part in one job: it stands for election, and leads while it holds the key
leader.py           one term of a replica as leader of a job
service.py          a replica's answers: the streams of agents, and `elastic status`
leader_stream.py    how the client of a leader finds it among the replicas
served_stream.py    the serving side of a stream: leaders, and agents for their workers
operator_client.py  single questions to the rendezvous, one call each
job_status.py       the state of a job on this machine, from its leader or its directory
endpoint.py         addresses, as an operator gives them
reach.py            how a job's agent reaches the rendezvous, and workers reach each other
__main__.py         `python -m elastic.rendezvous`
"""
