"""Mutation testing: whether the unit tests notice a small change in the code that decides.

    python -m tests.mutation --sample 500 --seed 1

A seeded sample of all mutants of the modules in targets.py is tried: one operator, constant, condition or statement is
changed, and the unit tests of that module have to fail. What nobody can notice, because the program does the same, is
listed in equivalent.txt with the reason.

    mutate.py    where a module can be changed, and its code with that change
    targets.py   the modules, and the tests that have to notice
    trial.py     one mutant against its tests, in a process of its own
    __main__.py  the command
"""
