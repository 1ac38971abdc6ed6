"""Sinks for job.log_to: a file of JSON lines, and TensorBoard."""

from __future__ import annotations

from runtime.sinks.jsonlines import JsonLines
from runtime.sinks.tensorboard import TensorBoard

__all__ = ["JsonLines", "TensorBoard"]
