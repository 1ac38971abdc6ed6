"""Jobs on the executors of Spark: the public name of elastic/platforms/spark."""

from elastic.platforms.spark import JobResult, run

__all__ = ["JobResult", "run"]
