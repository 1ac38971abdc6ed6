"""A job's files on disk: its directory, its ledger, its journals, and reports made from them.

job_directory.py  the files of a job directory, and its locks
files.py          files that other processes read while they are written
journal.py        the event log of every process
events/           what its events mean: the table of all, and what is told from them
flight_recorder.py  what each worker did last, kept when it is killed
last_notes.py     the same in words, and who waits for whom
ledger.py         steps.jsonl: a line for every applied step, each once
ledger_tail.py    how far a growing ledger is, and how fast it grows
exactly_once.py   whether a ledger proves that each sample was used exactly once
resume.py         from which checkpoint `elastic run` goes on, and which steps are done again
retention.py      how many journals, and jobs that are over, are kept
job_follower.py   follows the journals and the ledger of a job that other processes write
job_files.py      the logs and journals of a job that may be read remotely
host_memory.py    where a job keeps its newest state in this machine's memory
temp_dirs.py      directories that end with their process
"""
