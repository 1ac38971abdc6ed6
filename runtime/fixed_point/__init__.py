"""Numbers as integers times a power of two for each block of them: their sum has the same bits in any order.

conversion.py    to integers and back; the bits of both ways are those of kernel.c and of torch alike
int8_blocks.py   to integers of 8 bits with a step for each block of them, and sums of these
exponents.py     which power of two a block gets: from the largest values of the passes before
kernel_build.py  compiles kernel.c when the project is installed
"""
