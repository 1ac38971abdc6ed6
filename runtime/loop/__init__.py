"""What a training script sees: `elastic.join()`, and everything that it returns.

sinks/              JSON lines and TensorBoard, for job.log_to
job.py              the Job
loops.py            job.epochs and job.steps
step.py             a step: one optimizer update of the whole job
passes.py           a pass over the shards of a step, until the gradients of the whole step are in place
outer_pass.py       a pass of rounds: inner steps of replicas, then one outer step
training/           shared by the objects of one job: its loop, what is registered, calls of all workers
call_replies.py     what collective calls gave, for newcomers and for runs that go on from a checkpoint
collectives.py      calls that all workers make between passes: once, agree, allreduce, shared
evaluation.py       job.evaluate
step_cache.py       step.cached: values of a shard, kept for later passes
hooks/              what runs between two steps on the leader only, or when the world has changed
control_scalars.py  scalars in every reduction for a stop, and for wishes for copies of the state
node_lock.py        job.node_lock
process_start.py    how this process was started, and on which device it runs
exactness_probe.py  notes the state step by step for `elastic doctor`
"""
