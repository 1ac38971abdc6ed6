"""The sum of a step's gradients, whose bits do not depend on which worker computes which shard.

gradient_harvest.py  random numbers, buffers and gradients of each shard, and the merged result
topology.py          who sums which slice: first within each node, then between nodes
schedule.py          what is added, in which order
headers.py           what each member brings, and what all have to agree on
dissemination.py     everybody's header to everybody, in O(log P) messages
over_mesh.py         an operation over a ring: headers, terms, sums
over_transport.py    the same operation, with tensors over a transport
partial_sum.py       a partial sum, which a worker folds, sends, keeps and serves
layout.py            the places of parameters and buffers in a flat tensor
flat_pool.py         memory for flat tensors, used again
host_copies.py       small tensors of a device, read by the host at once
unpacked_leaf.py     gradients that are added without a copy before
buffers.py           buffers and modes of modules that shards change, and how they are merged
"""
