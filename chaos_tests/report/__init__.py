"""What a person and a machine read of a judged run: a page, a document, and a JUnit file. Pure, given a history.

story.py      what happened to whom, and when
documents.py  JSON and JUnit
page.py       what the report has besides the page of the job
"""
