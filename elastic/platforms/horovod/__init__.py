"""`elastic horovodrun`: the command of Horovod's launcher, on jobs of this program.

hosts.py           lists of hosts and their slots, and what a new list changes. Pure
option_mapping.py  what becomes of each option of horovodrun. Pure
discovery.py       the script that lists the hosts, asked once a second
host_options.py    where the workers are to be, and the job that this means
function_calls.py  functions that are called in several workers
host_task.py       the program that is one host of the job, started here or by ssh
launcher.py        the job from its start to its end
"""
