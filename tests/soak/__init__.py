"""`make soak`: jobs that are broken or starved for long, and what they hold at the end."""
