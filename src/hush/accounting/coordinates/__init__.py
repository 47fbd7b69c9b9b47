"""Dominating pairs of coordinate-sampled Gaussian noise."""
