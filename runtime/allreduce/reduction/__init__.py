"""The sum of a step's gradients, whose bits do not depend on which worker computes which shard.

gradient_harvest.py  random numbers, buffers and gradients of each shard, and the merged result
topology.py          who sums which slice: first within each node, then between nodes
schedule.py          what is added, in which order
headers.py           what each member brings, and what all have to agree on
entries.py           one member's part of the headers, as bytes
dissemination.py     everybody's header to everybody, in O(log P) messages
over_mesh.py         an operation over a ring: headers, and the sum of all terms
slice_sums.py        the tensors of an operation over a ring: terms, folds, sums
routes.py            the pieces of an operation over a ring, and from whom to whom each goes
lanes.py             what comes to a member while tensors are summed, and the memory for it
over_transport.py    the same operation, with tensors over a transport
partial_sum.py       a partial sum, which a worker folds, sends, keeps and serves
early_sums.py        the sum of a part of the tensors while the last shard is computed
leaves/              what a shard brings to a sum
flat_pool.py         memory for flat tensors, used again
host_copies.py       small tensors of a device, read or written by the host at once
buffers.py           buffers and modes of modules that shards change, and how they are merged
"""
