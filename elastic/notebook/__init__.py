"""`elastic.launch`: a function of a notebook or of a program, trained by workers on this machine.

launcher.py       `elastic run` as a child, what it says, and what becomes of the function
function_file.py  the function on its way to the workers, and its value on the way back: files that this user alone owns
cell_output.py    what a notebook shows meanwhile
"""
