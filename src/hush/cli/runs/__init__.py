"""Runs: training, tuning, PATE, and the audit and report of what they left."""
