"""What the events of the journals mean, one at a time and together.

table.py     every event: its fields, its sentence, and where it is shown
page.py      docs/events.md, made from the table
__main__.py  `python -m elastic.records.events > docs/events.md`
story.py     what happened to a worker, or around a generation, and why
alerts.py    what an operator should hear of although the job goes on
problems.py  what does not work now although training goes on
"""
