"""Evaluations of a script with logical ranks: loops without gradients over the batches of all ranks.

A worker has the batches of its own ranks, and behind the loop the values of all.

    evaluations.py     a loop that calls no collective: run once for each rank, and what it adds up is added up
    gathering_loop.py  a loop that may gather: run batch by batch
    first_batch.py     which of the two a loop is, by what it calls for its first batch
    loop_values.py     what the loop of either kind changes
    fed_metrics.py     metrics of torchmetrics and evaluate, which a loop that gathers feeds
"""
