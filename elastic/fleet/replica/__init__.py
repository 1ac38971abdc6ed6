"""A replica of the rendezvous service of a fleet: the program that `elastic rendezvous` runs.

server.py     the replica: its tasks, and its elections for the fleet and for each job
leader.py     the duties of a replica while it leads the fleet
service.py    its answers to daemons and operators
admission.py  whether an agent may attend a job
"""
