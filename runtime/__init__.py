"""Inside the training process: the loop a script writes in, the ring, the copies of the state. Imports torch.

Below, each package imports only those above it, and of `elastic` no package above `elastic/agent/worker`:

    script_end.py   how a script ends, and where it raised
    ring/           connections between the members of a generation
    data/           batches: the same for (epoch, step, shard), whoever asks
    reduction/      the sum of a step's gradients
    state/          what the training state is
    session.py      what the loop needs from the world: the seam between job/ and worker/
    guards/         mistakes in a training loop, made loud
    checkpoint/     durable checkpoints inside a worker
    transfer/       copies of the state between workers
    worker/         a worker under an agent, and jobs of one
    job/            what a training script sees
    torchrun/       the rendezvous of torchrun on etcd; in torchrun's agents, apart from all others
    ddp/            scripts that were written for torchrun and DistributedDataParallel, unchanged
    forkserver/     the process from which workers are forked
"""
