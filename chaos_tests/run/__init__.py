"""A chaos run, from the words of a command line to its verdict.

request.py           from words to a campaign
campaign.py          the job undisturbed, and with faults
faulty_run.py        the run with faults
recorder.py          the harness's journal of a run
narrator.py          a line for each event a person wants to know of
checkpoint_audit.py  every checkpoint, read byte by byte
script_audit.py      which processes outlive their script
read_history.py      from files to a history
listing.py           what `elastic chaos list` shows
publish.py           judge a run, and write its reports
"""
