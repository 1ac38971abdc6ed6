"""When replicas train by themselves, and when which fragment of the model is synchronised. Pure.

With P fragments, a fragment is synchronised every H inner steps, and another one every H / P: fragment p (from 0) after
(p + 1) H / P inner steps, and every H from there on (Douillard et al., "Streaming DiLoCo with overlapping
communication", 2025, section 2.2: fragments are staggered by floor(H / P)). What lies between two synchronisations is a
*round*, which is one step of the job. With one fragment a round is H inner steps, and the whole model is synchronised:
DiLoCo (Douillard et al., "DiLoCo: Distributed low-communication training of language models", 2023, algorithm 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RoundSchedule:
    """every: H, the inner steps between two synchronisations of a fragment. fragments: P. delay: how many inner steps
    before the end of a round the difference is taken that is sent (tau of Streaming DiLoCo).

    Raises ConfigError for numbers that do not go together.
    """

    every: int
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("every", self.every, 1),
            ("fragments", self.fragments, 1),
            ("delay", self.delay, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}={value!r} must be an integer of at least {least}")
        if self.every % self.fragments:
            raise ConfigError(
                f"every={self.every} must be a multiple of the {self.fragments} fragments, so that one of them is "
                f"synchronised every {self.every} / {self.fragments} inner steps"
            )
        if self.delay >= self.inner_steps:
            raise ConfigError(
                f"delay={self.delay} must be below every / fragments = {self.inner_steps}: a fragment is synchronised "
                "before the next one is sent"
            )

    @property
    def inner_steps(self) -> int:
        """Inner steps of a round: H / P."""
        return self.every // self.fragments

    @property
    def taken_after(self) -> int:
        """Inner steps of a round after which the difference to be sent is taken: H / P - delay, at least 1."""
        return self.inner_steps - self.delay

    def fragment(self, step: int) -> int:
        """The fragment that is synchronised at the end of this step of the job."""
        return step % self.fragments
