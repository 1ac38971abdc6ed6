"""The worker's end of what passes between an agent and its workers. Light: `runtime` and commands import it.

environment.py  what an agent tells a worker, as environment variables
client.py       the stream to the agent
death_watch.py  how the agent learns of a worker's death before the kernel has taken the worker apart
step_spool.py   records of steps, kept until the agent has acknowledged them
held_signals.py  signals to stop that others than the agent send
stack_dump.py   where a worker's threads are, when the agent gives it up
import_scan.py  which modules a script is going to import
mpi_ranks.py    who has which rank of mpirun
examination.py  what `elastic doctor --exact` tells the script's process
"""
