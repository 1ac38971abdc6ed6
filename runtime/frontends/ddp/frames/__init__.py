"""What stands in the frames of a script while it trains. A silent turn runs the script's own code once more, and what
that code does to counters, sums and averages has to be undone.

places.py        the values in the script's frames, where each of them is, and how another one is put there
plain_values.py  numbers, strings, lists and short tensors: undone, and given to newcomers
evaluation_values.py what an evaluation adds up in them: each rank's part, and what all ranks have together
model_copies.py  larger tensors: averages of the weights, and whatever else the script keeps beside the model
loop_shape.py    loops whose turns are counted where nothing can be undone, and what ends a loop
size_limits.py   sizes of what a script changes, where they are limited: for `elastic doctor --ranks`
"""
