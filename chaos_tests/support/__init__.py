"""What the harness needs of the machine.

processes.py   processes that descend from a command
resources.py   what processes hold, and leave behind
json_lines.py  files of JSON lines while others write them
"""
