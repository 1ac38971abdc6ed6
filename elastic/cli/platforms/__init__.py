"""Verbs that start jobs on other systems, and many jobs at once.

slurm.py       `elastic slurm`
k8s.py         `elastic k8s`
search.py      `elastic search`
horovodrun.py  `elastic horovodrun`
"""
