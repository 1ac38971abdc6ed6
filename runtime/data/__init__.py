"""Batches: the same for (epoch, step, shard), whoever asks.

loader.py         job.loader
stream.py         job.stream
prefetcher.py     batches fetched ahead by other processes
fetch_process.py  one such process
shared_memory.py  a batch handed from one process to another
random_state.py   random numbers seeded from a position
"""
