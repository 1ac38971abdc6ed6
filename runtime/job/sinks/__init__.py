"""Sinks for job.log_to: a file of JSON lines, and TensorBoard.

json_lines.py   a JSON object for each applied step
tensorboard.py  every scalar and learning rate over the steps
"""

from __future__ import annotations

from runtime.job.sinks.json_lines import JsonLines
from runtime.job.sinks.tensorboard import TensorBoard

__all__ = ["JsonLines", "TensorBoard"]
