"""Mistakes in a training loop that would train something else without a word, made loud.

checks.py                the loop: passes, gradients, state that changes
unregistered.py          what the script trains but did not register
module_attributes.py     plain attributes of modules that a newcomer would not have
numerics_fingerprint.py  what decides the bits of a shard besides the script
"""
