"""`elastic adopt`: a plain training script becomes one that uses `job.steps()`.

Text in, text out: the script is never run. What is not known is refused with its line, the reason, and what to write.
Pure but for command.py, which reads and writes the file.

    script.py         the text, its tree, and what its names mean
    edits.py          changes of the text that leave all else as it is
    training_loop.py  where the batches and the epochs are, and which part of the body belongs to a shard
    batches.py        DataLoader and DistributedSampler become job.loader
    ranks.py          rank, world size, process group, DistributedDataParallel, collectives
    flow.py           in which order statements run, and which names have a value by then
    shard_values.py   what a batch has given and the step uses: step.log and step.metrics
    carried_names.py  what goes on from step to step: job.state
    one_process.py    what a script without ranks does once, and every worker would
    joining.py        elastic.join() and job.register()
    loop_text.py      job.epochs, job.steps and the loop over the shards
    leftovers.py      imports and names that nobody needs any more
    adoption.py       all of it, in order
    command.py        the verb
"""
