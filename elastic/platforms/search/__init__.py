"""`elastic search study.py`: hyperparameter search. Optuna proposes and remembers, and each trial is a job.

    study.py --words of a trial--> search.py --begin, look, stop--> jobs of this machine or of a fleet
                                       |  what lasts: Optuna's storage in the search's directory, and the jobs

The search may be killed at any time: a trial is written down before its job begins, and its job is found by its name.

    study_file.py   what a study.py says
    decisions.py    what to do with a trial, by what is seen of its job. Pure
    local_jobs.py   a trial as `elastic run` on this machine
    fleet_jobs.py   a trial as a job of a fleet
    search.py       the search: asks Optuna, begins jobs, and tells Optuna what they gave
"""
