"""Jobs on the executors of Spark: `elastic.spark.run(train, workers=(2, 8))`.

Each agent is a job of Spark with one task, so that Spark's limits on failures of a stage do not end the training: what
has failed is given to Spark again, as a new node.

    launcher.py       the public function: the jobs of Spark from the start of ours to its end
    executor_task.py  what runs on an executor
"""

from elastic.platforms.common.job_driver import JobResult
from elastic.platforms.spark.launcher import run

__all__ = ["JobResult", "run"]
