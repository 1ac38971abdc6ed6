"""What a person and a machine read of a judged run: a page, a document, and a JUnit file. Pure, given a history.

story.py      what the plots show
plots.py      the pictures of the page
documents.py  JSON, JUnit and the page
"""
