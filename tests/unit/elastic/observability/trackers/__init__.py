from pathlib import Path

LIBRARIES = str(Path(__file__).parent / "libraries")
"""Directory with stand-ins for packages that only some have installed."""
