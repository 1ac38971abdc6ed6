"""The code in the training process: the script's loop, the ring, the copies of the state. Imports torch.

In this list, each package imports only those above it, and of `elastic` no package above `elastic/agent/worker`:

    script_files.py  which files belong to the script, and which to libraries
    torch_names.py   what of torch is used that it does not document
    script_end.py    how a script ends, and where it raised
    data/            batches, which depend on (epoch, step, shard) only
    allreduce/       the ring between members, and the exact sum of a step's gradients
    recovery/        the training state, its copies and its checkpoints
    outer/           training that averages seldom: LocalSGD, DiLoCo
    session.py       the interface between loop/ and worker/
    guards/          guards against mistakes in a training loop
    worker/          a worker under an agent, and jobs of one
    loop/            the loop of a training script: job.steps() and what belongs to it
    asynchronous/    training in which no worker waits for another one
    frontends/       other ways into the loop: DDP scripts, --restart; and the rendezvous of torchrun
    forkserver/      the process from which workers are forked
    launched.py      a worker of elastic.launch(), or on Ray or Spark

Within allreduce/ and recovery/ the order is ring, fixed_point, reduction, state, checkpoint, transfer.
"""
