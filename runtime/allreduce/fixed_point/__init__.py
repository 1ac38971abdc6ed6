"""Numbers as integers times a power of two for each block of them: their sum has the same bits in any order.

conversion.py    to integers and back; kernel.c, gpu_kernel.py and torch come to the same bits
gpu_kernel.py    the same in one walk through a GPU's memory
int8_blocks.py   to integers of 8 bits with a step for each block of them, and sums of these
exponents.py     which power of two a block gets: from the largest values of the passes before
kernel_build.py  compiles kernel.c when the project is installed
"""
