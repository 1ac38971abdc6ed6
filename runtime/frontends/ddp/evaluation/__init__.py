"""Evaluations of a script with logical ranks: loops without gradients over the batches of all ranks.

evaluations.py     a loop that calls no collective: run once for each rank, and what it adds up is added up
gathering_loop.py  a loop that may gather: run batch by batch
first_batch.py     which of the two a loop is, by what it calls for its first batch
fed_metrics.py     metrics of torchmetrics and evaluate, which a loop that gathers feeds
"""
