"""Guards against mistakes in a training loop that would silently train something else.

checks.py                the loop: passes, gradients, state that changes
unregistered.py          objects that the script trains but has not registered
module_attributes.py     plain attributes of modules that a newcomer would not have
numerics_fingerprint.py  what decides the bits of a shard besides the script
"""
