"""The dashboard beside `elastic run --dashboard`: it prints its address, and ends with that command."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from elastic.observability.dashboard import pages
from elastic.process import children


def main() -> int:
    run = os.getppid()
    children.die_with(run)
    parser = argparse.ArgumentParser(prog="elastic.observability.dashboard")
    parser.add_argument("--job-dir", type=Path, required=True)
    pages.serve_directory(parser.parse_args().job_dir, None, run, lambda address: print(address, flush=True))
    return 0


sys.exit(main())
