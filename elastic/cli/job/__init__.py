"""Verbs about one job.

run.py          `elastic run`, and the options of a job
status.py       `elastic status`
top.py          `elastic top`
story.py        `elastic logs`, `elastic story`
trace.py        `elastic trace`
dashboard.py    `elastic dashboard`
checkpoints.py  `elastic checkpoints`
samples.py      `elastic samples`
drain.py        `elastic drain`
worker.py       `elastic stacks`, `elastic kill`
"""
