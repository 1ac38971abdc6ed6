"""Who leads a job, and how workers' agents find and attend the leader: `python -m elastic.rendezvous`.

server.py           the rendezvous service of one job on one machine
job_replica.py      a replica's part in one job: it stands for election, and leads while it holds the key
leader.py           one term of a replica as leader of a job
service.py          what a replica answers: the streams of agents, and `elastic status`
leader_stream.py    how whoever attends a leader finds it among the replicas
served_stream.py    a stream on the side that serves it: the leaders, and the agent for its workers
operator_client.py  anybody's question to the rendezvous, one call each
endpoint.py         addresses, as an operator gives them
reach.py            how a job's agent reaches the rendezvous, and workers each other
__main__.py         `python -m elastic.rendezvous`
"""
