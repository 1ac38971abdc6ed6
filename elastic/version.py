"""The version of this program, which agents, replicas and daemons tell each other and write into journals."""

__version__ = "0.1.0"
