"""The process from which workers are forked: torch imported once, for all workers that this node ever starts.

server.py         the fork server's side of its channel to the agent
clone_parent.py   fork(), except that the child's parent is our parent
script_runner.py  a script as `python SCRIPT` would run it, in a process that is already there
process_title.py  what a process list shows of a forked worker
"""
