"""A job on the nodes of another system, which starts a task of ours on each node.

    driver --child--> fleet host: etcd, and one replica of the rendezvous, for this job alone
    task of the engine --child--> agent of the node --> workers

The driver decides nothing about members: it gives each task a ticket, and waits for the job to end. Tasks are started
again by their engine or by the driver, each time as a new node. A node that is lost is a loss like any other.

job_request.py    what is to run, and its JobSpec. Pure
name_claim.py     of two calls at once with one name, one trains
fleet_host.py     the program that holds etcd and the rendezvous
private_fleet.py  the driver's side of it: certificates, tickets, questions
agent_child.py    an agent as a child, until the job is over
node_task.py      what a task of Ray or Spark does on its node
job_driver.py     one job from its start to its result
"""
