"""The report of a run: its facts, the words for them, and the page."""
