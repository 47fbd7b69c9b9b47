"""Checks that a model keeps the records of a batch apart."""
