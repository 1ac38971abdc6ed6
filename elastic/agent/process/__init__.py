"""Worker processes: started, watched, signalled and ended by the agent.

worker_processes.py   all of them, each in its slot
process_start.py      starts a process: a cold worker, or the fork server; imports little
worker_process.py     one process: tied to its agent's life, watched through a pidfd
memory_kills.py       whether the kernel has ended a worker for want of memory
launcher.py           starts a worker: forked by the fork server, or cold
forkserver_client.py  the agent's side of the fork server
agent_process.py      an agent with its subreaper, started by a node's daemon, perhaps before it is needed
subreaper.py          runs the agent, and ends what is left of its workers
stdout_pump.py        lines on the agent's own standard output
mpirun.py             `--ring mpi`: one mpirun, whose ranks are given to the workers
mpi_placeholder.py    the program that mpirun starts for each rank
"""
