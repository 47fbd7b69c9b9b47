"""Recipes of DPSUR: selective update and release."""
