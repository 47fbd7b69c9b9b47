"""Distinguishing attacks on every mechanism that is charged."""
