"""Code of the script, or for it, that runs between two steps on the leader only, or when the world has changed.

leader_values.py  what the leader alone computes, for job.once
leader_hooks.py   on_lead hooks, and how sinks are fed
world_hooks.py    on_resize and on_drain hooks
"""
