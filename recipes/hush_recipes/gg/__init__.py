"""Recipes of the generalized Gaussian paper."""
