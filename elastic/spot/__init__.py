"""Notices that this machine is about to go: who gives them, and what its node does about them.

notice.py says what a notice is. Each provider has a file: a pure parser of its documents, and a `Source` that looks.
watch.py looks from a thread of its own; choose.py picks the sources; stay.py, pure, decides what the node does.
"""
