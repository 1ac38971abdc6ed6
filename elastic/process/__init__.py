"""What the processes of this program have in common: signals, what children inherit, and the habits of daemons.

memory_cgroups.py  the memory cgroups of this process
stop_signals.py    signals that ask processes to stop, and whose are obeyed
children.py        child processes: their environment, and how they end with their parent
log.py             log lines on standard error: as text or JSON, their level, which a signal changes
log_line.py        a line of it from a record, and the message from a line
notify.py          what systemd is told: ready, reloading, stopping, alive
option_file.py     options of a command from a TOML file
file_modes.py      who may read what a process writes
"""
