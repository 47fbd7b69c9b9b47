"""Recipes of twice sampling and hybrid clipping."""
