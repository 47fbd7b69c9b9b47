"""Privacy loss distributions: certified epsilon and delta of composed steps."""
