"""How the gradients of a job are summed, and by what they are carried: a part of JobSpec."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.config.options import Compression, Overlap, Reduction, RingKind, option
from elastic.config.outer_option import OuterOption
from elastic.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Summing:
    """Raises ConfigError for options that do not go together."""

    reduction: Reduction = option(
        "--reduction",
        "",
        Reduction.EXACT,
        "how gradients are summed: along a tree (exact) or as integers (fixed, fixed64), with the same bits for every "
        "number of workers; or in rank order (allreduce)",
    )

    compression: Compression = option(
        "--compression",
        "",
        Compression.NONE,
        "round gradients before they are sent, to half of the bytes, or to a quarter (int8); with --reduction exact or "
        "allreduce. The result differs from that of none; with exact it has the same bits for every number of workers",
    )

    outer: str = option(
        "--outer",
        "MODE",
        "",
        "diloco:H=N or localsgd:H=N: replicas make N inner steps by themselves before they average, as with "
        "job.steps(outer=elastic.DiLoCo(model, optimizer, every=N)) in the script. diloco takes lr= and momentum= of "
        "the outer steps, too, as in diloco:H=50,lr=0.7,momentum=0.9, and both take moments=own, mean or reset "
        "(default: the script says it, or gradients are summed in each step)",
    )

    overlap: Overlap = option(
        "--overlap",
        "",
        Overlap.AUTO,
        "whether gradients are summed while backward goes on; auto: on if the workers are on several machines. The "
        "bits are the same",
    )

    retain_results: bool = option(
        "--no-retain-results",
        "",
        True,
        "use less memory: do not keep the gradients of the last pass for a worker that missed them when another died; "
        "such a worker computes that pass again",
    )

    ring: RingKind = option(
        "--ring",
        "",
        RingKind.TCP,
        "how gradients are sent; nccl: by NCCL, with one GPU for each worker; mpi: by the MPI of one mpirun, needs "
        "elastic-ring[mpi]",
    )

    def __post_init__(self) -> None:
        OuterOption.parse(self.outer)
        if self.compression is not Compression.NONE and self.reduction in (Reduction.FIXED, Reduction.FIXED64):
            raise ConfigError(
                f"compression={str(self.compression)!r} rounds each sum of two, and "
                f"reduction={str(self.reduction)!r} takes sums in any order; use reduction='exact', or leave one out"
            )
        if not self.retain_results and not self.reduction.stable:
            raise ConfigError(
                f"retain_results=False needs reduction='exact' or 'fixed', not {str(self.reduction)!r}: what one "
                "member computes again must have the bits that the others have"
            )
