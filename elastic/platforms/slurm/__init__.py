"""`elastic slurm`: batch scripts for a fleet on the nodes of Slurm, printed or submitted.

batch_options.py  what both scripts have in common: the lines for sbatch, and words quoted for the shell. Pure
agents_script.py  an array of jobs, each an agent: nodes come and go one by one. Pure
fleet_script.py   one allocation, with a fleet of its own for one job. Pure
"""
