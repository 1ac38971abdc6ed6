"""`hf_classification.py` for a job that was started without --ranks: the script asks for its ranks itself."""

import runpy
from pathlib import Path

import transformers  # before the ranks are asked for

import elastic.ddp as ddp

ddp.enable(ranks=4)
assert transformers.Trainer.__init__.__wrapped__, "a framework that was imported before is adapted, too"
runpy.run_path(str(Path(__file__).with_name("hf_classification.py")))
