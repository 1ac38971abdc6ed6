"""What a person and a machine read of a judged run: a page, a document, and a JUnit file. Pure, given a history."""
