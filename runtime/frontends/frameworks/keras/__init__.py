"""Keras 3 on torch in place: `model.fit()` as it is, with the gradients of all ranks in each step.

A batch of fit() is the batch of all ranks, of which each rank computes its part. So the script is one for a single
process, and a run of N ranks trains as `fit()` in one process does, but for rounding. Keras gets the places of batches
instead of batches; in its train function this worker's ranks are computed by the model's own `train_step`, whose
`optimizer.apply()` ends a rank's part. Behind it the optimizer steps once, with the gradients of all.

    fit.py        what fit() does otherwise
    batches.py    the batches of Keras's own data adapters, by epoch and step, and their parts
    saving.py     what it writes: by the leader
    variables.py  the variables of a model, its metrics and its optimizer, as the job carries them
    callbacks.py  who calls which callback, and what is kept of them
"""
