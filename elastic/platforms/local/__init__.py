"""Whole jobs on this machine: `elastic run`, `elastic doctor --exact` and `--ranks`, elastic.launch().

job_run.py          one run: etcd, the rendezvous, an agent, what a person sees, and nothing left behind
interrupts.py       signals that ask a command to stop, as something to wait for
reruns.py           all runs of one command, as long as each gets further
dashboard_process.py  `elastic run --dashboard`: the dashboard beside the job
script_command.py   the script or module that a worker is started with
live.py             the live table, or a line now and then
exactness_check.py  `elastic doctor --exact`: whether a script's bits depend on anything but its seed
ranks_check.py      `elastic doctor --ranks`: whether a script for torchrun may run with `elastic run --ranks`
rank_findings.py    what is said of it, from what its runs have noted; pure
examined_runs.py    the processes of both
run_differences.py  what they note, and the first difference between two of them; pure
outer_launcher.py   what torchrun, mpirun or srun have told this process
one_of_many.py      several processes of one command, of which one acts
launcher.py         elastic.launch(): `elastic run` as a child, what it says, and what becomes of the function
cell_output.py      what a notebook shows meanwhile
"""
