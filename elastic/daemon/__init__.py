"""What every process that runs for ever has in common with other daemons of a machine: log lines, systemd, settings.

log.py          log lines on standard error: as text or JSON, their level, which a signal changes
log_line.py     a line of it from a record, and the message from a line
notify.py       what systemd is told: ready, reloading, stopping, alive
option_file.py  options of a command from a TOML file
"""
