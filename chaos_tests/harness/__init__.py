"""What breaks (faults), when (schedules), what happened (history), and who judges it (checkers)."""
