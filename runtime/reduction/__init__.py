"""The sum of a step's gradients: the same bits whoever computes which shard.

gradient_harvest.py  random numbers, buffers and gradients of each shard, and the merged result
schedule.py          what is added to what, in which order, and where
over_mesh.py         an operation over a ring: headers, terms, sums
over_transport.py    the same, with tensors over a transport
partial_sum.py       what a worker folds, sends, keeps and serves
layout.py            which parameters lie where in a flat tensor
flat_pool.py         memory for flat tensors, used again
unpacked_leaf.py     gradients that are not copied before they are added
buffers.py           what shards change of modules, and how it is merged
"""
