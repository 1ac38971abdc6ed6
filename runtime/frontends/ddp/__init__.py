"""Logical ranks: a script written for torchrun and DistributedDataParallel trains in place, unchanged.

The script sees WORLD_SIZE = N for ever. Each of these N *logical ranks* is one shard of every step, whichever worker
computes it: its batches are those that the script's own DistributedSampler gives that rank. A worker that computes
several of them, or inherits one, is handed one more turn of the script's own loop. Only in the *last turn* of a step
are the gradients of all ranks in place, and only there optimizers and schedulers act; all turns before are *silent*.

    seams.py          what is replaced in torch while a script runs here, and put back
    mistakes.py       what a script does that logical ranks cannot, made loud
    rank_values.py    what a collective gives, from what the workers bring for the logical ranks; pure
    rank_source.py    the batches of an epoch for any rank, and how many are used up
    sampler_source.py those that a DistributedSampler gives each rank
    own_parts.py      what a script splits by its own rank, which nobody can give other ranks
    drawn_batches.py  those that the script draws itself: elastic.ddp.batches()
    frames/           what the script keeps in its frames: undone after silent turns, given to newcomers
    rank_script.py    the script: where it is, and what comes next
    script/           what the script has: its objects, turns, loop, calls, kept values and epochs
    evaluation/       its evaluations, spread over the workers
    batches.py        what iterating over a DataLoader gives: turns, or an evaluation
    collectives.py    torch.distributed's collectives, of logical ranks
    process_group.py  the backend "elastic" of torch.distributed, and the rank that it answers with
    wrapper.py        DistributedDataParallel without its reducer
    held_back.py      what optimizers, schedulers and the like do not do in a silent turn
    enable.py         all of it, in a process that asks for it
"""
