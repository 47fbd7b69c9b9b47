"""Selective release, public bases, and private statistics."""
