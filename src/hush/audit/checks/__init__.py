"""Checks of a private step against its charge: exact laws, p-values."""
