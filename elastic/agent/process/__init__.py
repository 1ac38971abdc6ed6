"""Processes of workers: started, watched, signalled and ended by the agent, none left behind.

worker_processes.py   all of them, each in its slot
process_start.py      how a process is started: a worker cold, or the fork server; imports little
worker_process.py     one process: tied to its agent's life, watched through a pidfd
launcher.py           how a worker is started: forked by the fork server, or cold
forkserver_client.py  the agent's side of the fork server
agent_process.py      an agent with its subreaper, started by the daemon of a node, maybe before it is needed
subreaper.py          runs the agent, and ends what is left of its workers
stdout_pump.py        lines on the agent's own standard output
mpirun.py             `--ring mpi`: one mpirun, whose ranks are given to the workers
mpi_placeholder.py    what mpirun starts for each rank
"""
