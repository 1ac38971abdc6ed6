"""`elastic slurm`: batch scripts for a fleet on the nodes of Slurm, and what runs in an allocation.

batch_options.py  what both scripts have in common: the lines for sbatch, and words quoted for the shell. Pure
batch_scripts.py  an array of jobs, each an agent; one allocation, with a fleet of its own for one job. Pure
allocation.py     the programs of that allocation: of its first node, and of each
"""
