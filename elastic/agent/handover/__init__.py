"""One program takes another's place in the same process (execve): the process keeps its children and its descriptors.

    <name>.process.json     pid of the process and the version of its program; it takes over when it is sent SIGUSR2
    <name>.upgrade.json     what takes its place: written by whoever asks, before the signal
    <name>.upgraded.json    how it went: written by the old program if it stays, else by the new one

All three lie in one directory and can be read by this user only. What the old program hands to the new one, beside open
descriptors, is in memory that both share, so that no full disk can be in the way. Before anything is given up the new
program is run once beside the old one, and has to read what it would be handed and to check its own options: one that
cannot start costs nothing.

    request_files.py  the three files, and the signal
    prepare.py        what the old program does when it is asked
    trial_run.py      the new program is tried
    exec_in_place.py  one program becomes the other
    __main__.py       the new program's side of the trial
"""

from elastic.agent.handover.exec_in_place import OPTION, Handed, begin, go, hear, without_option
from elastic.agent.handover.prepare import CALM_POLL_S, prepared, refuse, until
from elastic.agent.handover.request_files import (
    SIGNAL,
    RunningProgram,
    UpgradeRefused,
    UpgradeRequest,
    UpgradeRequestFiles,
    of_this_program,
)
from elastic.agent.handover.trial_run import Trial, check

__all__ = [
    "CALM_POLL_S",
    "OPTION",
    "SIGNAL",
    "Handed",
    "RunningProgram",
    "Trial",
    "UpgradeRefused",
    "UpgradeRequest",
    "UpgradeRequestFiles",
    "begin",
    "check",
    "go",
    "hear",
    "of_this_program",
    "prepared",
    "refuse",
    "until",
    "without_option",
]
