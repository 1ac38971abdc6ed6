"""Batches, which depend on (epoch, step, shard) only.

loader.py         job.loader
stream.py         job.stream
parquet.py        elastic.ParquetStream, for job.stream
prefetcher.py     batches fetched ahead by other processes
fetch_process.py  one process that fetches batches
shared_memory.py  a batch passed from one process to another
random_state.py   random numbers seeded from a position
"""
