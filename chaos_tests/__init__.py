"""Breaks a running job on purpose and judges the history afterwards. Shipped, so that users can do it to theirs.

scenario/     what is to be done, and when. Pure
checkers/     the invariants. Pure
report/       the verdict, as a page and as documents. Pure
support/      what the harness needs of the machine
failpoints/   faults at a point of a worker's own work
cluster/      jobs and clusters to break
nemesis/      how faults are done
run/          a whole chaos run
traces/       spot markets as they were
cli.py        `elastic chaos`
"""
