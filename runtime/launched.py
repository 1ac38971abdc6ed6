"""`python -m runtime.launched`: a worker of `elastic.launch()`, or of a job on Ray or Spark. It calls the function that
is in the file which the environment names, and leaves beside it what that returns."""

from __future__ import annotations

import os
from pathlib import Path

from elastic.agent.worker import function_file
from runtime.loop import job


def main(path: Path) -> None:
    function, arguments = function_file.read_function(path)
    value = function(*arguments)
    here = job.latest()
    rank = here.rank if here is not None else int(os.environ.get("RANK") or os.environ["ELASTIC_SLOT"])
    function_file.write_value(path.parent, rank, value)


if __name__ == "__main__":
    main(Path(os.environ[function_file.VARIABLE]))
