"""Ways into the loop for scripts that do not call job.steps(), and the rendezvous of torchrun.

ddp/         scripts for torchrun and DistributedDataParallel, unchanged: `elastic run --ranks N`
frameworks/  training loops of frameworks, unchanged: transformers.Trainer, Lightning
horovod/     Horovod's names for PyTorch
restart/     any script for torchrun, started again in each generation: `elastic run --restart`
preemption_info.py  notices in the shape of Ray Train's, for scripts of job.steps()
torchft.py   torchft's names for a script of logical ranks
torchrun/    the rendezvous of torchrun on etcd; in torchrun's agents, apart from the other packages
"""
