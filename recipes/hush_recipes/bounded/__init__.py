"""Recipes of the bounded-support Gaussian paper."""
