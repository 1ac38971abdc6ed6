"""What a shard brings to a sum.

layout.py         the places of parameters and buffers in a flat tensor
unpacked_leaf.py  gradients that are added without a copy before
leaf_format.py    what a leaf may have in place of its floats
fixed_leaves.py   integers, for sums in any order
narrow_leaves.py  narrower floats, for fewer bytes
early_leaf.py     gradients that are given away as backward completes them
"""
