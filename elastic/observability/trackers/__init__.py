"""The process beside a job's leader that sends applied steps to an experiment tracker.

__main__.py        `python -m elastic.observability.trackers`
process.py         what the process does: lines in, batches out, answers back; it tries again while its worker lives
mlflow_tracker.py  a run of an MLflow server, or of a database
wandb_tracker.py   a run of Weights & Biases, online or in files
wandb_files.py     which steps the files of an offline run hold

The libraries of trackers start threads, fork, draw random numbers and wait for networks. None of that may happen in a
worker, so the sink there (runtime/loop/sinks/trackers.py) only writes lines into a pipe. The process ends with its
worker: what it has not sent by then, the next leader's process sends.
"""
