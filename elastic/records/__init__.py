"""What a job leaves on disk: its directory, its ledger, its journals, and what is told from them.

job_directory.py  what lies where, and who may use it
files.py          files that other processes read while they are written
journal.py        the event log of every process
story.py          what happened to a worker, or around a generation, and why
problems.py       what does not work at present although training goes on
alerts.py         what a person should hear of although the job goes on
ledger.py         steps.jsonl: a line for every applied step, each once
ledger_tail.py    how far a growing ledger is, and how fast
exactly_once.py   whether a ledger proves that each sample was used exactly once
resume.py         from which checkpoint `elastic run` goes on, and what is done again
retention.py      how much is kept of journals and of jobs that are over
job_files.py      which logs and journals of a job may be read from afar
host_memory.py    where a job keeps its newest state in this machine's memory
temp_dirs.py      directories that go with their process
"""
