"""Recipes of the audit."""
