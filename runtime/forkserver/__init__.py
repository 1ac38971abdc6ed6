"""The process from which workers are forked: it imports torch once for all workers of an agent.

server.py          the fork server's side of its channel to the agent
clone_parent.py    fork(), except that the child's parent is our parent
without_dynamo.py  torch's optimizers without half of torch's imports, and programs that need those
script_runner.py   runs a script as `python SCRIPT` would, in an existing process
process_title.py   the command that a process list shows for a forked worker
"""
