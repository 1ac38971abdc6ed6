"""Any torchrun program: its processes are started again, with a new world, whenever a worker is lost or joins.

A worker of such a job trains nothing itself. It is a member of the job like any other worker, and the script runs in
child processes of it, as under torchrun's agent: with torchrun's environment, for one *round*. A round is a generation
of the job: when the generation changes, all workers end their scripts and start them for the new one.

rounds.py        a round, and what has ended it. Pure
script_failure.py  how a script has failed, and which failure is the cause. Pure, but for the file that it reads
step_records.py  the lines of the ledger of a job that keeps its state. Pure
places.py        which processes of the script a worker has, and what each finds in its environment. Pure
script_host.py   the process between a worker and one of its scripts: it forks it, and ends it when the worker is silent
scripts.py       the scripts of one worker
script_timers.py torch's timers of scripts, whose expiry ends one
script_watch.py  what /proc says of a running script: whether it is stopped, and how long it has used no processor
kept_trainer.py  transformers.Trainer, kept in memory without a line in the script
kept_lightning.py  Lightning's Trainer, the same
kept_accelerate.py  loops over what accelerate prepares, the same
kept_averages.py  averages of the weights in the objects of such a script
script_values.py  what such a script counts in its frames, for its next process
kept_sources.py  where what was kept is, for the scripts of a worker
supervisor.py    the worker: from one exchange with the other workers to the next
"""
