"""Sinks for job.log_to.

json_lines.py   a file with a JSON object for each applied step
tensorboard.py  every scalar and learning rate over the steps, in files of TensorBoard
trackers.py     the same for MLflow and for Weights & Biases, through a process beside the leader
"""

from __future__ import annotations

from runtime.loop.sinks.json_lines import JsonLines
from runtime.loop.sinks.tensorboard import TensorBoard
from runtime.loop.sinks.trackers import MLflow, WandB

__all__ = ["JsonLines", "MLflow", "TensorBoard", "WandB"]
