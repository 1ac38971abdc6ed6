"""What a launcher of fixed worlds has told this process: as which of how many it was started.

Pure: read from an environment. `elastic run` starts its workers itself, so one of these processes is enough
(one_of_many.py says what the others do).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Launch:
    """launcher: its name. key: the same for all that were started together, and for nobody else on this machine."""

    launcher: str
    key: str
    local_rank: int
    local_size: int


_SOURCES = (
    # launcher, processes, those of this machine, which of these, key
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "PMIX_NAMESPACE"),
    ("srun", "SLURM_STEP_NUM_TASKS", "", "SLURM_LOCALID", ""),
    ("mpiexec", "PMI_SIZE", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", ""),
)
"""Open MPI; Slurm, where SLURM_STEP_NUM_NODES says on how many machines; MPICH and its kin (Hydra)."""


def find(environment: Mapping[str, str], parent: int) -> Launch | None:
    """The launcher that started several processes of this command, or None. parent: pid of the parent process.

    Raises ConfigError if they are on several machines, or the environment contradicts itself.
    """
    for launcher, size_in, local_size_in, local_rank_in, key_in in _SOURCES:
        if environment.get(size_in, "") in ("", "0", "1"):
            continue
        try:
            size, local_rank = int(environment[size_in]), int(environment[local_rank_in])
            local_size = int(environment[local_size_in]) if local_size_in else size
            machines = int(environment.get("SLURM_STEP_NUM_NODES", "1")) if launcher == "srun" else 1
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"{size_in}={environment[size_in]!r}, as of {launcher}, but {local_rank_in} is missing or no number; "
                f"unset {size_in} if this is one process on purpose"
            ) from error
        if local_size != size or machines != 1:
            raise ConfigError(
                f"{launcher} started {size} processes on several machines, and `elastic run` is for one: "
                "start `elastic agent` once on each of them, and `elastic submit` the job"
            )
        step = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}" if launcher == "srun" else ""
        key = environment.get(key_in, "") if key_in else step
        return Launch(launcher, f"{launcher}-{key or parent}", local_rank, local_size)
    return None
