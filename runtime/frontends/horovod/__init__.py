"""Horovod's names for PyTorch: `import elastic.horovod.torch as hvd`.

A call goes to the *world* of this process, of which there are four: one process alone; torch.distributed, under
torchrun or `elastic run --restart`; logical ranks, `elastic run --ranks N`, where all is exact; and the members of an
elastic job, whose number changes. Names, arguments and their order are those of Horovod 0.28.

    interrupts.py       what Horovod raises, and what this package raises besides
    arithmetic.py       the reductions, Adasum among them, and how rows are dealt to ranks; pure
    compression.py      Compression.none and Compression.fp16
    world.py            what a world can do, and the world of one process
    call_matching.py    whether all ranks have made the same call; pure
    torch_world.py      torch.distributed: torchrun, `elastic run --restart`
    rank_world.py       logical ranks, and the optimizer step that ends a turn
    member_world.py     the members of an elastic job
    trained_modules.py  the modules to which tensors belong
    process_sets.py     ProcessSet
    current.py          init(), shutdown(), and who this process is
    collectives.py      allreduce and the like, their grouped, in-place and async forms
    objects.py          what is broadcast and gathered besides tensors of the script
    optimizer.py        DistributedOptimizer
    batch_norm.py       SyncBatchNorm
    timeline.py         start_timeline() and stop_timeline()
    elastic_mode.py     hvd.elastic: run, the states, ElasticSampler
"""
