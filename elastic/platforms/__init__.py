"""Where jobs run: on this machine, and on nodes that another system has.

local/   whole jobs on this machine: `elastic run`, `elastic doctor --exact`, elastic.launch()
search/  hyperparameter search, each trial a job
common/  a job on nodes that another system has: what Ray, Spark and horovodrun have in common
ray/     jobs on a Ray cluster
spark/   jobs on the executors of Spark
horovod/ `elastic horovodrun`: jobs on hosts that a list or a script names
slurm/   batch scripts for Slurm
k8s/     the manifest of a job on Kubernetes, and what its pods run
"""
