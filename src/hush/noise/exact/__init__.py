"""Exact samplers of exponential-power noise."""
