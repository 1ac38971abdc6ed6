"""The training state, and what restores it: copies from member to member, and durable checkpoints.

state/       what is registered, as bytes and as values
checkpoint/  durable checkpoints inside a worker
transfer/    copies of the state between workers
kept/        what scripts that are started again keep in memory, `elastic.keep`
"""
