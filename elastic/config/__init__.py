"""What a job is and how long things may take: frozen, validated where it is written, read from TOML text. A ConfigError
names the field, its value, and a value that would do.

    names.py         what names, NAME=VALUE pairs and texts may be
    options.py       the values that options choose from, and how a field is described as an option
    outer_option.py  --outer: replicas that average seldom
    summing.py       the part of a job that says how gradients are summed and sent
    timing.py        every deadline of the control plane, and the relations between them
    job_spec.py      the job: its command, its workers, its options
    job_file.py      a job read from TOML text
"""

from elastic.config.job_file import Places, checked_fields, job_from_table, job_from_toml
from elastic.config.job_spec import JobSpec
from elastic.config.names import NAME, check_name, check_pairs, check_text, is_text
from elastic.config.options import Compression, Option, Overlap, Reduction, RingKind, Stragglers
from elastic.config.outer_option import Moments, OuterKind, OuterOption
from elastic.config.timing import Timing

__all__ = [
    "NAME",
    "Compression",
    "JobSpec",
    "Moments",
    "Option",
    "OuterKind",
    "OuterOption",
    "Overlap",
    "Places",
    "Reduction",
    "RingKind",
    "Stragglers",
    "Timing",
    "check_name",
    "check_pairs",
    "check_text",
    "checked_fields",
    "is_text",
    "job_from_table",
    "job_from_toml",
]
