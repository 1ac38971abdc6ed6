"""What is to be done to a job, and when. Pure.

faults.py      what a fault is, and whom it hits
catalogue.py   all faults, one row each
rounds_catalogue.py  those of scripts in rounds
failpoints.py  points at which a worker can be struck, and what can be done there
schedule.py    which faults come when, from a preset, a seed and a duration
scenario.py    what `elastic chaos run` is asked for, in TOML
traces.py      nodes that come and go, as spot markets were seen to do
"""
