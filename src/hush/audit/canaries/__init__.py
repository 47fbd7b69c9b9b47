"""Canaries: lower bounds on epsilon from runs with planted records."""
