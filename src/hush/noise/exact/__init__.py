"""Samplers of exponential-power noise whose law is exactly the one charged."""
