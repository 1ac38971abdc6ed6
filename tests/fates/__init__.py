"""Random trainings and random fates, with real processes: each must end in the bits and the ledger of the quiet run.

draw.py      what is trained and what is done to it, from a seed; pure
models.py    models, optimizers and schedules of all trainings
steps_program.py, outer_program.py, ranks_program.py, kept_program.py
             the scripts of all trainings; their argument says which
play.py      one trial: the quiet run, the same under `elastic run` with its strikes, and what must hold afterwards
many.py      many trials, each in a process of its own, and their summary
__main__.py  python -m tests.fates --minutes 10; --seed 42 --trials 1 repeats one
"""
