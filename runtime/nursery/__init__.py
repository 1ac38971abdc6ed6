"""The process from which workers are forked: torch imported once, for all workers that this node ever starts."""
