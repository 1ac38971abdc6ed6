"""What a script for N ranks has, beside the place where it is (rank_script.py has that).

The worker's thread that runs the script is the only one that uses it.

    objects.py      what it has made: models, optimizers, schedulers
    turns.py        one pass over the ranks, a turn of its loop for each of this worker's
    loop.py         the loop in which it takes its batches, by its text
    calls.py        what it calls for all ranks, counted
    kept_values.py  what it keeps in its frames: undone after silent turns, taken over from others
    epochs.py       which of the job's epochs it is in, whatever number it gives that epoch
"""
