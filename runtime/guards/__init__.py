"""Guards against mistakes in a training loop that would silently train something else.

checks.py                the loop: gradients, state that changes, workers that disagree
refusals.py              calls, passes and loops in the wrong place
unregistered.py          objects that the script trains but has not registered
module_attributes.py     plain attributes of modules that a newcomer would not have
numerics_fingerprint.py  what decides the bits of a shard besides the script
"""
