"""The code in the training process: the script's loop, the ring, the copies of the state. Imports torch.

In this list, each package imports only those above it, and of `elastic` no package above `elastic/agent/worker`:

    script_files.py which files belong to the script, and which to libraries
    torch_names.py  what of torch is used that it does not document
    script_end.py   how a script ends, and where it raised
    ring/           connections between the members of a generation
    data/           batches, which depend on (epoch, step, shard) only
    fixed_point/    floats as integers, whose sum has the same bits in any order
    reduction/      the sum of a step's gradients
    state/          the training state
    session.py      the interface between job/ and worker/
    guards/         guards against mistakes in a training loop
    checkpoint/     durable checkpoints inside a worker
    transfer/       copies of the state between workers
    worker/         a worker under an agent, and jobs of one
    job/            what a training script sees
    torchrun/       the rendezvous of torchrun on etcd; in torchrun's agents, apart from the other packages
    ddp/            scripts that were written for torchrun and DistributedDataParallel, unchanged
    restart/        any script for torchrun, started again in each generation
    forkserver/     the process from which workers are forked
    launched.py     a worker of elastic.launch(), or on Ray or Spark
"""
