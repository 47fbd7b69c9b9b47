"""Rényi differential privacy of one step, and its conversion to (epsilon, delta)."""
