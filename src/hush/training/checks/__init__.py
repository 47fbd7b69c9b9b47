"""Checks before, beside and after a private run."""
