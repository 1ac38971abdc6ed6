"""The worker's end of its connection to the agent. Light, because `runtime` and commands import it.

environment.py  what an agent tells a worker, as environment variables
client.py       the stream to the agent
death_watch.py  tells the agent of a worker's death before the kernel frees the worker's memory
step_spool.py   records of steps, kept until the agent has acknowledged them
held_signals.py  stop signals that do not come from the agent
stack_dump.py   the stacks of a worker that the agent gives up
import_scan.py  the modules that a script is going to import
nccl_environment.py  what NCCL reads from the environment
mpi_ranks.py    which worker has which rank of mpirun
function_file.py  a function of elastic.launch() on its way to the workers, and its value on the way back
examination.py  what `elastic doctor --exact` tells the script's process
node_notice.py  the notice of a node, as its workers and their scripts have it
"""
