"""The daemon of a node: what `elastic agent` runs.

node_daemon.py      the daemon: jobs that it was told to run, its drain, its end
leader_session.py   its stream to the fleet's leader
job_runner.py       one job on this node: its directory and its agent
job_environment.py  what a node gives a job: environment, accelerators, settings
notice_board.py     the node's notices: asked for once, shown to all its jobs
"""
