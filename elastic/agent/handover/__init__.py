"""One program takes another's place in the same process (execve): the process keeps its children and its descriptors.

    <name>.process.json     pid of the process and the version of its program; it takes over when it is sent SIGUSR2
    <name>.upgrade.json     the program that is to take its place; the asking process writes it before the signal
    <name>.upgraded.json    the result: written by the old program if it stays, else by the new one

All three lie in one directory and can be read by this user only. Besides open descriptors, the old program hands over a
file in memory, so that a full disk is no obstacle. Before anything is given up, the new program runs once beside the
old one, reads what it would be handed and checks its own options: a program that cannot start costs nothing.

    request_files.py  the three files, and the signal
    prepare.py        the old program's side, when it is asked
    trial_run.py      the trial of the new program
    exec_in_place.py  one program becomes the other
    __main__.py       the new program's side of the trial
"""

from elastic.agent.handover.exec_in_place import OPTION, Handed, begin, go, hear, without_option
from elastic.agent.handover.prepare import CALM_POLL_S, prepared, refuse, refuse_another, until
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
    "refuse_another",
    "until",
    "without_option",
]
