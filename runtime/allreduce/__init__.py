"""The exact sum of what the members of a generation have computed.

ring/         connections between the members of a generation
fixed_point/  floats as integers, whose sum has the same bits in any order
reduction/    the sum of a step's gradients
"""
