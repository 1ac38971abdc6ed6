"""Jobs on a Ray cluster: the public name of elastic/platforms/ray."""

from elastic.platforms.ray import JobResult, Trainer

__all__ = ["JobResult", "Trainer"]
