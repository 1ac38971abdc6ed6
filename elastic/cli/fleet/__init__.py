"""Verbs about a fleet: its daemons, its jobs, its nodes.

daemons.py  `elastic rendezvous`, `elastic agent`
upgrade.py  `elastic upgrade`: agents replaced, node by node
certs.py    `elastic certs`
doctor.py   `elastic doctor`
submit.py   `elastic submit`
jobs.py     `elastic jobs`, `elastic stop`
scale.py    `elastic scale`, `elastic quota`
"""
